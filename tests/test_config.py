"""Mappings against dataclasses: every problem at once, with key, type and nearest name."""

from dataclasses import dataclass
from typing import Literal

import pytest

from memtrain._config import option, parse
from memtrain._errors import ConfigError
from memtrain._units import format_bytes, format_seconds, parse_bytes


@dataclass(frozen=True)
class Inner:
    depth: int = option(1)


@dataclass(frozen=True)
class Config:
    lr: float = option(help="Step size.")
    bits: Literal[2, 4] = option(4)
    name: str | None = option(None)
    size: str | int | None = option(None)
    flags: tuple[int, ...] = option((1, 2))
    inner: Inner = option(Inner())
    on: bool = option(False)

    def __post_init__(self):
        if self.lr <= 0:
            raise ConfigError([f"lr: {self.lr:g} is not above 0."])


def test_values_are_converted():
    c = parse(Config, {"lr": "1e-3", "bits": 2, "flags": [3], "inner": {"depth": 2}, "size": "8"})
    assert c == Config(1e-3, 2, None, "8", (3,), Inner(2))
    assert parse(Config, {"lr": 1}).lr == 1.0


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        parse(
            Config,
            {
                "lr": "fast",
                "bits": 3,
                "nmae": "x",
                "inner": {"dept": 1},
                "flags": [1, "b"],
                "on": 1,
            },
            "train",
        )
    text = "\n".join(caught.value.problems)
    assert "train.lr: expected number, got 'fast'." in text
    assert "train.bits: 3 is not valid. Valid: 2, 4." in text
    assert "train.nmae: unknown key. Did you mean 'name'?" in text
    assert "train.inner.dept: unknown key. Did you mean 'depth'?" in text
    assert "train.flags[1]: expected integer, got 'b'." in text
    assert "train.on: expected true or false, got 1." in text
    assert len(caught.value.problems) == 6


def test_missing_keys_and_checks_of_the_class():
    with pytest.raises(ConfigError, match=r"x\.lr: required key is missing\. You wrote 'lrr'"):
        parse(Config, {"lrr": 1}, "x")
    with pytest.raises(ConfigError, match=r"x\.lr: -1 is not above 0"):
        parse(Config, {"lr": -1}, "x")


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 << 30), ("512 MB", 512_000_000), ("1.5K", 1536), ("7", 7), (9, 9), ("2kib", 2048)],
)
def test_sizes_are_read(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "8 parsecs", "-1", "1.2.3MB"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_numbers_are_shown_with_three_digits():
    assert [format_bytes(n) for n in (0, 1023, 1536, 12 << 20, 5 << 50)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "12.0 MiB",
        "5120 TiB",
    ]
    assert [format_seconds(s) for s in (2e-5, 0.0123, 1.5, 75)] == [
        "20.0 us",
        "12.3 ms",
        "1.50 s",
        "1 min 15 s",
    ]
