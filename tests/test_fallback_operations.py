"""The operations after `store_kv` where no kernel can be compiled.

What `tests/ops` asks of the kernels is asked of the array expressions here: the same tests, with
the same tolerances, on a host device without a compiler.
"""

from __future__ import annotations

import gc
import logging
import warnings
import weakref
from types import ModuleType

import numpy as np
import pytest
from every_call import CALLS, rope_store_kv
from ops import (
    test_copy_pages,
    test_four_bit,
    test_gather,
    test_indexing,
    test_rope,
    test_rope_any,
    test_rope_errors,
    test_rope_store,
    test_rope_streams,
    test_rotation,
)

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices import cxx
from kvcupy.devices.host import HostDevice
from kvcupy.ops import call as op_call

pytestmark = pytest.mark.again

find_compiler = cxx.find_compiler


@pytest.fixture(scope="module")
def device():
    """A host device without a compiler, on which nothing may be launched."""
    host = HostDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices._devices, "host", host)
        patch.setattr(op_call, "_plans", {})
        patch.setattr(cxx, "find_compiler", lambda: None)
        patch.setattr(host, "launch", lambda *a: pytest.fail("a kernel was launched"))
        patch.setattr(kv.config, "fallback", "warn")
        patch.setattr(kv.config, "_warned", set())
        yield host


@pytest.fixture(autouse=True)
def warnings_are_errors():
    """A user who falls back sees one message of kvcupy's, and none of NumPy's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def again(module: ModuleType, *without: str) -> dict[str, object]:
    """Return the tests of a module that use the device, under names of this one."""
    subject = module.__name__.rpartition(".test_")[2]
    tests = {name: one for name, one in vars(module).items() if name.startswith("test_")}
    missing = set(without) - set(tests)
    assert not missing, f"{module.__name__} has no {missing}"
    return {
        f"test_{subject}_{name.removeprefix('test_')}": one
        for name, one in tests.items()
        if name not in without
    }


globals().update(
    again(test_rope, "test_tolerance_tells_mistakes")
    | again(test_rope_any)
    | again(test_rope_store)
    | again(test_rope_streams, "test_against_transformers")
    | again(test_rope_errors)
    | again(test_gather)
    | again(test_four_bit, "test_every_format_as_users_run_it")
    | again(
        test_rotation,
        "test_a_thread_alone",
        "test_rope_store_by_threads_alone",
        "test_transfers_by_threads_alone",
    )
    | again(test_copy_pages)
    | again(test_indexing)
)


# What is said and kept ------------------------------------------------------------------------


@pytest.fixture
def fresh(device, monkeypatch):
    """The device, as if nothing had been called yet."""
    monkeypatch.setattr(op_call, "_plans", {})
    monkeypatch.setattr(kv.config, "_warned", set())
    return device


@pytest.mark.parametrize("operation", CALLS)
def test_one_warning_an_operation(fresh, caplog, operation):
    caplog.set_level(logging.WARNING, logger="kvcupy")
    for _ in range(2):
        getattr(kv, operation)(**CALLS[operation](fresh))
        op_call.forget()
    (message,) = [r.getMessage() for r in caplog.records if r.name == "kvcupy"]
    assert message.startswith(f"{operation} runs as array expressions, slowly, because ")
    assert "no C++ compiler was found" in message


def bytes_of(call):
    return {name: value.tobytes() for name, value in call.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("operation", [*CALLS, "alt_stream"])
def test_error_raises_and_changes_nothing(fresh, monkeypatch, operation):
    monkeypatch.setattr(kv.config, "fallback", "error")
    call = CALLS.get(operation, rope_store_kv)(fresh)
    if operation == "alt_stream":
        operation, call["alt_stream"] = "rope_store_kv", fresh.stream()
    before = bytes_of(call)
    for _ in range(2):
        with pytest.raises(kv.CompileError, match="no C\\+\\+ compiler was found"):
            getattr(kv, operation)(**call)
        assert bytes_of(call) == before


@pytest.mark.parametrize("setting", ["warn", "error"])
@pytest.mark.parametrize("operation", [*CALLS, "alt_stream"])
def test_no_array_is_kept_after_a_call(fresh, monkeypatch, operation, setting):
    """Neither by a remembered plan nor by the traceback of its cause."""
    monkeypatch.setattr(kv.config, "fallback", setting)
    call = CALLS.get(operation, rope_store_kv)(fresh)
    alive = {n: weakref.ref(a) for n, a in call.items() if isinstance(a, np.ndarray)}
    if operation == "alt_stream":
        operation, call["alt_stream"] = "rope_store_kv", fresh.stream()
    try:
        getattr(kv, operation)(**call)
    except kv.CompileError as error:
        assert setting == "error", error
    fresh.synchronize()
    del call
    gc.collect()
    assert [name for name, ref in alive.items() if ref() is not None] == []


# Faults ---------------------------------------------------------------------------------------


def faulty(operation, call):
    """Put two faults of each kind into a call."""
    if "positions" in call:
        call["positions"][...] = [15, -1, 2**40]
    if "slot_mapping" in call:
        call["slot_mapping"][...] = [8, 0, 99]
    if operation == "gather_kv":
        call["slots"][...] = [-1, 8, 2**33]
    if operation == "copy_pages":
        call["src_pages"][...], call["dst_pages"][...] = [4, 0], [9, 4]
    if operation == "slot_mapping":
        call["seq_lens"][...] = [10, 2]
    if operation == "paged_attention":
        call["seq_lens"][...] = [9, 2**40]
    return call


def three_positions(device):
    """Two tokens outside, by two of their positions each."""
    call = CALLS["apply_rope"](device)
    positions = np.array([[99, 0, 1], [-1, 3, 2], [5, 16, 3]])
    return {**call, "positions": device.asarray(positions), "sections": (1, 1, 0)}


INDEXED = [name for name in CALLS if name != "merge_states"]


@pytest.mark.parametrize("name", [*INDEXED, "apply_rope in sections"])
def test_as_many_faults_as_a_kernel_reports(fresh, monkeypatch, name):
    """Which of them is the first is up to the threads there."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler here")
    operation = name.partition(" ")[0]
    make = CALLS.get(name, three_positions)
    getattr(kv, operation)(**faulty(name, make(fresh)))
    expressed = int(fresh.fault_array()[0])
    fresh.fault_array().fill(0)

    other = HostDevice()
    monkeypatch.setitem(devices._devices, "host", other)
    monkeypatch.setattr(cxx, "find_compiler", find_compiler)
    monkeypatch.setattr(op_call, "_plans", {})
    monkeypatch.setattr(kv.config, "fallback", "error")
    getattr(kv, operation)(**faulty(name, make(other)))
    assert expressed == int(other.fault_array()[0]) > 1
