"""Move pages between pools: GPU to pinned host memory and back, in any layout."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from .. import observe
from .page_pairs import PagePairs
from .transfer_checks import Request, pages_of, require_geometry, require_pool
from .transfer_way import Way

__all__ = ["PagePairs", "PreparedTransfer", "prepare", "transfer_pages"]

_NAMES = ("src_pool", "dst_pool")

_MAX_WAYS = 256  # of two pools: sets of layers come in any number

# By source and target, which it keeps neither of, and by options, the last used last.
_ways: WeakKeyDictionary[Any, WeakKeyDictionary[Any, dict[Request, Way]]] = WeakKeyDictionary()
_lock = threading.Lock()


def transfer_pages(
    src_pool: Any,
    dst_pool: Any,
    src_pages: Any,
    dst_pages: Any,
    *,
    layers: Any = None,
    method: str = "auto",
    max_blocks: int | None = None,
    convert: bool = False,
    stream: Any = None,
) -> None:
    """Copy pages of one pool onto pages of another: K and V, of all layers or of some.

    Parameters
    ----------
    src_pool, dst_pool : KVPool or MLAPool of one device and geometry, in any layout and placement,
        of any page counts. They may be one pool
    src_pages, dst_pages : int32 or int64 (N,), or lists of ints. A pair with a negative page is
        skipped. Past the end: likewise, and raised by `check_faults`
    layers : which layers; None: all
    method : "kernel" (a launch for each evenly spaced set of layers, which reads and writes pinned
        memory directly), "copy" (contiguous runs by the copy engine), "staged" (relaid in a buffer
        of the device, then copied in long runs), or "auto", which chooses by how many pieces there
        are and how long: as `python -m kvcupy calibrate` found for this device; else, on a GPU,
        kernels for 16 pieces and more of less than 28 KiB, which to the host are relaid first if
        that makes them so long; on the host device kernels
    max_blocks : of the kernels; None: one for every 24 multiprocessors of the device, where bytes
        leave its memory or enter it
    convert : allow pools of different formats. Scales of a quantised pool are dynamic, one a token
        and head, as in `store_kv`; without scales they are 1
    stream : Stream, or a CuPy or torch stream. None: the current one of the library that the page
        lists come from, if they lie on the GPU, else torch's if a pool is made of torch tensors.
        Else the one that is current in CuPy or torch: torch's inside `torch.cuda.stream(s)` and
        `torch.cuda.graph`, CuPy's inside `with s:`. On the host device this thread

    Raises
    ------
    TypeError, ValueError : an argument does not fit; or `stream` is None, and CuPy and torch have
        made different streams current. Nothing was moved
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    A page that is written twice, or read and written, in one call ends up undefined. Stream: in
    order. "copy", "staged" and "auto" read page lists of the host during the call; lists that only
    a GPU holds need "kernel" ("auto" takes it). Capture: legal; a replay reads page lists that
    kernels can reach again. Bytes: K and V once, and the scales.
    Source: SGLang #7313 `transfer_kv_all_layer`, vLLM `swap_blocks`.

    Examples
    --------
    >>> import kvcupy as kv
    >>> on_device = kv.KVPool(8, 16, 2, 4, 64, device="host")
    >>> on_host = kv.KVPool(32, 16, 2, 4, 64, layout="page_first", placement="pinned",
    ...                     device="host")
    >>> kv.transfer_pages(on_device, on_host, [0, 3], [31, 7])
    """
    prepared = prepare(
        src_pool, dst_pool, layers=layers, method=method, max_blocks=max_blocks, convert=convert
    )
    prepared.issue(PagePairs(src_pages, dst_pages), stream)


def prepare(
    src_pool: Any,
    dst_pool: Any,
    *,
    layers: Any = None,
    method: str = "auto",
    max_blocks: int | None = None,
    convert: bool = False,
    names: tuple[str, str] = _NAMES,
) -> PreparedTransfer:
    """Check everything but the pages, for calls that differ in nothing else.

    Parameters
    ----------
    names : what errors call the two pools
    """
    request = Request.of(layers, method, max_blocks, convert)
    require_pool(src_pool, names[0])
    require_pool(dst_pool, names[1])
    with _lock:
        known = _ways.setdefault(src_pool, WeakKeyDictionary()).setdefault(dst_pool, {})
        way = known.pop(request, None)
        if way is not None:
            known[request] = way
    if way is None:
        src, dst = pages_of(src_pool), pages_of(dst_pool)
        devices = src_pool.device, dst_pool.device
        require_geometry(src, dst, request, devices, names)
        way = Way(src_pool.device, src, dst, request)
        with _lock:
            known[request] = way
            if len(known) > _MAX_WAYS:
                del known[next(iter(known))]
    return PreparedTransfer(src_pool, dst_pool, way)


@dataclass(frozen=True)
class PreparedTransfer:
    """A transfer that lacks only its pages. Keeps its pools alive."""

    src_pool: Any
    dst_pool: Any
    way: Way

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one page, in the layers that are moved, as the source stores them."""
        return self.way.page_bytes

    def _library(self, pairs: PagePairs) -> str:
        """Return whose current stream no stream means; empty if the arrays do not say.

        That kvcupy's own pools are CuPy's memory is no choice of the caller's.
        """
        way = self.way
        lists = [v.library for v in pairs.views if v.device == way.device.name]
        parts = [v.library for v in (*way.src.parts, *way.dst.parts) if v.library == "torch"]
        return next(iter((*lists, *parts)), "")

    def issue(self, pairs: PagePairs, stream: Any, *, name: str = "transfer_pages") -> None:
        """Put the transfer of some pages on a stream.

        Parameters
        ----------
        name : under which it is announced to timelines and checkers
        """
        way = self.way
        on = way.device.as_stream(stream, "" if stream is not None else self._library(pairs))
        if pairs.count == 0 or not way.routes:
            return
        pools = self.src_pool, self.dst_pool
        enqueue = way.plan(pairs, on, pools)

        def describe() -> observe.Operation:
            reads = way.accesses(way.source, pools[0], pairs.views[0])
            return observe.Operation(
                name, on, reads, way.accesses(way.target, pools[1], pairs.views[1])
            )

        observe.issue(describe, enqueue)
        self.dst_pool.note_written(way.layers)
