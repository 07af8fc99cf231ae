"""What operations refuse of each argument and option, from the declarations in `kvcupy.ops.spec`.

A call that is wrong in one place raises before any launch, names the argument, or one that has to
fit it, and changes nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import valid_calls
from helpers import FORMATS, repeat_rows

import kvcupy as kv
from kvcupy.arrays import view
from kvcupy.ops.spec import OPERATIONS, Declaration

Call = dict[str, Any]

BESIDE = {"v_scale": "v_scale_cache", "k_scale_cache": "k_scale"}
"""Arguments that an example does not have, and what it then has to do without."""


def call_with(declaration: Declaration, name: str, device: Any) -> Call:
    """Return a valid call that has an argument, whether examples have it or not."""
    call = valid_calls.example(declaration, device)
    if name not in call:
        call[name] = valid_calls.example_of(declaration.public_arguments[name], device)
        call.pop(BESIDE.get(name, ""), None)
        if name == "query_lens":
            call[name] = device.asarray(np.array([1, 1]))
    return call


ARGUMENTS = [
    (operation, name)
    for operation, declaration in OPERATIONS.items()
    for name, argument in declaration.public_arguments.items()
    if argument.shape
]

_SCALES = "[kv]_scale (axis 0 of 1|one axis less|strided|reversed)"
_TABLE = "rope_table axis 0 of 1[57]"
_MLA = r"cache (axis 0 of [13]|axis 1 of [35]|one axis less)|scale (one axis \w+|strided|reversed)"
ACCEPTED = {
    "store_kv": f"(key|value) axis 0 of 4|slot_mapping axis 0 of 2|{_SCALES}",
    "store_mla": f"(latent|rope_key) axis 0 of 4|slot_mapping axis 0 of 2|{_MLA}",
    "gather_kv": f"slots axis 0 of 2|[kv]_out axis 0 of 4|{_SCALES}",
    "merge_states": "lse_(a|b|out) (strided|reversed)",
    "paged_attention":
        f"block_table axis 1 of [13]|(sinks|lse_out|tree_mask) (strided|reversed)|{_SCALES}"
        "|tree_mask axis 1 of .",
    "apply_rope":
        f"(query|key|query_out|key_out) axis 0 of 4|key axis 1 of [13]|positions axis 0 of 2"
        f"|{_TABLE}",
    "rope_store_kv":
        f"(query|key|value|query_out) axis 0 of 4|slot_mapping axis 0 of 2|{_TABLE}|{_SCALES}",
    "rope_store_mla":
        f"(query|latent|rope_key|query_out) axis 0 of 4|slot_mapping axis 0 of 2|{_TABLE}|{_MLA}",
    "copy_pages": r"cache (float64|uint16|int32|axis .*|one axis \w+)",
    "shift_pages": rf"pool (axis .*|one axis less)|{_TABLE}",
    "store_state": "caches axis 0 of [79]",
    "gather_state": "caches axis 0 of [79]",
    "update_conv_state":
        "x axis 0 of [24]|cache axis 0 of [79]|cache axis 2 of [24]|(x|cache) (strided|reversed)",
    "slot_mapping": "block_table axis 1 of [13]|out axis 0 of [79]",
    "page_table_csr": "block_table axis 1 of 3",
    "find_duplicate_slots": "slot_mapping (axis 0 of [46]|odd .*)",
}  # fmt: skip
"""By operation, arguments and changes that leave a call valid: rows without a slot or position,
tables of another length, scales for all heads, arrays of any strides. `find_duplicate_slots` reads
on the host, which takes any address."""


def changes_of(array: Any, device: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is wrong, an array that is wrong so, and the error."""
    shape, index = array.shape, view(array).format in ("int32", "int64")
    for dtype in (
        ("float32", "uint32", "int16", "bool") if index else ("float64", "uint16", "int32")
    ):
        yield dtype, device.zeros(shape, np.dtype(dtype)), (TypeError, ValueError)
    yield "a list", device.to_numpy(array).tolist(), TypeError
    if array.dtype.itemsize > 1:
        raw = device.zeros((array.nbytes + 1,), np.uint8)
        yield "odd addresses", raw[1:].view(array.dtype).reshape(shape), ValueError
    for axis in range(len(shape)):
        for size in (shape[axis] - 1, shape[axis] + 1):
            other = tuple(size if a == axis else n for a, n in enumerate(shape))
            yield f"axis {axis} of {size}", device.zeros(other, array.dtype), ValueError
    yield "one axis more", array.reshape(*shape, 1), ValueError
    yield "one axis less", array[0] if len(shape) > 1 else array[:1].reshape(()), ValueError
    if not index:
        wide = device.zeros((*shape[:-1], 2 * shape[-1]), array.dtype)
        yield "strided", wide[..., ::2], ValueError
        yield "reversed", array[..., ::-1], ValueError


