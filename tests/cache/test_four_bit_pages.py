"""Pages of the four-bit formats: pools, transfers, tiers, files and the paged cache."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from agents import Network
from four_bit_cases import FOUR_BIT
from helpers import from_values
from tiered_cases import MemoryStore

import kvcupy as kv
from kvcupy import arrays, formats
from kvcupy.cache.paged.moves import PageMover

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
LAYERS, PAGE, HEADS, WIDTH = 3, 4, 2, 128


def new_pool(device, fmt, pages=6, **options):
    return kv.KVPool(pages, PAGE, LAYERS, HEADS, WIDTH, dtype=fmt, device=device, **options)


def fill(pool, seed=0):
    """Store rows in every slot of every layer."""
    rng, device = np.random.default_rng(seed), pool.device
    slots = device.asarray(np.arange(pool.num_pages * PAGE))
    for layer in range(pool.num_layers):
        key, value = (
            device.asarray(rng.standard_normal((len(slots), HEADS, WIDTH)).astype(np.float32))
            for _ in range(2)
        )
        kv.store_kv(key, value, pool.k(layer), pool.v(layer), slots)


def contents(pool):
    """The bytes of a pool by layer, (K and V, layers, pages, page_size, heads, row_bytes)."""
    host = kv.device("host") if pool.placement != "device" else pool.device
    return np.array([
        [host.to_numpy(view(layer)) for layer in range(pool.num_layers)]
        for view in (pool.k, pool.v)
    ])  # fmt: skip


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_pools_count_their_bytes(device, fmt):
    row_bytes = formats.FOUR_BIT[fmt].row_bytes(WIDTH)
    for layout in LAYOUTS:
        for placement in ("device", "pinned", "pageable"):
            pool = new_pool(device, fmt, layout=layout, placement=placement)
            assert pool.page_bytes == 2 * LAYERS * PAGE * HEADS * row_bytes
            assert pool.num_bytes == 6 * pool.page_bytes
            assert pool.k(1).shape == (6, PAGE, HEADS, WIDTH)
            assert not contents(pool).any()
    latent = kv.MLAPool(6, PAGE, LAYERS, 5 * WIDTH, dtype=fmt, device=device)
    assert latent.k(0).shape == (6, PAGE, 5 * WIDTH)
    assert latent.page_bytes == LAYERS * PAGE * 5 * row_bytes


@pytest.mark.covering(1)
@pytest.mark.parametrize("method", ["auto", "kernel", "copy", "staged"])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_transfers_move_bytes(device, fmt, source, target, method):
    src, dst = new_pool(device, fmt, layout=source), new_pool(device, fmt, 5, layout=target)
    fill(src)
    before = contents(src)
    kv.transfer_pages(src, dst, [0, 5, 2], [4, 0, 1], method=method)
    device.synchronize()
    want = np.zeros_like(contents(dst))
    want[:, :, [4, 0, 1]] = before[:, :, [0, 5, 2]]
    np.testing.assert_array_equal(contents(dst), want)
    np.testing.assert_array_equal(contents(src), before)


@pytest.mark.parametrize("fmt", ["nvfp4", "int4"])
def test_an_engine_and_copies_of_pages(device, fmt):
    pool, host = (new_pool(device, fmt, placement=p) for p in ("device", "pinned"))
    fill(pool)
    before = contents(pool)
    engine = kv.TransferEngine(pool, host)
    saved = engine.save([1, 4], [0, 3])
    assert saved.num_bytes == 2 * pool.page_bytes
    saved.synchronize()
    np.testing.assert_array_equal(contents(host)[:, :, [0, 3]], before[:, :, [1, 4]])
    engine.load([3, 0], [2, 5]).synchronize()
    kv.copy_pages(pool, device.asarray(np.array([3])), device.asarray(np.array([0])))
    device.synchronize()
    want = before.copy()
    want[:, :, [2, 5, 0]] = before[:, :, [4, 1, 3]]
    np.testing.assert_array_equal(contents(pool), want)


def test_copies_of_pages_with_scales_of_their_own():
    rng = np.random.default_rng(1)
    codes, scales = (rng.integers(0, 256, (5, 3, n), dtype=np.uint8) for n in (64, 8))
    before = codes.copy(), scales.copy()
    kv.copy_pages(kv.view_as(codes, "nvfp4", scales=scales), np.array([4]), np.array([1]))
    for array, old in zip((codes, scales), before, strict=True):
        old[1] = old[4]
        np.testing.assert_array_equal(array, old)


@pytest.mark.parametrize(
    ("fmt", "source", "target"),
    [("nvfp4", "layer_first", "page_first"), ("int4", "page_head", "page_first_direct")],
)
def test_pages_move_to_another_process(device, monkeypatch, fmt, source, target):
    Network(immediate=True).install(monkeypatch)
    one, other = new_pool(device, fmt, layout=source), new_pool(device, fmt, 5, layout=target)
    fill(one)
    fill(other, 1)
    device.synchronize()
    want = contents(other)
    want[:, :, [4, 0, 1]] = contents(one)[:, :, [0, 5, 2]]
    one.allocator.alloc(6)
    other.allocator.alloc(5)
    with kv.PageSender(one) as sender, kv.PageReceiver(other) as receiver:
        receiver.pull(sender.offer([0, 5, 2]), [4, 0, 1]).synchronize()
    np.testing.assert_array_equal(contents(other), want)


def test_wrapped_pools():
    raw = [np.zeros((2, 6, PAGE, HEADS, 72), np.uint8) for _ in range(LAYERS)]
    views = [kv.view_as(a, "nvfp4") for a in raw]
    pool = kv.KVPool.wrap([v[0] for v in views], [v[1] for v in views])
    assert (pool.dtype, pool.head_dim, pool.num_bytes) == (
        "nvfp4",
        WIDTH,
        sum(a.nbytes for a in raw),
    )
    fill(pool)
    np.testing.assert_array_equal(contents(pool)[1, 2], raw[2][1])
    assert raw[2].any()
    other = new_pool(kv.device("host"), "nvfp4", layout="page_first")
    kv.transfer_pages(pool, other, [1], [0])
    np.testing.assert_array_equal(contents(other)[:, :, 0], contents(pool)[:, :, 1])
    apart = kv.view_as(raw[0][0][..., :64], "nvfp4", scales=raw[0][0][..., 64:].copy())
    with pytest.raises(ValueError, match=r"k.*scales"):
        kv.KVPool.wrap([apart], [views[0][1]])


def refusals(device):
    pool = new_pool(device, "nvfp4")
    same = {"device": device, "dtype": "nvfp4"}
    return {
        "head_dim": lambda: kv.KVPool(4, 4, 1, 1, 100, **same),
        "v_head_dim": lambda: kv.KVPool(4, 4, 1, 1, 64, v_head_dim=24, **same),
        r"latent_dim \+ rope_dim": lambda: kv.MLAPool(4, 4, 1, 72, **same),
        "scales": lambda: kv.KVPool(4, 4, 1, 1, 64, scales=True, **same),
        "dst_pool": lambda: kv.transfer_pages(pool, new_pool(device, "int4"), [0], [0]),
        "dtype": lambda: kv.KVPool(4, 4, 1, 1, 64, device=device, dtype="nvfp4+fourier"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["head_dim", "v_head_dim", r"latent_dim \+ rope_dim", "scales", "dst_pool", "dtype"],
)
def test_what_does_not_fit_is_refused(device, name):
    with pytest.raises(ValueError, match=f"^{name}: "):
        refusals(device)[name]()


def test_tiers_keep_the_bytes(device):
    pool = new_pool(device, "nvfp4")
    host = new_pool(device, "nvfp4", 4, placement="pinned")
    fill(pool)
    before = contents(pool)
    first, second = (kv.block_hashes(range(n, n + 3 * PAGE), PAGE) for n in (0, 100))
    cache = kv.TieredCache(pool, host, stores=[MemoryStore(host)])
    with closing(cache):
        pages = {}
        for hashes in (first, second):  # the host has room for four: some of the first leave it
            pages[hashes[0]] = pool.allocator.alloc(3)
            cache.insert(hashes, pages[hashes[0]])
            cache.flush()
            cache.evict(3)
        assert cache.match(first).host < cache.match(first).stores == 3
        for hashes in (first, second):
            lease = cache.acquire(hashes)
            assert lease.num_blocks == 3
            lease.wait(None)
            device.synchronize()
            want = before[:, :, pages[hashes[0]]]
            np.testing.assert_array_equal(contents(pool)[:, :, lease.pages], want)
            lease.release()


def test_tiers_of_different_formats_are_refused(device):
    pool, host = new_pool(device, "bf16"), new_pool(device, "nvfp4", placement="pinned")
    with pytest.raises(ValueError, match=r"^host_pool: .*bf16.*nvfp4"):
        kv.TieredCache(pool, host)


def new_cache(device, fmt, latent_dim=None, **options):
    if latent_dim:
        options |= {"latent_dim": latent_dim, "rope_dim": 6 * WIDTH - latent_dim}
    else:
        options |= {"num_kv_heads": HEADS, "head_dim": WIDTH}
    return kv.PagedKVCache(
        num_layers=2, num_q_heads=4, num_pages=12, page_size=PAGE, dtype=fmt, device=device,
        **options,
    )  # fmt: skip


def rows_of(cache, count, latent_dim=None, seed=2):
    """K and V, or latent and rope key, of some tokens, as `set_kv` takes them."""
    rng = np.random.default_rng(seed)
    shapes = ((HEADS, WIDTH), (HEADS, WIDTH))
    if latent_dim:
        shapes = (latent_dim,), (6 * WIDTH - latent_dim,)
    return [
        cache.device.asarray(rng.standard_normal((2, count, *s)).astype(np.float32)) for s in shapes
    ]


def read(cache, seq, start, stop):
    return [cache.device.to_numpy(x) for x in cache.get_kv(seq, start, stop, dtype="fp32")]


def check_contents_forks_and_files(device, fmt, latent_dim, file, **options):
    """Write a sequence, fork it, save it to a file and load it into another cache."""
    cache = new_cache(device, fmt, latent_dim, **options)
    cache.add_sequence(0)
    with cache.forward([0], [9]):
        pass
    rows = rows_of(cache, 9, latent_dim)
    cache.set_kv(0, 0, *rows)
    stored = read(cache, 0, 0, 9)
    for got, want in zip(stored, rows, strict=True):
        exact = device.to_numpy(want)
        assert np.linalg.norm(got - exact) < 0.2 * np.linalg.norm(exact)
    cache.fork_sequence(0, 1, at=6)
    cache.set_kv(1, 5, *[x[:, :1] for x in rows])
    for got, of_parent in zip(read(cache, 1, 0, 6), stored, strict=True):
        np.testing.assert_array_equal(got[:, :5], of_parent[:, :5])
        np.testing.assert_array_equal(got[:, 5], of_parent[:, 0])
    cache.save_sequence(0, file)
    other = new_cache(device, fmt, latent_dim, **options)
    other.load_sequence("again", file)
    for got, want in zip(read(other, "again", 0, 9), stored, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("latent_dim", [None, 4 * WIDTH], ids=["KV", "latent"])
@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_a_paged_cache_up_to_attention(device, fmt, latent_dim, tmp_path):
    check_contents_forks_and_files(device, fmt, latent_dim, tmp_path / "sequence.safetensors")


def attended(query, k, v, group):
    """The output of the newest tokens (n, Hq, D) over the keys (m, H, D) of a sequence."""
    keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    out = np.zeros((*query.shape[:2], v.shape[-1]))
    for i, row in enumerate(query):
        seen = slice(0, len(keys) - len(query) + i + 1)
        scores = np.einsum("hd,khd->hk", row.astype(np.float64), keys[seen]) / np.sqrt(k.shape[-1])
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[i] = np.einsum("hk,khd->hd", weights, values[seen])
    return out


@pytest.mark.parametrize("fmt", ["nvfp4", "int4"])
def test_keys_that_are_rotated_in_attention(device, fmt):
    """Cached raw they give about what is cached rotated, within what the format loses."""
    outs = []
    for mode in ("normal", "inline"):
        table = kv.rope_table(64, WIDTH, device=device)
        cache = new_cache(device, fmt, rope=table, rope_mode=mode)
        rng = np.random.default_rng(4)
        rows = [
            from_values(rng.standard_normal((9, n, WIDTH)) * 0.5, "bf16")
            for n in (2 * HEADS, HEADS, HEADS)
        ]
        cache.add_sequence(0)
        with cache.forward([0], [9]):
            outs.append(device.to_numpy(cache.attention(0, *map(device.asarray, rows))))
    normal, inline = (out.astype(np.float64) for out in outs)
    assert np.abs(normal - inline).max() > 0
    assert np.linalg.norm(normal - inline) < 0.1 * np.linalg.norm(normal)


def test_slots_that_move_in_pools_of_uneven_slots():
    """A wrapped pool whose heads come first: tokens move one by one, as bytes."""
    raw = [np.zeros((2, 6, HEADS, PAGE, 72), np.uint8) for _ in range(2)]
    k, v = (
        [arrays.transposed(kv.view_as(a[i], "nvfp4"), (0, 2, 1, 3)) for a in raw] for i in (0, 1)
    )
    pool = kv.KVPool.wrap(k, v)
    fill(pool)
    before = contents(pool).reshape(2, 2, 6 * PAGE, HEADS, 72)
    PageMover(pool).move_slots([1, 9, 23], [2, 1, 0])
    want = before.copy()
    want[:, :, [2, 1, 0]] = before[:, :, [1, 9, 23]]
    np.testing.assert_array_equal(contents(pool).reshape(want.shape), want)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_attention_over_latents(device, fmt):
    """Values are the latent part of keys."""
    latent_dim = 4 * WIDTH
    cache, rng = new_cache(device, fmt, latent_dim), np.random.default_rng(5)
    cache.add_sequence(0)
    for count in (6, 1):
        query, latent, key = (
            from_values(rng.standard_normal(shape) * 0.3, "bf16")
            for shape in ((count, 4, 6 * WIDTH), (count, latent_dim), (count, 2 * WIDTH))
        )
        with cache.forward([0], [count]):
            arrays = map(device.asarray, (query, latent, key))
            out = cache.attention_mla(1, *arrays, sm_scale=(6 * WIDTH) ** -0.5)
            device.synchronize()
    parts = read(cache, 0, 0, 7)
    latents, keys = (np.asarray(x[1], np.float32).reshape(7, 1, -1) for x in parts)
    k = np.concatenate([latents, keys], axis=-1)
    want = attended(query.astype(np.float32), k, latents, 4)
    np.testing.assert_allclose(device.to_numpy(out).astype(np.float64), want, atol=0.02)
