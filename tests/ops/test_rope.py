"""`apply_rope`, by what a user sees of it (`rope_cases` says how it is compared)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import from_values, random_elements
from rope_cases import FLOATS, POSITIONS, THREE, RopeCase, arguments

from kvcupy import reference

HEAD_DIMS = (2, 4, 6, 64, 80, 96, 100, 112, 128, 192, 256)

# Rotation ------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", FLOATS)
@pytest.mark.parametrize("width", HEAD_DIMS)
def test_head_dims(device, width, fmt, interleaved):
    """All of the head, and parts of it, the smallest and the largest among them."""
    for rotary_dim in sorted({width, 2, width // 4 * 2, width - 2} - {0}):
        case = RopeCase(device, (width, rotary_dim))
        query, key, table, positions = arguments(
            case, fmt, tokens=3, width=width, rotary_dim=rotary_dim, positions=(63, 0, 17)
        )
        case.rotate("apply_rope", query, key, table, positions, interleaved=interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", FLOATS)
def test_special_values(device, fmt, interleaved):
    """Infinities and NaN reach their own pair alone; subnormals count; the rest keeps its bits."""
    case = RopeCase(device, 5)
    content = random_elements(case.rng, fmt, 2 * 6 * 3 * 24).reshape(2, 6, 3, 24)
    content[np.abs(reference.decode(content, fmt)) > 1e37] = from_values(np.inf, fmt)
    small = from_values(case.rng.standard_normal((6, 3, 24)) * 3e-39, fmt)
    if fmt == "fp16":
        small = from_values(case.rng.standard_normal((6, 3, 24)) * 1e-6, fmt)
    query, key = (case.place(c, fmt) for c in content)
    table, positions = case.table(16, POSITIONS), case.positions(POSITIONS)
    case.rotate("apply_rope", query, key, table, positions, interleaved=interleaved)
    case.rotate(
        "apply_rope", case.place(small, fmt), case.place(small[::-1], fmt), table, positions,
        interleaved=interleaved,
    )  # fmt: skip


# Outputs, strides, positions -----------------------------------------------------------------


def test_without_query(device):
    for interleaved in (False, True):
        case = RopeCase(device, 8)
        _, key, table, positions = arguments(case)
        case.rotate("apply_rope", None, key, table, positions, interleaved=interleaved)
        out = case.output("bf16", (6, 2, 8))
        case.rotate("apply_rope", None, key, table, positions, interleaved=interleaved, key_out=out)


def test_query_and_key_follow_their_own_formats(device):
    for formats in itertools.permutations(FLOATS, 2):
        case = RopeCase(device, 9)
        query, key = case.rows(formats[0], (6, 3, 8)), case.rows(formats[1], (6, 2, 8))
        case.rotate("apply_rope", query, key, case.table(8, POSITIONS), case.positions(POSITIONS))


def test_rows_past_the_positions_are_padding(device):
    """They hold NaN, and are neither read nor written, in place and out of place."""
    case = RopeCase(device, 14)
    query, key = case.rows("bf16", (9, 3, 8)), case.rows("bf16", (9, 2, 8))
    for arg in (query, key):
        arg.view[6:] = np.nan
        arg.buffer.restore()
    table, positions = case.table(8, POSITIONS), case.positions(POSITIONS)
    case.rotate("apply_rope", query, key, table, positions)
    case.rotate(
        "apply_rope", query, key, table, positions, query_out=case.output("bf16", (9, 3, 8))
    )


def test_table_without_rows(device):
    case = RopeCase(device, 17)
    query, key, _, positions = arguments(case)
    case.rotate(
        "apply_rope", query, key, case.place(np.zeros((0, 8), np.float32), "fp32"), positions
    )


# Norm and sections ---------------------------------------------------------------------------


def test_norm_of_one_alone_and_other_eps(device):
    for options in ({"eps": 1e-5}, {"eps": 0.5}, {}):
        case = RopeCase(device, 19)
        for side in ("query", "key"):
            norm = {f"{side}_norm": case.rows("fp32", (8,))}
            case.rotate("apply_rope", *arguments(case, rotary_dim=4), **norm, **options)
        _, key, table, positions = arguments(case)
        case.rotate(
            "apply_rope", None, key, table, positions, key_norm=case.rows("bf16", (8,)), **options
        )


@pytest.mark.parametrize("fmt", FLOATS)
def test_norm_of_small_large_and_zero_rows(device, fmt):
    case = RopeCase(device, 20)
    scales = [0, 1e-6, 1e-3, 60, 1e3, 6e3] if fmt == "fp16" else [0, 1e-12, 1e-3, 1e3, 1e9, 1e15]
    content = case.rng.standard_normal((6, 2, 64)) * np.array(scales)[:, None, None]
    query, key = (case.place(from_values(c, fmt), fmt) for c in (content, -content[::-1]))
    norms = [case.rows("fp32", (64,)) for _ in range(2)]
    case.rotate(
        "apply_rope",
        query, key, case.table(64, POSITIONS), case.positions(POSITIONS), query_norm=norms[0],
        key_norm=norms[1],
    )  # fmt: skip


def test_sections_may_be_a_list_and_positions_a_transposed_view(device):
    case = RopeCase(device, 23)
    query, key = case.rows("bf16", (6, 3, 16)), case.rows("bf16", (6, 2, 16))
    positions = case.place(np.ascontiguousarray(THREE.T), "int64", lambda a: a.T)
    case.rotate("apply_rope", query, key, case.table(16, THREE), positions, sections=[2, 3, 3])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_one_of_three_positions_outside_the_table(device, axis):
    case = RopeCase(device, 24)
    values = THREE.copy()
    values[axis, [1, 4]] = [64, -3]
    query, key = case.rows("bf16", (6, 3, 16)), case.rows("bf16", (6, 2, 16))
    case.rotate(
        "apply_rope", query, key, case.table(16, values), case.positions(values), sections=(2, 3, 3)
    )