def related(declaration: Declaration, name: str) -> str:
    """Return the arguments that share a dimension with one, itself among them, as a pattern."""
    sizes = {n: set(a.shape.split()) for n, a in declaration.public_arguments.items()}
    of_latents = {"cache"} & sizes.keys()  # as wide as two arguments together
    return "|".join(n for n in sizes if n == name or sizes[n] & sizes[name] or n in of_latents)


@pytest.mark.parametrize(("operation", "name"), ARGUMENTS)
def test_calls_that_are_changed_below_are_valid(device, operation, name):
    getattr(kv, operation)(**call_with(OPERATIONS[operation], name, device))
    kv.check_faults(device)


def content(device: Any, call: Call) -> dict[str, bytes]:
    device.synchronize()
    return {
        name: device.to_numpy(array).tobytes() for name, array in call.items()
        if hasattr(array, "shape") and not isinstance(array, kv.ArrayView)
    }  # fmt: skip


def refused(device: Any, operation: str, call: Call, error: Any, names: str) -> None:
    """Assert that a call raises, names one of some arguments, and changes nothing."""
    before = content(device, call)
    with pytest.raises(error) as caught:
        getattr(kv, operation)(**call)
    assert re.search(rf"^({names})\b.*: |\b({names})\b", str(caught.value)), caught.value
    assert content(device, call) == before
    kv.check_faults(device)


@pytest.mark.parametrize(("operation", "name"), ARGUMENTS)
def test_arrays_that_do_not_fit(device, operation, name):
    """Their dtype, the size of each axis, the number of axes, strides, or that they are arrays.

    A GPU cannot read elements at odd addresses, and the plan of a right call lets none by.
    """
    declaration = OPERATIONS[operation]
    getattr(kv, operation)(**call_with(declaration, name, device))
    for what, array, error in changes_of(call_with(declaration, name, device)[name], device):
        call = call_with(declaration, name, device) | {name: array}
        if re.fullmatch(ACCEPTED[operation], f"{name} {what}"):
            if name.endswith("scale"):
                array[...] = 1  # strict mode refuses a scale of 0
            getattr(kv, operation)(**call)
            device.synchronize()
            with contextlib.suppress(kv.IndexFault):  # of pages past the end of a smaller cache
                kv.check_faults(device)
            continue
        if declaration.public_arguments[name].fresh and error is TypeError:
            error = (TypeError, ValueError)  # its format may have to match another argument
        refused(device, operation, call, error, related(declaration, name))
        if "alt_stream" in declaration.parameters:  # all launches, or half of it has run
            call["alt_stream"] = device.stream()
            refused(device, operation, call, error, related(declaration, name))


@pytest.mark.parametrize(("operation", "name"), ARGUMENTS)
def test_arrays_of_another_device(device, operation, name):
    declaration = OPERATIONS[operation]
    call = call_with(declaration, name, device)
    at = view(call[name])
    call[name] = kv.ArrayView(4096, at.shape, at.strides, at.format, "cuda:7")
    names = "|".join((*call, "cuda"))
    refused(device, operation, call, (ValueError, kv.DeviceError), names)


