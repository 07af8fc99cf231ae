"""The storage backend of SGLang's HiCache moves pages of host pools, and answers for every page."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from engine_interfaces import SGLANG, adapter, store_url  # noqa: E402

PAGE, PAGES, LAYERS, HEADS, WIDTH = 4, 8, 2, 2, 16


@pytest.fixture
def sglang():
    """SGLang's classes, with `Storage`."""
    with adapter("sglang_hicache", SGLANG) as module:
        import sglang.srt.mem_cache.hicache_storage as interface

        yield SimpleNamespace(Storage=module.KvcupyStorage, **vars(interface))


class MHAHostPool:
    """A host pool of SGLang, layer first or page first; a page is 2 * LAYERS or 2 pieces."""

    page_size = PAGE

    def __init__(self, seed, layout="page_first", dtype=torch.bfloat16):
        rows = PAGE * PAGES
        shape = (2, LAYERS, rows, HEADS, WIDTH)
        if layout == "page_first":
            shape = (2, rows, LAYERS, HEADS, WIDTH)
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer = torch.randint(0, 100, shape, generator=generator).to(dtype)
        self.layout, self.dtype = layout, dtype

    def get_page_buffer_meta(self, indices):
        """Return addresses and sizes of the pieces of each page."""
        pointers = []
        for first in indices.tolist()[::PAGE]:
            if self.layout == "page_first":
                parts = [self.kv_buffer[i, first] for i in range(2)]
            else:
                parts = [self.kv_buffer[i, j, first] for j in range(LAYERS) for i in range(2)]
            pointers += [part.data_ptr() for part in parts]
        size = self.page(0).nbytes // (2 if self.layout == "page_first" else 2 * LAYERS)
        return pointers, [size] * len(pointers)

    def page(self, number):
        rows = slice(number * PAGE, (number + 1) * PAGE)
        page_first = self.layout == "page_first"
        return self.kv_buffer[:, rows] if page_first else self.kv_buffer[:, :, rows]


class MLAHostPool(MHAHostPool):
    pass


def config(url, *, rank=0, size=1, is_mla=False, model="m", weights="", **options):
    extra = {
        "backend_name": "kvcupy", "module_path": "kvcupy.interop.sglang_hicache",
        "class_name": "KvcupyStorage", "interface_v1": 1, "stores": [url],
        "model": weights, **options,
    }  # fmt: skip
    return SimpleNamespace(
        tp_rank=rank, tp_size=size, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
        dcp_rank=0, dcp_size=1, is_mla_model=is_mla, model_name=model, extra_config=extra,
    )  # fmt: skip


class Engines:
    """Storages of ranks and engines on one store."""

    def __init__(self, sglang):
        self.sglang, self.url, self._made = sglang, store_url(), []

    def storage(self, pool, **options):
        storage = self.sglang.Storage(config(self.url, **options))
        storage.register_mem_pool_host(pool)
        self._made.append(storage)
        return storage

    def close(self):
        for storage in self._made:
            storage.close()


@pytest.fixture
def engines(sglang):
    engines = Engines(sglang)
    yield engines
    engines.close()


