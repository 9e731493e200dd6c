"""Codes to bit planes and back, one group at a time: see `_layout.PLANES`."""

from __future__ import annotations

from .scalars import inline, u8


@inline
def _pack4(q, out, n, shift):
    a, b = q[:n], q[n : 2 * n]
    for j in range(n):
        out[j] = u8(((a[j] >> shift) & u8(15)) | ((b[j] >> shift) << u8(4)))


@inline
def _pack2(q, out, n, shift):
    a, b, c, d = q[:n], q[n : 2 * n], q[2 * n : 3 * n], q[3 * n : 4 * n]
    three = u8(3)
    for j in range(n):
        low = ((a[j] >> shift) & three) | (((b[j] >> shift) & three) << u8(2))
        high = (((c[j] >> shift) & three) << u8(4)) | (((d[j] >> shift) & three) << u8(6))
        out[j] = u8(low | high)


@inline
def _pack1(q, out, n, shift):
    a, b, c, d = q[:n], q[n : 2 * n], q[2 * n : 3 * n], q[3 * n : 4 * n]
    e, f, g, h = q[4 * n : 5 * n], q[5 * n : 6 * n], q[6 * n : 7 * n], q[7 * n : 8 * n]
    one = u8(1)
    for j in range(n):
        low = ((a[j] >> shift) & one) | (((b[j] >> shift) & one) << u8(1))
        low |= (((c[j] >> shift) & one) << u8(2)) | (((d[j] >> shift) & one) << u8(3))
        high = (((e[j] >> shift) & one) << u8(4)) | (((f[j] >> shift) & one) << u8(5))
        high |= (((g[j] >> shift) & one) << u8(6)) | (((h[j] >> shift) & one) << u8(7))
        out[j] = u8(low | high)


@inline
def pack_planes(q, out, bits, group):
    """group codes -> group * bits / 8 bytes."""
    if bits == 8:
        for j in range(group):
            out[j] = q[j]
    elif bits == 4:
        _pack4(q, out, group // 2, u8(0))
    elif bits == 6:
        _pack4(q, out, group // 2, u8(0))
        _pack2(q, out[group // 2 :], group // 4, u8(4))
    elif bits == 1:
        _pack1(q, out, group // 8, u8(0))
    else:
        _pack2(q, out, group // 4, u8(0))
        if bits == 3:
            _pack1(q, out[group // 4 :], group // 8, u8(2))


@inline
def _unpack_plane(packed, q, n, width, shift):
    """Set (shift 0) or OR in one plane of n bytes."""
    mask = u8((1 << width) - 1)
    for k in range(8 // width):
        right = u8(width * k)
        part = q[k * n :]
        if shift == 0:
            for j in range(n):
                part[j] = u8((packed[j] >> right) & mask)
        else:
            for j in range(n):
                part[j] = u8(part[j] | (((packed[j] >> right) & mask) << u8(shift)))


@inline
def unpack_planes(packed, q, bits, group):
    """group * bits / 8 bytes -> group codes."""
    if bits == 8:
        for j in range(group):
            q[j] = packed[j]
    elif bits == 4:
        _unpack_plane(packed, q, group // 2, 4, 0)
    elif bits == 6:
        _unpack_plane(packed, q, group // 2, 4, 0)
        _unpack_plane(packed[group // 2 :], q, group // 4, 2, 4)
    elif bits == 1:
        _unpack_plane(packed, q, group // 8, 1, 0)
    else:
        _unpack_plane(packed, q, group // 4, 2, 0)
        if bits == 3:
            _unpack_plane(packed[group // 4 :], q, group // 8, 1, 2)
