"""Which saved tensors get which compressor: an ordered list of rules, the first match wins."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from torch import Tensor, nn

from ._budget import Budget
from ._config import coerce, option, parse
from ._errors import ConfigError, MemtrainError, UnknownNameError, did_you_mean, nearest
from ._registry import compressors
from ._report import Row
from ._units import parse_bytes
from .compressors import (
    FunctionCompressor,
    ModuleCompressor,
    PackContext,
    SavedCompressor,
    SlotKey,
)
from .compressors._slots import KEEP, KEEP_SLOTS, STATISTICS, divides

#: Below this, packing costs more than it saves: scales, biases, statistics.
MIN_BYTES = 16 * 1024

#: Lossless compressors that a policy tries first unless it says ``exact: false``.
EXACT = ("attention", "shape_only", "bitmask", "window_index", "narrow_int")


@dataclass(frozen=True)
class RuleOptions:
    """What a rule matches, beside the options of its compressor."""

    name: str = option(help="A compressor of the registry.")
    module: str | None = option(
        None, "Glob on the module's dotted name (blocks.*.conv), or re: and a regular expression."
    )
    function: str | None = option(None, "Glob on the torch function that saves it (batch_norm).")
    dtype: str | None = option(None, "Type of the tensor, such as float32.")
    min_bytes: str | int | None = option(None, "Leave smaller tensors alone.")
    optional: bool = option(False, "Do not complain when it matches nothing.")


@dataclass(frozen=True)
class Rule:
    """One compressor and the tensors it is for."""

    compressor: SavedCompressor | ModuleCompressor | FunctionCompressor
    options: RuleOptions
    min_bytes: int = MIN_BYTES

    @property
    def name(self) -> str:
        """Registry name of the compressor."""
        return self.options.name

    def matches(self, x: Tensor, ctx: PackContext) -> bool:
        """Whether this rule is for that tensor."""
        o = self.options
        return (
            isinstance(self.compressor, SavedCompressor)
            and x.nbytes >= self.min_bytes
            and (o.module is None or match_name(o.module, ctx.key.module))
            and (o.function is None or fnmatch.fnmatchcase(ctx.key.function, o.function))
            and (o.dtype is None or str(x.dtype).removeprefix("torch.") == o.dtype)
            and self.compressor.accepts(x, ctx)
        )

    def replaces(self, module: str, function: str, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a function compressor of this rule runs that call."""
        o = self.options
        return (
            isinstance(self.compressor, FunctionCompressor)
            and function in self.compressor.functions
            and (o.module is None or match_name(o.module, module))
            and self.compressor.applies(args, kwargs)
        )

    def exempts(self, module: str, function: str) -> bool:
        """Whether this is a rule ``none`` for such a call."""
        o = self.options
        return (
            self.name == "none"
            and (o.module is None or match_name(o.module, module))
            and (o.function is None or fnmatch.fnmatchcase(function, o.function))
        )

    def modules(self, model: nn.Module) -> list[str]:
        """Names of the modules that a module compressor is attached to."""
        assert isinstance(self.compressor, ModuleCompressor)
        if self.options.module is None:
            return self.compressor.targets(model)
        found = [n for n, _ in model.named_modules() if n and match_name(self.options.module, n)]
        # `blocks.*` also matches blocks.0.conv: keep the outermost, a block inside one is its part.
        return [n for n in found if not any(n.startswith(f"{other}.") for other in found)]

    def __str__(self) -> str:
        where = [
            f"{key} {value}"
            for key, value in dataclasses.asdict(self.options).items()
            if key in ("module", "function", "dtype") and value is not None
        ]
        return f"{self.name} ({', '.join(where)})" if where else self.name


def match_name(pattern: str, name: str) -> bool:
    """Whether a dotted module name matches a glob or, after ``re:``, a regular expression."""
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


