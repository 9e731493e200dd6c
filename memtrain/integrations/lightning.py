"""A callback for the Lightning Trainer."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch

from .._errors import PolicyError, did_you_mean, require

require("lightning", "lightning", "memtrain.integrations.lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

from ..policy import Policy  # noqa: E402
from ..session import Session, compress  # noqa: E402


class MemtrainCallback(Callback):
    """Compresses what autograd saves while a Lightning Trainer trains.

    The whole training step is covered, the loss included, in automatic and in manual optimization.
    The session steps after each batch in which an optimizer did; adaptive policies measure during
    a step of their own. Validation runs as without it. Checkpoints get the session's state, and a
    resumed training continues from it. Logged are ``memtrain/saved_bytes_before`` and ``_after``
    as `Session.report` has them, and on CUDA ``memtrain/peak_bytes``, the allocator's so far.

    Example:
        >>> trainer = Trainer(callbacks=[MemtrainCallback("gact:4")])  # doctest: +SKIP
        >>> trainer.fit(module, loader)  # doctest: +SKIP

    Args:
        policy: A `Policy`, or what `Policy.from_config` reads.
        module: Dotted name of the submodule to compress, to which the policy's module patterns
            are relative; the whole LightningModule when empty.
        seed: Of stochastic rounding; that of ``seed_everything`` when None, or 0 without one.

    Raises:
        ConfigError: The policy is not valid.
    """

    def __init__(self, policy: Any = "gact", module: str = "", seed: int | None = None) -> None:
        self.policy = Policy.from_config(policy)
        self.module = module
        self.seed = seed
        #: While it trains, and afterwards for its report.
        self.session: Session | None = None
        self._state: dict[str, Any] = {}
        self._steps = 0  # the Trainer's, when the session stepped last
        self._attached = contextlib.ExitStack()
        self._paused = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches the policy; PolicyError when the module or the checkpoint is another's."""
        names = [name for name, _ in pl_module.named_modules()]
        if self.module not in names:
            valid = did_you_mean(self.module, names[1:])
            raise PolicyError(f"{type(pl_module).__name__} has no module {self.module!r}. {valid}")
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed
        session = compress(pl_module.get_submodule(self.module), self.policy, seed=seed)
        self._attached.callback(session.detach)
        self.session, self._steps = session, trainer.global_step
        if self._steps and self._state:
            session.load_state_dict({"tensors": {}, "plain": self._state})
        elif self._steps:
            session.note("The checkpoint has no state of it: rounding and adaptation start anew.")
        step = trainer.strategy.training_step

        def covered(*batch: Any, **keywords: Any) -> Any:
            with session:
                # It may call submodules only, and then nothing else says what the batch is.
                session.packer.begin_model(session.model, (batch, keywords))
                return step(*batch, **keywords)

        if not self.policy.off:
            # Not set on the module, which must stay as it is for copies and wrappers of it.
            trainer.strategy.training_step = covered
            self._attached.callback(delattr, trainer.strategy, "training_step")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Ends a training step, unless gradients are still accumulated: policies adapt here."""
        assert self.session is not None
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.session.step()
        report, device = self.session.report(), pl_module.device
        if report.rows and not trainer.barebones:
            pl_module.log("memtrain/saved_bytes_before", float(report.saved_bytes_before))
            pl_module.log("memtrain/saved_bytes_after", float(report.saved_bytes_after))
            if device.type == "cuda":
                pl_module.log("memtrain/peak_bytes", float(torch.cuda.max_memory_allocated(device)))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switches it off, for validation that takes gradients."""
        if self.session is not None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._paused.enter_context(self.session.plain())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switches it on again."""
        self._paused.close()

    def state_dict(self) -> dict[str, Any]:
        """The session's, in plain values; Lightning writes it into its checkpoints."""
        return self._state if self.session is None else self.session.state_dict()["plain"]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For the session of the training that begins."""
        self._state = state_dict

    def teardown(self, *_: Any, **__: Any) -> None:
        """Takes the policy off: the model is as before."""
        self._paused.close()
        self._attached.close()
        self._state = self.state_dict()

    on_exception = teardown
