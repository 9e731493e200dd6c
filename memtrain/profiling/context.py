"""Where a step is at any moment: phase, module, torch function, and the user's own line of code.

In the forward pass a stack of modules and torch functions tells. In the backward pass the running
autograd node does: the sequence numbers that a function took are noted as it ends, so the node
leads back to the function, the module and the line that made it.
"""

from __future__ import annotations

import bisect
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.overrides import TorchFunctionMode

from .._calls import follow_modules, function_name

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

#: What a block does when it runs a second time inside the backward pass.
RECOMPUTE = "recompute"


class Site(NamedTuple):
    """Who makes a tensor.

    Args:
        module: Dotted name of the innermost module, "" for the model itself and the loss.
        function: The torch function, "" when an operator ran outside of any.
        line: Innermost line that is neither torch's nor ours, as ``model.py:31 in forward``.
    """

    module: str = ""
    function: str = ""
    line: str = ""


NOWHERE = Site()


class Context(TorchFunctionMode):
    """Follows one model through forward, backward and optimizer while it is entered.

    Args:
        model: The model whose submodules are named; None names none.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self._model = model
        self._modules: list[str] = []
        self._calls: list[Site] = []
        self._stepping: list[str] = []
        # Who made the graph nodes from a sequence number on, up to the next number in the list.
        self._firsts: list[int] = []
        self._makers: list[Site] = []
        self._covered = 0
        self._phase = FORWARD
        self._lines: dict[tuple[CodeType, int], str] = {}
        self._undo: list[Callable[[], None]] = []
        self._parameters: dict[int, str] = {}

    def __enter__(self) -> Context:
        if self._model is not None:
            self._undo.append(follow_modules(self._model, self._modules))
            for name, parameter in self._model.named_parameters():
                self._parameters[id(parameter)] = name.rpartition(".")[0]
        self._undo.append(register_optimizer_step_pre_hook(self._begin_step).remove)
        self._undo.append(register_optimizer_step_post_hook(self._end_step).remove)
        self._covered = _get_sequence_nr()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        while self._undo:
            self._undo.pop()()
        self._parameters.clear()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Notes the call and makes it."""
        name = function_name(func)
        if name == "__get__":  # attributes such as .shape
            return func(*args, **(kwargs or {}))
        module = self._modules[-1] if self._modules else ""
        site = Site(module, name, self._user_line(sys._getframe(1)))
        self._note_nodes(Site(module))  # of an autograd.Function before this call
        self._calls.append(site)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._calls.pop()
            self._note_nodes(site)

    def phase(self) -> str:
        """``"forward"``, ``"backward"`` or ``"optimizer"``.

        The loss belongs to the first, and what happens to the gradients before the optimizer's
        step (clipping, unscaling) to the last.
        """
        if torch._C._current_graph_task_id() != -1:
            self._phase = BACKWARD
        elif self._stepping:
            self._phase = OPTIMIZER
        elif self._phase == FORWARD or self._modules or torch.is_grad_enabled():
            self._phase = FORWARD
        else:
            self._phase = OPTIMIZER
        return self._phase

    def site(self) -> Site:
        """Where the operator that runs now belongs."""
        if torch._C._current_graph_task_id() == -1:
            if self._stepping:
                return Site("", self._stepping[-1])
            if self._calls:
                return self._calls[-1]
            site = Site(self._modules[-1]) if self._modules else NOWHERE
            self._note_nodes(site)
            return site
        node = torch._C._current_autograd_node()
        if self._modules:
            return Site(self._modules[-1], RECOMPUTE)
        return NOWHERE if node is None else self._maker(node)

    def _maker(self, node: Any) -> Site:
        variable = getattr(node, "variable", None)
        if variable is not None:  # a parameter takes its gradient
            return Site(self._parameters.get(id(variable), ""), "accumulate")
        index = bisect.bisect_right(self._firsts, node._sequence_nr()) - 1
        return self._makers[index] if index >= 0 else NOWHERE

    def _note_nodes(self, site: Site) -> None:
        """Graph nodes made since the last note are those of ``site``."""
        upto = _get_sequence_nr()
        if upto > self._covered:
            self._firsts.append(self._covered)
            self._makers.append(site)
            self._covered = upto

    def _begin_step(self, optimizer: Any, *_: Any) -> None:
        self._stepping.append(f"{type(optimizer).__name__}.step")

    def _end_step(self, *_: Any) -> None:
        if self._stepping:
            self._stepping.pop()

    def _user_line(self, frame: FrameType | None) -> str:
        while frame is not None:
            name = frame.f_code.co_filename
            ours = name.startswith(_OURS) and not name.startswith(_FAMILIES)
            if not ours and not name.startswith((_TORCH, "<")):
                key = (frame.f_code, frame.f_lineno)
                if key not in self._lines:
                    place = f"{_without_folders(name)}:{frame.f_lineno}"
                    self._lines[key] = f"{place} in {frame.f_code.co_name}"
                return self._lines[key]
            frame = frame.f_back
        return ""


def _without_folders(path: str) -> str:
    """As it is imported, or from the working directory: a profile may be sent around."""
    _, packaged, inside = path.rpartition(f"site-packages{os.sep}")
    if packaged:
        return inside
    here = os.getcwd() + os.sep
    return path.removeprefix(here) if path.startswith(here) else os.path.basename(path)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_FAMILIES = os.path.join(_OURS, "families") + os.sep  # a family is a model like the user's own
