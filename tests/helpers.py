"""Build arguments with canaries around them, and compare what a call left with what it should.

A `Case` holds every buffer of one test. Each buffer exists twice: as bytes on the device, which the
operation under test reads and writes, and as a NumPy mirror, which the reference reads and writes.
Comparing the two, whole, checks results, canaries, gaps between strided rows, slots that must stay
as they were, and that inputs are unmodified, all at once.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import redzones

from kvcupy import reference

FORMATS = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8")
QUANTISED = ("fp8_e4m3", "fp8_e5m2", "int8")
DTYPE = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
INDEX_DTYPE = {"int32": np.dtype(np.int32), "int64": np.dtype(np.int64)}
LAYOUTS = ("NHD", "HND")
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

GUARD_BYTES = 128
"""Canary bytes on either side of a buffer, a multiple of the alignment."""
ALIGNMENT = 64
"""Buffers start at a multiple of this, so that a misalignment asked for is the one tested."""
POISON_SLOT = 2147480000
"""Stands wherever an index array must not be read: it would be a fault."""

Cut = Callable[[Any], Any]

full = False
"""Whether ``pytest --full`` runs; conftest.py says so before tests are imported."""


def name_values(values: dict[str, Any]) -> str:
    """Return the id of a test whose parameter is a dict: arrays by shape, and lists by length."""
    texts = []
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            text = f"{value.dtype}{list(value.shape)}"
        elif isinstance(value, list):
            text = f"[{len(value)}]"
        else:
            text = getattr(value, "__name__", str(value))
        texts.append(f"{name}={text}")
    return ", ".join(texts) or "defaults"


def full_only(*values: Any) -> Any:
    """Return a case of `pytest.mark.parametrize` that only ``--full`` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


def examples(count: int) -> int:
    """How many examples of a property to draw: `count` with ``--full``, a quarter without."""
    return count if full else count // 4


def cache_shape(layout: str, pages: int, size: int, heads: int, width: int) -> tuple[int, ...]:
    """The base shape of a cache: paged in either layout, by slots, or of two dimensions."""
    return {
        "NHD": (pages, size, heads, width),
        "HND": (pages, heads, size, width),
        "slots": (pages * size, heads, width),
        "2-D": (pages * size, width),
    }[layout]


# Values --------------------------------------------------------------------------------------


def all_patterns(fmt: str) -> np.ndarray:
    """Every bit pattern of an 8-bit or 16-bit format, once."""
    size = DTYPE[fmt].itemsize
    return np.arange(2 ** (8 * size), dtype=np.uint64).astype(UNSIGNED[size]).view(DTYPE[fmt])


def from_values(values: Any, fmt: str) -> np.ndarray:
    """Round float values to a format's own dtype, as the reference does."""
    return reference.encode(np.asarray(values), fmt).view(DTYPE[fmt])


def rounding_boundaries(fmt: str) -> np.ndarray:
    """All halfway points of a format, and the float32 values next to them, below and above."""
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
    return np.concatenate([middle, below, above, np.float32([np.inf, -np.inf, np.nan, -0.0])])


def random_elements(rng: np.random.Generator, fmt: str, count: int) -> np.ndarray:
    """Draw a mixture of any bits, usual magnitudes and special values, of a format's dtype."""
    dtype = DTYPE[fmt]
    bits = rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    anything = bits.view(dtype)
    usual = from_values(rng.standard_normal(count) * 10.0 ** rng.integers(-3, 3, count), fmt)
    special = from_values([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 448.0, 1e-41, 6e4], fmt)
    chosen = rng.integers(0, 4, count)
    mixed = np.where(
        chosen == 0,
        rng.choice(special.view(UNSIGNED[dtype.itemsize]), count),
        np.where(
            chosen == 1,
            anything.view(UNSIGNED[dtype.itemsize]),
            usual.view(UNSIGNED[dtype.itemsize]),
        ),
    )
    return mixed.astype(UNSIGNED[dtype.itemsize]).view(dtype)


