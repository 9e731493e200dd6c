"""What the training loop asks when a loss or a gradient of a run is not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelerate.utils import send_to_device

from ...adaptive.passes import untouched
from ..batches import step_batches
from ..errors import USUAL_ADVICE, RunFailedError, diverged
from .counting import count_bad, floats_in
from .found import NonFinite
from .search import Before, locate

if TYPE_CHECKING:
    from ..loop import Run

logger = logging.getLogger("memtrain")


def loss_error(run: Run, value: float, batch: Any) -> RunFailedError:
    """The error of a loss that is not finite, from the last forward of ``run``.

    Args:
        run: The run.
        value: The loss.
        batch: The batch it is the loss of, on the device.
    """
    before = run.befores[-1]
    began, advice = _explain(lambda: _locate(run, batch, before, gradients=False))
    return diverged("loss", value, run.at.step + 1, run.dir, began, advice)


def check_gradients_finite(run: Run, norm: float, batch: Any) -> None:
    """Raises RunFailedError when ``norm`` is that of gradients which are not finite.

    Without this the update would destroy the parameters, and only the next loss would tell. Under
    fp16 the loss scaling deals with it. A norm may also overflow where no gradient does; clipping
    has then made all of them zero, which harms nothing.

    Args:
        run: The run, after clipping.
        norm: What clipping measured.
        batch: The last batch of the step, on the device.
    """
    if math.isfinite(norm) or run.accelerator.scaler is not None:
        return
    gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
    if not any(count_bad(x) for x in floats_in(gradients)):
        return
    began, advice = _explain(lambda: _locate_in_step(run, batch))
    raise diverged("gradient norm", norm, run.at.step + 1, run.dir, began, advice)


def _locate(run: Run, batch: Any, before: Before, gradients: bool) -> NonFinite | None:
    size = len(run.befores) if gradients else 1
    return locate(
        run.session.model,
        lambda: run.loss(batch) / size if size > 1 else run.loss(batch),
        session=run.session,
        before=before,
        batch=batch,
        gradients=gradients,
    )


def _locate_in_step(run: Run, batch: Any) -> NonFinite | None:
    """The last batch first, which is at hand; those before it are fetched again."""
    *earlier, last = run.befores
    found = _locate(run, batch, last, gradients=True)
    if found is not None or not earlier:
        return found
    with untouched(run.session.model):  # a family may draw from the generators to make a batch
        _, batches, _ = next(step_batches(run.family, run.recipe.train.accumulation, run.at.step))
        for before in earlier:
            batch = send_to_device(next(batches), run.device)
            found = _locate(run, batch, before, gradients=True)
            if found is not None:
                return found
    return None


def _explain(search: Callable[[], NonFinite | None]) -> tuple[str, str]:
    """What was found and what to change; a search that fails must not hide the error itself."""
    try:
        found = search()
    except Exception as error:
        logger.debug("The search for the first bad tensor failed.", exc_info=True)
        reason = " ".join(str(error).split())[:200].rstrip(". ")
        return f"Where it began was not found ({type(error).__name__}: {reason}).", USUAL_ADVICE
    if found is None:
        return (
            "Where it began was not found: it was finite when repeated with the same batch and "
            "generators, so it depends on something that does not repeat.",
            USUAL_ADVICE,
        )
    return str(found), found.advice
