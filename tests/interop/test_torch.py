"""kvcupy's operations for torch: operators with schemas and fakes, traced, exported, refused."""

from __future__ import annotations

import gc
import inspect
import io
import subprocess
import sys
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from devices.fake_cuda import FakeApi

import kvcupy as kv
from kvcupy import devices
from kvcupy.cuda_api import StreamAddress
from kvcupy.devices.cuda import CudaDevice
from kvcupy.ops.spec import OPERATIONS

torch = pytest.importorskip("torch")

from torch_calls import (  # noqa: E402
    NAMES,
    assert_bits,
    assert_same,
    copied,
    function_of,
    leaves,
    make_calls,
    operands,
)

import kvcupy.interop.torch as kvt  # noqa: E402
from kvcupy.interop.torch import OPERATORS  # noqa: E402

DYNAMIC = ("slot_mapping", "page_table_csr", "find_duplicate_slots")  # whose results' lengths are
NO_BACKWARD = "kvcupy has no backward: call this under torch.no_grad()"


@pytest.fixture(scope="module")
def calls(device):
    return make_calls(device)


@pytest.fixture
def compile_():
    """`torch.compile` without graph breaks and code generators, from a clean slate."""
    import torch._dynamo as dynamo

    dynamo.reset()
    with dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield lambda f, **how: torch.compile(f, fullgraph=True, **{"backend": "aot_eager", **how})
    dynamo.reset()


def operator(name):
    return getattr(torch.ops.kvcupy, name).default


def torch_device(device):
    return "cpu" if device.kind == "host" else device.torch_name


# --- The table ---


def test_functions_are_kvcupys():
    """The same names, arguments and defaults; `format` comes on top."""
    operations = OPERATIONS.keys() - {"transfer_pages"}
    assert operations == {each.declaration.name for each in OPERATORS}
    assert operations == set(kvt.__all__) - {"as_tensor", "rope_table"}
    for name in operations | {"rope_table"}:
        own, theirs = (inspect.signature(getattr(m, name)).parameters for m in (kv, kvt))
        extra = {"format"} if "format" in theirs else set()
        assert list(own) == [n for n in theirs if n not in extra], name
        for n, parameter in own.items():
            other = theirs[n]
            assert (parameter.kind, parameter.default) == (other.kind, other.default), (name, n)


def test_schemas_have_the_operations_defaults():
    """A dispatcher leaves out what equals the default."""
    for each in OPERATORS:
        parameters = inspect.signature(getattr(kv, each.declaration.name)).parameters
        for argument in operator(each.name)._schema.arguments:
            if argument.has_default_value() and argument.name in parameters:
                default = parameters[argument.name].default
                assert argument.default_value == default, (each.name, argument.name)
            elif argument.has_default_value():  # of operators alone
                assert argument.default_value is None


def test_compilers_keep_strides_and_leave_waits_out_of_graphs():
    known = torch.Tag
    strides = getattr(known, "needs_exact_strides", known.needs_fixed_stride_order)
    for name in NAMES:
        assert strides in operator(name).tags and known.pt2_compliant_tag in operator(name).tags
        if hasattr(known, "cudagraph_unsafe"):
            assert (known.cudagraph_unsafe in operator(name).tags) == (name in DYNAMIC), name


