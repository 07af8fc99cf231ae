"""Fixtures of the adapters' tests."""

import pytest


@pytest.fixture
def place(device):
    """The torch device of the run."""
    return "cpu" if device.kind == "host" else device.torch_name
