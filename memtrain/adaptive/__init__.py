"""Adaptive bits: what an error in a saved tensor costs the gradient, and who gets which width."""

from .adaptation import Adaptation, Calibration, costs_of
from .allocate import allocate, lower_hull
from .passes import SelfCheck, check_gradients, plain_saved_bytes, untouched
from .replay import Recorder, Sensitivities

__all__ = [
    "Adaptation",
    "Calibration",
    "Recorder",
    "SelfCheck",
    "Sensitivities",
    "allocate",
    "check_gradients",
    "costs_of",
    "lower_hull",
    "plain_saved_bytes",
    "untouched",
]
