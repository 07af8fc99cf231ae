"""kv.SharedStore over every backend, against a model: each tenant has a set of blocks."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

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


@contextmanager
def modelled_mooncake(tmp_path, *, staged_bytes=None):
    """The model of Mooncake's client library, without the world that simulates its failures."""
    pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')
    from simulation.mooncake_model import MooncakeModel

    from kvcupy.remote.stores import mooncake

    model = MooncakeModel(
        SimpleNamespace(
            task=SimpleNamespace(process=SimpleNamespace(is_alive=True)), is_over=False,
            time=SimpleNamespace(sleep=lambda seconds: None), pause=lambda: None,
            random=random.Random(0),
        )
    )  # fmt: skip
    changes = {"_store_class": lambda: model.client, "_is_alive": lambda master: True}
    if staged_bytes is not None:
        changes["_MAX_STAGED_BYTES"] = staged_bytes
    with mock.patch.multiple(mooncake, **changes):
        yield f"mooncake://127.0.0.1:{50051 + next(_names)}", {"host": "127.0.0.1"}


@contextmanager
def modelled_mooncake_in_place(tmp_path):
    with modelled_mooncake(tmp_path, staged_bytes=0) as opened:
        yield opened


def raw_block(user, block_hash):
    """Return the stored header and payload of a block."""
    [key] = user.store._keys.keys([block_hash])
    payload = bytearray(user.pool.page_bytes)
    # A page, since that is what Mooncake transfers.
    [header] = user.store._backend.get([key], [[memoryview(payload)]], time.monotonic() + 60)
    return header, payload


def replace_block(user, block_hash, header, payload):
    """Store a header and a payload under the key of a hash."""
    backend, [key] = user.store._backend, user.store._keys.keys([block_hash])
    deadline = time.monotonic() + 60
    backend.discard([key], deadline)
    assert backend.put([key], [[memoryview(payload)]], [header], deadline) == ["stored"]


def damage_mooncake(user, block_hash):
    header, payload = raw_block(user, block_hash)
    payload[1000] ^= 1
    replace_block(user, block_hash, header, payload)


KINDS = {
    "shm": Kind(shared_memory, damage_memory, removes=False),
    "redis": Kind(redis, damage_redis),
    "redis over a Unix socket": Kind(redis_over_unix, damage_redis),
    "mooncake": Kind(mooncake, damage_mooncake),
    "modelled mooncake": Kind(modelled_mooncake, damage_mooncake, removes=False),
    "modelled mooncake in place": Kind(modelled_mooncake_in_place, damage_mooncake, removes=False),
}
NAMES = [
    "shm",
    pytest.param("redis", marks=needs_redis),
    pytest.param("redis over a Unix socket", marks=needs_redis),
    pytest.param("mooncake", marks=needs_mooncake),
    "modelled mooncake",
    "modelled mooncake in place",
]


def key_of_tenant(tenant):
    return hashlib.sha256(b"key of " + tenant.encode()).digest()


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
        assert user.store.contains(hashes) == [h in known for h in hashes]

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


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("name", NAMES)
def test_any_sequence_of_calls(name, is_encrypted, tmp_path):
    with KINDS[name].opened(tmp_path) as (store_url, store_options):
        if is_encrypted:
            store_options["encryption_key"] = key_of_tenant

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


# --- Encrypted blocks ---


@pytest.fixture(params=NAMES)
def store_of(request, tmp_path):
    """A function that opens a store of a tenant on one backend."""
    with KINDS[request.param].opened(tmp_path) as (url, options):
        users = []

        def open_store(tenant="a", **changes):
            encrypted = {"encryption_key": key_of_tenant, **changes}
            users.append(Writer(url, tenant=tenant, **options, **encrypted))
            return users[-1]

        yield open_store
        for user in users:
            user.store.close()


