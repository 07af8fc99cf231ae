"""Operations on the host device without a C++ compiler: the reference, with one warning each.

Some modules of `tests/ops` run again, on a device where nothing can be launched: views, layouts,
faults and streams must come through; the numbers are the reference's by construction.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
import weakref
from types import ModuleType

import numpy as np
import pytest
from ops import (
    test_attention_paged,
    test_copy_pages,
    test_every_operation,
    test_four_bit,
    test_indexing,
    test_rope_store,
    test_shift_pages,
    test_transfer,
    test_transfer_streams,
)
from transfer_cases import METHODS, TransferCase
from valid_calls import EXAMPLES

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices import cxx
from kvcupy.devices.cuda import CudaDevice
from kvcupy.devices.host import HostDevice
from kvcupy.ops import by_reference
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
    """A user without a compiler sees one message of kvcupy's, and none of NumPy's."""
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
    # Of kernels alone: how they count bytes, and how they are built.
    again(
        test_every_operation,
        "test_builds_that_users_run",
        "test_rows_that_32_bits_do_not_count",
        "test_arrays_that_begin_anywhere",
    )
    # Of kernels alone: several heads to a group of lanes.
    | again(
        test_rope_store,
        "test_several_heads_at_once",
        "test_latents_beside_several_heads",
    )
    | again(test_four_bit, "test_rows_that_a_thread_holds_alone")
    | again(test_copy_pages)
    | again(test_shift_pages, "test_one_thread_to_a_row")
    | again(test_indexing)
    # Of kernels alone: where wrong sums of query lengths lead, and how many launches they save.
    | again(
        test_attention_paged,
        "test_sums_of_query_lens_that_are_none",
        "test_cumulative_lengths_alone",
    )
    | again(test_transfer)
    | again(test_transfer_streams)
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


def test_cumulative_lengths_are_those_of_counts(fresh):
    arrays = test_attention_paged.ragged_arrays(np.random.default_rng(6))
    *others, counts = arrays
    want = kv.paged_attention(*others, query_lens=counts)
    got = kv.paged_attention(*others, cu_query_lens=np.append(0, np.cumsum(counts)).astype("int32"))
    np.testing.assert_array_equal(got, want)


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


@pytest.mark.parametrize("setting", ["warn", "error"])
@pytest.mark.parametrize("operation", [*EXAMPLES, "alt_stream"])
def test_no_array_is_kept_after_a_call(fresh, monkeypatch, operation, setting):
    """Neither by a remembered plan nor by the traceback of its cause."""
    monkeypatch.setattr(kv.config, "fallback", setting)
    call = EXAMPLES.get(operation, EXAMPLES["rope_store_kv"])(fresh)
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
    if operation in ("gather_kv", "store_state", "gather_state"):
        call["slots"][...] = [-1, 8, 2**33]
    if operation == "update_conv_state":
        call["slots"][...], call["cu_query_lens"][...] = [5, 9], [0, 7, 2]
    if operation == "copy_pages":
        call["src_pages"][...], call["dst_pages"][...] = [4, 0], [9, 4]
    if operation == "shift_pages":
        call["pages"][...], call["delta"][...] = [4, 0], [1, 16]
    if operation == "slot_mapping":
        call["seq_lens"][...] = [10, 2]
    if operation == "paged_attention":
        call["seq_lens"][...] = [9, 2**40]
    return call


def three_positions(device):
    """Two tokens outside, by two of their positions each."""
    call = EXAMPLES["apply_rope"](device)
    positions = np.array([[99, 0, 1], [-1, 3, 2], [5, 16, 3]])
    return {**call, "positions": device.asarray(positions), "sections": (1, 1, 0)}


INDEXED = [name for name in EXAMPLES if name != "merge_states"]


def same_number_of_faults(fresh, monkeypatch, work):
    """Compare how many faults the reference and a kernel report; the first is up to threads."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler here")
    work(fresh)
    by_reference = int(fresh.fault_array()[0])
    fresh.fault_array().fill(0)
    other = HostDevice()
    monkeypatch.setitem(devices._devices, "host", other)
    monkeypatch.setattr(cxx, "find_compiler", find_compiler)
    monkeypatch.setattr(op_call, "_plans", {})
    monkeypatch.setattr(kv.config, "fallback", "error")
    work(other)
    assert by_reference == int(other.fault_array()[0]) > 1


@pytest.mark.parametrize("name", [*INDEXED, "apply_rope in sections"])
def test_as_many_faults_as_a_kernel_reports(fresh, monkeypatch, name):
    function, make = getattr(kv, name.partition(" ")[0]), EXAMPLES.get(name, three_positions)
    same_number_of_faults(fresh, monkeypatch, lambda device: function(**faulty(name, make(device))))


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


def test_an_error_of_a_transfer_changes_nothing(fresh, monkeypatch):
    monkeypatch.setattr(kv.config, "fallback", "error")
    case, src, dst = two_pools(fresh, "int8")
    for _ in range(2):
        with pytest.raises(kv.CompileError, match="no C\\+\\+ compiler was found"):
            case.issue(src, dst, [0, 9], [1, 2], method="kernel", convert=True)
        case.finish()


def test_copies_need_no_compiler(fresh, monkeypatch, caplog):
    """So there is no warning and no error."""
    caplog.set_level(logging.WARNING, logger="kvcupy")
    monkeypatch.setattr(kv.config, "fallback", "error")
    case, src, dst = two_pools(fresh)
    case.transfer(src, dst, [0, 9, 3], [1, 2, 4], method="copy")
    assert not [r for r in caplog.records if r.name.startswith("kvcupy")]


@pytest.mark.parametrize("method", METHODS)
def test_a_transfer_reports_as_many_faults_as_a_kernel(fresh, monkeypatch, method):
    pages = [9, 0, -1, 12, 3, 2**40], [1, 2, 9, 3, 9, 10]

    def transfer(device):
        case, src, dst = two_pools(device)
        case.issue(src, dst, *map(np.array, pages), method=method)

    same_number_of_faults(fresh, monkeypatch, transfer)


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
