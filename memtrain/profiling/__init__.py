"""How much memory a step takes: of tensors, of the process, of the device."""

from .context import Context, Site
from .device import DeviceEstimate, estimate_cuda
from .ledger import CLASSES, Event, Ledger, Moment, Record
from .process import DevicePeak, ResidentPeak, in_use_bytes
from .profile import Profile, Share, profile_of, usable_bytes
from .step import StepMemory, measure_step

__all__ = [
    "CLASSES",
    "Context",
    "DeviceEstimate",
    "DevicePeak",
    "Event",
    "Ledger",
    "Moment",
    "Profile",
    "Record",
    "ResidentPeak",
    "Share",
    "Site",
    "StepMemory",
    "estimate_cuda",
    "in_use_bytes",
    "measure_step",
    "profile_of",
    "usable_bytes",
]
