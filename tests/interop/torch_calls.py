"""A call of every operator of `torch.ops.kvcupy`, with tensors on the device of the run."""

from __future__ import annotations

from typing import Any

import every_call
import numpy as np
import torch

import kvcupy.interop.torch as kvt
from kvcupy.interop.torch_operators import OPERATORS

Call = dict[str, Any]

NAMES = tuple(each.name for each in OPERATORS)


def tensors(call: Call) -> Call:
    """Return a call's arrays as tensors, each with memory of its own."""
    return {n: kvt.as_tensor(x).clone() if hasattr(x, "shape") else x for n, x in call.items()}


def without(call: Call, *names: str) -> Call:
    return {name: x for name, x in call.items() if name not in names}


def zeros(call: Call, **like: str) -> Call:
    """Return a call with outputs like some of its arguments."""
    return {**call, **{name: torch.zeros_like(call[other]) for name, other in like.items()}}


def make_calls(device: Any) -> dict[str, Call]:
    """Return a call of the public function that comes to each operator, by the operator's name."""
    full = {name: tensors(make(device)) for name, make in every_call.CALLS.items()}
    rope, fused = (without(full[n], "query_out") for n in ("apply_rope", "rope_store_kv"))
    mla, keep = full["rope_store_mla"], {"write_key": False}
    by_name = {
        **full,
        "apply_rope": rope,
        "apply_rope_query_out": zeros(rope, query_out="query"),
        "apply_rope_key_out": zeros(rope, key_out="key"),
        "apply_rope_query_out_key_out": zeros(rope, query_out="query", key_out="key"),
        "rope_store_kv": fused,
        "rope_store_kv_keep_key": fused | keep,
        "rope_store_kv_query_out": zeros(fused, query_out="query"),
        "rope_store_kv_query_out_keep_key": zeros(fused, query_out="query") | keep,
        "rope_store_mla_keep_key": mla | keep,
        "rope_store_mla_query_out": zeros(mla, query_out="query"),
        "rope_store_mla_query_out_keep_key": zeros(mla, query_out="query") | keep,
        "page_table_csr": without(full["slot_mapping"], "append_lens", "out"),
        "find_duplicate_slots": {
            "slot_mapping": kvt.as_tensor(device.asarray(np.array([4, 1, 4, -1, -1])))
        },
    }
    for name, outputs in (
        ("gather_kv", ("k_out", "v_out")), ("paged_attention", ("out", "lse_out")),
        ("merge_states", ("out", "lse_out")), ("slot_mapping", ("out",)),
    ):  # fmt: skip
        by_name[f"{name}_out"] = by_name[name]
        by_name[name] = without(by_name[name], *outputs)
    return {name: copied(by_name[name]) for name in NAMES}


def function_of(name: str) -> str:
    """Return the name of the public function that an operator belongs to."""
    (operator,) = (each for each in OPERATORS if each.name == name)
    return operator.row.name


def copied(call: Call) -> Call:
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in call.items()}


def operands(name: str, call: Call) -> tuple[tuple[Any, ...], Call]:
    """Return what an operator takes for a call: positional arguments, and outputs."""
    (operator,) = (each for each in OPERATORS if each.name == name)
    values = without(call, "write_key")
    if name == "copy_pages":
        values["cache"] = [values["cache"]]
    schema = getattr(torch.ops.kvcupy, name).default._schema
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    positional = tuple(values.get(n, defaults.get(n)) for n in operator.names)
    return positional, without(values, *operator.names)


def leaves(result: Any) -> list[Any]:
    """Return the tensors of a result."""
    if result is None:
        return []
    return list(result) if isinstance(result, (list, tuple)) else [result]


def assert_same(got: Call, want: Call) -> None:
    """Compare the bits of all tensors of two calls."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        if isinstance(x, torch.Tensor):
            assert_bits(x, want[name], name)


def assert_bits(got: Any, want: Any, what: str) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    bits = [x.detach().cpu().contiguous().view(torch.uint8) for x in (got, want)]
    assert torch.equal(*bits), f"{what}\ngot  {got}\nwant {want}"
