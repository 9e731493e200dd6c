"""Which module and which torch function is running, and who takes what they save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def function_name(func: Callable) -> str:
    """Its name in torch; an operator of another library does not mean what its namesake does."""
    packet = getattr(func, "overloadpacket", func)  # mul.Tensor -> mul
    qualified = getattr(packet, "_qualified_op_name", "aten::")
    if qualified.startswith("aten::"):
        return getattr(packet, "__name__", "")
    return qualified.replace("::", ".")


def follow_modules(model: nn.Module, running: list[str]) -> Callable[[], None]:
    """Keeps the names of the submodules that run on the stack ``running``.

    Args:
        model: Its submodules get forward hooks.
        running: The innermost module is last; the model itself is not on it.

    Returns:
        A function that takes the hooks off again.
    """
    handles = []

    def install(module: nn.Module, name: str) -> None:
        def enter(*_: Any) -> None:
            running.append(name)

        def leave(*_: Any) -> None:
            if running:
                running.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))

    for name, module in model.named_modules():
        if name:
            install(module, name)

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def top_hooks() -> tuple[Any, Any] | None:
    """The saved-tensor hooks that the next saved tensor reaches."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore


def inside_checkpoint() -> bool:
    """Whether a checkpoint takes what is saved now, in its first or in its second forward."""
    top = top_hooks()
    name = getattr(top[0], "__qualname__", "") if top else ""
    return "_checkpoint_hook" in name or "_recomputation_hook" in name
