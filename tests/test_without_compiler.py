"""Operations on the host device without a C++ compiler: the reference, with one warning each.

`ops/test_every_operation.py` runs again, on a device where nothing can be launched: views, layouts,
faults and streams must come through; the numbers are the reference's by construction.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings

import numpy as np
import pytest
from ops import test_every_operation
from transfer_cases import TransferCase
from valid_calls import EXAMPLES

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices import cxx
from kvcupy.devices.cuda import CudaDevice
from kvcupy.devices.host import HostDevice
from kvcupy.ops import by_reference
from kvcupy.ops import call as op_call

pytestmark = pytest.mark.again


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
    """A user without a compiler sees one message of kvcupy's, and none of NumPy's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# Of kernels alone: how they count bytes, and how they are built.
OF_KERNELS = (
    "test_builds_that_users_run", "test_rows_that_32_bits_do_not_count",
    "test_arrays_that_begin_anywhere",
)  # fmt: skip
globals().update(
    (name, test)
    for name, test in vars(test_every_operation).items()
    if name.startswith("test_") and name not in OF_KERNELS
)


def test_every_operation_has_its_reference():
    found = {
        value.name
        for name, module in sys.modules.items()
        if name.startswith("kvcupy.ops.")
        for value in vars(module).values()
        if isinstance(value, op_call.Operation)
    }
    assert found == set(by_reference.FAULTS) | set(by_reference._OTHERS)


# What is said and kept ------------------------------------------------------------------------


@pytest.fixture
def fresh(device, monkeypatch):
    """The device, as if nothing had been called yet."""
    monkeypatch.setattr(op_call, "_plans", {})
    monkeypatch.setattr(kv.config, "_warned", set())
    return device


@pytest.mark.parametrize("operation", EXAMPLES)
def test_one_warning_an_operation(fresh, caplog, operation):
    caplog.set_level(logging.WARNING, logger="kvcupy")
    for _ in range(2):
        getattr(kv, operation)(**EXAMPLES[operation](fresh))
        op_call.forget()
    (message,) = [r.getMessage() for r in caplog.records if r.name == "kvcupy"]
    assert message.startswith(f"{operation} runs in NumPy, slowly, because ")
    assert "no C++ compiler was found" in message


def bytes_of(call):
    return {name: value.tobytes() for name, value in call.items() if isinstance(value, np.ndarray)}


@pytest.mark.parametrize("operation", [*EXAMPLES, "alt_stream"])
def test_error_raises_and_changes_nothing(fresh, monkeypatch, operation):
    monkeypatch.setattr(kv.config, "fallback", "error")
    call = EXAMPLES.get(operation, EXAMPLES["rope_store_kv"])(fresh)
    if operation == "alt_stream":
        operation, call["alt_stream"] = "rope_store_kv", fresh.stream()
    before = bytes_of(call)
    for _ in range(2):
        with pytest.raises(kv.CompileError, match="no C\\+\\+ compiler was found"):
            getattr(kv, operation)(**call)
        assert bytes_of(call) == before


# Transfers ------------------------------------------------------------------------------------


def two_pools(device, dst_fmt="bf16"):
    case = TransferCase(device, 1)
    src = case.pool()
    return case, src, case.pool("page_first", dst_fmt, scales=dst_fmt == "int8")


@pytest.mark.parametrize("convert", [False, True])
def test_one_warning_for_all_transfers(fresh, caplog, convert):
    """It names the operation and the cause, and is not repeated for other pools or pages."""
    caplog.set_level(logging.WARNING, logger="kvcupy")
    for _ in range(2):
        case, src, dst = two_pools(fresh, "int8" if convert else "bf16")
        for pages in (([0, 1], [2, 3]), ([4], [5])):
            case.transfer(src, dst, *pages, method="kernel", convert=convert)
        op_call.forget()
    (message,) = [r.getMessage() for r in caplog.records if r.name == "kvcupy"]
    assert message.startswith("transfer_pages runs in NumPy, slowly, because ")
    assert "no C++ compiler was found" in message


def test_copies_need_no_compiler(fresh, monkeypatch, caplog):
    """So there is no warning and no error."""
    caplog.set_level(logging.WARNING, logger="kvcupy")
    monkeypatch.setattr(kv.config, "fallback", "error")
    case, src, dst = two_pools(fresh)
    case.transfer(src, dst, [0, 9, 3], [1, 2, 4], method="copy")
    assert not [r for r in caplog.records if r.name.startswith("kvcupy")]


# Streams and devices --------------------------------------------------------------------------


def test_an_explicit_stream_keeps_its_order(fresh):
    """The first store waits at a gate, the second overwrites it, the caller continues at once."""
    stream, gate = fresh.stream(), threading.Event()
    caches = [np.zeros((8, 2, 4), np.float16) for _ in range(2)]
    stream.call(gate.wait)
    for value in (3, 5):
        rows = np.full((2, 2, 4), value, np.float32)
        kv.store_kv(rows, rows, *caches, np.array([1, 6]), stream=stream)
    assert not caches[0].any()
    gate.set()
    stream.synchronize()
    assert (caches[1][[1, 6]] == 5).all() and not caches[1][[0, 2, 5, 7]].any()


@pytest.mark.parametrize("setting", ["warn", "error"])
def test_a_gpu_raises_whatever_the_setting(monkeypatch, setting):
    monkeypatch.setattr(kv.config, "fallback", setting)
    cause = kv.CompileError("there is no header: pip install them", "the log")
    with pytest.raises(kv.CompileError, match="pip install them") as caught:
        CudaDevice.fall_back(object(), "store_kv", cause)
    assert caught.value is not cause and caught.value.log == "the log"
