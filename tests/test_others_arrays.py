"""Arrays of other libraries that must not be read or written: refused, and with what to do."""

from __future__ import annotations

import numpy as np
import pytest

import kvcupy as kv

SLOTS = np.array([1, 3])


def rows(count=2):
    return np.arange(count * 16, dtype=np.float32).reshape(count, 2, 8)


def caches():
    return np.zeros((4, 2, 8), np.float32), np.zeros((4, 2, 8), np.float32)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


# --- torch tensors without memory ---


@pytest.fixture
def fake_mode(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("fake", range(5))
def test_a_fake_tensor_among_real_ones_that_have_a_plan(torch, fake_mode, fake):
    """Its signature is that of a call that is planned; its address is 0."""
    names = ("key", "value", "k_cache", "v_cache", "slot_mapping")

    def make():
        shapes = ((2, 2, 8), (2, 2, 8), (4, 2, 8), (4, 2, 8))
        return [*(torch.zeros(s) for s in shapes), torch.tensor([0, 1])]

    kv.store_kv(*make())
    arguments = make()
    with fake_mode:
        arguments[fake] = make()[fake]
        with pytest.raises(TypeError, match=rf"^{names[fake]}: .*FakeTensor.* no memory"):
            kv.store_kv(*arguments)
    with pytest.raises(TypeError, match=rf"^{names[fake]}: .*FakeTensor"):
        kv.store_kv(*arguments)
    kv.store_kv(*make())


def test_outputs_cannot_be_allocated_under_a_fake_mode(torch, fake_mode):
    k, v = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    slots = torch.tensor([0, 1])
    kv.gather_kv(k, v, slots)
    with fake_mode, pytest.raises(TypeError, match="FakeTensor"):
        kv.gather_kv(k, v, slots)


def test_tensors_of_transforms_have_no_memory(torch):
    """Functional and vmapped tensors are of class Tensor itself."""
    real = [torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)]
    slots = torch.tensor([0, 1])
    kv.store_kv(*real, slots)
    functional = torch._to_functional_tensor(real[0])
    with pytest.raises(TypeError, match=r"^key: expected an array, got a torch tensor .*memory"):
        kv.store_kv(functional, *real[1:], slots)

    def store(key):
        kv.store_kv(key, *real[1:], slots)
        return key

    with pytest.raises(TypeError, match=r"^key: expected an array, got a torch tensor .*memory"):
        torch.vmap(store)(torch.zeros(3, 2, 2, 8))


def test_meta_tensors_have_no_memory(torch):
    key = torch.zeros(2, 2, 8, device="meta")
    with pytest.raises(TypeError, match=r"^key: .* on meta.*no memory"):
        kv.store_kv(key, rows(), *caches(), SLOTS)


# --- gradients ---


@pytest.mark.parametrize("kind", ["leaf", "inside a graph", "parameter"])
def test_a_tensor_that_needs_a_gradient(torch, kind):
    """Refused while gradients are recorded, also where the same shapes are planned."""
    leaf = torch.zeros(2, 2, 8, requires_grad=True)
    key = {"leaf": leaf, "inside a graph": leaf * 2, "parameter": torch.nn.Parameter(leaf)}[kind]
    others = [torch.zeros(2, 2, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)]
    slots = torch.tensor([0, 1])
    kv.store_kv(key.detach(), *others, slots)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^key: .*no_grad\(\).*\.detach\(\)") as caught:
            kv.store_kv(key, *others, slots)
        assert "no backward" in str(caught.value)
    with torch.no_grad():
        kv.store_kv(key, *others, slots)
    with torch.inference_mode():
        kv.store_kv(key, *others, slots)


def test_a_fallback_on_a_stream_of_its_own(torch, monkeypatch):
    """The thread of a stream records gradients, whatever the caller's does."""
    device = kv.device("host")
    monkeypatch.setattr(kv.config, "fallback", "warn")
    monkeypatch.setattr(device, "load", lambda _: (_ for _ in ()).throw(kv.CompileError("none")))
    kv.ops.call.forget()
    key = torch.ones(2, 2, 8, requires_grad=True)
    k, v = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    stream = device.stream()
    with torch.no_grad():
        kv.store_kv(key, key, k, v, torch.tensor([0, 1]), stream=stream)
    stream.synchronize()
    assert bool((k[:2] == 1).all())
    kv.ops.call.forget()


