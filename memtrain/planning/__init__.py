"""What a step takes under any policy, and which policy fits."""

from .copies import NoValuesError, fake_tensors
from .profile import profile
from .step import Step, default_loss
from .trace import Trace, trace

__all__ = [
    "NoValuesError",
    "Step",
    "Trace",
    "default_loss",
    "fake_tensors",
    "profile",
    "trace",
]
