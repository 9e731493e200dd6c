"""One self-contained HTML page: about a run, or about one profile. Imports no torch.

`read_run` and `read_profile` give what there is to show as plain values, which ``memtrain report
--json`` prints; `render` makes the page of them. What a run does not have is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .._errors import MemtrainError, nearest
from .._units import format_bytes, format_seconds
from . import plots

#: The profiles this page can read.
PROFILE_SCHEMA = 1

#: Any of these makes a folder a run directory.
_FILES = ("recipe.resolved.yaml", "metrics.jsonl", "memory.json", "summary.json")

#: Keys of a line of ``metrics.jsonl`` that are no metric of an evaluation.
_NO_METRIC = ("step", "epoch", "split")


def render_run(folder: str | Path) -> str:
    """The page of a run directory; of an unfinished run, the page of what it has so far.

    Raises:
        MemtrainError: The folder is no run directory, or a file in it is damaged.
    """
    return render(read_run(folder))


def render_profile(profile: Mapping[str, Any]) -> str:
    """The page of one profile, as `Profile.to_dict` gives it.

    Raises:
        MemtrainError: Another version of memtrain wrote it.
    """
    return render(read_profile(profile))


def read_run(folder: str | Path) -> dict[str, Any]:
    """What a run directory holds, as plain values.

    Returns:
        ``title, finished, steps, facts, headline, profile, device, saved, curves, recipe,
        resolved, environment, notes``; None or empty where the run has nothing. ``profile`` is the
        measured one, or the predicted one where nothing was measured.

    Raises:
        MemtrainError: The folder is no run directory, or a file in it is damaged.
    """
    folder = Path(folder)
    _check_is_run(folder)
    summary = _read(folder / "summary.json", _json_object) or {}
    memory = _read(folder / "memory.json", _json_object) or {}
    environment = _read(folder / "env.json", _json_object) or summary.get("environment") or {}
    lines = _read(folder / "metrics.jsonl", _json_lines) or []
    resolved = _read(folder / "recipe.resolved.yaml", str)
    config = _read(folder / "recipe.resolved.yaml", _yaml_mapping) or summary.get("resolved") or {}
    where = str(folder / "memory.json")
    measured = _checked(memory.get("measured"), where)
    predicted = _checked(memory.get("predicted"), where)
    shown = measured or predicted
    saved = memory.get("saved") or {}
    steps = summary.get("steps") or max((line["step"] for line in lines), default=0)
    unpredicted = memory.get("predicted_note")
    notes = [
        *((shown or {}).get("notes") or []),
        *((predicted or {}).get("notes") or []),
        *(saved.get("notes") or []),
        f"No prediction: {unpredicted}" if unpredicted else "",
    ]
    packages = environment.get("packages") or {}
    return {
        "kind": "run",
        "title": summary.get("recipe") or folder.resolve().name,
        "finished": bool(summary),
        "steps": steps,
        "facts": _present(
            {
                "run": folder.resolve().name,
                "policy": summary.get("policy") or _policy_text(config.get("policy")),
                "seed": summary.get("seed", (config.get("run") or {}).get("seed")),
                "steps": f"{steps:,}" if steps else None,
                "device": environment.get("device"),
                "memtrain": packages.get("memtrain"),
                "torch": packages.get("torch"),
            }
        ),
        "headline": _headline(summary, memory, measured, predicted),
        "profile": shown,
        "device": (measured or {}).get("device") or (predicted or {}).get("device"),
        "saved": sorted(saved.get("rows") or [], key=lambda row: -row["before_bytes"]),
        "curves": _curves(lines),
        "recipe": _read(folder / "recipe.yaml", str),
        "resolved": resolved,
        "environment": environment,
        "notes": list(dict.fromkeys(note for note in notes if note)),
    }


def read_profile(profile: Mapping[str, Any]) -> dict[str, Any]:
    """One profile in the shape of `read_run`.

    Raises:
        MemtrainError: Another version of memtrain wrote it.
    """
    shown = _checked(profile, "The profile")
    assert shown is not None
    real = shown["mode"] == "real"
    return {
        "kind": "profile",
        "title": shown["model"],
        "finished": True,
        "steps": 0,
        "facts": _present(
            {
                "policy": shown["policy"],
                "step": "run on the CPU" if real else "traced on fake tensors",
                "took": format_seconds(shown["trace_seconds"]),
            }
        ),
        "headline": _headline({}, {}, shown if real else None, None if real else shown),
        "profile": shown,
        "device": shown["device"],
        "saved": [],
        "curves": {},
        "recipe": None,
        "resolved": None,
        "environment": {},
        "notes": list(shown["notes"]),
    }


def render(data: Mapping[str, Any]) -> str:
    """The page of what `read_run` or `read_profile` returned; the same data gives the same page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        size=_size,
        seconds=format_seconds,
        percent=_percent,
        difference=_difference,
        place=_place,
    )
    profile = data["profile"] or {}
    wide = plots.timeline_svg(profile, "timeline-wide")
    narrow = plots.timeline_svg(profile, "timeline-narrow", narrow=True)
    charts = [
        (metric, list(series), Markup(plots.curve_svg(metric, series, f"curve{number}")))
        for number, (metric, series) in enumerate(data["curves"].items())
    ]
    return environment.get_template("page.html.j2").render(
        **data,
        timelines={"wide": Markup(wide), "narrow": Markup(narrow)} if wide else {},
        charts=[chart for chart in charts if chart[2]],
        class_colors=plots.CLASS_COLORS,
        split_colors=plots.SPLIT_COLORS,
        other_color=plots.OTHER_COLOR,
    )


