"""Arrays of any library, described by address: `view`, `probe`, `view_as`, `overlap`, `pinned`."""

from __future__ import annotations

import copy
import ctypes
import gc
import sys
import types

import numpy as np
import pytest
import valid_calls
from helpers import DTYPE, FORMATS, UNSIGNED, examples
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcupy as kv
from kvcupy import cuda_api
from kvcupy.arrays import array_at, overlap, probe, probes, view
from kvcupy.ops.spec import OPERATIONS

ITEMSIZE = {**{f: d.itemsize for f, d in DTYPE.items()}, "int64": 8, "int32": 4, "uint8": 1,
            "bool": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def known_types(monkeypatch):
    """Let no class that a test makes up stay known after it."""
    monkeypatch.setattr(probes, "_PROBES", dict(probes._PROBES))


def described(v):
    """What equal signatures promise to be equal."""
    return v.shape, v.strides, v.format, v.device, v.readonly, v.library


def assert_describes(array, pointer, shape, strides, fmt, **others):
    """Assert what `view` says of an array, and that `probe` agrees on the address."""
    v = view(array)
    expected = {"device": "host", "library": "numpy", "readonly": False, **others}
    assert (v.pointer, v.shape, v.strides, v.format) == (pointer, shape, strides, fmt)
    assert {name: getattr(v, name) for name in expected} == expected
    assert v.itemsize == ITEMSIZE.get(fmt, v.itemsize)
    assert all(type(n) is int for n in (v.pointer, *v.shape, *v.strides))
    assert probe(array)[0] == pointer
    assert hash(probe(array)[1]) is not None


# What each library says of its arrays -------------------------------------------------------


def frozen(array):
    array.flags.writeable = False
    return array


class Hidden:
    """An array behind DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Sliced(Hidden):
    """The same, and it takes an index."""

    def __getitem__(self, index):
        return Sliced(self.array[index])


class HiddenOld(Hidden):
    """The same, before DLPack 1.0: no versions, no flags."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__()


def in_torch(array, fmt):
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array.view(np.int8)).view(torch_dtype(torch, fmt))


def torch_dtype(torch, fmt):
    names = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8",
             "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}  # fmt: skip
    return getattr(torch, names.get(fmt, fmt))


NUMPY_HAS = ("fp32", "fp16", "int8", "int64", "int32", "uint8", "bool")
LIBRARIES = {
    # The name that a view has, the formats, whether it has negative steps, and how an array of
    # integers becomes one of the library.
    "numpy": ("numpy", (*FORMATS, *NUMPY_HAS), True, lambda a, f: a.view(DTYPE.get(f, f))),
    "torch": ("torch", (*FORMATS, *NUMPY_HAS), False, in_torch),
    "dlpack of numpy": ("dlpack", NUMPY_HAS, True, lambda a, f: Sliced(a.view(DTYPE.get(f, f)))),
    "old dlpack": ("dlpack", NUMPY_HAS, True, lambda a, f: Old(a.view(DTYPE.get(f, f)))),
    "dlpack of torch": ("dlpack", (*FORMATS, "int64"), False, lambda a, f: Sliced(in_torch(a, f))),
    "tagged": ("numpy", FORMATS, True, lambda a, f: kv.view_as(a, f)),
    "tagged, signed": ("numpy", FORMATS, True, lambda a, f: kv.view_as(a.view(signed(f)), f)),
    "tagged torch": ("torch", FORMATS, False, lambda a, f: kv.view_as(in_torch(a, signed(f)), f)),
    "tagged dlpack": ("dlpack", FORMATS, True, lambda a, f: kv.view_as(Sliced(a), f)),
}


def signed(fmt):
    return f"int{8 * DTYPE[fmt].itemsize}"


class Old(HiddenOld, Sliced):
    def __getitem__(self, index):
        return Old(self.array[index])


