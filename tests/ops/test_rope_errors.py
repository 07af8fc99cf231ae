"""What the rotary operations refuse, and what looks wrong and is right."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import refused, repeat_rows
from numpy import s_
from refused_calls import BOTH, array, bf16, changed, parts, read_only
from rope_cases import SLOTS, RopeCase, arguments, mirrored_array, mla_arguments, store_arguments

import kvcupy as kv

OPERATIONS = ("apply_rope", "rope_store_kv", "rope_store_mla")


def valid_call(case, operation):
    """Arguments by name, of a call that would be right."""
    names, args = {
        "apply_rope": (("query", "key", "rope_table", "positions"), arguments),
        "rope_store_kv": (
            ("query", "key", "value", "rope_table", "positions", "k_cache", "v_cache"),
            store_arguments,
        ),
        "rope_store_mla": (
            ("query", "latent", "rope_key", "rope_table", "positions", "cache"),
            mla_arguments,
        ),
    }[operation]
    call = dict(zip(names, (a.array for a in args(case)), strict=True))
    if operation != "apply_rope":
        call["slot_mapping"] = case.slots(SLOTS).array
    return call


ROWS = "query|key|rope_key"
WIDTHS = f"rope_table|rotary_dim|{ROWS}"
THREE = array(np.int64, 3, 6)
INT8_K, INT8_V = array("int8", 12, 2, 8), array("int8", 12, 2, 6)


def stepped(a):
    return a[..., ::2]


def backwards(a):
    return a[..., ::-1]


def six_rows(a):
    return repeat_rows(a, 6)


def twelve_rows(a):
    return repeat_rows(a, 12)


def two_heads(a):
    return repeat_rows(a.swapaxes(0, 1), 2).swapaxes(0, 1)


def single(rows):
    """Name rows by their argument: (argument, what is wrong, value, error, what is named)."""
    return {
        f"{argument} {wrong}": ({argument: value}, error, names)
        for argument, wrong, value, error, names in rows
    }


def overlapping(*rows):
    """Name rows of two arguments that are parts of one array."""
    return {
        f"{x} overlaps {y}": (parts(fmt, *shape, **{x: a, y: b}), ValueError, f"{x}|{y}")
        for fmt, shape, x, a, y, b in rows
    }


# fmt: off
# What is wrong in each operation: changes to a valid call, the error, and what the message names.
COMMON_ERRORS = single((
    ("rope_table", "float64", array(np.float64, 64, 8), TypeError, "rope_table"),
    ("rope_table", "fp16", array(np.float16, 64, 8), TypeError, "rope_table"),
    ("rope_table", "bf16", bf16(64, 8), TypeError, "rope_table"),
    ("rope_table", "list", [[1.0, 0.0]], TypeError, "rope_table"),
    ("rope_table", "None", None, TypeError, "rope_table"),
    ("rope_table", "1-D", array("fp32", 64), ValueError, "rope_table"),
    ("rope_table", "3-D", array("fp32", 64, 2, 4), ValueError, "rope_table"),
    ("rope_table", "of odd width", array("fp32", 64, 7), ValueError, "rope_table|rotary_dim"),
    ("rope_table", "wider than D", array("fp32", 64, 10), ValueError, WIDTHS),
    ("rope_table", "strided", array("fp32", 64, 16, cut=stepped), ValueError, "rope_table"),
    ("positions", "float", array(np.float32, 6), TypeError, "positions"),
    ("positions", "int16", array(np.int16, 6), TypeError, "positions"),
    ("positions", "uint64", array(np.uint64, 6), TypeError, "positions"),
    ("positions", "list", [0] * 6, TypeError, "positions"),
    ("positions", "0-D", array(np.int64), ValueError, "positions"),
    ("positions", "(6, 1)", array(np.int64, 6, 1), ValueError, "positions"),
    ("positions", "(2, 6)", array(np.int64, 2, 6), ValueError, "positions"),
    ("positions", "past the rows", array(np.int64, 7), ValueError, f"positions|{ROWS}"),
    ("query", "1-D", bf16(8), ValueError, "query"),
    ("query", "4-D", bf16(6, 3, 1, 8), ValueError, "query"),
    ("query", "width", bf16(6, 3, 10), ValueError, ROWS),
    ("query", "few", bf16(5, 3, 8), ValueError, "query|positions"),
    ("query", "float64", array(np.float64, 6, 3, 8), TypeError, "query"),
    ("query", "fp8", array("fp8_e4m3", 6, 3, 8), TypeError, "query"),
    ("query", "int8", array("int8", 6, 3, 8), TypeError, "query"),
    ("query", "untagged", array(np.uint16, 6, 3, 8), TypeError, "query"),
    ("query", "list", [[[1.0, 2.0]]], TypeError, "query"),
    ("query", "strided", bf16(6, 3, 16, cut=stepped), ValueError, "query"),
    ("query", "in place at stride zero", bf16(1, 3, 8, cut=six_rows), ValueError, "query"),
    ("query", "read-only", read_only(bf16(6, 3, 8)), ValueError, "query"),
    ("query_out", "shape", bf16(6, 2, 8), ValueError, "query_out"),
    ("query_out", "rows", bf16(5, 3, 8), ValueError, "query_out"),
    ("query_out", "format", array("fp16", 6, 3, 8), BOTH, "query_out"),
    ("query_out", "float64", array(np.float64, 6, 3, 8), BOTH, "query_out"),
    ("query_out", "strided", bf16(6, 3, 16, cut=stepped), ValueError, "query_out"),
    ("query_out", "at stride zero", bf16(1, 3, 8, cut=six_rows), ValueError, "query_out"),
    ("stream", "str", "main", TypeError, "stream"),
)) | {
    "query_out partly the query": (
        parts("bf16", 7, 3, 8, query=s_[:6], query_out=s_[1:]), ValueError, "query_out"),
}
KEY_ERRORS = single((
    ("key", "1-D", bf16(8), ValueError, "key"),
    ("key", "4-D", bf16(6, 2, 1, 8), ValueError, "key"),
    ("key", "width", bf16(6, 2, 10), ValueError, "query|key|k_cache"),
    ("key", "few", bf16(5, 2, 8), ValueError, "key|positions"),
    ("key", "fp8", array("fp8_e5m2", 6, 2, 8), TypeError, "key"),
    ("key", "float64", array(np.float64, 6, 2, 8), TypeError, "key"),
    ("key", "reversed", bf16(6, 2, 8, cut=backwards), ValueError, "key"),
    ("key", "in place at stride zero", bf16(6, 1, 8, cut=two_heads), ValueError, "key"),
    ("key", "read-only", read_only(bf16(6, 2, 8)), ValueError, "key"),
    ("query_norm", "length", array("fp32", 7), ValueError, "query_norm"),
    ("key_norm", "2-D", array("fp32", 2, 8), ValueError, "key_norm"),
    ("key_norm", "float64", array(np.float64, 8), TypeError, "key_norm"),
    ("query_norm", "another format", array("fp16", 8), TypeError, "query_norm"),
    ("key_norm", "fp8", array("fp8_e4m3", 8), TypeError, "key_norm"),
    ("key_norm", "list", [1.0] * 8, TypeError, "key_norm"),
    ("key_norm", "strided", array("fp32", 16, cut=stepped), ValueError, "key_norm"),
    ("positions", "of three without sections", THREE, ValueError, "positions|sections"),
)) | {
    "sections of wrong sum": ({"positions": THREE, "sections": (2, 2, 1)}, ValueError, "sections"),
    "two sections": ({"positions": THREE, "sections": (2, 2)}, ValueError, "sections"),
    "negative section": ({"positions": THREE, "sections": (5, -2, 1)}, ValueError, "sections"),
    "sections str": ({"positions": THREE, "sections": "224"}, BOTH, "sections"),
} | overlapping(
    ("bf16", (6, 4, 8), "query", s_[:, :3], "key", s_[:, 2:4]),
    ("bf16", (6, 4, 8), "query_out", s_[:, 1:4], "key", s_[:, :2]),
    ("fp32", (64, 2, 8), "rope_table", s_[:, 0], "key", s_[:6]),
)
APPLY_ERRORS = single((
    ("key_out", "shape", bf16(6, 3, 8), ValueError, "key_out"),
    ("key_out", "format", array("fp32", 6, 2, 8), BOTH, "key_out"),
)) | overlapping(
    ("bf16", (6, 4, 8), "query_out", s_[:, :3], "key_out", s_[:, 2:]),
    ("bf16", (6, 4, 8), "query", s_[:, :3], "key_out", s_[:, 2:]),
)
STORE_ERRORS = single((
    ("key", "None", None, TypeError, "key"),
    ("value", "heads", bf16(6, 3, 6), ValueError, "key|value|v_cache"),
    ("value", "1-D", bf16(6), ValueError, "value"),
    ("value", "width", bf16(6, 2, 7), ValueError, "value|v_cache"),
    ("value", "few", bf16(5, 2, 6), ValueError, "value|slot_mapping"),
    ("value", "float64", array(np.float64, 6, 2, 6), TypeError, "value"),
    ("k_cache", "width", bf16(12, 2, 6), ValueError, "k_cache|key"),
    ("k_cache", "heads", bf16(12, 3, 8), ValueError, "k_cache|key"),
    ("k_cache", "float64", array(np.float64, 12, 2, 8), TypeError, "k_cache"),
    ("k_cache", "read-only", read_only(bf16(12, 2, 8)), ValueError, "k_cache"),
    ("v_cache", "slots", bf16(13, 2, 6), ValueError, "k_cache|v_cache"),
    ("v_cache", "at stride zero", bf16(1, 2, 6, cut=twelve_rows), ValueError, "v_cache"),
    ("v_cache", "read-only", read_only(bf16(12, 2, 6)), ValueError, "v_cache"),
    ("slot_mapping", "float", array(np.float32, 6), TypeError, "slot_mapping"),
    ("slot_mapping", "2-D", array(np.int64, 6, 1), ValueError, "slot_mapping"),
    ("positions", "shorter than slots", array(np.int64, 5), ValueError, "positions|slot_mapping"),
    ("layout", "NDH", "NDH", ValueError, "layout"),
    ("skip_slot", "1.5", 1.5, BOTH, "skip_slot"),
    ("k_scale", "on bf16", 2.0, ValueError, "k_scale"),
    ("v_scale_cache", "on bf16", array("fp32", 12, 2), ValueError, "v_scale_cache"),
    ("alt_stream", "str", "side", TypeError, "alt_stream"),
)) | {
    "k_scale zero": ({"k_cache": INT8_K, "k_scale": 0.0}, ValueError, "k_scale"),
    "v_scale of three": (
        {"v_cache": INT8_V, "v_scale": array(np.float32, 3)}, ValueError, "v_scale"),
    "k_scale_cache shape": (
        {"k_cache": INT8_K, "k_scale_cache": array("fp32", 11, 2)}, ValueError, "k_scale_cache"),
} | overlapping(
    ("bf16", (12, 2, 13), "k_cache", s_[..., :8], "v_cache", s_[..., 7:13]),
    ("bf16", (17, 2, 8), "key", s_[:6], "k_cache", s_[5:]),
    ("bf16", (16, 3, 8), "query", s_[:6], "v_cache", s_[4:16, :2, :6]),
    ("bf16", (17, 2, 8), "value", s_[:6, :, :6], "k_cache", s_[5:]),
    ("bf16", (17, 3, 8), "query_out", s_[:6], "k_cache", s_[5:, 1:]),
    ("bf16", (8, 3, 8), "query_out", s_[:6], "value", s_[2:, :2, :6]),
    ("bf16", (6, 3, 8), "key", s_[:, :2], "value", s_[:, 1:, :6]),
)
MLA_ERRORS = single((
    ("latent", "3-D", bf16(6, 1, 12), ValueError, "latent"),
    ("latent", "width", bf16(6, 11), ValueError, "latent|rope_key|cache"),
    ("latent", "few", bf16(5, 12), ValueError, "latent|slot_mapping"),
    ("latent", "float64", array(np.float64, 6, 12), TypeError, "latent"),
    ("rope_key", "3-D", bf16(6, 1, 8), ValueError, "rope_key"),
    ("rope_key", "width", bf16(6, 6), ValueError, "query|rope_key|cache|rope_table"),
    ("rope_key", "fp8", array("fp8_e4m3", 6, 8), TypeError, "rope_key"),
    ("rope_key", "None", None, TypeError, "rope_key"),
    ("rope_key", "read-only", read_only(bf16(6, 8)), ValueError, "rope_key"),
    ("cache", "4-D", bf16(3, 4, 1, 20), ValueError, "cache"),
    ("cache", "width", bf16(12, 19), ValueError, "cache|latent|rope_key"),
    ("cache", "read-only", read_only(bf16(12, 20)), ValueError, "cache"),
    ("scale", "on bf16", 2.0, ValueError, "scale"),
    ("positions", "shorter than slots", array(np.int64, 5), ValueError, "positions|slot_mapping"),
    ("positions", "(3, 6)", THREE, ValueError, "positions"),
)) | overlapping(
    ("bf16", (6, 19), "rope_key", s_[:, 11:], "latent", s_[:, :12]),
    ("bf16", (17, 3, 20), "query", s_[:6, :, :8], "cache", s_[5:, 0]),
)
# fmt: on

CALLS = {
    f"{operation}: {wrong}": (operation, *row)
    for operation, errors in (
        ("apply_rope", COMMON_ERRORS | KEY_ERRORS | APPLY_ERRORS),
        ("rope_store_kv", COMMON_ERRORS | KEY_ERRORS | STORE_ERRORS),
        ("rope_store_mla", COMMON_ERRORS | MLA_ERRORS),
    )
    for wrong, row in errors.items()
}


@pytest.mark.parametrize("wrong", CALLS)
def test_wrong_arguments(device, wrong):
    operation, changes, error, names = CALLS[wrong]
    case = RopeCase(device, 60)
    call = changed(case, valid_call(case, operation), changes)
    refused(case, lambda: getattr(kv, operation)(**call), error, names)


@pytest.mark.parametrize("wrong", [name for name in STORE_ERRORS if "alt_stream" not in name])
def test_wrong_arguments_on_two_streams(device, wrong):
    """All three launches are refused, or a call that raises would have rotated already."""
    changes, error, names = STORE_ERRORS[wrong]
    case = RopeCase(device, 60)
    call = changed(case, valid_call(case, "rope_store_kv"), changes)
    alternate = device.stream()
    refused(case, lambda: kv.rope_store_kv(**call, alt_stream=alternate), error, names)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_call_that_errors_start_from_is_right(device, operation):
    case = RopeCase(device, 61)
    getattr(kv, operation)(**valid_call(case, operation))
    kv.check_faults(device)


def test_read_only_inputs_are_fine(device):
    """The query beside a `query_out` and the key that is not written among them."""
    case = RopeCase(device, 63)
    args = store_arguments(case)
    slots = case.slots(SLOTS)
    for arg in (*args[:5], slots):
        if isinstance(arg.array, np.ndarray):
            arg.array.flags.writeable = False
    options = {"query_out": case.output("bf16", (6, 3, 8)), "write_key": False}
    kv.rope_store_kv(
        *(a.array for a in args),
        slots.array,
        **{name: mirrored_array(value) for name, value in options.items()},
    )
    kv.check_faults(device)
    for buffer in (a.buffer for a in (*args[:5], slots)):
        buffer.check()


def test_key_that_is_not_written_may_be_the_value(device):
    case = RopeCase(device, 64)
    _, key, _, table, positions, *_ = store_arguments(case)
    caches = [case.output("bf16", (12, 2, 8)) for _ in range(2)]
    case.store(None, key, key, table, positions, *caches, SLOTS, write_key=False)


def test_options_are_keywords(device):
    case = RopeCase(device, 65)
    for operation in OPERATIONS:
        call = valid_call(case, operation)
        with pytest.raises(TypeError):
            getattr(kv, operation)(*call.values(), True)
        case.check("", [])
