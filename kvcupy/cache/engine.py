"""The transfer engine: pages between a pool of the device and one of the host, in the background.

    compute stream   | ... fence |            wait_layer(0)[ layer 0 ] wait_layer(1)[ layer 1 ] ...
    load stream      wait, start | load 0, event | load 1, event | ... | end
    save stream      wait, start | save | end

There is no thread of its own: calls are queued, and enqueued from whichever thread sends them out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import CaptureError
from ..ops import checks, transfer
from ..pickling import ProcessLocal
from .batches import Batch, Lane, Pages
from .transfers import Transfer

if TYPE_CHECKING:
    from ..devices.protocol import Device, Stream
    from .storage import Pool

_POOLS = ("device_pool", "host_pool")
_SIDES = ("device_pages", "host_pages")


class TransferEngine(ProcessLocal):
    """Moves pages between two pools on streams of its own, merged, ordered and layer by layer.

    Parameters
    ----------
    device_pool, host_pool : pools of one device, alike in all but layout, placement and page count
    load_stream, save_stream : Stream, or a CuPy or torch stream; None: one of its own
    method, max_blocks, convert : as for `transfer_pages`

    Attributes
    ----------
    device, device_pool, host_pool, load_stream, save_stream

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Stream: a call is ordered behind what `after` holds when it is made, and calls that touch the
    same pages keep their order. What computes on pages that a transfer writes, or overwrites those
    that it reads, waits by the handle. Pages that two engines share are ordered by `after` alone.
    Calls queued between two flushes go out as one per direction. A load of several calls is in
    place layer by layer for all of them at once.
    Lifetime: pages freed to the pools' allocators in flight come back when they are no longer
    touched. Calls that are still queued when engine and handles go are dropped.
    Threads may share an engine. Capture: refused; a transfer is outside of every capture.
    Source: sgl-project/sglang `python/sglang/srt/managers/cache_controller.py` (an event a layer).

    Examples
    --------
    >>> from kvcupy import KVPool
    >>> pools = [KVPool(4, 2, 3, 1, 8, dtype="fp16", device="host") for _ in range(2)]
    >>> engine = TransferEngine(*pools)
    >>> pools[0].k(2)[1] = 5
    >>> engine.save([1], [3]).synchronize()
    >>> float(pools[1].k(2)[3, 0, 0, 0])
    5.0
    """

    def __init__(
        self,
        device_pool: Pool,
        host_pool: Pool,
        *,
        load_stream: Any = None,
        save_stream: Any = None,
        method: str = "auto",
        max_blocks: int | None = None,
        convert: bool = False,
    ) -> None:
        if device_pool is host_pool:
            raise ValueError("host_pool: expected another pool than device_pool")
        options: Any = {"method": method, "max_blocks": max_blocks, "convert": convert}
        save = transfer.prepare(device_pool, host_pool, names=_POOLS, **options)
        loads = [
            transfer.prepare(host_pool, device_pool, layers=[i], names=_POOLS[::-1], **options)
            for i in range(device_pool.num_layers)
        ]
        self.device: Device = device_pool.device
        self.device_pool = device_pool
        self.host_pool = host_pool
        sizes = (device_pool.num_pages, host_pool.num_pages)
        with _stream_named("load_stream"):
            self._load = Lane(self, "load", load_stream, loads, sizes)
        with _stream_named("save_stream"):
            self._save = Lane(self, "save", save_stream, [save], sizes)
        self._calls = 0
        self._telling = 0
        # Held while work is put on the streams. Reentrant, for freeing memory may call back.
        self._lock = threading.RLock()

    @property
    def load_stream(self) -> Stream:
        return self._load.stream

    @property
    def save_stream(self) -> Stream:
        return self._save.stream

    def save(self, device_pages: Any, host_pages: Any, *, after: Any = None) -> Transfer:
        """Queue a copy of pages of every layer from the device pool to the host pool.

        Parameters
        ----------
        device_pages, host_pages : int32 or int64 (N,) of the host, or lists of ints, copied by the
            call. A pair with a negative page is skipped
        after : the compute stream that has written the pages: Stream, or a CuPy or torch stream;
            None: the one that is current in CuPy or torch, as for `transfer_pages`. What it is
            given after the call does not hold the copy up

        Raises
        ------
        TypeError, ValueError : an argument does not fit, or a page is past the end
        CaptureError : a stream is being captured
        """
        return self._queue(self._save, device_pages, host_pages, after)

    def load(self, host_pages: Any, device_pages: Any, *, after: Any = None) -> Transfer:
        """Queue a copy of pages of every layer from the host pool to the device pool.

        Parameters
        ----------
        host_pages, device_pages : as in `save`
        after : the compute stream that has read the pages, or written them, for the last time

        Raises
        ------
        TypeError, ValueError, CaptureError : as in `save`
        """
        return self._queue(self._load, device_pages, host_pages, after)

    def flush(self) -> None:
        """Send all queued calls out, then raise DeviceError if that failed for some of them."""
        for batch in self.send():
            batch.raise_failure()

    def send(self) -> list[Batch]:
        """Send all queued calls out, and return the batches; their handles tell of failures."""
        with self._lock:
            self._refuse_capture()
            directions = ((self._load, self._save), (self._save, self._load))
            return [lane.send(other) for lane, other in directions if lane.pending is not None]

    def layer_number(self, layer: Any) -> int:
        """Check the number of a layer."""
        checks.require_int(layer, "layer")
        if not 0 <= layer < self.device_pool.num_layers:
            most = self.device_pool.num_layers - 1
            raise ValueError(f"layer: expected 0 to {most}, got {layer}")
        return int(layer)

    def page_bytes(self, kind: str) -> int:
        """Return the bytes of a page of all layers, as its source stores them."""
        return (self._load if kind == "load" else self._save).page_bytes

    @property
    def telling(self) -> bool:
        """Whether an allocator is being told of a call: what it polls then is none of the caller's
        doing, and sends nothing out."""
        return self._telling > 0

    def _queue(self, lane: Lane, device_pages: Any, host_pages: Any, after: Any) -> Transfer:
        pages = self._page_lists(lane.kind, device_pages, host_pages)
        with _stream_named("after"):
            on = self.device.as_stream(after)
        if on.capturing:
            raise CaptureError("after: a transfer cannot be part of a capture")
        with self._lock:
            self._refuse_capture()
            if any(one.conflicts(lane.kind, *pages) for one in (self._load, self._save)):
                self.send()
            batch = None
            if len(pages[0]):
                batch = lane.queue(self._calls + 1, *pages, on.record())
            self._calls += 1
            made = Transfer(self, lane.kind, self._calls, len(pages[0]), batch)
        if batch is not None:
            self._tell(pages, batch)
        return made

    def _page_lists(self, kind: str, device_pages: Any, host_pages: Any) -> tuple[Pages, Pages]:
        """Check and copy the lists of a call; leave the pairs out that are skipped."""
        given, names = (device_pages, host_pages), _SIDES
        if kind == "load":
            given, names = given[::-1], names[::-1]
        pairs = transfer.PagePairs(*given, names)
        lists: dict[str, Pages] = {}
        for name, pages in zip(names, (pairs.src, pairs.dst), strict=True):
            if pages is None:
                raise TypeError(f"{name}: expected a list or an array of the host")
            lists[name] = pages
        device, host = (lists[name] for name in _SIDES)
        if pairs.count and min(device.min(), host.min()) < 0:
            meant = (device >= 0) & (host >= 0)
            device, host = device[meant], host[meant]
        pools = (self.device_pool, self.host_pool)
        for name, pages, pool in zip(_SIDES, (device, host), pools, strict=True):
            if len(pages) and (last := pages.max()) >= pool.num_pages:
                raise ValueError(f"{name}: expected pages below {pool.num_pages}, got {last}")
        return device, host

    def _tell(self, pages: tuple[Pages, Pages], batch: Batch) -> None:
        """Hold pages back, should they be freed. Not with the lock held: allocators have theirs."""
        with self._lock:
            self._telling += 1
        try:
            self.device_pool.allocator.busy(pages[0], batch)
            self.host_pool.allocator.busy(pages[1], batch)
        finally:
            with self._lock:
                self._telling -= 1

    def _refuse_capture(self) -> None:
        for lane in (self._load, self._save):
            if lane.stream.capturing:
                raise CaptureError(f"{lane.kind}_stream: a transfer cannot be part of a capture")


@contextmanager
def _stream_named(name: str) -> Iterator[None]:
    """Let errors of a stream argument call it by its name."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}{str(error).removeprefix('stream')}") from None
