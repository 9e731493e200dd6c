"""``memtrain doctor``: what is installed here and which backend serves what, to paste anywhere."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from .._registry import REGISTRIES
from .._units import format_bytes
from . import _console
from ._recipe import JsonOption

_PACKAGES = (
    "memtrain",
    "torch",
    "triton",
    "numba",
    "numpy",
    "accelerate",
    "safetensors",
    "torch-geometric",
    "scipy",
    "scikit-learn",
    "transformers",
    "tensorboard",
)


def doctor(json: JsonOption = False) -> None:
    """Show versions, devices, the backend of each kernel, broken plugins and the data cache."""
    found = diagnosis()
    if json:
        _console.print_json(found)
        return
    for title, rows in found.items():
        _console.say(f"{title.replace('_', ' ')}:")
        if not rows:
            _console.say("  (none)")
        width = max((len(key) for key in rows), default=0)
        for key, value in rows.items():
            _console.say(f"  {key:<{width}}  {value if value is not None else '(not installed)'}")


def diagnosis() -> dict[str, dict[str, Any]]:
    """Section -> key -> value, all plain."""
    return {
        "system": {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch": _torch(),
        "kernels": _kernels(),
        "data": _data(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("MEMTRAIN_")},
        "broken_plugins": {
            f"{kind} {name}": error
            for kind, registry in REGISTRIES.items()
            for name, error in registry.check().items()
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "cpu threads": torch.get_num_threads(),
        "built for cuda": torch.version.cuda or "no",
        "built for rocm": torch.version.hip or "no",
    }
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        found[f"cuda:{index}"] = (
            f"{device.name}, {format_bytes(device.total_memory)}, sm_{device.major}{device.minor}"
        )
    if torch.backends.mps.is_available():
        found["mps"] = "available"
    return found


def _kernels() -> dict[str, Any]:
    import torch

    try:
        import memtrain_kernels
        from memtrain_kernels._schemas import SCHEMAS
    except (ImportError, ValueError) as error:  # a bad MEMTRAIN_KERNELS is raised at import
        return {"error": str(error)}
    found: dict[str, Any] = {}
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for op in SCHEMAS:
            try:
                choice = memtrain_kernels.explain(op, torch.empty(0, device=device))
                why = "; ".join(f"{name}: {reason}" for name, reason in choice.refused)
                text = f"{choice.backend}{' (forced)' if choice.forced else ''}"
                found[f"{op} on {device}"] = f"{text} ({why})" if why else text
            except (RuntimeError, TypeError) as error:
                found[f"{op} on {device}"] = f"error: {error}"
    return found


def _data() -> dict[str, Any]:
    from ..data import cache_dir

    folder = cache_dir()
    return {"cache": str(folder), "exists": "yes" if folder.is_dir() else "no"}
