"""kv.BlockStore: what its calls promise, over every backend, and over failing ones."""

from __future__ import annotations

import os
import random
import sys
import threading
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from block_store_cases import (
    LAYERS,
    SIZE,
    WIDTH,
    Writer,
    block_hashes,
    contents,
    fill,
    holds,
    new_pool,
)
from forks import in_child, refused
from helpers import examples
from mooncake_servers import needs_mooncake
from mooncake_servers import servers_in as mooncakes_in
from redis_server import needs_redis, servers_in

import kvcupy as kv
from kvcupy.cache.identity import BlockKeys
from kvcupy.remote.stores import store as store_module
from kvcupy.remote.stores.backend import BackendLost
from kvcupy.remote.stores.encrypted import SEAL_BYTES, BlockCipher, EncryptedBackend
from kvcupy.remote.stores.store import HEADER_BYTES, BlockStore
from kvcupy.remote.wire import WirePages

HASHES = block_hashes(12)
SECRET = bytes(range(32))
LAYOUTS = ("page_first_direct", "layer_first", "page_first")


class Shelf:
    """A backend in a dictionary, with failures that a test requests."""

    blocks_per_call, num_threads = 3, 1

    def __init__(self):
        self.blocks = {}
        self.calls = []
        self.failures = []  # exceptions of the next calls
        self.before = lambda name: None
        self.unreadable = set()
        self.is_full = False
        self.is_closed = False

    def _call(self, name, count):
        self.calls.append((name, count))
        self.before(name)
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure

    def exists(self, keys, deadline):
        self._call("exists", len(keys))
        return [key in self.blocks for key in keys]

    def put(self, keys, blocks, used_ns, deadline):
        self._call("put", len(keys))
        assert set(keys) <= set(used_ns)
        if not self.is_full:
            self.blocks |= {k: b"".join(block) for k, block in zip(keys, blocks, strict=True)}
        return [("full" if self.is_full else "stored") for _ in keys]

    def get(self, keys, blocks, used_ns, deadline):
        self._call("get", len(keys))
        assert set(keys) <= set(used_ns)
        return [self._fill(key, block) for key, block in zip(keys, blocks, strict=True)]

    def _fill(self, key, block):
        if key in self.unreadable:
            return None
        if (value := self.blocks.get(key)) is None:
            return False
        assert len(value) == sum(map(len, block))
        for piece in block:
            piece[:], value = value[: len(piece)], value[len(piece) :]
        return True

    def discard(self, keys, deadline):
        self._call("discard", len(keys))
        for key in keys:
            self.blocks.pop(key, None)

    def clear(self, deadline):
        self._call("clear", 0)
        self.blocks.clear()

    def close(self):
        self.is_closed = True

    def stats(self):
        return {"shelf": len(self.blocks)}


def over(shelf, *, layout="page_first_direct", num_pages=8, key=None, deadline_s=5.0):
    """Return a Writer over a backend."""
    user = Writer.__new__(Writer)
    user.pool = new_pool(num_pages, layout=layout)
    keys, backend = BlockKeys(user.pool), shelf
    if key is not None:
        backend = EncryptedBackend(shelf, BlockCipher(key, keys.identity.digest()))
    user.backend, user.block_bytes = shelf, user.pool.page_bytes
    user.store = BlockStore(backend, WirePages(user.pool), keys, deadline_s=deadline_s)
    return user


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture(params=["page_first_direct", "layer_first", "encrypted"])
def user(shelf, request):
    """Over pages that the backend accesses directly, copied pages, and encrypted blocks."""
    if request.param == "encrypted":
        return over(shelf, key=SECRET)
    return over(shelf, layout=request.param)


# --- Any sequence of calls, over every backend ---


@contextmanager
def file_store(tmp_path):
    yield f"file:{tmp_path}/blocks"


@contextmanager
def redis_store(tmp_path):
    with servers_in(tmp_path) as start:
        yield start().url


@contextmanager
def mooncake_store(tmp_path):
    with mooncakes_in(tmp_path) as start:
        servers = start()
        servers.add_node(64 << 20)
        yield f"{servers.url}?host=127.0.0.1"


