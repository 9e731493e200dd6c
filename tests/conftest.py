"""Shared by all tests."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # as many workers as cores: threads would only wait for each other


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
