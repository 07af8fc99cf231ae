"""Calls of `store_state`, `gather_state` and `update_conv_state` that check everything."""

from __future__ import annotations

import numpy as np
from helpers import Arg, Case, check_faults

import kvcupy as kv
from kvcupy import reference


class StateCase(Case):
    """The buffers of one test, with calls that check everything."""

    def bits(self, shape, dtype=np.uint8, cut=None, *, misalign=0, name="states"):
        """Rows of any dtype and any bits."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape)) * dtype.itemsize
        content = self.rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)
        return self.place(content, "", cut, misalign=misalign, name=name)

    def run(self, operation, *args, **options):
        """Check one call; arguments are placed arrays, tuples of them, or lists of indices."""
        args = [self.slots(a) if isinstance(a, (list, range)) else a for a in args]
        self.device.synchronize()
        given = {name: each("array", value) for name, value in options.items()}
        getattr(kv, operation)(*[each("array", a) for a in args], **given)
        self.device.synchronize()
        mirrored = {name: each("view", value) for name, value in options.items()}
        mirrored.pop("stream", None)
        faults = getattr(reference, operation)(*[each("view", a) for a in args], **mirrored)
        names = ("slots", "cu_query_lens")
        faults = faults if isinstance(faults, tuple) else (faults,)
        by_name = dict(zip(names, faults, strict=False))
        check_faults(self.device, operation, by_name, repeats=2)  # a sum of two sequences
        self.check_buffers()


def each(attribute, value):
    """The array or the mirror of an argument, or of each of a tuple."""
    if isinstance(value, tuple):
        return tuple(each(attribute, v) for v in value)
    if not isinstance(value, Arg):
        return value
    taken = getattr(value, attribute)
    return bits_of(taken) if attribute == "view" else taken


def bits_of(view):
    """The same elements as bytes that NumPy copies without a change."""
    return view.view(f"u{view.dtype.itemsize}") if view.dtype.kind == "f" else view


def lay_out(case, slots, channels, inputs, dtype, order, *, pad=0, misalign=0):
    """A cache, (slots, channels, inputs), of which inputs or channels are contiguous."""
    if order == "channels last":
        return case.bits(
            (slots, inputs, channels + pad), dtype, lambda a: a[..., :channels].swapaxes(1, 2),
            misalign=misalign, name="cache",
        )  # fmt: skip
    return case.bits(
        (slots, channels, inputs + pad), dtype, lambda a: a[..., :inputs], misalign=misalign,
        name="cache",
    )  # fmt: skip