def replace(user, block_hash, change):
    """Change the stored bytes of a block, through the interface of its backend."""
    backend = getattr(user.backend, "_backend", user.backend)
    key, deadline = user.key(block_hash), store_module.time.monotonic() + 60
    is_encrypted = backend is not user.backend
    value = bytearray(HEADER_BYTES + user.block_bytes + SEAL_BYTES * is_encrypted)
    assert backend.get([key], [[memoryview(value)]], {key: 1}, deadline) == [True]
    change(value)
    backend.discard([key], deadline)
    assert backend.put([key], [[memoryview(value)]], {key: 2}, deadline) == ["stored"]


def flip(place):
    def change(value):
        value[place] ^= 1 << place % 8

    return change


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("opened", [
    file_store, pytest.param(redis_store, marks=needs_redis),
    pytest.param(mooncake_store, marks=[needs_mooncake, pytest.mark.full]),
], ids=lambda opened: opened.__name__)  # fmt: skip
def test_any_sequence_of_calls(opened, is_encrypted, tmp_path):
    """Each tenant has a set of blocks, which its users of all layouts see alike."""
    order = random.Random(f"{opened.__name__} {is_encrypted}")
    seen = set()
    with opened(tmp_path) as url:

        def user_of(tenant, layout):
            key = {"encryption_key": SECRET} if is_encrypted else {}
            return Writer(url, tenant=tenant, layout=layout, **key)

        users = {(t, layout): user_of(t, layout) for t in "ab" for layout in LAYOUTS}
        known = {"a": set(), "b": set()}
        for _ in range(examples(150)):
            name = order.choice(list(users))
            user, blocks = users[name], known[name[0]]
            some = order.sample(HASHES, order.randrange(1, 8))
            action = order.choice(["put", "put", "get", "get", "match", "damage", "open", "clear"])
            user.ask_again()
            if action == "put":
                expected = ["known" if h in blocks else "stored" for h in some]
                assert user.put(*some) == expected
                blocks.update(some)
                seen.update(expected)
            elif action == "get":
                assert user.get(*some) == [h in blocks for h in some]
            elif action == "match":
                there = [h in blocks for h in some]
                assert user.store.contains(some) == there
                assert user.store.match(some) == [*there, False].index(False)
            elif action == "damage" and blocks:
                victim = order.choice(sorted(blocks))
                replace(user, victim, flip(order.randrange(HEADER_BYTES + user.block_bytes)))
                user.ask_again()
                assert user.get(victim) == [False], "no wrong byte"
                blocks.remove(victim)
            elif action == "open":
                user.store.close()
                users[name] = user_of(*name)
            elif action == "clear" and order.random() < 0.3:
                user.store.clear()
                blocks.clear()
        for user in users.values():
            user.store.close()
    assert seen == {"stored", "known"}


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_control_without_verification_damaged_bytes_are_served(tmp_path, monkeypatch, is_encrypted):
    with Writer(f"file:{tmp_path}/s", encryption_key=SECRET if is_encrypted else None) as user:
        user.put(HASHES[0])
        replace(user, HASHES[0], flip(HEADER_BYTES + SEAL_BYTES * is_encrypted + 1000))
        monkeypatch.setattr(BlockCipher, "open", opened_without_tag)
        monkeypatch.setattr(BlockStore, "_header", lambda self, key, total: Anything())
        with pytest.raises(AssertionError, match="wrong bytes"):
            user.get(HASHES[0])


class Anything:
    """Equal to every header."""

    def __eq__(self, other):
        return True

    __hash__ = None


def opened_without_tag(cipher, name, seal, parts):
    decryptor = cipher._gcm_of(name, seal[:12], seal[12:]).decryptor()
    for part in parts:
        decryptor.update_into(part, part)
    return True


# --- Which blocks are found ---


