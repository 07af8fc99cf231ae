"""Calls of `transfer_pages` that compare every byte of both pools with what it should be.

A `PoolArg` is a pool with NumPy mirrors of its memory, whose strides are computed here. The
operation under test moves pages of the pools, the reference moves pages of the mirrors.
"""

from __future__ import annotations

import numpy as np
import pytest
from four_bit_cases import hard_rows
from helpers import (
    DTYPE,
    QUANTISED,
    UNSIGNED,
    Arg,
    Case,
    check_faults,
    from_values,
    random_elements,
)

import kvcupy as kv
from kvcupy import ArrayView, arrays, reference
from kvcupy.formats import FOUR_BIT

POOL_LAYOUTS = {
    "layer_first": "LPTHD",
    "page_first": "PTLHD",
    "page_first_direct": "PLTHD",
    "page_head": "PHTLD",
}
"""The axes in memory: layers, pages, tokens of a page, heads, and the row of a head."""
METHODS = ("kernel", "copy", "staged", "auto")
KINDS = {
    "bf16": "bf16", "int8": "int8", "nvfp4": "nvfp4", "bf16 to int8": ("bf16", "int8"),
    "fp8_e4m3 to fp32": ("fp8_e4m3", "fp32"), "fp16 to nvfp4": ("fp16", "nvfp4"),
    "int4 to bf16": ("int4", "bf16"),
}  # fmt: skip
"""Encodings of pools, as `pools` takes them: copies, and conversions of each kind."""
PLACEMENTS = ("device", "pinned", "pageable")


def reaches(device, method, placements, *, convert=False):
    """Whether a method supports these placements: a GPU's kernels cannot access pageable memory.

    "copy" needs none; "staged", and any conversion, needs kernels to access one side.
    """
    if device.kind == "host" or "pageable" not in placements:
        return True
    if method == "kernel":
        return False
    return set(placements) != {"pageable"} or (method != "staged" and not convert)


class Memory:
    """One part of a pool, such as K or its scales: the device's bytes and the expected ones."""

    def __init__(self, case, name, view, axes, sizes, fmt, content):
        self.case, self.name, self.fmt = case, name, fmt
        self.rotated_width, self.scale_rule = view.rotated_width, view.scale_rule
        if fmt in FOUR_BIT:
            sizes = {**sizes, "D": FOUR_BIT[fmt].row_bytes(sizes["D"])}
            view = arrays.bytes_of(view)
        shape = tuple(sizes[axis] for axis in axes)
        self.want = content(fmt, int(np.prod(shape))).reshape(shape)
        self.loose = np.zeros(shape, bool)
        """Where any NaN will do, as the result of a conversion."""
        self.raw = ArrayView(
            view.pointer, (self.want.nbytes,), (1,), "uint8", view.device,
            library=view.library, owner=view.owner,
        )  # fmt: skip
        self._order = [axes.index(axis) for axis in "LPTHD" if axis in axes]
        pages_first = self.by_layer(self.want).swapaxes(0, 1)
        if "D" not in axes:
            pages_first = pages_first[..., None]
        assert view.shape == pages_first.shape and all(
            a == b or n <= 1
            for n, a, b in zip(view.shape, view.strides, pages_first.strides, strict=True)
        ), f"{name}: {view.shape} by {view.strides}, not {pages_first.strides}"
        self.upload()

    def by_layer(self, array):
        """View an array of this part's shape as (layers, pages, page_size, heads[, width])."""
        return array.transpose(self._order)

    @property
    def view(self):
        rows = self.by_layer(self.want)
        if self.fmt not in FOUR_BIT:
            return rows
        return reference.FourBitRows.packed(rows, self.fmt, self.rotated_width, self.scale_rule)

    def upload(self, stream=None):
        """Copy the mirror to the device in the order of `stream`, without waiting for it."""
        source = self.want.reshape(-1).view(np.uint8)
        if stream is not None:  # a GPU takes pageable memory only while the caller waits
            source = self.case.device.asarray(source)
        self.case.device.copy(self.raw, source, stream=stream)

    def download(self):
        got = self.case.device.to_numpy(self.raw)
        return got.view(self.want.dtype).reshape(self.want.shape)

    def check(self):
        got, want = self.download(), self.want
        unsigned = UNSIGNED[want.dtype.itemsize]
        wrong = got.view(unsigned) != want.view(unsigned)
        if self.loose.any() and wrong.any() and self.fmt not in FOUR_BIT:
            both = np.isnan(reference.decode(got, self.fmt))
            wrong &= ~(self.loose & both & np.isnan(reference.decode(want, self.fmt)))
        if not wrong.any():
            return
        layer, page, offset, *rest = np.argwhere(self.by_layer(wrong))[0].tolist()
        at = (layer, page, offset, *rest)
        pytest.fail(
            f"{self.name}: {int(wrong.sum())} of {want.size} elements differ; first in layer "
            f"{layer}, page {page}, token {offset}, at {rest}: "
            f"got {self.by_layer(got.view(unsigned))[at]:#x} ({self.by_layer(got)[at]}), "
            f"want {self.by_layer(want.view(unsigned))[at]:#x} ({self.by_layer(want)[at]}), "
            f"seed {self.case.seed}"
        )