def random_finite(rng: np.random.Generator, fmt: str, count: int) -> np.ndarray:
    """Draw any bits except NaN: what an output holds before it is written."""
    values = rng.integers(0, 256, count * DTYPE[fmt].itemsize, dtype=np.uint8).view(DTYPE[fmt])
    values[np.isnan(reference.decode(values, fmt))] = from_values(3.0, fmt)
    return values


# Device code of a test's own -----------------------------------------------------------------


class KernelSources:
    """A copy of ``kernels_src``; the fixture `kernel_sources` makes one.

    A loaded kernel stays loaded, so what is changed here is seen by the devices made afterwards.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self._monkeypatch = folder, monkeypatch

    def add(self, name: str) -> None:
        """Add a file of ``tests/kernels``."""
        shutil.copy(Path(__file__).parent / "kernels" / name, self.folder / name)

    def replace(self, name: str, old: str, new: str, count: int = 1) -> None:
        """Replace text that must occur exactly `count` times, with whatever white space."""
        path = self.folder / name
        pattern = r"\s*".join(map(re.escape, re.findall(r"\w+|[^\w\s]", old)))
        text, found = re.subn(pattern, lambda _: new, path.read_text())
        assert found == count, f"{name} has {found} of {old!r}, not {count}"
        path.write_text(text)

    def device(self) -> Any:
        """Make a host device, and let the operations of kvcupy use it until the test ends.

        It lays kernels out as on a GPU, and a kernel that does not compile is an error.
        """
        from kvcupy import devices
        from kvcupy.config import config
        from kvcupy.devices.host import HostDevice
        from kvcupy.ops import call as op_call

        device = HostDevice()
        device.warp_lanes = 32
        self._monkeypatch.setitem(devices._devices, "host", device)
        self._monkeypatch.setattr(op_call, "_plans", {})
        self._monkeypatch.setattr(config, "_fallback", "error")
        return device


# Placing on a device -------------------------------------------------------------------------


def address(array: Any) -> int:
    """The address of the first element of a NumPy or CuPy array."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def to_device(device: Any, array: np.ndarray, cut: Cut | None = None) -> Any:
    """Upload a whole base array, and `cut` the wanted view from it there.

    `cut` uses only what NumPy and CuPy arrays have in common (indexing, reshape, transpose and
    `np.broadcast_to`), so that the strides on the device are those that NumPy would have. A format
    that the device's array library has no dtype for travels as bytes, tagged with `kv.view_as`.
    """
    fmt = reference.FORMAT_OF_DTYPE.get(array.dtype.name, "")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
    uploaded = device.asarray(flat)
    return typed_view(
        device,
        uploaded,
        array.dtype,
        fmt,
        lambda a: (cut or (lambda whole: whole))(a.reshape(array.shape)),
    )


def typed_view(device: Any, raw: Any, dtype: np.dtype, fmt: str, cut: Cut) -> Any:
    """View device bytes as `dtype`, cut to shape."""
    import kvcupy as kv

    if device.kind == "cuda" and fmt.startswith("fp8"):
        return kv.view_as(cut(raw), fmt)
    return cut(raw.view(dtype))


def repeat_rows(array: Any, count: int) -> Any:
    """View axis 0, of length one, as `count` writable rows at stride zero."""
    if isinstance(array, np.ndarray):
        strides = (0, *array.strides[1:])
        return np.lib.stride_tricks.as_strided(array, (count, *array.shape[1:]), strides)
    return np.broadcast_to(array, (count, *array.shape[1:]))


