"""A run directory made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_data import make_run


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run with everything a run can have."""
    return make_run(tmp_path / "runs" / "gnn_gact")
