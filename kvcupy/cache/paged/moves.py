"""Work on the pages of a paged cache outside of attention, and its order between streams.

Pages are copied, tokens are moved, and sequences go to a tiered cache and come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ... import devices
from ...arrays import ArrayView, bytes_of, describe, reshaped, view_as
from ...devices.protocol import Event, Stream
from ...errors import CacheFull, CaptureError, DeviceError, KvcupyError
from ...ops.page_pairs import PagePairs, upload
from ...ops.pages import copy_pages
from ...ops.store import gather_kv, store_kv
from ..engine import TransferEngine
from ..pages import PageAllocator
from ..pool import Pool, pool_like, positive_int
from ..tiered.cache import TieredCache
from ..tiered.leases import Lease
from .layers import borrow
from .sequences import CachedSequence, Ints, OffloadedPages, Sequences
from .tables import TableRing

_NAMES = ("src", "dst")


# --- Order between streams ---


@dataclass(eq=False, slots=True)
class _Access:
    """The work of a stream on the bytes, up to an event; None: it could not be recorded yet."""

    stream: Stream
    event: Event | None


class AccessOrder:
    """Makes streams of one device that work on the same bytes wait for one another.

        stream A   begin | work | end
        stream B                      begin: wait for A | work | end
        stream C                                                     begin: wait for B | ...

    C need not wait for A: B has ended its access behind A's, and has waited for it.

    Notes
    -----
    Stream: `begin` before the first work on the bytes, `end` behind the last. Streams that begin
    before any of them ends are not ordered. The host does not wait, but for a stream that is the
    calling thread. What is remembered is the accesses that no stream has waited for and then ended
    one of its own, at most one per stream: as many as work at once, however many streams there
    have been. Not for several threads at once.

    Examples
    --------
    >>> import kvcupy as kv
    >>> host, seen = kv.device("host"), []
    >>> order, streams = AccessOrder(), [host.stream() for _ in range(3)]
    >>> for i, stream in enumerate(streams):
    ...     order.begin(stream)
    ...     stream.call(lambda i=i: seen.append(i))
    ...     order.end(stream)
    >>> streams[2].synchronize(), seen, len(order)
    (None, [0, 1, 2], 1)
    """

    def __init__(self) -> None:
        self._ended: dict[Stream, _Access] = {}
        self._waited: dict[Stream, list[_Access]] = {}  # those of _ended that a stream waited for
        self._spare: list[Event] = []

    def __len__(self) -> int:
        """Return how many accesses a new stream would wait for."""
        return len(self._ended)

    def begin(self, stream: Stream) -> None:
        """Make `stream` wait for the accesses of others, unless it has already."""
        if stream.capturing:
            raise CaptureError(
                f"stream: {stream.name} is being captured and cannot wait for work outside"
            )
        waited = self._waited.get(stream, [])
        for access in list(self._ended.values()):
            if access.stream == stream or access in waited:
                continue
            if access.event is None:
                access.event = self._record(access.stream)
            if access.event is None:
                raise CaptureError(
                    f"{access.stream.name} is being captured and cannot be waited for; end its "
                    "capture first"
                )
            stream.wait(access.event)
            waited.append(access)
            self._waited[stream] = waited

    def end(self, stream: Stream) -> None:
        """Record that `stream` may have work on the bytes up to here.

        Nothing is recorded in a captured stream, and a record may fail. The next stream to begin
        then waits for all that this one holds by that time; a failure is raised there.
        """
        access = _Access(stream, None)
        with suppress(KvcupyError):
            access.event = self._record(stream)
        earlier = list(self._waited.get(stream, ()))
        if stream in self._ended:
            earlier.append(self._ended[stream])
        for old in earlier:
            self._forget(old)
        self._ended[stream] = access

    def _record(self, stream: Stream) -> Event | None:
        if stream.capturing:
            return None
        return stream.record(self._spare.pop() if self._spare else None)

    def _forget(self, access: _Access) -> None:
        """Drop an access that is covered by a later one."""
        if self._ended.get(access.stream) is access:
            del self._ended[access.stream]
        if access.event is not None:
            self._spare.append(access.event)  # waits for it are for what was recorded before
            access.event = None
        for stream, waited in list(self._waited.items()):
            if access in waited:
                waited.remove(access)
            if not waited:
                del self._waited[stream]


class PageAccess:
    """Work on the pages of a cache outside its attention: copies, reads, writes.

    The order is that of all streams that work on the pages, those of the ring's steps included.
    """

    def __init__(self, order: AccessOrder, ring: TableRing) -> None:
        self.order = order
        self.copy_stream = ring.copy_stream
        self._ring = ring

    @contextmanager
    def on(self, stream: Stream, *sequences: CachedSequence) -> Iterator[None]:
        """Let `stream` work on the pages, behind all work so far, that of the open step included.

        It waits for the transfers that load pages of `sequences`.
        """
        if self._ring.current is not None:
            for user in self._ring.current.streams:
                if not user.capturing:
                    self.order.end(user)
        uploader = self._ring.uploader
        if stream == self.copy_stream:
            uploader.recover()
        self.order.begin(stream)
        try:
            for load in {id(load): load for s in sequences for load in s.loads}.values():
                load.wait(stream)
            yield
        finally:
            self.order.end(stream)
            if stream == self.copy_stream:
                uploader.record()

    def copy_stream_behind_all(self) -> Stream:
        """Return the copy stream, which waits for all work on the pages so far."""
        with self.on(self.copy_stream):
            return self.copy_stream


class CopiedPages:
    """The `Completion` of copies on the copy stream, for sequences that own the targets.

    `PageAccess` and steps order streams behind them, so that waiting only looks for a failure: one
    that has surfaced already would stop no stream.
    """

    def __init__(self, stream: Stream) -> None:
        self._event = stream.record()

    @property
    def failure(self) -> BaseException | None:
        if (error := self._event.error()) is None:
            return None
        failure = DeviceError(f"pages of the sequence were never copied: {error!r}")
        failure.__cause__ = error
        return failure

    @property
    def succeeded(self) -> bool:
        """Whether they are over, and none has failed."""
        try:
            return self._event.done() and self._event.error() is None
        except DeviceError:  # the GPU has failed
            return False

    def done(self) -> bool:
        return self._event.done()

    def synchronize(self) -> None:
        with suppress(DeviceError):
            self._event.synchronize()

    def wait(self, stream: Any = None) -> None:
        if (failure := self.failure) is not None:
            raise failure from failure.__cause__

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        self.wait(stream)


# --- Within a pool ---


class PageMover:
    """Copies pages, and moves tokens, of every layer of a pool: K, V and their scales.

    `src` and `dst` of both methods are int32 or int64 arrays of the host, or lists of ints, (N,);
    they are read during the call and may be reused at once. Stream: one copy that brings both to
    the device, then kernels, in order. Capture: legal; a graph repeats what was captured.

    Parameters
    ----------
    pool : of layout "layer_first", or one in which slots are evenly spaced within each layer

    Examples
    --------
    >>> import kvcupy as kv
    >>> pool = kv.KVPool(4, 2, 1, 1, 8, dtype="fp32", device="host")
    >>> pool.k(0)[3] = 7
    >>> mover = PageMover(pool)
    >>> mover.copy_pages([3], [0])
    >>> mover.move_slots([1, 7], [2, 1])
    >>> pool.k(0)[:2, :, 0, 0].tolist()
    [[7.0, 7.0], [7.0, 0.0]]
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._pages = (*map(bytes_of, pool.parts), *pool.scale_parts)
        # Wrapped arrays may have heads before slots, or V between the pages of K.
        self._uneven = [
            _halves(tuple(map(_as_numbers, pool.views(layer))))
            for group in pool.groups
            if pool.layout == "layer_first" and not all(map(_is_even, group.parts))
            for layer in group.layers
        ]
        even = [g for g in pool.groups if not self._uneven or all(map(_is_even, g.parts))]
        self._slots = tuple(
            _slots_first(bytes_of(v)) for g in even for v in (*g.parts, *g.scale_parts)
        )
        self._device = devices.get(self._pages[0].device)
        self._library = self._pages[0].library

    def copy_pages(self, src: Any, dst: Any, stream: Any = None) -> None:
        """Copy pages onto other pages, in one launch per array.

        No page may be written twice, or both read and written. Bytes: each copied page is read once
        and written once.
        """
        sources, targets = _pairs(src, dst, self._pool.num_pages, "pages")
        touched = set(sources.tolist())
        for page in targets.tolist():
            if page in touched:
                raise ValueError(f"dst: expected each page once and none of src, got {page} too")
            touched.add(page)
        self._copy(self._pages, [], [(sources, targets)], stream)

    def move_slots(self, src: Any, dst: Any, stream: Any = None) -> None:
        """Copy tokens to other slots, as if one after another in the order of the arguments.

        A slot, `page * page_size + offset`, may occur any number of times on either side.

        Per array as many launches as the longest chain of moves that must wait for one another has;
        one if none of the slots written is read. Bytes: each token is read once and written once;
        twice where slots are spaced unevenly, by way of a buffer and with two launches per layer.
        """
        pairs = _pairs(src, dst, self._pool.num_pages * self._pool.page_size, "slots")
        self._copy(self._slots, self._uneven, _independent(*pairs), stream)

    def _copy(
        self, arrays: tuple[ArrayView, ...], uneven: list[tuple[ArrayView, ArrayView]],
        batches: list[tuple[Ints, Ints]], stream: Any,
    ) -> None:  # fmt: skip
        """Copy rows of the first axis, and slots of uneven layers, batch by batch."""
        stream = self._device.as_stream(stream, self._library)
        sources, targets = (np.concatenate(side) for side in zip(*batches, strict=True))
        if len(sources) == 0:
            return
        uploaded = upload([sources, targets], self._device, stream)
        start = 0
        for batch, _ in batches:
            part = slice(start, start + len(batch))
            if arrays:
                copy_pages(arrays, uploaded[0, part], uploaded[1, part], stream=stream)
            for k, v in uneven:
                key, value = (
                    borrow(self._device, (len(batch), *cache.shape[2:]), cache.format, stream)
                    for cache in (k, v)
                )
                gather_kv(k, v, uploaded[0, part], k_out=key, v_out=value, stream=stream)
                store_kv(key, value, k, v, uploaded[1, part], stream=stream)
            start = part.stop
        self._pool.note_written()