class Buffer:
    """Bytes on the device between canaries, beside the bytes that should be there."""

    def __init__(self, case: Case, fmt: str, content: np.ndarray, misalign: int, name: str):
        assert content.ndim == 1 and misalign % content.itemsize == 0
        self.case, self.fmt, self.dtype, self.name = case, fmt, content.dtype, name
        self.exact = True
        payload = content.view(np.uint8)
        self.start = GUARD_BYTES + misalign
        self.stop = self.start + payload.size
        self.want = case.rng.integers(0, 256, self.stop + GUARD_BYTES, dtype=np.uint8)
        self.want[self.start : self.stop] = payload
        storage = case.device.empty((self.want.size + ALIGNMENT,), np.uint8)
        skip = -address(storage) % ALIGNMENT
        self.raw = storage[skip : skip + self.want.size]
        self.restore()

    def opened(self) -> AbstractContextManager[None]:
        """Let this process touch the canaries, which are redzones under sanitizers."""
        inside = self.start, self.stop
        return redzones.opened(address(self.raw), self.want.size, but=inside)

    def restore(self) -> None:
        """Bring the bytes that should be there to the device."""
        with self.opened():
            self.raw[...] = self.case.device.asarray(self.want.copy())

    def read(self) -> np.ndarray:
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
            assert not bad.size, (
                f"{self.name}: byte {bad[0]} of the canary {side} changed, "
                f"got {got[side][bad[0]]:#04x}, want {self.want[side][bad[0]]:#04x}, "
                f"seed {self.case.seed}"
            )
        compare(
            got[self.start : self.stop].view(self.dtype),
            self.want[self.start : self.stop].view(self.dtype),
            self.fmt,
            exact=self.exact,
            name=self.name,
            seed=self.case.seed,
        )


def compare(got: np.ndarray, want: np.ndarray, fmt: str, *, exact: bool, name: str, seed: Any):
    """Assert equal bits; unless `exact`, a NaN is equal to any NaN."""
    assert got.shape == want.shape, f"{name}: got shape {got.shape}, want {want.shape}"
    unsigned = UNSIGNED[want.dtype.itemsize]
    got_bits, want_bits = got.view(unsigned), want.view(unsigned)
    wrong = got_bits != want_bits
    values = (got, want)
    if fmt in DTYPE:
        values = (reference.decode(got, fmt), reference.decode(want, fmt))
        if not exact:
            wrong &= ~(np.isnan(values[0]) & np.isnan(values[1]))
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        pytest.fail(
            f"{name}: {int(wrong.sum())} of {want.size} elements differ; first at index {at}: "
            f"got {values[0][at]} ({got_bits[at]:#x}), want {values[1][at]} ({want_bits[at]:#x}), "
            f"seed {seed}"
        )


class Arg:
    """One array argument: the same view of the same bytes on the device and in the mirror.

    `array` goes to the operation under test, `view` to the reference.
    """

    def __init__(self, buffer: Buffer, cut: Cut):
        self.buffer, self.fmt, self._cut = buffer, buffer.fmt, cut
        inside = slice(buffer.start, buffer.stop)
        self.view = cut(buffer.want[inside].view(buffer.dtype))
        self.array = typed_view(
            buffer.case.device, buffer.raw[inside], buffer.dtype, buffer.fmt, cut
        )

    @property
    def raw_array(self) -> Any:
        """The same view, of the format's unsigned carrier, untagged."""
        buffer = self.buffer
        inside = buffer.raw[buffer.start : buffer.stop]
        return self._cut(inside.view(UNSIGNED[buffer.dtype.itemsize]))

    def sub(self, cut: Cut) -> Arg:
        """Cut another argument from this one; they share their bytes."""
        return Arg(self.buffer, lambda flat: cut(self._cut(flat)))