def test_attention_does_not_detach_in_silence(torch):
    query = torch.zeros(1, 2, 8, requires_grad=True)
    cache = torch.zeros(2, 4, 2, 8)
    table, lengths = torch.zeros((1, 2), dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^query: .*no backward"):
        kv.paged_attention(query, cache, cache.clone(), table, lengths)


def test_a_paged_cache_refuses_before_anything_is_written(torch):
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=2, num_kv_heads=2, head_dim=8, num_pages=2, page_size=4,
        dtype="fp32", device="host",
    )  # fmt: skip
    cache.add_sequence(0)
    query, key = torch.ones(1, 2, 8), torch.ones(1, 2, 8, requires_grad=True)
    with cache.forward([0], [1]):
        with pytest.raises(TypeError, match=r"^key: .*no backward"):
            cache.attention(0, query, key, query)
        assert not cache.pool.k(0).any() and not cache.pool.v(0).any()
        with torch.no_grad():
            cache.attention(0, query, key, query)
    assert cache.pool.k(0).any()


# --- read-only, immutable, masked ---


def test_read_only_outputs():
    k, v = caches()
    k.flags.writeable = False
    with pytest.raises(ValueError, match=r"^k_cache: expected a writable array.*\.copy\(\)"):
        kv.store_kv(rows(), rows(), k, v, SLOTS)
    kv.gather_kv(k, v, SLOTS)