# --- Results, and what is written ---


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_what_the_schema_says(calls, name, mode, compile_):
    """Bit for bit what kvcupy's own function does, versions included; it returns the outputs."""
    own, theirs = copied(calls[name]), copied(calls[name])
    function = getattr(kvt, function_of(name))
    want = leaves(getattr(kv, function_of(name))(**own))
    written = {a.name for a in operator(name)._schema.arguments if a.is_write}
    before = {n: x._version for n, x in theirs.items() if isinstance(x, torch.Tensor)}
    run = function if mode == "eager" else compile_(lambda **call: function(**call))
    got = leaves(run(**theirs))
    assert {n for n, v in before.items() if theirs[n]._version > v} == written & before.keys()
    assert_same(theirs, own)
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert_bits(x, torch.as_tensor(y), f"result {i}")
    outputs = [theirs[n] for n in ("k_out", "v_out", "out", "lse_out") if n in theirs]
    if name.endswith("_out") and got and mode == "eager":
        assert [id(x) for x in got] == [id(x) for x in outputs][: len(got)]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(calls, name, device):
    """Schema, fakes and functionalisation, as torch checks them."""
    arguments, outputs = operands(name, calls[name])
    torch.library.opcheck(operator(name), arguments, outputs)


def test_kvcupys_own_functions_are_traced_as_operators(compile_):
    """Instead of their Python, piece by piece."""

    def step(query, rows, k_cache, v_cache, table, lengths):
        slots = kv.slot_mapping(table, lengths, torch.ones_like(lengths), 4)
        kv.store_kv(rows + 1, rows, k_cache, v_cache, slots)
        return 2 * kv.paged_attention(query, k_cache, v_cache, table, lengths)

    generator = torch.Generator().manual_seed(0)
    query, rows = (torch.randn(2, heads, 8, generator=generator) for heads in (4, 2))
    tables = torch.tensor([[3, 1], [5, 2]]), torch.tensor([5, 4])
    caches, compiled = torch.zeros(2, 2, 8, 4, 2, 8)
    want = step(query, rows, *caches, *tables)
    assert torch.equal(compile_(step)(query, rows, *compiled, *tables), want)
    assert torch.equal(caches, compiled) and caches.any()


@pytest.mark.parametrize("given", ["k_out", "v_out", "out", "lse_out"])
def test_one_output_of_two(calls, given):
    """The other is allocated, in the format of the first; rows of skipped slots are zero."""
    name = "gather_kv_out" if given in ("k_out", "v_out") else "merge_states_out"
    names = ("k_out", "v_out") if given in ("k_out", "v_out") else ("out", "lse_out")
    call = copied(calls[name])
    call.update({n: call[n].fill_(7) for n in names})
    other = next(n for n in names if n != given)
    partial = {n: x for n, x in copied(call).items() if n != other}
    got = getattr(kvt, function_of(name))(**partial)
    assert got[names.index(given)] is partial[given]
    if other in ("k_out", "v_out"):
        call[other].zero_()
    want = getattr(kv, function_of(name))(**call)
    for i in range(2):
        assert_bits(got[i], want[i], names[i])


