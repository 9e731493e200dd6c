"""Which backend serves an op on a device, and why.

``MEMTRAIN_KERNELS`` is read once, at import: ``auto`` (the default) takes the first backend that
can serve, a name forces that one, and a forced backend that cannot serve is an error.

Another package adds a backend through an entry point in the group ``memtrain.kernels`` whose object
is a `Backend`; it is asked before the built-in ones, and loaded at the first op.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

import torch

ENTRY_POINT_GROUP = "memtrain.kernels"
VARIABLE = "MEMTRAIN_KERNELS"
_BUILT_IN = ("triton", "cpu", "reference")


@dataclass(frozen=True)
class Backend:
    """Implementations of some of the ops on some devices.

    Attributes:
        name: What `MEMTRAIN_KERNELS` and `explain` call it.
        module: The module holding one function per op served, named and called like the function
            in `memtrain_kernels.reference`; imported at first use.
        why_not: Given a device, the reason why it cannot serve, or None when it can. It must be
            cheap and must not raise.
        ops: The ops it serves; None means all.
    """

    name: str
    module: str
    why_not: Callable[[torch.device], str | None]
    ops: frozenset[str] | None = None

    def refusal(self, op: str, device: torch.device) -> str | None:
        """Why this backend does not serve `op` on `device`; None when it does."""
        if self.ops is not None and op not in self.ops:
            return f"has no kernel for {op}"
        return self.why_not(device)


@dataclass(frozen=True)
class Choice:
    """What `explain` found.

    Attributes:
        op: Name of the op.
        device: Where the tensor lives.
        backend: The backend that serves.
        refused: (backend, reason) of those asked before it.
        forced: Whether `MEMTRAIN_KERNELS` named the backend.
    """

    op: str
    device: str
    backend: str
    refused: tuple[tuple[str, str], ...] = ()
    forced: bool = False

    def __str__(self) -> str:
        if self.forced:
            why = f"forced by {VARIABLE}={self.backend}"
        else:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.refused) or "first choice"
        return f"memtrain::{self.op} on {self.device}: {self.backend} ({why})"


def _why_not_cpu(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"serves CPU tensors only, not {device.type}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install numba)"
    return None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _why_not_triton(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device.type != "cuda" and not (_interpreting() and device.type == "cpu"):
        return f"serves CUDA and ROCm tensors only, not {device.type}"
    return None


_BACKENDS = {
    "triton": Backend("triton", "memtrain_kernels.triton", _why_not_triton),
    "cpu": Backend("cpu", "memtrain_kernels.cpu", _why_not_cpu),
    "reference": Backend("reference", "memtrain_kernels.reference", lambda device: None),
}


def _plugin_names() -> tuple[str, ...]:
    return tuple(sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)}))


def _read_variable() -> str:
    value = os.environ.get(VARIABLE, "auto")
    valid = ("auto", *reversed(_BUILT_IN), *_plugin_names())
    if value not in valid:
        raise ValueError(f"{VARIABLE}={value!r}; valid values are {', '.join(valid)}")
    return value


_setting = _read_variable()


@functools.cache
def backends() -> tuple[Backend, ...]:
    """Every backend, in the order in which they are asked."""
    plugins = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        backend = point.load()
        if not isinstance(backend, Backend) or backend.name != point.name:
            raise TypeError(
                f"entry point {point.name!r} in group {ENTRY_POINT_GROUP!r} is {backend!r};"
                f" expected a memtrain_kernels.Backend with the name {point.name!r}"
            )
        plugins.append(backend)
    return (*plugins, *(_BACKENDS[name] for name in _BUILT_IN))


@functools.cache
def _choose(op: str, device_type: str, setting: str) -> Choice:
    device = torch.device(device_type)
    refused = []
    for backend in backends():
        if setting not in ("auto", backend.name):
            continue
        reason = backend.refusal(op, device)
        if reason is None:
            return Choice(op, device_type, backend.name, tuple(refused), setting != "auto")
        refused.append((backend.name, reason))
    name, reason = refused[-1]
    raise RuntimeError(
        f"{VARIABLE}={setting} forces the {name} kernels, but for memtrain::{op} this backend"
        f" {reason}; unset {VARIABLE} or set it to auto"
    )


@functools.cache
def _load(op: str, name: str) -> Callable[..., object]:
    (backend,) = (b for b in backends() if b.name == name)
    return getattr(importlib.import_module(backend.module), op)


def implementation(op: str, device: torch.device) -> Callable[..., object]:
    """The function that serves `op` on `device`."""
    return _load(op, _choose(op, device.type, _setting).backend)


def explain(op: str, tensor: torch.Tensor) -> Choice:
    """Which backend serves an op on this tensor, and why; ``str()`` of the result is a sentence.

    Raises:
        ValueError: There is no such op.
        RuntimeError: `MEMTRAIN_KERNELS` forces a backend that cannot serve.

    Example:
        >>> explain("pack_bits", torch.zeros(3, dtype=torch.bool)).device
        'cpu'
    """
    from ._schemas import SCHEMAS

    if op not in SCHEMAS:
        raise ValueError(f"there is no op {op!r}; the ops are {', '.join(SCHEMAS)}")
    return _choose(op, tensor.device.type, _setting)
