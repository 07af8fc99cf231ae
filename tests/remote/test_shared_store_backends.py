"""kv.SharedStore over a backend that is lost, late, wrong, or still accesses memory."""

from __future__ import annotations

import threading

import pytest
from shared_cases import block_hashes, bytes_of, contents, fill, holds, new_pool

import kvcupy as kv
from kvcupy.cache.encryption import BlockCipher
from kvcupy.cache.identity import BlockKeys
from kvcupy.remote.stores import store as store_module
from kvcupy.remote.stores.backend import MAX_HEADER_BYTES, BackendLost, SummedBlock
from kvcupy.remote.stores.store import SharedStore
from kvcupy.remote.wire import WirePages


class Clock:
    """A clock that a test advances."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def perf_counter(self):
        return self.now


class Shelf:
    """A backend in a dictionary, with failures that a test requests."""

    blocks_per_get = 3
    put_asks_first = False

    def __init__(self, clock):
        self.clock = clock
        self.blocks = {}
        self.calls = []
        self.failures = []  # exceptions of the next calls
        self.takes_s = 0.0
        self.completion = None
        self.closed = 0

    def _call(self, name, keys, deadline):
        self.calls.append((name, len(keys)))
        self.clock.now += self.takes_s
        if self.failures:
            failure = self.failures.pop(0)
            if failure is not None:
                raise failure

    def exists(self, keys, deadline):
        self._call("exists", keys, deadline)
        return [key in self.blocks for key in keys]

    def put(self, keys, blocks, headers, deadline):
        self._call("put", keys, deadline)
        assert len(headers) == len(keys)
        outcomes = []
        for i, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            assert headers[i] == headers[i] and len(headers[i]) <= MAX_HEADER_BYTES
            outcomes.append("known" if key in self.blocks else "stored")
            self.blocks.setdefault(key, (headers[i], b"".join(block)))
        return outcomes

    def get(self, keys, blocks, deadline):
        self._call("get", keys, deadline)
        return [self._fill(key, block) for key, block in zip(keys, blocks, strict=True)]

    def _fill(self, key, block):
        header, payload = self.blocks.get(key, (None, b""))
        for piece in block if header is not None else []:
            piece[: len(payload)] = payload[: len(piece)]
            payload = payload[len(piece) :]
        return header

    def busy(self, keys):
        self.calls.append(("busy", len(keys)))
        return self.completion

    def discard(self, keys, deadline):
        self._call("discard", keys, deadline)
        for key in keys:
            self.blocks.pop(key, None)

    def remove(self, deadline):
        self._call("remove", [], deadline)
        self.blocks.clear()

    def close(self):
        self.closed += 1

    def stats(self):
        return {"shelf": len(self.blocks)}


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(store_module, "time", clock)
    return clock


@pytest.fixture
def shelf(clock):
    return Shelf(clock)


def open_over(shelf, *, layout="page_first_direct", retries=0, num_pages=8, key=None):
    pool = new_pool(num_pages, layout=layout)
    keys = BlockKeys(pool)
    return SharedStore(
        shelf, WirePages(pool), keys, deadline_s=5.0, is_summed=True, retries=retries,
        cipher=None if key is None else BlockCipher(key, keys.identity.digest()),
    )  # fmt: skip


@pytest.fixture(params=["page_first_direct", "layer_first", "encrypted"])
def store(shelf, request):
    """Over pages that the backend accesses directly, copied pages, and encrypted blocks."""
    if request.param == "encrypted":
        return open_over(shelf, key=bytes(range(32)))
    return open_over(shelf, layout=request.param)


HASHES = block_hashes(8)


def put(store, count=4):
    fill(store.pool, range(count), HASHES[:count])
    return store.put(HASHES[:count], range(count))


# --- Calls ---


def test_each_call_asks_for_what_is_needed(store, shelf):
    assert put(store, 2) == ["stored"] * 2
    shelf.calls.clear()
    assert put(store, 4) == ["known", "known", "stored", "stored"]
    assert shelf.calls == [("exists", 4), ("put", 2)]
    shelf.calls.clear()
    assert store.put(HASHES[:4], range(4)) == ["known"] * 4
    assert store.match(HASHES) == 4
    assert shelf.calls == [("exists", 4), ("exists", 8)]
    shelf.calls.clear()
    assert store.get(HASHES, range(8)) == [True] * 4 + [False] * 4
    assert shelf.calls == [("get", 3), ("get", 3), ("busy", 2), ("get", 2), ("busy", 2)]
    assert all(holds(store.pool, page, HASHES[page]) for page in range(4))
    shelf.calls.clear()
    assert store.put([], []) == store.get([], []) == []
    assert store.match([]) == 0
    assert shelf.calls == []


def test_long_prefixes_are_asked_for_until_the_first_that_is_missing(store, shelf):
    hashes = block_hashes(3000)
    fill(store.pool, [0], hashes[:1])
    assert store.match(hashes) == 0
    assert shelf.calls == [("exists", 1024)]
    for key in store._keys.keys(hashes[:2000]):
        shelf.blocks[key] = b"", b""
    shelf.calls.clear()
    assert store.match(hashes) == 2000
    assert shelf.calls == [("exists", 1024), ("exists", 1024)]


# --- Blocks that are not what was stored ---


def damage_header(place):
    def damage(header, payload):
        changed = bytearray(header)
        changed[place] ^= 0x10
        return bytes(changed), payload

    return damage


DAMAGES = {
    **{f"byte {place} of the header": damage_header(place) for place in (0, 4, 5, 8, 16, 24, 40)},
    "an empty header": lambda header, payload: (b"", payload),
    "a long header": lambda header, payload: (header + b"\0", payload),
    "a byte of the block": lambda header, payload: (header, payload[:-1] + b"\xff"),
    "another block": lambda header, payload: (header, contents(5, len(payload))),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_blocks_are_misses_and_dropped(store, shelf, clock, name):
    put(store, 3)
    damaged, *others = store._keys.keys(HASHES[:3])
    shelf.blocks[damaged] = DAMAGES[name](*shelf.blocks[damaged])
    fill(store.pool, range(3), HASHES[3:6])
    assert store.get(HASHES[:3], range(3)) == [False, True, True]
    if not WirePages(store.pool).is_direct:  # it has come to a buffer
        assert holds(store.pool, 0, HASHES[3])
    stats = store.stats()
    unknown = name == "byte 4 of the header" or name == "byte 5 of the header"
    unknown = unknown and store._cipher is None
    assert (stats["damaged"], stats["unverified"]) == ((0, 1) if unknown else (1, 0))
    assert (damaged in shelf.blocks) == unknown, "it may be of a later version"
    assert {*others} <= {*shelf.blocks}
    if not unknown:
        shelf.calls.clear()
        assert store.get(HASHES[:1], [0]) == [False] and store.match(HASHES[:1]) == 0
        assert ("get", 1) not in shelf.calls, "it is not asked for again just now"
        fill(store.pool, [0], HASHES[:1])
        assert store.put(HASHES[:1], [0]) == ["stored"]
        assert store.get(HASHES[:1], [1]) == [True] and holds(store.pool, 1, HASHES[0])


@pytest.mark.parametrize("results", [(), ([None, None],)], ids=["none", "misses"])
def test_blocks_that_could_not_be_fetched_are_asked_for_again_later(store, shelf, clock, results):
    """Such as blocks of a dead node, which the store's index still has."""
    put(store)
    shelf.failures = [BackendLost("gone", *results)]
    assert store.get(HASHES[:2], [0, 1]) == [False, False]
    shelf.calls.clear()
    assert store.get(HASHES[:4], range(4)) == [False, False, True, True]
    assert store.match(HASHES[:4]) == 0 and store.match(HASHES[2:4]) == 2
    assert [call for call in shelf.calls if call[0] == "get"] == [("get", 2)]
    clock.now += 10.1
    assert store.get(HASHES[:4], range(4)) == [True] * 4 and store.match(HASHES[:4]) == 4


