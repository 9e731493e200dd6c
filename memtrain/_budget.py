"""A byte budget for the peak of a whole step, as a user writes it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from ._config import option
from ._errors import ConfigError, MemtrainError
from ._units import parse_bytes

_PERCENT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*%\s*")


@dataclass(frozen=True)
class Budget:
    """``policy: {budget: 1.5GiB}``: the planner chooses what happens to every tensor and block."""

    budget: str | int = option(
        help="Bytes that the step's peak stays below, such as 1.5GiB; or a share of the plain "
        "step's, such as 60%."
    )
    margin: float = option(0.0, "Share of the budget to leave free.")
    error_weight: float = option(
        10.0, "What a squared relative gradient error of 1 costs, in times of a plain step."
    )
    offload: bool = option(
        False, "Also move tensors to host memory, or to disk where there is no device."
    )

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.margin < 1:
            problems.append(f"margin: {self.margin:g} is not a share from 0 to below 1.")
        if not 0 <= self.error_weight < math.inf:
            problems.append(f"error_weight: {self.error_weight:g} is not a number from 0.")
        share = _PERCENT.fullmatch(str(self.budget))
        try:
            if not (float(share[1]) if share else parse_bytes(self.budget)) > 0:
                problems.append(f"budget: {self.budget} is not above 0.")
        except MemtrainError as error:
            problems.append(f"budget: {error} Or write a share of the plain step, like 60%.")
        if problems:
            raise ConfigError(problems)

    def describe(self) -> str:
        """In shorthand, as a policy is written on the command line."""
        others = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name != "budget" and getattr(self, f.name) != f.default
        ]
        return f"budget:{','.join([str(self.budget), *others])}"

    def limit_bytes(self, plain_bytes: int) -> int:
        """Bytes that the peak may have.

        Args:
            plain_bytes: The peak of the plain step.
        """
        share = _PERCENT.fullmatch(str(self.budget))
        whole = plain_bytes * float(share[1]) / 100 if share else parse_bytes(self.budget)
        return int(whole * (1 - self.margin))
