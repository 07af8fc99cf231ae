"""Pages moved as contiguous runs, by the copy engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .transfer_rows import Rows

_Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class PageRuns:
    """Pages in order of their targets, neighbours on both sides put together.

    Attributes
    ----------
    src, dst : int64 (runs,), the first pages of each run
    lengths : int64 (runs,), pages
    """

    src: _Numbers
    dst: _Numbers
    lengths: _Numbers


def page_runs(src: _Numbers, dst: _Numbers) -> PageRuns:
    """Return the runs of pairs of pages, all of which exist.

    >>> page_runs(np.array([7, 3, 6]), np.array([2, 9, 1])).lengths
    array([2, 1])
    """
    order = np.argsort(dst, kind="stable")
    src, dst = src[order], dst[order]
    breaks = (np.diff(src) != 1) | (np.diff(dst) != 1)
    starts = np.flatnonzero(np.concatenate([np.ones(min(1, len(src)), bool), breaks]))
    lengths = np.diff(np.append(starts, len(src)))
    return PageRuns(src[starts], dst[starts], lengths)


def expand(rows: Rows, runs: PageRuns) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Return (dst addresses, src addresses, sizes) of every contiguous piece, as uint64."""
    num_parts = len(rows.row_bytes)
    found: list[tuple[_Numbers, _Numbers, _Numbers]] = []
    for part, row_bytes in enumerate(rows.row_bytes):
        src = _addresses(rows, part, runs.src)
        dst = _addresses(rows, num_parts + part, runs.dst)
        if rows.pages_join:
            sizes = np.repeat(runs.lengths * row_bytes, rows.rows_a_page)
        else:
            src, dst = (
                _every_page(first, rows.page_bytes[array], runs.lengths)
                for first, array in ((src, part), (dst, num_parts + part))
            )
            sizes = np.full(src.size, row_bytes)
        found.append((dst.ravel(), src.ravel(), sizes))
    dst, src, sizes = (np.concatenate(one).astype(np.uint64) for one in zip(*found, strict=True))
    return dst, src, sizes


def fragments(rows: Rows, num_pages: int, num_runs: int) -> tuple[int, int]:
    """Return how many pieces a transfer has, and the bytes of one on average."""
    stretches = num_runs if rows.pages_join else num_pages
    pieces = stretches * rows.rows_a_page * len(rows.row_bytes)
    total = num_pages * rows.rows_a_page * sum(rows.row_bytes)
    return pieces, total // max(pieces, 1)


def _addresses(rows: Rows, array: int, pages: _Numbers) -> _Numbers:
    """Return the addresses of all rows of pages, (pages, rows)."""
    offsets = np.zeros(1, np.int64)
    for axis in rows.axes:
        steps = np.arange(axis.count) * axis.strides[array]
        offsets = (offsets[:, None] + steps).ravel()
    return rows.addresses[array] + pages[:, None] * rows.page_bytes[array] + offsets


def _every_page(first: _Numbers, page_bytes: int, lengths: _Numbers) -> _Numbers:
    """Return the rows of all pages of runs, from those of the first page of each."""
    if (lengths == 1).all():
        return first
    within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    pages: _Numbers = np.repeat(first, lengths, axis=0) + within[:, None] * page_bytes
    return pages