class PoolArg:
    """A pool full of random bytes, and its expected content."""

    def __init__(self, case, name, pool, layout, content, scale_content):
        self.pool, self.fmt = pool, pool.encoding.format
        fmt = self.fmt
        sizes = {
            "L": pool.num_layers, "P": pool.num_pages, "T": pool.page_size,
            "H": pool.num_kv_heads,
        }  # fmt: skip
        widths = (pool.head_dim, pool.v_head_dim)
        sides = "KV" if len(pool.parts) == 2 else ("latent",)
        self.parts = [
            Memory(
                case, f"{name} {side}", view, POOL_LAYOUTS[layout], {**sizes, "D": width}, fmt,
                content,
            )
            for side, view, width in zip(sides, pool.parts, widths, strict=False)
        ]  # fmt: skip
        axes = "LPTH" if layout == "layer_first" else "PTLH"
        self.scales = [
            Memory(case, f"{name} scales of {side}", view, axes, sizes, "fp32", scale_content)
            for side, view in zip(sides, pool.scale_parts, strict=False)
        ]

    @property
    def memories(self):
        return [*self.parts, *self.scales]

    def refill(self, content, stream=None):
        """Overwrite all of it with other bytes, in the order of `stream`."""
        for memory in self.memories:
            memory.want[...] = content(memory.fmt, memory.want.size).reshape(memory.want.shape)
            memory.upload(stream)

    def check(self):
        for memory in self.memories:
            memory.check()