@st.composite
def indices(draw, shape, negative):
    """A slice of at least two of the first axis, and slices or numbers of the others.

    Torch calls any stride of a single element contiguous.
    """
    parts = []
    for n in shape:
        first, second = draw(
            st.sampled_from([(i, j) for i in range(n) for j in range(n) if i != j])
        )
        step = second - first if negative else abs(second - first)
        part = slice(first if negative else min(first, second), None, step)
        parts.append(part if not parts else draw(st.sampled_from([part, first])))
    return tuple(parts)


@settings(max_examples=examples(400), deadline=None, database=None)
@given(data=st.data())
def test_a_view_is_what_numpy_says_of_the_same_slice(data):
    library, formats, negative, build = LIBRARIES[data.draw(st.sampled_from(list(LIBRARIES)))]
    fmt = data.draw(st.sampled_from(formats))
    shape = tuple(data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3)))
    whole, index = np.zeros(shape, UNSIGNED[ITEMSIZE[fmt]]), data.draw(indices(shape, negative))
    expected, array = whole[index], build(whole, fmt)[index]
    assert_describes(
        array, expected.ctypes.data, expected.shape, expected.strides, fmt, library=library
    )


# Torch ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


NO_KERNEL_READS = {
    "meta": lambda t: t.zeros(2, 2, device="meta"),
    "sparse": lambda t: t.zeros(2, 2).to_sparse(),
    "sparse by rows": lambda t: t.zeros(2, 2).to_sparse_csr(),
    "quantised": lambda t: t.quantize_per_tensor(t.zeros(2, 2), 1.0, 0, t.quint8),
    "lazily negated": lambda t: t.imag(t.zeros(2, 2, dtype=t.complex64).conj()),
    "lazily conjugated": lambda t: t.zeros(2, 2, dtype=t.complex64).conj(),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", NO_KERNEL_READS)
def test_torch_tensors_that_no_kernel_reads(torch, kind):
    """Twice, for what a probe learns of a class must not let the next one pass."""
    tensor = NO_KERNEL_READS[kind](torch)
    good = np.zeros((2, 2), np.float32)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"^key: expected an array, got"):
            view(tensor, "key")
        with pytest.raises(TypeError, match="key"):
            kv.store_kv(tensor, good, good.copy(), good.copy(), np.zeros(0, np.int64))
        other = torch.zeros(2)
        assert probe(other)[0] == other.data_ptr()


# Capsules, made by hand -----------------------------------------------------------------------


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class OldManaged(ctypes.Structure):
    _fields_ = (
        ("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
    )  # fmt: skip


class VersionedManaged(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor),
    )  # fmt: skip


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))
# With a plain address: the destructor gets a capsule that must not be referred to any more.
is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@Destructor
def destroy(capsule):
    """Call the deleter of an unconsumed capsule, as DLPack requires of every producer."""
    for name, kind in ((b"dltensor", OldManaged), (b"dltensor_versioned", VersionedManaged)):
        if is_capsule(capsule, name):
            address = pointer_in(capsule, name)
            Deleter(kind.from_address(address).deleter)(address)


class HandMade:
    """An exporter that fills in every field itself and counts what is deleted."""

    def __init__(self, shape=(2, 3), strides=(3, 1), *, versioned=True, flags=0, major=1, **fields):
        self.versioned, self.deleted, self.exported = versioned, 0, 0
        self.memory = ctypes.create_string_buffer(256)
        self.data = ctypes.addressof(self.memory)
        self.shape = (ctypes.c_int64 * len(shape))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        fields = {"code": 2, "bits": 32, "lanes": 1, "device_type": 1, "ndim": len(shape),
                  "data": self.data, **fields}  # fmt: skip
        self.managed = (VersionedManaged if versioned else OldManaged)()
        for name, value in fields.items():
            setattr(self.managed.tensor, name, value)
        if len(shape):
            self.managed.tensor.shape = self.shape
        if self.strides is not None:
            self.managed.tensor.strides = self.strides
        if versioned:
            self.managed.major, self.managed.flags = major, flags
        self.deleter = Deleter(self.delete)
        self.managed.deleter = ctypes.cast(self.deleter, ctypes.c_void_p).value

    def delete(self, address):
        assert address == ctypes.addressof(self.managed)
        self.deleted += 1

    def __dlpack_device__(self):
        return self.managed.tensor.device_type, self.managed.tensor.device_id

    def __dlpack__(self, *, stream=None, max_version=None):
        self.exported += 1
        assert not self.versioned or max_version >= (1, 0)
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(
            ctypes.addressof(self.managed), name, ctypes.cast(destroy, ctypes.c_void_p)
        )


