"""Pure functions for JAX: the results of kvcupy's own operations, bit for bit, and in whose memory.

XLA's side of a call is also made by hand, so that it is tested where there is no JAX.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import every_call
import ml_dtypes
import numpy as np
import pytest

import kvcupy as kv
from kvcupy.interop import xla_ffi
from kvcupy.ops.spec import OPERATIONS


@pytest.fixture(scope="module")
def jax():
    jax = pytest.importorskip("jax", reason='pip install ".[jax]"')
    if jax.default_backend() != "cpu":
        pytest.skip("compares with arrays of the host")
    return jax


@pytest.fixture(scope="module")
def kvj(jax):
    from kvcupy.interop import jax as kvj

    return kvj


ROWS = ("query", "key", "rope_key")  # rotated in place by kvcupy
WRITTEN = {
    "store_kv": ("k_cache", "v_cache", "v_scale_cache"),
    "store_mla": ("cache",),
    "apply_rope": ("query", "key"),
    "rope_store_kv": ("query", "key", "k_cache", "v_cache", "v_scale_cache"),
    "rope_store_mla": ("query", "rope_key", "cache"),
    "gather_kv": ("k_out", "v_out"),
    "paged_attention": ("out", "lse_out"),
    "merge_states": ("out", "lse_out"),
    "store_state": ("caches",),
    "gather_state": ("out",),
    "update_conv_state": ("cache",),
}
OPTIONS = {"gather_kv": {"dtype": "fp32"}, "paged_attention": {"return_lse": True}}


def call_of(name):
    """Return the arguments of a call of kvcupy's, and those that the pure function takes."""
    call = every_call.CALLS[name](kv.device("host"))
    call.pop("query_out", None)
    outputs = ("out", "lse_out", "k_out", "v_out")
    return call, {n: x for n, x in call.items() if n not in outputs}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_results_are_those_of_the_operation(jax, kvj, name, traced):
    call, arguments = call_of(name)
    arrays = {n: jax.numpy.array(x) for n, x in arguments.items()}
    before = {n: np.array(x) for n, x in arrays.items()}
    getattr(kv, name)(**call)
    function = getattr(kvj, name)
    if traced:
        results = jax.jit(lambda a: function(**a, **OPTIONS.get(name, {})))(arrays)
    else:
        results = function(**arrays, **OPTIONS.get(name, {}))
    results = results if isinstance(results, tuple) else (results,)
    assert len(results) == len(WRITTEN[name])
    for which, result in zip(WRITTEN[name], results, strict=True):
        np.testing.assert_array_equal(np.asarray(result), call[which], which)
    for n, array in arrays.items():
        donated = not traced and n in WRITTEN[name] and n not in ROWS
        assert array.is_deleted() == donated, n
        if not donated:
            np.testing.assert_array_equal(np.asarray(array), before[n], n)


def caches(jax, dtype="bfloat16"):
    return tuple(jax.numpy.zeros((4, 16, 2, 8), dtype) for _ in "kv")


def address(array):
    return array.unsafe_buffer_pointer()


def test_caches_stay_where_they_are(jax, kvj):
    k, v = caches(jax)
    rows = jax.numpy.ones((1, 2, 8), "bfloat16")
    places = address(k), address(v)
    for token in range(3):
        k, v = kvj.store_kv(rows, rows, k, v, jax.numpy.array([token]))
    assert (address(k), address(v)) == places
    assert np.asarray(k)[0, :4, 0, 0].tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("donated", [True, False])
def test_caches_of_a_program(jax, kvj, donated):
    """A step of two layers: in place where the caches are donated, else copied once."""

    def step(k, v, rows, slots):
        k, v = kvj.store_kv(rows, rows, k, v, slots)
        k, v = kvj.store_kv(2 * rows, rows, k, v, slots + 16)
        table, lengths = jax.numpy.array([[0, 1]]), jax.numpy.array([17])
        return kvj.paged_attention(rows, k, v, table, lengths), k, v

    k, v = caches(jax)
    before = address(k), address(v)
    program = jax.jit(step, donate_argnums=(0, 1) if donated else ())
    rows, slots = jax.numpy.ones((1, 2, 8), "bfloat16"), jax.numpy.array([0])
    out, k_new, v_new = program(k, v, rows, slots)
    assert ((address(k_new), address(v_new)) == before) == donated == k.is_deleted()
    assert np.asarray(k_new)[:2, 0, 0, 0].tolist() == [1, 2]
    assert np.asarray(out).any()
    if not donated:
        assert not np.asarray(k).any()


