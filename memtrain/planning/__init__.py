"""What a step takes under any policy, and which policy fits."""

from .batch import Largest, largest_batch
from .budget import Resolved, resolve
from .copies import NoValuesError, fake_tensors
from .machine import Machine
from .plan import Option, Plan, plan
from .profile import profile
from .step import Step, default_loss
from .trace import Trace, trace

__all__ = [
    "Largest",
    "Machine",
    "NoValuesError",
    "Option",
    "Plan",
    "Resolved",
    "Step",
    "Trace",
    "default_loss",
    "fake_tensors",
    "largest_batch",
    "plan",
    "profile",
    "resolve",
    "trace",
]