def identity_pools():
    yield "another model", {}, {"model": "n"}
    yield "another tenant", {}, {"tenant": "t"}
    yield "other heads", {}, {"heads": (2, 4)}
    yield "more heads in all", {}, {"heads": (0, 4)}
    yield "page_head", {"layout": "page_head"}, {}
    yield "another page size", {"page_size": 2 * SIZE}, {}
    yield "more layers", {"num_layers": LAYERS + 1}, {}
    yield "wider heads", {"head_dim": 2 * WIDTH}, {}
    yield "another format", {"dtype": "bf16"}, {}
    yield "scales", {"dtype": "int8", "head_dim": 2 * WIDTH}, {}


def test_identity_and_tenant_separate_blocks_and_layouts_do_not(tmp_path):
    url = f"file:{tmp_path}/s"
    shape = {
        "page_size": SIZE, "num_layers": LAYERS, "num_kv_heads": 2, "head_dim": WIDTH,
        "dtype": "fp16", "device": "host",
    }  # fmt: skip
    with Writer(url) as user:
        user.put(*HASHES[:3])
        for layout in LAYOUTS:
            with Writer(url, layout=layout) as other:
                assert other.get(*HASHES[:4]) == [True, True, True, False]
        for name, changes, options in identity_pools():
            pool = kv.KVPool(4, **{**shape, "layout": "page_first_direct", **changes})
            with kv.BlockStore.open(url, pool, **options) as stranger:
                assert stranger.match(HASHES) == 0, name
                assert stranger.get(HASHES[:3], [0, 1, 2]) == [False] * 3, name
                assert stranger.put(HASHES[:1], [0]) == ["stored"], name
                stranger.clear()
                assert stranger.match(HASHES) == 0, name
        assert user.get(*HASHES[:3]) == [True] * 3, "another identity's clear leaves these"
        user.store.clear()
        assert user.store.match(HASHES) == 0


def test_equal_hashes_in_one_put_and_hashes_twice_in_one_get(user):
    assert user.put(HASHES[0], HASHES[1], HASHES[0]) == ["stored", "stored", "known"]
    assert user.put(HASHES[0], HASHES[2], HASHES[2]) == ["known", "stored", "known"]
    assert user.get(HASHES[1], HASHES[1]) == [True, True]


def test_calls_are_split_and_ask_only_for_what_is_missing(user, shelf):
    assert user.put() == [] == user.get() and user.store.match([]) == 0
    user.put(*HASHES[:2])
    shelf.calls.clear()
    assert user.put(*HASHES[:8]) == ["known"] * 2 + ["stored"] * 6
    assert shelf.calls == [("exists", 8), ("put", 3), ("put", 3)]
    shelf.calls.clear()
    assert user.get(*HASHES[:8]) == [True] * 8
    assert shelf.calls == [("get", 3), ("get", 3), ("get", 2)]
    shelf.calls.clear()
    assert user.store.match(block_hashes(5000)) == 8
    assert shelf.calls == [("exists", 1024)], "no more after the first that is missing"
    assert sum(user.store.contains(block_hashes(5000))) == 8


# --- Failing backends ---


