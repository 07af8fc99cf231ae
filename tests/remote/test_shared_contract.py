"""kv.SharedStore over every backend, against a model: each tenant has a set of blocks."""

from __future__ import annotations

import itertools
import time
from contextlib import contextmanager
from typing import NamedTuple

import pytest
from helpers import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from mooncake_servers import needs_mooncake
from mooncake_servers import servers_in as mooncakes_in
from redis_server import needs_redis, servers_in
from shared_cases import Writer, block_hashes, bytes_of, contents, fill, holds, new_pool

from kvcupy.remote.stores.backend import SummedBlock
from kvcupy.remote.stores.shm import Layout

NUM_PAGES = 8
HASHES = block_hashes(12)
LAYOUTS = ("page_first_direct", "layer_first", "page_first")
NUMBERS = st.lists(st.integers(0, len(HASHES) - 1), unique=True, max_size=NUM_PAGES)
_names = itertools.count()


class Kind(NamedTuple):
    """How to open and damage a store of a backend.

    Attributes
    ----------
    opened : context that yields the URL and options of a store
    damage : function of a user and a hash, which changes the block
    removes : whether `remove` drops the blocks of a tenant at once
    """

    opened: object
    damage: object
    removes: bool = True


@contextmanager
def shared_memory(tmp_path):
    capacity = Layout(new_pool(1).page_bytes, 10_000).num_bytes  # nothing is evicted
    name = f"contract{next(_names)}"
    yield f"shm:{name}", {"capacity_bytes": capacity, "folder": tmp_path}


def damage_memory(user, block_hash):
    backend, [key] = user.store._backend, user.store._keys.keys([block_hash])
    backend._bytes[backend._layout.payload_at(backend._find(key)) + 1000] ^= 1


@contextmanager
def redis(tmp_path, *, unix=False):
    with servers_in(tmp_path) as start:
        server = start()
        yield server.unix_url if unix else server.url, {}


@contextmanager
def redis_over_unix(tmp_path):
    with redis(tmp_path, unix=True) as opened:
        yield opened


def damage_redis(user, block_hash):
    backend, [key] = user.store._backend, user.store._keys.keys([block_hash])
    backend._run([("SETRANGE", backend._key(key), b"2000", b"?!")], time.monotonic() + 30)


@contextmanager
def mooncake(tmp_path):
    with mooncakes_in(tmp_path) as start:
        servers = start()
        servers.add_node(64 << 20)
        yield servers.url, {"host": "127.0.0.1"}


def damage_mooncake(user, block_hash):
    """Put another block under the key, with the header of the first."""
    store, [key] = user.store, user.store._keys.keys([block_hash])
    right, wrong = (
        [memoryview(bytearray(contents(h, user.pool.page_bytes)))]
        for h in (block_hash, block_hash + 1)
    )
    header = store._header(key, SummedBlock(right, store._algorithm))
    deadline = time.monotonic() + 60
    store._backend.discard([key], deadline)
    store._backend.put([key], [wrong], [header], deadline)


KINDS = {
    "shm": Kind(shared_memory, damage_memory, removes=False),
    "redis": Kind(redis, damage_redis),
    "redis over a Unix socket": Kind(redis_over_unix, damage_redis),
    "mooncake": Kind(mooncake, damage_mooncake),
}


