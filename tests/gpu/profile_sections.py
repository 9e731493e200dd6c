"""Section of `check.py` about prediction: what a trace without memory says, and what CUDA takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from gpu_common import Outcome, Settings, markdown
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from memtrain.planning import Step, trace
from memtrain.policy import Policy
from memtrain.profiling import measure_step
from memtrain.session import Session

MIB = 2**20
POLICIES = ("none", "gact:4", "recompute")
#: How far the modelled number may lie from the allocator's before that counts as wrong.
TOLERANCE = 0.1


def mlp(rows: int) -> tuple[nn.Module, Any]:
    """Blocks with normalisation and dropout."""
    blocks = [
        nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.2))
        for _ in range(6)
    ]
    return nn.Sequential(*blocks), torch.randn(rows, 512)


def cnn(rows: int) -> tuple[nn.Module, Any]:
    """Convolutions on small images."""
    blocks = [
        nn.Sequential(nn.Conv2d(c, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU())
        for c in (3, 64, 64, 64)
    ]
    return nn.Sequential(*blocks), torch.randn(max(1, rows // 128), 3, 64, 64)


def transformer(rows: int) -> tuple[nn.Module, Any]:
    """Encoder layers; attention without weights, as they are trained."""
    layers = [nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True) for _ in range(4)]
    return nn.Sequential(*layers), torch.randn(max(1, rows // 256), 256, 256)


MODELS = {"MLP": mlp, "CNN": cnn, "Transformer": transformer}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Any scalar."""
    return model(batch).square().mean()


def profile(settings: Settings) -> Outcome:
    """The modelled device bytes beside the allocator's, for a few models and policies."""
    out, lines = Outcome(), []
    rows = 16384 if settings.cuda and not settings.quick else 256
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, batch = build(rows)
        optimizer = torch.optim.AdamW(model.parameters())
        step = Step(model.train(), (batch,), loss, optimizer)
        predicted = {policy: trace(step, policy).profile for policy in POLICIES}
        model.to(settings.device)
        batch = tree_map(lambda x: x.to(settings.device), batch)
        step = replace(step, batches=(batch,))
        for policy in POLICIES:
            session = Session(model, Policy.from_config(policy))
            step.run(session)
            memory = measure_step(
                lambda s=step, held=session: s.run(held),
                holders=[model, optimizer, batch],
                device=settings.device,
            )
            session.detach()
            found = predicted[policy]
            assert found.device is not None
            context = next(x.bytes for x in found.device.lines if x.name == "context")
            modelled = found.device.total_bytes - context  # the allocator does not see it
            off = modelled / memory.device_peak_bytes - 1 if memory.device_peak_bytes else None
            lines.append(
                [name, policy]
                + [f"{n / MIB:.1f}" for n in (found.peak_bytes, modelled, memory.peak_bytes)]
                + [f"{memory.device_peak_bytes / MIB:.1f}" if memory.device_peak_bytes else "-"]
                + ["-" if off is None else f"{off:+.1%}"]
            )
            if off is not None:
                out.expect(abs(off) <= TOLERANCE, f"{name}, {policy}: modelled {off:+.0%} off")
            else:
                same = found.peak_bytes == memory.peak_bytes
                out.expect(same, f"{name}, {policy}: {found.peak_bytes} != {memory.peak_bytes}")
    titles = ["model", "policy", "predicted MiB", "modelled for CUDA", "tensors' peak"]
    table = markdown([*titles, "allocator's peak", "modelled against it"], lines)
    out.tables.append(f"### Peak of a step, predicted without a device\n\n{table}")
    return out
