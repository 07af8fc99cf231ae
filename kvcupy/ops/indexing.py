"""Index arrays: slots of appended tokens, page tables in CSR form, duplicates."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .. import devices
from ..arrays import ArrayView, describe, view
from ..checks import require_int
from ..errors import CaptureError
from ..kernels import Specialisation, by_lanes
from . import call, checks
from .call import Operation, Plan
from .launch import Launch, fields_of
from .spec import Argument, Declaration

_TABLE = (
    Argument("block_table", "sequences max_pages", example=((3, 1), (0, 2))),
    Argument("seq_lens", "sequences", example=(6, 3)),
)
_SLOT_MAPPING = Operation(
    "slot_mapping", *_TABLE, Argument("append_lens", "sequences", example=(3, 2)),
    Argument("out", "slots", example=(0,) * 8, output=True, fresh=True, returned=True),
    waits=True,
)  # fmt: skip
_PAGE_TABLE_CSR = Declaration("page_table_csr", *_TABLE, waits=True, num_returned=3)
_FIND_DUPLICATE_SLOTS = Declaration(
    "find_duplicate_slots", Argument("slot_mapping", "tokens", example=(4, 1, 4, -1, -1)),
    waits=True, num_returned=1,
)  # fmt: skip

_PARAMS = np.dtype(
    [
        *fields_of(np.uint64, "block_table seq_lens append_lens out faults"),
        *fields_of(np.int64, "table_row_bytes table_entry_bytes seq_len_bytes"),
        *fields_of(np.int64, "append_len_bytes num_out max_pages"),
        *fields_of(np.int64, "seq_len_operation append_len_operation"),
        *fields_of(np.int32, "num_sequences page_size table_index_bytes"),
        *fields_of(np.int32, "seq_len_index_bytes append_len_index_bytes"),
    ],
    align=True,
)

_KERNELS = by_lanes("indexing.cu", "slot_mapping", _PARAMS, "SlotMappingParams")


def specialisations() -> list[Specialisation]:
    """Return every specialisation that the operations here can ask for."""
    return [kernel.specialise(lanes) for lanes, kernel in _KERNELS.items()]


@_SLOT_MAPPING.public
def slot_mapping(
    block_table: Any,
    seq_lens: Any,
    append_lens: Any,
    page_size: int,
    *,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Return the slots of the tokens that a step appends, sequence by sequence.

    Parameters
    ----------
    block_table : int32 or int64 (B, max_pages), the pages of each sequence. Entries past its end
        are not read
    seq_lens : int32 or int64 (B,), the appended tokens included
    append_lens : int32 or int64 (B,), how many of the last tokens are new
    page_size : slots per page
    out : int64 (T,), written in place; what the step does not need is filled with -1. None:
        allocated, as long as the step needs
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Returns
    -------
    int64 (T,) : `out`, or an allocated array of the table's library

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written

    Notes
    -----
    Faults: a sequence longer than its row of the table (its tokens get -1), a negative length or
    one below the append, a negative append (it appends nothing; without `out` a ValueError), and
    one that does not fit into `out`. Stream: one kernel; without `out` the host waits for
    `append_lens`. Capture: legal with `out`.

    Examples
    --------
    >>> table = np.array([[7, 3], [5, 0]], np.int32)
    >>> slot_mapping(table, np.array([5, 2]), np.array([2, 2]), 4).tolist()
    [31, 12, 20, 21]
    """
    page_size = _page_size(page_size)
    if out is None:
        lengths = view(append_lens, "append_lens")
        checks.indices(lengths, "append_lens")
        numbers = devices.of(lengths, "append_lens").to_numpy(append_lens)
        if len(numbers) and numbers.min() < 0:
            raise ValueError(f"append_lens: expected no negative lengths, got {numbers.min()}")
        table = view(block_table, "block_table")
        table_stream = devices.of(table, "block_table").as_stream(stream, table.library)
        total = sum(numbers.tolist())  # an int of Python, which never overflows
        if total >= 2**59:
            raise ValueError(f"append_lens: expected slots that memory holds, got {total}")
        out = call.zeros(table, (total,), "int64", table_stream)
    arrays = (block_table, seq_lens, append_lens, out)
    return _SLOT_MAPPING.run(arrays, (page_size,), _plan, stream)


