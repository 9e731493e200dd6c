"""A callback for the Hugging Face Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .._errors import MemtrainError, require

require("transformers", "transformers", "memtrain.integrations.hf")

from transformers import (  # noqa: E402
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ..policy import Policy  # noqa: E402
from ..session import Session, compress  # noqa: E402

#: In a checkpoint of the Trainer: what a continued run needs.
STATE_FILE = "memtrain.json"


class MemtrainCallback(TrainerCallback):
    """Compresses what autograd saves while a Trainer trains.

    The model is covered as it is called, so the loss that Hugging Face models compute themselves
    is covered too. Adaptive policies measure during a step of their own. Checkpoints of the
    Trainer get the session's state, and a resumed training continues from it.

    Example:
        >>> from transformers import Trainer, TrainingArguments
        >>> trainer = Trainer(model, args, train_dataset=data)  # doctest: +SKIP
        >>> trainer.add_callback(MemtrainCallback("gact:4"))  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    Args:
        policy: A name, a name with options, a mapping, or a `Policy`, as in `memtrain.compress`.
        seed: Of stochastic rounding; the Trainer's when None.

    Raises:
        ConfigError: The policy is not valid.
    """

    def __init__(self, policy: Any = "gact", seed: int | None = None) -> None:
        self.policy = Policy.from_config(policy)
        self.seed = seed
        #: While it trains, and afterwards for its report.
        self.session: Session | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Attaches the policy."""
        if model is None:
            raise MemtrainError("The Trainer passed no model to its callbacks.")
        self.session = compress(
            model, self.policy, seed=args.seed if self.seed is None else self.seed
        )
        if state.global_step:
            self._continue(args, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends a training step: adaptive policies adapt here."""
        assert self.session is not None
        self.session.step()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the session's state beside the Trainer's."""
        assert self.session is not None
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            text = json.dumps(self.session.state_dict()["plain"])
            (folder / STATE_FILE).write_text(text)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Takes the policy off: the model is as before."""
        assert self.session is not None
        self.session.detach()

    def _continue(self, args: TrainingArguments, step: int) -> None:
        assert self.session is not None
        path = Path(args.output_dir or ".") / f"checkpoint-{step}" / STATE_FILE
        if path.exists():
            self.session.load_state_dict({"tensors": {}, "plain": json.loads(path.read_text())})
        else:
            self.session.note(
                f"{path} is missing: rounding and adaptation start anew, so the training does not "
                "continue bit for bit."
            )