class Immutable:
    """As a JAX array: DLPack says nothing of it, `np.asarray` is a view that cannot be written."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __array__(self, dtype=None, copy=None):
        view = self._array.view()
        view.flags.writeable = False
        return view


class Writable(Immutable):
    def __array__(self, dtype=None, copy=None):
        return self._array


def test_an_exporter_whose_arrays_are_immutable():
    k, v = caches()
    with pytest.raises(ValueError, match=r"^v_cache: expected a writable array.*immutable"):
        kv.store_kv(rows(), rows(), k, Immutable(v), SLOTS)
    assert not k.any() and not v.any()
    with pytest.raises(ValueError, match=r"^k_out: expected a writable array"):
        kv.gather_kv(k, v, SLOTS, k_out=Immutable(rows()), v_out=rows())
    with pytest.raises(ValueError, match=r"^dst: expected a writable array"):
        kv.device("host").copy(Immutable(k), v)
    kv.store_kv(Immutable(rows()), rows(), Writable(k), v, Immutable(SLOTS))
    np.testing.assert_array_equal(k[SLOTS], rows())


def test_jax_arrays_are_read_and_never_written():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "cpu":
        pytest.skip("arrays of the host")
    source = np.zeros((4, 2, 8), np.float32)
    target = jax.device_put(source)
    alias = target
    for k in (target, jax.numpy.zeros((4, 2, 8), jax.numpy.float32)):
        with pytest.raises(ValueError, match=r"^k_cache: expected a writable .*interop\.jax"):
            kv.store_kv(rows(), rows(), k, caches()[1], SLOTS)
    assert not source.any() and not np.asarray(alias).any()
    k, v = caches()
    kv.store_kv(jax.numpy.asarray(rows()), rows(), k, v, SLOTS)
    np.testing.assert_array_equal(k[SLOTS], rows())


def test_masked_arrays():
    key = np.ma.masked_array(rows(), rows() > 3)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^key: .*masked array.*filled\("):
            kv.store_kv(key, rows(), *caches(), SLOTS)
    kv.store_kv(key.data, rows(), *caches(), SLOTS)


# --- what to do about it ---


def test_a_list_of_slots_says_how_to_make_it_an_array():
    with pytest.raises(TypeError, match=r"^slot_mapping: .*list.*np\.asarray"):
        kv.store_kv(rows(), rows(), *caches(), [1, 3])


def test_rows_that_are_not_contiguous():
    key = np.zeros((2, 8, 2), np.float32).swapaxes(1, 2)
    with pytest.raises(ValueError, match=r"^key: .*contiguous last.*\.contiguous\(\)"):
        kv.store_kv(key, rows(), *caches(), SLOTS)


def test_double_precision():
    with pytest.raises(TypeError, match=r"^key: .*float64.*\.astype\(np\.float32\)"):
        kv.store_kv(rows().astype(np.float64), rows(), *caches(), SLOTS)
    with pytest.raises(TypeError, match=r"^slot_mapping: .*float64.*\.astype\(np\.int64\)"):
        kv.store_kv(rows(), rows(), *caches(), SLOTS.astype(np.float64))


def test_empty_outputs_may_have_no_strides():
    """CuPy gives arrays without elements strides of 0."""
    empty = np.lib.stride_tricks.as_strided(np.zeros((0, 2, 8), np.float32), strides=(0, 0, 0))
    k, v = caches()
    none = np.zeros(0, np.int64)
    got = kv.gather_kv(k, v, none, k_out=empty, v_out=empty.copy())
    assert got[0].shape == (0, 2, 8)
    out = np.lib.stride_tricks.as_strided(np.zeros((0, 2, 8), np.float32), strides=(0, 0, 0))
    lse = np.zeros((0, 2), np.float32)
    kv.merge_states(out.copy(), lse, out.copy(), lse.copy(), out=out, lse_out=lse.copy())


@pytest.mark.parametrize(("name", "meant"), [("gpu", "cuda"), ("cpu:0", None), ("tpu", None)])
def test_names_of_devices_that_others_use(name, meant):
    with pytest.raises(ValueError, match=rf"^device: .*got '{name}'") as caught:
        kv.device(name)
    assert str(caught.value).endswith(f'did you mean "{meant}"?') == (meant is not None)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"window": -1}, r"^window: .*got -1; None is no window"),
     ({"window": 0}, r"^window: .*got 0; None is no window"),
     ({"logits_soft_cap": 0.0}, r"^logits_soft_cap: .*got 0.0; None is no cap"),
     ({"window": -7}, r"^window: expected None or at least 1, got -7$")],
)  # fmt: skip
def test_what_others_take_for_off(options, message):
    cache, table = np.zeros((2, 4, 2, 8), np.float32), np.zeros((1, 2), np.int32)
    with pytest.raises(ValueError, match=message):
        kv.paged_attention(
            np.zeros((1, 2, 8), np.float32), cache, cache, table, np.ones(1, np.int32), **options
        )


def test_a_format_that_is_none_lists_those_there_are():
    for call in (
        lambda: kv.KVPool(2, 2, 1, 1, 8, dtype="fp8", device="host"),
        lambda: kv.gather_kv(*caches(), SLOTS, dtype="fp8"),
    ):
        with pytest.raises(TypeError, match=r"^dtype: .*bf16, fp8_e4m3, fp8_e5m2, int8.*'fp8'"):
            call()


def test_rows_without_elements():
    empty = np.zeros((2, 2, 0), np.float32)
    cache = np.zeros((4, 2, 0), np.float32)
    message = r": expected a width of at least 1, got \(\d, 2, 0\) fp32"
    with pytest.raises(ValueError, match="^key" + message):
        kv.store_kv(empty, empty, cache, cache.copy(), SLOTS)
    with pytest.raises(ValueError, match="^k_out" + message):
        kv.gather_kv(cache, cache.copy(), SLOTS, k_out=empty, v_out=empty.copy())


def test_pools_that_there_is_no_memory_for():
    with pytest.raises(MemoryError, match=r"^num_pages: .*got 1000000000000 pages of .* bytes"):
        kv.KVPool(10**12, 16, 32, 8, 128, device="host")
    with pytest.raises(MemoryError, match=r"^num_pages: .*got 10000000000000"):
        kv.PageAllocator(10**13)


def test_settings_that_there_are_not():
    with pytest.raises(AttributeError, match="no setting 'fallbak'") as raised:
        kv.config.fallbak = "error"
    assert raised.value.name == "fallbak" and raised.value.obj is kv.config  # "did you mean"
    assert f"fallback={kv.config.fallback!r}" in repr(kv.config)
    kv.config.fallback = kv.config.fallback


def test_operations_wait_for_the_producers_of_arrays(monkeypatch):
    from kvcupy.ops import call as op_call

    asked = []
    monkeypatch.setattr(op_call, "STREAMED_TYPES", {object})
    monkeypatch.setattr(
        op_call, "wait_for_producers", lambda arrays, on: asked.append((arrays, on))
    )
    k, v = caches()
    kv.store_kv(rows(), rows(), k, v, SLOTS)
    ((arrays, on),) = asked
    assert any(a is k for a in arrays) and on is kv.device("host").as_stream(None)


@pytest.mark.parametrize("make", ["empty", "zeros", "empty_pinned"])
def test_a_dtype_that_is_none_lists_the_formats(device, make):
    with pytest.raises(TypeError, match=r"dtype: expected one of .*fp8_e4m3, .*, got 'fp8'"):
        getattr(device, make)((2, 2), "fp8")


def test_operations_see_changes_in_place(torch, lenient_host):
    """A tensor that was transposed in place has another signature."""
    key = torch.arange(8.0).reshape(1, 2, 4)
    cache, slots = torch.zeros(4, 2, 4), torch.tensor([1])
    for _ in range(5):
        kv.store_kv(key, key, cache, torch.zeros(4, 2, 4), slots)
    assert torch.equal(cache[1], key[0])
    key.transpose_(1, 2)
    with pytest.raises(ValueError, match="key"):
        kv.store_kv(key, key, cache, torch.zeros(4, 2, 4), slots)
    key.transpose_(1, 2)
    kv.store_kv(key, key, cache, torch.zeros(4, 2, 4), torch.tensor([2]))
    assert torch.equal(cache[2], key[0])
    prepared = kv.bind(kv.store_kv, kv.vary(key), key, cache, torch.zeros(4, 2, 4), slots)
    for factor in (2, 3, 4):
        prepared(key=factor * key)
    assert torch.equal(cache[1], 4 * key[0])
    with pytest.raises(ValueError, match="key"):
        prepared(key=torch.zeros(1, 4, 2).transpose(1, 2)[:, :1])
