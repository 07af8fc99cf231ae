"""Pages whose rows are stored rotated: views, pools, identities, tiers, files and caches."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from agents import Network
from test_four_bit_pages import HEADS, LAYERS, LAYOUTS, PAGE, WIDTH, contents, fill, new_pool
from tiered_cases import MemoryStore

import kvcupy as kv
from kvcupy import arrays
from kvcupy.cache.identity import BlockKeys, PoolIdentity

# Views ---------------------------------------------------------------------------------------


def test_views_keep_their_rotation(device):
    v = device.zeros((4, PAGE, HEADS, 192), "nvfp4+hadamard")
    moved = arrays.transposed(v, (1, 0, 2, 3))
    flat = arrays.reshaped(v, (4 * PAGE, HEADS, 192), v.strides[1:])
    apart = kv.view_as(v.codes, "nvfp4+hadamard", scales=v.scales)
    again = kv.view_as(v, "nvfp4+hadamard")
    views = (v, v[1:, 0], v[0, ..., None, :], moved, flat, v.without_owner(), again, apart)
    for view in (*views, arrays.transposed(apart, (1, 0, 2, 3)), apart[2]):
        assert view.encoding == kv.Encoding("nvfp4", hadamard=True), view
    assert v[..., 64:128].rotated_width == 64  # a whole block
    assert arrays.describe(v) == f"(4, {PAGE}, {HEADS}, 192) nvfp4, rotated"
    for cut in (slice(0, 128), slice(32, 96), slice(16, 192)):
        with pytest.raises(ValueError, match=r"columns: .*blocks of 64"):
            v[..., cut]


def test_a_part_of_rows_is_rotated(device):
    v = kv.MLAPool(4, PAGE, 1, 512, 64, dtype="nvfp4+hadamard", device=device).k(0)
    assert v.encoding == kv.Encoding("nvfp4", hadamard=True) == v[..., :512].encoding
    assert v[..., 512:].encoding == kv.Encoding("nvfp4")
    assert kv.view_as(v, "nvfp4+hadamard+four_over_six").rotated_width == 512
    assert [v[..., cut].rotated_width for cut in (
        slice(None), slice(0, 512), slice(512, 576), slice(528, 560), slice(0, 528),
    )] == [512, 512, 0, 0, 512]  # fmt: skip
    with pytest.raises(ValueError, match="columns"):
        v[..., 256:]


def test_what_cannot_be_rotated_is_refused(device):
    raw = np.zeros((4, 72), np.uint8)
    for name, call in {
        "dtype: hadamard: expected False for bf16": lambda: kv.view_as(
            np.zeros((4, 8), np.uint16), "bf16+hadamard"
        ),
        "dtype: hadamard: expected False for fp16": lambda: device.zeros((4, 64), "fp16+hadamard"),
        "dtype: expected an encoding": lambda: kv.view_as(raw, "nvfp4+dct"),
        "dtype: expected an encoding such as": lambda: kv.view_as(raw, "nvfp4+hadamard:64"),
        "latent_dim: expected rows of a multiple of 16": lambda: kv.MLAPool(
            4, PAGE, 1, 24, 8, dtype="nvfp4+hadamard", device=device
        ),
        "hadamard: expected blocks of at most 512": lambda: device.zeros(
            (4, 1024), "int4+hadamard"
        ),
        "array: expected bytes, or rotated rows": lambda: kv.view_as(
            kv.view_as(raw, "nvfp4"), "nvfp4+hadamard"
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            call()


def test_copies_tell_rotations_apart(device):
    v, other = (device.zeros((4, 64), e) for e in ("nvfp4+hadamard", "nvfp4"))
    with pytest.raises(ValueError, match=r"dst: expected .*rotated"):
        device.copy(other, v)
    device.copy(device.zeros((4, 64), "nvfp4+hadamard"), v)


# Pools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools(device, layout):
    for placement in ("device", "pinned", "pageable"):
        pool = new_pool(device, "int4+hadamard", layout=layout, placement=placement)
        assert (str(pool.encoding), pool.stored_as) == ("int4+hadamard", f"int4+hadamard:{WIDTH}")
        assert pool.k(1).encoding == pool.views(0)[1].encoding == pool.encoding
        assert "int4 rotated" in repr(pool)
    latent = kv.MLAPool(
        6, PAGE, LAYERS, 512, 64, dtype="nvfp4+hadamard", device=device, layout=layout
    )
    assert (latent.k(0).rotated_width, str(latent.encoding)) == (512, "nvfp4+hadamard")


def test_wrapped_pools_take_the_rotation_of_their_arrays(device):
    def layers(encoding):
        return [device.zeros((6, PAGE, 1, WIDTH), encoding) for _ in range(3)]

    pool = kv.KVPool.wrap(layers("nvfp4+hadamard"), layers("nvfp4"))
    assert [str(part(2).encoding) for part in (pool.k, pool.v)] == ["nvfp4+hadamard", "nvfp4"]
    assert pool.stored_as == f"nvfp4+hadamard:{WIDTH},nvfp4"
    with pytest.raises(ValueError, match=r"k\[1\]: expected 128 rotated elements"):
        kv.KVPool.wrap([*layers("nvfp4+hadamard")[:1], *layers("nvfp4")[1:]], layers("nvfp4"))


def test_identities(device):
    plain, rotated = new_pool(device, "nvfp4"), new_pool(device, "nvfp4+hadamard")
    hashes = kv.block_hashes(range(8), 2)
    ours, others = (BlockKeys(pool).keys(hashes) for pool in (plain, rotated))
    assert not {*ours} & {*others}
    difference = PoolIdentity.of(plain).difference(PoolIdentity.of(rotated))
    assert difference == f"format: expected nvfp4, got nvfp4+hadamard:{WIDTH}"


def test_a_store_of_rotated_blocks(device):
    def pools(encoding):
        pool = new_pool(device, encoding)
        return pool, new_pool(device, encoding, 4, placement="pinned")

    pool, host = pools("nvfp4+hadamard")
    fill(pool)
    before = contents(pool)
    store = MemoryStore(host)
    store.identity = PoolIdentity.of(host)
    with closing(kv.TieredCache(pool, host, stores=[store])) as cache:
        pages, hashes = pool.allocator.alloc(3), kv.block_hashes(range(3 * PAGE), PAGE)
        cache.insert(hashes, pages)
        cache.flush()
        cache.evict(3)
        host.allocator.free(cache.take_host_pages(4))
        lease = cache.acquire(hashes)
        lease.wait(None)
        device.synchronize()
        assert cache.stats()["store_hits"] == lease.num_blocks == 3
        np.testing.assert_array_equal(contents(pool)[:, :, lease.pages], before[:, :, pages])
        lease.release()
    other = pools("nvfp4")
    store.pool = other[1]
    with pytest.raises(ValueError, match=r"^stores: expected a store of the same blocks"):
        kv.TieredCache(*other, stores=[store])
    with pytest.raises(ValueError, match=r"^host_pool: expected nvfp4\+hadamard:128"):
        kv.TieredCache(pool, pools("nvfp4")[1])


# Caches --------------------------------------------------------------------------------------


def new_cache(device, **options):
    options = {"dtype": "nvfp4", "head_dim": WIDTH, "num_kv_heads": HEADS, **options}
    return kv.PagedKVCache(
        num_layers=2, num_q_heads=4, num_pages=12, page_size=PAGE, device=device, **options
    )


def rows(device, count, width=WIDTH, heads=HEADS):
    rng = np.random.default_rng(3)
    content = rng.standard_normal((2, count, heads, width)).astype(np.float32)
    content[..., 5] *= 30
    return content


def error_of(got, want):
    return np.linalg.norm(got.astype(np.float32) - want) / np.linalg.norm(want)


def test_a_cache_and_its_file(device, tmp_path):
    cache, other, plain = (
        new_cache(device, dtype=dtype) for dtype in ("int4+hadamard", "int4+hadamard", "int4")
    )
    assert str(cache.pool.encoding) == "int4+hadamard"
    want, errors = rows(device, 9), []
    for each in (cache, plain):
        each.add_sequence("a")
        with each.forward(["a"], [9]):
            pass
        each.set_kv("a", 0, device.asarray(want), device.asarray(want))
        errors.append(error_of(device.to_numpy(each.get_kv("a", 0, 9)[0]), want))
    assert errors[0] < min(0.1, errors[1])
    cache.save_sequence("a", tmp_path / "a.safetensors")
    other.load_sequence("b", tmp_path / "a.safetensors")
    for got, expected in zip(other.get_kv("b", 0, 9), cache.get_kv("a", 0, 9), strict=True):
        np.testing.assert_array_equal(
            device.to_numpy(got).view(np.uint16), device.to_numpy(expected).view(np.uint16)
        )
    with pytest.raises(ValueError, match=r"path: .*dtype int4, got int4\+hadamard:128"):
        plain.load_sequence("b", tmp_path / "a.safetensors")


def test_a_cache_of_latents(device):
    cache = kv.PagedKVCache(
        num_layers=2, num_q_heads=4, num_pages=12, page_size=PAGE, device=device,
        dtype="nvfp4+hadamard", latent_dim=512, rope_dim=64,
    )  # fmt: skip
    assert cache.pool.parts[0].rotated_width == 512
    latent, rope_key = rows(device, 5, 512, 1)[:, :, 0], rows(device, 5, 64, 1)[:, :, 0]
    cache.add_sequence("a")
    with cache.forward(["a"], [5]):
        pass
    cache.set_kv("a", 0, device.asarray(latent), device.asarray(rope_key))
    for got, want in zip(cache.get_kv("a", 0, 5), (latent, rope_key), strict=True):
        assert error_of(device.to_numpy(got), want) < 0.2


def test_rotation_is_of_the_past(device):
    cache = new_cache(device, dtype="bf16", demotion=kv.Demotion("int4+hadamard", recent=4))
    assert [str(pool.encoding) for pool in (cache.pool, cache.past_pool)] == [
        "bf16", "int4+hadamard"
    ]  # fmt: skip
    cache.add_sequence("a")
    want = rows(device, 16)
    with cache.forward(["a"], [16]):
        pass
    with cache.forward(["a"], [1]):
        pass
    assert cache.num_available_past_pages < 12
    cache.set_kv("a", 0, device.asarray(want), device.asarray(want))
    assert error_of(device.to_numpy(cache.get_kv("a", 0, 16)[0]), want) < 0.1


def test_what_is_not_four_bits_is_refused(device):
    with pytest.raises(ValueError, match=r"^dtype: hadamard: expected False for bf16"):
        new_cache(device, dtype="bf16+hadamard")
    with pytest.raises(ValueError, match=r"^encoding: hadamard: expected False for fp8_e4m3"):
        kv.Demotion("fp8_e4m3+hadamard", recent=4)
    pool = kv.KVPool(12, PAGE, 2, HEADS, WIDTH, dtype="nvfp4", device=device)
    with pytest.raises(
        ValueError, match=r"^dtype: expected nvfp4 as in pool, got 'nvfp4\+hadamard"
    ):
        kv.PagedKVCache(num_q_heads=4, pool=pool, dtype="nvfp4+hadamard")


# Between processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["k", "v", "a part of k"])
def test_wrapped_pools_of_which_one_part_is_rotated(device, monkeypatch, which):
    widths = {"k": (WIDTH, 0), "v": (0, WIDTH), "a part of k": (WIDTH // 2, 0)}[which]

    def wrapped(filled):
        shape = (8, LAYERS, PAGE, HEADS, WIDTH)
        plain = [device.zeros(shape, "nvfp4") for _ in "kv"]
        if filled:
            fill(kv.KVPool.wrap(*plain, layout="page_first_direct", device=device), 5)
        parts = [
            arrays.with_rotation(part, width) for part, width in zip(plain, widths, strict=True)
        ]
        return kv.KVPool.wrap(*parts, layout="page_first_direct", device=device)

    one, two = wrapped(True), wrapped(False)
    Network(immediate=True).install(monkeypatch)
    with kv.PageSender(one) as sender, kv.PageReceiver(two) as receiver:
        receiver.pull(sender.offer(one.allocator.alloc(3)), [5, 1, 2]).synchronize()
    np.testing.assert_array_equal(contents(two)[:, :, [5, 1, 2]], contents(one)[:, :, :3])