def test_no_content_is_in_the_store(store_of):
    user = store_of()
    assert user.put(*HASHES[:2]) == ["stored"] * 2
    for block_hash in HASHES[:2]:
        header, payload = raw_block(user, block_hash)
        plain = contents(block_hash, len(payload))
        assert plain[:2000:2] != payload[:2000:2] and plain[100:116] not in payload
        assert len(header) <= 128 and not any(header[16:24]), "no checksum of the plain block"
        assert bytes_of(user.pool, HASHES.index(block_hash)) == plain, "the page is unchanged"
    assert user.get(*HASHES[:3]) == [True, True, False]


def test_tenants_and_keys_do_not_find_each_others_blocks(store_of):
    """Each stores its own beside the others', and gets it."""
    users = [
        store_of("a"),
        store_of("b"),
        store_of("a", encryption_key=None),
        store_of("a", encryption_key=bytes(32)),
        store_of("b", encryption_key=bytes(32)),
        store_of("a", encryption_key=None, checksum="none"),
    ]
    for user in users[:-1]:
        assert user.store.match(HASHES[:2]) == 0
        assert user.get(*HASHES[:2]) == [False, False]
        assert user.store.stats()["damaged"] == 0
        assert user.put(*HASHES[:2]) == ["stored", "stored"]
    for user in (*users[:-1], store_of("a"), store_of("b")):
        assert user.store.match(HASHES[:2]) == 2
        assert user.put(*HASHES[:2]) == ["known", "known"]
        assert user.get(*HASHES[:2]) == [True, True]


def test_no_bit_can_flip(store_of):
    """A damaged block is a miss, is dropped, and can be stored again."""
    user = store_of()
    user.put(*HASHES[:2])
    for place in range(101):
        header, payload = raw_block(user, HASHES[0])
        assert len(header) == 100
        changed = bytearray(header)
        (changed if place < 100 else payload)[min(place, 99)] ^= 1 << place % 8
        replace_block(user, HASHES[0], bytes(changed), payload)
        assert user.get(*HASHES[:2]) == [False, True], f"byte {place}"
        assert user.store.stats()["damaged"] == place + 1
        assert user.put(HASHES[0]) == ["stored"]
    assert user.get(*HASHES[:2]) == [True, True]


def test_damaged_or_foreign_blocks_are_misses(store_of):
    users = store_of("a"), store_of("b")
    users[0].put(*HASHES[:3])
    users[1].put(*HASHES[:1])
    plain = store_of("a", encryption_key=None)
    plain.put(*HASHES[:1])
    user, (header, payload) = users[0], raw_block(users[0], HASHES[0])
    foreign, other = raw_block(users[1], HASHES[0]), raw_block(user, HASHES[1])
    of_plain, [key] = raw_block(plain, HASHES[0]), user.store._keys.keys(HASHES[:1])
    renamed = header[:40] + key, contents(HASHES[0], len(payload))
    for what, (some_header, some_payload) in {
        "another block of the tenant": other,
        "the payload of another block": (header, other[1]),
        "the seal of another block": (header[:72] + other[0][72:], payload),
        "the payload and the seal of another block": (header[:72] + other[0][72:], other[1]),
        "a block of another tenant": foreign,
        "the payload and the seal of another tenant": (header[:72] + foreign[0][72:], foreign[1]),
        "a plain block": of_plain,
        "a plain block with the header of an encrypted one": (header, of_plain[1]),
        "a plain block under the right key": (of_plain[0][:40] + renamed[0][40:], renamed[1]),
        "no seal": (header[:72], payload),
        "a longer header": (header + bytes(4), payload),
        "an empty header": (b"\0", payload),
    }.items():
        replace_block(user, HASHES[0], some_header, bytearray(some_payload))
        assert user.get(*HASHES[:3]) == [False, True, True], what
        assert user.put(HASHES[0]) == ["stored"], what
        assert user.get(*HASHES[:3]) == [True] * 3, what
    replace_block(plain, HASHES[0], header, bytearray(payload))
    assert plain.get(HASHES[0]) == [False]
    assert users[1].get(HASHES[0]) == [True]