def test_blocks_that_were_not_asked_for_are_there_when_the_store_is(store, shelf, clock):
    put(store)
    shelf.failures = [BackendLost("gone")] * 3
    for _ in range(3):
        store.match(HASHES[:1])
    clock.now += 9.9
    assert store.get(HASHES[:2], [0, 1]) == [False, False]
    assert store.stats()["skipped"] == 1
    clock.now += 0.2
    assert store.get(HASHES[:2], [0, 1]) == [True, True]


def test_the_keys_that_failed_are_bounded(store, monkeypatch):
    monkeypatch.setattr(store_module, "_NEGATIVE_CACHE_SIZE", 5)
    store._note_failed([bytes([n]) for n in range(9)])
    assert [*store._retry_at] == [bytes([n]) for n in range(4, 9)]


# --- Lost and late ---


@pytest.mark.parametrize("error", [BackendLost("gone"), OSError("gone"), ConnectionError("gone")])
def test_a_lost_backend_is_an_outcome(store, shelf, error):
    put(store, 2)
    for call, expected in (
        (lambda: store.match(HASHES), 0),
        (lambda: store.put(HASHES[2:4], [2, 3]), ["failed", "failed"]),
    ):
        shelf.failures = [error]
        assert call() == expected or expected[:1] == ["failed"]
        store._lost_in_a_row = 0
    shelf.failures = [None, error]
    assert store.put(HASHES[4:6], [4, 5]) == ["failed", "failed"]
    shelf.failures = [error]
    assert store.get(HASHES[:1], [0]) == [False]
    assert store.stats()["lost"] == 4