@pytest.mark.parametrize("versioned", [True, False])
def test_the_deleter_runs_once_when_the_view_is_dropped(versioned):
    exporter = HandMade(versioned=versioned)
    v = view(exporter)
    gc.collect()
    assert (exporter.exported, exporter.deleted) == (1, 0)
    del v
    gc.collect()
    assert (exporter.exported, exporter.deleted) == (1, 1)


def test_fields_of_a_capsule():
    exporter = HandMade(byte_offset=24)
    assert view(exporter).pointer == exporter.data + 24
    assert view(HandMade((0,), data=None)).pointer == 0
    assert view(HandMade(flags=1)).readonly
    assert not view(HandMade(flags=2)).readonly  # "copied" says nothing about writing
    pinned = HandMade((4,), (1,), device_type=3, code=1, bits=16)
    assert view(pinned).device == "host" and view(pinned).pinned
    assert kv.view_as(pinned, "bf16").pinned and not view(exporter).pinned


UNKNOWN = {
    "opaque handles": {"code": 3, "bits": 64},
    "complex": {"code": 5, "bits": 64},
    "another float8": {"code": 11, "bits": 8},
    "float4": {"code": 17, "bits": 4},
    "two lanes": {"lanes": 2},
    "128-bit floats": {"bits": 128},
    "int4": {"code": 0, "bits": 4},
    "OpenCL": {"device_type": 4},
    "ROCm": {"device_type": 10},
    "another major version": {"major": 2},
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_capsules_that_no_kernel_reads(kind):
    exporter = HandMade(**UNKNOWN[kind])
    with pytest.raises(TypeError, match=r"^cache: expected an array, got DLPack"):
        view(exporter, "cache")
    gc.collect()
    assert exporter.exported == exporter.deleted


# __cuda_array_interface__ and CuPy, without a GPU ---------------------------------------------


@pytest.fixture
def gpu_pointers(monkeypatch):
    """Let every address belong to GPU 1."""
    asked = []
    monkeypatch.setattr(cuda_api, "device_of_pointer", lambda pointer: asked.append(pointer) or 1)
    return asked


def on_gpu(**changes):
    interface = {"version": 3, "typestr": "<f2", "shape": (2, 3), "data": (0x7F00, False)}
    return types.SimpleNamespace(__cuda_array_interface__={**interface, **changes})


@pytest.mark.parametrize("strides", [None, (6, 2), (0, 2), (-8, 4)])
def test_cuda_array_interface(gpu_pointers, strides):
    x = on_gpu(strides=strides)
    others = {"device": "cuda:1", "library": "cupy", "owner": x}
    assert_describes(x, 0x7F00, (2, 3), strides or (6, 2), "fp16", **others)
    assert gpu_pointers[0] == 0x7F00
    assert view(on_gpu(data=(0x7F00, True))).readonly
    assert view(on_gpu(shape=(0,), data=(None, False))).pointer == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "int8"])