class Clock:
    """A clock that a test advances."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def perf_counter(self):
        return self.now

    def time_ns(self):
        return int(1e9 * self.now)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(store_module, "time", clock)
    return clock


@pytest.mark.parametrize("error", [
    BackendLost("gone"), OSError("gone"), ConnectionError("gone"), RuntimeError("gone"),
    MemoryError(), KeyError("gone"),
], ids=repr)  # fmt: skip
def test_a_lost_backend_is_an_outcome(user, shelf, error):
    user.put(HASHES[0])
    shelf.failures = [error]
    assert user.store.match(HASHES) == 0
    shelf.failures = [error]
    assert user.get(HASHES[0]) == [False]
    user.ask_again()
    shelf.failures = [error, error]
    assert user.put(*HASHES[:2]) == ["failed"] * 2
    user.ask_again()
    shelf.failures = [BackendLost("gone")]
    with pytest.raises(ConnectionError, match="clear: gone"):
        user.store.clear()
    assert user.get(HASHES[0]) == [True]
    assert user.store.stats()["lost"] == 4
    shelf.is_full = True
    assert user.put(*HASHES[:2]) == ["known", "full"]


def test_after_three_lost_calls_it_is_skipped_for_ten_seconds(user, shelf, clock, caplog):
    user.put(HASHES[0])
    shelf.failures = [BackendLost("gone"), None, *[BackendLost("gone")] * 3]
    user.store.match(HASHES)
    user.store.match(HASHES)  # which succeeds
    for _ in range(3):
        assert user.store.match(HASHES) == 0
    assert "skipping" in caplog.text and "gone" in caplog.text
    shelf.calls.clear()
    assert user.store.match(HASHES) == 0 and user.get(HASHES[0]) == [False]
    assert user.put(*HASHES[:2]) == ["failed"] * 2
    assert not shelf.calls, "a skipped store costs nothing"
    clock.now += 10.1
    assert user.get(HASHES[0]) == [True]
    assert user.store.stats()["skipped"] == 4


def test_late_calls_count_unless_they_were_in_a_hurry(user, shelf, clock):
    user.put(HASHES[0])

    def late(name):
        clock.now += 1.0

    shelf.before = late
    for _ in range(5):
        assert user.store.get(HASHES[:1], [0], deadline_s=0.5) == [True]
        shelf.failures = [BackendLost("late")]
        assert user.store.get(HASHES[:1], [0], deadline_s=0.5) == [False]
        assert user.store.stats()["skipped"] == 0
    user.ask_again()
    shelf.before = lambda name: setattr(clock, "now", clock.now + 6.0)
    for _ in range(3):
        user.store.match(HASHES)
    assert user.store.match(HASHES) == 0 and user.store.stats()["skipped"] == 1
    assert user.store.stats()["slow"] == 3


def test_what_a_call_has_no_time_for_is_a_miss(user, shelf, clock):
    user.put(*HASHES[:8])
    shelf.before = lambda name: setattr(clock, "now", clock.now + 0.4)
    there = user.store.get(HASHES[:8], range(8), deadline_s=0.7)
    assert there == [True] * 6 + [False] * 2
    assert user.store.stats()["late"] == 2
    user.store.deadline_s = 1.0
    outcomes = user.store.put(block_hashes(8, 100), range(8))
    assert outcomes == ["stored"] * 6 + ["failed"] * 2
    user.ask_again()
    assert user.store.match(block_hashes(5000)) == 8


@pytest.mark.parametrize("what", ["unreadable", "damaged"])
def test_blocks_that_failed_are_asked_for_again_later(user, shelf, clock, what):
    user.put(*HASHES[:2])
    key = user.key(HASHES[0])
    if what == "unreadable":
        shelf.unreadable.add(key)
    else:
        value = bytearray(shelf.blocks[key])
        value[1234] ^= 1
        shelf.blocks[key] = bytes(value)
    assert user.get(*HASHES[:2]) == [False, True]
    assert (key in shelf.blocks) == (what == "unreadable"), "what is damaged is dropped"
    shelf.blocks.setdefault(key, bytes(value) if what == "damaged" else b"")
    shelf.calls.clear()
    assert user.store.match(HASHES[:2]) == 0 and user.get(HASHES[0]) == [False]
    assert shelf.calls == [("exists", 2)], "not asked for"
    clock.now += 10.1
    assert user.store.match(HASHES[:2]) == 2
    shelf.blocks.pop(key)
    assert user.get(HASHES[0]) == [False]
    user.get(HASHES[0])
    assert user.put(HASHES[0]) == ["stored"]
    shelf.unreadable.clear()
    assert user.get(HASHES[0]) == [True], "at once, once it was stored again"


def test_the_keys_that_failed_are_bounded(user, shelf, monkeypatch):
    monkeypatch.setattr(store_module, "_NEGATIVE_CACHE_SIZE", 3)
    user.put(*HASHES[:6])
    shelf.unreadable.update(shelf.blocks)
    user.get(*HASHES[:6])
    assert len(user.store._retry_at) == 3


@pytest.mark.parametrize("where", ["header", "block", "seal"])
def test_no_byte_can_change_and_no_block_can_take_anothers_place(shelf, where):
    """Each byte in turn; all of them, each of a group, or a prefix; and whole blocks swapped."""
    user = over(shelf, key=SECRET if where == "seal" else None)
    user.put(*HASHES[:2])
    keys = [user.key(h) for h in HASHES[:2]]
    values = [shelf.blocks[key] for key in keys]
    start, stop = {"header": (0, HEADER_BYTES), "seal": (0, SEAL_BYTES)}.get(
        where, (HEADER_BYTES, HEADER_BYTES + user.block_bytes)
    )
    for place in range(start, stop, 1 if where != "block" else 37):
        changed = bytearray(values[0])
        changed[place] ^= 1 << place % 8
        shelf.blocks[keys[0]] = bytes(changed)
        user.ask_again()
        assert user.get(*HASHES[:2]) == [False, True], f"byte {place}"
        assert keys[0] not in shelf.blocks
    shelf.blocks[keys[0]] = values[1]
    user.ask_again()
    assert user.get(*HASHES[:2]) == [False, True], "a swapped block"


# --- Interrupts, threads, forks ---


class Interrupt(BaseException):
    """As raised by a signal handler."""


def interrupted_at(number, call):
    """Raise at one line of a call, counted in the lines of `MODULES`; return whether it has as
    many lines."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if frame.f_globals.get("__name__") not in MODULES:
            return None
        if event == "line":
            count += 1
            if count == number:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        with suppress(Interrupt):
            call()
    finally:
        sys.settrace(None)
    return count >= number