@dataclass(frozen=True)
class Policy:
    """An ordered list of rules.

    Args:
        rules: First match wins; a tensor that no rule takes is kept as it is.
        exact: Try the lossless compressors first.
        lineage: Derive what follows from other saved tensors instead of storing it.
        text: How the user wrote it, for reports.
        config: The plain values it was built from.
        budget: A goal for the step's peak; it becomes rules once it is planned for a step.
        replan: Improves the plan of a resolved budget from measured errors.
    """

    rules: tuple[Rule, ...] = ()
    exact: bool = True
    lineage: bool = True
    text: str = ""
    config: Any = field(default=None, compare=False)
    budget: Budget | None = None
    replan: Callable[[Any], dict[SlotKey, int]] | None = field(default=None, compare=False)

    @classmethod
    def from_config(cls, value: Any, where: str = "policy", *, source: str = "") -> Policy:
        """Reads a policy from what a user may write.

        Args:
            value: A registry name (``"gact"``), a name with its main option (``"gact:4"``) or
                several (``"gact:bits=2,group=64"``), a mapping with ``name`` and options, a mapping
                with ``rules``, a budget for the whole step (``"budget:60%"``, ``{budget: 2GiB}``),
                or a Policy.
            where: The key path for messages.
            source: The file for messages.

        Raises:
            ConfigError: All problems together.
        """
        if isinstance(value, Policy):
            return value
        problems: list[str] = []
        if value is None:
            value = "none"
        plain = parse_shorthand(value) if isinstance(value, str) else value
        if not isinstance(plain, Mapping):
            raise ConfigError([f"{where}: expected a name or a mapping, got {value!r}."], source)
        plain = dict(plain)
        if not plain.keys() & {"name", "rules"} and nearest("budget", plain):
            goal = parse(Budget, plain, where, source=source)
            return cls(text=goal.describe(), config=value, budget=goal)
        exact = coerce(bool, plain.pop("exact", True), f"{where}.exact", problems)
        lineage = coerce(bool, plain.pop("lineage", True), f"{where}.lineage", problems)
        floor = _size(plain.pop("min_bytes", MIN_BYTES), f"{where}.min_bytes", problems)
        if "rules" in plain:
            items = plain.pop("rules")
            problems += [
                f"{where}.{key}: unknown key beside rules. Valid: exact, lineage, min_bytes, rules."
                for key in plain
            ]
            if not isinstance(items, (list, tuple)) or not items:
                problems.append(f"{where}.rules: expected a list of rules, got {items!r}.")
                items = []
            rules = [
                _rule(item, f"{where}.rules[{i}]", floor, problems) for i, item in enumerate(items)
            ]
        else:
            rules = [_rule(plain, where, floor, problems)]
        if problems:
            raise ConfigError(problems, source)
        text = value if isinstance(value, str) else _describe(value)
        return cls(tuple(r for r in rules if r), bool(exact), bool(lineage), text, value)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Policy:
        """Reads a YAML file that is a policy, or has one under ``policy:``.

        Raises:
            ConfigError: It cannot be read, or is not valid.
        """
        try:
            with open(path, encoding="utf-8") as file:
                plain = yaml.safe_load(file)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError([f"{path}: cannot be read as YAML: {error}"], str(path)) from error
        if isinstance(plain, Mapping) and "policy" in plain:
            plain = plain["policy"]
        return cls.from_config(plain, source=str(path))

    @property
    def off(self) -> bool:
        """Whether it changes nothing at all."""
        return self.budget is None and all(rule.name == "none" for rule in self.rules)

    def effective_rules(self) -> tuple[Rule, ...]:
        """The rules as they are tried: lossless ones first."""
        if not self.exact or self.off or not self._compresses():
            return self.rules
        floor = min(r.min_bytes for r in self.rules)
        first = tuple(
            Rule(compressors.get(name)(), RuleOptions(name, optional=True), floor)
            for name in EXACT
            if all(r.name != name for r in self.rules)
        )
        return first + self.rules

    def _compresses(self) -> bool:
        return any(isinstance(r.compressor, SavedCompressor) for r in self.rules)

    def describe(self) -> str:
        """One line for tables."""
        return self.text

    def to_config(self) -> Any:
        """Plain values that `from_config` reads back."""
        return self.config


