"""kv.SharedStore with `encryption_key`: what is encrypted when and by whom, keys, and errors.

tests/remote/test_shared_contract.py has what holds on every backend.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter

import pytest
from shared_cases import Writer, block_hashes, bytes_of, contents, fill, holds, new_pool

import kvcupy as kv
from kvcupy.cache.encryption import BlockCipher, Decryption
from kvcupy.remote.stores import store as store_module
from kvcupy.remote.stores.shm import Layout, ShmBackend

KEY = bytes(range(32))
HASHES = block_hashes(12)
LARGE = {"num_layers": 8, "num_kv_heads": 16, "head_dim": 512}  # K and V of 512 KiB each a page


@pytest.fixture
def opened(tmp_path):
    """A function that opens a store in memory; they all have room for the same 12 blocks."""
    users = []

    def open_one(*, num_blocks=12, **options):
        capacity = Layout(new_pool(1).page_bytes, num_blocks).num_bytes
        options = {"encryption_key": KEY, "capacity_bytes": capacity, **options}
        users.append(Writer("shm:encrypted", folder=tmp_path, **options))
        return users[-1]

    yield open_one
    for user in users:
        user.store.close()


@pytest.fixture
def sealed(monkeypatch):
    """Names of blocks that were encrypted, and the threads that did it."""
    done = []
    seal = BlockCipher.seal

    def note(self, name, *arguments):
        done.append((name, threading.current_thread().name))
        return seal(self, name, *arguments)

    monkeypatch.setattr(BlockCipher, "seal", note)
    return done


def test_known_blocks_are_not_encrypted(opened, sealed):
    user = opened()
    user.put(*HASHES[:2])
    assert [name for name, _ in sealed] == user.store._keys.keys(HASHES[:2])
    sealed.clear()
    assert user.put(*HASHES[:3]) == ["known", "known", "stored"]
    assert [name for name, _ in sealed] == user.store._keys.keys(HASHES[2:3])


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first", "page_first"])
def test_layouts_share_encrypted_blocks(opened, layout):
    user, other = opened(layout=layout), opened()
    assert user.put(*HASHES[:4]) == ["stored"] * 4
    for page, block_hash in enumerate(HASHES[:4]):
        assert holds(user.pool, page, block_hash), "a put does not change its pages"
    assert other.get(*HASHES[:4]) == [True] * 4
    assert other.put(*HASHES[4:6]) == ["stored"] * 2
    assert user.get(*HASHES[:6]) == [True] * 6


def test_a_miss_after_a_buffer_leaves_the_page(opened):
    """Bytes that do not authenticate do not reach pages that are copied."""
    user = opened(layout="page_first")
    user.put(HASHES[0])
    backend, [key] = user.store._backend, user.store._keys.keys(HASHES[:1])
    backend._bytes[backend._layout.payload_at(backend._find(key))] ^= 1
    fill(user.pool, [3], [HASHES[5]])
    assert user.store.get(HASHES[:1], [3]) == [False]
    assert holds(user.pool, 3, HASHES[5])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_encrypt_and_decrypt_large_blocks(tmp_path, sealed, monkeypatch, threads):
    pools = [kv.KVPool(8, 4, dtype="fp16", device="host", layout="page_first_direct", **LARGE)
             for _ in range(2)]  # fmt: skip
    meeting = threading.Barrier(2, timeout=30)
    decrypting = set()
    update = Decryption.update

    def note(self, part):
        name = threading.current_thread().name
        if threads > 1 and len(decrypting) < 2 and name not in decrypting:
            decrypting.add(name)
            meeting.wait()
        update(self, part)

    monkeypatch.setattr(Decryption, "update", note)
    capacity = Layout(pools[0].page_bytes, 8).num_bytes
    with kv.SharedStore.open(
        "shm:large", pools[0], capacity_bytes=capacity, folder=tmp_path, threads=threads,
        encryption_key=KEY,
    ) as store, kv.SharedStore.open(
        "shm:large", pools[1], folder=tmp_path, threads=threads, encryption_key=KEY
    ) as other:  # fmt: skip
        fill(pools[0], range(8), HASHES[:8])
        assert store.put(HASHES[:8], range(8)) == ["stored"] * 8
        assert Counter(name for name, _ in sealed) == Counter(store._keys.keys(HASHES[:8]))
        assert {thread.startswith("kvcupy") for _, thread in sealed} <= {False, threads > 1}
        assert other.get(HASHES[:8], range(8)) == [True] * 8
        assert all(holds(pools[1], page, HASHES[page]) for page in range(8))
    assert len(decrypting) == (2 if threads > 1 else 0)


def test_helpers_encrypt_while_the_caller_does(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "_MIN_HELPED_BYTES", 1)
    threads, meeting = set(), threading.Barrier(2, timeout=30)
    seal = BlockCipher.seal

    def meet(self, *arguments):
        if threading.current_thread().name not in threads:
            threads.add(threading.current_thread().name)
            meeting.wait()
        return seal(self, *arguments)

    monkeypatch.setattr(BlockCipher, "seal", meet)
    with Writer(
        "shm:helped", capacity_bytes=2**20, folder=tmp_path, threads=2, encryption_key=KEY
    ) as user:
        assert user.put(*HASHES[:8]) == ["stored"] * 8
        assert len(threads) == 2
        assert user.get(*HASHES[:8]) == [True] * 8


def test_blocks_are_decrypted_once_while_they_are_copied(opened, monkeypatch):
    user, sizes = opened(), []
    user.put(*HASHES[:4])
    update = Decryption.update
    monkeypatch.setattr(
        Decryption, "update", lambda self, part: (sizes.append(len(part)), update(self, part))
    )
    opening, real = [], ShmBackend._confirmed

    def confirmed(self, read):
        opening.append(sum(sizes))
        return real(self, read)

    monkeypatch.setattr(ShmBackend, "_confirmed", confirmed)
    assert user.get(*HASHES[:4]) == [True] * 4
    assert opening[0] == sum(sizes) == 4 * user.pool.page_bytes


# --- Keys -----------------------------------------------------------------------------------------


def test_the_function_is_asked_once_for_the_tenant(opened):
    tenants = []
    user = opened(tenant=b"t", encryption_key=lambda tenant: tenants.append(tenant) or KEY)
    user.put(*HASHES[:2])
    assert user.get(*HASHES[:2]) == [True, True] and tenants == [b"t"]
    assert opened(tenant=b"t").get(*HASHES[:2]) == [True, True], "it is the same key"


def test_after_a_rotation_new_blocks_take_the_place_of_old_ones(opened):
    """Blocks under the former key are never "known", and are evicted as unused."""
    old, new = opened(num_blocks=8), opened(num_blocks=8, encryption_key=bytes(32))
    assert old.put(*HASHES[:8]) == ["stored"] * 8
    assert new.store.match(HASHES[:8]) == 0 and new.get(*HASHES[:8]) == [False] * 8
    for start in (0, 4):
        assert new.put(*HASHES[start : start + 4]) == ["stored"] * 4
    assert new.put(*HASHES[:8]) == ["known"] * 8 and new.get(*HASHES[:8]) == [True] * 8
    assert old.store.match(HASHES[:8]) == 0
    assert new.store.stats()["damaged"] == old.store.stats()["damaged"] == 0


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("k" * 32, TypeError, "encryption_key: expected bytes, or a function to bytes, got str"),
        (5, TypeError, "encryption_key: expected bytes, or a function to bytes, got int"),
        (bytearray(32), TypeError, "encryption_key: expected bytes, .* got bytearray"),
        (b"secret", ValueError, "encryption_key: expected 32 bytes, got 6"),
        (b"", ValueError, "encryption_key: expected 32 bytes, got 0"),
        (lambda tenant: b"secret", ValueError, "encryption_key: expected 32 bytes, got 6"),
        (lambda tenant: None, TypeError, "encryption_key: expected bytes, .* got NoneType"),
        ({}.__getitem__, ValueError, "encryption_key: .* the function raised KeyError"),
    ],
)
def test_keys_that_are_refused(tmp_path, key, error, message):
    with pytest.raises(error, match=f"^{message}") as caught:
        Writer(
            "shm:refused", capacity_bytes=2**20, folder=tmp_path, tenant="secret",
            encryption_key=key,
        )  # fmt: skip
    assert "secret" not in str(caught.value)
    assert not [*tmp_path.iterdir()], "nothing was made"


def test_the_package_is_missing(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"^encryption_key needs: pip install .*crypto"):
        Writer("shm:missing", capacity_bytes=2**20, folder=tmp_path, encryption_key=KEY)


def test_a_backend_that_sends_only_pages_is_refused(tmp_path, monkeypatch):
    """Mooncake over RDMA reads large blocks from registered memory, which is the pool's."""
    closed = []
    close = ShmBackend.close
    monkeypatch.setattr(ShmBackend, "puts_pages_only", True, raising=False)
    monkeypatch.setattr(ShmBackend, "close", lambda self: (closed.append(self), close(self)))
    options = {"capacity_bytes": 2**20, "folder": tmp_path}
    with pytest.raises(ValueError, match=r"^encryption_key: expected None"):
        Writer("shm:pages", encryption_key=KEY, **options)
    assert len(closed) == 1
    Writer("shm:pages", **options).store.close()


def test_the_store_shows_neither_key_nor_tenant(opened):
    user = opened(tenant="a secret tenant")
    user.put(HASHES[0])
    whole = user.store._backend.path.read_bytes()
    assert contents(HASHES[0], 4096)[100:120] not in whole
    assert KEY not in whole and b"secret" not in whole
    assert HASHES[0].to_bytes(16, "little") not in whole
    plain = opened(tenant="a secret tenant", encryption_key=None)
    [name] = user.store._keys.keys(HASHES[:1])
    assert name in whole
    assert name not in plain.store._keys.keys(HASHES), "a name of a guessed prompt needs the key"
    assert "secret" not in repr(user.store) and KEY.hex() not in repr(user.store)
    assert bytes_of(user.pool, 0) == contents(HASHES[0], user.pool.page_bytes)