def rows_of(*pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


KEYS = [f"{i:064x}" for i in range(5)]


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_move_between_engines_by_index(engines, layout):
    source, target = MHAHostPool(1, layout), MHAHostPool(2, layout)
    one, other = engines.storage(source), engines.storage(target)
    assert one.batch_set_v1(KEYS[:3], rows_of(1, 6, 3)) == [True] * 3
    assert one.batch_set_v1(KEYS[:1], rows_of(0)) == [True]  # known
    assert (other.batch_exists(KEYS), other.batch_exists(KEYS[1:4])) == (3, 2)
    assert (other.exists(KEYS[0]), other.exists(KEYS[4])) == (True, False)
    before = target.kv_buffer.clone()
    assert other.batch_get_v1(KEYS[:4], rows_of(0, 5, 2, 7)) == [True, True, True, False]
    for page in range(PAGES):
        wanted = {0: source.page(1), 5: source.page(6), 2: source.page(3)}.get(page)
        if wanted is None:
            rows = slice(page * PAGE, (page + 1) * PAGE)
            wanted = before[:, rows] if layout == "page_first" else before[:, :, rows]
        assert torch.equal(target.page(page), wanted)


@pytest.mark.parametrize(
    "other",
    [{"model": "n"}, {"weights": "n"}, {"rank": 1, "size": 2}, {"size": 2}],
    ids=str,
)
def test_other_ranks_and_engines_do_not_find_pages(engines, other):
    engines.storage(MHAHostPool(1)).batch_set_v1(KEYS[:1], rows_of(1))
    assert engines.storage(MHAHostPool(1), **other).batch_exists(KEYS[:1]) == 0


def test_other_layouts_and_dtypes_do_not_find_pages(engines):
    engines.storage(MHAHostPool(1)).batch_set_v1(KEYS[:1], rows_of(1))
    for pool in (MHAHostPool(1, "layer_first"), MHAHostPool(1, dtype=torch.float16)):
        assert engines.storage(pool).batch_exists(KEYS[:1]) == 0


def test_ranks_share_the_pages_of_mla_but_not_states_and_heads(engines):
    name = engines.sglang.PoolName
    ranks = []
    for rank in range(2):
        ranks.append(engines.storage(MLAHostPool(rank), rank=rank, size=2, is_mla=True))
        ranks[rank].register_mem_host_pool_v2(MLAHostPool(2), name.MAMBA)
        ranks[rank].register_mem_host_pool_v2(MHAHostPool(2), "draft")
        ranks[rank].register_mem_host_pool_v2(MLAHostPool(2), name.INDEXER)
    transfers = [
        engines.sglang.PoolTransfer(pool, host_indices=rows_of(1), keys=KEYS[:1])
        for pool in (name.MAMBA, "draft", name.INDEXER)
    ]
    ranks[0].batch_set_v1(KEYS[:1], rows_of(1))
    ranks[0].batch_set_v2(transfers)
    assert ranks[1].batch_exists(KEYS) == 1
    found = ranks[1].batch_get_v2(transfers)
    assert list(found.values()) == [[False], [False], [True]]


def test_prefixes_end_where_every_pool_can_resume(engines):
    kinds = engines.sglang
    storage = engines.storage(MHAHostPool(1))
    for name in ("states", "indexer"):
        storage.register_mem_host_pool_v2(MHAHostPool(2), name)
    storage.batch_set_v1(KEYS[:4], rows_of(0, 1, 2, 3))

    def put(name, *numbers):
        transfer = kinds.PoolTransfer(
            name, host_indices=rows_of(*numbers), keys=[KEYS[n] for n in numbers]
        )
        assert storage.batch_set_v2([transfer]) == {name: [True] * len(numbers)}

    def found(*transfers):
        result = storage.batch_exists_v2(KEYS, list(transfers))
        return result.kv_hit_pages, result.restorable_prefix_pages, result.extra_pool_hit_pages

    trailing = kinds.PoolTransfer(
        "states", keys=KEYS[:2], hit_policy=kinds.PoolHitPolicy.TRAILING_PAGES
    )
    every = kinds.PoolTransfer("indexer")
    assert found() == (4, [1, 2, 3, 4], {"kv": 4})
    assert found(trailing) == (0, [], {"kv": 4})
    put("states", 1, 2)
    assert found(trailing) == (3, [3], {"kv": 4, "states": 3})
    put("indexer", 0, 1)
    assert found(every) == (2, [1, 2], {"kv": 4, "indexer": 2})
    assert found(trailing, every)[:2] == (0, [])
    put("indexer", 2)
    assert found(trailing, every) == (3, [3], {"kv": 4, "states": 3, "indexer": 3})
    groups = kinds.PoolTransfer("unknown", hit_policy=kinds.PoolHitPolicy.BLOCK_GROUPS)
    assert found(groups) == (4, [1, 2, 3, 4], {"kv": 4})


def test_what_does_not_fit_is_missing(engines, monkeypatch):
    storage = engines.storage(MHAHostPool(1))
    assert storage.batch_get_v1(KEYS[:2], rows_of(1)) == [False] * 2
    assert storage.batch_set_v1(KEYS[:1], None) == [False]
    unknown = engines.sglang.PoolTransfer("unknown", host_indices=rows_of(1), keys=KEYS[:1])
    assert storage.batch_set_v2([unknown]) == storage.batch_get_v2([unknown])
    assert storage.batch_get_v1([], rows_of(1)[:0]) == []

    def broken(*arguments):
        raise RuntimeError("the store broke")

    monkeypatch.setattr(storage._store, "get", broken)
    assert storage.batch_get_v1(KEYS[:1], rows_of(1)) == [False]
    assert storage.clear() is False


def test_a_cache_of_8_bits_must_be_named(engines):
    pool = MHAHostPool(1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="8 bits"):
        engines.storage(pool)
    engines.storage(pool, weights="fp8_e4m3")


def test_wrong_options_are_refused(sglang):
    bad = config("file:x")
    del bad.extra_config["stores"]
    with pytest.raises(TypeError, match="stores: expected a list of URLs"):
        sglang.Storage(bad)
    with pytest.raises(ValueError, match='expected "interface_v1": 1'):
        sglang.Storage(config(store_url(), interface_v1=0))
    with pytest.raises(TypeError, match="colour"):
        sglang.Storage(config(store_url(), colour=1)).register_mem_pool_host(MHAHostPool(1))
