"""`apply_rope`, by what a user sees of it (`rope_cases` says how it is compared)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers import from_values, random_elements
from rope_cases import FLOATS, POSITIONS, THREE, RopeCase, arguments, assert_rotated

import kvcupy as kv
from kvcupy import reference
from kvcupy.testing.tolerances import ulp

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
        case.apply(query, key, table, positions, interleaved=interleaved)


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (5, 3), (2, 4), (7, 1), (71, 33)], ids=str)
def test_grouped_heads(device, heads):
    case = RopeCase(device, 1)
    case.apply(*arguments(case, heads=heads, width=16))
    case.apply(*arguments(case, heads=heads, width=16, rotary_dim=10), interleaved=True)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("fmt", FLOATS)
def test_far_positions(device, fmt, interleaved):
    """At most one unit of fp16 and bf16 from float64 where nothing cancels; two of fp32."""
    case = RopeCase(device, 2)
    positions = [131_071, 0, 131_070, 65_537, 99_991, 131_071]
    query, key = (case.rows(fmt, (6, heads, 40)) for heads in (4, 2))
    table = case.table(32, positions, 131_072)
    before = [arg.view.copy() for arg in (query, key)]
    case.apply(query, key, table, case.positions(positions), interleaved=interleaved)
    both = reference.cos_sin(table.view, np.array(positions))
    for rows, arg in zip(before, (query, key), strict=True):
        exact = reference.rotate(rows, *both, interleaved=interleaved)
        units = np.abs(reference.decode(arg.view, fmt) - exact) / ulp(exact, fmt)
        x = reference.decode(rows, fmt)
        units = units[np.abs(exact) > np.abs(x) / 16]
        assert units.size > 400 and units.max() <= (2 if fmt == "fp32" else 1)


def cancelling(rng, fmt, cosine, sine):
    """Rows whose first rotated half is next to nothing: y is x cos / sin, rounded."""
    x = from_values(rng.uniform(1, 900, cosine.shape), fmt)
    with np.errstate(divide="ignore", over="ignore"):
        y = reference.decode(x, fmt) * cosine / sine
    y = from_values(np.where(np.abs(y) < 3e4, y, 1.0), fmt)
    return np.concatenate([x, y], axis=1)


@pytest.mark.parametrize("fmt", FLOATS)
def test_cancellation(device, fmt):
    """Products rounded to the format before the sum would leave nothing right of the result."""
    case = RopeCase(device, 3)
    positions = np.arange(60)
    table = case.table(64, positions)
    cosine, sine = reference.cos_sin(table.view, positions)
    content = cancelling(case.rng, fmt, cosine, sine)
    exact = reference.rotate(content, cosine, sine)[:, :32]
    x = np.abs(reference.decode(content[:, :32], fmt))
    assert (np.abs(exact) < x / 256).mean() > 0.3, "the input tells nothing"
    rows = [case.place(content[:, None], fmt), case.place(content[::-1, None], fmt)]
    case.apply(*rows, table, case.positions(positions))


def rounded_products(rows, cosine, sine, fmt):
    """A rotation in the arithmetic of the format itself."""

    def once(values):
        return reference.decode(reference.encode(values, fmt), fmt)

    x = reference.decode(rows, fmt)
    half = cosine.shape[1]
    a, b, c, s = x[:, :half], x[:, half:], once(cosine), once(sine)
    return np.concatenate([once(once(a * c) - once(b * s)), once(once(b * c) + once(a * s))], 1)


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "mistake", ["arithmetic", "table", "sign", "pairs", "position", "truncated"]
)
def test_tolerance_tells_mistakes(fmt, mistake):
    rng = np.random.default_rng(4)
    table = reference.rope_table(130, 32)
    positions = np.arange(100, 120)
    both = reference.cos_sin(table, positions)
    rows = from_values(rng.standard_normal((20, 32)), fmt)
    right = reference.rotate(rows, *both)
    assert_rotated(from_values(right, fmt), rows, *both)
    wrong = from_values(
        {
            "arithmetic": lambda: rounded_products(rows, *both, fmt),
            "table": lambda: reference.rotate(
                rows, *(reference.decode(from_values(part, "bf16"), "bf16") for part in both)
            ),
            "sign": lambda: reference.rotate(rows, both[0], -both[1]),
            "pairs": lambda: reference.rotate(rows, *both, interleaved=True),
            "position": lambda: reference.rotate(rows, *reference.cos_sin(table, positions + 1)),
            "truncated": lambda: right - np.sign(right) * ulp(right, fmt) * 0.5,
        }[mistake](),
        fmt,
    )
    with pytest.raises(pytest.fail.Exception):
        assert_rotated(wrong, rows, *both)


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
    case.apply(query, key, table, positions, interleaved=interleaved)
    case.apply(
        case.place(small, fmt), case.place(small[::-1], fmt), table, positions,
        interleaved=interleaved,
    )  # fmt: skip


def test_overflow_of_fp16_is_infinity(device):
    """60000 cos + 60000 sin does not fit; a table with a factor takes 60000 itself beyond."""
    case = RopeCase(device, 6)
    rows = np.full((6, 2, 8), 60000, np.float16)
    scaling = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 16}
    for options in ({}, {"scaling": scaling}):
        key, query = case.place(rows, "fp16"), case.place(-rows, "fp16")
        case.apply(query, key, case.table(8, POSITIONS, **options), case.positions(POSITIONS))
        assert np.isinf(key.view).any() and np.isinf(query.view).any()


# Outputs, strides, positions -----------------------------------------------------------------


@pytest.mark.parametrize("fmt", FLOATS)
@pytest.mark.parametrize("outputs", ["query", "key", "both"])
def test_out_of_place(device, outputs, fmt):
    """The input keeps its bits; what does not turn is copied, bits and all."""
    for interleaved, norm in itertools.product((False, True), (False, True)):
        case = RopeCase(device, 7)
        query, key, table, positions = arguments(case, fmt, width=20, rotary_dim=12)
        tail = random_elements(case.rng, fmt, 6 * 3 * 8).reshape(6, 3, 8)
        if not norm:
            query.view[..., 12:] = tail
            query.buffer.restore()
        options = {"interleaved": interleaved}
        if norm:
            options |= {f"{side}_norm": case.rows("fp32", (20,)) for side in ("query", "key")}
        if outputs != "key":
            options["query_out"] = case.output(fmt, (6, 3, 20), name="query_out")
        if outputs != "query":
            options["key_out"] = case.output(fmt, (6, 2, 20), name="key_out")
        case.apply(query, key, table, positions, **options)


def test_without_query(device):
    for interleaved in (False, True):
        case = RopeCase(device, 8)
        _, key, table, positions = arguments(case)
        case.apply(None, key, table, positions, interleaved=interleaved)
        out = case.output("bf16", (6, 2, 8))
        case.apply(None, key, table, positions, interleaved=interleaved, key_out=out)


def test_query_and_key_follow_their_own_formats(device):
    for formats in itertools.permutations(FLOATS, 2):
        case = RopeCase(device, 9)
        query, key = case.rows(formats[0], (6, 3, 8)), case.rows(formats[1], (6, 2, 8))
        case.apply(query, key, case.table(8, POSITIONS), case.positions(POSITIONS))


def test_rows_past_the_positions_are_padding(device):
    """They hold NaN, and are neither read nor written, in place and out of place."""
    case = RopeCase(device, 14)
    query, key = case.rows("bf16", (9, 3, 8)), case.rows("bf16", (9, 2, 8))
    for arg in (query, key):
        arg.view[6:] = np.nan
        arg.buffer.restore()
    table, positions = case.table(8, POSITIONS), case.positions(POSITIONS)
    case.apply(query, key, table, positions)
    case.apply(query, key, table, positions, query_out=case.output("bf16", (9, 3, 8)))


def test_table_without_rows(device):
    case = RopeCase(device, 17)
    query, key, _, positions = arguments(case)
    case.apply(query, key, case.place(np.zeros((0, 8), np.float32), "fp32"), positions)


# Norm and sections ---------------------------------------------------------------------------


def test_norm_of_one_alone_and_other_eps(device):
    for options in ({"eps": 1e-5}, {"eps": 0.5}, {}):
        case = RopeCase(device, 19)
        for side in ("query", "key"):
            norm = {f"{side}_norm": case.rows("fp32", (8,))}
            case.apply(*arguments(case, rotary_dim=4), **norm, **options)
        _, key, table, positions = arguments(case)
        case.apply(None, key, table, positions, key_norm=case.rows("bf16", (8,)), **options)


@pytest.mark.parametrize("fmt", FLOATS)
def test_norm_of_small_large_and_zero_rows(device, fmt):
    case = RopeCase(device, 20)
    scales = [0, 1e-6, 1e-3, 60, 1e3, 6e3] if fmt == "fp16" else [0, 1e-12, 1e-3, 1e3, 1e9, 1e15]
    content = case.rng.standard_normal((6, 2, 64)) * np.array(scales)[:, None, None]
    query, key = (case.place(from_values(c, fmt), fmt) for c in (content, -content[::-1]))
    norms = [case.rows("fp32", (64,)) for _ in range(2)]
    case.apply(
        query, key, case.table(64, POSITIONS), case.positions(POSITIONS), query_norm=norms[0],
        key_norm=norms[1],
    )  # fmt: skip


def test_sections_may_be_a_list_and_positions_a_transposed_view(device):
    case = RopeCase(device, 23)
    query, key = case.rows("bf16", (6, 3, 16)), case.rows("bf16", (6, 2, 16))
    positions = case.place(np.ascontiguousarray(THREE.T), "int64", lambda a: a.T)
    case.apply(query, key, case.table(16, THREE), positions, sections=[2, 3, 3])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_one_of_three_positions_outside_the_table(device, axis):
    case = RopeCase(device, 24)
    values = THREE.copy()
    values[axis, [1, 4]] = [64, -3]
    query, key = case.rows("bf16", (6, 3, 16)), case.rows("bf16", (6, 2, 16))
    case.apply(query, key, case.table(16, values), case.positions(values), sections=(2, 3, 3))


def test_against_transformers(device):
    """Its own function on the same table, in float32: a few units of float32 apart."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rng = np.random.default_rng(59)
    query, key = (rng.standard_normal((6, heads, 64)).astype(np.float32) for heads in (8, 2))
    table = np.asarray(device.to_numpy(kv.rope_table(4096, 64, device=device)))
    positions = np.array([0, 1, 77, 4095, 4095, 1000])
    cos, sin = (
        torch.from_numpy(np.tile(table[positions][:, part], 2))[None]
        for part in (slice(32), slice(32, 64))
    )
    expected = llama.apply_rotary_pos_emb(
        *(torch.from_numpy(rows).transpose(0, 1)[None] for rows in (query, key)), cos, sin
    )
    live = [device.asarray(rows.copy()) for rows in (query, key)]
    kv.apply_rope(*live, device.asarray(table), device.asarray(positions))
    for got, want in zip(live, expected, strict=True):
        np.testing.assert_allclose(
            device.to_numpy(got), want[0].transpose(0, 1).numpy(), rtol=0, atol=2e-6
        )
