"""`rope_table`, `apply_rope`, `rope_store_kv` and `rope_store_mla`, by what a user sees of them.

What is rotated is compared with float64, within `allowed_error`; everything else bitwise. A cache
must hold, bit for bit, the store of the rotated key that the operation itself made.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from helpers import (
    FORMATS,
    GUARD_BYTES,
    INDEX_DTYPE,
    POISON_SLOT,
    QUANTISED,
    Arg,
    Buffer,
    Case,
    from_values,
    names_number,
    random_elements,
    repeat_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcupy as kv
from kvcupy import reference

OPERATIONS = ("rope_table", "apply_rope", "rope_store_kv", "rope_store_mla")
if not all(hasattr(kv, name) for name in OPERATIONS):
    pytest.skip("the rotary operations are not exported yet", allow_module_level=True)

FLOATS = ("fp32", "fp16", "bf16")
LAYOUTS = ("NHD", "HND")
HEAD_DIMS = (2, 4, 6, 64, 80, 96, 100, 112, 128, 192, 256)

# Tolerance -----------------------------------------------------------------------------------

MANTISSA_BITS = {"fp32": 23, "fp16": 10, "bf16": 7}
LOWEST_EXPONENT = {"fp32": -126, "fp16": -14, "bf16": -126}

ROUNDING = 2.0**-24
"""The relative error of one float32 operation."""
NORM_ROUNDINGS = 32
"""What a normalised element has been through in float32: sums of up to 256 squares in a warp, a
root and a division, which the GPU may do with two units of error, and two products."""
TINY = 2.0**-147
"""What float32 loses where its results are subnormal."""


def ulp(values: np.ndarray, fmt: str) -> np.ndarray:
    """The unit in the last place of a format at each value."""
    usual = np.isfinite(values) & (values != 0)
    exponent = np.where(usual, np.frexp(np.where(usual, values, 1.0))[1] - 1, -2000)
    return np.ldexp(1.0, np.maximum(exponent, LOWEST_EXPONENT[fmt]) - MANTISSA_BITS[fmt])


def allowed_error(exact, rows, cosine, sine, fmt, *, norm, **options) -> np.ndarray:
    """How far float32 arithmetic and one rounding may be from `exact`.

    `x cos - y sin` is two products and a sum, each of them rounded to float32, and then the one
    rounding to the format. So it is half a unit of the format, plus a float32 rounding of each
    product, whose magnitudes together are at most that of (x, y) times that of (cos, sin). Without
    cancellation this is less than one unit for fp16 and bf16, and less than two for fp32, where
    the products' own errors are as large as the last rounding.
    """
    ones, zeros = np.ones_like(cosine), np.zeros_like(cosine)
    element = reference.rotate(rows, ones, zeros, norm=norm, **options)
    partner = reference.rotate(rows, zeros, ones, norm=norm, **options)
    length = np.hypot(cosine, sine)
    spread = np.repeat(length, 2, 1) if options["interleaved"] else np.tile(length, 2)
    spread = np.concatenate(
        [spread, np.ones((len(spread), rows.shape[-1] - spread.shape[1]))], axis=1
    )
    radius = np.hypot(element, partner) * (spread[:, None] if rows.ndim == 3 else spread)
    before = ROUNDING * (radius * (1 if norm is None else 1 + NORM_ROUNDINGS) + np.abs(exact))
    return ulp(exact, fmt) / 2 + before + TINY


def assert_rotated(
    got, rows, cosine, sine, *, norm=None, width=None, name="rows", seed=None, **options
) -> None:
    """Assert that the first `width` elements of `got` are the rotated `rows`."""
    options = {"interleaved": False, "eps": 1e-6, **options}
    fmt = reference.format_of(rows)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = reference.rotate(rows, cosine, sine, norm=norm, **options)
        allowed = allowed_error(exact, rows, cosine, sine, fmt, norm=norm, **options)
        want = reference.decode(reference.encode(exact, fmt), fmt)
        values = reference.decode(got, fmt)
        right = (values == want) | (np.isnan(values) & np.isnan(want))
        right |= np.abs(values - exact) <= allowed
    wrong = ~right[..., :width]
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        pytest.fail(
            f"{name}: {int(wrong.sum())} of {wrong.size} elements differ; first at index {at}: "
            f"got {values[at]}, want {exact[at]} within {allowed[at]}, seed {seed}"
        )


# One call and its check ----------------------------------------------------------------------


def bits(array: np.ndarray) -> np.ndarray:
    return reference.bits_of(array, reference.format_of(array))


class RopeCase(Case):
    """The buffers of one test, with calls of the rotary operations that check everything."""

    def rows(self, fmt, shape, cut=None, *, misalign=0, name="rows"):
        """Rows of usual magnitudes."""
        values = self.rng.standard_normal(shape) * 10.0 ** self.rng.integers(-2, 3, shape)
        return self.place(from_values(values, fmt), fmt, cut, misalign=misalign, name=name)

    def positions(self, values, dtype="int64", step=1):
        """An index array of one or two dimensions, every `step`-th of a longer one of poison."""
        values = np.asarray(values, np.int64)
        count, spread = values.shape[-1], max(abs(step), 1)
        content = np.full((*values.shape[:-1], count * spread), POISON_SLOT, INDEX_DTYPE[dtype])
        content[..., ::spread] = values if step > 0 else values[..., ::-1]
        first = (count - 1) * spread if step < 0 and count else None
        return self.place(content, dtype, lambda a: a[..., first::step], name="positions")

    def table(self, rotary_dim, positions, max_positions=64, *, pad=0, **options):
        """A table that is NaN wherever no position looks, and between its rows."""
        positions = np.asarray(positions, np.int64)
        used = np.unique(positions[(positions >= 0) & (positions < max_positions)])
        content = np.full((max_positions, rotary_dim + pad), np.nan, np.float32)
        frequencies = reference.rope_frequencies(max_positions, rotary_dim, **options)
        content[used, :rotary_dim] = reference.rope_rows(used, *frequencies)
        return self.place(content, "fp32", lambda a: a[:, :rotary_dim], name="rope_table")

    def live(self, arg):
        """What an argument holds on the device, as a NumPy array."""
        buffer = arg.buffer
        flat = np.asarray(self.device.to_numpy(buffer.raw))[buffer.start : buffer.stop]
        return arg._cut(flat.view(buffer.dtype))

    def twin(self, arg):
        """A copy of an argument at the same alignment and strides, which is not compared."""
        buffer = arg.buffer
        payload = buffer.want[buffer.start : buffer.stop].copy().view(buffer.dtype)
        copy = Buffer(self, buffer.fmt, payload, buffer.start - GUARD_BYTES, buffer.name)
        return Arg(copy, arg._cut)

    def issue(self, operation, args, stream, options):
        def to_pass(value):
            if isinstance(value, Arg):
                return value.array
            return self.device.asarray(value) if isinstance(value, np.ndarray) else value

        if stream is not None:
            self.device.synchronize()
        getattr(kv, operation)(
            *map(to_pass, args),
            stream=stream,
            **{name: to_pass(value) for name, value in options.items()},
        )
        if stream is not None:
            stream.synchronize()

    def take_over(self, rows, target, table, positions, norm, options):
        """Check rotated rows, and let the mirror hold what the device holds of them."""
        if rows is None:
            return
        target = rows if target is None else target
        tokens = inside(positions.view, len(table.view))
        cosine, sine = reference.cos_sin(
            table.view,
            positions.view[..., tokens],
            options.get("sections"),
            options.get("sections_interleaved", False),
        )
        before, got = rows.view[tokens].copy(), self.live(target)[tokens]
        width = table.view.shape[1] if norm is None else before.shape[-1]
        assert_rotated(
            got,
            before,
            cosine,
            sine,
            width=width,
            name=rows.buffer.name,
            seed=self.seed,
            norm=None if norm is None else norm.view,
            interleaved=options.get("interleaved", False),
            eps=options.get("eps", 1e-6),
        )
        bits(target.view)[tokens] = bits(before)
        bits(target.view)[tokens, ..., :width] = bits(got)[..., :width]

    def apply(
        self, query, key, table, positions, *, query_out=None, key_out=None, stream=None, **options
    ):
        """Check one `kv.apply_rope`."""
        outputs = {"query_out": query_out, "key_out": key_out}
        self.issue("apply_rope", (query, key, table, positions), stream, {**outputs, **options})
        self.take_over(query, query_out, table, positions, options.get("query_norm"), options)
        self.take_over(key, key_out, table, positions, options.get("key_norm"), options)
        self.finish("apply_rope", table, positions, [])

    def store(
        self,
        query,
        key,
        value,
        table,
        positions,
        k_cache,
        v_cache,
        slots,
        *,
        stream=None,
        **options,
    ):
        """Check one `kv.rope_store_kv`."""
        slots = slots if isinstance(slots, Arg) else self.slots(slots)
        args = (query, key, value, table, positions, k_cache, v_cache, slots)
        self.issue("rope_store_kv", args, stream, options)
        self.take_over(
            query, options.get("query_out"), table, positions, options.get("query_norm"), options
        )
        rotated = key
        if not options.get("write_key", True):  # Ask for the key that was not written.
            rotated = self.twin(key)
            again = {
                name: self.twin(value) if name.endswith("scale_cache") else value
                for name, value in options.items()
                if name not in ("write_key", "query_out", "query_norm")
            }
            args = (
                None,
                rotated,
                value,
                table,
                positions,
                self.twin(k_cache),
                self.twin(v_cache),
                slots,
            )
            self.issue("rope_store_kv", args, stream, again)
        self.take_over(rotated, None, table, positions, options.get("key_norm"), options)
        for source, cache in ((key, k_cache), (value, v_cache)):
            cache.buffer.exact &= source.fmt == cache.fmt
        names = ("layout", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache", "skip_slot")
        faults = reference.store_kv(
            rotated.view,
            value.view,
            k_cache.view,
            v_cache.view,
            without_outsiders(slots.view, positions.view, len(table.view)),
            **{name: mirrored(options[name]) for name in names if name in options},
        )
        self.finish("rope_store_kv", table, positions, faults)

    def store_mla_rotated(
        self, query, latent, rope_key, table, positions, cache, slots, *, stream=None, **options
    ):
        """Check one `kv.rope_store_mla`."""
        slots = slots if isinstance(slots, Arg) else self.slots(slots)
        args = (query, latent, rope_key, table, positions, cache, slots)
        self.issue("rope_store_mla", args, stream, options)
        self.take_over(query, options.get("query_out"), table, positions, None, options)
        rotated = rope_key
        if not options.get("write_key", True):
            rotated = self.twin(rope_key)
            again = {
                name: value
                for name, value in options.items()
                if name not in ("write_key", "query_out")
            }
            args = (None, latent, rotated, table, positions, self.twin(cache), slots)
            self.issue("rope_store_mla", args, stream, again)
        self.take_over(rotated, None, table, positions, None, options)
        cache.buffer.exact &= latent.fmt == cache.fmt == rope_key.fmt
        names = ("scale", "skip_slot")
        faults = reference.store_mla(
            latent.view,
            rotated.view,
            cache.view,
            without_outsiders(slots.view, positions.view, len(table.view)),
            **{name: mirrored(options[name]) for name in names if name in options},
        )
        self.finish("rope_store_mla", table, positions, faults)

    def finish(self, operation, table, positions, slot_faults):
        """Compare the fault record and every buffer with what they should be."""
        axes = np.atleast_2d(positions.view)
        count = axes.shape[1]
        # In an array (3, T), a token may be named by its own index or by that in memory.
        named = [
            ("positions", place, int(axes[axis, token]))
            for axis, token in np.argwhere((axes < 0) | (axes >= len(table.view))).tolist()
            for place in {token, axis * count + token}
        ]
        named += [("slot_mapping", *fault) for fault in slot_faults]
        if named:
            with pytest.raises(kv.IndexFault) as caught:
                kv.check_faults(self.device)
            text = str(caught.value)
            assert operation in text
            assert any(
                name in text and names_number(text, place) and names_number(text, value)
                for name, place, value in named
            ), f"none of {named[:5]} in {text!r}"
        kv.check_faults(self.device)
        for buffer in self.buffers:
            buffer.check()


def mirrored(value):
    return value.view if isinstance(value, Arg) else value


def inside(positions, max_positions):
    """The tokens whose positions the table has."""
    axes = np.atleast_2d(positions)
    return np.flatnonzero(((axes >= 0) & (axes < max_positions)).all(axis=0))


def without_outsiders(slots, positions, max_positions):
    """The slots, -1 for tokens that are not rotated."""
    tokens = np.arange(len(slots))
    return np.where(np.isin(tokens, inside(positions, max_positions)), slots, -1)


POSITIONS = (5, 0, 63, 5, 17, 40)


def arguments(
    case, fmt="bf16", *, tokens=6, heads=(3, 2), width=8, rotary_dim=None, positions=POSITIONS
):
    """Query, key, table and positions."""
    return (
        case.rows(fmt, (tokens, heads[0], width), name="query"),
        case.rows(fmt, (tokens, heads[1], width), name="key"),
        case.table(rotary_dim or width, positions),
        case.positions(positions),
    )


# The table -----------------------------------------------------------------------------------

ORIGINAL = {"original_max_position_embeddings": 512}
LONG = {
    "short_factor": [1.0 + i / 40 for i in range(8)],
    "long_factor": [1.0 + 4 * i for i in range(8)],
}
SCALINGS = {
    "none": None,
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "old key": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, **ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": {"rope_type": "yarn", "factor": 32.0, **ORIGINAL},
    "yarn, betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16,
        "beta_slow": 2,
        **ORIGINAL,
    },
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4, "truncate": False, **ORIGINAL},
    "yarn, attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, **ORIGINAL},
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        **ORIGINAL,
    },
    "longrope": {"rope_type": "longrope", "factor": 8.0, **LONG, **ORIGINAL},
    "longrope, ratio": {"rope_type": "longrope", **LONG, **ORIGINAL},
    "longrope, attention": {"rope_type": "longrope", **LONG, **ORIGINAL, "attention_factor": 1.2},
}


def assert_table(device, table, max_positions, rotary_dim, **options):
    """Rounded once from float64: half a unit, and 1e-9 for how an angle of 1e5 may be computed."""
    got = np.asarray(device.to_numpy(table))
    assert got.shape == (max_positions, rotary_dim) and got.dtype == np.float32
    want = reference.rope_rows(
        np.arange(max_positions), *reference.rope_frequencies(max_positions, rotary_dim, **options)
    )
    error = np.abs(got - want)
    assert (error <= ulp(want, "fp32") * 0.501 + 1e-9).all(), f"off by {error.max()}"


@pytest.mark.parametrize("max_positions", [500, 512, 2000])
@pytest.mark.parametrize("name", SCALINGS)
def test_table(device, name, max_positions):
    options = {"base": 500000.0, "scaling": SCALINGS[name]}
    before = dict(SCALINGS[name] or {})
    table = kv.rope_table(max_positions, 16, device=device, **options)
    assert_table(device, table, max_positions, 16, **options)
    assert (SCALINGS[name] or {}) == before


def test_table_as_far_as_131072_positions(device):
    table = kv.rope_table(131_072, 8, device=device)
    assert_table(device, table, 131_072, 8)
    assert_table(device, kv.rope_table(131_072, 2, base=1e6, device=device), 131_072, 2, base=1e6)


def test_table_of_any_shape(device):
    for max_positions, rotary_dim in ((1, 2), (3, 4), (7, 6), (5, 100), (9, 256)):
        table = kv.rope_table(max_positions, rotary_dim, device=device.name)
        assert_table(device, table, max_positions, rotary_dim)


WRONG_SCALINGS = [
    {"rope_type": "logarithmic"},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "dynamic", **ORIGINAL},
    {"rope_type": "yarn", "factor": 2.0},
    {"rope_type": "yarn", **ORIGINAL},
    {"rope_type": "longrope", **LONG},
    {"rope_type": "longrope", **ORIGINAL, "short_factor": LONG["short_factor"]},
    {"rope_type": "longrope", **ORIGINAL, "short_factor": [1.0] * 7, "long_factor": [1.0] * 7},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, **ORIGINAL},
]


@pytest.mark.parametrize("scaling", WRONG_SCALINGS, ids=str)
def test_wrong_scalings_of_the_table(device, scaling):
    with pytest.raises(ValueError, match=r"\bscaling\b"):
        kv.rope_table(64, 16, scaling=scaling, device=device)


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ((64, 7), "rotary_dim"),
        ((64, 0), "rotary_dim"),
        ((64, -2), "rotary_dim"),
        ((-1, 8), "max_positions"),
        ((64, 8.5), "rotary_dim"),
        ((6.5, 8), "max_positions"),
        (("64", 8), "max_positions"),
    ],
    ids=str,
)
def test_wrong_shapes_of_the_table(device, args, name):
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
        kv.rope_table(*args, device=device)


# Rotation ------------------------------------------------------------------------------------


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
        case.place(small, fmt),
        case.place(small[::-1], fmt),
        table,
        positions,
        interleaved=interleaved,
    )


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
            query.buffer.raw[...] = device.asarray(query.buffer.want.copy())
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


VIEWS = {
    "every other token": ((12, 2, 12), lambda a: a[::2]),
    "heads first": ((2, 6, 12), lambda a: a.transpose(1, 0, 2)),
    "wider rows": ((6, 2, 17), lambda a: a[..., 3:15]),
    "tokens reversed": ((6, 2, 12), lambda a: a[::-1]),
    "heads reversed": ((6, 2, 12), lambda a: a[:, ::-1]),
    "some heads": ((6, 7, 12), lambda a: a[:, 1:6:3]),
}
BROADCAST = {
    "one token for all": ((1, 2, 12), lambda a: np.broadcast_to(a, (6, 2, 12))),
    "one head for all": ((6, 1, 12), lambda a: np.broadcast_to(a, (6, 2, 12))),
}


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("view", VIEWS)
def test_strided_rows(device, view, fmt):
    """Query through the view and key through the next one, in place and from one to the other."""
    names = list(VIEWS)
    other = names[(names.index(view) + 1) % len(names)]
    case = RopeCase(device, 10)
    table, positions = case.table(12, POSITIONS, pad=3), case.positions(POSITIONS)
    query, key = case.rows(fmt, *VIEWS[view]), case.rows(fmt, *VIEWS[other])
    for interleaved in (False, True):
        case.apply(query, key, table, positions, interleaved=interleaved)
    case.apply(
        query,
        key,
        table,
        positions,
        query_out=case.output(fmt, *VIEWS[other]),
        key_out=case.output(fmt, *VIEWS[view]),
    )


@pytest.mark.parametrize("view", BROADCAST)
def test_inputs_that_repeat_rows(device, view):
    case = RopeCase(device, 11)
    query, key = (case.rows("bf16", *BROADCAST[view]) for _ in range(2))
    outs = {name: case.output("bf16", (6, 2, 12)) for name in ("query_out", "key_out")}
    case.apply(query, key, case.table(12, POSITIONS), case.positions(POSITIONS), **outs)


@pytest.mark.parametrize("fmt", FLOATS)
@pytest.mark.parametrize("width", [8, 20, 64])
def test_packed_qkv(device, width, fmt):
    """Views of one projection, three heads of query and two each of key and value."""
    for interleaved in (False, True):
        case = RopeCase(device, 12)
        qkv = case.rows(fmt, (6, 7, width))
        case.apply(
            qkv.sub(lambda a: a[:, :3]),
            qkv.sub(lambda a: a[:, 3:5]),
            case.table(width, POSITIONS),
            case.positions(POSITIONS),
            interleaved=interleaved,
        )


@pytest.mark.parametrize("misalign", [1, 2, 4, 8])
@pytest.mark.parametrize("fmt", FLOATS)
def test_alignment(device, fmt, misalign):
    """Each array is misaligned on its own; heads of 2 * odd elements misalign the next head."""
    for which, width in itertools.product(range(4), (64, 48, 22)):
        case = RopeCase(device, (which, width))
        off = [misalign if i == which else 0 for i in range(4)]
        query = case.rows(fmt, (3, 3, width), misalign=off[0], name="query")
        key = case.rows(fmt, (3, 2, width), misalign=off[1], name="key")
        positions = [9, 0, 63]
        table = case.table(width - 2, positions) if which == 3 else case.table(width, positions)
        out = case.output(fmt, (3, 3, width), misalign=off[2])
        case.apply(
            query, key, table, case.positions(positions), interleaved=which % 2 == 1, query_out=out
        )


@pytest.mark.parametrize("step", [1, 2, -1, -3])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_positions_of_any_type_and_stride(device, dtype, step):
    case = RopeCase(device, 13)
    query, key, table, _ = arguments(case)
    case.apply(query, key, table, case.positions(POSITIONS, dtype, step))


def test_rows_past_the_positions_are_padding(device):
    """They hold NaN, and are neither read nor written, in place and out of place."""
    case = RopeCase(device, 14)
    query, key = case.rows("bf16", (9, 3, 8)), case.rows("bf16", (9, 2, 8))
    for arg in (query, key):
        arg.view[6:] = np.nan
        arg.buffer.raw[...] = device.asarray(arg.buffer.want.copy())
    table, positions = case.table(8, POSITIONS), case.positions(POSITIONS)
    case.apply(query, key, table, positions)
    case.apply(query, key, table, positions, query_out=case.output("bf16", (9, 3, 8)))


def test_zero_tokens(device):
    case = RopeCase(device, 15)
    query, key, table, _ = arguments(case)
    case.apply(query, key, table, case.positions([]))
    empty = arguments(case, tokens=0, positions=[])
    case.apply(*empty)
    case.store(
        query,
        key,
        case.rows("bf16", (6, 2, 4)),
        table,
        case.positions([]),
        case.output("bf16", (8, 2, 8)),
        case.output("bf16", (8, 2, 4)),
        [],
    )


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    "bad",
    [-1, -64, 64, 65, 2**31 - 1, -(2**31), 2**31, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63)],
)
def test_position_outside_the_table_is_a_fault(device, bad, dtype):
    """Its token is left alone, in place and out of place; the others are rotated."""
    if dtype == "int32" and not -(2**31) <= bad < 2**31:
        pytest.skip("does not fit")
    case = RopeCase(device, 16)
    values = np.array(POSITIONS)
    values[[1, 4]] = bad
    query, key, table, _ = arguments(case, positions=values)
    positions = case.positions(values, dtype)
    case.apply(query, key, table, positions)
    case.apply(
        query,
        key,
        table,
        positions,
        query_out=case.output("bf16", (6, 3, 8)),
        key_out=case.output("bf16", (6, 2, 8)),
        interleaved=True,
        key_norm=case.rows("fp32", (8,)),
    )
    case.apply(query, key, table, case.positions([bad] * 6, dtype))
    case.apply(*arguments(case))


def test_table_without_rows(device):
    case = RopeCase(device, 17)
    query, key, _, positions = arguments(case)
    case.apply(query, key, case.place(np.zeros((0, 8), np.float32), "fp32"), positions)


# Norm and sections ---------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["fp32", "own"])
@pytest.mark.parametrize("fmt", FLOATS)
@pytest.mark.parametrize("width", [2, 20, 64, 128, 192, 256])
def test_norm(device, width, fmt, weights):
    """Over the whole head, also where only a part of it turns; not rounded before it turns."""
    for interleaved, rotary_dim in itertools.product((False, True), {width, 2}):
        case = RopeCase(device, (18, width))
        query, key, table, positions = arguments(case, fmt, width=width, rotary_dim=rotary_dim)
        norms = [case.rows("fp32" if weights == "fp32" else fmt, (width,)) for _ in range(2)]
        case.apply(
            query,
            key,
            table,
            positions,
            query_norm=norms[0],
            key_norm=norms[1],
            interleaved=interleaved,
        )


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
        query,
        key,
        case.table(64, POSITIONS),
        case.positions(POSITIONS),
        query_norm=norms[0],
        key_norm=norms[1],
    )


def test_norm_weights_may_be_strided(device):
    """One row of a matrix of weights, off alignment."""
    case = RopeCase(device, 21)
    both = case.rows("bf16", (3, 9))
    case.apply(
        *arguments(case),
        query_norm=both.sub(lambda a: a[0, 1:]),
        key_norm=both.sub(lambda a: a[2, :8]),
    )


THREE = np.array([[5, 0, 63, 5, 17, 40], [1, 62, 3, 3, 0, 9], [2, 7, 7, 60, 61, 0]])
SECTIONS = (
    ((2, 3, 3), False),
    ((8, 0, 0), False),
    ((0, 8, 0), False),
    ((1, 0, 7), False),
    ((4, 2, 2), True),
    ((3, 3, 2), True),
    ((8, 0, 0), True),
    ((6, 1, 1), True),
)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("sections", SECTIONS, ids=str)
def test_sections(device, sections, interleaved):
    counts, mixed = sections
    for fmt, dtype, step in (("bf16", "int64", 1), ("fp32", "int32", 2), ("fp16", "int64", -1)):
        case = RopeCase(device, 22)
        query, key = case.rows(fmt, (6, 3, 20)), case.rows(fmt, (6, 2, 20))
        table = case.table(16, THREE)
        positions = case.positions(THREE, dtype, step)
        options = {"sections": counts, "sections_interleaved": mixed, "interleaved": interleaved}
        case.apply(query, key, table, positions, **options)
        case.apply(query, key, table, positions, **options, key_norm=case.rows("fp32", (20,)))


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


# Anything ------------------------------------------------------------------------------------


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


@settings(max_examples=80, deadline=None, database=None)
@given(call=rope_calls())
def test_any_rotation(device, call):
    case, query, key, table, positions, options = drawn_call(device, call)
    for side, rows in (("query", query), ("key", key)):
        if call["outputs"] in (side, "both"):
            options[f"{side}_out"] = case.output(
                call["fmt"], rows.view.shape, misalign=call["misalign"][2]
            )
    case.apply(query, key, table, positions, **options)


@settings(max_examples=80, deadline=None, database=None)
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


# Rotation and store --------------------------------------------------------------------------


def cache_shape(layout, pages, size, heads, width):
    """The base shape of a cache: paged in either layout, or by slots."""
    return {
        "NHD": (pages, size, heads, width),
        "HND": (pages, heads, size, width),
        "slots": (pages * size, heads, width),
    }[layout]


def store_arguments(
    case,
    fmt="bf16",
    cache_fmt=None,
    *,
    layout="slots",
    width=8,
    v_width=6,
    rotary_dim=None,
    positions=POSITIONS,
    tokens=6,
):
    """All of `rope_store_kv` up to the caches, which have 12 slots."""
    query, key, table, placed = arguments(
        case, fmt, width=width, rotary_dim=rotary_dim, positions=positions, tokens=tokens
    )
    value = case.input(fmt, (tokens, 2, v_width), name="value")
    k_cache = case.output(cache_fmt or fmt, cache_shape(layout, 3, 4, 2, width), name="k_cache")
    v_cache = case.output(cache_fmt or fmt, cache_shape(layout, 3, 4, 2, v_width), name="v_cache")
    return query, key, value, table, placed, k_cache, v_cache


SLOTS = (7, 0, -1, 11, 3, 4)
SCALES = {
    "none": None,
    "float": 0.7,
    "one element": np.float32([1.3]),
    "per head": np.float32([0.2, 5.0]),
}


@pytest.mark.parametrize("cache_fmt", FORMATS)
@pytest.mark.parametrize("fmt", FLOATS)
def test_store_in_every_format(device, fmt, cache_fmt):
    for interleaved, write_key in itertools.product((False, True), (True, False)):
        case = RopeCase(device, 25)
        args = store_arguments(case, fmt, cache_fmt, width=64, v_width=40)
        options = {"interleaved": interleaved, "write_key": write_key}
        case.store(*args, SLOTS, **options)
        if cache_fmt in QUANTISED:
            case.store(*args, SLOTS, **options, k_scale=0.03, v_scale=np.float32([2.0, 0.1]))


@pytest.mark.parametrize("cache_fmt", QUANTISED)
@pytest.mark.parametrize("fmt", FLOATS)
def test_store_with_dynamic_scales(device, fmt, cache_fmt):
    """The scale is that of the rotated key."""
    for layout, width in (("NHD", 64), ("HND", 20), ("slots", 256)):
        case = RopeCase(device, 26)
        args = store_arguments(case, fmt, cache_fmt, layout=layout, width=width)
        scales = {f"{side}_scale_cache": case.output("fp32", (12, 2)) for side in "kv"}
        if layout != "slots":
            scales["layout"] = layout
        for write_key in (True, False):
            case.store(*args, [7, 12, -1, 11, 3, 4], **scales, write_key=write_key)


@pytest.mark.parametrize(("k", "v"), [*itertools.permutations([*SCALES, "dynamic"], 2)])
def test_store_with_scales_of_each_kind(device, k, v):
    case = RopeCase(device, 27)
    args = store_arguments(case, "bf16", "fp8_e4m3", layout="NHD")
    options = {}
    for side, name in (("k", k), ("v", v)):
        if name == "dynamic":
            options[f"{side}_scale_cache"] = case.output("fp32", (12, 2))
        else:
            options[f"{side}_scale"] = SCALES[name]
    case.store(*args, SLOTS, **options)


@pytest.mark.parametrize(
    "pair", [("bf16", "bf16"), ("fp16", "fp8_e5m2"), ("fp32", "int8")], ids="-".join
)
@pytest.mark.parametrize("layout", ["NHD", "HND", "slots"])
def test_store_layouts(device, layout, pair):
    options = {"layout": layout} if layout in LAYOUTS else {}
    for width, v_width, rotary_dim in ((64, 64, 64), (24, 56, 8), (10, 3, 6), (128, 96, 64)):
        case = RopeCase(device, (28, width))
        args = store_arguments(
            case, *pair, layout=layout, width=width, v_width=v_width, rotary_dim=rotary_dim
        )
        case.store(*args, SLOTS, **options)
        case.store(*args, SLOTS[::-1], **options, interleaved=True)


@pytest.mark.parametrize("kind", ["pages", "first", "last", "layer"])
def test_store_in_combined_caches(device, kind):
    for layout, fmt in itertools.product(LAYOUTS, ("bf16", "fp8_e4m3")):
        case = RopeCase(device, 30)
        args = store_arguments(case, v_width=8)[:5]
        base = cache_shape(layout, 3, 4, 2, 8)
        shape, k_cut, v_cut = {
            "pages": ((3, 2, *base[1:]), lambda a: a[:, 0], lambda a: a[:, 1]),
            "first": ((2, *base), lambda a: a[0], lambda a: a[1]),
            "last": ((*base[:-1], 16), lambda a: a[..., :8], lambda a: a[..., 8:]),
            "layer": ((3, 3, 2, *base[1:]), lambda a: a[:, 1, 0], lambda a: a[:, 1, 1]),
        }[kind]
        both = case.output(fmt, shape)
        case.store(*args, both.sub(k_cut), both.sub(v_cut), SLOTS, layout=layout)


@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("fp16", "int8")], ids="-".join)
@pytest.mark.parametrize("write_key", [True, False])
def test_store_of_packed_qkv(device, write_key, pair):
    """Rotated in place, key and value go from the projection to the cache."""
    for width, interleaved in itertools.product((16, 100), (False, True)):
        case = RopeCase(device, 31)
        qkv = case.rows(pair[0], (6, 7, width))
        parts = [qkv.sub(lambda a, s=s: a[:, s]) for s in (slice(3), slice(3, 5), slice(5, 7))]
        caches = [case.output(pair[1], (3, 4, 2, width)) for _ in range(2)]
        case.store(
            *parts,
            case.table(width, POSITIONS),
            case.positions(POSITIONS),
            *caches,
            SLOTS,
            write_key=write_key,
            interleaved=interleaved,
        )


@pytest.mark.parametrize("view", VIEWS)
def test_store_of_strided_rows(device, view):
    names = list(VIEWS)
    others = [names[(names.index(view) + i) % len(names)] for i in (1, 2)]
    for cache_fmt, write_key in (("bf16", True), ("fp8_e4m3", False)):
        case = RopeCase(device, 32)
        query, key, value = (case.rows("bf16", *VIEWS[name]) for name in (view, *others))
        caches = [case.output(cache_fmt, (12, 2, 12)) for _ in range(2)]
        out = case.output("bf16", *VIEWS[others[0]])
        case.store(
            query,
            key,
            value,
            case.table(8, POSITIONS),
            case.positions(POSITIONS),
            *caches,
            SLOTS,
            write_key=write_key,
            query_out=out,
        )


@pytest.mark.parametrize("write_key", [True, False])
@pytest.mark.parametrize("query", ["in place", "out", "none"])
def test_store_outputs(device, query, write_key):
    """`write_key=False` leaves the key's bits, `query_out` those of the query."""
    for cache_fmt in ("bf16", "fp8_e5m2"):
        case = RopeCase(device, 33)
        args = list(store_arguments(case, cache_fmt=cache_fmt, rotary_dim=6))
        options = {"write_key": write_key}
        if query == "none":
            args[0] = None
        elif query == "out":
            options["query_out"] = case.output("bf16", (6, 3, 8))
        case.store(*args, SLOTS, **options)


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
        case.store(
            query, key, value, case.table(8, POSITIONS), case.positions(POSITIONS), *caches, SLOTS
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
        case.store(query, key, value, table, positions, *caches, SLOTS[:count], write_key=write_key)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_positions_and_slots_of_any_type_and_stride(device, dtype):
    for other, step in itertools.product(("int32", "int64"), (2, -1)):
        case = RopeCase(device, 36)
        args = list(store_arguments(case))
        args[4] = case.positions(POSITIONS, dtype, -step)
        case.store(*args, case.slots(SLOTS, other, step))


@pytest.mark.parametrize("layout", ["slots", *LAYOUTS])
def test_skipped_slots_are_rotated_and_not_written(device, layout):
    options = {"layout": layout} if layout in LAYOUTS else {}
    for cache_fmt, write_key in (("bf16", True), ("fp8_e4m3", True), ("fp8_e4m3", False)):
        case = RopeCase(device, 37)
        args = store_arguments(case, cache_fmt=cache_fmt, layout=layout)
        case.store(
            *args,
            [3, -1, 5, -(2**32) + 3, 5, -(2**63)],
            skip_slot=5,
            write_key=write_key,
            **options,
        )
        case.store(*args, [-1] * 6, write_key=write_key, **options)
        case.store(*args, [0] * 6, skip_slot=0, write_key=write_key, **options)


@pytest.mark.parametrize("slot", [12, 13, 7777, 2**31 - 1, 2**31, 2**32 + 3, 2**63 - 1])
def test_slot_past_the_end_is_a_fault_of_the_slot_alone(device, slot):
    """The token is rotated all the same, and no scale is written for it."""
    case = RopeCase(device, 38)
    slots = [7, 0, slot, 11, -1, slot]
    case.store(*store_arguments(case), slots)
    scales = {f"{side}_scale_cache": case.output("fp32", (12, 2)) for side in "kv"}
    case.store(
        *store_arguments(case, cache_fmt="int8", layout="HND"), slots, layout="HND", **scales
    )


@pytest.mark.parametrize("bad", [-1, 64, 2**32 + 3, -(2**63)])
@pytest.mark.parametrize("write_key", [True, False])
def test_position_outside_the_table_is_not_stored(device, write_key, bad):
    for cache_fmt in ("bf16", "int8"):
        case = RopeCase(device, 39)
        values = np.array(POSITIONS)
        values[[0, 3, 5]] = bad
        args = store_arguments(case, cache_fmt=cache_fmt, positions=values)
        case.store(*args, SLOTS, write_key=write_key, query_out=case.output("bf16", (6, 3, 8)))
        case.store(*args, SLOTS[:4], write_key=write_key)
        if cache_fmt == "int8":
            scales = {f"{side}_scale_cache": case.output("fp32", (12, 2)) for side in "kv"}
            case.store(*args, SLOTS, write_key=write_key, **scales)


def test_faults_of_both_kinds(device):
    case = RopeCase(device, 40)
    args = store_arguments(case, positions=(5, 64, 63, -1, 17, 40))
    case.store(*args, [7, 0, 12, 11, -1, 99])
    case.store(*args, [7, 0, 1, 11, -1, 2])


def test_fault_names_the_argument(device):
    case = RopeCase(device, 41)
    for values, slots, name, place, value in (
        ((5, 77, 1), (0, 1, 2), "positions", 1, 77),
        ((5, -7, 1), (0, 1, 2), "positions", 1, -7),
        ((5, 3, 1), (0, 1, 31), "slot_mapping", 2, 31),
    ):
        args = store_arguments(case, tokens=3, positions=values)
        kv.rope_store_kv(*(a.array for a in args), case.slots(slots).array)
        with pytest.raises(kv.IndexFault) as caught:
            kv.check_faults(device)
        text = str(caught.value)
        assert "rope_store_kv" in text and name in text
        assert names_number(text, place) and names_number(text, value)
        kv.check_faults(device)


def test_rows_past_the_positions_hold_nan(device):
    case = RopeCase(device, 42)
    query, key, value, table, positions, *caches = store_arguments(
        case, "bf16", "fp8_e4m3", tokens=9
    )
    for arg in (query, key, value):
        arg.view[6:] = np.nan
        arg.buffer.raw[...] = device.asarray(arg.buffer.want.copy())
    scales = {f"{side}_scale_cache": case.output("fp32", (12, 2)) for side in "kv"}
    case.store(query, key, value, table, positions, *caches, SLOTS, **scales)


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
        case.store(
            query,
            key,
            value,
            case.table(16, THREE),
            case.positions(THREE),
            *caches,
            SLOTS,
            sections=(3, 3, 2),
            sections_interleaved=mixed,
            write_key=write_key,
            eps=1e-5,
            **norms,
        )


def test_offsets_past_two_gigabytes(device):
    """Rows and slots further apart than 2**31 bytes, touched at a few places only."""
    width, num_slots = 64, 2**31 // 64 + 100
    last = num_slots - 1
    caches = [device.empty((num_slots, 1, width), np.int8) for _ in range(2)]
    untouched = (0, last - 1, last % (2**31 // width), (last + 1) % (2**31 // width))
    for cache, slot in itertools.product(caches, untouched):
        cache[slot] = 77
    rng = np.random.default_rng(44)
    content = rng.standard_normal((2, 3, 1, width)).astype(np.float16)
    query, key = (device.empty((3, 1, 2**29 + 64), np.float16)[..., :width] for _ in range(2))
    query[...], key[...] = device.asarray(content[0].copy()), device.asarray(content[1].copy())
    table = reference.rope_table(10, width)
    positions, slots = np.array([9, 3, 4]), np.array([last, -1, 5])
    kv.rope_store_kv(
        query,
        key,
        device.asarray(content[0].copy()),
        device.asarray(table),
        device.asarray(positions),
        *caches,
        device.asarray(slots),
        k_scale=0.02,
    )
    kv.check_faults(device)
    both = reference.cos_sin(table, positions)
    live = [np.array(device.to_numpy(rows.copy())) for rows in (query, key)]
    for got, rows in zip(live, content, strict=True):
        assert_rotated(got, rows, *both)
    wants = np.zeros((2, 6, 1, width), np.int8)
    reference.store_kv(live[1], content[0], *wants, np.array([4, -1, 5]), k_scale=0.02)
    for cache, want in zip(caches, wants, strict=True):
        assert np.array_equal(device.to_numpy(cache[last]), want[4])
        assert np.array_equal(device.to_numpy(cache[5]), want[5])
        for slot in untouched:
            assert (device.to_numpy(cache[slot]) == 77).all()


# rope_store_mla ------------------------------------------------------------------------------


def mla_arguments(
    case,
    fmt="bf16",
    cache_fmt=None,
    *,
    rank=12,
    width=8,
    rotary_dim=None,
    positions=POSITIONS,
    paged=False,
    heads=3,
):
    """All of `rope_store_mla` up to the cache, which has 12 slots."""
    shape = (3, 4, rank + width) if paged else (12, rank + width)
    return (
        case.rows(fmt, (6, heads, width), name="query"),
        case.input(fmt, (6, rank), name="latent"),
        case.rows(fmt, (6, width), name="rope_key"),
        case.table(rotary_dim or width, positions),
        case.positions(positions),
        case.output(cache_fmt or fmt, shape, name="cache"),
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cache_fmt", FORMATS)
@pytest.mark.parametrize("fmt", FLOATS)
def test_mla_in_every_format(device, fmt, cache_fmt, interleaved):
    for paged, (rank, width) in itertools.product((False, True), ((512, 64), (7, 6), (1, 2))):
        case = RopeCase(device, (45, rank))
        args = mla_arguments(case, fmt, cache_fmt, rank=rank, width=width, paged=paged, heads=5)
        scale = 0.03 if cache_fmt in QUANTISED else None
        case.store_mla_rotated(*args, SLOTS, interleaved=interleaved, scale=scale)


@pytest.mark.parametrize("write_key", [True, False])
@pytest.mark.parametrize("query", ["in place", "out", "none"])
def test_mla_outputs(device, query, write_key):
    for cache_fmt in ("bf16", "fp8_e4m3"):
        case = RopeCase(device, 46)
        args = list(mla_arguments(case, cache_fmt=cache_fmt, rotary_dim=6))
        options = {"write_key": write_key}
        if query == "none":
            args[0] = None
        elif query == "out":
            options["query_out"] = case.output("bf16", (6, 3, 8))
        case.store_mla_rotated(*args, SLOTS, **options)


def test_mla_views(device):
    """Latent and key are one projection, the query is the end of wider heads."""
    for cache_fmt, interleaved in itertools.product(("bf16", "int8"), (False, True)):
        case = RopeCase(device, 47)
        both, heads = case.rows("bf16", (6, 24)), case.rows("bf16", (6, 3, 20))
        _, _, _, table, positions, _ = mla_arguments(case)
        cache = case.output(cache_fmt, (3, 2, 4, 27), lambda a: a[:, 1, :, 3:])
        case.store_mla_rotated(
            heads.sub(lambda a: a[..., 12:]),
            both.sub(lambda a: a[:, :16]),
            both.sub(lambda a: a[:, 16:]),
            table,
            positions,
            cache,
            case.slots(SLOTS, "int32", 2),
            interleaved=interleaved,
        )


def test_mla_slots_and_faults(device):
    for cache_fmt in ("bf16", "fp8_e5m2"):
        case = RopeCase(device, 48)
        args = mla_arguments(case, cache_fmt=cache_fmt)
        case.store_mla_rotated(*args, [7, 12, -1, 5, 2**40, 5], skip_slot=5)
        case.store_mla_rotated(*args, SLOTS[:2])
        case.store_mla_rotated(*args, [])
        args = mla_arguments(case, cache_fmt=cache_fmt, positions=(5, 64, -1, 3, 17, 2**40))
        case.store_mla_rotated(*args, SLOTS, query_out=case.output("bf16", (6, 3, 8)))
        case.store_mla_rotated(*args, [7, 0, 12, 99, 3, 4], write_key=False)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_mla_scale(device, fmt):
    for scale in (None, 1.0, 0.013, np.float32([0.7])):
        case = RopeCase(device, 49)
        case.store_mla_rotated(
            *mla_arguments(case, "fp32", fmt, rank=96, width=32), SLOTS, scale=scale
        )


# Streams and other exporters -----------------------------------------------------------------


def test_explicit_stream(device):
    stream = device.stream()
    case = RopeCase(device, 50)
    case.apply(*arguments(case), stream=stream)
    case.store(*store_arguments(case, cache_fmt="int8"), SLOTS, stream=stream)
    case.store_mla_rotated(*mla_arguments(case), SLOTS, stream=stream)


def twin_cases(device, seed, pair):
    """Two cases of the same bytes, with their arguments and options."""
    twins = []
    for _ in range(2):
        case = RopeCase(device, seed)
        args = (
            *store_arguments(case, *pair, layout="HND", width=48, v_width=64, rotary_dim=32),
            case.slots([7, 0, -1, 12, 3, 4]),
        )
        options = {"layout": "HND", "query_out": case.output(pair[0], (6, 3, 48))}
        if pair[1] in QUANTISED:
            options |= {f"{side}_scale_cache": case.output("fp32", (12, 2)) for side in "kv"}
        twins.append((case, args, options))
    return twins


def issue_raw(args, options, **streams):
    kv.rope_store_kv(
        *(a.array for a in args),
        **streams,
        **{name: mirrored_array(value) for name, value in options.items()},
    )


def mirrored_array(value):
    return value.array if isinstance(value, Arg) else value


def all_bytes(case):
    return [np.array(case.device.to_numpy(b.raw)) for b in case.buffers]


def clear_faults(device):
    with pytest.raises(kv.IndexFault):
        kv.check_faults(device)


def same_bytes(got, want):
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert np.array_equal(a, b), f"buffer {index}, byte {np.flatnonzero(a != b)[:1]}"


ALT = [
    (("bf16", "bf16"), {}),
    (("fp16", "fp8_e4m3"), {}),
    (("fp32", "int8"), {}),
    (("bf16", "fp8_e5m2"), {"write_key": False}),
    (("bf16", "bf16"), {"write_key": False, "interleaved": True}),
    (("bf16", "bf16"), {"interleaved": True}),
    (("fp16", "fp16"), {"norm": True}),
]


@pytest.mark.parametrize(("pair", "extra"), ALT, ids=str)
def test_two_streams_give_the_same_bytes(device, pair, extra):
    """Bitwise, and both as they should be, faults and scales included."""
    single, double = twin_cases(device, 51, pair)
    for case, _, options in (single, double):
        options |= {name: value for name, value in extra.items() if name != "norm"}
        if "norm" in extra:
            options["key_norm"] = case.rows("fp32", (48,))
    stream, alt = device.stream(), device.stream()
    device.synchronize()
    issue_raw(*single[1:], stream=stream)
    stream.synchronize()
    clear_faults(device)
    issue_raw(*double[1:], stream=stream, alt_stream=alt)
    stream.synchronize()
    clear_faults(device)
    same_bytes(all_bytes(double[0]), all_bytes(single[0]))
    case = RopeCase(device, 52)
    args = store_arguments(case, *pair, layout="NHD")
    case.store(
        *args,
        SLOTS,
        layout="NHD",
        stream=stream,
        alt_stream=alt,
        **{name: value for name, value in extra.items() if name != "norm"},
    )
    case.store(*args, SLOTS, layout="NHD", alt_stream=alt)


def test_work_before_and_after_two_streams_keeps_its_order(device):
    """What `stream` did before is seen, what it does afterwards waits for both."""
    single, double = twin_cases(device, 53, ("bf16", "bf16"))
    stream, alt = device.stream(), device.stream()
    device.synchronize()
    for (case, args, options), extra in ((single, {}), (double, {"alt_stream": alt})):
        fresh = [
            case.device.asarray(case.rng.integers(0, 9, a.array.shape).astype(np.float32))
            for a in (args[1], args[2])
        ]
        device.synchronize()
        for target, source in zip((args[1], args[2]), fresh, strict=True):
            copy = case.device.asarray(from_values(np.asarray(device.to_numpy(source)), "bf16"))
            device.copy(target.array, copy, stream=stream)
        for _ in range(3):
            issue_raw(args, options, stream=stream, **extra)
        device.copy(
            args[2].array, device.zeros(args[2].array.shape, args[2].array.dtype), stream=stream
        )
        stream.synchronize()
        clear_faults(device)
    same_bytes(all_bytes(double[0]), all_bytes(single[0]))


@pytest.mark.parametrize("alt", [False, True])
@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("fp16", "fp8_e4m3")], ids="-".join)
def test_in_a_graph(device, pair, alt):
    """Captured, nothing runs; a replay reads its arrays then, and gives the bytes of a call."""
    eager, captured = twin_cases(device, 54, pair)
    stream = device.stream()
    streams = {"stream": stream, **({"alt_stream": device.stream()} if alt else {})}
    warm = twin_cases(device, 55, pair)[0]
    device.synchronize()
    issue_raw(*warm[1:], **streams)
    stream.synchronize()
    clear_faults(device)
    before = all_bytes(captured[0])
    with stream.capture() as graph:
        issue_raw(*captured[1:], **streams)
    device.synchronize()
    kv.check_faults(device)
    same_bytes(all_bytes(captured[0]), before)

    for _, args, _ in (eager, captured):  # other content than at capture
        rng = np.random.default_rng(56)
        for arg in args[:3]:
            values = from_values(rng.standard_normal(arg.view.shape), arg.fmt)
            bits(arg.view)[...] = bits(values)
            arg.buffer.raw[...] = device.asarray(arg.buffer.want.copy())
    start = all_bytes(captured[0])
    device.synchronize()
    issue_raw(*eager[1:], stream=stream)
    stream.synchronize()
    clear_faults(device)
    want = all_bytes(eager[0])
    for _ in range(2):
        for buffer, content in zip(captured[0].buffers, start, strict=True):
            buffer.raw[...] = device.asarray(content.copy())
        device.synchronize()
        graph.launch(stream)
        stream.synchronize()
        clear_faults(device)
        same_bytes(all_bytes(captured[0]), want)


def test_apply_rope_in_a_graph(device):
    case = RopeCase(device, 57)
    query, key, table, positions = args = arguments(case)
    stream = device.stream()
    case.apply(*args, stream=stream)
    with stream.capture() as graph:
        kv.apply_rope(*(a.array for a in args), stream=stream)
    for buffer in case.buffers:
        buffer.check()
    graph.launch(stream)
    stream.synchronize()
    for rows in (query, key):
        case.take_over(rows, None, table, positions, None, {})
    case.finish("apply_rope", table, positions, [])


def torch_kind(torch, fmt):
    return {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
    }[fmt]


@pytest.mark.parametrize("fmt", FLOATS)
def test_torch_tensors(device, fmt):
    torch = pytest.importorskip("torch")
    if device.kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    rng = np.random.default_rng(58)
    qkv = from_values(rng.standard_normal((5, 7, 16)), fmt)
    place = "cuda" if device.kind == "cuda" else "cpu"

    def tensor(array, kind):
        return torch.from_numpy(array.view(np.uint8).copy()).view(kind).to(place)

    live = tensor(qkv, torch_kind(torch, fmt))
    cache = tensor(np.zeros((8, 2, 2, 16), np.uint8), torch.float8_e4m3fn)
    mirror = np.zeros((8, 2, 2, 16), from_values(0.0, "fp8_e4m3").dtype)
    table = reference.rope_table(30, 16)
    positions, slots = np.array([3, 29, 0, 11]), np.array([7, -1, 0, 2], np.int32)
    kv.rope_store_kv(
        live[:, :3],
        live[:, 3:5],
        live[:, 5:],
        torch.from_numpy(table).to(place),
        torch.from_numpy(positions).to(place),
        cache[:, 0],
        cache[:, 1],
        torch.from_numpy(slots).to(place),
        k_scale=0.5,
    )
    kv.check_faults(device)
    got = live.cpu().view(torch.uint8).numpy().view(qkv.dtype)
    assert_rotated(got[:4, :5], qkv[:4, :5], *reference.cos_sin(table, positions))
    assert np.array_equal(bits(got[:, 5:]), bits(qkv[:, 5:]))
    assert np.array_equal(bits(got[4:]), bits(qkv[4:]))
    reference.store_kv(got[:, 3:5], got[:, 5:], mirror[:, 0], mirror[:, 1], slots, k_scale=0.5)
    stored = cache.cpu().view(torch.uint8).numpy()
    assert np.array_equal(stored, mirror.view(np.uint8))


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
    wanted = llama.apply_rotary_pos_emb(
        *(torch.from_numpy(rows).transpose(0, 1)[None] for rows in (query, key)), cos, sin
    )
    live = [device.asarray(rows.copy()) for rows in (query, key)]
    kv.apply_rope(*live, device.asarray(table), device.asarray(positions))
    for got, want in zip(live, wanted, strict=True):
        np.testing.assert_allclose(
            device.to_numpy(got), want[0].transpose(0, 1).numpy(), rtol=0, atol=2e-6
        )


# Errors --------------------------------------------------------------------------------------


def refused(case, call, error, name):
    """Assert that `call` raises `error`, names the argument, and changed nothing."""
    with pytest.raises(error) as caught:
        call()
    assert re.search(rf"\b({name})\b", str(caught.value)), f"{name} not in {caught.value}"
    case.check("", [])


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
    *((operation, name) for operation in OPERATIONS[1:] for name in COMMON_ERRORS),
    *((operation, name) for operation in OPERATIONS[1:3] for name in KEY_ERRORS),
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


@pytest.mark.parametrize("operation", OPERATIONS[1:])
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
    for operation in OPERATIONS[1:]:
        call = valid_call(case, operation)
        with pytest.raises(TypeError):
            getattr(kv, operation)(*call.values(), True)
        case.check("", [])