def test_attention_over_bytes_of_four_bits(device):
    """Rows of 72 bytes are 128 elements, for fakes too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    place = torch_device(device)
    caches = [torch.zeros(4, 16, 2, 72, dtype=torch.uint8, device=place) for _ in "kv"]
    rows, slots = torch.randn(9, 2, 128, device=place), torch.arange(16, 25, device=place)
    kvt.store_kv(rows, rows, *caches, slots, format="nvfp4")
    query = torch.randn(1, 4, 128, device=place).bfloat16()
    table, lens = (torch.tensor(x, dtype=torch.int32, device=place) for x in ([[1]], [9]))
    got = kvt.paged_attention(query, *caches, table, lens, format="nvfp4")
    views = [kv.view_as(cache, "nvfp4") for cache in caches]
    assert_bits(got, kv.paged_attention(query, *views, table, lens), "out")
    assert got.shape == (1, 4, 128) and got.abs().sum() > 0
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (query, *caches, table, lens)]
        assert kvt.paged_attention(*fakes, format="nvfp4").shape == got.shape
        gathered, _ = kvt.gather_kv(*fakes[1:3], mode.from_tensor(slots), format="nvfp4")
        assert gathered.shape == rows.shape
    gathered, _ = kvt.gather_kv(*caches, slots, format="nvfp4")
    assert (gathered - rows).norm() < 0.2 * rows.norm()


def test_merged_states_of_one_array(device):
    states = torch.randn(3, 2, 4, 8, device=torch_device(device))
    lse = torch.randn(3, 2, 4, device=states.device)
    torch.library.opcheck(operator("merge_states"), (states, lse, None, None))
    out, _ = kvt.merge_states(states, lse, None, None, out=torch.zeros_like(states[0]))
    assert_bits(out, kv.merge_states(states, lse, None, None)[0], "out")


SECTIONS = {"positions": torch.tensor([[3, 4, 7], [1, 2, 3], [1, 1, 2]]), "sections": (1, 1, 0),
            "sections_interleaved": True}  # fmt: skip
VARIANTS = [
    ("apply_rope", {"query": None}),
    ("rope_store_kv", {"query": None}),
    ("rope_store_mla", {"query": None}),
    ("apply_rope", SECTIONS),
    ("paged_attention", {"window": 1, "sink_tokens": 2, "return_lse": True}),
    ("paged_attention", {"window": 1, "sinks": torch.linspace(-1, 1, 4), "return_lse": True}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=lambda value: str(value)[:40])
def test_variants_of_calls(calls, name, changes, device, compile_):
    changes = {
        n: x.to(torch_device(device)) if isinstance(x, torch.Tensor) else x
        for n, x in changes.items()
    }
    own = copied(calls[name]) | changes
    want = leaves(getattr(kv, name)(**own))
    function = getattr(kvt, name)
    for run in (function, compile_(lambda **call: function(**call))):
        call = copied(calls[name]) | changes
        for x, y in zip(leaves(run(**call)), want, strict=True):
            assert_bits(x, y, "result")
        assert_same(call, own)


# --- Numbers or tensors, and bytes ---


@pytest.mark.parametrize("scale", [None, 0.5, 2, "tensor"])
def test_scales_are_numbers_or_tensors(device, scale, compile_):
    on = torch_device(device)
    key = torch.randn(2, 2, 8, device=on)
    slots = torch.tensor([3, 0], device=on)
    if scale == "tensor":
        scale = torch.tensor([0.5, 2.0], device=on)

    def store(function):
        caches = torch.zeros(2, 4, 2, 8, dtype=torch.float8_e4m3fn, device=on)
        function(key, key, *caches, slots, k_scale=scale, v_scale=scale)
        return caches

    want = store(kv.store_kv)
    assert_bits(store(kvt.store_kv), want, "eager")
    assert_bits(store(compile_(kvt.store_kv)), want, "compiled")


@pytest.mark.parametrize(
    ("dtype", "format"),
    [("float8_e4m3fn", "fp8_e4m3"), ("float8_e5m2", "fp8_e5m2"), ("int8", "int8")],
)
@pytest.mark.parametrize(
    "name", ["store_kv", "store_mla", "rope_store_kv", "gather_kv", "paged_attention"]
)
def test_caches_as_bytes(calls, name, dtype, format):
    """uint8 with a format does what the dtype does."""
    typed, raw = copied(calls[name]), copied(calls[name])
    caches = [n for n, a in OPERATIONS[name].public_arguments.items() if a.cache]
    for cache in caches:
        values = (torch.rand(calls[name][cache].shape) * 9).to(typed[cache].device)
        typed[cache] = values.to(getattr(torch, dtype))
        raw[cache] = typed[cache].clone().view(torch.uint8)
    function = getattr(kvt, name)
    want, got = leaves(function(**typed)), leaves(function(**raw, format=format))
    for i, (x, y) in enumerate(zip(got, want, strict=True)):
        assert_bits(x, y, f"result {i}")
    for cache in caches:
        assert_bits(raw[cache].view(getattr(torch, dtype)), typed[cache], cache)
    operator_arguments = operands(name, {**raw, "format": format})
    torch.library.opcheck(operator(name), *operator_arguments, test_utils="test_faketensor")


def test_a_format_that_is_not_the_caches(calls):
    call = copied(calls["store_kv"])
    kvt.store_kv(**call, format="int8")  # which it is
    with pytest.raises(TypeError, match=r"^k_cache: expected fp8_e4m3, or uint8 .*got torch.int8"):
        kvt.store_kv(**call, format="fp8_e4m3")
    call["k_cache"] = call["k_cache"].view(torch.uint8)
    with pytest.raises(ValueError, match=r"^format: expected one of .*, got 'fp9'"):
        kvt.store_kv(**call, format="fp9")


# --- Gradients ---


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_is_refused(calls, name, compile_):
    call = copied(calls[name])
    arguments = [n for n, x in call.items()
                 if isinstance(x, torch.Tensor) and x.is_floating_point()]  # fmt: skip
    if not arguments:
        return
    argument = arguments[0]
    unchanged = copied(call)
    call[argument].requires_grad_()
    function = getattr(kvt, function_of(name))
    with pytest.raises(TypeError, match=rf"^{argument}: .*requires a gradient; {NO_BACKWARD}"):
        function(**call)
    with pytest.raises(Exception, match=rf"{argument}: .*requires a gradient; {NO_BACKWARD}"):
        compile_(lambda call: function(**call))(call)
    assert_same(call, unchanged)
    with torch.no_grad():
        call[argument] = call[argument].detach().requires_grad_()
        compile_(lambda call: function(**call))(call)


# --- Programs ---


class Attention(torch.nn.Module):
    """A layer over a combined cache (2, pages, page_size, heads, width)."""

    def __init__(self, device, dtype=torch.bfloat16):
        super().__init__()
        on = torch_device(device)
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("cache", torch.zeros(2, 8, 4, 2, 8, dtype=dtype, device=on))
        self.register_buffer("table", kvt.rope_table(32, 8, device=on))
        weight = torch.randn(16, 64, generator=generator)
        self.register_buffer("weight", weight.to(on, torch.bfloat16))

    def forward(self, x, positions, slots, pages, lengths):
        qkv = (x @ self.weight).view(-1, 8, 8)
        query, key, value = qkv[:, :4], qkv[:, 4:6], qkv[:, 6:]
        kvt.rope_store_kv(query, key, value, self.table, positions, *self.cache.unbind(0), slots)
        out = kvt.paged_attention(query, *self.cache.unbind(0), pages, lengths)
        return out.view(-1, 32)

    def inputs(self, batch=3):
        on = self.weight.device
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(batch, 16, generator=generator).to(on, torch.bfloat16)
        slots = 4 * torch.arange(batch, device=on) + 1
        pages = torch.arange(batch, dtype=torch.int32, device=on)[:, None]
        return x, slots % 5, slots, pages, torch.full((batch,), 2, device=on)


def both(device, transform):
    """Run a layer and its transform on the same inputs: batches of several sizes, cache and all."""
    eager, other = Attention(device), Attention(device)
    run = transform(other)
    for batch in (3, 5, 2):
        with torch.no_grad():
            want, got = eager(*eager.inputs(batch)), run(*other.inputs(batch))
        assert_bits(got, want, f"out of {batch}")
        assert_bits(other.cache, eager.cache, f"cache after {batch}")


def test_a_layer_of_any_batch_is_traced_once(device, compile_):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, counts = CompileCounterWithBackend("aot_eager"), []

    def transform(layer):
        run = compile_(layer, backend=counter, dynamic=True)

        def counted(*inputs):
            out = run(*inputs)
            counts.append(counter.frame_count)
            return out

        return counted

    both(device, transform)
    assert counts[0] > 0 and len(set(counts)) == 1, counts


@pytest.mark.usefixtures("lenient_host", "plain_inductor")
def test_inductor_writes_the_cache_in_place(device, compile_):
    """No copy of the cache is made, nor one of the packed rows that are rotated in place."""
    from torch._inductor.utils import run_and_get_code

    eager, layer = Attention(device), Attention(device)
    inputs = layer.inputs()
    with torch.no_grad():
        want = eager(*inputs)
        got, code = run_and_get_code(compile_(layer, backend="inductor"), *inputs)
    torch.testing.assert_close(got, want)
    assert_bits(layer.cache, eager.cache, "cache")
    assert sum("kvcupy.rope_store_kv.default" in text for text in code) == 1
    assert not any("(2, 8, 4, 2, 8)" in line and "empty" in line
                   for text in code for line in text.splitlines())  # fmt: skip
    assert not any("aten.copy" in text or "clone" in text for text in code)


def test_export(device):
    layer, exported = Attention(device), Attention(device)
    batch = torch.export.Dim("batch", min=1, max=8)
    axes = tuple({0: batch} for _ in layer.inputs())
    with torch.no_grad():
        program = torch.export.export(exported, exported.inputs(), dynamic_shapes=axes)
    names = [str(node.target) for node in program.graph.nodes]
    assert "kvcupy.rope_store_kv.default" in names and "kvcupy.paged_attention.default" in names
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    module = torch.export.load(file).module()
    for size in (2, 5):
        with torch.no_grad():
            want, got = layer(*layer.inputs(size)), module(*layer.inputs(size))
        assert_bits(got, want, f"out of {size}")
    (cache,) = (b for name, b in module.named_buffers() if name.endswith("cache"))
    assert_bits(cache, layer.cache, "cache")


def test_pages_of_several_tensors(device, compile_):
    on = torch_device(device)
    layers = [torch.randn(4, 3, device=on) for _ in range(3)]
    want = [each.clone() for each in layers]
    pages = torch.tensor([0], device=on), torch.tensor([3], device=on)
    kv.copy_pages(want, *pages)
    for run in (kvt.copy_pages, compile_(kvt.copy_pages)):
        got = [each.clone() for each in layers]
        run(tuple(got), *pages)
        for x, y in zip(got, want, strict=True):
            assert_bits(x, y, "layer")
    torch.library.opcheck(operator("copy_pages"), (layers, *pages))
    pool = kv.KVPool(4, 2, 1, 1, 4, device=device)
    with pytest.raises(TypeError, match=r"^cache: expected a tensor.*KVPool.*pool.torch_k"):
        kvt.copy_pages(pool, *pages)


# --- Errors ---


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_call_that_raises_has_changed_nothing(calls, mode, compile_):
    call = copied(calls["store_kv"])
    call["value"] = call["value"][:, :1]
    unchanged = copied(call)
    run = kvt.store_kv if mode == "eager" else compile_(kvt.store_kv)
    with pytest.raises(ValueError, match=r"^v_cache: expected 1 heads"):
        run(**call)
    assert_same(call, unchanged)


# --- Streams ---


def test_streams_of_kvcupy(calls, device):
    stream, other = device.stream(), device.stream()
    for name in ("store_kv", "gather_kv", "paged_attention_out", "rope_store_kv"):
        own, theirs = copied(calls[name]), copied(calls[name])
        device.synchronize()
        function = function_of(name)
        want = leaves(getattr(kv, function)(**own))
        got = leaves(getattr(kvt, function)(**theirs, stream=stream))
        stream.synchronize()
        assert_same(theirs, own)
        for x, y in zip(got, want, strict=True):
            assert_bits(x, y, name)
    own, theirs = copied(calls["rope_store_kv"]), copied(calls["rope_store_kv"])
    kv.rope_store_kv(**own)
    device.synchronize()
    kvt.rope_store_kv(**theirs, stream=stream, alt_stream=other)
    stream.synchronize()
    assert_same(theirs, own)


@pytest.mark.parametrize("name", NAMES)
def test_operators_run_on_the_current_stream(calls, name):
    """No stream is passed on, and kvcupy asks torch for its own, in torch's captures too."""
    (found,) = (each for each in OPERATORS if each.name == name)
    passed = []
    declaration = copy(found.declaration)
    declaration.function = lambda **values: passed.append(values)
    replace(found, declaration=declaration).kernel(*operands(name, copied(calls[name]))[0])
    assert not {"stream", "alt_stream"} & passed[0].keys()
    assert (
        passed[0].keys() <= inspect.signature(getattr(kv, found.declaration.name)).parameters.keys()
    )


