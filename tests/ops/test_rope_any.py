"""`apply_rope` and `rope_store_kv` with anything that they take."""

from __future__ import annotations

import numpy as np
from helpers import FORMATS, LAYOUTS, QUANTISED, cache_shape, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rope_cases import FLOATS, RopeCase


@st.composite
def rope_calls(draw):
    """Shapes, strides and formats of one call."""
    width = 2 * draw(st.integers(1, 128))
    rotary_dim = 2 * draw(st.integers(1, width // 2))
    sections = None
    if draw(st.booleans()):
        first = draw(st.integers(0, rotary_dim // 2))
        second = draw(st.integers(0, rotary_dim // 2 - first))
        sections = (first, second, rotary_dim // 2 - first - second)
    return {
        "seed": draw(st.integers(0, 2**32 - 1)),
        "fmt": draw(st.sampled_from(FLOATS)),
        "cache_fmt": draw(st.sampled_from(FORMATS)),
        "width": width,
        "rotary_dim": rotary_dim,
        "tokens": draw(st.integers(0, 5)),
        "padding": draw(st.integers(0, 2)),
        "heads": (draw(st.integers(1, 5)), draw(st.integers(1, 3))),
        "interleaved": draw(st.booleans()),
        "sections": sections,
        "views": tuple(draw(st.integers(0, 3)) for _ in range(3)),
        "misalign": tuple(draw(st.integers(0, 9)) for _ in range(3)),
        "index": (draw(st.sampled_from(["int32", "int64"])), draw(st.sampled_from([1, 2, -1]))),
        "outputs": draw(st.sampled_from(["none", "query", "key", "both"])),
        "norms": draw(st.sampled_from(["none", "query", "key", "both"])),
        "weights": draw(st.sampled_from(["fp32", "own"])),
        "faults": draw(st.booleans()),
        "layout": draw(st.sampled_from(["NHD", "HND", "slots"])),
        "write_key": draw(st.booleans()),
        "missing_slots": draw(st.integers(0, 3)),
        "scale": draw(st.sampled_from(["none", "float", "per head", "dynamic"])),
    }


def drawn_rows(case, fmt, view, shape, misalign):
    """Rows behind one of four kinds of strides."""
    tokens, heads, width = shape
    base, cut = {
        0: (shape, None),
        1: ((tokens, heads + 2, width), lambda a: a[:, 1 : heads + 1]),
        2: (shape, lambda a: a[::-1, ::-1]),
        3: ((heads, tokens, width + 1), lambda a: a.transpose(1, 0, 2)[..., 1:]),
    }[view]
    return case.rows(fmt, base, cut, misalign=misalign)


def drawn_call(device, call):
    """The case, the arguments that all operations share, and the options."""
    case = RopeCase(device, call["seed"])
    fmt, width, tokens = call["fmt"], call["width"], call["tokens"]
    query, key = (
        drawn_rows(
            case,
            fmt,
            call["views"][i],
            (tokens + call["padding"], call["heads"][i], width),
            call["misalign"][i],
        )
        for i in (0, 1)
    )
    low, high = (-2, 34) if call["faults"] else (0, 32)
    values = case.rng.integers(low, high, (3, tokens) if call["sections"] else tokens)
    table = case.table(call["rotary_dim"], values, 32, pad=call["padding"])
    options = {"interleaved": call["interleaved"]}
    if call["sections"]:
        options["sections"] = call["sections"]
    for side in ("query", "key"):
        if call["norms"] in (side, "both"):
            weights = "fp32" if call["weights"] == "fp32" else fmt
            options[f"{side}_norm"] = case.rows(weights, (width,))
    return case, query, key, table, case.positions(values, *call["index"]), options


@settings(max_examples=examples(80), deadline=None, database=None)
@given(call=rope_calls())
def test_any_rotation(device, call):
    case, query, key, table, positions, options = drawn_call(device, call)
    for side, rows in (("query", query), ("key", key)):
        if call["outputs"] in (side, "both"):
            options[f"{side}_out"] = case.output(
                call["fmt"], rows.view.shape, misalign=call["misalign"][2]
            )
    case.apply(query, key, table, positions, **options)


@settings(max_examples=examples(80), deadline=None, database=None)
@given(call=rope_calls())
def test_any_rotation_and_store(device, call):
    case, query, key, table, positions, options = drawn_call(device, call)
    heads, v_width = call["heads"][1], call["width"] // 2 + 1
    rows = key.view.shape[0]
    value = drawn_rows(
        case, call["fmt"], call["views"][2], (rows, heads, v_width), call["misalign"][2]
    )
    caches = [
        case.output(call["cache_fmt"], cache_shape(call["layout"], 3, 4, heads, width))
        for width in (call["width"], v_width)
    ]
    if call["layout"] in LAYOUTS:
        options["layout"] = call["layout"]
    if call["outputs"] in ("query", "both"):
        options["query_out"] = case.output(call["fmt"], query.view.shape)
    options["write_key"] = call["write_key"]
    if call["cache_fmt"] in QUANTISED:
        for side in "kv":
            if call["scale"] == "dynamic":
                options[f"{side}_scale_cache"] = case.output("fp32", (12, heads))
            elif call["scale"] != "none":
                scales = case.rng.uniform(0.1, 3, heads).astype(np.float32)
                options[f"{side}_scale"] = scales if call["scale"] == "per head" else 0.3
    count = max(call["tokens"] - call["missing_slots"], 0)
    slots = case.rng.permutation(np.arange(-2, 14 if call["faults"] else 12))[:count]
    case.store(
        query, key, value, table, positions, *caches, case.slots(slots, *call["index"]), **options
    )
