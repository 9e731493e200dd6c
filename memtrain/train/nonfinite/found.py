"""What a search for the first bad tensor found, and how it is said."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from ...compressors import SlotKey
from ..errors import USUAL_ADVICE
from .counting import Count

_FORWARD, _BACKWARD = "First bad tensor: ", "The loss is finite. First bad gradient: "
_SUBJECTS = {
    "parameter": "The parameter {name} was bad before the forward",
    "buffer": _FORWARD + "the buffer {name}",
    "batch": _FORWARD + "{name}, before the forward",
    "input": _FORWARD + "an input of `{name}` {where}",
    "function": _FORWARD + "the result of `{name}` {where}",
    "backward": _BACKWARD + "what the backward of `{name}` {where} gave",
    "reached": _BACKWARD + "what reached the backward of `{name}` {where}",
    "gradient": _BACKWARD + "that of the parameter {name}",
    "decoding": "The loss is finite. First bad tensor: the policy decoded the saved tensor {name}",
}


@dataclass(frozen=True)
class NonFinite:
    """The first tensor that was not finite.

    Args:
        kind: ``parameter``, ``buffer`` or ``batch``: it was bad before the forward; ``input``: it
            came from where torch functions do not show; ``function``: a function made it from good
            inputs; ``decoding``: the policy decoded it from a good saved tensor; ``backward``: the
            backward of a function made it from a good gradient; ``reached`` and ``gradient``: good
            gradients have a bad sum, which reached a function or a parameter.
        name: Of the parameter, buffer, item of the batch, function or slot.
        module: Dotted name of the innermost module that ran, "" for the model itself and None
            outside of it.
        shape: Of the tensor.
        dtype: Its type, such as ``float32``.
        nan: Elements that are NaN.
        inf: Elements that are +inf.
        negative_inf: Elements that are -inf.
        largest_input: Largest finite magnitude among the inputs, where there are any.
        remark: What else is worth knowing, as the end of a sentence.
        parameter: In the backward pass, the first parameter whose gradient went bad.
        policy: The policy it was found under, "" for none.
        plain_finite: Whether the same pass is finite without that policy; None when not known.
    """

    kind: str
    name: str
    module: str | None
    shape: tuple[int, ...]
    dtype: str
    nan: int
    inf: int
    negative_inf: int
    largest_input: float | None = None
    remark: str = ""
    parameter: str = ""
    policy: str = ""
    plain_finite: bool | None = None

    @classmethod
    def of(
        cls,
        kind: str,
        name: str,
        module: str | None,
        x: Tensor,
        count: Count,
        largest_input: float | None = None,
        remark: str = "",
    ) -> NonFinite:
        """What is to be said about the tensor ``x``."""
        dtype = str(x.dtype).removeprefix("torch.")
        return cls(kind, name, module, tuple(x.shape), dtype, *count, largest_input, remark)

    @property
    def in_backward(self) -> bool:
        """Whether the forward was finite."""
        return self.kind in ("backward", "reached", "gradient", "decoding")

    @property
    def place(self) -> str:
        """A few words for the middle of a sentence."""
        if self.kind == "function":
            return f"`{self.name}` {_where(self.module)}"
        if self.kind == "input":
            return f"outside, first read by `{self.name}` {_where(self.module)}"
        return self.name if self.kind == "batch" else f"the {self.kind} {self.name}"

    @property
    def advice(self) -> str:
        """What to change about it."""
        if self.plain_finite:
            slot = SlotKey.parse(self.name) if self.kind == "decoding" else None
            where = f", module: {slot.module}" if slot and slot.module else ""
            where += f", function: {slot.function}" if slot else ""
            return (
                f"Put a rule {{name: none{where}}} before the others in policy.rules, give it more "
                "bits, or set policy=none."
            )
        if self.kind == "batch":
            return "Look at the data, or at what prepares it."
        if self.kind == "backward":
            return (
                "Keep what that function gets away from where its derivative is not finite, or "
                "lower train.optimizer.lr."
            )
        return USUAL_ADVICE

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "shape": list(self.shape)}

    def __str__(self) -> str:
        counts = ((self.nan, "NaN"), (self.inf, "inf"), (self.negative_inf, "-inf"))
        held = " and ".join(f"{count} {name}" for count, name in counts if count)
        total = math.prod(self.shape) * (2 if self.dtype.startswith("complex") else 1)
        subject = _SUBJECTS[self.kind].format(name=self.name, where=_where(self.module))
        text = f"{subject}, {self.dtype} {list(self.shape)}, {held} of {total}"
        text += f"; {self.remark}." if self.remark else "."
        if self.parameter:
            text += f" The first parameter it reached is {self.parameter}."
        if not self.policy:
            return text
        verdict = {
            True: f"is finite: the policy {self.policy} is the cause.",
            False: f"is not finite either: the policy {self.policy} is not the cause.",
            None: f"could not be made, so it may or may not be the policy {self.policy}.",
        }[self.plain_finite]
        part = "step" if self.in_backward else "forward"
        return f"{text} The same {part} without compression {verdict}"


def _where(module: str | None) -> str:
    if module is None:
        return "outside of the model"
    return f"in module {module}" if module else "in the model's own forward"