@pytest.mark.races
def test_reports_of_the_order_checker_name_the_users_line(calls, device):
    """Not the dispatcher's, which calls the kernel."""
    call, stream = copied(calls["store_kv"]), device.stream()
    device.synchronize()
    with kv.order_checker("record") as checker:
        kv.store_kv(**call, stream=stream)
        kvt.store_kv(**call)
    stream.synchronize()
    device.synchronize()
    assert checker.reports
    for report in checker.reports:
        assert report.second.operation == "store_kv"
        assert report.second.site.startswith(f"{__file__}:"), report.second.site


@pytest.mark.parametrize("name", ["stream", "alt_stream"])
def test_no_streams_where_a_call_is_traced(calls, device, name, compile_):
    call, stream = calls["rope_store_kv"], device.stream()
    with pytest.raises(Exception, match=f"{name}: expected None in torch.compile"):
        compile_(lambda call: kvt.rope_store_kv(**call, **{name: stream}))(call)


@pytest.mark.parametrize("whose", ["kvcupy", "cupy", "protocol", "torch"])
def test_tensors_are_recorded_on_the_stream(monkeypatch, whose):
    """Arguments, outputs and results of a GPU, for which there are stand-ins.

    A tensor may be freed long after the stream: torch then records an event on it by its address.
    """

    class OnGpu(torch.Tensor):
        is_cuda = True
        device = SimpleNamespace(index=0)

        def record_stream(self, stream):
            recorded.append((id(self), stream.cuda_stream))

    class TorchStream:
        cuda_stream = None

    api, recorded = FakeApi(), []
    gpu = CudaDevice(0, api)
    monkeypatch.setitem(devices._devices, "cuda:0", gpu)
    monkeypatch.setattr(torch.cuda, "Stream", TorchStream)
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda pointer, _: SimpleNamespace(cuda_stream=pointer)
    )
    key, cache, out, result = (torch.zeros(1).as_subclass(OnGpu) for _ in range(4))
    stream = gpu.stream() if whose == "kvcupy" else api.cupy.cuda.Stream(non_blocking=True)
    if whose == "protocol":
        stream = StreamAddress(stream.ptr, stream)
    if whose == "torch":
        own, stream = stream, TorchStream()
        stream.cuda_stream = own.ptr
    got = kvt._on_streams(
        lambda *arguments, **named: (result, None), (key, None, torch.zeros(1), [cache], 5),
        {"out": out}, {"stream": stream, "alt_stream": gpu.stream()},
    )  # fmt: skip
    assert got == (result, None)
    del stream
    gc.collect()
    pointers = [pointer for _, pointer in recorded[:2]]
    assert recorded == [(id(x), at) for x in (key, cache, out, result) for at in pointers]
    assert len(set(pointers)) == 2
    for pointer in pointers:
        event = api.runtime.eventCreateWithFlags(2)
        api.runtime.eventRecord(event, pointer)
        assert api.runtime.eventQuery(event) == 600
        api.runtime.eventSynchronize(event)


