"""A fault at each call of a device, a compiler or the system: what is left, what is said, and that
the call works again. One call of each point and program fails, with ``--full`` three."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

import helpers
import pytest
from injection import MARK, calls_met, run
from programs import PROGRAMS

import kvcupy as kv
from kvcupy.cache.engine import Batch
from kvcupy.cache.paged.steps import Steps
from kvcupy.cache.threads import Helpers
from kvcupy.cache.tiered.tiers import GroupTiers
from kvcupy.ops.call import Plan


@pytest.fixture(autouse=True)
def quiet(lenient_host, caplog):
    """Warnings say what was injected."""
    caplog.set_level(logging.CRITICAL, "kvcupy")


@pytest.fixture(autouse=True)
def on_the_host(device):
    if device.kind != "host":
        pytest.skip("faults are injected on the host device")


@pytest.mark.parametrize("name", PROGRAMS)
def test_faults(device, name):
    """Calls fail at every point that a program meets."""
    met, expected = calls_met(PROGRAMS[name], device)
    most, fired = 3 if helpers.full else 1, []
    for point, count in met.items():
        numbers = random.Random(f"{name} {point}").sample(range(1, count + 1), min(count, most))
        fired += [run(PROGRAMS[name], device, point, number, expected) for number in numbers]
    assert any(fired)


# --- Controls: without its part in the package, each check fails ----------------------------------


def without_rollback(patch):
    patch.setattr(Steps, "abort", lambda self: setattr(self, "running", None))


def without_cause(patch):
    said = kv.DeviceError("it failed")
    patch.setattr(Batch, "failure_of", lambda self, number: said if self.cause else None)


def with_plans_that_last(patch):
    patch.setattr(Plan, "lasting", property(lambda self: True))


def with_pages_that_stay(patch):
    patch.setattr(GroupTiers, "save", GroupTiers._queue_save)


def with_temporary_files(patch):
    patch.setattr(Path, "unlink", lambda *_, **__: None)


CONTROLS = [
    (without_rollback, "Paged", "launch", "forward changed"),
    (without_cause, "Engine", "launch", "does not name the cause"),
    (with_plans_that_last, "store_kv", "module load", "raised again"),
    (with_pages_that_stay, "Tiered", "record", "host: "),
    (with_temporary_files, "Paged", "rename", "save changed"),
]


@pytest.mark.parametrize(("broken", "name", "point", "text"), CONTROLS)
def test_control(device, monkeypatch, broken, name, point, text):
    kind = PROGRAMS[name]
    met, expected = calls_met(kind, device)
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match=text):
        broken(patch)
        for number in range(1, met[point] + 1):
            run(kind, device, point, number, expected)


# --- What only shows in time ----------------------------------------------------------------------


def test_work_that_was_submitted_without_a_thread_is_not_done_later(monkeypatch):
    """An executor that cannot start a thread keeps what was submitted for those that it has. By
    then the memory may hold another block, which would be written under the hash of the first."""
    gate, held, done = threading.Event(), [], []
    helpers = Helpers(2, "test")
    for _ in range(2):  # all the threads that it may have
        helpers._executor.submit(gate.wait)
    submitted = type(helpers._executor).submit

    def submit(self, *call):
        held.append(submitted(self, *call))  # in the queue
        raise RuntimeError(f"{MARK}: can't start new thread")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(type(helpers._executor), "submit", submit)
            helpers.each(done.append, range(8), 2)
        assert done == [*range(8)]
    finally:
        gate.set()
    for future in held:
        future.result()
    helpers.close()
    assert held and done == [*range(8)]