@pytest.mark.parametrize(
    ("operation", "name"), [(o, n) for o, n in ARGUMENTS if OPERATIONS[o].is_required(n)]
)
def test_arguments_that_are_required(device, operation, name):
    call = call_with(OPERATIONS[operation], name, device)
    refused(device, operation, call | {name: None}, (TypeError, ValueError), name)
    del call[name]
    refused(device, operation, call, TypeError, name)


# Outputs -----------------------------------------------------------------------------------------

OUTPUTS = [
    (operation, name)
    for operation, name in ARGUMENTS
    if name in OPERATIONS[operation].written(dict.fromkeys(OPERATIONS[operation].parameters, True))
    or any(a.name == name and a.output for a in OPERATIONS[operation].arguments)
]


@pytest.mark.parametrize(("operation", "name"), OUTPUTS)
def test_outputs_that_cannot_be_written(device, operation, name):
    """Those that are read-only, and those whose elements share one place."""
    call = call_with(OPERATIONS[operation], name, device)
    row = call[name][:1].copy()
    repeated = repeat_rows(row, len(call[name]))
    refused(device, operation, call | {name: repeated}, ValueError, name)
    if isinstance(call[name], np.ndarray):
        call[name].flags.writeable = False
        refused(device, operation, call, ValueError, name)


@pytest.mark.parametrize(("operation", "name"), OUTPUTS)
def test_outputs_share_no_byte_with_another_argument(device, operation, name):
    declaration = OPERATIONS[operation]
    call = call_with(declaration, name, device)
    for other, array in call.items():
        if other == name or not hasattr(array, "shape"):
            continue
        start = (call[name].nbytes - 1) // 8 * 8  # one element or two
        memory = device.zeros((max(start + array.nbytes, call[name].nbytes),), np.uint8)
        both = {
            name: memory[: call[name].nbytes].view(call[name].dtype).reshape(call[name].shape),
            other: memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape),
        }
        if array.size and "scale" in other:
            both[other][...] = 1
        refused(device, operation, call | both, ValueError, f"{name}|{other}")


@pytest.mark.parametrize(
    ("operation", "options"),
    [*((o, {}) for o in valid_calls.EXAMPLES), ("rope_store_kv", {"write_key": False})],
)
def test_inputs_may_be_read_only(device, operation, options):
    declaration = OPERATIONS[operation]
    call = valid_calls.example(declaration, device) | options
    written = set(declaration.written(call))
    for name, array in call.items():
        if name not in written and isinstance(array, np.ndarray):
            array.flags.writeable = False
    getattr(kv, operation)(**call)
    kv.check_faults(device)


# Options -----------------------------------------------------------------------------------------

BOTH = (TypeError, ValueError)
NUMBERS = [(float(x), ValueError) for x in ("nan", "inf", "-inf", "1e60")] + [
    ("3", TypeError), ([3], TypeError)]  # fmt: skip
FLAG = [(1, TypeError), (None, TypeError), ("yes", TypeError)]
STREAM = [("main", TypeError), (7, TypeError)]
OPTIONS: dict[str, list[tuple[Any, Any]]] = {
    "layout": [("NDH", ValueError), (None, BOTH)],
    "skip_slot": [(1.5, BOTH), ("5", BOTH), (2**63, ValueError), (-(2**70), ValueError)],
    "page_size": [(0, ValueError), (-4, ValueError), (2.5, BOTH)],
    "dtype": [("float99", BOTH), ("fp32x", BOTH)],
    "lse_base": [(x, BOTH) for x in ("10", "E", 2, None, 2.718)],
    "sm_scale": NUMBERS,
    "logits_soft_cap": [*NUMBERS, (-3.0, ValueError)],
    "window": [*((x, ValueError) for x in (0, -1, -(2**40))), (4.5, BOTH), ("3", TypeError),
               ([3], TypeError)],
    "sink_tokens": [(-1, ValueError), (1.5, BOTH), ("2", BOTH)],
    **dict.fromkeys(("return_lse", "causal", "interleaved", "write_key"), FLAG),
    "stream": STREAM, "alt_stream": STREAM,
}  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "name"),
    [(o, n) for o, d in OPERATIONS.items() for n in d.parameters if n in OPTIONS],
)
def test_options_that_are_none(device, operation, name):
    for value, error in OPTIONS[name]:
        call = valid_calls.example(OPERATIONS[operation], device)
        refused(device, operation, call | {name: value}, error, name)


