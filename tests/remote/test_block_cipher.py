"""BlockCipher: AES-256-GCM by hand, and what does not open."""

from __future__ import annotations

import itertools
import random
import sys

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvcupy.remote.stores.encrypted import SEAL_BYTES, BlockCipher

KEY, CONTEXT = bytes(range(32)), bytes(range(16))
CIPHER = BlockCipher(KEY, CONTEXT)
BLOCK = random.Random(1).randbytes(5000)


def seal(cipher=CIPHER, name=b"name", block=BLOCK, cuts=()):
    edges = [0, *cuts, len(block)]
    parts = [memoryview(block)[a:b] for a, b in itertools.pairwise(edges)]
    sealed = bytearray(len(block))
    return cipher.seal(name, parts, memoryview(sealed)), sealed


def opened(found, sealed, cipher=CIPHER, name=b"name", cuts=()):
    """Return the block, or None if it does not open."""
    block = bytearray(sealed)
    edges = [0, *cuts, len(block)]
    parts = [memoryview(block)[a:b] for a, b in itertools.pairwise(edges)]
    return bytes(block) if cipher.open(name, found, parts) else None


@pytest.mark.parametrize("length", [0, 1, 15, 16, 4096, 5000])
def test_by_hand(length):
    """The same with the package's functions for HKDF and GCM."""
    found, sealed = seal(block=BLOCK[:length])
    salt = b"kvcupy block encryption, version 1"
    subkey = HKDF(SHA256(), 32, salt, CONTEXT + b"name").derive(KEY)
    nonce, tag = found[:12], found[12:]
    assert len(found) == SEAL_BYTES and len(sealed) == length
    plain = AESGCM(subkey).decrypt(nonce, bytes(sealed) + tag, CONTEXT + b"name")
    assert plain == BLOCK[:length]
    assert opened(found, sealed) == BLOCK[:length]


def test_parts_do_not_matter():
    whole = seal()
    for cuts in ((1,), (16, 17, 4096), range(7, 5000, 7)):
        assert opened(*seal(cuts=cuts)) == BLOCK
        assert opened(*whole, cuts=cuts) == BLOCK


def test_no_bit_can_change():
    found, sealed = seal(block=BLOCK[:40])
    assert opened(found, sealed) == BLOCK[:40]
    for number in range(8 * (len(found) + len(sealed))):
        both = bytearray(found + sealed)
        both[number // 8] ^= 1 << number % 8
        assert opened(bytes(both[:SEAL_BYTES]), both[SEAL_BYTES:]) is None, number
    assert opened(found, sealed[:-1]) is None
    assert opened(found, sealed + b"\0") is None


def test_another_name_context_or_key_does_not_open_it():
    found, sealed = seal()
    assert opened(found, sealed, name=b"nam") is None
    assert opened(found, sealed, BlockCipher(KEY, bytes(16))) is None
    assert opened(found, sealed, BlockCipher(bytes(32), CONTEXT)) is None
    assert opened(found, sealed, BlockCipher(KEY, CONTEXT)) == BLOCK


def test_equal_blocks_are_sealed_differently():
    seals = [seal(block=BLOCK[:32]) for _ in range(1000)]
    assert len({found[:12] for found, _ in seals}) == 1000
    assert len({bytes(sealed) for _, sealed in seals}) == 1000


def test_names_need_the_key():
    cipher, again = BlockCipher(KEY, CONTEXT), BlockCipher(KEY, bytes(16))
    assert cipher.name_key == again.name_key and len(cipher.name_key) == 32
    assert cipher.name_key != BlockCipher(bytes(32), CONTEXT).name_key


def test_the_package_is_missing(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("cryptography")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"^encryption_key needs: pip install .*crypto"):
        BlockCipher(KEY, CONTEXT)