def test_device_arrays_of_numba(gpu_pointers, monkeypatch, dtype):
    """Numba's own class, over an address. bf16 and fp8 are tagged: it has no dtypes for them."""
    library = pytest.importorskip("numba.cuda.cudadrv.devicearray", reason="pip install numba")
    if not hasattr(library.DeviceNDArray, "__cuda_array_interface__"):
        pytest.skip("Numba simulates a GPU here")
    monkeypatch.setattr(library._driver, "device_memory_size", lambda memory: 1 << 20)
    pointer = ctypes.c_uint64(0x7F00)
    memory = types.SimpleNamespace(
        device_pointer=pointer, device_ctypes_pointer=pointer, device_pointer_value=0x7F00
    )
    size = np.dtype(dtype).itemsize
    layout = {"shape": (4, 6), "strides": (8 * size, size), "dtype": np.dtype(dtype)}
    array = library.DeviceNDArray(**layout, stream=0, gpu_data=memory)
    fmt = {"float32": "fp32", "float16": "fp16"}.get(dtype, dtype)
    others = {"device": "cuda:1", "library": "cupy", "owner": array}
    assert_describes(array, 0x7F00, (4, 6), (8 * size, size), fmt, **others)
    if size == 1:
        assert kv.view_as(array, "fp8_e4m3").format == "fp8_e4m3"
    produced = library.DeviceNDArray(**layout, stream=0x77, gpu_data=memory)
    assert produced.__cuda_array_interface__["stream"] == 0x77
    assert view(produced).pointer == 0x7F00 and type(produced) in kv.arrays.STREAMED_TYPES
    kv.arrays.STREAMED_TYPES.discard(type(produced))


class FakeMemory:
    def __init__(self, pointer, device_id):
        self.ptr, self.device_id = pointer, device_id


class FakeCupy:
    """What is asked of a CuPy array."""

    def __init__(self, pointer=0x7F00, dtype=np.float16, shape=(2, 3), strides=(6, 2), device_id=0):
        self.data = FakeMemory(pointer, device_id)
        self.dtype, self.shape, self.strides = np.dtype(dtype), shape, strides


@pytest.fixture
def cupy_like(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=FakeCupy))
    return FakeCupy


def test_a_cupy_array_never_runs_on_the_plan_of_numpy_arrays(cupy_like, device):
    if device.kind != "host":
        pytest.skip("NumPy arrays live on the host device")
    rows, caches = np.ones((2, 3), np.float16), np.zeros((2, 2, 3), np.float16)
    slots = np.array([0, 1])
    kv.store_kv(rows, rows, *caches, slots)
    foreign = cupy_like(pointer=rows.ctypes.data)
    with pytest.raises(ValueError, match="value: expected cuda:0 like key, got host"):
        kv.store_kv(foreign, rows, *caches, slots)


# What is no array -----------------------------------------------------------------------------


class WithoutDevice:
    def __dlpack__(self, **options):
        raise AssertionError("not asked")


