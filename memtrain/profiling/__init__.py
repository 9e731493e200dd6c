"""How much memory a step takes: of tensors, of the process, of the device."""

from .ledger import Event, Ledger, Record
from .process import DevicePeak, ResidentPeak, in_use_bytes
from .step import StepMemory, measure_step

__all__ = [
    "DevicePeak",
    "Event",
    "Ledger",
    "Record",
    "ResidentPeak",
    "StepMemory",
    "in_use_bytes",
    "measure_step",
]