class StoreMachine(RuleBasedStateMachine):
    """Three users of one tenant, with different layouts, and one of another tenant."""

    kind = url = options = None

    @initialize()
    def start(self):
        example = next(_names)
        self.known = {}
        tenants = [f"{example} a"] * len(LAYOUTS) + [f"{example} b"]
        self.arguments = [
            {"tenant": tenant, "layout": layout}
            for tenant, layout in zip(tenants, (*LAYOUTS, LAYOUTS[0]), strict=True)
        ]
        self.users = [self.opened(arguments) for arguments in self.arguments]

    def opened(self, arguments):
        return Writer(self.url, num_pages=NUM_PAGES, **self.options, **arguments)

    def chosen(self, number):
        """Return a user, and the known hashes of its tenant."""
        tenant = self.arguments[number]["tenant"]
        return self.users[number], self.known.setdefault(tenant, set())

    @rule(user=st.integers(0, 3), numbers=NUMBERS, differ=st.booleans())
    def put(self, user, numbers, differ):
        """The first block stored under a hash stays, also if a later one has other bytes."""
        user, known = self.chosen(user)
        hashes = [HASHES[n] for n in numbers]
        fill(
            user.pool, range(len(hashes)),
            [h + 1 if differ and h in known else h for h in hashes],
        )  # fmt: skip
        expected = ["known" if h in known else "stored" for h in hashes]
        assert user.store.put(hashes, range(len(hashes))) == expected
        known.update(hashes)

    @rule(user=st.integers(0, 3), numbers=NUMBERS, pages=st.permutations(range(NUM_PAGES)))
    def get(self, user, numbers, pages):
        """Known blocks are whole; no other page changes."""
        user, known = self.chosen(user)
        hashes, pages = [HASHES[n] for n in numbers], pages[: len(numbers)]
        fill(user.pool, range(NUM_PAGES), block_hashes(NUM_PAGES, 500))
        before = [bytes_of(user.pool, page) for page in range(NUM_PAGES)]
        assert user.store.get(hashes, pages) == [h in known for h in hashes]
        for page in range(NUM_PAGES):
            if page not in pages:
                assert bytes_of(user.pool, page) == before[page]
        for page, block_hash in zip(pages, hashes, strict=True):
            assert block_hash not in known or holds(user.pool, page, block_hash)

    @rule(user=st.integers(0, 3), numbers=NUMBERS)
    def match(self, user, numbers):
        user, known = self.chosen(user)
        hashes = [HASHES[n] for n in numbers]
        leading = list(itertools.takewhile(known.__contains__, hashes))
        assert user.store.match(hashes) == len(leading)

    @rule(user=st.integers(0, 3), pick=st.integers(0, 99))
    def damage(self, user, pick):
        """A damaged block is a miss, is dropped, and can be stored again."""
        user, known = self.chosen(user)
        if not known:
            return
        block_hash = sorted(known)[pick % len(known)]
        self.kind.damage(user, block_hash)
        before = user.store.stats()["damaged"]
        assert user.store.get([block_hash], [0]) == [False]
        assert user.store.stats()["damaged"] == before + 1
        user.store._retry_at.clear()
        known.remove(block_hash)

    @rule(user=st.integers(0, 3))
    def reopen(self, user):
        self.users[user].store.close()
        self.users[user] = self.opened(self.arguments[user])

    @precondition(lambda self: self.kind.removes)
    @rule(user=st.sampled_from([0, 3]))
    def remove(self, user):
        user, known = self.chosen(user)
        user.store.remove()
        known.clear()

    def teardown(self):
        for user in getattr(self, "users", ()):
            user.store.close()


@pytest.mark.parametrize(
    "name",
    [
        "shm",
        pytest.param("redis", marks=needs_redis),
        pytest.param("redis over a Unix socket", marks=needs_redis),
        pytest.param("mooncake", marks=needs_mooncake),
    ],
)
def test_any_sequence_of_calls(name, tmp_path):
    with KINDS[name].opened(tmp_path) as (store_url, store_options):

        class OverBackend(StoreMachine):
            kind, url, options = KINDS[name], store_url, store_options

        run_state_machine_as_test(
            OverBackend,
            settings=settings(
                max_examples=examples(30), stateful_step_count=25, deadline=None, print_blob=True,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip


@pytest.mark.parametrize("name", ["shm", pytest.param("redis", marks=needs_redis)])
def test_control_without_checksums_damaged_bytes_are_served(name, tmp_path):
    kind, [block_hash] = KINDS[name], HASHES[:1]
    with (
        kind.opened(tmp_path) as (url, options),
        Writer(url, checksum="none", **options) as user,
        Writer(url, **options) as verifying,
    ):
        user.put(block_hash)
        kind.damage(user, block_hash)
        assert user.store.get([block_hash], [0]) == [True]
        assert not holds(user.pool, 0, block_hash)
        assert verifying.get(block_hash) == [False], "it cannot be verified"
        assert verifying.store.stats()["unverified"] == 1
