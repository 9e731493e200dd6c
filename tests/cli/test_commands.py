"""What each subcommand prints, and its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memtrain.recipe import Recipe, recipe_entries

#: Runs the command line and fails when it imported torch on the way.
WITHOUT_TORCH = """
import sys
from memtrain.cli.main import run
try:
    run(sys.argv[1:])
except SystemExit as end:
    code = end.code or 0
heavy = [m for m in ("torch", "numba", "triton", "accelerate") if m in sys.modules]
sys.exit(f"imported {heavy}" if heavy else code)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["data", "--help"], 0),
        (["--version"], 0),
        (["list"], 0),
        (["list", "recipes", "--json"], 0),
        (["run", "gnn_gatc"], 2),
        (["nonsense"], 2),
    ],
    ids=str,
)
def test_torch_is_not_imported(arguments: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr


def test_python_m_and_version() -> None:
    from memtrain import __version__

    done = subprocess.run(
        [sys.executable, "-m", "memtrain", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"memtrain {__version__}\n"


@pytest.mark.parametrize(("given", "near"), [("rnu", "run"), ("validat", "validate")])
def test_unknown_subcommand_names_the_nearest(cli, given: str, near: str) -> None:
    result = cli(given)
    assert result.exit_code == 2
    assert f"Did you mean '{near}'" in result.stderr


def test_help_lists_every_subcommand(cli) -> None:
    text = cli("--help").stdout
    for command in ["run", "list", "validate", "copy", "compare", "doctor", "bench", "data"]:
        assert f" {command} " in text


def test_list_shows_names_sources_and_summaries(cli) -> None:
    text = cli("list", "compressors").stdout
    line = next(line for line in text.splitlines() if line.startswith("gact"))
    assert "memtrain 0." in line
    assert line.endswith("at run time.")
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_list_takes_singular_and_names_the_nearest_kind(cli) -> None:
    assert cli("list", "family").stdout == cli("list", "families").stdout
    result = cli("list", "compresors")
    assert result.exit_code == 2
    assert "Did you mean 'compressors'?" in result.stderr


def test_list_json(cli) -> None:
    document = cli.json("list")
    assert set(document["entries"]) == {
        "compressors",
        "derivations",
        "families",
        "datasets",
        "optimizers",
        "recipes",
    }
    row = next(row for row in document["entries"]["families"] if row["name"] == "gnn")
    assert row["source"] == "memtrain"
    assert row["summary"]


def test_list_and_doctor_show_broken_plugins(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from memtrain._registry import Entry, compressors

    compressors._add(Entry("shaky", "no_such_module:Thing", "shaky-plugin", "0.1"))
    monkeypatch.setitem(compressors.broken, "gact (other)", "the name is taken")
    try:
        assert "shaky-plugin 0.1" in cli("list", "compressors").stdout
        assert "broken: gact (other): the name is taken" in cli("list", "compressors").stderr
        assert cli.json("list", "compressors")["broken"]["compressors"]
        broken = cli.json("doctor")["broken_plugins"]
        assert "No module named 'no_such_module'" in broken["compressors shaky"]
    finally:
        compressors.unregister("shaky")
        compressors.broken.pop("shaky", None)


def test_validate(cli, tiny: str) -> None:
    result = cli("validate", tiny, "gnn_gact", "data=sbm")
    assert result.exit_code == 0
    assert result.stdout == f"{tiny}: ok\ngnn_gact: ok\n"


def test_validate_shows_every_problem_of_every_recipe(cli, tiny: str, tmp_path: Path) -> None:
    text = (tmp_path / tiny).read_text().replace("hidden", "hiden").replace("lr:", "rl:")
    (tmp_path / "bad.yaml").write_text(text)
    result = cli("validate", "bad.yaml", tiny, "missing.yaml")
    assert result.exit_code == 2
    assert result.stdout == f"{tiny}: ok\n"
    assert "bad.yaml:2: family.hiden: unknown key. Did you mean 'hidden'?" in result.stderr
    assert "bad.yaml:4: train.optimizer.rl: unknown key of adam. Did you mean" in result.stderr
    assert "There is no file 'missing.yaml'" in result.stderr
    rows = cli.json("validate", "bad.yaml", tiny, code=2)["recipes"]
    assert [row["valid"] for row in rows] == [False, True]
    assert len(rows[0]["problems"]) == 2


def test_validate_needs_a_recipe(cli) -> None:
    result = cli("validate", "policy=none")
    assert result.exit_code == 2
    assert "validate needs a recipe" in result.stderr


def test_several_problems_are_one_error(cli, tiny: str) -> None:
    result = cli("run", tiny, "family.hiden=3", "train.epochs=x", "nonsense")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: 3 problems in tiny.yaml\n")
    assert len(result.stderr.splitlines()) == 4


def test_markup_in_a_message_is_shown_as_it_is(cli, tiny: str) -> None:
    result = cli("run", tiny, "policy.rules[0].x=[bold]")
    assert "policy.rules[0].x=[bold]" in result.stderr


def test_copy(cli, tmp_path: Path) -> None:
    result = cli("copy", "gnn_gact")
    assert result.exit_code == 0
    assert "memtrain run gnn_gact.yaml" in result.stdout
    source = next(e.target for e in recipe_entries() if e.name == "gnn_gact")
    assert (tmp_path / "gnn_gact.yaml").read_text() == Path(source).read_text()
    again = cli("copy", "gnn_gact")
    assert again.exit_code == 2
    assert "'gnn_gact.yaml' exists. Add --force" in again.stderr
    (tmp_path / "gnn_gact.yaml").write_text("mine")
    assert cli("copy", "gat_gact", "gnn_gact.yaml", "--force").exit_code == 0
    assert "attention" in (tmp_path / "gnn_gact.yaml").read_text()


def test_copy_into_a_folder_or_nowhere(cli, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert cli("copy", "gnn_gact", "mine").exit_code == 0
    assert (tmp_path / "mine" / "gnn_gact.yaml").is_file()
    result = cli("copy", "gnn_gact", "no/such/file.yaml")
    assert result.exit_code == 2
    assert "The folder 'no/such' does not exist" in result.stderr
    result = cli("copy", "mine/gnn_gact.yaml", "mine/gnn_gact.yaml", "--force")
    assert result.exit_code == 2
    assert "is the recipe itself" in result.stderr


def test_print_config_is_a_recipe(cli, tiny: str, tmp_path: Path) -> None:
    result = cli("run", tiny, "policy=none", "--print-config")
    assert result.exit_code == 0
    assert result.stderr == "note: policy: gact -> none drops bits=4\n"
    (tmp_path / "full.yaml").write_text(result.stdout)
    assert Recipe.load("full.yaml") == Recipe.load(tiny, ["policy=none"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags", [["--dry-run", "--resume", "auto"], ["--print-config", "--dry-run"]]
)
def test_flags_that_exclude_each_other(cli, tiny: str, flags: list[str]) -> None:
    result = cli("run", tiny, *flags)
    assert result.exit_code == 2
    assert "leave out" in result.stderr


def test_doctor(cli) -> None:
    document = cli.json("doctor")
    assert document["packages"]["torch"]
    assert document["torch"]["cpu threads"] >= 1
    assert any(key.endswith("on cpu") for key in document["kernels"])
    assert document["data"]["cache"]
    text = cli("doctor").stdout
    assert "quantize_blockwise on cpu" in text
    assert "broken plugins:" in text


def test_doctor_survives_missing_kernels(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "memtrain_kernels", None)
    assert "memtrain_kernels" in cli.json("doctor")["kernels"]["error"]


@pytest.mark.slow
def test_doctor_survives_a_bad_environment_variable() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memtrain", "doctor"],
        capture_output=True,
        text=True,
        env={"PATH": "", "MEMTRAIN_KERNELS": "fast", "HOME": str(Path.home())},
    )
    assert done.returncode == 0, done.stderr
    assert "MEMTRAIN_KERNELS='fast'" in done.stdout