NUMBER_ARGUMENTS = [
    (operation, name) for operation, name in ARGUMENTS
    if OPERATIONS[operation].public_arguments[name].number
    and not OPERATIONS[operation].public_arguments[name].whole
]  # fmt: skip


@pytest.mark.parametrize(("operation", "name"), NUMBER_ARGUMENTS)
def test_scales_that_are_none(device, operation, name):
    """A number that nothing can be divided by, one besides the scale of each row, and any scale of
    a cache that is not quantised, but 1."""
    declaration = OPERATIONS[operation]
    bad = [(float(x), ValueError) for x in ("0", "-1", "nan", "inf", "1e-60")] + [("1", TypeError)]
    for value, error in bad:
        call = call_with(declaration, name, device) | {name: value}
        refused(device, operation, call, error, name)
    cache = next(n for n, a in declaration.public_arguments.items() if a.cache)
    scales = [n for n, a in declaration.public_arguments.items() if "scale" in n and n != name]
    for fmt in ("fp32", "fp16", "bf16"):
        call = valid_calls.example(declaration, device, fmt)
        call = {n: x for n, x in call.items() if n not in scales}
        for value in (2.0, device.asarray(np.full(2 if cache != "cache" else 1, 2, np.float32))):
            refused(device, operation, call | {name: value}, ValueError, name)
        getattr(kv, operation)(**call | {name: 1.0})
    of_slots = f"{name}_cache"
    if of_slots in declaration.public_arguments:
        call = call_with(declaration, of_slots, device) | {name: 2.0}
        refused(device, operation, call, ValueError, f"{name}|{of_slots}")
        plain = valid_calls.example(declaration, device, "bf16")
        call = {n: x for n, x in plain.items() if "scale" not in n}
        call[of_slots] = call_with(declaration, of_slots, device)[of_slots]
        refused(device, operation, call, ValueError, of_slots)


# What one operation refuses ----------------------------------------------------------------------


def ones(fmt: str, *shape: int) -> Callable[[Any], Any]:
    """Make an array of a format of kvcupy, or of a dtype of NumPy."""

    def make(device: Any) -> Any:
        return valid_calls.array(device, *shape, fmt=fmt) if fmt in FORMATS else device.asarray(
            np.ones(shape, fmt))  # fmt: skip

    return make


WIDER_QUERY = {"query": ones("fp32", 3, 4, 16), "query_out": None, "query_norm": None}
THREE_POSITIONS = {"positions": ones("int64", 3, 3)}
ONE_ROPE = [  # of all rotary operations
    ({"rope_table": ones("fp32", 16, 10)}, ValueError, "rope_table|rotary_dim|query|key|rope_key"),
    ({"rope_table": ones("fp32", 16, 0)}, ValueError, "rope_table"),
    ({"query": ones("fp8_e4m3", 3, 4, 8)}, TypeError, "query"),
    ({"query_out": ones("fp16", 3, 4, 8)}, BOTH, "query_out"),
]
ROPE = [
    *ONE_ROPE,
    (WIDER_QUERY, ValueError, "query"),
    ({"key": ones("fp8_e5m2", 3, 2, 8)}, TypeError, "key"),
    (THREE_POSITIONS, ValueError, "positions|sections"),
    ({"sections": (1, 1, 0)}, ValueError, "positions"),
    *(
        (THREE_POSITIONS | {"sections": bad}, BOTH, "sections")
        for bad in ((2, 2, 1), (2, 2), (5, -2, 1), "224")
    ),
]
STATES = "out_a|out_b|lse_a|lse_b|out|lse_out"


