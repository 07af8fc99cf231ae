"""What the rotary operations refuse, and what looks wrong and is right."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import refused, repeat_rows
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


BOTH = (TypeError, ValueError)
ROWS = "query|key|rope_key"

#: What is wrong in each operation: the error, what the message names, and the change to the call.
COMMON_ERRORS = {
    "table float64": (
        TypeError,
        "rope_table",
        lambda c: {"rope_table": c.device.zeros((64, 8), np.float64)},
    ),
    "table fp16": (
        TypeError,
        "rope_table",
        lambda c: {"rope_table": c.device.zeros((64, 8), np.float16)},
    ),
    "table bf16": (
        TypeError,
        "rope_table",
        lambda c: {"rope_table": c.output("bf16", (64, 8)).array},
    ),
    "table list": (TypeError, "rope_table", lambda c: {"rope_table": [[1.0, 0.0]]}),
    "table None": (TypeError, "rope_table", lambda c: {"rope_table": None}),
    "table 1-D": (
        ValueError,
        "rope_table",
        lambda c: {"rope_table": c.output("fp32", (64,)).array},
    ),
    "table 3-D": (
        ValueError,
        "rope_table",
        lambda c: {"rope_table": c.output("fp32", (64, 2, 4)).array},
    ),
    "odd rotary_dim": (
        ValueError,
        "rope_table|rotary_dim",
        lambda c: {"rope_table": c.output("fp32", (64, 7)).array},
    ),
    "rotary_dim past D": (
        ValueError,
        f"rope_table|rotary_dim|{ROWS}",
        lambda c: {"rope_table": c.output("fp32", (64, 10)).array},
    ),
    "table last dimension strided": (
        ValueError,
        "rope_table",
        lambda c: {"rope_table": c.output("fp32", (64, 16), lambda a: a[:, ::2]).array},
    ),
    "positions float": (
        TypeError,
        "positions",
        lambda c: {"positions": c.device.zeros((6,), np.float32)},
    ),
    "positions int16": (
        TypeError,
        "positions",
        lambda c: {"positions": c.device.zeros((6,), np.int16)},
    ),
    "positions uint64": (
        TypeError,
        "positions",
        lambda c: {"positions": c.device.zeros((6,), np.uint64)},
    ),
    "positions list": (TypeError, "positions", lambda c: {"positions": [0] * 6}),
    "positions 0-D": (
        ValueError,
        "positions",
        lambda c: {"positions": c.device.zeros((), np.int64)},
    ),
    "positions (6, 1)": (
        ValueError,
        "positions",
        lambda c: {"positions": c.device.zeros((6, 1), np.int64)},
    ),
    "positions (2, 6)": (
        ValueError,
        "positions",
        lambda c: {"positions": c.device.zeros((2, 6), np.int64)},
    ),
    "positions past the rows": (
        ValueError,
        f"positions|{ROWS}",
        lambda c: {"positions": c.device.zeros((7,), np.int64)},
    ),
    "query 1-D": (ValueError, "query", lambda c: {"query": c.rows("bf16", (8,)).array}),
    "query 4-D": (ValueError, "query", lambda c: {"query": c.rows("bf16", (6, 3, 1, 8)).array}),
    "query width": (ValueError, ROWS, lambda c: {"query": c.rows("bf16", (6, 3, 10)).array}),
    "query few": (
        ValueError,
        "query|positions",
        lambda c: {"query": c.rows("bf16", (5, 3, 8)).array},
    ),
    "query float64": (
        TypeError,
        "query",
        lambda c: {"query": c.device.zeros((6, 3, 8), np.float64)},
    ),
    "query fp8": (TypeError, "query", lambda c: {"query": c.output("fp8_e4m3", (6, 3, 8)).array}),
    "query int8": (TypeError, "query", lambda c: {"query": c.output("int8", (6, 3, 8)).array}),
    "query untagged": (
        TypeError,
        "query",
        lambda c: {"query": c.device.zeros((6, 3, 8), np.uint16)},
    ),
    "query list": (TypeError, "query", lambda c: {"query": [[[1.0, 2.0]]]}),
    "query last dimension strided": (
        ValueError,
        "query",
        lambda c: {"query": c.rows("bf16", (6, 3, 16), lambda a: a[..., ::2]).array},
    ),
    "query in place at stride zero": (
        ValueError,
        "query",
        lambda c: {"query": c.rows("bf16", (1, 3, 8), lambda a: repeat_rows(a, 6)).array},
    ),
    "query_out shape": (
        ValueError,
        "query_out",
        lambda c: {"query_out": c.output("bf16", (6, 2, 8)).array},
    ),
    "query_out rows": (
        ValueError,
        "query_out",
        lambda c: {"query_out": c.output("bf16", (5, 3, 8)).array},
    ),
    "query_out format": (
        BOTH,
        "query_out",
        lambda c: {"query_out": c.output("fp16", (6, 3, 8)).array},
    ),
    "query_out float64": (
        BOTH,
        "query_out",
        lambda c: {"query_out": c.device.zeros((6, 3, 8), np.float64)},
    ),
    "query_out last dimension strided": (
        ValueError,
        "query_out",
        lambda c: {"query_out": c.output("bf16", (6, 3, 16), lambda a: a[..., ::2]).array},
    ),
    "query_out at stride zero": (
        ValueError,
        "query_out",
        lambda c: {"query_out": c.output("bf16", (1, 3, 8), lambda a: repeat_rows(a, 6)).array},
    ),
    "query_out partly the query": (
        ValueError,
        "query_out",
        lambda c: (
            lambda both: {
                "query": both.sub(lambda a: a[:6]).array,
                "query_out": both.sub(lambda a: a[1:]).array,
            }
        )(c.rows("bf16", (7, 3, 8))),
    ),
    "stream": (TypeError, "stream", lambda c: {"stream": "main"}),
}
KEY_ERRORS = {
    "key 1-D": (ValueError, "key", lambda c: {"key": c.rows("bf16", (8,)).array}),
    "key 4-D": (ValueError, "key", lambda c: {"key": c.rows("bf16", (6, 2, 1, 8)).array}),
    "key width": (
        ValueError,
        "query|key|k_cache",
        lambda c: {"key": c.rows("bf16", (6, 2, 10)).array},
    ),
    "key few": (ValueError, "key|positions", lambda c: {"key": c.rows("bf16", (5, 2, 8)).array}),
    "key fp8": (TypeError, "key", lambda c: {"key": c.output("fp8_e5m2", (6, 2, 8)).array}),
    "key float64": (TypeError, "key", lambda c: {"key": c.device.zeros((6, 2, 8), np.float64)}),
    "key last dimension reversed": (
        ValueError,
        "key",
        lambda c: {"key": c.rows("bf16", (6, 2, 8), lambda a: a[..., ::-1]).array},
    ),
    "key in place at stride zero": (
        ValueError,
        "key",
        lambda c: {
            "key": c.rows(
                "bf16", (6, 1, 8), lambda a: repeat_rows(a.swapaxes(0, 1), 2).swapaxes(0, 1)
            ).array
        },
    ),
    "query overlaps key": (
        ValueError,
        "query|key",
        lambda c: (
            lambda both: {
                "query": both.sub(lambda a: a[:, :3]).array,
                "key": both.sub(lambda a: a[:, 2:4]).array,
            }
        )(c.rows("bf16", (6, 4, 8))),
    ),
    "query_out overlaps key": (
        ValueError,
        "query_out|key",
        lambda c: (
            lambda both: {
                "key": both.sub(lambda a: a[:, :2]).array,
                "query_out": both.sub(lambda a: a[:, 1:4]).array,
            }
        )(c.rows("bf16", (6, 4, 8))),
    ),
    "table overlaps key": (
        ValueError,
        "rope_table|key",
        lambda c: (
            lambda both: {
                "key": both.sub(lambda a: a[:12].reshape(6, 2, 8)).array,
                "rope_table": both.array,
            }
        )(c.place(np.ones((64, 8), np.float32), "fp32")),
    ),
    "query_norm length": (
        ValueError,
        "query_norm",
        lambda c: {"query_norm": c.rows("fp32", (7,)).array},
    ),
    "key_norm 2-D": (ValueError, "key_norm", lambda c: {"key_norm": c.rows("fp32", (2, 8)).array}),
    "key_norm float64": (
        TypeError,
        "key_norm",
        lambda c: {"key_norm": c.device.zeros((8,), np.float64)},
    ),
    "query_norm another format": (
        TypeError,
        "query_norm",
        lambda c: {"query_norm": c.rows("fp16", (8,)).array},
    ),
    "key_norm fp8": (
        TypeError,
        "key_norm",
        lambda c: {"key_norm": c.output("fp8_e4m3", (8,)).array},
    ),
    "key_norm list": (TypeError, "key_norm", lambda c: {"key_norm": [1.0] * 8}),
    "key_norm strided": (
        ValueError,
        "key_norm",
        lambda c: {"key_norm": c.rows("fp32", (16,), lambda a: a[::2]).array},
    ),
    "three positions without sections": (
        ValueError,
        "positions|sections",
        lambda c: {"positions": c.device.zeros((3, 6), np.int64)},
    ),
    "sections of another sum": (
        ValueError,
        "sections",
        lambda c: {"positions": c.device.zeros((3, 6), np.int64), "sections": (2, 2, 1)},
    ),
    "two sections": (
        ValueError,
        "sections",
        lambda c: {"positions": c.device.zeros((3, 6), np.int64), "sections": (2, 2)},
    ),
    "negative section": (
        ValueError,
        "sections",
        lambda c: {"positions": c.device.zeros((3, 6), np.int64), "sections": (5, -2, 1)},
    ),
    "sections that are no numbers": (
        BOTH,
        "sections",
        lambda c: {"positions": c.device.zeros((3, 6), np.int64), "sections": "224"},
    ),
}
APPLY_ERRORS = {
    "key_out shape": (
        ValueError,
        "key_out",
        lambda c: {"key_out": c.output("bf16", (6, 3, 8)).array},
    ),
    "key_out format": (BOTH, "key_out", lambda c: {"key_out": c.output("fp32", (6, 2, 8)).array}),
    "outputs overlap": (
        ValueError,
        "query_out|key_out",
        lambda c: (
            lambda both: {
                "query_out": both.sub(lambda a: a[:, :3]).array,
                "key_out": both.sub(lambda a: a[:, 2:]).array,
            }
        )(c.output("bf16", (6, 4, 8))),
    ),
    "key_out overlaps query": (
        ValueError,
        "query|key_out",
        lambda c: (
            lambda both: {
                "query": both.sub(lambda a: a[:, :3]).array,
                "key_out": both.sub(lambda a: a[:, 2:]).array,
            }
        )(c.rows("bf16", (6, 4, 8))),
    ),
}
STORE_ERRORS = {
    "key None": (TypeError, "key", lambda c: {"key": None}),
    "value heads": (
        ValueError,
        "key|value|v_cache",
        lambda c: {"value": c.rows("bf16", (6, 3, 6)).array},
    ),
    "value 1-D": (ValueError, "value", lambda c: {"value": c.rows("bf16", (6,)).array}),
    "value width": (
        ValueError,
        "value|v_cache",
        lambda c: {"value": c.rows("bf16", (6, 2, 7)).array},
    ),
    "value few": (
        ValueError,
        "value|slot_mapping",
        lambda c: {"value": c.rows("bf16", (5, 2, 6)).array},
    ),
    "value float64": (
        TypeError,
        "value",
        lambda c: {"value": c.device.zeros((6, 2, 6), np.float64)},
    ),
    "k_cache width": (
        ValueError,
        "k_cache|key",
        lambda c: {"k_cache": c.output("bf16", (12, 2, 6)).array},
    ),
    "k_cache heads": (
        ValueError,
        "k_cache|key",
        lambda c: {"k_cache": c.output("bf16", (12, 3, 8)).array},
    ),
    "k_cache float64": (
        TypeError,
        "k_cache",
        lambda c: {"k_cache": c.device.zeros((12, 2, 8), np.float64)},
    ),
    "v_cache slots": (
        ValueError,
        "k_cache|v_cache",
        lambda c: {"v_cache": c.output("bf16", (13, 2, 6)).array},
    ),
    "v_cache at stride zero": (
        ValueError,
        "v_cache",
        lambda c: {"v_cache": c.output("bf16", (1, 2, 6), lambda a: repeat_rows(a, 12)).array},
    ),
    "slots float": (
        TypeError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6,), np.float32)},
    ),
    "slots 2-D": (
        ValueError,
        "slot_mapping",
        lambda c: {"slot_mapping": c.device.zeros((6, 1), np.int64)},
    ),
    "positions shorter than slots": (
        ValueError,
        "positions|slot_mapping",
        lambda c: {"positions": c.device.zeros((5,), np.int64)},
    ),
    "layout": (ValueError, "layout", lambda c: {"layout": "NDH"}),
    "skip_slot": (BOTH, "skip_slot", lambda c: {"skip_slot": 1.5}),
    "k_scale on bf16": (ValueError, "k_scale", lambda c: {"k_scale": 2.0}),
    "v_scale_cache on bf16": (
        ValueError,
        "v_scale_cache",
        lambda c: {"v_scale_cache": c.output("fp32", (12, 2)).array},
    ),
    "k_scale zero": (
        ValueError,
        "k_scale",
        lambda c: {"k_cache": c.output("int8", (12, 2, 8)).array, "k_scale": 0.0},
    ),
    "v_scale of three": (
        ValueError,
        "v_scale",
        lambda c: {
            "v_cache": c.output("int8", (12, 2, 6)).array,
            "v_scale": c.device.asarray(np.ones(3, np.float32)),
        },
    ),
    "k_scale_cache shape": (
        ValueError,
        "k_scale_cache",
        lambda c: {
            "k_cache": c.output("int8", (12, 2, 8)).array,
            "k_scale_cache": c.output("fp32", (11, 2)).array,
        },
    ),
    "caches overlap": (
        ValueError,
        "k_cache|v_cache",
        lambda c: (
            lambda both: {
                "k_cache": both.sub(lambda a: a[..., :8]).array,
                "v_cache": both.sub(lambda a: a[..., 7:13]).array,
            }
        )(c.output("bf16", (12, 2, 13))),
    ),
    "key overlaps k_cache": (
        ValueError,
        "key|k_cache",
        lambda c: (
            lambda both: {
                "key": both.sub(lambda a: a[:6]).array,
                "k_cache": both.sub(lambda a: a[5:]).array,
            }
        )(c.output("bf16", (17, 2, 8))),
    ),
    "query overlaps v_cache": (
        ValueError,
        "query|v_cache",
        lambda c: (
            lambda both: {
                "query": both.sub(lambda a: a[:6]).array,
                "v_cache": both.sub(lambda a: a[4:16, :2, :6]).array,
            }
        )(c.output("bf16", (16, 3, 8))),
    ),
    "value overlaps k_cache": (
        ValueError,
        "value|k_cache",
        lambda c: (
            lambda both: {
                "value": both.sub(lambda a: a[:6, :, :6]).array,
                "k_cache": both.sub(lambda a: a[5:]).array,
            }
        )(c.output("bf16", (17, 2, 8))),
    ),
    "query_out overlaps k_cache": (
        ValueError,
        "query_out|k_cache",
        lambda c: (
            lambda both: {
                "query_out": both.sub(lambda a: a[:6]).array,
                "k_cache": both.sub(lambda a: a[5:, 1:]).array,
            }
        )(c.output("bf16", (17, 3, 8))),
    ),
    "query_out overlaps value": (
        ValueError,
        "query_out|value",
        lambda c: (
            lambda both: {
                "query_out": both.sub(lambda a: a[:6]).array,
                "value": both.sub(lambda a: a[2:, :2, :6]).array,
            }
        )(c.output("bf16", (8, 3, 8))),
    ),
    "key overlaps value": (
        ValueError,
        "key|value",
        lambda c: (
            lambda both: {
                "key": both.sub(lambda a: a[:, :2]).array,
                "value": both.sub(lambda a: a[:, 1:, :6]).array,
            }
        )(c.rows("bf16", (6, 3, 8))),
    ),
    "alt_stream": (TypeError, "alt_stream", lambda c: {"alt_stream": "side"}),
}
MLA_ERRORS = {
    "latent 3-D": (ValueError, "latent", lambda c: {"latent": c.rows("bf16", (6, 1, 12)).array}),
    "latent width": (
        ValueError,
        "latent|rope_key|cache",
        lambda c: {"latent": c.rows("bf16", (6, 11)).array},
    ),
    "latent few": (
        ValueError,
        "latent|slot_mapping",
        lambda c: {"latent": c.rows("bf16", (5, 12)).array},
    ),
    "latent float64": (
        TypeError,
        "latent",
        lambda c: {"latent": c.device.zeros((6, 12), np.float64)},
    ),
    "rope_key 3-D": (
        ValueError,
        "rope_key",
        lambda c: {"rope_key": c.rows("bf16", (6, 1, 8)).array},
    ),
    "rope_key width": (
        ValueError,
        "query|rope_key|cache|rope_table",
        lambda c: {"rope_key": c.rows("bf16", (6, 6)).array},
    ),
    "rope_key fp8": (
        TypeError,
        "rope_key",
        lambda c: {"rope_key": c.output("fp8_e4m3", (6, 8)).array},
    ),
    "rope_key None": (TypeError, "rope_key", lambda c: {"rope_key": None}),
    "cache 4-D": (ValueError, "cache", lambda c: {"cache": c.output("bf16", (3, 4, 1, 20)).array}),
    "cache width": (
        ValueError,
        "cache|latent|rope_key",
        lambda c: {"cache": c.output("bf16", (12, 19)).array},
    ),
    "scale on bf16": (ValueError, "scale", lambda c: {"scale": 2.0}),
    "positions shorter than slots": (
        ValueError,
        "positions|slot_mapping",
        lambda c: {"positions": c.device.zeros((5,), np.int64)},
    ),
    "positions (3, 6)": (
        ValueError,
        "positions",
        lambda c: {"positions": c.device.zeros((3, 6), np.int64)},
    ),
    "rope_key overlaps latent": (
        ValueError,
        "rope_key|latent",
        lambda c: (
            lambda both: {
                "latent": both.sub(lambda a: a[:, :12]).array,
                "rope_key": both.sub(lambda a: a[:, 11:]).array,
            }
        )(c.rows("bf16", (6, 19))),
    ),
    "query overlaps cache": (
        ValueError,
        "query|cache",
        lambda c: (
            lambda both: {
                "query": both.sub(lambda a: a[:6, :24].reshape(6, 3, 8)).array,
                "cache": both.sub(lambda a: a[5:17, :20]).array,
            }
        )(c.output("bf16", (17, 24))),
    ),
}
ERRORS = [
    *((operation, name) for operation in OPERATIONS for name in COMMON_ERRORS),
    *((operation, name) for operation in OPERATIONS[:2] for name in KEY_ERRORS),
    *(("apply_rope", name) for name in APPLY_ERRORS),
    *(("rope_store_kv", name) for name in STORE_ERRORS),
    *(("rope_store_mla", name) for name in MLA_ERRORS),
]


@pytest.mark.parametrize(
    ("operation", "wrong"), ERRORS, ids=[f"{op}: {wrong}" for op, wrong in ERRORS]
)
def test_wrong_arguments(device, operation, wrong):
    own = {"apply_rope": APPLY_ERRORS, "rope_store_kv": STORE_ERRORS, "rope_store_mla": MLA_ERRORS}[
        operation
    ]
    tables = (own, KEY_ERRORS, COMMON_ERRORS)
    error, name, change = next(table[wrong] for table in tables if wrong in table)
    case = RopeCase(device, 60)
    call = valid_call(case, operation)
    call.update(change(case))
    refused(case, lambda: getattr(kv, operation)(**call), error, name)


@pytest.mark.parametrize("wrong", [name for name in STORE_ERRORS if name != "alt_stream"])
def test_wrong_arguments_on_two_streams(device, wrong):
    """All three launches are refused, or a call that raises would have rotated already."""
    error, name, change = STORE_ERRORS[wrong]
    case = RopeCase(device, 60)
    call = valid_call(case, "rope_store_kv") | change(case)
    alternate = device.stream()
    refused(case, lambda: kv.rope_store_kv(**call, alt_stream=alternate), error, name)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_call_that_errors_start_from_is_right(device, operation):
    case = RopeCase(device, 61)
    getattr(kv, operation)(**valid_call(case, operation))
    kv.check_faults(device)


@pytest.mark.parametrize(
    ("operation", "output"),
    [
        ("apply_rope", "query"),
        ("apply_rope", "key"),
        ("rope_store_kv", "query"),
        ("rope_store_kv", "key"),
        ("rope_store_kv", "k_cache"),
        ("rope_store_kv", "v_cache"),
        ("rope_store_mla", "query"),
        ("rope_store_mla", "rope_key"),
        ("rope_store_mla", "cache"),
    ],
)
def test_read_only_outputs_are_refused(device, operation, output):
    case = RopeCase(device, 62)
    call = valid_call(case, operation)
    if not isinstance(call[output], np.ndarray):
        pytest.skip("this array library has no read-only arrays")
    call[output].flags.writeable = False
    refused(case, lambda: getattr(kv, operation)(**call), ValueError, output)


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
