"""Fixtures of the adapters' tests."""

from functools import cache

import pytest


@pytest.fixture
def place(device):
    """The torch device of the run."""
    return "cpu" if device.kind == "host" else device.torch_name


@pytest.fixture(scope="module")
def models():
    """Small models of transformers by name, each made once."""
    from small_models import model_of

    return cache(model_of)
