"""Arrays between canaries, poison wherever nothing may be read, and comparisons of all of it.

`Arguments` holds every buffer of one call. Each buffer exists twice: as bytes on the device, which
the implementation under test reads and writes, and as a NumPy mirror, which the reference reads and
writes. Comparing the two, whole, checks results, canaries, gaps between strided rows, slots that
must stay as they were, and that inputs are unmodified, all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import reference
from ..arrays import view_as, with_rotation
from ..formats import FORMATS, FOUR_BIT, Encoding, ScaleRule

Array = npt.NDArray[Any]
Cut = Callable[[Any], Any]

DTYPE = {name: fmt.numpy for name, fmt in FORMATS.items()}
INDEX_DTYPE: dict[str, np.dtype[Any]] = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64
}  # fmt: skip

GUARD_BYTES = 128
"""Canary bytes on either side of a buffer, a multiple of the alignment."""
ALIGNMENT = 64
"""Buffers start at a multiple of this, so that a misalignment asked for is the one tested."""
POISON_SLOT = 2147480000
"""Stands wherever an index array must not be read: it would be a fault."""


class Mismatch(AssertionError):
    """What a function left differs from the reference."""


# Values --------------------------------------------------------------------------------------


def from_values(values: Any, fmt: str) -> Array:
    """Round float values to a format's own dtype, as the reference does.

    Examples
    --------
    >>> from_values([1.0, 1.001], "bf16").astype(float).tolist()
    [1.0, 1.0]
    """
    return reference.encode(np.asarray(values), fmt).view(DTYPE[fmt])


def all_patterns(fmt: str) -> Array:
    """Return every bit pattern of an 8-bit or 16-bit format, once."""
    size = DTYPE[fmt].itemsize
    return np.arange(2 ** (8 * size), dtype=np.uint64).astype(UNSIGNED[size]).view(DTYPE[fmt])


def rounding_boundaries(fmt: str) -> Array:
    """Return all halfway points of a format, and the float32 values below and above each."""
    if fmt == "int8":
        finite = np.arange(-128, 129, dtype=np.float64)
    else:
        finite = np.unique(reference.decode(all_patterns(fmt), fmt))
        finite = finite[np.isfinite(finite)]
        # The last step, past the largest value, is where overflow or saturation begins.
        step = finite[-1] - finite[-2]
        finite = np.concatenate([[finite[0] - step], finite, [finite[-1] + step]])
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    with np.errstate(over="ignore"):
        below = np.nextafter(middle, np.float32(-np.inf))
        above = np.nextafter(middle, np.float32(np.inf))
    special = np.array([np.inf, -np.inf, np.nan, -0.0], np.float32)
    return np.concatenate([middle, below, above, special])


def random_elements(rng: np.random.Generator, fmt: str, count: int) -> Array:
    """Draw a mixture of any bits, usual magnitudes and special values, of a format's dtype."""
    dtype = DTYPE[fmt]
    unsigned = UNSIGNED[dtype.itemsize]
    bits = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    usual = from_values(rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count), fmt)
    special = from_values([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 448.0, 1e-41, 6e4], fmt)
    chosen = rng.integers(0, 4, count)
    mixed = np.where(
        chosen == 0,
        rng.choice(special.view(unsigned), count),
        np.where(chosen == 1, bits.view(unsigned), usual.view(unsigned)),
    )
    return mixed.astype(unsigned).view(dtype)


def random_finite(rng: np.random.Generator, fmt: str, count: int) -> Array:
    """Draw any bits except NaN: what an output holds before it is written."""
    values = rng.integers(0, 256, count * DTYPE[fmt].itemsize, dtype=np.uint8).view(DTYPE[fmt])
    values[np.isnan(reference.decode(values, fmt))] = from_values(3.0, fmt)
    return values


# Comparing -----------------------------------------------------------------------------------


