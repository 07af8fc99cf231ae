"""kvcupy.events: vLLM's format, and a subscriber that knows the cache after each step."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from groups_model import MIXES, PAGE, TieredMixture, hashes_of
from hypothesis.stateful import invariant
from line_process import poll
from test_tiered_stateful import StoresMachine, run
from tiered_cases import Blocks, StoreBlocks

import kvcupy as kv
from kvcupy import events as module

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

PATIENCE_MS = 10_000
END = (-1).to_bytes(8, "big", signed=True)
MEDIUM = {"device": "GPU", "host": "CPU"}
A, B, C, D = (10**20 + i for i in range(4))  # 128 bits


# vLLM's classes, for where vLLM is not installed: tests/interop would need all of it.
class Event(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


def number(name):
    return name if isinstance(name, int) else int.from_bytes(name, "big")


class Subscriber:
    """Knows the blocks of a publisher, by group and medium, with their parents and tokens.

    Drops the messages for which `drops` returns True, and asks for them when it sees the gap.
    """

    def __init__(self, publisher, drops=lambda: False):
        self.publisher, self.drops = publisher, drops
        self.groups = defaultdict(lambda: {medium: set() for medium in MEDIUM.values()})
        self.blocks = self.groups[None]
        self.specs = {}
        self.parents, self.tokens = {}, {}
        self.events, self.last, self.num_replays = [], -1, 0
        self.joined, self.patience_ms = False, 300
        context = zmq.Context.instance()
        self.live, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        for socket in (self.live, self.replay):
            socket.setsockopt(zmq.LINGER, 0)
        self.live.connect(publisher.endpoint)
        self.replay.connect(publisher.replay_endpoint)

    def close(self):
        self.live.close()
        self.replay.close()

    def catch_up(self):
        """Receive all that was published."""
        self.publisher.flush(deadline_s=10)
        newest = self.publisher._next - 1
        received = self.last
        while received < newest and self.live.poll(self.patience_ms):
            _, seq, payload = self.live.recv_multipart()
            self.joined = True
            received = int.from_bytes(seq, "big")
            if not self.drops():
                self.receive(received, payload)
        if self.last < newest:
            self.recover()
        return self

    def recover(self):
        self.num_replays += 1
        self.replay.send_multipart([b"", (self.last + 1).to_bytes(8, "big")])
        while True:
            assert self.replay.poll(PATIENCE_MS), "no replay"
            empty, _, seq, payload = self.replay.recv_multipart()
            assert empty == b""
            if seq == END:
                return
            self.apply(int.from_bytes(seq, "big"), payload)

    def receive(self, seq, payload):
        if seq > self.last + 1:
            self.recover()
        if seq > self.last:
            self.apply(seq, payload)

    def apply(self, seq, payload):
        assert seq > self.last
        self.last = seq
        for event in msgspec.msgpack.decode(payload, type=Batch).events:
            self.events.append(event)
            if isinstance(event, AllBlocksCleared):
                for known in self.groups.values():
                    for hashes in known.values():
                        hashes.clear()
                continue
            known = self.groups[event.group_idx][event.medium]
            hashes = list(map(number, event.block_hashes))
            if isinstance(event, BlockRemoved):
                assert known.issuperset(hashes)
                known.difference_update(hashes)
                continue
            assert known.isdisjoint(hashes) and len(set(hashes)) == len(hashes)
            known.update(hashes)
            spec = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
            assert self.specs.setdefault(event.group_idx, spec) == spec
            parent = event.parent_block_hash
            for i, hash in enumerate(hashes):
                before = hashes[i - 1] if i else None if parent is None else number(parent)
                if before is not None:
                    self.parents[hash] = before
                if event.token_ids:
                    start = i * event.block_size
                    self.tokens[hash] = event.token_ids[start : start + event.block_size]

    def longest_prefix(self, hashes, num_groups, page_size):
        """What a router makes of the events: how many blocks the tiers can restore."""
        restorable = range(len(hashes) + 1)
        for group in range(num_groups):
            known = set().union(*self.groups[group].values())
            kind, window = self.specs.get(group, ("full_attention", None))
            needs = 1 if kind == "mamba" else len(hashes)
            if kind == "sliding_window":
                needs = -(-(window - 1) // page_size)
            restorable = [n for n in restorable if known.issuperset(hashes[max(0, n - needs) : n])]
        return max(restorable)

    def assert_knows(self, blocks):
        assert self.blocks == known_to(blocks)


def known_to(blocks):
    return dict(zip(MEDIUM.values(), blocks.blocks(), strict=True))


@pytest.fixture
def publisher():
    with kv.events.Publisher("tcp://127.0.0.1:0") as publisher:
        yield publisher


@pytest.fixture
def subscriber(publisher):
    subscriber = Subscriber(publisher)
    yield subscriber
    subscriber.close()


@pytest.fixture
def blocks(device, publisher):
    blocks = Blocks(device, 4, 4)
    publisher.follow(blocks.cache)
    return blocks


def stored(subscriber, medium="GPU"):
    found = [e for e in subscriber.events if isinstance(e, BlockStored) and e.medium == medium]
    subscriber.events.clear()
    return found


def test_a_chain_is_one_event_with_parent_and_tokens(blocks, subscriber):
    size = blocks.device_pool.page_size
    hashes = kv.block_hashes(range(3 * size), size)
    pages = blocks.device_pool.allocator.alloc(2)
    blocks.cache.insert(
        hashes[1:], pages, parent=hashes[0], token_ids=range(size, 3 * size), after=False
    )
    for medium in ("GPU", "CPU"):
        subscriber.catch_up()
        (event,) = [e for e in subscriber.events if e.medium == medium]
        assert event.block_hashes == [hash.to_bytes(16, "big") for hash in hashes[1:]]
        assert event.parent_block_hash == hashes[0].to_bytes(16, "big")
        assert event.token_ids == list(range(size, 3 * size))
        assert event.block_size == size
        assert (event.lora_id, event.lora_name) == (None, None)
    subscriber.events.clear()
    blocks.evict_all()
    blocks.cache.acquire(hashes[1:], after=False).release()
    (event,) = stored(subscriber.catch_up())  # host memory has kept the blocks
    assert event.parent_block_hash == hashes[0].to_bytes(16, "big")
    assert event.token_ids == list(range(size, 3 * size))


def test_clear_is_one_event(blocks, subscriber):
    blocks.insert([A, B])
    blocks.cache.clear()
    assert isinstance(subscriber.catch_up().events[-1], AllBlocksCleared)
    subscriber.events.clear()
    blocks.insert([7, 2**64 - 1])
    assert stored(subscriber.catch_up())[0].block_hashes == [7, 2**64 - 1]  # of 64 bits: ints
    subscriber.assert_knows(blocks)


def test_a_collected_cache_has_no_blocks(blocks, publisher, subscriber):
    blocks.insert([A, B])
    publisher.follow(blocks.cache)
    subscriber.catch_up()
    del blocks.cache, blocks.engine
    deadline = time.monotonic() + 10
    while any(subscriber.blocks.values()) and time.monotonic() < deadline:
        subscriber.catch_up()
    assert not any(subscriber.blocks.values())


def test_a_paged_cache_publishes_its_tiers(device, publisher, subscriber):
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=8, num_pages=8, page_size=4,
        dtype="fp32", device=device,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"^cache: expected a cache with a tiered cache"):
        publisher.follow(cache)
    on_host = kv.KVPool(8, 4, 1, 1, 8, dtype="fp32", device=device, placement="pinned")
    cache.attach(kv.TieredCache(cache.pool, on_host))
    publisher.follow(cache)
    hashes = kv.block_hashes(range(8), 4)
    with pytest.raises(ValueError, match=r"^token_ids: expected 2 blocks of 4, got 7"):
        cache.add_sequence(1, hashes=hashes, token_ids=range(7))
    with pytest.raises(ValueError, match=r"^token_ids: expected None without hashes"):
        cache.add_sequence(1, token_ids=range(8))
    cache.add_sequence(1, hashes=hashes, token_ids=range(8))
    rows = device.zeros((8, 1, 8), "fp32")
    with cache.forward([1], [8]):
        cache.attention(0, rows, rows, rows)
    assert not subscriber.catch_up().events
    cache.fork_sequence(1, 2, at=4)
    cache.remove_sequence(1)
    cache.remove_sequence(2)
    second, first = stored(subscriber.catch_up())
    assert list(map(number, first.block_hashes)) == hashes[:1]
    assert list(map(number, second.block_hashes)) == hashes[1:]
    assert number(second.parent_block_hash) == hashes[0] and first.parent_block_hash is None
    assert first.token_ids + second.token_ids == list(range(8))


def test_blocks_of_a_store_have_parents_and_tokens(device, publisher, subscriber):
    """The process that puts them may publish nothing; the acquire knows the prefix."""
    blocks = StoreBlocks(device)
    size = blocks.device_pool.page_size
    hashes = kv.block_hashes(range(4 * size), size)
    blocks.store.blocks = {hash: blocks.stored(hash) for hash in hashes[:3]}
    publisher.follow(blocks.cache)
    with pytest.raises(ValueError, match=r"^token_ids: expected 4 blocks of"):
        blocks.cache.acquire(hashes, after=False, token_ids=range(3))
    blocks.cache.acquire(hashes, after=False, token_ids=range(4 * size)).release()
    for medium in ("CPU", "GPU"):
        events = [e for e in subscriber.catch_up().events if e.medium == medium]
        assert [number(hash) for e in events for hash in e.block_hashes] == hashes[:3]
        assert [token for e in events for token in e.token_ids] == list(range(3 * size))
        parents = [e.parent_block_hash for e in events]
        assert parents == [None, *(e.block_hashes[-1] for e in events[:-1])]
    assert not publisher._state._tokens.keys() - hashes[:3], "kept of a block that is nowhere"


def test_control_without_a_replay_a_subscriber_does_not_know_the_cache(blocks, publisher):
    drops = iter(())
    subscriber = Subscriber(publisher, lambda: next(drops, False))
    while not subscriber.joined:
        blocks.insert([D])
        blocks.cache.clear()
        subscriber.catch_up()
    drops = iter([True])
    subscriber.recover, subscriber.patience_ms = lambda: None, PATIENCE_MS
    for hash in (A, B):
        blocks.insert([hash])
        subscriber.catch_up()
    assert subscriber.blocks["GPU"] == {B} != blocks.blocks()[0]
    subscriber.close()


def test_a_full_queue_never_stalls_a_cache(device, monkeypatch):
    """Its changes are dropped; a gap, and then all blocks, say so."""
    monkeypatch.setattr(module, "_MAX_QUEUED", 2)
    sending, go_on = threading.Event(), threading.Event()

    class Slow(kv.events.Publisher):
        def _send(self, *arguments):
            sending.set()
            assert go_on.wait(10)
            super()._send(*arguments)

    with Slow("tcp://127.0.0.1:0") as publisher:
        blocks = Blocks(device, 4, 4)
        publisher.follow(blocks.cache)
        blocks.insert([A])
        assert sending.wait(10)
        for hash in (B, C, D):
            blocks.insert([hash])
        blocks.cache.evict(2)
        go_on.set()
        subscriber = Subscriber(publisher)
        subscriber.catch_up().assert_knows(blocks)
        numbers = [number for number, _ in publisher._sent]
        assert sorted(set(range(numbers[-1])) - set(numbers)), "no gap"
        subscriber.close()


def test_a_change_is_dropped_when_the_thread_has_nothing_left_to_do(device):
    """The queue was full, and is empty by the time that the cache notes it."""
    drop = threading.Event()

    class Late(kv.events.Publisher):
        def _put(self, source, change):
            if drop.is_set():
                drop.clear()
                time.sleep(0.2)
                return False
            return super()._put(source, change)

    with Late("tcp://127.0.0.1:0") as publisher:
        blocks = Blocks(device, 4, 4)
        publisher.follow(blocks.cache)
        publisher.flush()
        drop.set()
        blocks.insert([A])
        assert poll(lambda: publisher._next > 0, 5)
        subscriber = Subscriber(publisher)
        subscriber.catch_up().assert_knows(blocks)
        subscriber.close()


def test_a_flush_waits_for_the_blocks_that_replace_dropped_changes(device, monkeypatch):
    """Also if they are queued behind its own mark."""
    monkeypatch.setattr(module, "_MAX_QUEUED", 0)
    blocks = Blocks(device, 4, 4)
    follow, asked = blocks.cache._follow, threading.Event()

    def follow_late(*arguments):
        asked.set()
        assert poll(lambda: publisher._queue, 5)
        follow(*arguments)

    class Slow(kv.events.Publisher):
        def _send(self, *arguments):
            time.sleep(0.2)
            super()._send(*arguments)

    with Slow("tcp://127.0.0.1:0") as publisher:
        publisher.follow(blocks.cache)
        publisher.flush()
        monkeypatch.setattr(blocks.cache, "_follow", follow_late)
        blocks.insert([A])
        assert asked.wait(5)
        publisher.flush(deadline_s=10)
        assert publisher._sent


def test_the_thread_survives_an_error(blocks, publisher, subscriber, monkeypatch):
    send = publisher._send
    monkeypatch.setattr(publisher, "_send", lambda *arguments: 1 / 0)
    blocks.insert([A])
    time.sleep(0.3)
    monkeypatch.setattr(publisher, "_send", send)
    blocks.insert([B])
    subscriber.catch_up().assert_knows(blocks)


@pytest.mark.parametrize(
    ("endpoint", "options", "error", "message"),
    [
        ("tcp://127.0.0.1:0", {"replay": -1}, ValueError, "^replay: "),
        ("tcp://127.0.0.1:0", {"replay": 2**63}, ValueError, "^replay: "),
        ("tcp://127.0.0.1:70000", {}, ValueError, "^endpoint: .* 70000"),  # ZMQ binds another port
        (5557, {}, TypeError, "^endpoint: "),
    ],
)
def test_arguments(endpoint, options, error, message):
    with pytest.raises(error, match=message):
        kv.events.Publisher(endpoint, **options)


def test_without_zmq():
    """`kvcupy.events` is imported without it, and says what is missing."""
    program = (
        "import sys; sys.modules['zmq'] = None\n"
        "import kvcupy as kv\n"
        "try:\n    kv.events.Publisher('tcp://127.0.0.1:0')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("KV events need: pip install"), done.stderr


def test_vllm_decodes_the_messages(blocks, publisher):
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    size = blocks.device_pool.page_size
    pages = blocks.device_pool.allocator.alloc(2)
    blocks.cache.insert([A, B], pages, token_ids=range(2 * size), after=False)
    blocks.cache.evict(2)
    blocks.cache.clear()
    publisher.flush()
    found = [
        event
        for _, payload in publisher._sent
        for event in msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch).events
    ]
    on_gpu, on_cpu = found[:2]
    assert isinstance(on_gpu, kv_events.BlockStored) and on_gpu.medium == kv_events.MEDIUM_GPU
    assert isinstance(on_cpu, kv_events.BlockStored) and on_cpu.medium == kv_events.MEDIUM_CPU
    assert on_gpu.token_ids == list(range(2 * size))
    removed, cleared = found[2:]
    assert isinstance(removed, kv_events.BlockRemoved)
    assert removed.block_hashes == [hash.to_bytes(16, "big") for hash in (B, A)]
    assert isinstance(cleared, kv_events.AllBlocksCleared)


# --- Any sequence of calls ---


class FollowedMachine(StoresMachine):
    """A subscriber that loses messages knows the tiers after each step."""

    def make(self, *sizes, **pools):
        made = super().make(*sizes, **pools)
        if not hasattr(self, "subscriber"):
            draw = random.Random(f"{len(self.stores)} {sizes}")
            replay = draw.choice([0, 2, 1000])
            self.publisher = kv.events.Publisher("tcp://127.0.0.1:0", replay=replay)
            self.subscriber = Subscriber(self.publisher, lambda: draw.random() < 0.3)
        self.publisher.follow(made.cache)
        return made

    def teardown(self):
        super().teardown()
        if hasattr(self, "subscriber"):
            self.subscriber.close()
            self.publisher.close()

    @invariant()
    def the_subscriber_knows_the_tiers(self):
        poll(lambda: self.subscriber.catch_up().blocks == known_to(self.blocks))  # stores may run
        self.subscriber.assert_knows(self.blocks)


@pytest.mark.parametrize("queued", [100_000, 1])
def test_a_subscriber_knows_the_tiers_after_any_sequence_of_calls(device, monkeypatch, queued):
    monkeypatch.setattr(module, "_MAX_QUEUED", queued)
    run(FollowedMachine, device, 100)


# --- Groups of layers ---


class FollowedMixture(TieredMixture):
    """A subscriber that loses messages knows the tiers of each group, and what they can restore."""

    def __init__(self, groups, device, publisher, drops=lambda: False, **options):
        super().__init__(groups, device, **options)
        publisher.follow(self.cache)
        self.subscriber = Subscriber(publisher, drops)
        self.known_tokens = {}

    def prompt(self, name, tokens, **options):
        hashes = hashes_of(tokens[:-1])
        self.known_tokens |= {h: tokens[PAGE * i :][:PAGE] for i, h in enumerate(hashes)}
        super().prompt(name, tokens, **options)

    def check(self):
        super().check()
        subscriber = self.subscriber.catch_up()
        present = set()
        for group, tiers in enumerate(self.caches):
            expected = {"GPU": set(tiers.device.pages), "CPU": set(tiers.host.pages)}
            assert subscriber.groups[group] == expected
            present |= set().union(*expected.values())
        described = present & subscriber.tokens.keys()  # unless the descriptions were dropped
        assert module._MAX_QUEUED == 1 or described == present
        assert all(subscriber.tokens[h] == self.known_tokens[h] for h in described)
        for hashes in self.chains:
            assert all(subscriber.parents.get(h, p) == p for p, h in pairwise(hashes))
            length = subscriber.longest_prefix(hashes, len(self.caches), PAGE)
            assert length >= (restorable := self.tiers.match(hashes).host)
            if not any(
                blocks.num_first for blocks in self.tiers._prefixes._blocks
            ):  # else the sinks count
                assert length == restorable


@pytest.mark.usefixtures("lenient_host")
@pytest.mark.parametrize(("queued", "replay"), [(100_000, 2), (1, 1000)])
@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix != "windows"])  # one needs no block
def test_a_router_knows_what_groups_can_restore(device, monkeypatch, mix, queued, replay):
    monkeypatch.setattr(module, "_MAX_QUEUED", queued)
    draw = random.Random(f"{mix} {queued}")
    with kv.events.Publisher("tcp://127.0.0.1:0", replay=replay) as publisher:
        mixture = FollowedMixture(
            MIXES[mix], device, publisher, lambda: draw.random() < 0.3, blocks=8, num_tokens=160,
        )  # fmt: skip
        mixture.serve(1, 40)
        assert mixture.subscriber.num_replays
        assert sum(mixture.hits) > 0
        mixture.check_empty()
        mixture.subscriber.catch_up()
        assert not any(any(known.values()) for known in mixture.subscriber.groups.values())
        mixture.subscriber.close()


@pytest.mark.usefixtures("lenient_host")
@pytest.mark.parametrize("mix", MIXES)
def test_parents_of_groups_that_lack_blocks(device, publisher, subscriber, mix):
    """A window has its last blocks, and its sink tokens' first ones, which do not follow them."""
    mixture = TieredMixture(MIXES[mix], device, blocks=40, num_tokens=300)
    tokens = mixture.new(42)
    hashes = hashes_of(tokens)
    mixture.prompt("a", tokens)
    mixture.remove("a")
    mixture.evict_all()
    publisher.follow(mixture.cache)  # which knows no parents before the acquire
    whole = tokens[: len(hashes) * PAGE]
    mixture.tiers.acquire(hashes, token_ids=whole).release()
    subscriber.catch_up()
    assert subscriber.parents.items() <= dict(pairwise(hashes[::-1])).items()
    assert subscriber.parents
    of_hashes = dict(zip(hashes, np.reshape(whole, (-1, PAGE)).tolist(), strict=True))
    assert {h: list(t) for h, t in subscriber.tokens.items()}.items() <= of_hashes.items()
    assert subscriber.tokens
    mixture.check_empty()
