"""A fault at each call of a device, a compiler or the system: what is left, what is said, and that
the call works again. One call of each point and program fails, with ``--full`` three on the host
device."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

import helpers
import pytest
from injection import MARK, World, calls_met, cuda_world, run
from programs import HOST_ALONE, PROGRAMS

import kvcupy as kv
from kvcupy.cache.engine import Batch
from kvcupy.cache.paged.steps import Steps
from kvcupy.cache.threads import Helpers
from kvcupy.cache.tiered.tiers import GroupTiers
from kvcupy.ops.call import Plan

# On the stand-in those that differ most from the host device.
ON_CUDA = ("store_kv", "Streams", "Graph", "TransferPages", "Engine")


@pytest.fixture(autouse=True)
def quiet(lenient_host, caplog):
    """Warnings say what was injected."""
    caplog.set_level(logging.CRITICAL, "kvcupy")


@pytest.fixture
def world(device):
    if device.kind != "host":
        pytest.skip("faults are injected on the host device and on the stand-in for CUDA")
    return World(device)


def check(world, name, most=1):
    """Let calls fail at every point that a program meets, at most so many of each."""
    met, expected = calls_met(PROGRAMS[name], world, kernels=True)
    fired = []
    for point, count in met.items():
        numbers = random.Random(f"{name} {point}").sample(range(1, count + 1), min(count, most))
        fired += [run(PROGRAMS[name], world, point, number, expected) for number in numbers]
    assert any(fired)


@pytest.mark.parametrize("name", PROGRAMS)
def test_faults_on_the_host_device(world, name):
    check(world, name, most=3 if helpers.full else 1)


@pytest.mark.parametrize(
    "name",
    [n if n in ON_CUDA else helpers.full_only(n) for n in PROGRAMS if n not in HOST_ALONE],
)
def test_faults_on_the_stand_in_for_cuda(name):
    with cuda_world() as world:
        check(world, name)


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
def test_control(world, monkeypatch, broken, name, point, text):
    kind = PROGRAMS[name]
    met, expected = calls_met(kind, world, kernels=True)
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match=text):
        broken(patch)
        for number in range(1, met[point] + 1):
            run(kind, world, point, number, expected)


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
