"""Bytes, shown and read. Inside the package bytes are ints in names ending in ``_bytes``."""

from __future__ import annotations

import re

from ._errors import MemtrainError

_FACTORS = {"": 1, "B": 1}
for _i, _letter in enumerate("KMGT", start=1):
    _FACTORS[f"{_letter}IB"] = 1024**_i
    _FACTORS[f"{_letter}B"] = 1000**_i
    _FACTORS[_letter] = 1024**_i

_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int | float) -> int:
    """Reads ``"8GiB"``, ``"512 MB"``, ``"1.5G"`` (binary) or a plain number as bytes.

    Raises:
        MemtrainError: The text is not a size.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return int(text)
    match = _PATTERN.fullmatch(str(text))
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _FACTORS:
        raise MemtrainError(
            f"{text!r} is not a size. Write a number with a unit, such as 512MiB, 8GiB or 2GB."
        )
    return int(float(match.group(1)) * _FACTORS[unit])


def format_bytes(count: float) -> str:
    """``1536`` -> ``"1.50 KiB"``; always binary units, three significant digits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            if unit == "B":
                return f"{value:.0f} B"
            digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """``0.0123`` -> ``"12.3 ms"``; ``75`` -> ``"1 min 15 s"``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"
