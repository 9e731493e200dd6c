"""The global random generators: seeded once, saved and restored with checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seeds the generators that initialisation, dropout and a user's own code draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002  (the legacy generator is the global one)


def generator_states() -> dict[str, Any]:
    """The states of all global generators, as a checkpoint can hold them."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    version, internal, next_gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(internal, dtype=torch.int64), next_gauss),
        "numpy": (
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Inverse of `generator_states`; CUDA states are restored as far as there are devices."""
    torch.set_rng_state(states["torch"])
    version, internal, next_gauss = states["python"]
    random.setstate((version, tuple(internal.tolist()), next_gauss))
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(  # noqa: NPY002
        (name, keys.numpy().astype(np.uint32), position, has_gauss, gauss)
    )
    if torch.cuda.is_available():
        for index, state in enumerate(states.get("cuda", [])[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
