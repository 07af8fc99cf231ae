"""`transfer_pages` without a compiler: its tests in `tests/ops` again, on the fallback."""

# ruff: noqa: F811 (the fixtures that are imported are asked for by name)
from __future__ import annotations

import gc
import logging
import weakref

import numpy as np
import pytest
from ops import (
    test_transfer,
    test_transfer_convert,
    test_transfer_errors,
    test_transfer_four_bit,
    test_transfer_graphs,
    test_transfer_sizes,
    test_transfer_streams,
)
from ops.test_transfer_sizes import guards  # noqa: F401
from test_fallback_operations import (  # noqa: F401
    again,
    device,
    find_compiler,
    fresh,
    warnings_are_errors,
)
from transfer_cases import METHODS, TransferCase

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices import cxx
from kvcupy.devices.host import HostDevice
from kvcupy.ops import call as op_call

pytestmark = pytest.mark.again

globals().update(
    again(test_transfer)
    | again(test_transfer_convert)
    | again(
        test_transfer_four_bit,
        "test_a_quarter_of_the_bytes_crosses_the_link",
        "test_every_format_as_users_run_it",
    )
    | again(test_transfer_sizes)
    | again(test_transfer_streams)
    | again(test_transfer_graphs)
    | again(test_transfer_errors)
)
del globals()["test_transfer_convert_wide_rows_are_read_once"]  # of the kernel


# Warnings, errors and faults -------------------------------------------------------------------


def two_pools(device, src_fmt="bf16", dst_fmt="bf16"):
    case = TransferCase(device, 1)
    src = case.pool(fmt=src_fmt)
    return case, src, case.pool("page_first", dst_fmt, scales=dst_fmt == "int8")


@pytest.mark.parametrize("convert", [False, True])
def test_one_warning(fresh, caplog, convert):
    """It names the operation and the cause, and is not repeated for other pools or pages."""
    caplog.set_level(logging.WARNING, logger="kvcupy")
    for _ in range(2):
        case, src, dst = two_pools(fresh, dst_fmt="int8" if convert else "bf16")
        for pages in (([0, 1], [2, 3]), ([4], [5])):
            case.transfer(src, dst, *pages, method="kernel", convert=convert)
        op_call.forget()
    (message,) = [r.getMessage() for r in caplog.records if r.name == "kvcupy"]
    assert message.startswith("transfer_pages runs as array expressions, slowly, because ")
    assert "no C++ compiler was found" in message


@pytest.mark.parametrize("convert", [False, True])
def test_error_raises_and_changes_nothing(fresh, monkeypatch, convert):
    monkeypatch.setattr(kv.config, "fallback", "error")
    case, src, dst = two_pools(fresh, dst_fmt="int8" if convert else "bf16")
    for _ in range(2):
        with pytest.raises(kv.CompileError, match="no C\\+\\+ compiler was found"):
            case.issue(src, dst, [0, 9], [1, 2], method="kernel", convert=convert)
        case.finish()


def test_copies_need_no_compiler(fresh, monkeypatch, caplog):
    """So there is no warning and no error."""
    caplog.set_level(logging.WARNING, logger="kvcupy")
    monkeypatch.setattr(kv.config, "fallback", "error")
    case, src, dst = two_pools(fresh)
    case.transfer(src, dst, [0, 9, 3], [1, 2, 4], method="copy")
    assert not [r for r in caplog.records if r.name.startswith("kvcupy")]


@pytest.mark.parametrize("setting", ["warn", "error"])
def test_no_pool_is_kept_after_a_call(fresh, monkeypatch, setting):
    """Neither by its plan nor by the traceback of its cause."""
    monkeypatch.setattr(kv.config, "fallback", setting)
    case, src, dst = two_pools(fresh)
    kept = [weakref.ref(arg.pool) for arg in (src, dst)]
    kept += [weakref.ref(view.owner) for arg in (src, dst) for view in arg.pool.parts]
    try:
        case.issue(src, dst, [0, 1], [2, 3], method="kernel")
    except kv.CompileError as error:
        assert setting == "error", error
    fresh.synchronize()
    del case, src, dst
    gc.collect()
    assert [ref() is None for ref in kept] == [True] * 6


@pytest.mark.parametrize("method", METHODS)
def test_as_many_faults_as_a_kernel_reports(fresh, monkeypatch, method):
    """Their number only: which one is recorded depends on the order of threads."""
    if find_compiler() is None:
        pytest.skip("no C++ compiler here")
    pages = [9, 0, -1, 12, 3, 2**40], [1, 2, 9, 3, 9, 10]
    case, src, dst = two_pools(fresh)
    case.issue(src, dst, *map(np.array, pages), method=method)
    expressed = int(fresh.fault_array()[0])
    fresh.fault_array().fill(0)

    other = HostDevice()
    monkeypatch.setitem(devices._devices, "host", other)
    monkeypatch.setattr(cxx, "find_compiler", find_compiler)
    monkeypatch.setattr(op_call, "_plans", {})
    monkeypatch.setattr(kv.config, "fallback", "error")
    case, src, dst = two_pools(other)
    case.issue(src, dst, *map(np.array, pages), method=method)
    assert expressed == int(other.fault_array()[0]) > 1
