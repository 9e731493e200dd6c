"""``memtrain plan``: what fits is told with the lines to change, and by the exit code."""

from __future__ import annotations

import shlex

import pytest

from memtrain.planning import Machine

LARGER = ("data.nodes=500", "family.layers=2", "family.hidden=32")
SAMPLED = (*LARGER, "family.model=sage", "family.sampling={fanouts: [4, 4], batch_size: 32}")


class _Rates(dict):
    """The same seconds per byte for every compressor."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> float:
        return 2e-10


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rates everywhere."""
    made = Machine(5e10, 5e9, _Rates())
    monkeypatch.setattr(Machine, "measured", classmethod(lambda cls: made))


def test_what_fits_and_the_lines_to_change(cli, tiny: str) -> None:
    result = cli("plan", tiny, *LARGER, "--budget", "75%")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Budget ")
    assert "for the peak of one step; plain training takes" in lines[0]
    assert lines[1].split()[:4] == ["policy", "fits", "step", "peak"]
    (take,) = (line.removeprefix("Take: ") for line in lines if line.startswith("Take: "))
    found = cli.json("plan", tiny, *LARGER, "--budget", "75%")["plan"]
    best = found["options"][0]
    assert shlex.split(take) == best["edits"]
    profile = cli.json("profile", tiny, *LARGER, *shlex.split(take))["profile"]
    assert profile["peak_bytes"] == best["peak_bytes"] <= found["limit_bytes"]


def test_every_option_is_reproduced_by_its_edits(cli, tiny: str) -> None:
    """Though the recipe's own policy has a ``min_bytes``, which overrides would keep."""
    found = cli.json("plan", tiny, *LARGER, "--budget", "75%")["plan"]
    assert {option["policy"] for option in found["options"]} >= {"none", "gact:4", "recompute"}
    for option in found["options"]:
        profile = cli.json("profile", tiny, *LARGER, *option["edits"])["profile"]
        assert profile["peak_bytes"] == option["peak_bytes"], option["policy"]


def test_nothing_fits(cli, tiny: str) -> None:
    result = cli("plan", tiny, *LARGER, "--budget", "10KiB")
    assert result.exit_code == 3
    assert "no policy fits into 10.0 KiB. The nearest is" in result.stderr
    assert "not tried: budget:10KiB: policy.budget: no plan keeps" in " ".join(
        (result.stdout + result.stderr).split()
    )
    document = cli.json("plan", tiny, *LARGER, "--budget", "10KiB", code=3)
    assert not any(option["fits"] for option in document["plan"]["options"])


def test_a_policy_with_a_budget_that_cannot_be_kept(cli, tiny: str) -> None:
    for command in ("profile", "run"):
        result = cli(command, tiny, *LARGER, "policy=budget:10KiB")
        assert result.exit_code == 3
        assert "policy.budget: no plan keeps the step within 10.0 KiB" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "lots"), "policy.budget: 'lots' is not a size"),
        (("--budget", "0"), "policy.budget: 0 is not above 0"),
        (("--budget", "60%", "--margin", "2"), "policy.margin: 2 is not a share"),
        (("--budget", "60%", "--policies", "gatc:4"), "Did you mean 'gact'?"),
        (("--budget", "60%", "--policies", ","), "--policies is empty"),
        (("--budget", "60%", "policy.bits=abc"), "policy.bits"),
        (("--budget", "60%", "--calibration", "nowhere"), "nowhere is not a run directory"),
        (("--budget", "1GiB", "--batch", "64"), "--batch '64' is not valid. Write --batch auto."),
        (("--budget", "1GiB", "--batch", "auto"), "have a fixed size"),
        (
            ("--budget", "1GiB", "--batch", "auto", "--calibration", "x"),
            "--calibration has no effect on --batch auto",
        ),
    ],
)
def test_mistakes(cli, tiny: str, arguments, message) -> None:
    result = cli("plan", tiny, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_budget_is_needed(cli, tiny: str) -> None:
    result = cli("plan", tiny)
    assert result.exit_code == 2
    assert "--budget" in result.stderr


def test_only_some_policies(cli, tiny: str) -> None:
    arguments = ("plan", tiny, *LARGER, "--budget", "75%", "--policies")
    found = cli.json(*arguments, "gact:bits=2,group=64,budget,budget:70%")["plan"]
    names = {option["policy"] for option in found["options"]}
    assert names == {"none", "gact:min_bytes=1KiB,bits=2,group=64", "budget:75%", "budget:70%"}


def test_margin_and_offload(cli, tiny: str) -> None:
    whole = cli.json("plan", tiny, *LARGER, "--budget", "100%", "--policies", "none")["plan"]
    part = cli.json(
        "plan", tiny, *LARGER, "--budget", "100%", "--margin", "0.25", "--policies", "none", code=3
    )["plan"]
    assert part["limit_bytes"] == int(part["plain_bytes"] * 0.75) < whole["limit_bytes"]
    moved = cli.json("plan", tiny, *LARGER, "--budget", "72%", "--offload")["plan"]
    names = [option["policy"] for option in moved["options"]]
    assert "offload" in names
    assert "budget:72%,offload=True" in names
    edits = next(o["edits"] for o in moved["options"] if o["policy"].startswith("budget"))
    assert (
        cli.json("profile", tiny, *LARGER, *edits)["profile"]["peak_bytes"]
        <= (moved["limit_bytes"])
    )


def test_the_largest_batch(cli, tiny: str) -> None:
    first = cli.json("profile", tiny, *SAMPLED, "policy=none")["profile"]["peak_bytes"]
    arguments = ("plan", tiny, *SAMPLED, "--budget", str(first), "--batch", "auto")
    rows = cli.json(*arguments, "--policies", "none,gact:2,budget")["batches"]
    names = [row["policy"] for row in rows]
    assert names == ["none:min_bytes=1KiB", "gact:min_bytes=1KiB,bits=2", f"budget:{first}"]
    plain, rough, planned = rows
    assert plain["batch"] >= 32
    assert rough["batch"] > plain["batch"]
    assert planned["batch"] > plain["batch"]
    for row in rows:
        assert row["peak_bytes"] <= first
    table = cli(*arguments, "--policies", "none,gact:2").stdout.splitlines()
    assert table[0].split() == ["policy", "largest", "batch", "x", "first", "step", "peak"]
    assert table[1].startswith("none")


def test_no_batch_fits(cli, tiny: str) -> None:
    arguments = ("plan", tiny, *SAMPLED, "--budget", "1KiB", "--batch", "auto")
    result = cli(*arguments, "--policies", "none,gact:4")
    assert result.exit_code == 3
    assert "not even a batch of one fits into 1KiB" in result.stderr
    rows = cli.json(*arguments, "--policies", "none", code=3)["batches"]
    assert rows[0] == {
        "policy": "none:min_bytes=1KiB", "batch": 0, "saturated": False, "peak_bytes": None,
    }  # fmt: skip