def aligned_zeros(*shape):
    """An array that JAX takes over without a copy."""
    memory = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : memory.size - 64 + start].view(np.float32).reshape(shape)


def test_memory_that_numpy_sees_is_not_written(jax, kvj):
    source = aligned_zeros(4, 2, 8), aligned_zeros(4, 2, 8)
    k, v = map(jax.device_put, source)
    rows = jax.numpy.ones((1, 2, 8))
    k, v = kvj.store_kv(rows, rows, k, v, jax.numpy.array([3]))
    seen = np.asarray(k)
    k, v = kvj.store_kv(2 * rows, rows, k, v, jax.numpy.array([3]))
    assert (float(k[3, 0, 0]), seen[3, 0, 0], source[0].any()) == (2, 1, False)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "uint8"])
def test_formats(jax, kvj, dtype):
    k, v = caches(jax, dtype)
    rows, slots = jax.numpy.full((1, 2, 8), 3.0), jax.numpy.array([5])
    format = {"format": "fp8_e4m3"} if dtype == "uint8" else {}
    k, v = kvj.store_kv(rows, rows, k, v, slots, **format)
    key, value = kvj.gather_kv(k, v, slots, **format)
    assert key.dtype == value.dtype == ml_dtypes.bfloat16
    assert float(key.min()) == float(value.max()) == 3


def test_layouts_and_missing_queries(jax, kvj):
    rows, table = jax.numpy.ones((2, 2, 8)), kvj.rope_table(16, 8)
    positions, slots = jax.numpy.array([3, 4]), jax.numpy.array([17, -1])
    k, v = (jax.numpy.zeros((4, 2, 16, 8)) for _ in "kv")
    none, key, k, v = kvj.rope_store_kv(
        None, rows, rows, table, positions, k, v, slots, layout="HND"
    )
    assert none is None
    gathered, _ = kvj.gather_kv(k, v, slots, layout="HND")
    np.testing.assert_array_equal(gathered[0], key[0])
    assert not gathered[1].any() and not np.array_equal(key, rows)


def refused(kvj, jax, **changes):
    k, v = caches(jax)
    rows = jax.numpy.ones((1, 2, 8), "bfloat16")
    arguments = {"key": rows, "value": rows, "k_cache": k, "v_cache": v,
                 "slot_mapping": jax.numpy.array([1])}  # fmt: skip
    return k, lambda: kvj.store_kv(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"key": np.ones((1, 3, 8), np.float32)}, ValueError, r"^k_cache: expected 3 heads"),
        ({"value": None}, TypeError, r"^value: expected an array, got None"),
        ({"slot_mapping": [1]}, TypeError, r"^slot_mapping: .*got list"),
        ({"slot_mapping": np.ones(1, np.float32)}, TypeError, r"^slot_mapping: "),
        ({"k_scale": 2.0}, ValueError, r"^k_scale: "),
        ({"k_scale": object()}, TypeError, r"^k_scale: "),
        ({"layout": "DNH"}, ValueError, r"^layout: "),
        ({"skip_slot": "first"}, TypeError, r"^skip_slot: "),
    ],
)
def test_what_is_refused_donates_nothing(jax, kvj, changes, error, message):
    k, call = refused(kvj, jax, **changes)
    with pytest.raises(error, match=message):
        call()
    assert not k.is_deleted()


def test_transformations_that_are_not_offered(jax, kvj):
    k, v = caches(jax, "float32")
    slots = jax.numpy.array([0])

    def store(rows):
        return kvj.store_kv(rows, rows, k, v, slots)[0].sum()

    with pytest.raises(NotImplementedError, match="vmap"):
        jax.vmap(store)(jax.numpy.ones((2, 1, 2, 8)))
    with pytest.raises(ValueError, match="differentiated"):
        jax.grad(store)(jax.numpy.ones((1, 2, 8)))


def test_an_index_past_the_end(jax, kvj):
    _, call = refused(kvj, jax, slot_mapping=np.array([64]))
    k, _ = call()
    assert not np.asarray(k).any()
    with pytest.raises(kv.IndexFault, match=r"store_kv: slot_mapping\[0\] is 64"):
        kv.check_faults("host")


