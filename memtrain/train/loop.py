"""The training loop: from a recipe to a run directory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import send_to_device
from torch import Tensor

from ..policy import Policy
from ..profiling import in_use_bytes
from ..recipe import build_family
from ..session import compress
from . import checkpoint, rundir
from .batches import calibration, step_batches, steps_per_epoch
from .device import build_accelerator, cpu_threads
from .evaluate import evaluate, test
from .interrupt import Interrupt
from .loggers import MetricsLog
from .measure import SavedMemory, StepProbe, saved_memory
from .memory_error import allocator_facts, is_out_of_memory, out_of_memory, release
from .nonfinite import Before
from .nonfinite.run import check_gradients_finite, loss_error
from .optim import build_optimizer, build_schedule
from .plan import describe_plan, run_policy, write_plan
from .preflight import check_gradients_arrive, check_loss
from .seed import seed_everything
from .state import Position, Saved, collect, open_saved, restore
from .summary import write_results

if TYPE_CHECKING:
    from ..families import Family
    from ..recipe import Recipe

#: ``progress(event, **values)``; the events are start, step, evaluate, notice, end.
Progress = Callable[..., None]


@dataclass(frozen=True)
class RunResult:
    """Where a run was written, and its ``summary.json``."""

    dir: Path
    summary: dict[str, Any]


def train(
    recipe: Recipe,
    *,
    resume: str | Path | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Trains what ``recipe`` says and writes the run directory.

    Args:
        recipe: What to train.
        resume: None starts a new run; ``"auto"`` continues the newest unfinished run of the same
            recipe, or starts one; a path continues that run directory or checkpoint.
        progress: Called as ``progress(event, **values)`` with ``start`` (total_steps, step, dir),
            ``step`` (step, loss, steps_per_second, memory_bytes), ``evaluate`` (step, split,
            metrics), ``notice`` (text) and ``end`` (summary). When it raises KeyboardInterrupt,
            the run stops with a checkpoint, as on Ctrl-C.

    Raises:
        MemtrainError: Something in the recipe cannot be done, or a file cannot be written.
        CheckpointError: The checkpoint to continue from is missing, damaged or another recipe's.
        RunFailedError: The loss is no longer finite.
        KeyboardInterrupt: Ctrl-C or SIGTERM; a checkpoint was written.
    """
    emit = progress or (lambda event, **values: None)
    policy = Policy.from_config(recipe.policy)
    saved = open_saved(resume, recipe, policy)
    if resume is not None and saved is None:
        emit("notice", text="No unfinished run of this recipe: starting a new one.")
    with cpu_threads(recipe.run.threads):
        family = build_family(recipe)  # before the directory: data that cannot be had leaves none
        with Interrupt() as interrupt, contextlib.ExitStack() as stack:
            folder = saved.dir if saved is not None else None
            run = Run(recipe, policy, family, emit, interrupt, stack, folder)
            run.start(saved)
            return run.train()


