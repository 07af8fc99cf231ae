"""Calls of `gather_kv` that check everything."""

from __future__ import annotations

import numpy as np
from helpers import DTYPE, QUANTISED, Arg, Case, compare

import kvcupy as kv
from kvcupy import reference


class GatherCase(Case):
    """The buffers of one test, with a call of `gather_kv` that checks everything."""

    def gather(
        self, k_cache, v_cache, slots, k_out=None, v_out=None, *, stream=None, dtype=None, **options
    ):
        """Check one call; outputs that are not given are allocated by it, zero where skipped."""
        slots = slots if isinstance(slots, Arg) else self.slots(slots)

        def to_pass(value):
            if isinstance(value, Arg):
                return value.array
            return self.device.asarray(value) if isinstance(value, np.ndarray) else value

        if stream is not None:
            self.device.synchronize()
        got = kv.gather_kv(
            k_cache.array, v_cache.array, slots.array, k_out=to_pass(k_out), v_out=to_pass(v_out),
            dtype=dtype, stream=stream,
            **{name: to_pass(value) for name, value in options.items()},
        )  # fmt: skip
        if stream is not None:
            stream.synchronize()
        assert len(got) == 2
        wants = []
        for given_out, cache in zip((k_out, v_out), (k_cache, v_cache), strict=True):
            if given_out is not None:
                given_out.buffer.exact &= given_out.fmt == cache.fmt
                wants.append(given_out.view)
                continue
            fmt = dtype or next((o.fmt for o in (k_out, v_out) if o is not None), None)
            fmt = fmt or ("bf16" if cache.fmt in QUANTISED else cache.fmt)
            heads = () if cache.view.ndim == 2 else (heads_of(cache.view, options),)
            wants.append(np.zeros((len(slots.view), *heads, cache.view.shape[-1]), DTYPE[fmt]))
        faults = reference.gather_kv(
            k_cache.view,
            v_cache.view,
            slots.view,
            k_out=wants[0],
            v_out=wants[1],
            **{
                name: value.view if isinstance(value, Arg) else value
                for name, value in options.items()
            },
        )
        for name, out, given_out, want, cache in zip(
            "KV", got, (k_out, v_out), wants, (k_cache, v_cache), strict=True
        ):
            fmt = reference.format_of(want)
            if given_out is None:
                compare(
                    as_numpy(self.device, out, fmt), want, fmt, exact=fmt == cache.fmt, name=name,
                    seed=self.seed,
                )  # fmt: skip
            else:
                assert tuple(out.shape) == want.shape
        self.check("gather_kv", faults)


def heads_of(cache, options):
    return cache.shape[1] if options.get("layout") == "HND" or cache.ndim == 3 else cache.shape[2]


def as_numpy(device, array, fmt):
    """An output as a NumPy array of the format's own dtype, whatever carries it."""
    if isinstance(array, kv.ArrayView):
        array = device.carrier(array)
    got = np.ascontiguousarray(device.to_numpy(array))
    assert got.dtype.itemsize == DTYPE[fmt].itemsize
    return got.view(DTYPE[fmt])
