"""KV events: which blocks each tier of a cache has, published for routers in vLLM's format.

A batch is a ZMQ message of three frames: topic, sequence number (8 bytes, big-endian), and the
batch in msgpack, `[timestamp, events]`. An event is a map with the fields of vLLM's class:
BlockStored, BlockRemoved or AllBlocksCleared.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from . import checks
from .cache.paged.cache import PagedKVCache
from .cache.pool import MLAPool
from .cache.tiered.cache import TieredCache
from .cache.tiered.changes import Change, Described, Removed, Replaced, Stored
from .cache.tiered.prefixes import TierGroup
from .checks import seconds_of
from .config import BoundedLog, cache_logger
from .errors import KvcupyError, ProcessLocal
from .extras import install
from .waiting import Latch

if TYPE_CHECKING:
    from .cache.tiered.changes import TokenIds

MEDIA = {"device": "GPU", "host": "CPU"}
"""The medium of each tier, as vLLM names it."""

_MAX_QUEUED = 100_000  # changes that wait for the thread
_MAX_BATCH = 1_000  # changes per batch
_END = (-1).to_bytes(8, "big", signed=True)  # the sequence number that ends a replay
_LINGER_MS = 1_000
_JOIN_TIMEOUT_S = 5.0
_RETRY_DELAY_S = 0.1  # after an error of the thread

Event = dict[str, Any]


class Publisher(ProcessLocal):
    """Publish the blocks of caches as KV events of vLLM.

    Parameters
    ----------
    endpoint : ZMQ address to bind, such as "tcp://*:5557", "tcp://127.0.0.1:0" or "ipc:///tmp/kv"
    replay : number of batches kept for subscribers that missed some

    Attributes
    ----------
    endpoint : as bound, with the number of the port
    replay_endpoint : bound for replays: the next port, or any if the port of `endpoint` is 0;
        without ports, the address followed by ".replay"

    Raises
    ------
    ImportError : pyzmq or msgspec is missing (`kvcupy[events]`)
    TypeError, ValueError : an argument is invalid
    zmq.ZMQError : an address cannot be bound

    Notes
    -----
    Format: of vLLM 0.32. `medium` is "GPU" or "CPU". Hashes below 2**64 are ints, longer ones 16
    bytes, big-endian. Blocks of one BlockStored follow each other. `parent_block_hash` is
    None, and `token_ids` is empty, where they are unknown: parents follow from the order of
    `hashes` in `insert` and `acquire`, and `insert` takes `parent=` and `token_ids=`.

    Groups: of a cache with groups of layers, the events of each carry its number as `group_idx`,
    and BlockStored carries what it needs of a prefix: `kv_cache_spec_kind` is "full_attention",
    "mla_attention", "sliding_window" (with `kv_cache_spec_sliding_window` tokens) or "mamba" (the
    state after a block). A prefix can be restored if every group has what it needs.

    Loss: batches are numbered from 0. A subscriber that sees a gap sends the first missing number
    (8 bytes, big-endian) to `replay_endpoint`, a ROUTER, and gets the batches from there on, ended
    by the number -1. If they are no longer kept, it gets one batch instead with the newest number:
    AllBlocksCleared and all blocks. So does a new subscriber that asks for 0.

    Threads: caches append to a queue; a thread encodes and sends. If the queue is full, its changes
    are dropped, a sequence number is skipped, and the next batch is AllBlocksCleared and all
    blocks. A forked child makes its own publisher. Security: subscribers are not authenticated, and
    read hashes and token ids: bind addresses of a trusted network.

    Source: vllm-project/vllm `vllm/distributed/kv_events.py`.

    Examples
    --------
    >>> import kvcupy as kv
    >>> pools = [kv.KVPool(n, 2, 1, 1, 8, dtype="fp16", device="host") for n in (4, 16)]
    >>> cache = kv.TieredCache(*pools)
    >>> with kv.events.Publisher("tcp://127.0.0.1:0") as publisher:
    ...     publisher.follow(cache)
    ...     hashes = kv.block_hashes(range(4), 2)
    ...     unneeded = cache.insert(hashes, pools[0].allocator.alloc(2), token_ids=range(4))
    ...     publisher.flush()
    """

    def __init__(self, endpoint: str, *, replay: int = 10_000) -> None:
        checks.require_int(replay, "replay")
        if not 0 <= replay < 2**31:
            raise ValueError(f"replay: expected a number of batches, got {replay}")
        if not isinstance(endpoint, str):
            raise TypeError(f"endpoint: expected a string, got {endpoint!r}")
        address, _, port = endpoint.rpartition(":")
        if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > 65535:
            raise ValueError(f"endpoint: expected a port up to 65535, got {port}")  # ZMQ wraps it
        zmq, self._encode = _libraries()
        context = zmq.Context.instance()
        self._sockets = [context.socket(zmq.PUB), context.socket(zmq.ROUTER)]
        self._publications, self._replays = self._sockets
        try:
            for each in self._sockets:
                each.setsockopt(zmq.SNDHWM, 0)  # a replay may be longer than ZMQ's default
                each.setsockopt(zmq.LINGER, _LINGER_MS)
            self._publications.setsockopt(zmq.SNDHWM, 100_000)
            self.endpoint = _bind(zmq, self._publications, endpoint)
            replays = f"{endpoint}.replay"
            if endpoint.startswith("tcp://"):
                bound = int(self.endpoint.rpartition(":")[2])
                replays = f"{address}:{0 if port in ('0', '*') else bound + 1}"
            self.replay_endpoint = _bind(zmq, self._replays, replays)
        except BaseException:
            self._close_sockets()
            raise
        self._state = _State()
        self._sources: list[_Source] = []
        self._queue: deque[tuple[_Source, Change] | Latch] = deque()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=int(replay))
        self._next = 0  # sequence number
        self._log = BoundedLog(cache_logger)
        self._is_woken = self._is_closed = False
        self._woken, waker = os.pipe()
        os.set_blocking(waker, False)
        self._waker = os.fdopen(waker, "wb", buffering=0)
        self._poller = zmq.Poller()
        self._poller.register(self._woken, zmq.POLLIN)
        self._poller.register(self._replays, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kvcupy events", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Publisher at {self.endpoint}, {self._next} batches>"

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def follow(self, cache: TieredCache | PagedKVCache) -> None:
        """Publish the blocks of a cache, and from now on all that enter and leave its tiers.

        Parameters
        ----------
        cache : TieredCache; or PagedKVCache with an attached one, which has the pages of its
            removed sequences. Blocks that two followed caches have in the same tier, and group of
            layers, count once

        Raises
        ------
        TypeError, ValueError : it is not a cache, or a PagedKVCache without a tiered cache
        KvcupyError : the publisher or the cache is closed
        """
        tiered: Any = cache
        if isinstance(cache, PagedKVCache):
            tiered = cache._attached_tiers("cache")
        if not isinstance(tiered, TieredCache):
            raise TypeError(f"cache: expected a TieredCache or PagedKVCache, got {cache!r}")
        if self._is_closed:
            raise KvcupyError("the publisher is closed")
        if any(source.cache() is tiered for source in self._sources):
            return
        has_groups = tiered._prefixes is not None
        for number, group in enumerate(tiered.groups):
            # The device pages of states do not tell how many tokens a block has.
            page_size = tiered.groups[0].pool.page_size
            fields = {"group_idx": number, **_spec_of(group)} if has_groups else {}
            source = _Source(self, tiered, number, page_size, fields)
            tiered._follow(source.note, number)
            self._sources = [s for s in (*self._sources, source) if s.cache() is not None]

    def flush(self, *, deadline_s: float = 30.0) -> None:
        """Wait until all changes so far have been given to ZMQ.

        Raises
        ------
        TypeError, ValueError : `deadline_s` is not a number, or negative
        TimeoutError : some changes are still queued at the deadline
        """
        deadline_s = seconds_of(deadline_s)
        if self._is_closed:
            return
        reached = Latch()
        self._queue.append(reached)
        self._wake()
        if not reached.wait(deadline_s):
            raise TimeoutError(f"events are still queued after {deadline_s:g} s")

    def close(self) -> None:
        """Send the queued changes, stop following, and close the sockets. Idempotent."""
        if self._is_closed:
            return
        for source in self._sources:
            if (cache := source.cache()) is not None:
                cache._unfollow(source.note, source.number)
        self._is_closed = True
        self._wake()
        self._thread.join(_JOIN_TIMEOUT_S)
        self._waker.close()

    # --- Called by caches, with their lock ---

    def _put(self, source: _Source, change: Change) -> bool:
        """Queue a change, unless the queue is full."""
        if len(self._queue) >= _MAX_QUEUED and not isinstance(change, Replaced):
            return False
        self._queue.append((source, change))
        self._wake()
        return True

    def _wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            with suppress(OSError, ValueError):  # closed
                self._waker.write(b"\0")

    # --- The thread ---

    def _run(self) -> None:
        retries = False
        try:
            while not self._is_closed or self._queue:
                if not self._queue and not retries:
                    ready = dict(self._poller.poll())
                    if self._replays in ready:
                        self._answer()
                    if self._woken in ready:
                        os.read(self._woken, 64)
                        self._is_woken = False
                try:
                    retries = False
                    self._publish()
                    for source in list(self._sources):
                        source.catch_up()
                except Exception as error:
                    retries = True
                    self._log.warning("KV events are lost: %s: %s", type(error).__name__, error)
                    for source in self._sources:
                        source.is_behind = source.has_lost = source.cache() is not None
                    time.sleep(_RETRY_DELAY_S)
                if self._queue and self._replays.poll(0):
                    self._answer()
        finally:
            self._close_sockets()
            os.close(self._woken)

    def _publish(self) -> None:
        """Send the queued changes, as one batch."""
        events: list[Event] = []
        reached: Latch | None = None
        for _ in range(min(len(self._queue), _MAX_BATCH)):
            item = self._queue.popleft()
            if isinstance(item, Latch):
                for source in self._sources:
                    source.catch_up()
                queued = [i[1] for i in tuple(self._queue) if not isinstance(i, Latch)]
                if any([isinstance(change, Replaced) for change in queued]):  # of dropped changes
                    self._queue.append(item)
                    continue
                reached = item
                break
            source, change = item
            if isinstance(change, Replaced) and source.has_lost:
                source.has_lost = False
                self._next += 1  # subscribers notice
            events += self._state.apply(source, change)
        if events:
            payload = self._batch(events)
            self._send(self._publications, [], self._next, payload)
            self._sent.append((self._next, payload))
            self._next += 1
        if reached is not None:
            reached.set()

    def _batch(self, events: list[Event]) -> bytes:
        payload: bytes = self._encode([time.time(), events])
        return payload

    def _send(self, socket: Any, frames: list[bytes], number: int, payload: bytes) -> None:
        socket.send_multipart([*frames, b"", number.to_bytes(8, "big"), payload])

    def _answer(self) -> None:
        """Send the batches that a subscriber asks for, or all blocks."""
        client, *request = self._replays.recv_multipart()
        if len(request) != 2 or len(request[1]) != 8:
            self._log.warning("an invalid request for a replay: %s", request)
            return
        first, frames = int.from_bytes(request[1], "big"), [client, b""]
        if first < self._next and (not self._sent or first < self._sent[0][0]):
            payload = self._batch(self._state.everything())
            self._send(self._replays, frames, self._next - 1, payload)
        else:
            for number, payload in self._sent:
                if number >= first:
                    self._send(self._replays, frames, number, payload)
        self._replays.send_multipart([client, b"", b"", _END, b""])

    def _close_sockets(self) -> None:
        for each in self._sockets:
            each.close()


class _Source:
    """A followed cache, or a group of layers of one, and the blocks that were published of it."""

    def __init__(
        self, publisher: Publisher, cache: TieredCache, number: int, page_size: int, fields: Event
    ) -> None:
        self._publisher = publisher
        self.number, self.page_size, self.fields = number, page_size, fields
        self.group: int | None = fields.get("group_idx")
        self.blocks: dict[str, dict[int, None]] = {tier: {} for tier in MEDIA}
        self.is_behind = False  # drops changes until the cache announces all of its blocks
        self.has_lost = False  # has dropped some since the last publication of all blocks
        # The publisher does not keep a cache alive.
        self.cache = weakref.ref(cache, lambda _: publisher._put(self, Replaced()))

    def note(self, change: Change) -> None:
        """Queue a change of the cache."""
        if isinstance(change, Replaced):
            self.is_behind = False
        elif self.is_behind:
            return
        if not self._publisher._put(self, change):
            self.is_behind = self.has_lost = True
            self._publisher._wake()  # the queue may have been emptied meanwhile

    def catch_up(self) -> None:
        """Let the cache announce its blocks, if changes were dropped."""
        cache = self.cache() if self.is_behind else None
        if cache is None:
            return
        try:
            cache._follow(self.note, self.number)
        except KvcupyError:  # it is closed
            self.note(Replaced())


class _State:
    """The state of a subscriber that has all batches, with parents and tokens of blocks."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []
        self._parents: dict[int, int] = {}
        self._tokens: dict[int, Sequence[int]] = {}

    def apply(self, source: _Source, change: Change) -> Iterator[Event]:
        """Apply a change; yield its events."""
        if source not in self._sources:
            self._sources.append(source)
        if isinstance(change, Described):
            self._describe(change.hashes, change.parents, change.token_ids)
        elif isinstance(change, Stored):
            yield from self._store(source, change.tier, change.hashes)
        elif isinstance(change, Removed):
            yield from self._remove(source, change.tier, change.hashes)
        else:
            if len(self._sources) == 1 and any(source.blocks.values()):
                yield {"type": "AllBlocksCleared"}
                source.blocks = {tier: {} for tier in MEDIA}
            for tier, known in source.blocks.items():
                yield from self._remove(source, tier, list(known))
            for tier, hashes in change.blocks.items():
                yield from self._store(source, tier, hashes)
            present = set().union(*(b for s in self._sources for b in s.blocks.values()))
            for details in (self._parents, self._tokens):
                for hash in details.keys() - present:
                    del details[hash]
            if source.cache() is None:
                self._sources.remove(source)

    def everything(self) -> list[Event]:
        """Return the events for a subscriber that has none: all blocks."""
        events: list[Event] = [{"type": "AllBlocksCleared"}]
        for i, source in enumerate(self._sources):
            for tier, known in source.blocks.items():
                others = [o for o in self._sources[:i] if o.group == source.group]
                hashes = [h for h in known if not any(h in o.blocks[tier] for o in others)]
                events += self._stored_events(source, tier, hashes)
        return events

    def _describe(
        self, hashes: Sequence[int], parents: Sequence[int], token_ids: TokenIds | None
    ) -> None:
        for i, (hash, parent) in enumerate(zip(hashes, parents, strict=True)):
            if parent and parent != hash:
                self._parents.setdefault(hash, parent)
            if token_ids is not None:
                self._tokens.setdefault(hash, token_ids[i])

    def _store(self, source: _Source, tier: str, hashes: Sequence[int]) -> Iterator[Event]:
        known = source.blocks[tier]
        new = [h for h in hashes if h not in known and not self._has(tier, h, source.group)]
        known.update(dict.fromkeys(hashes))
        yield from self._stored_events(source, tier, new)

    def _remove(self, source: _Source, tier: str, hashes: Sequence[int]) -> Iterator[Event]:
        for hash in hashes:
            source.blocks[tier].pop(hash, None)
        gone = [hash for hash in hashes if not self._has(tier, hash, source.group)]
        if gone:
            names = list(map(_name, gone))
            group = {} if source.group is None else {"group_idx": source.group}
            yield {"type": "BlockRemoved", "block_hashes": names, "medium": MEDIA[tier], **group}
        for hash in gone:
            if not any(hash in known for s in self._sources for known in s.blocks.values()):
                self._parents.pop(hash, None)
                self._tokens.pop(hash, None)

    def _has(self, tier: str, hash: int, group: int | None) -> bool:
        return any(hash in s.blocks[tier] for s in self._sources if s.group == group)

    def _stored_events(self, source: _Source, tier: str, hashes: Sequence[int]) -> Iterator[Event]:
        for run in self._runs(hashes):
            parent = self._parents.get(run[0])
            yield {
                "type": "BlockStored",
                "block_hashes": list(map(_name, run)),
                "parent_block_hash": None if parent is None else _name(parent),
                "token_ids": [int(t) for hash in run for t in self._tokens.get(hash, ())],
                "block_size": source.page_size,
                "lora_id": None,
                "medium": MEDIA[tier],
                "lora_name": None,
                **source.fields,
            }

    def _runs(self, hashes: Iterable[int]) -> Iterator[list[int]]:
        """Divide blocks into runs of consecutive ones, whose tokens are all known or all not."""
        left = dict.fromkeys(hashes)
        after: dict[int, int] = {}
        for hash in left:
            parent = self._parents.get(hash)
            if parent in left and (hash in self._tokens) == (parent in self._tokens):
                after.setdefault(parent, hash)
        inner = set(after.values())
        firsts = [hash for hash in left if hash not in inner]
        for first in [*firsts, *left]:  # firsts reach all, unless parents are contradictory
            run: list[int] = []
            block: int | None = first
            while block is not None and block in left:
                del left[block]
                run.append(block)
                block = after.get(block)
            if run:
                yield run


def _spec_of(group: TierGroup) -> Event:
    """Return the fields that tell which blocks of a prefix a group needs."""
    kind = "mla_attention" if isinstance(group.pool, MLAPool) else "full_attention"
    if group.window:
        kind = "sliding_window"
    if group.blocks.is_state:
        kind = "mamba"
    window = group.window or None
    return {"kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window}


def _name(hash: int) -> int | bytes:
    return hash if hash < 2**64 else hash.to_bytes(16, "big")


def _libraries() -> tuple[Any, Any]:
    """Return the module zmq, and msgspec's encoder."""
    try:
        import zmq
        from msgspec import msgpack
    except ImportError as error:
        raise ImportError(f"KV events need: {install('events')}") from error
    return zmq, msgpack.Encoder().encode


def _bind(zmq: Any, socket: Any, endpoint: str) -> str:
    socket.bind(endpoint)
    bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound
