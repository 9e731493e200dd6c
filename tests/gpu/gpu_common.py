"""What the sections of `check.py` share: settings, outcomes, tensors, and what equality means."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FILLS = ("normal", "relu", "zeros", "constant", "denormal", "huge", "outliers", "inf", "nan")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 3),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, :, :, ::2],
    "expanded": lambda x: x[:1].expand_as(x),
}


@dataclass(frozen=True)
class Settings:
    """How much to do, and where.

    Args:
        device: Where the checks run.
        quick: A few cases of each section only.
        deadline: When the last section should be over, in seconds of `time.monotonic`.
    """

    device: torch.device
    quick: bool
    deadline: float

    @property
    def cuda(self) -> bool:
        """Whether this is about a GPU."""
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """Time until the deadline."""
        return self.deadline - time.monotonic()


@dataclass
class Outcome:
    """What a section found."""

    checks: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)

    def expect(self, right: bool, what: str) -> None:
        """Counts a check; ``what`` says what was checked and is kept if it was not right."""
        self.checks += 1
        if not right:
            self.failures.append(what)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def filled(shape: tuple[int, ...], fill: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A CPU tensor of ordinary or extreme values."""
    generator = torch.Generator().manual_seed(seed)
    x, u = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    limit = torch.finfo(dtype if dtype != torch.float64 else torch.float32)
    values = {
        "relu": lambda: x.relu(),
        "zeros": lambda: torch.where(x > 0, 0.0, -0.0),
        "constant": lambda: torch.full_like(x, 0.1),
        "denormal": lambda: x * limit.tiny / 4,
        "huge": lambda: x.sign() * limit.max * u,
        "outliers": lambda: torch.where(u < 0.02, x * 1000, x),
    }
    x = values.get(fill, lambda: x)().to(dtype)
    if fill in ("inf", "nan"):
        x.view(-1)[x.numel() // 2] = math.inf if fill == "inf" else math.nan
    return x


def same(given: Tensor, expected: Tensor, any_nan: bool = False) -> bool:
    """Equal bit for bit, and in shape, stride and dtype.

    Args:
        given: On any device.
        expected: On any device.
        any_nan: One NaN is like another: a cast or a sum may change its bits.
    """
    given, expected = given.detach().cpu(), expected.detach().cpu()
    if (given.dtype, given.shape) != (expected.dtype, expected.shape):
        return False
    if given.stride() != expected.stride():
        return False
    if any_nan:
        given, expected = (torch.where(t.isnan(), math.nan, t) for t in (given, expected))
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (given, expected))
    return torch.equal(a, b)


def all_same(given: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """`same` for each pair."""
    return all(same(a, b) for a, b in zip(given, expected, strict=True))
