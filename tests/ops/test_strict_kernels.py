"""The strict host device notices the kernels' own synchronisation and alignment, one piece missing.

A result that happens to be right does not hide it: each is refused in the first order of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
from attention_cases import AttentionCase
from helpers import full_only
from kernel_checks import check_attention, check_merge_two
from valid_calls import check_case, name_check

import kvcupy as kv
from kvcupy.ops import attention_choice

NOT_WAITED = "has not been waited for"
RACE = f"no barrier lies between|nobody has written|{NOT_WAITED}"
PREFILL, DECODE = "attention_prefill.cu", "attention_decode_mma.cu"
LATENT, HEADS = "attention_decode_latent.cu", "attention_decode_heads.cu"


def rotate_at_any_element(device: Any) -> None:
    """Pairs of bf16 that begin two bytes past a multiple of four."""
    query, key = (device.zeros(13, "bf16")[1:].reshape(3, 2, 2) for _ in "qk")
    table = kv.rope_table(8, 2, device=device)
    kv.apply_rope(query, key, table, np.arange(3), interleaved=True)


def attend_fp16(device: Any, length: int, new: int) -> None:
    case = AttentionCase(device, 1)
    shape = {"heads": (2, 1), "widths": (128, 128), "page_size": 16}
    case.attend(case.arguments([length], [new], fmt="fp16", **shape))


def prefill(device: Any) -> None:
    """Several tiles of queries and of keys."""
    attend_fp16(device, 150, 70)


def decode(device: Any) -> None:
    """Several tiles of keys for each warp, on tensor cores."""
    attend_fp16(device, 350, 6)


def wide_rows(device: Any) -> None:
    """Rows that several warps share, each with its scale."""
    check_case(device, "store_kv", "wide rows, scales by row")


@lru_cache
def attends(name: str) -> Callable[[Any], Any]:
    return partial(check_attention, name=name)


@dataclass
class Missing:
    """Text of a kernel, what stands there instead, how often, a call, and what is then refused."""

    file: str
    old: str
    new: str
    call: Callable[[Any], Any]
    refused: str
    count: int = 1


def barrier(comment: str, call: Callable[[Any], Any] = prefill) -> Missing:
    return Missing(PREFILL, f"__syncthreads();  // {comment}", "", call, RACE)


def wait(comment: str) -> Missing:
    barrier = f"__syncthreads();  // {comment}"
    # Where a warp runs ahead, its copies have landed by then, but no barrier orders them.
    return Missing(PREFILL, f"wait_for_copies(); {barrier}", barrier, prefill, RACE)


def warp_barrier(comment: str, call: Callable[[Any], Any] = decode) -> Missing:
    file = f"{DECODE}h" if comment == "the table is written" else DECODE
    return Missing(file, f"__syncwarp();  // {comment}", "", call, RACE)


def wait_for_group(comment: str) -> Missing:
    barrier = f"__syncwarp();  // {comment}"
    waiting = f"wait_for_copy_groups<kPending>(); {barrier}"
    return Missing(DECODE, waiting, barrier, decode, RACE)


REDUCE = "    for (int i = 0; i < warps; ++i) value = fmaxf(value, scratch[first_warp + i]);\n"
BLOCK_BARRIER = "    __syncthreads();\n"

MISSING = {
    "the barrier after the tile": barrier("the tile is known"),
    "the barrier after the queries": barrier(
        "queries have arrived, and the first tables are written"),
    "the barrier after the keys": barrier(
        "keys have arrived, and the values of the last tile are no longer needed"),
    "the barrier after keys are rotated": barrier(
        "all keys are rotated", attends("append, rotated keys")),
    "the barrier after the values": barrier(
        "values and the next table have arrived, and the keys are no longer needed"),
    "the wait for the queries and the first pages": Missing(
        PREFILL, "request(1); wait_for_copies();", "request(1);", prefill, NOT_WAITED),
    "the wait for the keys": wait(
        "keys have arrived, and the values of the last tile are no longer needed"),
    "the wait for the values": wait(
        "values and the next table have arrived, and the keys are no longer needed"),
    "all waits": Missing(
        PREFILL, "wait_for_copies(); __syncthreads();", "__syncthreads();", prefill, NOT_WAITED, 2),
    **{
        f"the barrier: {comment}": barrier(comment, call)
        for comment, call in [
            ("keys are dequantized", attends("prefill of 8 bits")),
            ("values are dequantized", attends("prefill of 4 bits")),
        ]
    },
    "the barrier after the tile of a decode": replace(
        barrier("the tile is known", decode), file=f"{DECODE}h"),
    "the barrier after the tile of latents": replace(
        barrier("the tile is known", attends("latents")), file=f"{DECODE}h"),
    "the barrier after the queries of a decode": replace(
        barrier("queries and limits are there", decode), file=DECODE),
    "the barrier before warps are merged": replace(
        barrier("the results of all warps are there", decode), file=DECODE),
    "the barrier after the table of a warp": warp_barrier("the table is written"),
    "the barrier after the keys of a warp": warp_barrier("keys have arrived"),
    "the barrier after the keys of a warp are rotated": warp_barrier(
        "all keys are rotated", attends("rotated keys, fp16")),
    "the barrier after the use of keys": warp_barrier("keys and their scales are no longer needed"),
    "the barrier after the values of a warp": warp_barrier("values have arrived"),
    "the barrier after the use of values": warp_barrier("values are no longer needed"),
    "the wait for the keys of a warp": wait_for_group("keys have arrived"),
    "the wait for the values of a warp": wait_for_group("values have arrived"),
    "a group that is not closed": Missing(
        DECODE, "end_copy_group();\n    stage = ", "stage = ", decode, RACE),
    **{
        f"the barrier: {comment}": replace(barrier(comment, call), file=LATENT)
        for comment, call in [
            ("the first tables, queries and limits are there",
             attends("latents")),
            ("the tile has arrived", attends("latents")),
            ("all scores are there, and the next table", attends("latents")),
            ("values have taken the place of keys", attends("wide rows")),
            ("the tile is no longer needed", attends("latents")),
        ]
    },
    "the wait for latents": Missing(
        LATENT, "wait_for_copy_groups<kStages - 1>();", "",
        attends("latents"), RACE),
    "the wait for values of their own": Missing(
        LATENT, "wait_for_copies();", "", attends("wide rows"), RACE),
    **{
        f"the barrier: {comment}": replace(barrier(comment, call), file=HEADS)
        for comment, call in [
            ("the first tables and limits are there, and what quarters of queries reach",
             attends("heads")),
            ("the tile has arrived, and the last is no longer needed",
             attends("heads")),
            ("all parts of scores are there, and the keys are no longer needed",
             attends("heads")),
            ("weights are there, and values stored elsewhere",
             attends("heads")),
            ("sums of rows are there, and nothing before the tables is needed",
             attends("heads")),
        ]
    },
    **{
        f"the barrier of a warp: {comment}": Missing(
            HEADS, f"__syncwarp();  // {comment}", "", attends("heads"), RACE)
        for comment in ("the scales of its rows are there", "the results of 16 rows are there",
                        "and have been written")
    },
    "the wait for latents of many heads": Missing(
        HEADS, "wait_for_copies(); __syncthreads();", "__syncthreads();",
        attends("heads"), RACE),
    "the wait for values of their own, of many heads": Missing(
        HEADS, "p.v_cache); wait_for_copies();", "p.v_cache);",
        attends("heads, wide rows"), RACE),
    "the barrier before subwarps are merged": Missing(
        "attention.cu", "__syncthreads();  // the subwarps have written theirs", "",
        attends("decode"), RACE),
    "the barrier before the weights of subwarps are read": Missing(
        "attention.cu", "__syncthreads();  // the weights of subwarps are there", "",
        attends("decode"), RACE),
    "the barrier before the maxima of warps are read": Missing(
        "common.cuh", BLOCK_BARRIER + REDUCE, REDUCE, wide_rows, RACE),
    "the barrier after the maxima of warps are read": Missing(
        "common.cuh", REDUCE + BLOCK_BARRIER, REDUCE, wide_rows, RACE),
    "the alignment of pairs in one word": Missing(
        "rope.cu", "kCount > 1 && interleaved", "interleaved",
        rotate_at_any_element, "misaligned address"),
    "the lanes that are left": Missing(
        "merge.cu", "__syncwarp(lanes_of_row(lanes))", "__syncwarp()",
        check_merge_two, "has exited"),
    "a lane of a mask": Missing(
        "common.cuh", "constexpr u32 kAllLanes = 0xffffffffu;",
        "constexpr u32 kAllLanes = 0xfffffffeu;", attends("decode"),
        "does not name its own lane 0|which the mask does not name"),
    "half a warp of products": Missing(
        PREFILL, "const bool has_rows = first_row < t.num_rows;",
        "const bool has_rows = first_row + lane < t.num_rows;", prefill,
        "waits for lane"),
}  # fmt: skip


@pytest.fixture
def strict(kernel_sources, monkeypatch):
    monkeypatch.setattr(kv.config, "_strict", True)
    return kernel_sources


CALLS = dict.fromkeys(m.call for m in MISSING.values())  # a set of functions has no order


@pytest.mark.parametrize("call", CALLS, ids=name_check)
def test_nothing_is_refused(strict, call):
    """The control of the tests below."""
    call(strict.device("-O0"))


def telling() -> set[str]:
    """Return the first of each kind of what is missing, in each file: what always runs."""
    first: dict[tuple[str, str, bool], str] = {}
    for name, wrong in MISSING.items():
        first.setdefault((wrong.file, wrong.refused, "wait" in name), name)
    return set(first.values())


TELLING = telling()


@pytest.mark.parametrize("missing", [n if n in TELLING else full_only(n) for n in MISSING])
def test_what_is_missing_is_refused(strict, missing):
    wrong = MISSING[missing]
    strict.replace(wrong.file, wrong.old, wrong.new, wrong.count)
    with pytest.raises(kv.DeviceError, match=wrong.refused) as caught:
        wrong.call(strict.device("-O0"))
    for named in (wrong.file.partition(".")[0], "block (", "thread ("):
        assert named in str(caught.value) or wrong.file == "common.cuh", str(caught.value)


def test_more_threads_than_launch_bounds_allow(strict, monkeypatch):
    monkeypatch.setattr(attention_choice, "_DECODE_THREADS", 256)
    with pytest.raises(kv.DeviceError, match=r"attention_decode.*256 threads.*bounds allow 128"):
        check_attention(strict.device(), "decode")
