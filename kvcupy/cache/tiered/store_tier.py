"""The shared store below the tiers of a cache: fetches blocks of other processes, puts local ones.

    store --get--> host page (then loaded like any block of the host tier)
    host page --put--> store

One thread per cache calls the store, one call at a time, and never with the lock of the tiers.
Between calls it takes the next job: blocks that an eviction waits for, then blocks that an acquire
waits for, then prefetches and puts in alternation.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from ...config import cache_logger
from ...errors import CacheFull, OrderError, finalize, in_child
from ...ops import checks
from ...waiting import Latch, Waiters
from .changes import Described
from .tiers import Copy, SharedTiers, Tiers

WRITES = ("through", "back", "second_use")

_MAX_CALL_BYTES = 2**25  # per store call of more than one block
_MAX_BLOCKS_PER_CALL = 64
JOIN_TIMEOUT_S = 0.5
_STORE_TIMEOUT_S = 10.0  # for a store that exceeds its deadlines
_FETCHES_PER_PUT = 4  # fetch steps between two puts, if both are queued
_POLL_S, _MAX_POLL_S = 0.001, 0.05  # pauses while saves of queued puts are in flight
_OUTCOMES = ("stored", "known", "full", "failed")
_Answer = TypeVar("_Answer")

# Set by `kvcupy`: opens a shared store by URL for a host pool.
opener: Callable[..., Any] | None = None


class Store(Protocol):
    """Interface of `TieredCache` to a shared store, such as `BlockStore`.

    `put` sends only blocks that the store lacks. An exception counts as no answer. After `get`
    returns or raises, either nothing writes to the pages, or the allocator of the host pool holds
    them back (`PageAllocator._mark_busy`).
    """

    def match(self, hashes: Sequence[int]) -> int: ...  # number of leading blocks in the store
    def put(self, hashes: Sequence[int], pages: Sequence[int]) -> list[str]: ...
    def get(self, hashes: Sequence[int], pages: Sequence[int]) -> list[bool]: ...


@dataclass
class StoreCounts:
    """Counts of blocks, calls, bytes and seconds, listed by `TieredCache.stats`."""

    shared_hits: int = 0
    shared_misses: int = 0
    shared_late: int = 0
    shared_skipped: int = 0
    shared_stored: int = 0
    shared_known: int = 0
    shared_full: int = 0
    shared_failed: int = 0
    shared_dropped: int = 0
    shared_errors: int = 0
    shared_get_bytes: int = 0
    shared_get_s: float = 0.0
    shared_put_bytes: int = 0
    shared_put_s: float = 0.0


class Fetch:
    """Blocks to fetch from the store, in prefix order; one job of the worker."""

    def __init__(self, hashes: list[int], prefix: Described, *, urgent: bool) -> None:
        self.hashes = hashes
        self.prefix = prefix  # must not be evicted for it
        self.keep = frozenset(prefix.hashes)
        self.urgent = urgent  # whether an acquire waits for it
        self.steps: Iterator[None] | None = None  # set when begun


class Arrivals:
    """The missing blocks of an acquire's prefix, held as they arrive.

    Attributes
    ----------
    hashes : hashes that no tier had, in order, without duplicates
    settled : set when all blocks have arrived, or one is known not to arrive
    """

    def __init__(self, hashes: list[int]) -> None:
        self.hashes = hashes
        self.settled = Latch()
        self.held: list[Copy] = []
        self._passed = 0

    def advance(self, store: StoreTier, tiers: Tiers) -> bool:
        """Hold blocks that have arrived; return whether the wait is over."""
        while self._passed < len(self.hashes):
            hash = self.hashes[self._passed]
            copy = tiers.host.find(hash)
            if copy is not None:
                store.hold(tiers, copy)
                self.held.append(copy)
            elif not tiers.readable(hash):
                if hash in store.pending:
                    return False
                break
            self._passed += 1
        self.settled.set()
        return True

    @property
    def num_missing(self) -> int:
        return len(self.hashes) - self._passed


def require_options(write: Any, share: Any) -> None:
    """Check the arguments `shared_write` and `shared_prefetch` of a TieredCache."""
    if not isinstance(write, str) or write not in WRITES:
        raise ValueError(f"shared_write: expected one of {', '.join(WRITES)}, got {write!r}")
    checks.require_number(share, "shared_prefetch")
    if not 0 < share <= 1:
        raise ValueError(f"shared_prefetch: expected more than 0, up to 1, got {share}")


class StoreTier:
    """Queues of puts and fetches of a shared store, and the thread that executes them.

    The lock of the tiers guards all attributes except the constructor's arguments.

    Parameters
    ----------
    store : see `Store`
    pool : the host pool
    write : "through", "back" or "second_use"
    share : maximum fraction of the pool's pages for blocks being fetched
    """

    def __init__(self, store: Any, pool: Any, write: str, share: float) -> None:
        for name in ("match", "put", "get"):
            if not callable(getattr(store, name, None)):
                raise TypeError(f"shared: expected a store with {name}(), got {store!r}")
        own = getattr(store, "pool", None)
        if own is not None and own is not pool:
            raise ValueError("shared: expected a store of host_pool, got one of another pool")
        self.store = store
        self.write = write
        self.counts = StoreCounts()
        self.pending: dict[int, Fetch] = {}  # queued and running fetches, by hash
        self.max_pages = max(1, int(share * pool.num_pages))
        self._pool = pool
        self._block_bytes = pool.page_bytes
        blocks = max(1, _MAX_CALL_BYTES // pool.page_bytes)
        self._piece = min(_MAX_BLOCKS_PER_CALL, blocks, max(1, pool.num_pages // 8))
        self._fetches: list[Fetch] = []
        self._arrivals: list[Arrivals] = []
        self._puts: OrderedDict[int, None] = OrderedDict()  # hashes of the host tier
        self._urgent_puts: list[tuple[list[int], Latch]] = []
        self._used: OrderedDict[int, int] = OrderedDict()  # number of acquires, by hash
        self._held: Counter[int] = Counter()  # number of holds of a fetched block, by page
        self._landing = 0  # pages that a get may write now
        self._putting = 0  # copies that a put may read now
        self._epoch = 0  # incremented when the tiers are emptied
        self._call_began: float | None = None  # start of the worker's store call
        self._num_moves = 0  # completed gets and puts of the worker
        self._lock = threading.Lock()  # of the number of moves and the count of errors
        self._moved = Waiters(self._lock)
        self._num_fetched = 0  # fetch steps since the last put
        self._stopped = False
        self._failing = False  # whether the last call raised
        self._order_error: OrderError | None = None  # of the worker, not raised yet
        # Weak, since the thread and finalizers refer to this object: the failure of a copy has a
        # traceback, whose frames refer to the cache.
        self._attached: weakref.ref[SharedTiers] | None = None
        self._thread: threading.Thread | None = None
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # `put` is safe in finalizers

    def attach(self, owner: Any, shared: SharedTiers) -> None:
        """Serve tiers until they are closed, or `owner` is garbage collected."""
        self._attached = weakref.ref(shared)
        finalize(owner, self.stop)
        _open_stores.add(self)

    @property
    def _shared(self) -> SharedTiers | None:
        """The tiers, while the cache or a running step refers to them; else None."""
        return None if self._attached is None else self._attached()

    # --- Called with the lock of the tiers ---

    def raise_order_error(self) -> None:
        """Raise, once, the OrderError of a call of the store or a step of the worker."""
        error, self._order_error = self._order_error, None
        if error is not None:
            raise OrderError(error.report)

    def stats(self) -> dict[str, float]:
        return {**vars(self.counts), "shared_queued": len(self._puts)}

    def request(self, tiers: Tiers, prefix: Described, *, urgent: bool) -> list[int]:
        """Queue fetches of the blocks that no tier has; return their hashes."""
        missing = [hash for hash in dict.fromkeys(prefix.hashes) if not tiers.readable(hash)]
        fresh = [hash for hash in missing if hash not in self.pending]
        space = 0 if self._stopped else max(0, 4 * self._pool.num_pages - len(self.pending))
        self.counts.shared_skipped += len(fresh[space:])
        if fresh := fresh[:space]:
            fetch = Fetch(fresh, prefix, urgent=urgent)
            self.pending.update(dict.fromkeys(fresh, fetch))
            self._fetches.append(fetch)
            self._work()
        if urgent:
            for hash in missing:
                if (fetch_of := self.pending.get(hash)) is not None:
                    fetch_of.urgent = True
        return missing

    def expect(self, tiers: Tiers, prefix: Described) -> Arrivals | None:
        """Fetch missing blocks, and hold them as they arrive; None if no block is missing."""
        arrivals = Arrivals(self.request(tiers, prefix, urgent=True))
        if not arrivals.hashes:
            return None
        if not arrivals.advance(self, tiers):
            self._arrivals.append(arrivals)
        return arrivals

    def expire(self, arrivals: Arrivals) -> None:
        """Stop waiting. Late blocks count as misses but stay in flight."""
        if arrivals in self._arrivals:
            self._arrivals.remove(arrivals)
            self.note_late(arrivals.hashes[-arrivals.num_missing :])

    def note_late(self, hashes: Sequence[int]) -> None:
        self.counts.shared_late += sum(hash in self.pending for hash in hashes)

    def release(self, tiers: Tiers, arrivals: Arrivals) -> None:
        """Release the holds on blocks that have arrived."""
        for copy in arrivals.held:
            self._held[copy.page] -= 1
            if not self._held[copy.page]:
                del self._held[copy.page]
            tiers.host.release(copy)
        arrivals.held = []

    def hold(self, tiers: Tiers, copy: Copy) -> None:
        """Hold a fetched block for an acquire that waits for more blocks."""
        tiers.host.hold(copy)
        self._held[copy.page] += 1

    def note_saved(self, hashes: Collection[int]) -> None:
        """Queue puts of blocks that are being saved to the host tier, depending on `write`."""
        if self.write == "through":
            self._queue(hashes)
        elif self.write == "second_use":
            self._queue(hash for hash in hashes if self._used.get(hash, 0) > 1)

    def note_acquired(self, tiers: Tiers, hashes: Sequence[int], num_fetched: int) -> None:
        """Count leased blocks, `num_fetched` of them for the first time since a fetch."""
        self.counts.shared_hits += num_fetched
        if self.write != "second_use":
            return
        again = []
        for hash in hashes:
            uses = self._used.pop(hash, 0) + 1
            self._used[hash] = uses
            if uses == 2:
                again.append(hash)
        pages, stored = tiers.host.pages, tiers.host.stored
        self._queue(h for h in again if h in pages and pages[h] not in stored)
        while len(self._used) > 4 * self._pool.num_pages:
            self._used.popitem(last=False)

    def unsent(self, tiers: Tiers, victims: Sequence[Copy], leaving: Collection[int]) -> list[Copy]:
        """Return the host copies that must be put before their eviction."""
        if self.write != "back":
            return []
        device, stored = tiers.device.pages, tiers.host.stored
        return [
            c
            for c in victims
            if c.page not in stored and (c.hash not in device or c.hash in leaving)
        ]

    def put_later(self, copies: Collection[Copy]) -> None:
        self._queue(copy.hash for copy in copies)

    def put_first(self, tiers: Tiers, copies: Sequence[Copy]) -> Callable[[], None]:
        """Queue urgent puts of copies to evict, and of some that are next in eviction order.

        Return a function that waits for them. After the wait, each block is stored or its put has
        failed.
        """
        hashes = {copy.hash: None for copy in copies}
        for copy in tiers.host.choose(self._piece, hashes, settled=True):
            if len(hashes) >= self._piece:
                break
            if self.unsent(tiers, [copy], ()):
                hashes[copy.hash] = None
        over = Latch()
        if self._stopped:
            over.set()
        else:
            self._urgent_puts.append((list(hashes), over))
            self._work()
        return partial(self._wait_for_put, list(hashes), over)

    @property
    def holding(self) -> bool:
        """Whether a store call accesses host pages."""
        return self._landing > 0 or self._putting > 0

    def forget(self) -> None:
        """Drop all queued and running work, when the tiers are emptied."""
        self._epoch += 1
        self.pending, self._fetches = {}, []
        self._puts.clear()
        self._used.clear()
        for _, over in self._urgent_puts:
            over.set()
        self._urgent_puts = []
        for arrivals in self._arrivals:
            arrivals.settled.set()
        self._arrivals = []

    def wake(self) -> None:
        """Wake the worker after a save has ended."""
        if self._puts:
            self._wake_up()

    def _queue(self, hashes: Iterable[int]) -> None:
        for hash in hashes:
            self._puts[hash] = None
            self._puts.move_to_end(hash)
        while len(self._puts) > self._pool.num_pages:
            self._puts.popitem(last=False)
            self.counts.shared_dropped += 1
        if self._puts:
            self._work()

    def _work(self) -> None:
        """Wake the worker, or start it."""
        if self._thread is None and not self._stopped:
            thread = threading.Thread(target=self._run, name="kvcupy shared", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # thread limit of the system: continue without the store
                self.counts.shared_errors += 1
                cache_logger.warning("cannot use the shared store: %s", error)
                self.forget()
                return
            self._thread = thread
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake.empty():  # else a wakeup is pending
            self._wake.put(None)

    # --- Called without the lock ---

    def count_known(self, hashes: Sequence[int]) -> int:
        """Return the number of leading blocks in the store; 0 if the call fails."""
        if not hashes:
            return 0
        known: Any = self._ask(lambda: self.store.match(list(hashes)))
        return known if isinstance(known, int) and 0 <= known <= len(hashes) else 0

    def wait_for_call(self) -> None:
        """Wait until the current store call no longer accesses host pages.

        CacheFull after `_STORE_TIMEOUT_S`.
        """
        number = self._num_moves
        if not self._moved.wait_for(
            lambda: self._num_moves != number or not self.holding, _STORE_TIMEOUT_S
        ):
            raise CacheFull(
                "a call of the shared store holds pages and does not return", "host_pool"
            )

    def drain(self, deadline: float) -> None:
        """Wait until all queued puts are done or dropped, or until the deadline."""
        shared = self._shared
        pause = _POLL_S
        while shared is not None and time.monotonic() < deadline:
            with shared.lock:
                tiers = shared.tiers
                if shared.closed:
                    return
                tiers.settle()
                if not (self._puts or self._urgent_puts or self._putting):
                    return
                number = self._num_moves
            wait_s = min(pause, max(0.0, deadline - time.monotonic()))
            self._moved.wait_for(partial(self._has_moved, number), wait_s)
            pause = min(2 * pause, _MAX_POLL_S)

    def stop(self, join_s: float = 0.0) -> None:
        """Stop the worker after its current store call; wait up to `join_s` for its end."""
        self._stopped = True
        self._wake.put(None)
        thread = self._thread
        if join_s > 0 and thread is not None and thread is not threading.current_thread():
            thread.join(join_s)

    def _has_moved(self, number: int) -> bool:
        return self._num_moves != number

    def _wait_for_put(self, hashes: Sequence[int], over: Latch) -> None:
        began = self._call_began
        stuck = began is not None and time.monotonic() - began > _STORE_TIMEOUT_S
        shared = self._shared
        over.wait(0.0 if stuck else _STORE_TIMEOUT_S)
        if shared is None:
            return
        with shared.lock:
            host = shared.tiers.host
            for hash in hashes:
                page = host.pages.get(hash)
                if page is not None and host.arriving(page) is None:
                    host.stored.setdefault(page, False)

    def _ask(self, call: Callable[[], _Answer]) -> _Answer | None:
        """Call the store; return None if the call raises."""
        try:
            answer = call()
        except Exception as error:
            if isinstance(error, OrderError):
                self._order_error = error
            with self._lock:
                self.counts.shared_errors += 1
            if not self._failing:  # logs only the first of consecutive failures
                kind = type(error).__name__
                cache_logger.warning("the shared store of a cache fails: %s: %s", kind, error)
            self._failing = True
            return None
        self._failing = False
        return answer

    # --- The worker ---

    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._stopped:
            worked = False
            if (shared := self._shared) is None:
                return
            try:
                if (step := self._next(shared)) is not None:
                    worked = True
                    step()
            except OrderError as error:
                self._order_error = error
            except BaseException:  # unexpected: the job is lost, and the worker continues
                cache_logger.exception("the shared store of a cache: a step failed")
            step = shared = None  # drops references to pages and copies
            if worked:
                pause_s = _POLL_S
                continue
            try:
                self._wake.get(timeout=pause_s if self._puts else None)
                pause_s = _POLL_S
            except queue.Empty:  # saves are still in flight
                pause_s = min(2 * pause_s, _MAX_POLL_S)

    def _next(self, shared: SharedTiers) -> Callable[[], None] | None:
        """Return the next job, or None."""
        with shared.lock:
            tiers = shared.tiers
            if shared.closed:
                return None
            tiers.settle()
            if self._urgent_puts:
                hashes, over = self._urgent_puts.pop(0)
                return partial(self._put, self._take_copies(tiers, hashes), over)
            puts_turn = not self._fetches or self._num_fetched >= _FETCHES_PER_PUT
            if puts_turn and (copies := self._take_queued(tiers)):
                self._num_fetched = 0
                return partial(self._put, copies, None)
            if not self._fetches:
                return None
            self._num_fetched += 1
            fetch = next((f for f in self._fetches if f.urgent), self._fetches[0])
            return partial(self._advance, fetch)

    def _take_queued(self, tiers: Tiers) -> list[Copy]:
        """Take the first queued copies whose saves have ended, and hold them."""
        taken: list[Copy] = []
        for hash in list(self._puts):
            copy = tiers.host.find(hash)
            if copy is not None and tiers.host.arriving(copy.page) is not None:
                continue
            del self._puts[hash]
            if copy is None:
                self.counts.shared_dropped += 1
            elif copy.page not in tiers.host.stored:
                taken.append(copy)
                tiers.host.hold(copy)
                if len(taken) == self._piece:
                    break
        self._putting += len(taken)
        return taken

    def _take_copies(self, tiers: Tiers, hashes: Sequence[int]) -> list[Copy]:
        host = tiers.host
        copies = [copy for hash in hashes if (copy := host.find(hash)) is not None]
        taken = [c for c in copies if c.page not in host.stored and host.arriving(c.page) is None]
        for copy in taken:
            host.hold(copy)
        self._putting += len(taken)
        return taken

    def _put(self, copies: list[Copy], over: Latch | None) -> None:
        """Put held copies, and release them."""
        assert self._shared is not None
        outcomes: list[str] = []
        started = time.perf_counter()
        try:
            with self._calling():
                hashes, pages = [c.hash for c in copies], [c.page for c in copies]
                answer = self._ask(lambda: self.store.put(hashes, pages))
                if isinstance(answer, list) and len(answer) == len(copies):
                    outcomes = answer
        finally:
            counts = self.counts
            with self._shared.lock:
                tiers = self._shared.tiers
                for i, copy in enumerate(copies):
                    outcome = outcomes[i] if i < len(outcomes) else "failed"
                    outcome = outcome if outcome in _OUTCOMES else "failed"
                    if tiers.host.has(copy):
                        tiers.host.stored[copy.page] = outcome in ("stored", "known")
                    name = f"shared_{outcome}"
                    setattr(counts, name, getattr(counts, name) + 1)
                    counts.shared_put_bytes += self._block_bytes * (outcome == "stored")
                    tiers.host.release(copy)
                counts.shared_put_s += time.perf_counter() - started
                self._putting -= len(copies)
            if over is not None:
                over.set()
            self._note_moved()

    def _advance(self, fetch: Fetch) -> None:
        """Run the next step of a fetch; drop the fetch after its last step or a failure."""
        assert self._shared is not None
        if fetch.steps is None:
            fetch.steps = self._fetch(fetch)
        over = True
        try:
            over = next(fetch.steps, self) is self
        finally:
            with self._shared.lock:
                tiers = self._shared.tiers
                if over:
                    if fetch in self._fetches:
                        self._fetches.remove(fetch)
                    self._resolve(tiers, fetch, fetch.hashes)

    def _fetch(self, fetch: Fetch) -> Iterator[None]:
        """Look up blocks, and get them piece by piece until one is missing."""
        assert self._shared is not None
        counts = self.counts
        with self._shared.lock:
            tiers = self._shared.tiers
            hashes = [hash for hash in fetch.hashes if not tiers.readable(hash)]
        with self._calling():
            num_known = self.count_known(hashes)
        with self._shared.lock:
            tiers = self._shared.tiers
            counts.shared_misses += len(hashes) - num_known
            self._resolve(tiers, fetch, hashes[num_known:])
        hashes = hashes[:num_known]
        while hashes:
            yield
            started = time.perf_counter()
            take = partial(self._take_piece, hashes, fetch.keep)
            epoch, hashes, pages, unsent = self._shared.attempt(take, opened=False)
            piece = hashes[: len(pages)]
            if unsent:  # put blocks that cannot be evicted before
                self._put(unsent, None)
                continue
            if not piece:
                counts.shared_skipped += len(hashes)
                return
            arrived: list[Any] = []
            try:
                with self._calling():
                    answer = self._ask(lambda: self.store.get(piece, pages))  # noqa: B023
                if isinstance(answer, list) and len(answer) == len(piece):
                    arrived = answer
            finally:
                arrived = arrived or [False] * len(piece)
                with self._shared.lock:
                    tiers = self._shared.tiers
                    self._land(tiers, piece, pages, arrived, epoch, fetch.prefix)
                    self._resolve(tiers, fetch, piece)
                    counts.shared_get_s += time.perf_counter() - started
                self._note_moved()
            if not all(arrived):
                return
            hashes = hashes[len(piece) :]

    def _take_piece(
        self, hashes: list[int], keep: frozenset[int], tiers: Tiers
    ) -> tuple[int, list[int], list[int], list[Copy]]:
        """Take pages for the next blocks to get, or else queued copies to put first.

        Returns the epoch, the hashes that no tier has, the pages, and the copies.
        """
        hashes = [hash for hash in hashes if not tiers.readable(hash)]
        pages = self._take_pages(tiers, hashes[: self._piece], keep)
        unsent = [] if pages or not hashes else self._take_queued(tiers)
        return self._epoch, hashes, pages, unsent

    def _take_pages(self, tiers: Tiers, hashes: Sequence[int], keep: frozenset[int]) -> list[int]:
        """Take host pages for the first of these blocks, evicting others."""
        if self._shared is None or self._shared.closed or not hashes:
            return []
        count = min(len(hashes), self.max_pages - self._landing - len(self._held))
        if count <= 0:
            return []
        plan = tiers.plan_host_eviction(count, keep=keep, wait=False)
        try:
            pages: list[int] = tiers.evict_from_host(plan).tolist()
        except CacheFull:  # another user of the pool took the pages
            return []
        self._landing += len(pages)
        return pages

    def _land(
        self, tiers: Tiers, hashes: list[int], pages: list[int], arrived: list[Any], epoch: int,
        prefix: Described,
    ) -> None:  # fmt: skip
        """Add the blocks that have arrived to the host tier; free the other pages."""
        assert self._shared is not None
        self._landing -= len(pages)
        current = epoch == self._epoch and not self._shared.closed
        new = {}
        unused = []
        for hash, page, whole in zip(hashes, pages, arrived, strict=True):
            if whole is True and current and hash not in tiers.host.pages:
                new[hash] = page
                tiers.host.stored[page] = True
                tiers.host.fetched.add(page)
            else:
                unused.append(page)
            if whole is True:
                self.counts.shared_get_bytes += self._block_bytes
            else:
                self.counts.shared_misses += 1
        tiers.describe(prefix, new)
        tiers.host.use(hashes, new)
        tiers.host.give_back(unused)

    def _resolve(self, tiers: Tiers, fetch: Fetch, hashes: Sequence[int]) -> None:
        """Record that blocks are no longer pending, and advance waiting acquires."""
        for hash in hashes:
            if self.pending.get(hash) is fetch:
                del self.pending[hash]
        self._arrivals = [a for a in self._arrivals if not a.advance(self, tiers)]

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Record the start of the worker's store call."""
        self._call_began = time.monotonic()
        try:
            yield
        finally:
            self._call_began = None

    def _note_moved(self) -> None:
        with self._lock:
            self._num_moves += 1
            self._moved.notify()


_open_stores: weakref.WeakSet[StoreTier] = weakref.WeakSet()
in_child(_open_stores.clear)


@atexit.register
def _stop_at_exit() -> None:
    """Stop the workers before the interpreter unloads their modules."""
    for tier in list(_open_stores):
        tier.stop(join_s=JOIN_TIMEOUT_S)
