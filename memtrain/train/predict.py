"""The step of a recipe, to be traced instead of trained: for profile, plan and predictions."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..families import Family
from ..planning import NoValuesError, Step, Trace, fake_tensors, resolve, trace
from ..policy import Policy
from ..profiling import Profile
from ..profiling.holders import tensors_of
from ..recipe.build import build_family
from .batches import step_batches
from .optim import build_optimizer
from .seed import seed_everything

if TYPE_CHECKING:
    from ..recipe import Recipe
    from .loop import Run

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

#: Steps among which the largest is looked for, where batches differ in size.
_STEPS = 16


def recipe_step(recipe: Recipe, family: Family | None = None, *, real: bool = False) -> Step:
    """One optimizer step of a recipe: the largest of its first ones.

    Args:
        recipe: What to train.
        family: Built from the recipe when None.
        real: Give the model real weights; otherwise it takes no memory.

    Raises:
        MemtrainError: The recipe cannot be built.
    """
    family = family or build_family(recipe)
    if real:
        seed_everything(recipe.run.seed)
        model = family.build_model()
    else:
        with fake_tensors():
            model = family.build_model()
    return Step(
        model.train(),
        _largest(family, recipe.train.accumulation),
        family.loss,
        build_optimizer(recipe.train.optimizer, model),
        recipe.train.clip_norm,
        _AUTOCAST[recipe.train.precision],
    )


def trace_recipe(recipe: Recipe, family: Family | None = None, *, real: bool = False) -> Trace:
    """The step of a recipe under its policy: on fake tensors, unless it needs real ones.

    A budget becomes the rules that a run would have.

    Args:
        recipe: What to trace.
        family: Built from the recipe when None.
        real: Run on real tensors in any case.

    Raises:
        MemtrainError: The recipe cannot be built, or an operator has no fake implementation.
        NoPlanError: Nothing fits into the policy's budget.
    """
    family = family or build_family(recipe)
    if not real:
        try:
            return _trace(recipe_step(recipe, family), recipe, real=False)
        except NoValuesError:
            pass
    return _trace(recipe_step(recipe, family, real=True), recipe, real=real)


def _trace(step: Step, recipe: Recipe, *, real: bool) -> Trace:
    policy = Policy.from_config(recipe.policy)
    if policy.budget is not None:
        policy = resolve(step, policy).policy
    return trace(step, policy, real=real, seed=recipe.run.seed)


def predict(run: Run) -> Profile:
    """The profile of a run's own step, without running it, under the plan its session has now.

    Raises:
        MemtrainError: It cannot be traced on fake tensors.
    """
    state = run.session.state_dict()
    step = recipe_step(run.recipe, run.family)
    return trace(step, run.policy, seed=run.recipe.run.seed, state=state).profile


def _largest(family: Family, accumulation: int) -> tuple[Any, ...]:
    count = min(_STEPS, -(-family.steps_per_epoch() // accumulation))
    steps = islice(step_batches(family, accumulation, 0), count)
    return max((tuple(batches) for _, batches, _ in steps), key=_bytes)


def _bytes(batches: tuple[Any, ...]) -> int:
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors_of(batches)
        if isinstance(t, Tensor) and t.layout == torch.strided
    }
    return sum(storages.values())