def compare(
    got: Array, want: Array, fmt: str, *, exact: bool, name: str, seed: Any,
    before: Array | None = None,
) -> None:  # fmt: skip
    """Compare the bits of two arrays; unless `exact`, a NaN is equal to any NaN."""
    if got.shape != want.shape:
        raise Mismatch(f"{name}: got shape {got.shape}, want {want.shape}")
    unsigned = UNSIGNED[want.dtype.itemsize]
    got_bits, want_bits = got.view(unsigned), want.view(unsigned)
    wrong = got_bits != want_bits
    values: tuple[Array, Array] = (got, want)
    if fmt in DTYPE:
        values = (reference.decode(got, fmt), reference.decode(want, fmt))
        if not exact:
            wrong &= ~(np.isnan(values[0]) & np.isnan(values[1]))
    if not wrong.any():
        return
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    how = ""
    if before is not None:
        old = before.view(unsigned)
        stray = int((wrong & (want_bits == old)).sum())
        missing = int((wrong & (got_bits == old)).sum())
        other = int(wrong.sum()) - stray - missing
        parts = ((stray, "should not have been written"), (missing, "were not written"),
                 (other, "have another value"))  # fmt: skip
        how = " (" + ", ".join(f"{count} {text}" for count, text in parts if count) + ")"
    raise Mismatch(
        f"{name}: {int(wrong.sum())} of {want.size} elements differ{how}; first at index {at}: "
        f"got {values[0][at]} ({got_bits[at]:#x}), want {values[1][at]} ({want_bits[at]:#x}), "
        f"seed {seed}"
    )


def assert_near(name: str, got: Array, want: Array, allowed: Any, seed: Any = None) -> None:
    """Compare values: they are the same, or finite and as near as allowed.

    Examples
    --------
    >>> assert_near("out", np.array([1.0, 2.5]), np.array([1.0, 2.0]), 0.1)
    Traceback (most recent call last):
    kvcupy.testing.arrays.Mismatch: out: 1 of 2 elements differ (by up to 5 times ...
    """
    with np.errstate(invalid="ignore"):
        wrong = ~((got == want) | (np.abs(got - want) <= allowed))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        bounds = np.broadcast_to(allowed, want.shape)
        with np.errstate(invalid="ignore", divide="ignore"):
            excess = float(np.max(np.abs(got - want)[wrong] / bounds[wrong]))
        how = f" (by up to {excess:.2g} times what is allowed)" if np.isfinite(excess) else ""
        drawn = "" if seed is None else f", seed {seed}"
        raise Mismatch(
            f"{name}: {int(wrong.sum())} of {want.size} elements differ{how}; first at index {at}: "
            f"got {got[at]}, want {want[at]} within {bounds[at]}{drawn}"
        )


# Placing on a device -------------------------------------------------------------------------