# --- Pools and other memory ---


def test_a_paged_cache_over_tensors_that_a_graph_writes(device, compile_):
    """`KVPool.wrap`: what the graph stores is what the sequences of the cache have."""
    on = torch_device(device)
    kv_cache = torch.zeros(2, 8, 4, 2, 8, dtype=torch.bfloat16, device=on)
    pool = kv.KVPool.wrap([kv_cache[0]], [kv_cache[1]])
    cache = kv.PagedKVCache(num_q_heads=2, pool=pool)
    cache.add_sequence(0)
    rows = torch.randn(3, 2, 8, device=on).to(torch.bfloat16)

    @compile_
    def step(rows, slots, pages, lengths, counts):
        kvt.store_kv(rows, 2 * rows, kv_cache[0], kv_cache[1], slots)
        return kvt.paged_attention(
            rows, kv_cache[0], kv_cache[1], pages, lengths, query_lens=counts
        )

    with cache.forward([0], [3]):
        slots, pages = (kvt.as_tensor(x) for x in (cache.slot_mapping(), cache.block_table()))
        three = torch.tensor([3], device=on)
        out = step(rows, slots, pages, three, three)
    k, v = (kvt.as_tensor(x) for x in cache.get_kv(0, 0, 3))
    assert_bits(k[0], rows, "k")
    assert_bits(v[0], 2 * rows, "v")
    want = kv.paged_attention(rows, *kv_cache, pages, three, query_lens=three)
    assert_bits(out, want, "out")


