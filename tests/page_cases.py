"""Calls of `copy_pages`, `slot_mapping` and `page_table_csr` that check everything."""

from __future__ import annotations

import numpy as np
from helpers import INDEX_DTYPE, POISON_SLOT, Arg, Case, check_faults

import kvcupy as kv
from kvcupy import reference


class PagesCase(Case):
    """The buffers of one test, with a call of `copy_pages` that checks everything."""

    def pages(self, shape, cut=None, *, dtype=np.uint8, misalign=0):
        """Pages of any dtype and any bits."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape)) * dtype.itemsize
        content = self.rng.integers(0, 256, count, dtype=np.uint8).view(dtype).reshape(shape)
        return self.place(content, "", cut, misalign=misalign, name="cache")

    def indices(self, values, dtype="int64", step=1):
        return self.slots(values, dtype, step)

    def copy(self, cache, src, dst, *, stream=None):
        """Check one `kv.copy_pages`; `cache` is an argument or a tuple of them."""
        src, dst = (a if isinstance(a, Arg) else self.indices(a) for a in (src, dst))
        several = isinstance(cache, tuple)
        arrays = tuple(a.array for a in cache) if several else cache.array
        if stream is not None:
            self.device.synchronize()
        kv.copy_pages(arrays, src.array, dst.array, stream=stream)
        if stream is not None:
            stream.synchronize()
        views = tuple(bytes_of(a.view) for a in (cache if several else (cache,)))
        faults = reference.copy_pages(views, src.view, dst.view)
        self.finish(faults, len(views))

    def finish(self, faults, num_arrays=1):
        by_side = dict(zip(("src_pages", "dst_pages"), faults, strict=True))
        check_faults(self.device, "copy_pages", by_side, repeats=num_arrays)
        for buffer in self.buffers:
            buffer.check()


def bytes_of(view):
    """The same elements as unsigned integers, so that NaN is copied like anything else."""
    return view.view(f"u{view.dtype.itemsize}") if view.dtype.itemsize <= 8 else view


def poisoned_table(rng, lengths, page_size, *, spare=2):
    """Distinct pages for each sequence, and poison past its last one."""
    used = [-(-int(n) // page_size) for n in lengths]
    pages = rng.permutation(sum(used) + 3)
    table = np.full((len(used), max(used, default=0) + spare), POISON_SLOT, np.int64)
    for row, count in zip(table, used, strict=True):
        row[:count], pages = pages[:count], pages[count:]
    return table


class IndexCase(Case):
    """Index arrays between canaries, with calls that check everything."""

    def indices(self, values, dtype="int32", cut=None):
        return self.place(np.asarray(values).astype(INDEX_DTYPE[dtype]), dtype, cut)

    def numpy(self, array):
        return np.asarray(self.device.to_numpy(array))

    def slots_of(self, table, seq_lens, append_lens, page_size, *, out=None):
        got = kv.slot_mapping(
            table.array, seq_lens.array, append_lens.array, page_size,
            out=None if out is None else out.array,
        )  # fmt: skip
        want = reference.slot_mapping(table.view, seq_lens.view, append_lens.view, page_size)
        assert got.shape == want.shape
        assert self.numpy(got).dtype == np.int64 and self.numpy(got).tolist() == want.tolist()
        if out is not None:
            out.view[...] = want
        self.check("slot_mapping", [])

    def csr(self, table, seq_lens, page_size):
        got = kv.page_table_csr(table.array, seq_lens.array, page_size)
        want = reference.page_table_csr(table.view, seq_lens.view, page_size)
        assert len(got) == 3
        for name, a, b in zip(("indptr", "indices", "last_page_len"), got, want, strict=True):
            assert self.numpy(a).dtype == np.int32, name
            assert self.numpy(a).tolist() == b.tolist(), name
        self.check("page_table_csr", [])