class TransferCase(Case):
    """The pools and page lists of one test."""

    def __init__(self, device, seed=0):
        super().__init__(device, seed)
        self.pools = []

    # Arguments

    def numbers(self, fmt, count):
        """Draw rows with elements around every boundary of four-bit codes; of these, any bytes."""
        if fmt in FOUR_BIT:
            return self.bits(fmt, count)
        return hard_rows(self, fmt, (count // 16, 16)).reshape(-1)

    def bits(self, fmt, count):
        """Draw random bits, which include NaN of every kind; of a four-bit format, bytes."""
        dtype = DTYPE.get(fmt, np.dtype(np.uint8))
        return self.rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)

    def values(self, fmt, count):
        """Draw usual magnitudes, special values, and random bits."""
        return random_elements(self.rng, fmt, count)

    def multipliers(self, _, count):
        """Draw scales, some of them extreme."""
        extreme = np.float32([1e-38, 1e38, 2e-45, 1, 0, np.inf])
        usual = self.rng.uniform(1e-3, 3, count).astype(np.float32)
        return np.where(self.rng.random(count) < 0.1, self.rng.choice(extreme, count), usual)

    def pool(
        self, layout="layer_first", encoding="bf16", *, pages=9, page_size=4, layers=3, heads=2,
        widths=(8, 6), latent=None, rope=0, placement="device", scales=False, content=None,
        multipliers=None,
    ):  # fmt: skip
        """Make a pool; with `latent` a width, an MLAPool.

        `content(fmt, count)` draws its elements, `multipliers` its scales; without them, any bits.
        """
        options = {
            "dtype": encoding, "layout": layout, "placement": placement, "device": self.device,
            "scales": scales,
        }  # fmt: skip
        if latent is None:
            pool = kv.KVPool(
                pages, page_size, layers, heads, widths[0], v_head_dim=widths[1], **options
            )
        else:
            pool = kv.MLAPool(pages, page_size, layers, latent, rope, **options)
        name = f"pool {len(self.pools)} ({layout}, {placement})"
        content, multipliers = content or self.bits, multipliers or self.bits
        self.pools.append(PoolArg(self, name, pool, layout, content, multipliers))
        return self.pools[-1]

    def indices(self, values, dtype="int64", step=1):
        """Place page numbers between poisoned elements."""
        return self.slots(values, dtype, step)

    # Calls

    def transfer(self, src, dst, src_pages, dst_pages, *, stream=None, **options):
        """Check one `kv.transfer_pages`; pages are lists, NumPy arrays or results of `indices`."""
        if stream is not None:
            self.device.synchronize()
        self.issue(src, dst, src_pages, dst_pages, stream=stream, **options)
        if stream is not None:
            stream.synchronize()
        self.finish(self.expect(src, dst, src_pages, dst_pages, options.get("layers")))

    def refuse(self, src, dst, src_pages, dst_pages, *, method, **options):
        """Check that pools in memory that kernels do not reach are refused, before any change."""
        with pytest.raises(ValueError, match=r"^(method|convert): expected "):
            self.issue(src, dst, src_pages, dst_pages, method=method, **options)
        self.finish()

    def issue(self, src, dst, src_pages, dst_pages, **options):
        """Call `kv.transfer_pages`, which converts where it has to, and check nothing."""
        method = options.get("method", "auto")
        options.setdefault("convert", str(src.pool.encoding) != str(dst.pool.encoding))
        if not reaches(self.device, "kernel", {src.pool.placement, dst.pool.placement}):
            method = "copy"
        pages = (
            self.list_for(method, p.array, p.view) if isinstance(p, Arg) else p
            for p in (src_pages, dst_pages)
        )  # fmt: skip
        kv.transfer_pages(src.pool, dst.pool, *pages, **options)

    def list_for(self, method, on_device, on_host):
        """Choose the page list that a method takes: "copy" and "staged" read none on a GPU."""
        read_by_the_call = self.device.kind == "cuda" and method in ("copy", "staged")
        return on_host if read_by_the_call else on_device

    def expect(self, src, dst, src_pages, dst_pages, layers=None):
        """Run the reference on the mirrors, and return its faults."""
        pages = [
            p.view if isinstance(p, Arg) else np.array([int(page) for page in p], np.int64)
            for p in (src_pages, dst_pages)
        ]
        if src.fmt != dst.fmt:
            fits = (pages[1] >= 0) & (pages[1] < dst.pool.num_pages)
            chosen = range(dst.pool.num_layers) if layers is None else np.atleast_1d(layers)
            for memory in dst.parts:
                for layer in chosen:
                    memory.by_layer(memory.loose)[layer, pages[1][fits]] = True
        return reference.transfer_pages(
            [m.view for m in src.parts], [m.view for m in dst.parts], *pages, layers=layers,
            src_scales=[m.view for m in src.scales] or None,
            dst_scales=[m.view for m in dst.scales] or None,
        )  # fmt: skip

    # Checks

    def finish(self, faults=((), ())):
        """Compare all memory, as it is after a call, and the fault record."""
        if self.device.kind != "host":
            self.device.synchronize()
        for pool in self.pools:
            pool.check()
        by_side = dict(zip(("src_pages", "dst_pages"), faults, strict=True))
        check_faults(self.device, "transfer_pages", by_side, repeats=2)
        self.check_buffers()


def pools(
    case, encodings="bf16", layouts=("layer_first", "page_first"), *, pages=(9, 9),
    placements=("device", "device"), scales=True, content=None, multipliers=None, **geometry,
):  # fmt: skip
    """Make a source and a target of one geometry, of one encoding or two.

    Quantised formats have a scale for each row, unless `scales`, one or two, says otherwise. What
    is copied is any bits; what is converted are usual and special values and scales, or those that
    `content` and `multipliers` draw for the source.
    """
    pair = (encodings, encodings) if isinstance(encodings, str) else encodings
    formats = [encoding.partition("+")[0] for encoding in pair]
    has_scales = (scales, scales) if isinstance(scales, bool) else scales
    is_packed = not FOUR_BIT.keys().isdisjoint(formats)
    if is_packed:
        geometry = {"widths": (128, 256)} | geometry
    drawn = (case.bits, case.bits)
    if pair[0] != pair[1]:
        drawn = (case.numbers if is_packed else case.values, case.multipliers)
        drawn = (case.bits, drawn[1]) if content else drawn
    of_source = (content or drawn[0], multipliers or drawn[1])
    return [
        case.pool(
            layout, encoding, pages=count, placement=placement, scales=has and fmt in QUANTISED,
            content=own[0], multipliers=own[1], **geometry,
        )
        for layout, encoding, fmt, count, placement, has, own in zip(
            layouts, pair, formats, pages, placements, has_scales, (of_source, drawn), strict=True
        )
    ]  # fmt: skip


def repeated(values):
    """Return content that goes through `values`, row after row."""
    return lambda fmt, count: np.resize(np.asarray(from_values(values, fmt)), count)


def ones(_, count):
    """Draw scales that change nothing."""
    return np.ones(count, np.float32)