def test_arrays_as_tensors(device):
    """`test_dlpack_export.py` has every format."""
    array = device.zeros((3, 4), "fp8_e4m3")
    tensor = kvt.as_tensor(array)
    assert tensor.shape == (3, 4) and str(tensor.device) == torch_device(device)
    tensor.view(torch.int8)[1] = 60
    assert (device.to_numpy(array).view(np.int8)[1] == 60).all()
    assert kvt.as_tensor(tensor) is tensor
    with pytest.raises(TypeError, match=r"^array: expected an array, got list"):
        kvt.as_tensor([1])


def test_a_table_of_rope(device):
    table = kvt.rope_table(8, 4, base=100.0, device=torch_device(device))
    want = kv.rope_table(8, 4, base=100.0, device=device)
    assert_bits(table, kvt.as_tensor(want), "table")
    assert str(table.device) == torch_device(device)
    assert_bits(kvt.rope_table(8, 4, base=100.0, device=device), table, "of a kvcupy device")


# --- The module ---


@pytest.mark.full
def test_imported_by_who_asks():
    """Without what compiles graphs, which takes seconds; and Python ends as it should."""
    code = """
import sys, kvcupy
assert "torch" not in sys.modules and "kvcupy.interop" not in sys.modules
import kvcupy.interop.torch
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_first_call_of_a_process_may_be_compiled():
    """Nothing that a call needs is only known after one that was not traced."""
    code = """
