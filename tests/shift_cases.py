"""Pools of any encoding, and calls of `shift_pages` on them that check everything."""

from __future__ import annotations

import numpy as np
from helpers import check_faults, from_values

import kvcupy as kv
from kvcupy import reference
from kvcupy.arrays import bytes_of
from kvcupy.formats import FORMATS, FOUR_BIT, numpy_dtype
from kvcupy.testing.cases import exact_rotations

PAGES, POSITIONS = 8, 24


class ShiftCase:
    """A pool on a device with its mirror, of values that float32 rotates exactly.

    Parameters
    ----------
    kind : "kv" or "mla"
    widths : of K and V
    options : of the pool
    """

    def __init__(self, device, kind="kv", seed=0, *, rotary_dim=None, widths=(), **options):
        self.device, self.rng = device, np.random.default_rng(seed)
        fmt, *parts = options.get("dtype", "bf16").split("+")
        four_bit = fmt in FOUR_BIT
        # Whole groups; 64 elements rotate by eighths, which loses nothing.
        self.width = 32 if not four_bit else 64 if "hadamard" in parts else 128
        self.start = 0
        if kind == "mla":
            latent, rope = (self.width, self.width) if four_bit else (32, 16)
            self.pool = kv.MLAPool(PAGES, 4, 3, latent, rope, device=device, **options)
            self.start, self.width = latent, rope
        else:
            self.width, v_width = widths or (self.width, 256 if four_bit else 24)
            counts = PAGES, 4, 3, 2, self.width
            self.pool = kv.KVPool(*counts, v_head_dim=v_width, device=device, **options)
        self.rotary_dim = rotary_dim or self.width
        self.table = exact_rotations(self.rng, POSITIONS, self.rotary_dim)
        for part in self.pool.parts:
            self._write(part, self._content(part))
        for scales in self.pool.scale_parts:  # powers of two
            self._write(scales, np.exp2(self.rng.integers(-3, 4, scales.shape)).astype(np.float32))

    def _content(self, part):
        """Small whole numbers, or any code in groups of one scale."""
        form = FOUR_BIT.get(part.format)
        if form is None:
            return from_values(self.rng.integers(-8, 9, part.shape), part.format)
        rows = self.rng.integers(0, 256, bytes_of(part).shape, dtype=np.uint8)
        one = {"fp8_e4m3": [0x38], "e8m0": [127], "fp16": [0x00, 0x3C]}[form.scale_format]
        split = part.shape[-1] // 2
        rows[..., split:] = np.tile(np.uint8(one), (rows.shape[-1] - split) // len(one))
        return rows

    def _array(self, part):
        """The bytes of a part, over its memory."""
        v = bytes_of(part)
        return self.device.carrier(v)

    def _write(self, part, content):
        array = self._array(part)
        array[...] = self.device.asarray(np.ascontiguousarray(content).view(array.dtype))

    def mirrors(self):
        """What the reference takes: K and V, and their scales, by page."""
        mirrors = []
        for part in (*self.pool.parts, *self.pool.scale_parts):
            rows = np.array(self.device.to_numpy(self._array(part)))
            if part.format in FOUR_BIT:
                encoding = part.format, part.rotated_width, part.scale_rule
                mirrors.append(reference.FourBitRows.packed(rows, *encoding))
            else:
                mirrors.append(rows.view(numpy_dtype(part.format)))
        return mirrors

    def bytes(self):
        self.device.synchronize()
        parts = (*self.pool.parts, *self.pool.scale_parts)
        return [np.array(self.device.to_numpy(self._array(part))).tobytes() for part in parts]

    def index(self, values, dtype=np.int64):
        return self.device.asarray(np.array(values, dtype))

    def shift(self, pages, delta, *, out_pages=None, interleaved=False, stream=None):
        """Check one `kv.shift_pages`, bit for bit."""
        (*parts,) = self.mirrors()
        num_parts = len(self.pool.parts)
        named = dict(zip(("pool", "values"), parts[:num_parts], strict=False))
        named |= dict(zip(("key_scales", "value_scales"), parts[num_parts:], strict=False))
        if out_pages is None:
            named = {n: x for n, x in named.items() if not n.startswith("value")}
        table = self.device.asarray(self.table)
        lists = {"pages": pages, "delta": delta, "out_pages": out_pages}
        on_device = {
            name: x if x is None or isinstance(x, (int, list)) else self.index(x)
            for name, x in lists.items()
        }  # fmt: skip
        self.device.synchronize()
        kv.shift_pages(
            self.pool, **on_device, rope_table=table, interleaved=interleaved, stream=stream
        )
        if stream is not None:
            stream.synchronize()
        arrays = {n: x if x is None else np.array(x, np.int64) for n, x in lists.items()}
        faults = reference.shift_pages(
            **named, **arrays, rope_table=self.table, interleaved=interleaved, start=self.start
        )
        want = []
        for part in parts:
            rows = part
            if isinstance(part, reference.FourBitRows):
                codes, scales = (a.view(np.uint8) for a in map(
                    np.ascontiguousarray, (part.codes, part.scales)))  # fmt: skip
                rows = np.concatenate([codes, scales], axis=-1)
            want.append(rows.tobytes())
        assert self.bytes() == want
        by_list = dict(zip(("pages", "out_pages", "delta"), faults, strict=True))
        check_faults(self.device, "shift_pages", by_list, repeats=1)


ENCODINGS = (
    *FORMATS, *FOUR_BIT, "nvfp4+hadamard", "int4+hadamard", "nvfp4+four_over_six",
    "nvfp4+hadamard+four_over_six",
)  # fmt: skip