def explain_skip(x: Tensor, ctx: PackContext, floor: int) -> str:
    """Why no lossy rule may touch a tensor, or ""; the reason is shown in the report."""
    if x.nbytes < floor:
        return "small"
    function, slot = ctx.key.function, ctx.key.slot
    name = function if function.startswith("__") else function.rstrip("_")  # log_ is log
    keep = name in KEEP or divides(name, ctx.arguments, ctx.keywords)
    if keep or name.startswith("linalg_") or slot in KEEP_SLOTS.get(name, ()):
        return "the backward compares or divides by it"
    source = next((a for a in (*ctx.arguments, *ctx.keywords.values()) if _is_tensor(a)), None)
    # A copy of the input may come first, as under autocast, so the slot alone does not tell.
    small = source is not None and x.numel() * 2 <= source.numel()
    if function in STATISTICS and slot.startswith("out") and small:
        return "statistics"
    return ""


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def unmatched(
    rules: Sequence[Rule], matched: Sequence[int], rows: Mapping[SlotKey, Row]
) -> str | None:
    """What is wrong with the first rule that should have matched a saved tensor and did not."""
    for rule, count in zip(rules, matched, strict=True):
        if count or rule.options.optional or isinstance(rule.compressor, ModuleCompressor):
            continue
        o = rule.options
        if any(matched) and o.module is None and o.function is None and o.dtype is None:
            continue  # a rule for all that is left; exact rules before it left nothing
        modules = {key.module for key in rows if key.module}
        functions = {key.function for key in rows}
        text = f"The rule {rule} matched none of the {len(rows)} tensors that were saved. "
        if o.module is not None and not any(match_name(o.module, m) for m in modules):
            text += f"None comes from module {o.module!r}. {did_you_mean(o.module, modules)}"
        elif o.function is not None and not any(match_name(o.function, f) for f in functions):
            text += (
                f"None comes from function {o.function!r}. {did_you_mean(o.function, functions)}"
            )
        elif max((r.before_bytes for r in rows.values()), default=0) < rule.min_bytes:
            text += f"All are below min_bytes: {rule.min_bytes}; lower it to pack them."
        else:
            text += "Rules before it took them all, or its compressor cannot take their types."
        return f"{text} Set optional: true if that is intended."
    return None


def parse_shorthand(text: str) -> dict[str, Any]:
    """``"gact:4"`` -> name and main option; ``"gact:bits=2,group=64"`` -> name and options.

    ``"budget:60%,margin=0.1"`` is no rule, so it gets no name.
    """
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {"name": name.strip()}
    if options["name"] == "budget":
        options, fields = {"budget": ""}, ["budget"]
    elif not rest:
        return options
    else:
        try:
            entry = compressors.get(options["name"])
        except UnknownNameError:
            return options  # reported where the rule is built
        fields = [f.name for f in dataclasses.fields(entry.Config)]
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals:
            key, value = (fields[0] if fields else "value"), part
        options[key.strip()] = yaml.safe_load(value)
    return options


def _rule(item: Any, where: str, floor: int, problems: list[str]) -> Rule | None:
    if isinstance(item, str):
        item = parse_shorthand(item)
    if not isinstance(item, Mapping):
        problems.append(f"{where}: expected a rule such as {{name: gact}}, got {item!r}.")
        return None
    if "name" not in item:
        close = nearest("name", item)
        hint = f" You wrote {close!r}." if close else ""
        problems.append(f"{where}.name: required key is missing.{hint}")
        return None
    try:
        entry = compressors.get(str(item["name"]))
    except MemtrainError as error:
        problems.append(f"{where}.name: {error}")
        return None
    own = {f.name for f in dataclasses.fields(RuleOptions)}
    theirs = {f.name for f in dataclasses.fields(entry.Config)}
    try:
        options = parse(RuleOptions, {k: v for k, v in item.items() if k in own}, where)
        rest = {k: v for k, v in item.items() if k not in own}
        unknown = [k for k in rest if k not in theirs]
        for key in unknown:
            close = nearest(key, theirs | own)
            question = f"Did you mean {close!r}? " if close else ""
            problems.append(
                f"{where}.{key}: unknown key. {question}Options of {item['name']}: "
                f"{', '.join(sorted(theirs)) or '(none)'}; of every rule: {', '.join(sorted(own))}."
            )
        config = parse(entry.Config, {k: v for k, v in rest.items() if k in theirs}, where)
    except ConfigError as error:
        problems.extend(error.problems)
        return None
    for key in ("module", "function"):
        pattern = getattr(options, key)
        if pattern and pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                problems.append(f"{where}.{key}: {pattern!r} is no regular expression: {error}.")
    own_floor = floor
    if options.min_bytes is not None:
        own_floor = _size(options.min_bytes, f"{where}.min_bytes", problems)
    return Rule(entry(config), options, own_floor)


def _size(value: Any, where: str, problems: list[str]) -> int:
    try:
        return parse_bytes(value)
    except MemtrainError as error:
        problems.append(f"{where}: {error}")
        return MIN_BYTES


def _describe(value: Mapping[str, Any]) -> str:
    if "rules" in value:
        return " + ".join(
            _describe(r) if isinstance(r, Mapping) else str(r) for r in value["rules"]
        )
    options = [f"{k}={v}" for k, v in value.items() if k != "name" and v is not None]
    return f"{value.get('name', '?')}" + (f":{','.join(options)}" if options else "")