import torch
import kvcupy.interop.torch as kvt
query, rows, cache = torch.ones(4, 4, 8), torch.ones(4, 2, 8), torch.zeros(2, 16, 2, 8)
slots, positions, table = torch.arange(4), torch.arange(4), torch.ones(16, 8)
def calls(value):
    kvt.store_kv(rows, value, cache, cache.clone(), slots)
    kvt.rope_store_kv(query, rows, value, table, positions, cache, cache.clone(), slots)
    return kvt.gather_kv(cache, cache, slots)
torch.compile(calls, backend="eager", fullgraph=True)(rows + 1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


# --- On a GPU ---


@pytest.mark.gpu
def test_a_cuda_graph_of_torch(device, compile_):
    """Captured eagerly, and by `mode="reduce-overhead"`: replays read and write what is there."""
    eager, layer = Attention(device), Attention(device)
    inputs = layer.inputs()
    with torch.no_grad():
        want = eager(*inputs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            layer(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(*inputs)
        layer.cache.zero_()
        graph.replay()
        assert_bits(out, want, "out")
        assert_bits(layer.cache, eager.cache, "cache")
        run = compile_(layer, backend="inductor", mode="reduce-overhead")
        for _ in range(3):
            layer.cache.zero_()
            torch.testing.assert_close(run(*inputs), want)
            assert_bits(layer.cache, eager.cache, "cache")
