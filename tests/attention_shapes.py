"""Sequences for attention: one new token each, few, and as many as take tensor cores."""

from __future__ import annotations

import pytest
from attention_cases import AttentionCase

LENS = [9, 0, 30, 14, 5]
FEW = [3, 0, 1, 9, 5]
LONG = [70, 5, 90, 33, 20]
MANY = [30, 0, 40, 9, 20]
SHAPES = {"decode": (LENS, None), "few": (LENS, FEW), "many": (LONG, MANY)}
EVICTED = [(4, 3), (0, 5), (9, 8), (14, 2), (0, 4)]
"""Start and size of evicted spans: within a page, empty, two pages, past the end, at the start."""
STARTS = [2, 0, 11, 0, 4]

shapes = pytest.mark.parametrize("shape", SHAPES)
formats = pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])


def trees_of(case, lens, new, padding=0):
    """Return trees with nodes of earlier steps, of this step alone, and sequences without one."""
    appended = [1] * len(lens) if new is None else new
    nodes = [min(n + extra, length) for n, extra, length in
             zip(appended, (4, 0, 0, 2, 0), lens, strict=True)]  # fmt: skip
    nodes[2] = 0
    return case.nodes(nodes, appended, padding) | case.tail(nodes)


def call_of(
    device, seed, shape, fmt, *, evicted=False, starts=False, trees=False, rope=None, **more
):
    """Return a case and its arguments."""
    case = AttentionCase(device, seed)
    lens, new = SHAPES[shape]
    args = case.arguments(
        lens, new, fmt=fmt, evicted=EVICTED if evicted else None,
        key_starts=STARTS if starts else None,
        **{"widths": (32, 24), **more},
    )  # fmt: skip
    if rope:
        args |= case.rope(**rope)
    if trees:
        args |= trees_of(case, lens, new, more.get("padding", 0))
    return case, args
