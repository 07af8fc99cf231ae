"""Fixtures of the tests of devices. A file that wants another `api` makes its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_cuda import FakeApi


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """The stand-in for CUDA."""
    api = FakeApi()
    api.install(monkeypatch)
    yield api
    assert api.machine.deadlocks == []


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")