NO_ARRAYS = {
    **{
        type(thing).__name__: thing
        for thing in (None, 1, 1.5, "text", [1.0], (1, 2), {}, object(), np.float32(1),
                      memoryview(b"abc"), np.ndarray, np.dtype("f4"), WithoutDevice())
    },
    **{
        f"NumPy of {dtype}": np.zeros((2, 2), dtype)
        for dtype in (">f4", ">i8", object, [("a", "f4")], [("a", ">f4"), ("b", "O")], "U3", "V4")
    },
    # NumPy and torch say BufferError.
    **{
        f"DLPack of {dtype}": Hidden(np.zeros(3, dtype)) for dtype in (">f4", object, "M8[s]")
    },
    **{
        f"GPU array with {name}": on_gpu(**{name: value})
        for name, value in (("mask", np.zeros(6, bool)), ("typestr", ">f2"))
    },
    "GPU array of objects": on_gpu(typestr="|O8"), "GPU array of bytes": on_gpu(typestr="|V2"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_what_is_no_array(gpu_pointers, name):
    with pytest.raises(TypeError, match=r"^key: expected an array, "):
        view(NO_ARRAYS[name], "key")
    if not name.startswith("NumPy"):  # a plan refuses their dtypes
        with pytest.raises(TypeError):
            probe(NO_ARRAYS[name])


# Views of views -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "fmt", "error", "message"),
    [
        (np.uint8, "bf16", ValueError, "array: expected 16-bit integers for bf16, got uint8"),
        (np.uint16, "fp8_e4m3", ValueError, "expected 8-bit integers for fp8_e4m3, got uint16"),
        (np.uint64, "fp32", ValueError, "32-bit"),
        (np.float16, "bf16", TypeError, "array: expected integers that hold bf16 bits, got fp16"),
        (np.float32, "fp8_e5m2", TypeError, "got fp32"),
        (np.bool_, "int8", TypeError, "got bool"),
        (np.uint16, "float99", ValueError, "dtype: expected one of fp32, .*got 'float99'"),
        (np.uint16, None, ValueError, "dtype"),
        (object, "bf16", TypeError, "array"),
    ],
)
def test_view_as_refuses(dtype, fmt, error, message):
    with pytest.raises(error, match=message):
        kv.view_as(np.zeros((2, 2), dtype), fmt)


# Signatures -----------------------------------------------------------------------------------


#: What an array may be. Two dimensions always, for each choice to fit every other one.
CHOICES = {
    "kind": ["numpy", "dlpack", "old dlpack", "cupy", "tagged"],
    "fmt": list(FORMATS),
    "shape": [(2, 3), (3, 2), (2, 1), (0, 3)],
    "steps": [(3, 1), (1, 2), (0, 1), (-3, -1)],
    "readonly": [False, True],
    "gpu": [0, 1],
}


def build(kind, fmt, shape, steps, readonly, gpu):
    """An array of these choices, or as many of them as its library has."""
    dtype = DTYPE[fmt]
    size = dtype.itemsize
    strides = tuple(size * s for s in steps)
    if kind == "cupy":
        return FakeCupy(0x7F00, dtype, shape, strides, gpu)
    memory = np.zeros(64 * size, np.uint8)
    start = memory.ctypes.data + 32 * size
    array = array_at(memory, start, shape, dtype, strides, readonly=readonly)
    if kind.endswith("torch") and min(steps) >= 0:
        torch = pytest.importorskip("torch")
        tensor = torch.from_numpy(memory).view(torch_dtype(torch, fmt)).as_strided(shape, steps)
        return tensor if kind == "torch" else kv.view_as(tensor, fmt)
    if kind == "tagged":
        return kv.view_as(array.view(UNSIGNED[size]), fmt)
    if "dlpack" in kind and fmt in ("fp32", "fp16", "int8"):  # what NumPy exports
        return HiddenOld(array) if kind == "old dlpack" and not readonly else Hidden(array)
    return array


def pair_of_arrays(data, choices):
    """Draw two arrays, alike but for at most two choices."""
    first = {name: data.draw(st.sampled_from(values), name) for name, values in choices.items()}
    changed = data.draw(st.lists(st.sampled_from(list(choices)), max_size=2))
    second = {**first, **{name: data.draw(st.sampled_from(choices[name])) for name in changed}}
    return build(**first), build(**second)


@pytest.mark.parametrize("kinds", [[], ["torch", "tagged torch"]], ids=["numpy", "torch"])
@settings(max_examples=examples(600), deadline=None, database=None)
@given(data=st.data())
def test_equal_signatures_are_equal_descriptions(kinds, data):
    if kinds:
        pytest.importorskip("torch")
    pair = pair_of_arrays(data, {**CHOICES, "kind": CHOICES["kind"] + kinds})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=FakeCupy))
        signatures = [probe(array)[1] for array in pair]
        descriptions = [described(view(array)) for array in pair]
        assert [probe(array)[1] for array in pair] == signatures
    if signatures[0] == signatures[1]:
        assert descriptions[0] == descriptions[1]
        assert hash(signatures[0]) == hash(signatures[1])
    elif type(pair[0]) is type(pair[1]):
        assert descriptions[0] != descriptions[1]


