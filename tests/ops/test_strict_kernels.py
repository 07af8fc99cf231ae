"""The strict host device notices the kernels' own synchronisation and alignment, one piece missing.

A result that happens to be right does not hide it: each is refused in the first order of threads.
More barriers and waits are left out by `test_mutants.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from kernel_checks import check_attention, check_merge_two
from prefill_calls import Call
from valid_calls import check_case

import kvcupy as kv
from kvcupy.ops import attention_choice

NOT_WAITED = "has not been waited for"
RACE = f"no barrier lies between|nobody has written|{NOT_WAITED}"
PREFILL, DECODE = "attention_prefill.cu", "attention_decode_mma.cu"
LATENT, HEADS = "attention_decode_latent.cu", "attention_decode_heads.cu"
REDUCE = "    for (int i = 0; i < warps; ++i) value = fmaxf(value, scratch[first_warp + i]);\n"


def rotate_at_any_element(device: Any) -> None:
    """Pairs of bf16 that begin two bytes past a multiple of four."""
    query, key = (device.zeros(13, "bf16")[1:].reshape(3, 2, 2) for _ in "qk")
    table = kv.rope_table(8, 2, device=device)
    kv.apply_rope(query, key, table, np.arange(3), interleaved=True)


CALLS = {
    # Several tiles of queries and of keys.
    "prefill": Call(seq_lens=(150,), query_lens=(70,), widths=(128, 128)).check,
    # Several tiles of keys for each warp, on tensor cores.
    "decode": Call(kernel="decode", seq_lens=(350,), query_lens=(9,), widths=(128, 128)).check,
    **{name: partial(check_attention, name=name) for name in ("latents", "heads")},
    "plain": partial(check_attention, name="decode"),
    # Rows that several warps share, each with its scale.
    "wide rows": partial(check_case, operation="store_kv", name="wide rows, scales by row"),
    "rotate": rotate_at_any_element,
    "merge": check_merge_two,
}


def barrier(comment: str, block: str = "threads") -> str:
    return f"__sync{block}();  // {comment}"


KEYS = "keys have arrived"
VALUES_DONE = f"{KEYS}, and the values of the last tile are no longer needed"
MISSING = [  # the file, what stands there, and instead, a call, and what is then refused
    (PREFILL, barrier("the tile is known"), "", "prefill", RACE),
    (PREFILL, "request(1); wait_for_copies();", "request(1);", "prefill", NOT_WAITED),
    # Where a warp runs ahead, its copies have landed by then, but no barrier orders them.
    (PREFILL, f"wait_for_copies(); {barrier(VALUES_DONE)}", barrier(VALUES_DONE), "prefill", RACE),
    (PREFILL, "const bool has_rows = first_row < t.num_rows;",
     "const bool has_rows = first_row + lane < t.num_rows;", "prefill", "waits for lane"),
    (f"{DECODE}h", barrier("the tile is known"), "", "decode", RACE),
    (DECODE, barrier("queries and limits are there"), "", "decode", RACE),
    (DECODE, f"wait_for_copy_groups<kPending>(); {barrier(KEYS, 'warp')}", barrier(KEYS, "warp"),
     "decode", RACE),
    (LATENT, barrier("the first tables, queries and limits are there"), "", "latents", RACE),
    (LATENT, "wait_for_copy_groups<kStages - 1>();", "", "latents", RACE),
    (HEADS, barrier("the first tables and limits are there, and what quarters of queries reach"),
     "", "heads", RACE),
    (HEADS, "wait_for_copies(); __syncthreads();", "__syncthreads();", "heads", RACE),
    ("attention.cu", barrier("the groups have written theirs"), "", "plain", RACE),
    ("common.cuh", "    __syncthreads();\n" + REDUCE, REDUCE, "wide rows", RACE),
    ("common.cuh", "constexpr u32 kAllLanes = 0xffffffffu;",
     "constexpr u32 kAllLanes = 0xfffffffeu;", "plain",
     "does not name its own lane 0|which the mask does not name"),
    ("rope.cu", "kCount > 1 && interleaved", "interleaved", "rotate", "misaligned address"),
    ("merge.cu", "__syncwarp(lanes_of_row(lanes))", "__syncwarp()", "merge", "has exited"),
]  # fmt: skip


@pytest.fixture
def strict(kernel_sources, monkeypatch):
    monkeypatch.setattr(kv.config, "_strict", True)
    return kernel_sources


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_refused(strict, call):
    """The control of the test below."""
    CALLS[call](strict.device("-O0"))


@pytest.mark.parametrize("missing", MISSING, ids=[f"{m[0]} {m[1][:40]}" for m in MISSING])
def test_what_is_missing_is_refused(strict, missing):
    file, old, new, call, refused = missing
    strict.replace(file, old, new)
    with pytest.raises(kv.DeviceError, match=refused) as caught:
        CALLS[call](strict.device("-O0"))
    for named in (file.partition(".")[0], "block (", "thread ("):
        assert named in str(caught.value) or file == "common.cuh", str(caught.value)


def test_more_threads_than_launch_bounds_allow(strict, monkeypatch):
    monkeypatch.setattr(attention_choice, "_DECODE_THREADS", 256)
    with pytest.raises(kv.DeviceError, match=r"attention_decode.*256 threads.*bounds allow 128"):
        check_attention(strict.device(), "decode")