def address(array: Any) -> int:
    """Return the address of the first element of a NumPy or CuPy array."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


def typed_view(
    device: Any, raw: Any, dtype: np.dtype[Any], fmt: str, cut: Cut, rotated_width: int = 0,
    scale_rule: ScaleRule = "absmax",
) -> Any:  # fmt: skip
    """View device bytes as `dtype`, cut to shape; a four-bit format is viewed as rows of bytes."""
    if fmt in FOUR_BIT:
        rows = view_as(cut(raw), Encoding(fmt, scale_rule=scale_rule))
        return with_rotation(rows, rotated_width)
    if device.kind == "cuda" and fmt.startswith("fp8"):
        return view_as(cut(raw), fmt)
    return cut(raw.view(dtype))


class Buffer:
    """Bytes on the device between canaries, beside the bytes that should be there."""

    rotated_width = 0
    scale_rule: ScaleRule = "absmax"

    def __init__(self, case: Arguments, fmt: str, content: Array, misalign: int, name: str) -> None:
        if content.ndim != 1 or misalign % content.itemsize:
            raise ValueError("expected flat content, and a misalignment of whole elements")
        self.case, self.fmt, self.dtype, self.name = case, fmt, content.dtype, name
        self.shape: tuple[int, ...] = content.shape
        self.exact = True
        payload = content.view(np.uint8)
        self.start = GUARD_BYTES + misalign
        self.stop = self.start + payload.size
        self.want = case.rng.integers(0, 256, self.stop + GUARD_BYTES, dtype=np.uint8)
        self.want[self.start : self.stop] = payload
        self.before = self.want.copy()
        storage = case.device.empty((self.want.size + ALIGNMENT,), np.uint8)
        skip = -address(storage) % ALIGNMENT
        self.raw = storage[skip : skip + self.want.size]
        self.restore()

    def opened(self) -> AbstractContextManager[None]:
        """Let this process touch the canaries; where they are redzones, a subclass opens them."""
        return nullcontext()

    def restore(self) -> None:
        """Bring the bytes that should be there to the device."""
        with self.opened():
            self.raw[...] = self.case.device.asarray(self.want.copy())

    def read(self) -> npt.NDArray[np.uint8]:
        """Return a copy of the bytes on the device, canaries included."""
        with self.opened():
            return np.array(self.case.device.to_numpy(self.raw))

    def check(self) -> None:
        """Compare every byte; NaN equals NaN where a conversion, not a copy, produced it."""
        got = self.read()
        if np.array_equal(got, self.want):
            return
        for side in (slice(0, self.start), slice(self.stop, None)):
            bad = np.flatnonzero(got[side] != self.want[side])
            if bad.size:
                raise Mismatch(
                    f"wrote outside its arrays: {self.name}: byte {bad[0]} of the canary {side} "
                    f"changed, got {got[side][bad[0]]:#04x}, want {self.want[side][bad[0]]:#04x}, "
                    f"seed {self.case.seed}"
                )
        inside = slice(self.start, self.stop)
        left, right, before = (
            a[inside].view(self.dtype).reshape(self.shape) for a in (got, self.want, self.before)
        )
        compare(
            left, right, self.fmt, exact=self.exact, name=self.name, seed=self.case.seed,
            before=before,
        )  # fmt: skip


class Argument:
    """One array argument: the same view of the same bytes on the device and in the mirror."""

    def __init__(self, buffer: Buffer, cut: Cut) -> None:
        self.buffer, self.fmt, self._cut = buffer, buffer.fmt, cut
        inside = slice(buffer.start, buffer.stop)
        self.view: Any = cut(buffer.want[inside].view(buffer.dtype))
        self.array = typed_view(
            buffer.case.device, buffer.raw[inside], buffer.dtype, buffer.fmt, cut,
            buffer.rotated_width, buffer.scale_rule,
        )  # fmt: skip
        if buffer.fmt in FOUR_BIT:
            self.view = reference.FourBitRows.packed(
                self.view, buffer.fmt, buffer.rotated_width, buffer.scale_rule
            )

    @property
    def raw_array(self) -> Any:
        """The same view, of the format's unsigned carrier, untagged."""
        buffer = self.buffer
        inside = buffer.raw[buffer.start : buffer.stop]
        return self._cut(inside.view(UNSIGNED[buffer.dtype.itemsize]))

    def live(self) -> Array:
        """Return what it holds on the device now, as a NumPy array."""
        buffer = self.buffer
        live: Array = self._cut(buffer.read()[buffer.start : buffer.stop].view(buffer.dtype))
        return live

    def take_over(self) -> None:
        """Let the mirror hold what the device holds, once that was compared another way."""
        if self.fmt in FOUR_BIT:
            self.view[...] = reference.FourBitRows.packed(self.live(), self.fmt)
            return
        unsigned = UNSIGNED[self.buffer.dtype.itemsize]
        self.view.view(unsigned)[...] = self.live().view(unsigned)

    def sub(self, cut: Cut) -> Argument:
        """Cut another argument from this one; they share their bytes."""
        return type(self)(self.buffer, lambda flat: cut(self._cut(flat)))

    def ruled(self, scale_rule: ScaleRule) -> Argument:
        """Return the same rows of a four-bit format, whose groups get their scales by a rule."""
        self.buffer.scale_rule = scale_rule
        return type(self)(self.buffer, self._cut)

    def rotated(self, width: int | None = None) -> Argument:
        """Return the same rows of a four-bit format, stored rotated: `width` elements; None: all.

        So are all that are cut from these bytes later.
        """
        self.buffer.rotated_width = self.array.shape[-1] if width is None else width
        return type(self)(self.buffer, self._cut)