def test_results_of_a_lost_call_count(store, shelf):
    put(store, 1)
    shelf.failures = [None, BackendLost("gone", ["stored", "failed"])]
    assert store.put(HASHES[1:3], [1, 2]) == ["stored", "failed"]


def test_other_errors_are_raised_and_leave_the_store_usable(store, shelf):
    shelf.failures = [None, ZeroDivisionError()]
    with pytest.raises(ZeroDivisionError):
        put(store, 2)
    assert put(store, 2) == ["stored", "stored"]
    store.close()
    assert shelf.closed == 1


def test_a_lost_call_is_repeated_as_often_as_asked_for(shelf, clock):
    store = open_over(shelf, retries=2)
    put(store, 1)
    shelf.failures = [BackendLost("gone")] * 2
    assert store.get(HASHES[:1], [1]) == [True]
    assert store.stats()["lost"] == 2 and store._lost_in_a_row == 0
    shelf.failures = [BackendLost("gone")] * 3
    assert store.get(HASHES[:1], [1]) == [False]
    shelf.failures = [BackendLost("not for you", refused=True)] * 3
    assert store.match(HASHES[:1]) == 0
    assert len(shelf.failures) == 2, "it would be refused again"
    shelf.failures, shelf.takes_s = [BackendLost("gone")] * 3, 6.0
    assert store.match(HASHES[1:2]) == 0
    assert len(shelf.failures) == 2, "there is no time left"
    store._skipped_until, shelf.takes_s = 0.0, 0.0
    shelf.failures = [BackendLost("bytes are under way", repeatable=False)] * 3
    assert store.match(HASHES[1:2]) == 0
    assert len(shelf.failures) == 2, "it would fail again"


def test_after_three_lost_calls_it_is_left_alone_for_ten_seconds(store, shelf, clock):
    put(store, 2)
    shelf.failures = [BackendLost("gone")] * 3
    for _ in range(3):
        assert store.match(HASHES[:2]) == 0
    shelf.calls.clear()
    assert store.match(HASHES[:2]) == 0
    assert store.get(HASHES[:2], [0, 1]) == [False, False]
    assert store.put(HASHES[:2], [0, 1]) == ["failed", "failed"]
    assert shelf.calls == [("busy", 2)] * 2 and store.stats()["skipped"] >= 4
    clock.now += 9.9
    assert store.match(HASHES[:2]) == 0
    clock.now += 0.2
    shelf.failures = [BackendLost("gone")]
    assert store.match(HASHES[:2]) == 0 and shelf.failures == []
    assert store.match(HASHES[:2]) == 0 and not shelf.failures, "one failure is enough now"
    shelf.calls.clear()
    clock.now += 10.1
    assert store.match(HASHES[:2]) == 2
    shelf.failures = [BackendLost("gone")] * 2
    assert [store.match(HASHES[:2]) for _ in range(3)] == [0, 0, 2], "the count starts anew"


def test_late_calls_count_as_lost_but_not_those_that_were_in_a_hurry(store, shelf, clock):
    put(store, 1)
    shelf.takes_s = 1.0
    for _ in range(5):
        store.get(HASHES[:1], [1], deadline_s=0.5)
    assert store.stats()["slow"] == 0 and store.match(HASHES[:1]) == 1
    shelf.takes_s = 5.5
    for _ in range(3):
        assert store.get(HASHES[:1], [1]) == [True]
    assert store.stats()["slow"] == 3
    assert store.get(HASHES[:1], [1]) == [False] and store.stats()["skipped"] == 1