@_PAGE_TABLE_CSR.public
def page_table_csr(block_table: Any, seq_lens: Any, page_size: int) -> tuple[Any, Any, Any]:
    """Return a page table in FlashInfer's form: only the pages in use, end to end.

    Parameters
    ----------
    block_table : int32 or int64 (B, max_pages)
    seq_lens : int32 or int64 (B,)
    page_size : slots per page

    Returns
    -------
    indptr : int32 (B + 1,), where each sequence's pages begin
    indices : int32 (indptr[-1],), the pages
    last_page_len : int32 (B,), tokens on the last page, 1 to page_size; 0 for an empty sequence

    Raises
    ------
    TypeError, ValueError : an argument does not fit, or a sequence is longer than its row

    Notes
    -----
    Array code on the current stream of the arrays' library; the host waits for the lengths.
    Capture: illegal.

    Examples
    --------
    >>> table = np.array([[7, 3], [5, 0]], np.int32)
    >>> [a.tolist() for a in page_table_csr(table, np.array([5, 2]), 4)]
    [[0, 2, 3], [7, 3, 5], [1, 2]]
    """
    page_size = _page_size(page_size)
    table, lengths = view(block_table, "block_table"), view(seq_lens, "seq_lens")
    checks.require_same_device({"block_table": table, "seq_lens": lengths})
    _check_table(table, {"seq_lens": lengths})
    checks.require_aligned([("block_table", table), ("seq_lens", lengths)])
    device = devices.of(table, "block_table")
    results: list[Any] = []

    def compute() -> None:
        numbers = device.carrier(lengths)
        xp = sys.modules[type(numbers).__module__.partition(".")[0]]  # numpy or cupy
        numbers = numbers.astype(xp.int64)
        pages = -(-numbers // page_size)
        if len(numbers) and not 0 <= int(numbers.min()) <= int(pages.max()) * page_size:
            raise ValueError(f"seq_lens: expected no negative lengths, got {int(numbers.min())}")
        if len(numbers) and int(pages.max()) > table.shape[1]:
            most = f"at most {table.shape[1]} pages of {page_size}"
            raise ValueError(f"seq_lens: expected {most}, got {int(numbers.max())} tokens")
        indptr = xp.zeros(len(numbers) + 1, xp.int32)
        indptr[1:] = xp.cumsum(pages)
        used = xp.arange(table.shape[1])[None, :] < pages[:, None]
        indices = device.carrier(table)[used].astype(xp.int32)
        last_page_len = (numbers - xp.maximum(pages - 1, 0) * page_size).astype(xp.int32)
        results.extend((indptr, indices, last_page_len))

    stream = device.as_stream(None, table.library)
    if stream.capturing:
        raise CaptureError(f"page_table_csr: {stream.name} is being captured, and the host waits")
    device.run(compute, stream, (block_table, seq_lens))
    indptr, indices, last_page_len = (call.in_library(a, table) for a in results)
    return indptr, indices, last_page_len


@_FIND_DUPLICATE_SLOTS.public
def find_duplicate_slots(slot_mapping: Any) -> np.ndarray[Any, Any]:
    """Return the slots that occur more than once, sorted; negative ones do not count.

    Parameters
    ----------
    slot_mapping : int32 or int64 (T,)

    Returns
    -------
    NumPy array of the same dtype. Which of two rows with the same slot a store keeps is undefined.

    Raises
    ------
    TypeError, ValueError : it is no such array

    Notes
    -----
    Stream: waits for the array. Capture: illegal.

    Examples
    --------
    >>> find_duplicate_slots(np.array([4, 1, 4, -1, -1]))
    array([4])
    """
    v = view(slot_mapping, "slot_mapping")
    checks.indices(v, "slot_mapping")
    slots, counts = np.unique(
        devices.of(v, "slot_mapping").to_numpy(slot_mapping), return_counts=True
    )
    repeated: np.ndarray[Any, Any] = slots[(counts > 1) & (slots >= 0)]
    return repeated


def _page_size(page_size: Any) -> int:
    """Return an argument `page_size` as an int."""
    require_int(page_size, "page_size")
    if not 1 <= page_size < 2**31:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
    return int(page_size)


# --- Plans ----------------------------------------------------------------------------------------


class SlotMappingPlan(Plan):
    """The slots of one step."""

    def __init__(
        self, block_table: ArrayView, seq_lens: ArrayView, append_lens: ArrayView, out: ArrayView,
        page_size: int,
    ) -> None:  # fmt: skip
        super().__init__(_SLOT_MAPPING, devices.get(block_table.device), block_table.library)
        num_out, most = out.shape[0], block_table.shape[1] * page_size
        self.report(append_lens=f"0 to {num_out} in all", seq_lens=f"append_lens to {most}")
        if num_out:
            arrays = block_table, seq_lens, append_lens, out
            self.load(lambda _: [self._launch(*arrays, page_size)], 1)

    def _launch(
        self, block_table: ArrayView, seq_lens: ArrayView, append_lens: ArrayView, out: ArrayView,
        page_size: int,
    ) -> Launch:  # fmt: skip
        num_sequences, max_pages = block_table.shape
        row_bytes, entry_bytes = block_table.strides
        params = {
            "table_row_bytes": row_bytes, "table_entry_bytes": entry_bytes,
            "table_index_bytes": block_table.itemsize, "num_out": out.shape[0],
            "num_sequences": num_sequences, "max_pages": max_pages, "page_size": page_size,
            "seq_len_bytes": seq_lens.strides[0], "seq_len_index_bytes": seq_lens.itemsize,
            "seq_len_operation": self.fault_ids["seq_lens"],
            "append_len_bytes": append_lens.strides[0],
            "append_len_index_bytes": append_lens.itemsize,
            "append_len_operation": self.fault_ids["append_lens"],
        }  # fmt: skip
        pointers = {
            "block_table": block_table, "seq_lens": seq_lens, "append_lens": append_lens,
            "out": out,
        }  # fmt: skip
        lanes = self.device.warp_lanes
        return Launch(
            self.device, _KERNELS[lanes].specialise(lanes), (max(1, num_sequences), 1, 1),
            (lanes, 1, 1), 0, params, pointers, self.operation.names,
        )  # fmt: skip


def _plan(
    alignment: int, page_size: int, *, block_table: ArrayView, seq_lens: ArrayView,
    append_lens: ArrayView, out: ArrayView,
) -> SlotMappingPlan:  # fmt: skip
    _check_table(block_table, {"seq_lens": seq_lens, "append_lens": append_lens})
    checks.require_format(out, "out", "int64")
    checks.indices(out, "out")
    checks.require_contiguous(out, "out")
    checks.require_output(out, "out")
    return SlotMappingPlan(block_table, seq_lens, append_lens, out, page_size)


def _check_table(table: ArrayView, lengths: dict[str, ArrayView]) -> None:
    checks.block_table(table)
    for name, v in lengths.items():
        if checks.indices(v, name) != table.shape[0]:
            raise ValueError(f"{name}: expected ({table.shape[0]},), got {describe(v)}")
