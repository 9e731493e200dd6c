"""The rotation of one group: random signs and a Walsh-Hadamard transform, as vector code."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .scalars import inline, instruction


def _hadamard(group, inverse):
    """A function of (v, words, norm) that rotates float32 v[:group] in place, or rotates it back.

    Bit i % 32 of words[i // 32] negates element i, before the transform or, for the inverse, after.
    Written as vector instructions, because LLVM vectorises no loop over neighbours 1, 2, 4 and 8
    apart; the whole group stays in registers. Each stage h pairs i with i ^ h as the textbook does:
    the lower one becomes the sum, the upper one lower - upper.
    """
    lanes = 16
    vector, word = ir.VectorType(ir.FloatType(), lanes), ir.VectorType(ir.IntType(32), lanes)
    count = group // lanes

    def flip(builder, row, mask):
        return builder.bitcast(builder.xor(builder.bitcast(row, word), mask), vector)

    def broadcast(builder, scalar, type_):
        one = builder.insert_element(ir.Constant(type_, ir.Undefined), scalar, ir.IntType(32)(0))
        return builder.shuffle_vector(one, one, ir.Constant(word, [0] * lanes))

    def signs(builder, words):
        for k in range(count):
            pointer = builder.gep(words, [ir.IntType(64)(k * lanes // 32)])
            bits = broadcast(builder, builder.load(pointer), word)
            places = [(k * lanes) % 32 + i for i in range(lanes)]
            bit = builder.lshr(bits, ir.Constant(word, places))
            yield builder.shl(bit, ir.Constant(word, [31] * lanes))

    def codegen(context, builder, signature, args):
        def data(k):
            return context.make_array(signature.args[k])(context, builder, args[k]).data

        start = builder.bitcast(data(0), vector.as_pointer())
        at = [builder.gep(start, [ir.IntType(64)(k)]) for k in range(count)]
        norm = broadcast(builder, args[2], vector)
        rows = [builder.fmul(builder.load(p, align=4), norm) for p in at]
        masks = list(signs(builder, data(1)))
        if not inverse:
            rows = [flip(builder, row, mask) for row, mask in zip(rows, masks, strict=True)]
        for h in (1, 2, 4, 8):
            swap = ir.Constant(word, [i ^ h for i in range(lanes)])
            upper = ir.Constant(word, [-(1 << 31) if i & h else 0 for i in range(lanes)])
            others = [builder.shuffle_vector(row, row, swap) for row in rows]
            rows = [
                builder.fadd(other, flip(builder, row, upper))
                for other, row in zip(others, rows, strict=True)
            ]
        h = 1
        while h < count:
            for k in range(count):
                if not k & h:
                    a, b = rows[k], rows[k | h]
                    rows[k], rows[k | h] = builder.fadd(a, b), builder.fsub(a, b)
            h *= 2
        if inverse:
            rows = [flip(builder, row, mask) for row, mask in zip(rows, masks, strict=True)]
        for p, row in zip(at, rows, strict=True):
            builder.store(row, p, align=4)
        return context.get_dummy_value()

    def typer(typingctx, v, words, norm):
        return types.void(v, words, norm), codegen

    return instruction(typer)


_rotate64, _rotate128, _rotate256 = (
    _hadamard(64, False),
    _hadamard(128, False),
    _hadamard(256, False),
)
_back64, _back128, _back256 = _hadamard(64, True), _hadamard(128, True), _hadamard(256, True)


@inline
def rotate(v, words, norm, group):
    if group == 64:
        _rotate64(v, words, norm)
    elif group == 128:
        _rotate128(v, words, norm)
    else:
        _rotate256(v, words, norm)


@inline
def rotate_back(v, words, norm, group):
    if group == 64:
        _back64(v, words, norm)
    elif group == 128:
        _back128(v, words, norm)
    else:
        _back256(v, words, norm)
