"""`rope_store_kv` and `rope_store_mla`, by what a user sees of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import LAYOUTS, QUANTISED
from rope_cases import FLOATS, POSITIONS, SLOTS, THREE, RopeCase, mla_arguments, store_arguments

from kvcupy.ops import call, rope


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("write_key", [True, False])
@pytest.mark.parametrize("query", ["in place", "out", "none"])
def test_outputs(device, query, write_key, latent):
    """`write_key=False` leaves the key's bits, `query_out` the query's."""
    for cache_fmt in ("bf16", "fp8_e5m2"):
        case = RopeCase(device, 33)
        arguments = mla_arguments if latent else store_arguments
        args = list(arguments(case, cache_fmt=cache_fmt, rotary_dim=6))
        options = {"write_key": write_key}
        if query == "none":
            args[0] = None
        elif query == "out":
            options["query_out"] = case.output("bf16", (6, 3, 8))
        case.rotate("rope_store_mla" if latent else "rope_store_kv", *args, SLOTS, **options)


def test_key_and_value_follow_their_own_formats(device):
    for formats in (
        ("fp32", "bf16", "fp16", "int8", "fp16"),
        ("bf16", "fp16", "fp32", "fp16", "fp8_e4m3"),
        ("fp16", "fp16", "bf16", "fp8_e5m2", "bf16"),
    ):
        case = RopeCase(device, 34)
        query, key = case.rows(formats[0], (6, 3, 8)), case.rows(formats[1], (6, 2, 8))
        value = case.input(formats[2], (6, 2, 6))
        caches = [case.output(fmt, (12, 2, w)) for fmt, w in zip(formats[3:], (8, 6), strict=True)]
        case.rotate(
            "rope_store_kv",
            query,
            key,
            value,
            case.table(8, POSITIONS),
            case.positions(POSITIONS),
            *caches,
            SLOTS,
        )


# Slots of a store ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4])
@pytest.mark.parametrize("cache_fmt", ["bf16", "int8"])
def test_tokens_without_a_slot_are_rotated(device, cache_fmt, count):
    """The value has no row for them either."""
    for write_key in (True, False):
        case = RopeCase(device, 35)
        query, key, _, table, positions, *caches = store_arguments(case, cache_fmt=cache_fmt)
        value = case.rows("bf16", (count, 2, 6))
        case.rotate(
            "rope_store_kv",
            query,
            key,
            value,
            table,
            positions,
            *caches,
            SLOTS[:count],
            write_key=write_key,
        )


@pytest.mark.parametrize("layout", ["slots", *LAYOUTS])
def test_skipped_slots_are_rotated_and_not_written(device, layout):
    options = {"layout": layout} if layout in LAYOUTS else {}
    for cache_fmt, write_key in (("bf16", True), ("fp8_e4m3", True), ("fp8_e4m3", False)):
        case = RopeCase(device, 37)
        args = store_arguments(case, cache_fmt=cache_fmt, layout=layout)
        case.rotate(
            "rope_store_kv",
            *args, [3, -1, 5, -(2**32) + 3, 5, -(2**63)], skip_slot=5, write_key=write_key,
            **options,
        )  # fmt: skip
        case.rotate("rope_store_kv", *args, [-1] * 6, write_key=write_key, **options)
        case.rotate("rope_store_kv", *args, [0] * 6, skip_slot=0, write_key=write_key, **options)


@pytest.mark.parametrize("bad", [-1, 64, 2**32 + 3, -(2**63)])
@pytest.mark.parametrize("write_key", [True, False])
def test_position_outside_the_table_is_not_stored(device, write_key, bad):
    for cache_fmt in ("bf16", "int8"):
        case = RopeCase(device, 39)
        values = np.array(POSITIONS)
        values[[0, 3, 5]] = bad
        args = store_arguments(case, cache_fmt=cache_fmt, positions=values)
        case.rotate(
            "rope_store_kv",
            *args,
            SLOTS,
            write_key=write_key,
            query_out=case.output("bf16", (6, 3, 8)),
        )
        case.rotate("rope_store_kv", *args, SLOTS[:4], write_key=write_key)
        if cache_fmt == "int8":
            scales = case.scale_caches(12)
            case.rotate("rope_store_kv", *args, SLOTS, write_key=write_key, **scales)


def test_rows_past_the_positions_hold_nan(device):
    case = RopeCase(device, 42)
    query, key, value, table, positions, *caches = store_arguments(
        case, "bf16", "fp8_e4m3", tokens=9
    )
    for arg in (query, key, value):
        arg.view[6:] = np.nan
        arg.buffer.restore()
    scales = case.scale_caches(12)
    case.rotate("rope_store_kv", query, key, value, table, positions, *caches, SLOTS, **scales)


@pytest.mark.parametrize("fmt", FLOATS)
@pytest.mark.parametrize("cache_fmt", ["own", "fp8_e4m3", "int8"])
def test_store_with_norms_and_sections(device, cache_fmt, fmt):
    for mixed, write_key, weights in itertools.product((False, True), (True, False), ("fp32", fmt)):
        case = RopeCase(device, 43)
        query, key = case.rows(fmt, (6, 3, 20)), case.rows(fmt, (6, 2, 20))
        value = case.rows(fmt, (6, 2, 24))
        caches = [
            case.output(fmt if cache_fmt == "own" else cache_fmt, (12, 2, w)) for w in (20, 24)
        ]
        norms = {f"{side}_norm": case.rows(weights, (20,)) for side in ("query", "key")}
        case.rotate(
            "rope_store_kv",
            query, key, value, case.table(16, THREE), case.positions(THREE), *caches, SLOTS,
            sections=(3, 3, 2), sections_interleaved=mixed, write_key=write_key, eps=1e-5,
            **norms,
        )  # fmt: skip


# Others --------------------------------------------------------------------------------------


def test_key_that_is_not_written_may_be_the_value(device):
    case = RopeCase(device, 64)
    _, key, _, table, positions, *_ = store_arguments(case)
    caches = [case.output("bf16", (12, 2, 8)) for _ in range(2)]
    case.rotate("rope_store_kv", None, key, key, table, positions, *caches, SLOTS, write_key=False)


# Long calls -----------------------------------------------------------------------------------


@pytest.fixture
def several_heads(monkeypatch):
    """Let groups of lanes take as many heads as they can hold, as in calls of many tokens."""
    monkeypatch.setattr(rope, "_MIN_SM_THREADS", 0)
    monkeypatch.setattr(call, "_plans", {})


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cache_fmt", ["bf16", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("fmt", FLOATS)
def test_several_heads_at_once(device, several_heads, fmt, cache_fmt, interleaved):
    """Of one segment or several, partly rotated, in whole packs or not; two positions are bad."""
    widths = ((64, 64, 64), (96, 64, 128), (256, 32, 16), (40, 18, 7))
    for (width, rotary_dim, v_width), fresh in itertools.product(widths, (False, True)):
        case = RopeCase(device, (53, width))
        shape = {"width": width, "v_width": v_width, "rotary_dim": rotary_dim}
        positions = 5, 0, 64, 5, 17, -1
        args = list(store_arguments(case, fmt, cache_fmt, **shape, positions=positions))
        args[0] = case.rows(fmt, (6, 7, width), name="query")
        options = {"interleaved": interleaved, "write_key": not fresh}
        if fresh:
            options["query_out"] = case.output(fmt, (6, 7, width), name="query_out")
        if cache_fmt in QUANTISED:
            options |= {"k_scale": np.float32([2.0, 0.1]), "v_scale": 0.03}
        case.rotate("rope_store_kv", *args, SLOTS[:5], **options)


@pytest.mark.parametrize("rank", [512, 72, 7])
def test_latents_beside_several_heads(device, several_heads, rank):
    for fmt, cache_fmt in (("bf16", "bf16"), ("fp32", "fp16"), ("bf16", "fp8_e4m3")):
        case = RopeCase(device, (54, rank))
        args = mla_arguments(case, fmt, cache_fmt, rank=rank, width=64, heads=9)
        case.rotate("rope_store_mla", *args, SLOTS)