def test_errors_of_a_call_reach_the_caller(jax, kvj, monkeypatch):
    def fail(**arguments):
        raise kv.DeviceError("out of luck")

    _, call = refused(kvj, jax)
    call()
    monkeypatch.setattr(OPERATIONS["store_kv"], "function", fail)
    with pytest.raises(Exception, match="DeviceError: out of luck"):
        refused(kvj, jax)[1]()[0].block_until_ready()


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from kvcupy.interop import jax as kvj

mesh = jax.make_mesh((2,), ("heads",))
by_head, by_row = P(None, None, "heads"), P(None, "heads")
put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
k, v = (put(jnp.zeros((2, 16, 4, 8)), by_head) for _ in "kv")
rows = put(jnp.arange(64.0).reshape(2, 4, 8), by_row)
places = [shard.data.unsafe_buffer_pointer() for shard in k.addressable_shards]
store = jax.shard_map(
    lambda k, v, rows, slots: kvj.store_kv(rows, rows, k, v, slots),
    mesh=mesh, in_specs=(by_head, by_head, by_row, P()), out_specs=(by_head, by_head),
    check_vma=False,
)
k, v = jax.jit(store, donate_argnums=(0, 1))(k, v, rows, jnp.array([3, 20]))
assert np.array_equal(np.asarray(k)[[0, 1], [3, 4]], np.asarray(rows))
assert [shard.data.unsafe_buffer_pointer() for shard in k.addressable_shards] == places
"""


def test_each_device_writes_its_own_part_of_the_caches(jax):
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has shard_map elsewhere")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "KVCUPY_STRICT": "0"}
    environment = {**os.environ, **flags}
    command = [sys.executable, "-c", SHARDED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# --- A call of XLA's, made by hand ---


class Xla:
    """A frame of a call, and the functions that XLA offers to it."""

    def __init__(self, arrays, results, attribute):
        self.errors, self.keep = [], []
        functions = (ctypes.c_void_p * 5)()
        functions[0] = self._function(self._error)
        functions[4] = self._function(self._stream)
        version = xla_ffi._Version(0, None, 0, 9)
        self.api = xla_ffi._Api(0, None, version, None, functions)
        texts = [self._span(name) for name in ("call", "other")], [self._span(attribute)]
        self.frame = xla_ffi._Frame(
            ctypes.sizeof(xla_ffi._Frame), None, ctypes.pointer(self.api), 0x5EED, 3,
            self._buffers(arrays), self._buffers(results),
            xla_ffi._Attributes(
                0, None, 2, self._kept((ctypes.c_int * 2)(4, 3)),
                self._pointers(texts[0], xla_ffi._Span),
                self._pointers([*texts[1], texts[1][0]], xla_ffi._Span),
            ),
        )  # fmt: skip

    def _function(self, function):
        self.keep.append(xla_ffi._Function(function))
        return ctypes.cast(self.keep[-1], ctypes.c_void_p).value

    def _error(self, address):
        error = xla_ffi._Error.from_address(address)
        self.errors.append((error.code, error.message.decode()))
        return len(self.errors)

    def _stream(self, address):
        asked = xla_ffi._StreamOf.from_address(address)
        assert asked.context == 0x5EED
        asked.stream = 0x77
        return 0

    def _kept(self, x):
        self.keep.append(x)
        return x

    def _span(self, text):
        data = self._kept(ctypes.create_string_buffer(text.encode()))
        return self._kept(xla_ffi._Span(ctypes.addressof(data), len(text)))

    def _pointers(self, items, kind):
        kind = ctypes.POINTER(kind)
        return self._kept((kind * len(items))(*map(ctypes.pointer, items)))

    def _buffers(self, arrays):
        codes = {"float32": 11, "bfloat16": 16, "int64": 5, "complex64": 15}
        items = []
        for array in arrays:
            dims = self._kept((ctypes.c_int64 * array.ndim)(*array.shape))
            items.append(self._kept(xla_ffi._Buffer(
                0, None, codes[array.dtype.name], array.ctypes.data, array.ndim, dims
            )))  # fmt: skip
        return xla_ffi._Buffers(0, None, len(items), None, self._pointers(items, xla_ffi._Buffer))

    def run(self, execute, **options):
        options = {"on_gpu": False, **options}
        return xla_ffi.handler(execute, **options)(ctypes.addressof(self.frame))


ARRAYS = np.ones((2, 3), np.float32), np.zeros((0, 4), np.dtype(ml_dtypes.bfloat16)), np.arange(3)


def test_a_frame_is_read():
    calls = []
    assert Xla(ARRAYS, ARRAYS[:1], "text").run(calls.append) is None
    (call,) = calls
    assert [(v.pointer, v.shape, v.strides, v.format, v.device) for v in call.arguments] == [
        (ARRAYS[0].ctypes.data, (2, 3), (12, 4), "fp32", "host"),
        (ARRAYS[1].ctypes.data, (0, 4), (8, 2), "bf16", "host"),
        (ARRAYS[2].ctypes.data, (3,), (8,), "int64", "host"),
    ]
    assert [v.pointer for v in call.results] == [ARRAYS[0].ctypes.data]
    assert (call.attribute, call.stream) == ("text", None)


def test_a_frame_of_a_gpu_names_its_stream(monkeypatch):
    asked = []
    monkeypatch.setattr(xla_ffi.cuda_api, "device_of_pointer", lambda p: asked.append(p) or 3)
    calls = []
    Xla(ARRAYS, ARRAYS[:1], "text").run(calls.append, on_gpu=True)
    (call,) = calls
    assert {v.device for v in call.arguments + call.results} == {"cuda:3"}
    assert call.stream.__cuda_stream__() == (0, 0x77)
    assert asked == [ARRAYS[0].ctypes.data]


@pytest.mark.parametrize(
    ("error", "code"), [(ValueError("k: no"), 3), (kv.KvcupyError("k: no"), 13), (SystemExit(), 13)]
)
def test_an_error_is_xlas(error, code):
    def fail(call):
        raise error

    xla = Xla(ARRAYS, (), "text")
    assert xla.run(fail) == 1
    assert xla.errors == [(code, f"{type(error).__name__}: {error}")]


def test_element_types_that_no_kernel_reads():
    xla = Xla([np.zeros(3, np.complex64)], (), "text")
    assert xla.run(lambda call: None) == 1
    assert "element type 15" in xla.errors[0][1]


def asked_for_metadata(xla):
    """Return what a handler answers, and what it has filled in."""
    metadata = xla_ffi._Metadata(traits=7)
    extension = xla_ffi._Extension(0, 1, None, ctypes.pointer(metadata))
    xla.frame.extension = ctypes.addressof(extension)
    return xla.run(lambda call: pytest.fail("nothing is executed")), metadata


@pytest.mark.parametrize("minor", [9, None])
def test_the_version_is_xlas_own(minor):
    """Before 0.2 XLA does not say which it is."""
    xla = Xla(ARRAYS, (), "text")
    if minor is None:
        xla.frame.api = None
    answer, metadata = asked_for_metadata(xla)
    assert answer is None
    assert (metadata.version.major, metadata.version.minor) == (0, minor or 1)
    assert metadata.traits == 0


def test_another_major_version_is_refused():
    """When the handler is registered."""
    xla = Xla(ARRAYS, (), "text")
    xla.api.version.major = 1
    assert asked_for_metadata(xla)[0] == 1
    assert "version 1, expected 0" in xla.errors[0][1]


def test_only_execution_is_a_call():
    xla = Xla(ARRAYS, (), "text")
    xla.frame.stage = 0
    assert xla.run(lambda call: pytest.fail("nothing is executed")) is None


def test_results_elsewhere_are_refused(jax, kvj):
    """XLA gives a result the memory of its argument; a kernel that wrote elsewhere loses rows."""
    rows, slots = np.ones((1, 2, 8), np.float32), np.array([0])
    cache = np.zeros((4, 2, 8), np.float32)
    arrays = {"key": rows, "value": rows, "k_cache": cache, "v_cache": cache.copy(),
              "slot_mapping": slots}  # fmt: skip
    text = json.dumps({"operation": "store_kv", "arrays": list(arrays), "written": [2, 3],
                       "allocated": [], "options": {}, "format": None})  # fmt: skip
    xla = Xla(arrays.values(), [cache, cache.copy()], text)
    assert xla.run(kvj._execute) == 1
    assert "v_cache: expected its memory as result 1" in xla.errors[0][1]
    assert not cache.any()