MODULES = {
    f"kvcupy.remote.stores.{name}" for name in ("store", "file", "encrypted", "redis", "backend")
} | {"kvcupy.cache.threads"}


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_an_interrupt_at_any_line_leaves_whole_blocks_and_a_usable_store(tmp_path, is_encrypted):
    """The store of a small capacity, so that puts evict; another user reads beside it."""
    url, capacity, number = f"file:{tmp_path}/s", 4 * 8192, 1
    key = {"encryption_key": SECRET} if is_encrypted else {}
    with Writer(url, capacity_bytes=capacity, **key) as user, Writer(url, **key) as other:
        user.store._helpers.count = 0
        fill(user.pool, range(4), HASHES[:4])

        def call():
            user.store.put(HASHES[:3], range(3))
            user.store.match(HASHES[:4])
            user.store.get(HASHES[1:3], [4, 5])
            user.store.stats()

        while interrupted_at(number, call):
            for page, block_hash in ((4, HASHES[1]), (5, HASHES[2])):
                if user.store.get([block_hash], [page]) == [True]:
                    assert holds(user.pool, page, block_hash)
            assert other.get(*HASHES[:4])[3] is False
            user.ask_again()
            assert set(user.store.put(HASHES[:3], range(3))) <= {"stored", "known"}, number
            assert user.get(*HASHES[:3]) == [True] * 3, number
            fill(user.pool, range(4), HASHES[:4])
            user.store.clear()
            number += 1 if examples(2) > 1 and not is_encrypted else 3
        assert number > 300
    for left in (tmp_path / "s").rglob("*-*"):
        if not left.stat().st_mode & 0o400:
            os.utime(left, (0, 0))
    with Writer(url, capacity_bytes=capacity, **key) as user:
        assert user.put(HASHES[3]) == ["stored"]
        assert on_disk(tmp_path / "s") <= capacity


def on_disk(folder):
    files = [p for p in folder.rglob("*-*") if p.is_file()]
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in files)


def test_threads_share_a_store(tmp_path):
    wrong = []
    with Writer(f"file:{tmp_path}/s", num_pages=64) as user:

        def work(number):
            pages, mine = range(8 * number, 8 * number + 8), block_hashes(8, 100 * number)
            fill(user.pool, pages, mine)
            for _ in range(20):
                user.store.put(mine, pages)
                there = user.store.get(mine, pages)
                wrong.extend(
                    h for p, h, hit in zip(pages, mine, there, strict=True)
                    if not (hit and holds(user.pool, p, h))
                )  # fmt: skip

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_large_calls_are_shared_with_threads(shelf, monkeypatch):
    """Two chunks are in the backend at once; the caller returns when both have ended."""
    monkeypatch.setattr(store_module, "_MIN_HELPED_BYTES", 1)
    monkeypatch.setattr(Shelf, "num_threads", 2)
    user, both = over(shelf), threading.Barrier(2, timeout=60)
    shelf.before = lambda name: both.wait() if name in ("put", "get") else None
    assert user.put(*HASHES[:6]) == ["stored"] * 6
    assert user.get(*HASHES[:6]) == [True] * 6
    shelf.before = lambda name: None
    user.store.close()
    assert shelf.is_closed


