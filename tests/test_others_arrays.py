"""Arrays of other libraries that must not be read or written: refused, and with what to do."""

from __future__ import annotations

import numpy as np
import pytest

import kvcupy as kv
from kvcupy.arrays import probe_arguments, tensor_matcher

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


def test_outputs_cannot_be_allocated_under_a_fake_mode(torch, fake_mode):
    k, v = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    slots = torch.tensor([0, 1])
    kv.gather_kv(k, v, slots)
    with fake_mode, pytest.raises(TypeError, match="FakeTensor"):
        kv.gather_kv(k, v, slots)
    k, v = torch.zeros(4, 3, 24), torch.zeros(4, 3, 24)  # of a shape that none had before
    with fake_mode, pytest.raises(TypeError, match="FakeTensor"):
        kv.gather_kv(k, v, slots)
    assert type(kv.gather_kv(k, v, slots)[0]) is torch.Tensor


def test_tensors_of_transforms_have_no_memory(torch):
    """Such as `vmap`, whose tensors are of class Tensor itself."""
    real = [torch.zeros(2, 2, 8), torch.zeros(2, 2, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)]
    slots = torch.tensor([0, 1])
    kv.store_kv(*real, slots)

    def store(key):
        kv.store_kv(key, *real[1:], slots)
        return key

    with pytest.raises(TypeError, match=r"^key: expected an array, got a torch tensor .*memory"):
        torch.vmap(store)(torch.zeros(3, 2, 2, 8))


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
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^key: .*no_grad"):
            kv.store_kv(key, *others, slots)


# --- tensors like the arguments of an earlier call ---


UNLIKE = {
    "dtype": lambda torch: torch.zeros(2, 8, dtype=torch.float64),
    "strides": lambda torch: torch.zeros(8, 2).t(),
    "gradient": lambda torch: torch.zeros(2, 8, requires_grad=True),
    "library": lambda torch: np.zeros((2, 8), np.float32),
    "none": lambda torch: None,
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_what_is_unlike_earlier_arguments(torch, kind):
    def make():
        return torch.zeros(2, 8)

    matcher = tensor_matcher((make(), None, make()))
    alike = (make(), None, make())
    assert matcher.addresses(alike) == probe_arguments(alike)[0]
    other = UNLIKE[kind](torch)
    assert matcher.addresses((other, None, make())) is None
    assert matcher.addresses((make(), None, other)) is None
    if other is not None:
        assert matcher.addresses((make(), other, make())) is None


def test_tensors_that_come_twice(torch):
    x, y = torch.zeros(2, 8), torch.zeros(2, 8)
    twice, once = tensor_matcher((x, x, y)), tensor_matcher((x, y))
    assert twice.addresses((y, y, x)) == probe_arguments((y, y, x))[0]
    assert twice.addresses((x, y, x)) is None
    assert once.addresses((x, x)) is None


# --- read-only, immutable, masked ---


def test_read_only_outputs():
    k, v = caches()
    k.flags.writeable = False
    with pytest.raises(ValueError, match=r"^k_cache: expected a writable array.*\.copy\(\)"):
        kv.store_kv(rows(), rows(), k, v, SLOTS)
    kv.gather_kv(k, v, SLOTS)


class Immutable:
    """As a JAX array: DLPack does not say so, `np.asarray` is a view that cannot be written."""

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
        with pytest.raises(ValueError, match=r"^k_cache: expected a writable .*as JAX's are"):
            kv.store_kv(rows(), rows(), k, caches()[1], SLOTS)
    assert not source.any() and not np.asarray(alias).any()
    k, v = caches()
    kv.store_kv(jax.numpy.asarray(rows()), rows(), k, v, SLOTS)
    np.testing.assert_array_equal(k[SLOTS], rows())


# --- what to do about it ---


def store(**changes):
    k, v = caches()
    arguments = {"key": rows(), "value": rows(), "k_cache": k, "v_cache": v, "slot_mapping": SLOTS}
    kv.store_kv(**{**arguments, **changes})


def attend(**options):
    cache, table = np.zeros((2, 4, 2, 8), np.float32), np.zeros((1, 2), np.int32)
    query = np.zeros((1, 2, 8), np.float32)
    kv.paged_attention(query, cache, cache, table, np.ones(1, np.int32), **options)


NARROW = np.zeros((4, 2, 0), np.float32)
WIDTH = r": expected a width of at least 1, got \(\d, 2, 0\) fp32"
FORMATS = r"^dtype: .*bf16, fp8_e4m3, fp8_e5m2, int8.*'fp8'"
HINTS = [
    (lambda: store(slot_mapping=[1, 3]), TypeError, r"^slot_mapping: .*list.*np\.asarray"),
    (lambda: store(key=np.zeros((2, 8, 2), np.float32).swapaxes(1, 2)), ValueError,
     r"^key: .*contiguous last.*\.contiguous\(\)"),
    (lambda: store(key=rows().astype(np.float64)), TypeError,
     r"^key: .*float64.*\.astype\(np\.float32\)"),
    (lambda: store(key=np.ma.masked_array(rows(), rows() > 3)), TypeError,
     r"^key: .*masked array.*filled\("),
    (lambda: store(key=NARROW[:2], value=NARROW[:2], k_cache=NARROW, v_cache=NARROW.copy()),
     ValueError, "^key" + WIDTH),
    (lambda: attend(window=-1), ValueError, r"^window: .*got -1; None is no window"),
    (lambda: attend(logits_soft_cap=0.0), ValueError, r"^logits_soft_cap: .*got 0.0; None is no"),
    (lambda: kv.KVPool(2, 2, 1, 1, 8, dtype="fp8", device="host"), TypeError, FORMATS),
    (lambda: kv.device("host").empty((2, 2), "fp8"), TypeError, "dtype: expected one of .*'fp8'"),
    (lambda: kv.device("gpu"), ValueError, r"^device: .*got 'gpu'.*did you mean \"cuda\"\?$"),
    (lambda: kv.device("cpu:0"), ValueError, r"^device: .*got 'cpu:0'(?!.*did you mean)"),
    (lambda: kv.KVPool(10**12, 16, 32, 8, 128, device="host"), MemoryError,
     r"^num_pages: .*got 1000000000000 pages of .* bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), HINTS, ids=[m[:30] for _, _, m in HINTS])
def test_errors_say_what_to_do(call, error, message):
    for _ in range(2):  # what is learned of a type does not let the next one pass
        with pytest.raises(error, match=message):
            call()


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