class Case:
    """The buffers of one test, and the random numbers that fill them."""

    def __init__(self, device: Any, seed: Any = 0):
        self.device, self.seed = device, seed
        self.rng = np.random.default_rng(seed)
        self.buffers: list[Buffer] = []

    # Arguments

    def place(
        self,
        content: np.ndarray,
        fmt: str,
        cut: Cut | None = None,
        *,
        misalign: int = 0,
        name: str = "argument",
    ) -> Arg:
        """Place an array, viewed through `cut`, which starts from the array's own shape.

        `misalign` moves the first element by that many elements.
        """
        flat = np.ascontiguousarray(content).reshape(-1)
        buffer = Buffer(self, fmt, flat, misalign * flat.itemsize, name)
        self.buffers.append(buffer)
        return Arg(buffer, lambda a: (cut or (lambda b: b))(a.reshape(content.shape)))

    def input(
        self,
        fmt: str,
        shape: tuple[int, ...],
        cut: Cut | None = None,
        *,
        misalign: int = 0,
        name: str = "input",
    ) -> Arg:
        """Draw an input of base shape `shape`, special values among its elements."""
        content = random_elements(self.rng, fmt, int(np.prod(shape))).reshape(shape)
        return self.place(content, fmt, cut, misalign=misalign, name=name)

    def output(
        self,
        fmt: str,
        shape: tuple[int, ...],
        cut: Cut | None = None,
        *,
        misalign: int = 0,
        name: str = "output",
    ) -> Arg:
        """Draw what an output of base shape `shape` holds beforehand: anything but NaN."""
        content = random_finite(self.rng, fmt, int(np.prod(shape))).reshape(shape)
        return self.place(content, fmt, cut, misalign=misalign, name=name)

    def slots(self, values: Any, dtype: str = "int64", step: int = 1) -> Arg:
        """Place an index array, every `step`-th element of a longer one full of poison."""
        values = np.asarray(values, np.int64)
        spread = max(abs(step), 1)
        content = np.full(len(values) * spread, POISON_SLOT, INDEX_DTYPE[dtype])
        content[::spread] = values if step > 0 else values[::-1]
        first = (len(values) - 1) * spread if step < 0 and len(values) else None
        return self.place(content, dtype, lambda a: a[first::step], name="slot_mapping")

    # Calls

    def call(self, operation: str, *args: Any, stream: Any = None, **options: Any) -> None:
        """Run an operation and its reference, then compare everything."""
        import kvcupy as kv

        def given(value: Any) -> Any:
            if isinstance(value, Arg):
                return value.array
            return self.device.asarray(value) if isinstance(value, np.ndarray) else value

        def mirrored(value: Any) -> Any:
            return value.view if isinstance(value, Arg) else value

        if stream is not None:  # The uploads above went to the current stream.
            self.device.synchronize()
        getattr(kv, operation)(
            *map(given, args),
            stream=stream,
            **{name: given(value) for name, value in options.items()},
        )
        if stream is not None:
            stream.synchronize()
        faults = getattr(reference, operation)(
            *map(mirrored, args), **{name: mirrored(value) for name, value in options.items()}
        )
        self.check(operation, faults)

    def store_kv(
        self, key: Arg, value: Arg, k_cache: Arg, v_cache: Arg, slots: Any, **options: Any
    ) -> None:
        """Check one `kv.store_kv`; `slots` is a placed index array or a list."""
        slots = slots if isinstance(slots, Arg) else self.slots(slots)
        for source, cache in ((key, k_cache), (value, v_cache)):
            cache.buffer.exact &= source.fmt == cache.fmt
        self.call("store_kv", key, value, k_cache, v_cache, slots, **options)

    def store_mla(self, latent: Arg, rope_key: Arg, cache: Arg, slots: Any, **options: Any) -> None:
        """Check one `kv.store_mla`."""
        slots = slots if isinstance(slots, Arg) else self.slots(slots)
        cache.buffer.exact &= latent.fmt == cache.fmt == rope_key.fmt
        self.call("store_mla", latent, rope_key, cache, slots, **options)

    # Checks

    def check(self, operation: str, faults: list[tuple[int, int]]) -> None:
        """Compare the fault record and every buffer with what they should be."""
        check_faults(self.device, operation, faults)
        for buffer in self.buffers:
            buffer.check()


def names_number(text: str, number: int) -> bool:
    """Whether `text` holds `number` as a number of its own."""
    return re.search(rf"(?<![\d.]){number}(?![\d]|\.\d)", text) is not None


def check_faults(device: Any, operation: str, faults: list[tuple[int, int]]) -> None:
    """Assert that the device recorded a fault exactly if `operation` made one, and clear it."""
    import kvcupy as kv

    if faults:
        with pytest.raises(kv.IndexFault) as caught:
            kv.check_faults(device)
        text = str(caught.value)
        assert operation in text
        assert any(names_number(text, p) and names_number(text, s) for p, s in faults), (
            f"none of {faults[:5]} in {text!r}"
        )
    kv.check_faults(device)


def refused(case: Case, call: Callable[[], Any], error: Any, name: str) -> None:
    """Assert that `call` raises `error`, names the argument, and changed nothing."""
    with pytest.raises(error) as caught:
        call()
    assert re.search(rf"\b({name})\b", str(caught.value)), f"{name} not in {caught.value}"
    case.check("", [])