def test_closing_waits_for_a_call_in_flight(user, shelf):
    entered, over_, closed = threading.Event(), threading.Event(), threading.Event()

    def wait(name):
        entered.set()
        assert over_.wait(60)

    shelf.before = wait
    thread = threading.Thread(target=user.store.match, args=(HASHES,))
    thread.start()
    assert entered.wait(60)
    closing = threading.Thread(target=lambda: (user.store.close(), closed.set()))
    closing.start()
    assert not closed.wait(0.05) and not shelf.is_closed
    over_.set()
    thread.join()
    closing.join()
    assert shelf.is_closed
    user.store.close()
    with pytest.raises(kv.KvcupyError, match="closed"):
        user.store.match(HASHES)


def test_a_close_within_a_call_is_finished_by_the_next(user, shelf):
    """As in a signal handler, while a call of the same thread is in the backend."""
    shelf.before = lambda name: user.store.close()
    assert user.store.match(HASHES) == 0
    assert not shelf.is_closed
    user.store.close()
    assert shelf.is_closed


def test_it_belongs_to_its_process(tmp_path):
    url = f"file:{tmp_path}/s"
    with Writer(url) as user:
        user.put(*HASHES[:2])

        def work():
            refused(lambda: user.store.match(HASHES), "BlockStore")
            refused(lambda: user.store.put(HASHES[:1], [0]), "BlockStore")
            user.store.close()
            with Writer(url) as child:
                assert child.get(*HASHES[:3]) == [True, True, False]
                assert child.put(HASHES[2]) == ["stored"]

        in_child(work)
        assert user.get(*HASHES[:3]) == [True] * 3


# --- Arguments ---


OPENINGS = [
    ({"url": 7}, TypeError, "url: expected a str"),
    ({"url": "ftp:x"}, ValueError, "url: expected one that starts with one of file"),
    ({"url": "shm:x"}, ValueError, "url"),
    ({"host_pool": "pool"}, TypeError, "host_pool: expected a KVPool"),
    ({"model": 7}, TypeError, "model"),
    ({"tenant": 7}, TypeError, "tenant"),
    ({"heads": 2}, TypeError, r"heads: expected \(first, total\)"),
    ({"heads": (0, 2.0)}, TypeError, "heads"),
    ({"heads": (1, 2)}, ValueError, "heads: expected the first of 2 heads"),
    ({"deadline_s": "soon"}, TypeError, "deadline_s"),
    ({"deadline_s": -1}, ValueError, "deadline_s"),
    ({"encryption_key": "k" * 32}, TypeError, "encryption_key: expected bytes"),
    ({"encryption_key": len}, TypeError, "encryption_key: expected bytes"),
    ({"encryption_key": bytes(31)}, ValueError, "encryption_key: expected 32 bytes, got 31"),
    ({"capacity_bytes": 2.5}, TypeError, "capacity_bytes"),
    ({"capacity_bytes": 4096}, ValueError, "capacity_bytes: expected at least the 8192 bytes"),
    ({"colour": 1}, TypeError, "colour"),
]


@pytest.mark.parametrize(("changes", "error", "message"), OPENINGS, ids=lambda value: str(value))
def test_arguments_of_open(tmp_path, changes, error, message):
    arguments = {"url": f"file:{tmp_path}/s", "host_pool": new_pool(), **changes}
    with pytest.raises(error, match=message):
        kv.BlockStore.open(**arguments)
    assert not (tmp_path / "s").exists() or "capacity_bytes" in changes