# Pinned memory --------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_pinned_memory_knows_that_it_is(fmt):
    pinned = kv.device("host").empty_pinned((4, 6), fmt)
    assert pinned.shape == (4, 6)
    assert pinned.dtype == DTYPE[fmt]
    carrier = pinned.view(UNSIGNED[pinned.itemsize])
    for part in (pinned, pinned[1:, ::2], pinned[::-1].T, pinned.reshape(-1), pinned[None, 2]):
        assert view(part).pinned
    assert kv.view_as(carrier, fmt).pinned
    assert kv.view_as(carrier, fmt)[1:].pinned


def test_other_memory_is_not_pinned(torch):
    device = kv.device("host")
    pinned = device.empty_pinned((4,), "int8")
    for other in (np.zeros(4), pinned.copy(), pinned + pinned, device.empty((4,), "int8"),
                  np.frombuffer(bytearray(8)), torch.zeros(4), Hidden(np.zeros(4)),
                  copy.deepcopy(pinned)):  # fmt: skip
        assert not view(other).pinned


# Overlap --------------------------------------------------------------------------------------


def touched(v):
    """Every byte of a view, one after another."""
    starts = {v.pointer}
    for n, stride in zip(v.shape, v.strides, strict=True):
        starts = {start + i * stride for start in starts for i in range(n)}
    return {start + i for start in starts for i in range(v.itemsize)} if v.size else set()


@st.composite
def patches(draw):
    """Views of any strides in the same few hundred bytes, which are never touched."""
    fmt = draw(st.sampled_from(["int8", "bf16", "fp32"]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    strides = tuple(draw(st.integers(-12, 12)) for _ in shape)
    return kv.ArrayView(4096 + draw(st.integers(0, 60)), shape, strides, fmt, "host")


@settings(max_examples=examples(300), deadline=None, database=None)
@given(a=patches(), b=patches())
def test_overlap_is_a_shared_byte(a, b):
    assert overlap(a, b) == overlap(b, a) == bool(touched(a) & touched(b))
    elsewhere = kv.ArrayView(b.pointer, b.shape, b.strides, b.format, "cuda:1")
    assert not overlap(a, elsewhere)
    if a.size:
        assert a.byte_range() == (min(touched(a)), max(touched(a)) + 1)


# On a GPU that is not there -------------------------------------------------------------------


class OnGpu:
    """Memory that its interface places on a GPU, with the stream that writes it or without."""

    def __init__(self, array, *, stream=None):
        self.shape = array.shape
        interface = {**array.__array_interface__, "version": 3, "stream": stream}
        self.__cuda_array_interface__ = interface


def cupy_array(array):
    cuda = sys.modules["cupy"].cuda
    memory = cuda.UnownedMemory(array.ctypes.data, array.nbytes, array, 0)
    return sys.modules["cupy"].ndarray(
        array.shape, array.dtype, memptr=cuda.MemoryPointer(memory, 0), strides=array.strides
    )


ON_GPU = {
    "interface": OnGpu, "interface with a stream": lambda a: OnGpu(a, stream=1),
    "cupy": cupy_array,
}  # fmt: skip


@pytest.fixture
def no_driver():
    pytest.importorskip("cupy")
    if cuda_api.driver_version():
        pytest.skip("there is a driver")


@pytest.mark.usefixtures("no_driver")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("kind", ON_GPU)
def test_memory_of_a_gpu_without_a_driver(kind, operation):
    declaration = OPERATIONS[operation]
    call = valid_calls.example(declaration, kv.device("host"))
    names = list(valid_calls.arrays_of(call))
    named = rf"^({'|'.join(names)})(\[0\])?: expected"
    for where in (*([name] for name in names), names):
        changed = {name: ON_GPU[kind](np.asarray(call[name])) for name in where}
        for _ in range(2):
            with pytest.raises((kv.DeviceError, ValueError), match=named):
                declaration.function(**{**call, **changed})
            declaration.function(**call)