def two_states(device: Any) -> tuple[Any, Any]:
    return device.zeros((3, 4), np.int8), device.zeros((3, 2), np.float32)


def caches_that_overlap(device: Any) -> tuple[Any, Any]:
    whole = device.zeros((8, 16), np.int8)
    return whole[:, 1:5], whole[:, 4:12].view(np.float32)


WRONG_CACHES = [  # of two states
    (lambda d: d.zeros((8, 4), np.int8), TypeError),
    (lambda d: (d.zeros((8, 4), np.int8), d.zeros((7, 2), np.float32)), ValueError),
    (lambda d: (d.zeros((8, 4), np.int8), d.zeros((8, 3), np.float32)), ValueError),
    (lambda d: (d.zeros((8, 4), np.int8), d.zeros((8, 2), np.int32)), TypeError),
    (lambda d: (d.zeros((8, 4), np.int8), None), TypeError),
    (caches_that_overlap, ValueError),
]
SPECIAL: dict[str, list[tuple[Call, Any, str]]] = {
    "store_kv": [
        ({"value": ones("fp32", 3, 3, 6), "v_cache": ones("int8", 2, 4, 3, 6),
          "v_scale_cache": None}, ValueError,
         "key|value|k_cache|v_cache"),
        ({"v_scale_cache": 1.0}, TypeError, "v_scale_cache"),
    ],
    "gather_kv": [
        ({"dtype": "fp16"}, BOTH, "dtype|k_out"),
        ({"v_scale_cache": 1.0}, TypeError, "v_scale_cache"),
    ],
    "apply_rope": [*ROPE, ({"key_out": ones("fp16", 3, 2, 8)}, BOTH, "key_out")],
    "rope_store_kv": [
        *ROPE, ({"positions": ones("int64", 2)}, ValueError, "positions|slot_mapping"),
        ({"value": ones("fp8_e4m3", 3, 2, 6)}, TypeError, "value"),
    ],
    "rope_store_mla": [
        *((changes | {"query": ones("fp32", 3, 4, 4)} if "query" not in changes else changes, *row)
          for changes, *row in ONE_ROPE),
        (THREE_POSITIONS, ValueError, "positions"),
        ({"latent": ones("int8", 3, 12)}, TypeError, "latent"),
        ({"positions": ones("int64", 2)}, ValueError, "positions|slot_mapping"),
    ],
    "merge_states": [
        ({"out_b": ones("bf16", 3, 2, 8)}, BOTH, "out_b|out_a"),
        ({"out_a": ones("int8", 3, 2, 8)}, TypeError, "out_a"),
        ({name: ones("fp16", 3, 2, 8) for name in ("out_a", "out_b")}, BOTH, "out"),
        ({"out_b": None, "lse_b": None, "out_a": ones("fp32", 0, 3, 2, 8),
          "lse_a": ones("fp32", 0, 3, 2)}, ValueError, STATES),
        *(({name: None}, BOTH, STATES) for name in ("lse_a", "out_b", "lse_b")),
    ],
    "paged_attention": [
        ({"query": ones("fp8_e4m3", 2, 4, 8)}, TypeError, "query"),
        *(({"query": ones("fp32", 2, heads, 8)}, ValueError, "query|k_cache") for heads in (1, 3)),
        ({"sinks": 2, "window": 3}, TypeError, "sinks"),
        ({"out": ones("bf16", 2, 4, 6)}, BOTH, "out"),
        ({"query": ones("fp32", 4, 4, 8)}, ValueError, "query|query_lens|seq_lens|block_table"),
    ],
    "copy_pages": [
        ({"cache": ()}, ValueError, "cache"),
        ({"cache": lambda d: d.zeros((), np.float32)}, ValueError, "cache"),
        ({"cache": lambda d: (d.zeros((4, 3), np.int8), d.zeros((5, 3), np.int8))}, ValueError,
         "cache"),
        ({"cache": lambda d: SimpleNamespace(parts=(d.zeros((4, 3), np.int8), None))}, TypeError,
         "cache"),
        ({"cache": lambda d: (whole := d.zeros((4, 9), np.int8)) is not None
          and (whole[:, :5], whole[:, 4:])}, ValueError, "cache"),
        ({"cache": lambda d: SimpleNamespace(
            parts=(kv.ArrayView(0, (8, 3), (3, 1), "int8", "cuda:7"),))}, BOTH,
         "cache|src_pages"),
    ],
    "shift_pages": [
        *(({"delta": delta}, ValueError, "delta") for delta in (16, -16, 2**63, -(2**70))),
        *(({"delta": delta}, TypeError, "delta") for delta in (3.0, True, "3", [3, -2])),
        ({"pool": ones("int8", 4, 4, 2, 3)}, ValueError, "pool"),
        ({"pool": ones("int8", 4, 4)}, ValueError, "pool"),
        ({"rope_table": ones("fp32", 16, 10)}, ValueError, "pool"),
        ({"rope_table": ones("fp32", 0, 4), "delta": 0}, ValueError, "rope_table"),
    ],
    "store_state": [
        *(({"states": arrays, "caches": arrays}, TypeError, "states") for arrays in ((), [1, 2])),
        ({"states": lambda d: (d.zeros((3, 4), np.int8),)}, TypeError, "states"),
        ({"caches": lambda d: (d.zeros((8, 4), np.int8), d.zeros((8, 4), np.int8))}, TypeError,
         "caches"),
        *(({"states": two_states, "caches": make}, error, "caches|states")
          for make, error in WRONG_CACHES),
        *(({"states": make}, ValueError, "states") for make in (
            lambda d: d.zeros((3, 4, 2), np.float32).swapaxes(1, 2),
            lambda d: d.zeros((), np.float32),
            lambda d: kv.view_as(d.zeros((3, 72), np.uint8), "nvfp4"),
        )),
    ],
    "gather_state": [
        ({"caches": lambda d: [d.zeros((8, 4), np.int8)] * 3}, TypeError, "caches"),
        ({"out": lambda d: [d.zeros((3, 2, 8), np.float32)] * 2}, TypeError, "out"),
        ({"caches": lambda d: kv.view_as(d.zeros((8, 72), np.uint8), "nvfp4")}, ValueError,
         "caches"),
    ],
    "update_conv_state": [
        ({"x": ones("fp32", 3)}, ValueError, "x"),
        ({"x": ones("bf16", 3, 8)}, TypeError, "x|cache"),
        ({"cache": ones("fp32", 8, 8)}, ValueError, "cache"),
        ({"cache": lambda d: kv.view_as(d.zeros((8, 8, 72), np.uint8), "nvfp4")}, ValueError,
         "cache"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "changes", "error", "names"),
    [pytest.param(o, *row, id=f"{o} {i}") for o, rows in SPECIAL.items()
     for i, row in enumerate(rows)],
)  # fmt: skip
def test_what_one_operation_refuses(device, operation, changes, error, names):
    call = valid_calls.example(OPERATIONS[operation], device)
    call |= {n: value(device) if callable(value) else value for n, value in changes.items()}
    refused(device, operation, call, error, names)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_options_are_keywords(device, operation):
    declaration = OPERATIONS[operation]
    call = valid_calls.example(declaration, device)
    positional = [
        name for name, parameter in declaration.parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]  # fmt: skip
    values = [call.get(name) for name in positional]
    with pytest.raises(TypeError, match="positional"):
        getattr(kv, operation)(*values, call)
