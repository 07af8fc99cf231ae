"""kv.block_hashes, PoolIdentity and BlockKeys: what makes blocks of processes the same blocks."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

import kvcupy as kv
from kvcupy.cache.identity import BlockKeys, PoolIdentity
from kvcupy.cache.pages import block_hashes, hash_list

# --- Hashes ---


# Of the hashes of 0 to 31 in blocks of 16, and a pool of 2 layers of 8 heads of 128 in bf16.
GOLDEN_KEYS = [
    "2576f6f1b164480bc116fc24c2989ce206a91164ebb1e8a9f9a9ad71dc121a99",
    "3ab7e63ea9ee596250fe01e444a1eccc49fa993ce6a1f3efc8f7e946d34f3fbd",
]


def by_hand(tokens, size, parent=0, num_bytes=8):
    hashes = []
    for start in range(0, len(tokens) - size + 1, size):
        block = tokens[start : start + size]
        packed = parent.to_bytes(num_bytes, "little") + struct.pack(f"<{size}q", *block)
        parent = int.from_bytes(hashlib.blake2b(packed, digest_size=num_bytes).digest(), "little")
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 17])
def test_one_hash_a_full_block(count):
    tokens = [7 * i - 20 for i in range(count)]
    assert block_hashes(tokens, 4, bits=64) == by_hand(tokens, 4)
    assert block_hashes(tokens, 4) == by_hand(tokens, 4, num_bytes=16)
    assert len(block_hashes(tokens, 4)) == count // 4


def test_the_hash_is_the_same_for_ever():
    assert block_hashes([1, 2, 3, 4], 2, bits=64) == [
        8901564848246840783, 5144891096145841010
    ]  # fmt: skip
    assert block_hashes([1, 2, 3, 4], 2) == [
        23729710943973441516350355176101919131, 77515808601631131430731633927290120027
    ]  # fmt: skip


@pytest.mark.parametrize("seed", ["0", "1"])
def test_hashes_and_keys_are_those_of_every_other_process(seed):
    program = (
        "import kvcupy as kv; pool = kv.KVPool(2, 16, 2, 8, 128, device='host');"
        "hashes = kv.block_hashes(range(32), 16, bits=128);"
        "print(hashes, [k.hex() for k in kv.BlockKeys(pool, tenant='a').keys(hashes)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    ).stdout
    hashes = by_hand(list(range(32)), 16, num_bytes=16)
    assert output.strip() == f"{hashes} {GOLDEN_KEYS}"


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_array(dtype):
    tokens = np.arange(100, 110, dtype=dtype)
    assert block_hashes(tokens, 3) == block_hashes(list(range(100, 110)), 3)
    assert block_hashes(tokens[::2], 2) == block_hashes([100, 102, 104, 106, 108], 2)
    assert block_hashes(tokens.astype(">i8"), 3) == block_hashes(tokens, 3)


def test_chained():
    one, two = block_hashes([1, 2, 3, 4], 2)
    assert block_hashes([3, 4], 2, parent=one) == [two]
    assert block_hashes([3, 4], 2) != [two], "what came before counts"
    assert block_hashes([9, 2, 3, 4], 2)[1] != two
    assert block_hashes([1, 2], 2, parent=5) != [one]
    assert block_hashes([1, 2], 2, parent=-1) == block_hashes([1, 2], 2, parent=2**128 - 1)


def test_chained_with_64_bits():
    one, two = block_hashes([1, 2, 3, 4], 2, bits=64)
    assert block_hashes([3, 4], 2, parent=one, bits=64) == [two]
    assert max(one, two) < 2**64 <= min(block_hashes([1, 2, 3, 4], 2))
    [negative] = block_hashes([1, 2], 2, parent=-1, bits=64)
    assert [negative] == block_hashes([1, 2], 2, parent=2**64 - 1, bits=64)
    with pytest.raises(ValueError, match=r"^parent: expected an int of 64 bits"):
        block_hashes([1], 1, parent=2**64, bits=64)


def test_hashes_with_a_sign_are_the_same_64_bits():
    assert hash_list([0, 2**64 - 1, -1, -(2**63)]) == [0, 2**64 - 1, 2**64 - 1, 2**63]
    assert hash_list(np.array([-1, 3])) == [2**64 - 1, 3]
    assert hash_list(np.array([2**63 + 1], np.uint64)) == [2**63 + 1]
    assert hash_list((np.int64(4), np.uint8(5))) == [4, 5]
    assert hash_list(iter([1, 2])) == [1, 2]
    wide = [2**128 - 1, 2**64]
    assert hash_list(wide) == hash_list(np.array(wide, object)) == wide
    assert hash_list([]) == hash_list(np.array([])) == []


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([1.5], 1), TypeError, "token_ids"),
        (([True], 1), TypeError, "token_ids"),
        (("abc", 1), TypeError, "token_ids"),
        ((b"abc", 1), TypeError, "token_ids"),
        (([[1, 2]], 1), ValueError, "token_ids"),
        ((3, 1), ValueError, "token_ids"),
        (([2**63], 1), ValueError, "token_ids"),
        (([2**70], 1), TypeError, "token_ids"),
        (([1], 0), ValueError, "block_tokens"),
        (([1], 2.0), TypeError, "block_tokens"),
        (([1], True), TypeError, "block_tokens"),
    ],
)
def test_refused(arguments, error, said):
    with pytest.raises(error, match=f"^{said}: expected"):
        block_hashes(*arguments)


@pytest.mark.parametrize("bits", [0, 32, 65, 256, -64])
def test_bits_that_are_refused(bits):
    with pytest.raises(ValueError, match=r"^bits: expected 64 or 128"):
        block_hashes([1], 1, bits=bits)


@pytest.mark.parametrize(("parent", "error"), [(2**128, ValueError), (1.0, TypeError)])
def test_parents_that_are_refused(parent, error):
    with pytest.raises(error, match=r"^parent: expected"):
        block_hashes([1], 1, parent=parent)


@pytest.mark.parametrize(
    ("hashes", "error"),
    [([1.0], TypeError), ([True], TypeError), (5, TypeError), (["a"], TypeError),
     ([2**128], ValueError), ([-(2**63) - 1], ValueError), (np.zeros((1, 1), int), ValueError),
     (np.ones(2), ValueError)],
)  # fmt: skip
def test_hashes_that_are_refused(hashes, error):
    with pytest.raises(error, match=r"^hashes: expected"):
        hash_list(hashes)


# --- Identities ---


SHAPE = {"page_size": 4, "num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "device": "host"}


HASHES = kv.block_hashes(range(8), 2)


def pool(num_pages=2, **changes):
    return kv.KVPool(num_pages, **{**SHAPE, **changes})


def identity(head_start=0, total_kv_heads=None, model="", **changes):
    return PoolIdentity.of(
        pool(**changes), head_start=head_start, total_kv_heads=total_kv_heads, model=model
    )


def test_what_is_encoded_is_the_same_for_ever():
    encoded = identity(2, 4, "weights").encoded()
    assert encoded == (
        b'{"format":"bf16","head_dim":8,"head_start":2,"kind":"kv","model":"weights",'
        b'"num_kv_heads":2,"num_layers":3,"page_size":4,"scales":false,"total_kv_heads":4,'
        b'"v_head_dim":8,"version":1,"wire":"page_first_direct"}'
    )
    assert identity(2, 4, "weights").digest() == hashlib.blake2b(encoded, digest_size=16).digest()


CHANGES = {
    "format": {"dtype": "fp16"}, "page_size": {"page_size": 8}, "num_layers": {"num_layers": 2},
    "num_kv_heads": {"num_kv_heads": 1, "total_kv_heads": 2}, "head_dim": {"head_dim": 16},
    "head_start": {"head_start": 1, "num_kv_heads": 1, "total_kv_heads": 2},
    "total_kv_heads": {"total_kv_heads": 3}, "v_head_dim": {"v_head_dim": 16},
    "wire": {"layout": "page_head"}, "model": {"model": "other"},
}  # fmt: skip


@pytest.mark.parametrize("field", CHANGES)
def test_a_pool_that_differs_is_named_and_has_other_keys(field):
    base = identity()
    if field == "head_start":
        base = identity(num_kv_heads=1, total_kv_heads=2)
    other = identity(**CHANGES[field])
    assert other.digest() != base.digest()
    assert not {*BlockKeys(base).keys(HASHES)} & {*BlockKeys(other).keys(HASHES)}
    assert base.difference(other).startswith(f"{field}: expected {getattr(base, field)}, got ")
    assert base.difference(identity(num_kv_heads=base.num_kv_heads, total_kv_heads=2)) == ""


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pools_of_layouts_that_exchange_bytes_are_the_same(layout):
    assert identity(layout=layout) == identity()
    assert identity(layout=layout, num_pages=5) == identity()


def test_where_the_heads_are_must_fit():
    for start, total in ((1, None), (-1, 4), (3, 4)):
        with pytest.raises(ValueError, match=r"^head_start: expected"):
            identity(start, total)
    with pytest.raises(ValueError, match=r"^total_kv_heads: expected at least the 2 heads of pool"):
        identity(0, 1)
    with pytest.raises(TypeError, match=r"^head_start: expected"):
        identity(True, 4)
    with pytest.raises(TypeError, match=r"^total_kv_heads: expected"):
        identity(0, "4")
    with pytest.raises(TypeError, match=r"^model: expected a str"):
        identity(model=b"m")
    with pytest.raises(ValueError, match=r"^model: expected less than 4 KiB"):
        identity(model="x" * 4096)
    with pytest.raises(TypeError, match=r"^pool: expected"):
        PoolIdentity.of([])


# --- Keys ---


def test_keys_by_hand():
    secret = hashlib.blake2b(b"tenant").digest()
    for key, number in zip(BlockKeys(pool(), "tenant").keys(HASHES), HASHES, strict=True):
        message = identity().digest() + number.to_bytes(16, "little")
        assert key == hashlib.blake2b(message, digest_size=32, key=secret).digest()


def test_tenants_share_nothing():
    names = ["", "a", "b", "a" * 200, b"\0"]
    keys = [key for name in names for key in BlockKeys(pool(), name).keys(HASHES)]
    assert len(set(keys)) == len(names) * len(HASHES)
    assert len({BlockKeys(pool(), name).namespace for name in names}) == len(names)
    assert BlockKeys(pool(), "a").namespace == BlockKeys(pool(page_size=8), "a").namespace
    assert BlockKeys(pool(), "a").keys(HASHES) == BlockKeys(pool(), b"a").keys(HASHES)
    assert "secret" not in repr(BlockKeys(pool(), "secret"))


def test_keys_with_a_secret_cannot_be_derived_without():
    secrets = [b"", b"s", bytes(32), bytes(64)]
    keys = [BlockKeys(pool(), "a", secret=secret) for secret in secrets]
    assert len({key for some in keys for key in some.keys(HASHES)}) == len(secrets) * len(HASHES)
    assert len({some.namespace for some in keys}) == 1, "`remove` and operators find them all"
    tenant = hashlib.blake2b(hashlib.blake2b(b"a").digest(), key=b"s").digest()
    message = identity().digest() + HASHES[0].to_bytes(16, "little")
    expected = hashlib.blake2b(message, digest_size=32, key=tenant).digest()
    assert keys[1].keys(HASHES)[0] == expected


@pytest.mark.parametrize(
    "hashes", [[5], [HASHES[0], 2**64 - 1], [-1], kv.block_hashes([1], 1, bits=64)]
)
def test_hashes_of_64_bits_are_refused(hashes):
    with pytest.raises(ValueError, match=r"^hashes: expected hashes of 128 bits .*bits=128"):
        BlockKeys(pool()).keys(hashes)


def test_arguments_of_keys():
    with pytest.raises(TypeError, match=r"^tenant: expected"):
        BlockKeys(pool(), 5)
    with pytest.raises(TypeError, match=r"^identity: expected"):
        BlockKeys("bf16")
    assert BlockKeys(pool()).keys([]) == []