class Run:
    """The objects of one run.

    `train` is the loop and `optimize` one optimizer step. Nothing is written before `start`, so
    that a benchmark can take steps without a directory: after `arm`, by `optimize`.
    """

    def __init__(
        self,
        recipe: Recipe,
        policy: Policy,
        family: Family,
        emit: Progress,
        interrupt: Interrupt,
        stack: contextlib.ExitStack,
        folder: Path | None = None,
    ) -> None:
        #: What a budget became; None where the policy has none.
        self.plan = run_policy(recipe, policy, family, folder)
        self.policy = self.plan.policy if self.plan else policy
        self.recipe, self.family = recipe, family
        self.emit, self.interrupt, self.stack = emit, interrupt, stack
        self.at = Position()
        self.dir = Path(recipe.run.dir)
        self.began = time.perf_counter()
        config = recipe.train
        self.epoch_steps = steps_per_epoch(family, config.accumulation)
        self.total = config.steps or (config.epochs or 0) * self.epoch_steps
        self.accelerator = build_accelerator(recipe)
        self.device = self.accelerator.device
        seed_everything(recipe.run.seed)
        self.model = self.accelerator.prepare_model(family.build_model())
        raw = build_optimizer(config.optimizer, self.model)
        self.schedule = build_schedule(config.schedule, raw, self.total)
        self.optimizer = self.accelerator.prepare_optimizer(raw)
        inner = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True)
        self.session = compress(inner, self.policy, seed=recipe.run.seed)
        stack.callback(self.session.detach)
        self.saved: SavedMemory | None = None
        self.step_seconds: list[float] = []
        #: The moments before the forwards of this step, to repeat one that fails.
        self.befores: list[Before] = []
        self._consistent = True
        self._updating = False

    def start(self, saved: Saved | None) -> None:
        """Opens the run directory, that of ``saved`` when there is one to continue."""
        if saved is not None:
            restore(self, saved)
            (saved.dir / "summary.json").unlink(missing_ok=True)  # not finished any more
        self.dir = saved.dir if saved is not None else rundir.create(self.recipe)
        rundir.write_text(self.dir / "recipe.resolved.yaml", self.recipe.to_yaml())
        self.environment = rundir.environment(self.device, self.family.describe())
        rundir.write_json(self.dir / "env.json", self.environment)
        if self.plan is not None:
            write_plan(self.dir, self.plan)
            self.emit("notice", text=describe_plan(self.plan))
        at, run = self.at, self.recipe.run
        self.log = MetricsLog(self.dir, at.step, at.evaluated_step, run.tensorboard)
        self.stack.callback(self.log.close)
        self.arm(run.measure)
        self.began -= at.wall_seconds

    def arm(self, measure: bool) -> None:
        """Makes the next step the first one; ``measure`` the memory of the steps soon after it."""
        self.probe = StepProbe(self.at.step, self.total, self.device, measure)
        self.first_step = self.at.step

    def train(self) -> RunResult:
        """Steps, evaluates and writes until the end, or until Ctrl-C."""
        at = self.at
        self.emit("start", total_steps=self.total, step=at.step, dir=str(self.dir))
        try:
            groups = step_batches(self.family, self.recipe.train.accumulation, at.step)
            saved = (at.step, at.evaluated_step)
            while True:
                if at.step > at.evaluated_step and self._due(self.recipe.train.evaluate_every):
                    evaluate(self)
                now = (at.step, at.evaluated_step)
                if now != saved and self._due(self.recipe.run.checkpoint_every):
                    self._save()
                    saved = now
                if self.interrupt.requested:
                    raise KeyboardInterrupt(self.interrupt.requested)
                if at.step >= self.total:
                    break
                self._step(*next(groups))
            summary = self._finish()
        except KeyboardInterrupt:
            if self._consistent and not self.interrupt.aborted:
                self._save()
                self.emit("notice", text=f"Interrupted; continue with --resume {self.dir}")
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure, facts = error, allocator_facts(self.device)
        else:
            self.emit("end", summary=summary)
            return RunResult(self.dir, summary)
        release(failure)  # only here nothing refers to the tensors of the failed step any more
        raise out_of_memory(self, failure, facts, self._rescue())

    def _rescue(self) -> str:
        """Saves the state before a step that failed; says what there is to continue from."""
        self.optimizer.zero_grad()
        if not self._updating:
            if not self._consistent and self.befores:
                self.befores[0].restore(self.device, self.session)
            self._save()
        last = self.dir / rundir.CHECKPOINTS / rundir.LAST
        if not last.is_dir():
            return "No checkpoint could be kept: it failed while the weights were changing."
        return f"Continue with --resume {self.dir} and such a change."

    def _step(self, epoch: int, batches: Iterator[Any], size: int) -> None:
        at = self.at
        self._consistent = False
        values, seconds = self.optimize(batches, size)
        self._consistent = True
        if at.step % self.recipe.run.log_every == 0 or at.step == self.total:
            self.log.step(at.step, {"epoch": epoch, **values, "seconds": round(seconds, 6)})
        recent = self.step_seconds[-20:]
        rate = len(recent) / sum(recent) if recent else 0.0
        memory, loss = in_use_bytes(self.device), values["loss"]
        self.emit("step", step=at.step, loss=loss, steps_per_second=rate, memory_bytes=memory)

    def optimize(self, batches: Iterator[Any], size: int) -> tuple[dict[str, float], float]:
        """One optimizer step from ``size`` batches; its loss and rate, and the seconds it took."""
        at, started = self.at, time.perf_counter()
        with self.probe.around(at.step, self.model, self.optimizer, self.session):
            batch, loss = self._gradients(batches, size)
            values = {"loss": loss, "lr": self.schedule.get_last_lr()[0], **self._update(batch)}
        measured = self.probe.measures(at.step)
        if self.probe.counts_tensors(at.step):
            kept = self.probe.kept_bytes
            self.saved = saved_memory(self.session, lambda: self.loss(batch), kept)
        calibrated = self.session.calibration_seconds
        self.session.step(calibration(self))
        calibrated = self.session.calibration_seconds - calibrated
        seconds = time.perf_counter() - started
        at.step += 1
        at.calibration_seconds += calibrated
        at.train_seconds += calibrated if measured else seconds
        if not measured:
            self.step_seconds.append(seconds - calibrated)
        return values, seconds

    def _gradients(self, batches: Iterator[Any], size: int) -> tuple[Any, float]:
        """Forward and backward of one step; the last batch and the mean loss."""
        first, total, batch = self.at.step == self.first_step, 0.0, None
        self.befores.clear()
        for _ in range(size):
            batch = send_to_device(next(batches), self.device)
            self.befores.append(Before.now(self.device, self.session))
            with self.probe.forward():
                loss = self.loss(batch)
            if first:
                check_loss(loss, self.model)
            value = loss.item()
            if not math.isfinite(value):
                del loss  # to find where it began, its graph's memory is needed once more
                raise loss_error(self, value, batch)
            total += value
            self.accelerator.backward(loss if size == 1 else loss / size)
        if first:
            for text in check_gradients_arrive(self.model):
                self.emit("notice", text=text)
        return batch, total / size

    def loss(self, batch: Any) -> Tensor:
        """Forward and loss of a batch on the device, under the session and the precision."""
        with self.session, self.accelerator.autocast():
            return self.family.loss(self.model, batch)

    def _update(self, batch: Any) -> dict[str, float]:
        values, clip = {}, self.recipe.train.clip_norm
        if clip is not None:
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
            values["grad_norm"] = float(norm if norm is not None else math.nan)
            check_gradients_finite(self, values["grad_norm"], batch)
        self._updating = True
        self.optimizer.step()
        self._updating = False
        self.optimizer.zero_grad()
        if not self.accelerator.optimizer_step_was_skipped:  # fp16: the scale was too large
            self.schedule.step()
        return values

    def _due(self, epochs: int) -> bool:
        at_end = self.at.step >= self.total
        return at_end or (epochs > 0 and self.at.step % (epochs * self.epoch_steps) == 0)

    def _finish(self) -> dict[str, Any]:
        self._consistent = False  # `last` is written, and the weights become those of `best`
        metrics = test(self)
        self.at.wall_seconds = time.perf_counter() - self.began
        return write_results(self, metrics)

    def _save(self) -> None:
        self.log.flush()
        self.at.wall_seconds = time.perf_counter() - self.began
        checkpoint.save(self.dir / rundir.CHECKPOINTS / rundir.LAST, collect(self))
