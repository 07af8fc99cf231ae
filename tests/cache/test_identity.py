"""PoolIdentity and BlockKeys: what makes blocks of processes the same blocks."""

from __future__ import annotations

import hashlib

import pytest

import kvcupy as kv
from kvcupy.cache.identity import BlockKeys, PoolIdentity

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


def test_scales_and_kind_differ_too():
    plain, scaled = (identity(dtype="int8", scales=scales) for scales in (False, True))
    assert plain.difference(scaled) == "scales: expected False, got True"
    latent = PoolIdentity.of(kv.MLAPool(2, 4, 3, 8, device="host"))
    assert latent.difference(identity(num_kv_heads=1)) == "kind: expected mla, got kv"


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