def test_a_caller_with_little_time_does_not_close_the_store_to_others(store, shelf):
    put(store, 2)
    shelf.takes_s = 1.0
    for _ in range(4):
        shelf.failures = [BackendLost("no answer in time")]
        assert store.get(HASHES[:1], [1], deadline_s=0.5) == [False]
    assert store.stats()["lost"] == 4
    shelf.takes_s = 0.0
    assert store.get(HASHES[:2], [0, 1]) == [True, True], "nor is its block left alone"


def test_what_a_call_has_no_time_for_is_not_asked_of_the_backend(store, shelf, monkeypatch):
    monkeypatch.setattr(store_module, "_KEYS_PER_QUERY", 2)
    monkeypatch.setattr(store_module, "_SCRATCH_BYTES", 2 * store.pool.page_bytes)
    shelf.takes_s = 2.0
    assert put(store, 8) == ["stored"] * 4 + ["failed"] * 4
    assert shelf.calls == [("exists", 8), ("put", 2), ("put", 2)]
    assert store.stats()["failed"] == 4
    shelf.takes_s, shelf.calls = 0.0, []
    assert put(store, 8) == ["known"] * 4 + ["stored"] * 4
    shelf.takes_s, shelf.calls = 2.0, []
    assert store.match(HASHES) == 6, "as far as it is known"
    assert len(shelf.calls) == 3
    assert store.contains(HASHES) == [True] * 6 + [False] * 2


def test_what_is_late_is_a_miss(store, shelf):
    put(store, 8)
    shelf.takes_s = 1.0
    assert store.get(HASHES, range(8), deadline_s=1.5) == [True] * 6 + [False] * 2
    assert store.get(HASHES, range(8), deadline_s=0) == [False] * 8
    assert store.stats()["late"] == 2 + 8
    shelf.takes_s = 0.0
    assert store.get(HASHES, range(8)) == [True] * 8, "they are asked for again"


def test_what_is_put_late_has_failed(store, shelf, monkeypatch):
    monkeypatch.setattr(store_module, "_KEYS_PER_QUERY", 2)
    monkeypatch.setattr(store_module, "_SCRATCH_BYTES", 2 * store.pool.page_bytes)
    shelf.takes_s = 1.0
    fill(store.pool, range(8), HASHES)
    assert store.put(HASHES, range(8), deadline_s=1.5) == ["stored"] * 2 + ["failed"] * 6
    assert store.put(HASHES[2:], range(2, 8), deadline_s=0) == ["failed"] * 6
    assert store.deadline_s == 5.0 and store.stats()["stored"] == 2
    assert store.put(HASHES, range(8)) == ["known"] * 2 + ["stored"] * 6


def test_removing_says_what_failed(store, shelf):
    put(store, 2)
    shelf.failures = [BackendLost("gone")]
    with pytest.raises(ConnectionError, match=r"^remove: gone"):
        store.remove()
    store.remove()
    assert store.match(HASHES) == 0 and store.stats()["shelf"] == 0


def test_a_server_that_is_not_there_when_it_is_opened(monkeypatch, shelf):
    from kvcupy.remote.stores import shm

    for refused, error in ((False, ConnectionError), (True, PermissionError)):

        def fail(*arguments, refused=refused, **options):
            raise BackendLost("nobody answers", refused=refused)

        monkeypatch.setattr(shm, "open_backend", fail)
        with pytest.raises(error, match=r"^url: nobody answers"):
            SharedStore.open("shm:a", new_pool())


# --- Memory that an engine may still write to ---


class Landing:
    """A transfer that continues after a get has given up."""

    def __init__(self):
        self.over, self.failure = False, None

    def done(self):
        return self.over

    def synchronize(self):
        assert self.over

    def wait(self, stream=None): ...

    def wait_layer(self, layer, stream=None): ...


