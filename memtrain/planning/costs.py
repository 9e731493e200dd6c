"""How long a step takes, estimated operator by operator: a roofline of products and bytes moved.

An operator with a formula in torch's flop counter takes its arithmetic at the machine's rate for
matrix products, every other one the bytes it reads and writes at the machine's bandwidth, and
whichever of the two is longer counts. Good enough to compare policies of one step; not a promise.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ..profiling import Context
from ..profiling.holders import storages_of
from .machine import Machine


class StepSeconds(TorchDispatchMode):
    """Estimated seconds of the operators inside, by phase, module and function.

    Args:
        context: Entered before the step; says where an operator runs.
        machine: Its rates.
    """

    supports_higher_order_operators = True

    def __init__(self, context: Context, machine: Machine) -> None:
        super().__init__()
        self._context = context
        self._machine = machine
        #: Phase -> seconds.
        self.phases: dict[str, float] = defaultdict(float)
        #: (module, function) -> seconds in the forward pass.
        self.forward: dict[tuple[str, str], float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        seconds = self._seconds(func, args, kwargs or {}, result)
        phase = self._context.phase()
        self.phases[phase] += seconds
        if phase == "forward":
            module, function, _ = self._context.site()
            self.forward[module, function] += seconds
        return result

    @property
    def total(self) -> float:
        """Of the whole step."""
        return sum(self.phases.values())

    def _seconds(self, func: Any, args: tuple, kwargs: dict, result: Any) -> float:
        read = _storages((args, kwargs))
        written = _storages(result)
        fresh = {key: size for key, size in written.items() if key not in read}
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is None and not fresh and not func._schema.is_mutable:
            return 0.0  # a view
        seconds = (sum(read.values()) + sum(fresh.values())) / self._machine.bytes_per_second
        if formula is not None:
            seconds = max(
                seconds, formula(*args, **kwargs, out_val=result) / self._machine.flops_per_second
            )
        return seconds


def _storages(value: Any) -> dict[int, int]:
    return {
        storage._cdata: storage.nbytes()
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
        for storage in storages_of(leaf)
    }
