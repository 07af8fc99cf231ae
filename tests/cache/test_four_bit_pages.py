"""Pages of the four-bit formats: pools, transfers, tiers, files and the paged cache."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from four_bit_cases import FOUR_BIT
from helpers import from_values, full_only
from tiered_cases import MemoryStore

import kvcupy as kv
from kvcupy import arrays, formats
from kvcupy.cache.identity import PoolIdentity
from kvcupy.cache.paged.moves import PageMover
from kvcupy.reference.attention import rotate_keys

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
@pytest.mark.parametrize("fmt", [*FOUR_BIT, "nvfp4+hadamard"])
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


# Pools ---------------------------------------------------------------------------------------


def test_wrapped_pools_take_the_rotation_of_their_arrays(device):
    def layers(encoding):
        return [device.zeros((6, PAGE, 1, WIDTH), encoding) for _ in range(3)]

    pool = kv.KVPool.wrap(layers("nvfp4+hadamard"), layers("nvfp4"))
    assert [str(part(2).encoding) for part in (pool.k, pool.v)] == ["nvfp4+hadamard", "nvfp4"]
    assert pool.stored_as == f"nvfp4+hadamard:{WIDTH},nvfp4"
    with pytest.raises(ValueError, match=r"k\[1\]: expected 128 rotated elements"):
        kv.KVPool.wrap([*layers("nvfp4+hadamard")[:1], *layers("nvfp4")[1:]], layers("nvfp4"))


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


# Between processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", full_only("normal"), "inline"])
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4+hadamard"])
def test_latents(device, fmt, mode):
    """The latent alone is rotated: keys of the rope part may still be raw."""
    latent_dim, rng = 4 * WIDTH, np.random.default_rng(5)
    table = None if mode == "none" else kv.rope_table(64, 2 * WIDTH, device=device)
    cache = new_cache(device, fmt, latent_dim, rope=table, rope_mode=mode)
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
    assert np.isfinite(device.to_numpy(out).astype(np.float32)).all()
    parts = read(cache, 0, 0, 7)
    latents, keys = (np.asarray(x[1], np.float32).reshape(7, 1, -1) for x in parts)
    query = query.astype(np.float64)
    if mode != "none":  # the query of the last token, and where they are raw all keys
        angles = device.to_numpy(table)
        query = rotate_keys(query, angles, np.array([6]), start=latent_dim)
        if mode == "inline":
            keys = rotate_keys(keys.astype(np.float64), angles, np.arange(7))
    k = np.concatenate([latents, keys], axis=-1)
    want = attended(query, k, latents, 4)
    np.testing.assert_allclose(device.to_numpy(out).astype(np.float64), want, atol=0.02)


def test_rope_in_attention_is_refused(device):
    """Keys would be rotated by their positions after they were stored rotated."""
    table = kv.rope_table(64, WIDTH, device=device)
    inline = {"rope": table, "rope_mode": "inline"}
    for refused, allowed in (
        (("nvfp4+hadamard", None), ("nvfp4", None)),
        (("bf16", "nvfp4+hadamard"), ("bf16", "nvfp4")),
    ):
        with pytest.raises(ValueError, match=r'^rope_mode: expected "normal" or "none"'):
            new_cache(device, refused[0], **inline, **demoted_to(refused[1]))
        new_cache(device, allowed[0], **inline, **demoted_to(allowed[1]))


def demoted_to(encoding):
    return {"demotion": kv.Demotion(encoding, recent=4)} if encoding else {}