@pytest.mark.parametrize(
    ("call", "failures", "outcome", "num_held"),
    [
        ("get", [], [True, False, False], 2),
        ("get", [BackendLost("gone")], [False] * 3, 3),
        ("get", [KeyboardInterrupt()], None, 3),
        ("put", [None, BackendLost("late", ["stored", "failed", "known"])],
         ["stored", "failed", "known"], 1),
        ("put", [None, KeyboardInterrupt()], None, 3),
    ],
    ids=["get", "get, lost", "get, interrupted", "put, late", "put, interrupted"],
)  # fmt: skip
def test_pages_that_the_engine_may_still_use_are_held_back(
    shelf, call, failures, outcome, num_held
):
    store = open_over(shelf)
    put(store, 2)
    allocator = store.pool.allocator
    pages = allocator.alloc(3)
    hashes = HASHES[2:5] if call == "put" else (HASHES[0], *HASHES[6:])
    fill(store.pool, pages, hashes)
    shelf.completion, shelf.failures = Landing(), [*failures]
    try:
        assert getattr(store, call)(hashes, pages) == outcome
    except KeyboardInterrupt:
        assert outcome is None
    allocator.free(pages)
    assert allocator.num_free == 8 - num_held
    shelf.completion.over = True
    assert allocator.num_free == 8


@pytest.mark.parametrize(
    "failure", [BackendLost("late", ["stored", "failed"]), KeyboardInterrupt()]
)
def test_encrypted_blocks_that_the_engine_may_still_read_are_held_back(shelf, failure):
    """The pages are free, since the engine reads a buffer."""
    store = open_over(shelf, key=bytes(32))
    put(store, 2)
    [buffer] = store._scratch
    pages = store.pool.allocator.alloc(2)
    shelf.completion, shelf.failures = Landing(), [None, failure]
    try:
        assert store.put(HASHES[2:4], pages) == ["stored", "failed"]
    except KeyboardInterrupt:
        assert not isinstance(failure, BackendLost)
    store.pool.allocator.free(pages)
    assert store.pool.allocator.num_free == 8
    assert store._scratch == []
    assert store.put(HASHES[4:5], [4]) == ["stored"] and store._scratch[0] is not buffer
    pages = store.pool.allocator.alloc(1)
    assert store.get(HASHES[7:8], pages) == [False]
    store.pool.allocator.free(pages)
    assert store.pool.allocator.num_free == 7, "bytes may still arrive in a page"


def test_a_buffer_is_not_used_again_while_something_may_land_in_it(shelf):
    store = open_over(shelf, layout="layer_first")
    put(store, 2)
    [buffer] = store._scratch
    assert store.get(HASHES[:2], [0, 1]) == [True, True] and store._scratch[0] is buffer
    shelf.completion = Landing()
    assert store.get([HASHES[0], HASHES[7]], [4, 5]) == [True, False]
    assert holds(store.pool, 4, HASHES[0])
    assert store._scratch == [], "it belongs to what may land"
    assert store.get(HASHES[:1], [6]) == [True]
    assert store._scratch[0] is not buffer


# --- The rest ---


def test_closing_waits_for_a_call_in_flight(store, shelf, monkeypatch):
    inside, go_on, found = threading.Event(), threading.Event(), []
    put(store)
    real = shelf.exists

    def pause(keys, deadline):
        inside.set()
        assert go_on.wait(60)
        return real(keys, deadline)

    shelf.exists = pause
    call = threading.Thread(target=lambda: found.append(store.match(HASHES)))
    closing = threading.Thread(target=store.close)
    call.start()
    assert inside.wait(60)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive() and not shelf.closed
    for action in (
        lambda: store.match(HASHES), lambda: put(store), lambda: store.get(HASHES, range(8)),
        store.stats, store.remove,
    ):  # fmt: skip
        with pytest.raises(kv.KvcupyError, match=r"^store: expected an open store"):
            action()
    go_on.set()
    closing.join(60)
    call.join(60)
    store.close()
    assert shelf.closed == 1 and found == [4]


def test_headers_are_read_like_a_list(store):
    put(store, 3)
    pages = WirePages(store.pool)
    blocks = [SummedBlock([bytes_of(store.pool, page)], is_summed=True) for page in range(3)]
    headers = store_module._Headers(store, store._keys.keys(HASHES[:3]), blocks)
    assert len(headers) == 3 and [*headers] == headers[:] == [headers[0], headers[1], headers[-1]]
    assert headers[-1] is headers[2] and pages.block_bytes == store.pool.page_bytes
    with pytest.raises(IndexError):
        headers[3]
