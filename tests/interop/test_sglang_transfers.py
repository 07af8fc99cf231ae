"""SGLang's transfers, compared bit by bit with its addressing as index expressions of torch."""

from __future__ import annotations

import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

from peers import ints  # noqa: E402

from kvcupy.interop import sglang  # noqa: E402

LAYERS, HEADS, PAGE = 3, 2, 4
SRC, DST = [7, 2, 11, 3, -1], [0, 9, 8, 5, 4]
KEPT = slice(-1)  # a pair with a negative row is skipped


def random_bytes(*shape, place, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(place, torch.uint8)


def table(layers, dtype):
    """Return the addresses of layers, on their device."""
    pointers = torch.tensor([x.data_ptr() for x in layers], dtype=torch.int64)
    return pointers.to(layers[0].device).view(dtype)


def layer_first(place, item, seed):
    """Return K and V by layers, each layer between rows that must not change."""
    whole = random_bytes(2, LAYERS, 12 + 2, item, place=place, seed=seed)
    return whole, [[whole[part, layer, 1:13] for layer in range(LAYERS)] for part in range(2)]


def by_argument(sides, mla):
    """Return the arguments of both sides: K of the source and target, then V."""
    return [side[part] for part in range(1 if mla else 2) for side in sides]


@pytest.mark.parametrize("dtype", [torch.uint64, torch.int64])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("item", [48, 6, 1024])
@pytest.mark.parametrize("mla", [False, True])
def test_all_layers_between_tables(place, mla, item, index_dtype, dtype):
    (src, sources), (dst, targets) = (layer_first(place, item, seed) for seed in (1, 2))
    expected, kept = dst.clone(), src.clone()
    parts = 1 if mla else 2
    rows = [torch.tensor(x[KEPT], device=place) + 1 for x in (SRC, DST)]
    expected[:parts, :, rows[1]] = src[:parts, :, rows[0]]
    indices = [ints(x, place, index_dtype) for x in (SRC, DST)]
    tables = by_argument([[table(x, dtype) for x in side] for side in (sources, targets)], mla)
    name = "transfer_kv_all_layer" + "_mla" * mla
    getattr(sglang, name)(*tables, *indices, item, LAYERS)
    kv.default_device().synchronize()
    assert torch.equal(dst, expected) and torch.equal(src, kept)
    before = dst.clone()
    getattr(sglang, name)(*tables, *[x[:0] for x in indices], item, LAYERS)
    assert torch.equal(dst, before)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("item", [48, 6])
@pytest.mark.parametrize("mla", [False, True])
def test_all_layers_to_page_first(place, mla, item, index_dtype):
    """Rows of dst have a layer more than are copied."""
    _, sources = layer_first(place, item, 1)
    dst = random_bytes(2, 10, LAYERS + 1, item, place=place, seed=2)
    expected, version = dst.clone(), dst._version
    for part in range(1 if mla else 2):
        for layer in range(LAYERS):
            expected[part, DST[KEPT], layer] = sources[part][layer][SRC[KEPT]]
    tables = [table(x, torch.uint64) for x in sources]
    name = "transfer_kv_all_layer" + "_mla" * mla + "_lf_pf"
    indices = [ints(x, place, index_dtype) for x in (SRC, DST)]
    sizes = item, (LAYERS + 1) * item, LAYERS
    getattr(sglang, name)(*by_argument((tables, dst), mla), *indices, *sizes, block_quota=1)
    assert torch.equal(dst, expected) and dst._version > version


def page_head(place, item, seed):
    """Return K and V, (pages, heads, page_size, layers, head_dim)."""
    return random_bytes(2, 3, HEADS, PAGE, LAYERS, item // HEADS, place=place, seed=seed)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("item", [48, 8, 6])
def test_all_layers_to_page_head(place, item, index_dtype):
    """Of 8 bytes a head has 4, of 6 it has 3."""
    _, sources = layer_first(place, item, 1)
    dst = page_head(place, item, 2)
    expected = dst.clone()
    for part in range(2):
        for s, d in zip(SRC[KEPT], DST[KEPT], strict=True):
            for layer in range(LAYERS):
                row = sources[part][layer][s].view(HEADS, -1)
                expected[part, d // PAGE, :, d % PAGE, layer] = row
    indices = [ints(x, place, index_dtype) for x in (SRC, DST)]
    tables = [table(x, torch.uint64) for x in sources]
    sglang.transfer_kv_all_layer_lf_ph(
        *by_argument((tables, dst), False), *indices, item, LAYERS * item, LAYERS, PAGE, HEADS
    )  # fmt: skip
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("item", [48, 8, 6])
def test_a_layer_from_page_head(place, item, index_dtype):
    src, dst = page_head(place, item, 1), random_bytes(2, 10, item, place=place, seed=2)
    expected = dst.clone()
    for s, d in zip(SRC[KEPT], DST[KEPT], strict=True):
        expected[:, d] = src[:, s // PAGE, :, s % PAGE, 2].flatten(1)
    indices = [ints(x, place, index_dtype) for x in (SRC, DST)]
    sglang.transfer_kv_per_layer_ph_lf(
        *by_argument((src, dst), False), *indices, 2, item, LAYERS * item, PAGE, HEADS
    )  # fmt: skip
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("indices_on", ["cpu", None])
def test_rows_of_several_tensors(place, indices_on):
    """Of two sizes: K and V of other widths."""
    (src, sources), (dst, targets) = (layer_first(place, 24, seed) for seed in (1, 2))
    (wide, more), (wide_dst, more_targets) = (layer_first(place, 40, seed) for seed in (3, 4))
    expected = [dst.clone(), wide_dst.clone()]
    rows = [torch.tensor(x[KEPT], device=place) + 1 for x in (SRC, DST)]
    expected[0][0][:, rows[1]] = src[0][:, rows[0]]
    expected[1][1][:, rows[1]] = wide[1][:, rows[0]]
    indices = [ints(x, indices_on or place) for x in (SRC, DST)]
    layers = [*sources[0], *more[1]], [*targets[0], *more_targets[1]]
    sglang.transfer_kv_direct(*layers, *indices, PAGE)
    assert torch.equal(dst, expected[0]) and torch.equal(wide_dst, expected[1])


PAGES = [2, 0, -1], [1, 2, 0]


def tokens_of(pages, place, dtype):
    return ints([p * PAGE + i for p in pages for i in range(PAGE)], place, dtype)


@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("indices_on", ["cpu", None])
@pytest.mark.parametrize("mla", [False, True])
def test_pages_of_page_first_direct_memory(place, mla, indices_on, index_dtype):
    """One layer on the way to slots, and all layers on the way from them."""
    parts = 1 if mla else 2
    host = random_bytes(parts, 3, LAYERS, PAGE, HEADS, 12, place=place, seed=1)
    _, layers = layer_first(place, 24, 2)
    slots = [[x.clone() for x in part] for part in layers[:parts]]
    indices = [tokens_of(x, indices_on or place, index_dtype) for x in PAGES]
    expected = [[x.clone() for x in part] for part in slots]
    for s, d in zip(PAGES[0][:2], PAGES[1][:2], strict=True):
        for part in range(parts):
            expected[part][1].view(3, PAGE, -1)[d] = host[part, s, 1].flatten(1)
    sglang.transfer_kv_per_layer_direct_pf_lf(
        list(host), [part[1] for part in slots], *indices, 1, PAGE
    )
    for part in range(parts):
        assert all(torch.equal(x, y) for x, y in zip(slots[part], expected[part], strict=True))
    expected_host = host.clone()
    for s, d in zip(PAGES[0][:2], PAGES[1][:2], strict=True):
        for part in range(parts):
            for layer in range(LAYERS):
                rows = slots[part][layer].view(3, PAGE, HEADS, -1)[s]
                expected_host[part, d, layer] = rows
    sources = [x for part in slots for x in part]
    sglang.transfer_kv_all_layer_direct_lf_pf(sources, list(host), *indices, PAGE)
    assert torch.equal(host, expected_host)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("src_layers", {"src_layers": torch.zeros(2, dtype=torch.int64)}),
        ("dst_layers", {"dst_layers": torch.zeros(3)}),
        ("src_indices", {"src_indices": torch.zeros(1)}),
        ("dst_indices", {"dst_indices": torch.zeros(2, dtype=torch.int64)}),
        ("item_size", {"item_size": 0}),
        ("num_layers", {"num_layers": 0}),
        ("block_quota", {"block_quota": 0}),
    ],
)
def test_an_argument_of_all_layers_is_named(place, name, changes):
    dst, targets = layer_first(place, 24, 2)
    layers, row = table(targets[0], torch.uint64), ints([1], place)
    arguments = {"src_layers": layers, "dst_layers": layers, "src_indices": row, "dst_indices": row,
                 "item_size": 24, "num_layers": LAYERS}  # fmt: skip
    changes = {n: x.to(place) if isinstance(x, torch.Tensor) else x for n, x in changes.items()}
    before = dst.clone()
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        sglang.transfer_kv_all_layer_mla(**{**arguments, **changes})
    assert torch.equal(dst, before)


def test_an_argument_of_page_head_and_of_pages_is_named(place):
    _, sources = layer_first(place, 24, 1)
    dst = page_head(place, 24, 2)
    tables = [table(x, torch.uint64) for x in sources]
    arrays, row = by_argument((tables, dst), False), ints([1], place)
    for name, sizes in (
        ("head_num", (24, LAYERS * 24, LAYERS, PAGE, 0)),
        ("item_size", (24, LAYERS * 24, LAYERS, PAGE, 5)),
        ("dst_layout_dim", (24, 2 * 24, LAYERS, PAGE, HEADS)),
        ("page_size", (24, LAYERS * 24, LAYERS, 0, HEADS)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            sglang.transfer_kv_all_layer_lf_ph(*arrays, row, row, *sizes)
    host = random_bytes(1, 3, LAYERS, PAGE, 24, place=place, seed=1)
    pages = tokens_of([1], place, torch.int64)
    for name, arguments in (
        (r"src_ptrs\[0\]", (list(host), [sources[0][0]], pages, pages, 0, 2)),
        (r"dst_ptrs", ([host[0], host[0]], [sources[0][0]], pages, pages, 0, PAGE)),
        (r"dst_ptrs\[0\]", (list(host), [host[0]], pages, pages, 0, PAGE)),
        ("layer_id", (list(host), [sources[0][0]], pages, pages, LAYERS, PAGE)),
        ("src_indices", (list(host), [sources[0][0]], pages[:3], pages[:3], 0, PAGE)),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            sglang.transfer_kv_per_layer_direct_pf_lf(*arguments)