def _headline(
    summary: Mapping[str, Any],
    memory: Mapping[str, Any],
    measured: Mapping[str, Any] | None,
    predicted: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The numbers a reader came for, the whole step's peak first; None where there is none."""
    step, measured, predicted = memory.get("step") or {}, measured or {}, predicted or {}
    peak = _first(step.get("peak_bytes"), measured.get("peak_bytes"))
    guess = _first(predicted.get("peak_bytes"), summary.get("predicted_peak_bytes"))
    metric = summary.get("metric")
    return {
        "peak_bytes": peak,
        "predicted_peak_bytes": guess,
        "prediction_error": guess / peak - 1 if peak and guess is not None else None,
        "peak_op": _first(step.get("peak_op"), measured.get("peak_op"), predicted.get("peak_op")),
        "base_bytes": _first(
            step.get("base_bytes"), measured.get("base_bytes"), predicted.get("base_bytes")
        ),
        "rss_growth_bytes": _first(step.get("rss_growth_bytes"), measured.get("rss_growth_bytes")),
        "device_peak_bytes": step.get("device_peak_bytes"),
        "device_reserved_bytes": step.get("device_reserved_bytes"),
        "saved_bytes_before": memory.get("saved_bytes_before"),
        "saved_bytes_after": _first(
            memory.get("saved_bytes_after"),
            measured.get("saved_bytes"),
            predicted.get("saved_bytes"),
        ),
        "saved_ratio": _finite(memory.get("saved_ratio")),
        "metric": metric,
        "unit": summary.get("unit") or "",
        "test": _finite((summary.get("test") or {}).get(metric)),
        "val": _finite((summary.get("val") or {}).get(metric)),
        "step_seconds": _finite(summary.get("step_seconds")),
        "train_seconds": _finite(summary.get("train_seconds")),
        "calibration_share": _finite(summary.get("calibration_share")),
    }


def _curves(lines: list[dict[str, Any]]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """``(step, value)`` pairs by metric and split; the loss first, its training beside its test."""
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in lines:
        split = line.get("split", "train")
        names = ["loss"] if split == "train" else [key for key in line if key not in _NO_METRIC]
        for name in names:
            value = line.get(name)
            if isinstance(value, (int, float)):
                points = curves.setdefault(name, {}).setdefault(split, [])
                points.append((line["step"], value))
    return curves


def _check_is_run(folder: Path) -> None:
    if folder.is_dir() and any((folder / name).exists() for name in _FILES):
        return
    inside = folder if folder.is_dir() else folder.parent
    runs = sorted({path.parent.name for name in _FILES for path in inside.glob(f"*/{name}")})
    if folder.is_dir():
        hint = f"It contains runs: {', '.join(runs)}. Give one of them." if runs else None
        problem = "is not a run directory: it has none of " + ", ".join(_FILES)
    else:
        near = nearest(folder.name, runs)
        hint = f"Did you mean {str(inside / near)!r}?" if near else None
        problem = "is a file, not a folder" if folder.exists() else "does not exist"
    raise MemtrainError(
        f"{str(folder)!r} {problem}. "
        + (hint or "Give the directory of a run, which `memtrain run` prints, such as runs/NAME.")
    )


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    """The parsed file, or None when it does not exist."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise MemtrainError(
            f"{path} cannot be read: {problem}. Move it away to get a report without it."
        ) from None


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def _json_lines(text: str) -> list[dict[str, Any]]:
    """The lines; a last one that is cut short, as a run leaves it that was killed, is left out."""
    lines = []
    rows = text.splitlines(keepends=True)
    for number, row in enumerate(rows, start=1):
        try:
            line = _json_object(row)
            if not isinstance(line.get("step"), int):
                raise ValueError("it has no step")
        except ValueError as error:
            if number == len(rows) and not row.endswith("\n"):
                break
            raise ValueError(f"line {number}: {error}") from None
        lines.append(line)
    return lines


def _yaml_mapping(text: str) -> dict[str, Any]:
    value = yaml.safe_load(text)
    if not isinstance(value, dict):
        raise ValueError("expected a mapping")
    return value


def _checked(profile: Mapping[str, Any] | None, where: str) -> Mapping[str, Any] | None:
    if profile is not None and profile.get("schema") != PROFILE_SCHEMA:
        raise MemtrainError(
            f"{where} holds a profile of schema {profile.get('schema')}, and this memtrain reads "
            f"schema {PROFILE_SCHEMA}. Use the version of memtrain that wrote it, or run it again."
        )
    return profile


def _policy_text(policy: Any) -> str | None:
    """A policy of one line as one line; None for rules, which the recipe shows."""
    if isinstance(policy, dict) and "name" in policy:
        options = ",".join(f"{key}={value}" for key, value in policy.items() if key != "name")
        return f"{policy['name']}:{options}" if options else policy["name"]
    return policy if isinstance(policy, str) else None


def _present(facts: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in facts.items() if value not in (None, "")}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _finite(value: Any) -> float | None:
    number = isinstance(value, (int, float)) and math.isfinite(value)
    return value if number else None


def _size(count: int) -> Markup:
    """Bytes in a binary unit; exactly while the pointer is over them."""
    return Markup('<data value="{0}" title="{0:,} bytes">{1}</data>').format(
        count, format_bytes(count)
    )


def _place(line: str) -> Markup:
    """``/a/b/model.py:31 in forward`` without its folders; with them while the pointer is there."""
    path, separator, function = line.partition(" in ")
    short = path.rpartition("/")[2] + separator + function
    return Markup('<span title="{}">{}</span>').format(line, short) if line else Markup("")


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _difference(error: float) -> str:
    """``-0.0123`` -> ``"1.2% below what was measured"``."""
    if error == 0:
        return "equal to the byte"
    side = "above" if error > 0 else "below"
    size = f"{100 * abs(error):.1f}%" if abs(error) >= 0.0005 else "under 0.1%"
    return f"{size} {side} the measured peak"