# --- Tiers ---


class Tiers:
    """Moves sequences and their blocks between the pages of a paged cache and a tiered cache."""

    def __init__(
        self, pool: Pool, sequences: Sequences, access: PageAccess, past_pool: Pool | None = None
    ) -> None:
        self.tiered: TieredCache | None = None  # once attached
        self._pool, self._past_pool = pool, past_pool
        self._sequences, self._access = sequences, access
        # Between the pool of old tokens and host memory, once a sequence with some was offloaded.
        self._past_engine: TransferEngine | None = None
        self._num_past_host_pages = 0

    def attach(self, tiers: Any, num_past_host_pages: Any) -> None:
        """Use a tiered cache from now on, and evict its blocks where pages are needed."""
        if not isinstance(tiers, TieredCache):
            raise TypeError(f"tiers: expected a TieredCache, got {tiers!r}")
        if tiers.device_pool is not self._pool:
            raise ValueError("tiers: expected one whose device_pool is the pool of this cache")
        if self.tiered is not None:
            raise ValueError("tiers: expected to be attached once, got a second one")
        if num_past_host_pages is not None:
            count = positive_int(num_past_host_pages, "num_past_host_pages")
            if self._past_pool is None:
                raise ValueError(f"num_past_host_pages: expected None without past, got {count}")
            self._num_past_host_pages = count
        self.tiered = tiers
        # Not a method: in a cycle, all pools would stay until Python looks for those.
        self._sequences.evict = partial(_evict, tiers, self._pool.allocator)

    def require(self, name: str) -> TieredCache:
        """Return the tiered cache; raise if there is none. `name` is the argument that needs it."""
        if self.tiered is None:
            raise ValueError(f"{name}: expected a cache with a tiered cache; call attach first")
        return self.tiered

    def acquire(self, hashes: Sequence[int]) -> Lease:
        """Return a lease of the leading blocks that the tiered cache knows."""
        return self.require("hashes").acquire(hashes, after=self._access.copy_stream_behind_all())

    def offload(self, sequence: CachedSequence) -> None:
        """Save the pages of a sequence to host memory, each as it is, and release them."""
        tiers = self.require("seq")
        if sequence.num_pages == 0:
            return
        pages, past_pages, past_start = self._sequences.split(sequence)
        stream = self._access.copy_stream
        engines = [tiers.engine]
        if len(past_pages):
            engines.append(self._engine_of_past())
        host_pages, past_host_pages = self._take_host_pages(tiers, len(pages), len(past_pages))
        past = None
        try:
            with self._access.on(stream, sequence):
                pass  # the saves wait for what the copy stream waits for
            save = tiers.engine.save(pages, host_pages, after=stream)
            tiers.engine._flush()
            if len(past_pages):
                past_save = engines[1].save(past_pages, past_host_pages, after=stream)
                engines[1]._flush()
                past = OffloadedPages(past_host_pages, past_save, engines[1].host_pool.allocator)
        except BaseException:
            tiers.host_pool.allocator.free(host_pages)
            if len(past_pages):
                engines[1].host_pool.allocator.free(past_host_pages)
            raise
        if len(self._sequences.owned(sequence, sequence.num_pages)) < sequence.num_pages:
            # A sequence that shares a page may soon be its only owner, and write while it is read.
            for engine in engines:
                self._access.order.end(engine.save_stream)
        allocator = tiers.host_pool.allocator
        offloaded = OffloadedPages(host_pages, save, allocator, past, past_start)
        self._sequences.offload(sequence, offloaded)

    def onboard(self, sequence: CachedSequence) -> None:
        """Load the pages of an offloaded sequence; one that is on the device stays as it is."""
        host = sequence.offloaded
        if host is None:
            return
        tiers = self.require("seq")
        host.save.synchronize()
        past = host.past
        if past is not None:
            past.save.synchronize()
        count = 0 if past is None else len(past.pages)
        pages, past_pages = self._sequences.allocate_both(len(host.pages), count)
        combined = self._sequences.combine(pages, past_pages, host.past_start)
        try:
            stream = self._access.copy_stream_behind_all()
            loads = [tiers.engine.load(host.pages, pages, after=stream)]
            tiers.engine._flush()
            if past is not None:
                engine = self._engine_of_past()
                loads.append(engine.load(past.pages, past_pages, after=stream))
                engine._flush()
        except BaseException:
            self._sequences.free(combined)
            raise
        self._sequences.onboard(sequence, combined, loads)
        host.free()

    def _engine_of_past(self) -> TransferEngine:
        """Return the engine between the pool of demoted pages and its host pool, made once."""
        if self._past_engine is None:
            past_pool = self._past_pool
            assert past_pool is not None
            count = self._num_past_host_pages or past_pool.num_pages
            host_pool = pool_like(past_pool, count, dtype=past_pool.dtype)
            self._past_engine = TransferEngine(past_pool, host_pool)
        return self._past_engine

    def _take_host_pages(
        self, tiers: TieredCache, count: int, past_count: int
    ) -> tuple[Ints, Ints]:
        """Take pages in host memory for pages of both formats, all or none."""
        if not past_count:
            taken: Ints = tiers.take_host_pages(count)
            return taken, taken[:0]
        past_allocator = self._engine_of_past().host_pool.allocator
        past_pages = past_allocator.alloc(past_count)
        try:
            return tiers.take_host_pages(count), past_pages
        except BaseException:
            past_allocator.free(past_pages)
            raise

    def publish(self, sequence: CachedSequence) -> set[int]:
        """Give the tiered cache a sequence's own full pages with hashes; return those it took."""
        tiers = self.tiered
        if tiers is None or tiers.closed or sequence.offloaded:
            return set()
        if any(load.failure or not isinstance(load, CopiedPages) for load in sequence.loads):
            return set()
        count = min(len(sequence.hashes), sequence.committed // self._pool.page_size)
        owned = self._sequences.owned(sequence, count)
        owned = owned[sequence.pages[owned] < self._pool.num_pages]  # those that are not demoted
        pages = sequence.pages[owned].tolist()
        if not pages:
            return set()
        hashes = [sequence.hashes[i] for i in owned.tolist()]
        unneeded = tiers.insert(hashes, pages, after=self._access.copy_stream_behind_all())
        return set(pages) - set(unneeded)


def _evict(tiers: TieredCache, allocator: PageAllocator, count: int) -> None:
    """Evict blocks so that `count` pages are free, now or when transfers that touch them end.

    Pages become free at any time, so each number is asked for once.
    """
    missing = count - allocator.num_free
    if missing <= 0:
        return
    try:
        tiers.evict(missing)
    except CacheFull:  # those that transfers still touch are needed too
        tiers.evict(max(0, count - allocator.num_available))


# --- Arguments of copies ---


def _independent(src: Ints, dst: Ints) -> list[tuple[Ints, Ints]]:
    """Sort moves into the fewest batches, in each of which no slot is both read and written.

    A move goes behind those that write what it reads, and behind those that read what it writes;
    of moves of a batch to the same slot the last remains, for nothing reads what the others wrote.

    >>> for s, d in _independent(np.array([5, 6, 9, 7]), np.array([4, 5, 8, 6])):
    ...     print(s, "to", d)
    [5 9] to [4 8]
    [6] to [5]
    [7] to [6]
    """
    read: dict[int, int] = {}  # by slot, the last batch that reads it
    written: dict[int, int] = {}  # and the last that writes it
    batches: list[dict[int, int]] = [{}]  # target: source
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        if source == target:
            continue
        batch = max(written.get(source, -1) + 1, read.get(target, -1) + 1, written.get(target, 0))
        if batch == len(batches):
            batches.append({})
        batches[batch][target] = source
        written[target] = batch
        read[source] = max(batch, read.get(source, 0))
    return [
        (np.array([*moves.values()], np.int64), np.array([*moves], np.int64)) for moves in batches
    ]


def _pairs(src: Any, dst: Any, count: int, what: str) -> list[Ints]:
    """Return both lists as int64 arrays of their own, with numbers from 0 to count - 1."""
    pairs = PagePairs(src, dst, _NAMES)
    sides = []
    for name, numbers, array in zip(_NAMES, (pairs.src, pairs.dst), pairs.views, strict=True):
        if numbers is None:
            raise TypeError(f"{name}: expected an array of the host, got one on {array.device}")
        if ((numbers < 0) | (numbers >= count)).any():
            outside = numbers[(numbers < 0) | (numbers >= count)][0]
            raise ValueError(f"{name}: expected {what} from 0 to {count - 1}, got {outside}")
        sides.append(numbers)
    return sides


def _is_even(part: ArrayView) -> bool:
    """Return whether the slots of (pages, layers, page_size, ...) are evenly spaced."""
    pages, _, page_size, *_ = part.shape
    return 1 in (pages, page_size) or part.strides[0] == page_size * part.strides[2]


def _as_numbers(v: ArrayView) -> ArrayView:
    """Return a view in a format of whole bytes, to be copied as it is."""
    return v if v.scales is None else view_as(bytes_of(v), "int8")


def _halves(views: tuple[ArrayView, ...]) -> tuple[ArrayView, ArrayView]:
    """Return K and V of one layer; of a latent the two halves of its width."""
    if len(views) == 2:
        return views[0], views[1]
    half = views[0].shape[-1] // 2
    if half == 0:
        raise ValueError(f"pool: expected evenly spaced slots, got {describe(views[0])}")
    return views[0][..., :half], views[0][..., half:]


def _slots_first(part: ArrayView) -> ArrayView:
    """View (pages, layers, page_size, heads, width) as (slots, layers, heads, width)."""
    pages, layers, page_size, *row = part.shape
    page_bytes, layer_bytes, slot_bytes, *row_bytes = part.strides
    if page_size == 1:
        slot_bytes = page_bytes
    if not _is_even(part):
        raise ValueError(
            f"pool: expected evenly spaced slots, as in layout layer_first, got {describe(part)} "
            f"with strides of {part.strides} bytes"
        )
    return reshaped(part, (pages * page_size, layers, *row), (slot_bytes, layer_bytes, *row_bytes))