class Arguments:
    """The buffers of one call, and the random numbers that fill them.

    Examples
    --------
    >>> import kvcupy as kv
    >>> case = Arguments(kv.device("host"), seed=1)
    >>> cache = case.output("bf16", (4, 2, 8), name="cache")
    >>> cache.view[3, 0] = 1  # what the reference says
    >>> cache.array[3, 0] = 1  # what was done
    >>> case.check_buffers()
    >>> cache.array[2, 1] = 7
    >>> case.check_buffers()
    Traceback (most recent call last):
    kvcupy.testing.arrays.Mismatch: cache: 8 of 64 elements differ (8 should not have been ...
    """

    buffer_type: type[Buffer] = Buffer

    def __init__(self, device: Any, seed: Any = 0, *, rounded_weights: bool = False) -> None:
        self.device, self.seed, self.rounded_weights = device, seed, rounded_weights
        self.rng = np.random.default_rng(seed)
        self.buffers: list[Buffer] = []
        self.differences: list[Mismatch] = []

    def place(
        self, content: Array, fmt: str, cut: Cut | None = None, *, misalign: int = 0,
        name: str = "argument",
    ) -> Argument:  # fmt: skip
        """Place an array, viewed through `cut`, which starts from the array's own shape.

        `cut` uses only what NumPy and CuPy arrays have in common (indexing, reshape, transpose).
        `misalign` moves the first element by that many elements.
        """
        flat = np.ascontiguousarray(content).reshape(-1)
        buffer = self.buffer_type(self, fmt, flat, misalign * flat.itemsize, name)
        buffer.shape = content.shape
        self.buffers.append(buffer)
        return Argument(buffer, lambda a: (cut or (lambda b: b))(a.reshape(content.shape)))

    def input(
        self, fmt: str, shape: tuple[int, ...], cut: Cut | None = None, *, misalign: int = 0,
        name: str = "input",
    ) -> Argument:  # fmt: skip
        """Draw an input of base shape `shape`, special values among its elements."""
        if fmt in FOUR_BIT:
            return self.place(self.four_bit_rows(fmt, shape), fmt, cut, name=name)
        content = random_elements(self.rng, fmt, int(np.prod(shape))).reshape(shape)
        return self.place(content, fmt, cut, misalign=misalign, name=name)

    def rows(
        self, fmt: str, shape: tuple[int, ...], cut: Cut | None = None, *, misalign: int = 0,
        name: str = "rows",
    ) -> Argument:  # fmt: skip
        """Draw an input of usual magnitudes."""
        values = self.rng.standard_normal(shape) * 10.0 ** self.rng.integers(-2, 3, shape)
        return self.place(from_values(values, fmt), fmt, cut, misalign=misalign, name=name)

    def output(
        self, fmt: str, shape: tuple[int, ...], cut: Cut | None = None, *, misalign: int = 0,
        name: str = "output",
    ) -> Argument:  # fmt: skip
        """Draw what an output of base shape `shape` holds beforehand: anything but NaN."""
        if fmt in FOUR_BIT:
            return self.place(
                self.four_bit_rows(fmt, shape), fmt, cut, misalign=misalign, name=name
            )
        content = random_finite(self.rng, fmt, int(np.prod(shape))).reshape(shape)
        return self.place(content, fmt, cut, misalign=misalign, name=name)

    def four_bit_rows(self, fmt: str, shape: tuple[int, ...]) -> Array:
        """Draw the bytes of rows of a four-bit format, any bits: uint8 (..., row_bytes)."""
        size = (*shape[:-1], FOUR_BIT[fmt].row_bytes(shape[-1]))
        return self.rng.integers(0, 256, size, dtype=np.uint8)

    def slots(
        self, values: Any, dtype: str = "int64", step: int = 1, name: str = "slot_mapping"
    ) -> Argument:
        """Place an index array, every `step`-th element of a longer one full of poison."""
        values = np.asarray(values, np.int64)
        count, spread = values.shape[-1], max(abs(step), 1)
        content = np.full((*values.shape[:-1], count * spread), POISON_SLOT, INDEX_DTYPE[dtype])
        content[..., ::spread] = values if step > 0 else values[..., ::-1]
        first = (count - 1) * spread if step < 0 and count else None
        return self.place(content, dtype, lambda a: a[..., first::step], name=name)

    def note_unless_near(self, name: str, got: Array, want: Array, allowed: Any) -> None:
        """Keep what `assert_near` raises in `differences`, so that the rest is compared too."""
        try:
            assert_near(name, got, want, allowed, self.seed)
        except Mismatch as difference:
            self.differences.append(difference)

    def all_differences(self) -> list[Mismatch]:
        """Compare every buffer; return what was kept, and what differs now."""
        differences = list(self.differences)
        for buffer in self.buffers:
            try:
                buffer.check()
            except Mismatch as difference:
                differences.append(difference)
        return differences

    def check_buffers(self) -> None:
        """Compare every buffer with what it should be."""
        for buffer in self.buffers:
            buffer.check()


def torch_tensor(torch: Any, argument: Argument) -> Any:
    """Return a tensor over the memory of an argument, in its format."""
    bits = argument.raw_array
    signed = {"uint8": "uint8", "uint16": "int16", "uint32": "int32", "uint64": "int64"}
    tensor = torch.from_dlpack(bits.view(signed[bits.dtype.name]))
    dtypes = {
        "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8,
        "bool": torch.bool, "int32": torch.int32, "int64": torch.int64,
    }  # fmt: skip
    return tensor.view(dtypes[argument.fmt])
