"""What one backward pass says of every tensor, against the error that rounding it really makes."""

from __future__ import annotations

import torch
from torch import nn

import memtrain
from memtrain.adaptive.passes import energy, passes, squared_error
from memtrain.adaptive.replay import Recorder


class Gated(nn.Module):
    """A branch beside a residual connection that carries most of the gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a, self.b, self.out = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        return x + 0.1 * self.out(self.a(y) * self.b(y))


def test_every_tensor_of_a_residual_network_costs_what_replay_says() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Gated(32) for _ in range(4)), nn.Linear(32, 4))
    x, y = torch.randn(256, 32), torch.randn(256, 4)
    session = memtrain.compress(model, "gact:bits=2,min_bytes=0")
    adaptation = session.adaptation
    assert adaptation is not None
    with passes(session, lambda: (model(x) - y).square().mean()) as run:
        recorder = Recorder(adaptation.codec, (2,))
        session.packer.recorder = recorder
        loss = run.loss()
        undo = recorder.watch(loss.grad_fn)
        loss.backward(retain_graph=True)
        for remove in undo:
            remove()
        session.packer.recorder = None
        found, exact = recorder.result(), run.collect()
        del loss
        said = found.relative()
        ratios = {}
        for slot in said:
            adaptation.plan = {**dict.fromkeys(said, 8), slot: 2}
            real = squared_error(exact, run.gradients()) / energy(exact)
            ratios[str(slot)] = said[slot][2] / real
    session.detach()
    assert sum("mul" in slot for slot in ratios) >= 4
    assert all(0.2 < ratio < 5 for ratio in ratios.values()), ratios