CALLS = [
    ("match", ([2**64 - 1],), ValueError, "128 bits"),
    ("match", (["a"],), TypeError, "hashes"),
    ("put", (HASHES[:2], [0]), ValueError, "pages: expected 2"),
    ("put", (HASHES[:1], [8]), ValueError, "pages: expected 0 to 7, got 8"),
    ("put", (HASHES[:1], [-1]), ValueError, "pages"),
    ("get", (HASHES[:2], [1, 1]), ValueError, "pages: expected each page once"),
    ("get", (HASHES[:1], [0.5]), ValueError, "pages"),
]


@pytest.mark.parametrize(("name", "arguments", "error", "message"), CALLS)
def test_arguments_of_calls(user, shelf, name, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(user.store, name)(*arguments)
    with pytest.raises(ValueError, match="deadline_s"):
        user.store.get(HASHES[:1], [0], deadline_s=float("nan"))
    assert not shelf.calls


# --- Pages, statistics, secrets ---


def test_stats_and_metrics(user, shelf):
    before = {
        outcome: kv.metrics.value("kvcupy_store_blocks_total", call="put", outcome=outcome)
        for outcome in ("stored", "known")
    }
    user.put(*HASHES[:3])
    user.put(*HASHES[:4])
    user.get(*HASHES[:5])
    stats = user.store.stats()
    assert (stats["stored"], stats["known"], stats["hits"], stats["misses"]) == (4, 3, 4, 1)
    assert stats["put_bytes"] == stats["get_bytes"] == 4 * user.block_bytes
    assert stats["shelf"] == 4 and stats["put_s"] > 0 and stats["get_s"] > 0
    for outcome, count in (("stored", 4), ("known", 3)):
        value = kv.metrics.value("kvcupy_store_blocks_total", call="put", outcome=outcome)
        assert value - (before[outcome] or 0) == count


def test_the_order_checker_sees_pages(shelf):
    """A stream writes one that a call reads or writes, too."""
    user = over(shelf)
    page = user.pool.k(0)[0]
    stream, zeros = user.pool.device.stream(), np.zeros_like(page)
    for call in (lambda: user.store.put(HASHES[:1], [0]), lambda: user.store.get(HASHES[:1], [0])):
        with kv.order_checker(action="record") as checker:
            user.pool.device.copy(page, zeros, stream=stream)
            call()
        assert checker.reports
        stream.synchronize()


def test_secrets_are_in_no_text(tmp_path, caplog, capfd):
    secret, tenant = b"0123456789abcdefSECRETSECRETSECR", "a secret tenant"
    url = f"file:{tmp_path}/s"
    with Writer(url, encryption_key=secret, tenant=tenant) as user:
        user.put(*HASHES[:2])
        replace(user, HASHES[0], flip(5))
        assert user.get(*HASHES[:2]) == [False, True]
        texts = [repr(user.store), str(user.store.stats()), caplog.text, *capfd.readouterr()]
        files = [p for p in (tmp_path / "s").rglob("*") if p.is_file()]
        stored = b"".join(p.read_bytes() + str(p).encode() for p in files)
    for text in texts:
        assert "SECRET" not in text and tenant not in text and secret.hex() not in text
    assert secret not in stored and tenant.encode() not in stored
    for block_hash in HASHES[:2]:
        assert contents(block_hash, 64)[:32] not in stored, "the contents are encrypted"


def test_another_key_or_none_finds_nothing(tmp_path):
    url = f"file:{tmp_path}/s"
    users = [Writer(url, encryption_key=key) for key in (SECRET, bytes(32), None)]
    for user in users:
        assert user.store.match(HASHES[:1]) == 0 and user.get(HASHES[0]) == [False]
        assert user.put(HASHES[0]) == ["stored"]
    for user in users:
        assert user.get(HASHES[0]) == [True]
    # Even a block that has been put under the name of another key's.
    mine, other = users[0], users[1]
    end = mine.path(HASHES[0]).read_bytes()[-16:]
    mine.path(HASHES[0]).write_bytes(other.path(HASHES[0]).read_bytes()[:-16] + end)
    assert mine.get(HASHES[0]) == [False]
    assert mine.store.stats()["unauthentic"] == 1 and mine.store.stats()["damaged"] == 0
    for user in users:
        user.store.close()
