"""`PagedKVCache(attention=...)`: kernels of other libraries and functions of users.

FlashInfer and FlashAttention are stand-ins (`attention_libraries.py`) on the host device, which
counts as a GPU in these tests. Where the packages are installed on a GPU, they attend themselves.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import observe, reference
from kvcupy.interop import attention_backends

torch = pytest.importorskip("torch")
import attention_libraries as libraries  # noqa: E402 -- it needs torch

SHAPE = {
    "num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "num_pages": 60,
    "page_size": 4,
}  # fmt: skip
LATENT = {"num_layers": 2, "num_q_heads": 2, "latent_dim": 512, "rope_dim": 64, "num_pages": 60,
          "page_size": 4}  # fmt: skip
SM_SCALE = 0.11
pytestmark = pytest.mark.usefixtures("lenient_host")


@pytest.fixture(autouse=True)
def reasons_are_logged_again(monkeypatch):
    monkeypatch.setattr(kv.config, "_warned", set())


@pytest.fixture
def installed(device, monkeypatch):
    """Install stand-ins for packages beside a GPU of an architecture."""
    if device.kind != "host":
        pytest.skip("the stand-ins compute on the host")
    monkeypatch.setattr(attention_backends, "FLASHINFER_WORKSPACE_BYTES", 1 << 10)

    def install(*packages, gpu="sm_90"):
        libraries.install(monkeypatch, *packages)
        monkeypatch.setattr(attention_backends, "gpu_of", lambda device: gpu)

    return install


class Model:
    """A cache and the rows of its tokens, which depend on the sequence and the position alone."""

    def __init__(self, device, attention="kvcupy", *, in_torch=True, fmt="bf16", **options):
        shape = LATENT if "latent_dim" in options else SHAPE
        self.cache = kv.PagedKVCache(**{**shape, **options}, device=device, attention=attention)
        self.is_latent, self.in_torch, self.fmt = shape is LATENT, in_torch, fmt
        self.device = device
        self.options = {"sm_scale": SM_SCALE} if self.is_latent else {}

    def rows(self, name, start, count, layer):
        rng = np.random.default_rng([ord(name[0]), layer])
        whole = rng.standard_normal((700, 8, 576 if self.is_latent else 64), np.float32)
        whole = whole[start : start + count]
        if self.is_latent:
            return whole[:, :2], whole[:, 2, :512], whole[:, 2, 512:]
        return whole[:, :4], whole[:, 4:6], whole[:, 6:]

    def array(self, values):
        rounded = np.ascontiguousarray(reference.encode(values, self.fmt))
        if self.in_torch:
            bits = torch.from_numpy(rounded.view(f"i{rounded.itemsize}"))
            dtype = getattr(torch, kv.formats.numpy_dtype(self.fmt).name)
            return bits.view(dtype).to(self.device.torch_name)
        return self.device.asarray(rounded.view(kv.formats.numpy_dtype(self.fmt)))

    def step(self, *, tree=None, stream=None, per_layer=None, padding=0, **news):
        """Append tokens; return the outputs of the layers as float64."""
        starts = {name: self.cache.sequence_length(name) for name in news}
        outs = []
        with self.cache.forward(list(news), list(news.values()), token_tree=tree):
            for layer in range(2):
                rows = [self.rows(name, starts[name], n, layer) for name, n in news.items()]
                arrays = [np.concatenate([r[i] for r in rows]) for i in range(3)]
                arrays = [np.concatenate([a, a[:1].repeat(padding, axis=0)]) for a in arrays]
                call = self.cache.attention_mla if self.is_latent else self.cache.attention
                options = {**self.options, **(per_layer[layer] if per_layer else {})}
                out = call(layer, *map(self.array, arrays), stream=stream, **options)
                assert isinstance(out, torch.Tensor) == self.in_torch
                outs.append(out)
        if stream is not None:
            stream.synchronize()
        got = [self.device.to_numpy(out) for out in outs]
        return np.stack([reference.decode(out, reference.format_of(out)) for out in got])

    def program(self, **options):
        """Prefill, decode, a chunk, and decode behind a fork."""
        add = self.cache.add_sequence
        add("a"), add("b")
        outs = [self.step(a=9, b=21, **options), self.step(b=1, a=1, **options)]
        outs.append(self.step(a=6, b=1, **options))
        self.cache.fork_sequence("a", "c", at=7)
        outs += [self.step(c=1, a=1, b=1, **options) for _ in range(3)]
        self.cache.remove_sequence("b")
        add("b")
        outs.append(self.step(a=1, b=3, c=1, **options))
        return outs


STEPS = 7


def near(got, want):
    """Whether results differ by no more than a rounding to bf16 or fp16 of values around 1."""
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-2)


def equal(got, want):
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def calls(function):
    return [call for call in libraries.CALLS if call[0] == function]


def runs():
    """The calls that attend, of either library."""
    return [call for call in libraries.CALLS if call[0] in ("run", *FUNCTIONS)]


def pair(device, attention):
    """Return a cache with a backend, and one of kvcupy's kernels, each with a sequence "a"."""
    models = Model(device, attention), Model(device)
    for each in models:
        each.cache.add_sequence("a")
    return models


def messages(caplog):
    return [r.getMessage() for r in caplog.records if r.name == "kvcupy"]


LIBRARIES = {
    "flashinfer": ("flashinfer", {}),
    "flashinfer fp16": ("flashinfer", {"dtype": "fp16"}),
    "flashinfer fp8": ("flashinfer", {"dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5}),
    "flashinfer by page": ("flashinfer", {"layout": "page_first"}),
    "flashinfer mla": ("flashinfer", {"latent_dim": 512}),
    "flashinfer rotated": ("flashinfer", {"rope": 64}),
    "fa3": ("flash_attn", {}),
    "fa2": ("flash_attn", {"page_size": 256, "num_pages": 6}),
    "fa2 of 512": ("flash_attn", {"page_size": 512, "num_pages": 6}),
}


PACKAGES = {"fa3": "flash_attn_interface"}  # where its name is another


def options_of(device, options):
    options = dict(options)
    if "rope" in options:
        options["rope"] = device.asarray(reference.rope_table(256, options["rope"]))
    if layout := options.pop("layout", None):
        shape = {name: SHAPE[name] for name in SHAPE if name != "num_q_heads"}
        options["pool"] = kv.KVPool(**shape, dtype="bf16", layout=layout, device=device)
    return options


@pytest.mark.parametrize("case", LIBRARIES)
def test_a_library_attends(device, installed, case, caplog):
    """Results equal kvcupy's up to rounding; one plan serves all layers of a step."""
    attention, options = LIBRARIES[case]
    installed(PACKAGES.get(case, attention))
    fmt = options.get("dtype", "bf16").replace("fp8_e4m3", "bf16")
    want = Model(device, fmt=fmt, **options_of(device, options)).program()
    model = Model(device, attention, fmt=fmt, **options_of(device, options))
    near(model.program(), want)
    assert len(runs()) == 2 * STEPS and not messages(caplog)
    if attention == "flashinfer":
        assert len(calls("plan")) == STEPS, "one for all layers of a step"
        assert len(calls("__init__")) == 2, "one for decode, one for other steps"


FUNCTIONS = ("flash_attn_with_kvcache", "flash_attn_varlen_func")


@pytest.mark.parametrize("options_of_layer_0", [{"window": 5}, {"sm_scale": 0.3}], ids=str)
@pytest.mark.parametrize("case", ["flashinfer", "fa3", "fa2"])
def test_windows_and_scales(device, installed, case, options_of_layer_0, caplog):
    """Layers whose options differ have a plan each."""
    attention, options = LIBRARIES[case]
    installed(PACKAGES.get(case, attention))
    per_layer = [options_of_layer_0, {}]
    want = Model(device, **options).program(per_layer=per_layer)
    near(Model(device, attention, **options).program(per_layer=per_layer), want)
    assert not messages(caplog)
    if attention == "flashinfer":
        assert len(calls("plan")) == len(calls("run")) == 2 * STEPS


def test_an_error_of_a_library(device, installed, monkeypatch, caplog):
    installed("flashinfer")
    monkeypatch.setattr(libraries, "ERROR", RuntimeError("no nvcc\nand more"))
    want = Model(device).program()
    equal(Model(device, "flashinfer").program(), want)
    (message,) = messages(caplog)
    assert "is off" in message and message.endswith("because RuntimeError: no nvcc")
    assert len(calls("run")) == 1


@pytest.mark.parametrize("attention", ["flashinfer", "flash_attn"])
def test_an_error_of_kvcupy_is_raised(device, installed, monkeypatch, attention):
    """A failed upload, or a report of the order checker, is no error of the library."""
    installed("flashinfer", "flash_attn_interface")
    model = Model(device, attention)
    model.cache.add_sequence("a")
    model.step(a=3)

    def fail(*arguments):
        raise kv.DeviceError("no memory")

    class Observer:
        def before(self, operation):
            if operation.name == attention:
                raise kv.OrderError("a race")

        after = recorded = waited = lambda self, *arguments: None

    with monkeypatch.context() as patch:
        patch.setattr(attention_backends.Backend, "_array", fail)
        with pytest.raises(kv.DeviceError, match="no memory"):
            model.step(a=1)
    with observe.attached(Observer()), pytest.raises(kv.OrderError, match="a race"):
        model.step(a=1)
    libraries.CALLS.clear()
    assert model.cache.sequence_length("a") == 3
    model.step(a=1)
    assert runs()


def test_on_streams(device, installed, caplog):
    """Streams of the host device are waited for; steps of several streams share wrappers."""
    installed("flashinfer")
    model, plain = pair(device, "flashinfer")
    for count, stream in ((9, device.stream()), (1, None), (3, device.stream()), (1, None)):
        near(model.step(a=count, stream=stream), plain.step(a=count))
    assert len(calls("run")) == 8 and len(calls("__init__")) == 2 and not messages(caplog)


def test_rows_of_padding(device, installed):
    installed("flashinfer")
    model, plain = pair(device, "flashinfer")
    got, want = model.step(a=6, padding=3), plain.step(a=6, padding=3)
    np.testing.assert_allclose(got, want, atol=2e-2)
    assert got.shape[1] == 9 and not got[:, 6:].any()


def test_tables_that_are_uploaded_again(device, installed):
    """As after a copy that failed: the library then reads the new ones."""
    installed("flash_attn_interface")
    outs = []
    for attention in ("flash_attn", "kvcupy"):
        model = Model(device, attention)
        model.cache.add_sequence("a")
        with model.cache.forward(["a"], [5]):
            rows = [model.array(part) for part in model.rows("a", 0, 5, 0)]
            model.cache.attention(0, *rows)
            tables = model.cache._steps.tables
            device.carrier(tables._slot.views["block_table"])[...] = 50
            tables._slot, tables._readers = None, {}
            outs.append(device.to_numpy(model.cache.attention(1, *rows)).astype(float))
    near(*outs)


def test_arrays_of_numpy(device, installed, caplog):
    """Libraries get torch tensors over the same memory."""
    installed("flash_attn_interface")
    want = Model(device, in_torch=False).program()
    near(Model(device, "flash_attn", in_torch=False).program(), want)
    assert len(calls("flash_attn_with_kvcache")) == 2 * STEPS and not messages(caplog)


# --- What is left to kvcupy -----------------------------------------------------------------------


def tree_step(model):
    model.cache.add_sequence("a")
    model.step(a=5)
    return model.step(a=3, tree=[[-1, 0, 0]])


def evicted_step(model):
    model.cache.add_sequence("a")
    model.cache.enable_sliding_window("a", 4, sink_tokens=2)
    model.step(a=12)
    return model.step(a=1)


def options_step(**options):
    def step(model):
        model.cache.add_sequence("a")
        return model.step(a=9, per_layer=[options, options])

    return step


def out_step(model):
    model.cache.add_sequence("a")
    out = torch.zeros(9, 4, 64)
    return model.step(a=9, per_layer=[{"out": out}, {"out": out}])


def captured_step(model):
    model.cache.add_sequence("a")
    model.step(a=5)
    rows = [model.array(part) for part in model.rows("a", 5, 1, 0)]
    out, stream = torch.zeros(1, 4, 64, dtype=torch.bfloat16), model.device.stream()
    with model.cache.forward(["a"], [1]):
        with stream.capture() as graph:
            model.cache.attention(0, *rows, out=out, stream=stream)
        graph.launch(stream)
        stream.synchronize()
    return model.device.to_numpy(out).astype(float)


plain_step = options_step()
UNSUPPORTED = [  # library, cache, step, reason, calls of the library
    ("flashinfer", {}, tree_step, "token tree", 2),
    ("flashinfer", {}, evicted_step, "evicted span", 2),
    ("flashinfer", {}, options_step(logits_soft_cap=20.0), "soft cap", 0),
    ("flash_attn", {}, options_step(logits_soft_cap=20.0), "soft cap", 0),
    ("flashinfer", {}, options_step(sinks=np.ones(4, np.float32)), "learned sinks", 0),
    ("flashinfer", {}, options_step(window=4, sink_tokens=2), "first tokens", 0),
    ("flashinfer", {}, out_step, "the output is fp32", 0),
    ("flashinfer", {}, captured_step, "captured", 2),
    ("flashinfer", {"batch_invariant": True}, plain_step, "order of sums", 0),
    ("flashinfer", {"rope": 64, "rope_mode": "inline"}, plain_step, "inline", 0),
    ("flashinfer", {"dtype": "nvfp4"}, plain_step, "nvfp4", 0),
    ("flashinfer", {"dtype": "int8"}, plain_step, "int8", 0),
    ("flashinfer", {"dtype": "fp8_e4m3"}, plain_step, "one number as the scale", 0),
    ("flash_attn", {"dtype": "fp8_e4m3", "k_scale": 1.0}, plain_step, "fp8_e4m3", 0),
    ("flashinfer", {"dtype": "fp32", "fmt": "fp32"}, plain_step, "take fp32", 0),
    ("flashinfer", {"head_dim": 64, "v_head_dim": 32}, None, "(64, 32)", 0),
    ("flash_attn", {"latent_dim": 512}, plain_step, "latents", 0),
    ("flashinfer", {"latent_dim": 512}, options_step(window=3), "no window", 0),
    ("fa2", {"page_size": 128, "num_pages": 6}, plain_step, "256", 0),
    ("flashinfer", {"demotion": kv.Demotion("fp8_e4m3", recent=4)}, None, "demoted", 0),
]  # fmt: skip


def narrow_step(model):
    """Values of 32 elements."""
    model.cache.add_sequence("a")
    q, k, v = model.rows("a", 0, 9, 0)
    with model.cache.forward(["a"], [9]):
        out = model.cache.attention(0, *map(model.array, (q, k, v[..., :32])))
    return model.device.to_numpy(out).astype(float)


def demoted_step(model):
    model.cache.add_sequence("a")
    model.step(a=21)
    libraries.CALLS.clear()
    return model.step(a=1)


@pytest.mark.parametrize("case", range(len(UNSUPPORTED)), ids=lambda i: UNSUPPORTED[i][3])
def test_what_a_library_does_not_support(device, installed, caplog, case):
    """kvcupy's kernels attend, and say why once."""
    attention, options, step, reason, supported = UNSUPPORTED[case]
    step = step or (narrow_step if "v_head_dim" in options else demoted_step)
    package = {"flash_attn": "flash_attn_interface", "fa2": "flash_attn"}.get(attention, attention)
    installed(package)
    attention = attention.replace("fa2", "flash_attn")
    want = step(Model(device, **options_of(device, options)))
    caplog.clear()
    for _ in range(2):
        got = step(Model(device, attention, **options_of(device, options)))
        if supported:
            np.testing.assert_allclose(got, want, atol=2e-2)
        else:
            np.testing.assert_array_equal(got, want)
    ours = [m for m in messages(caplog) if m.startswith("attention=")]
    assert len(ours) == 1 and reason in ours[0], ours
    assert len(runs()) == 2 * supported


def test_on_the_host_nothing_is_taken(device, installed, caplog):
    installed("flashinfer", gpu=None)
    want = Model(device).program()
    equal(Model(device, "flashinfer").program(), want)
    equal(Model(device, "auto").program(), want)
    (message,) = messages(caplog)
    assert "not on a GPU" in message and not calls("run")


# --- "auto" ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "options", "runs"),
    [("sm_90", {}, 3), ("sm_103", {}, 3), ("sm_80", {}, 0), ("sm_80", {"latent_dim": 512}, STEPS),
     ("sm_90", {"dtype": "fp8_e4m3", "k_scale": 1.0}, 0)],
)  # fmt: skip
def test_auto_takes_what_was_measured_to_win(device, installed, caplog, gpu, options, runs):
    """Prefill on Hopper and later, and MLA."""
    installed("flashinfer", gpu=gpu)
    want = Model(device, **options).program()
    near(Model(device, "auto", **options).program(), want)
    assert len(calls("run")) == 2 * runs and not messages(caplog)
    backends = {call[1]["backend"] for call in calls("__init__")}
    assert backends <= {"auto"}  # "fa3" is for tensors on a GPU


def test_auto_without_flashinfer(device, installed, monkeypatch, caplog):
    installed()
    want = Model(device).program()
    equal(Model(device, "auto").program(), want)
    assert not messages(caplog)


# --- Arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["flashinfer", "flash_attn"])
def test_a_missing_package(device, installed, attention):
    installed()
    with pytest.raises(ImportError, match=f"attention: '{attention}' needs `pip install flash"):
        Model(device, attention)


@pytest.mark.parametrize("attention", ["", "FlashInfer", None, 3, ["flashinfer"], True])
def test_wrong_values(device, attention):
    with pytest.raises(ValueError, match="attention: expected one of kvcupy, auto, flashinfer"):
        Model(device, attention)


# --- Functions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_torch", [True, False], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    "options",
    [{}, {"latent_dim": 512}, {"dtype": "fp8_e4m3"}, {"dtype": "int8", "k_scale": 0.1},
     {"dtype": "fp32", "fmt": "fp32"}],
)  # fmt: skip
def test_a_function_has_the_signature_of_paged_attention(device, caplog, in_torch, options):
    """So `paged_attention` itself can be passed; its results have the same bits."""
    seen = []

    def attention(*arrays, **options):
        own = [a for a in (*arrays, *options.values()) if hasattr(a, "dtype")]
        seen.append([isinstance(a, torch.Tensor) for a in own])
        return kv.paged_attention(*arrays, **options)

    per_layer = [{"window": 5, "sink_tokens": 1}, {"logits_soft_cap": 3.0}]
    want = Model(device, in_torch=in_torch, **options).program(per_layer=per_layer)
    model = Model(device, attention, in_torch=in_torch, **options)
    equal(model.program(per_layer=per_layer), want)
    assert len(seen) == 2 * STEPS and not [m for m in messages(caplog) if "attention=" in m]
    assert all(flags[:5] == [in_torch] * 5 for flags in seen)


def test_a_function_that_returns_another_array(device):
    results = []

    def own(q, k, v, table, lens, *, cu_query_lens, stream, out):
        results.append(kv.paged_attention(q, k, v, table, lens, cu_query_lens=cu_query_lens))
        return results[-1]

    model = Model(device, own)
    model.cache.add_sequence("a")
    outs = model.step(a=7)
    assert len(results) == 2
    equal(outs, [device.to_numpy(out).astype(float) for out in results])


@pytest.mark.parametrize("nothing", [None, NotImplemented])
def test_a_function_may_leave_calls_to_kvcupy(device, caplog, nothing):
    def attention(*arrays, out, **options):
        out[...] = 7  # is overwritten
        return nothing

    want = Model(device).program()
    equal(Model(device, attention).program(), want)
    (message,) = messages(caplog)
    assert message.endswith("because it returned None or NotImplemented")
    assert "attention='test_a_function_may" in message


def test_an_error_of_a_function_is_raised(device):
    """`forward` takes the step back, as after any error."""
    broken = [True]

    def attention(*arrays, **options):
        if broken:
            raise KeyError("mine")
        return kv.paged_attention(*arrays, **options)

    model, plain = pair(device, attention)
    with pytest.raises(KeyError, match="mine"):
        model.step(a=5)
    assert model.cache.sequence_length("a") == 0
    assert model.cache.num_available_pages == SHAPE["num_pages"]
    broken.clear()
    equal(model.step(a=5), plain.step(a=5))


@pytest.mark.gpu
def test_a_function_on_a_stream_of_torch(device, caplog):
    """The stream of the call is torch's current one, and what the function gets as `stream`."""
    stream, seen = torch.cuda.Stream(device.torch_name), []

    def attention(*arrays, stream, **options):
        seen.append(torch.cuda.current_stream(device.torch_name).cuda_stream)
        return kv.paged_attention(*arrays, **options)

    want = Model(device).program()
    equal(Model(device, attention).program(stream=stream), want)
    assert seen == [stream.cuda_stream] * 2 * STEPS and not messages(caplog)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["flashinfer", "flashinfer mla", "flashinfer fp8", "fa3", "fa2"])
def test_an_installed_library_attends(device, caplog, case):
    attention, options = LIBRARIES[case]
    package = {"fa3": "flash_attn_interface", "fa2": "flash_attn.flash_attn_interface"}
    pytest.importorskip(package.get(case, attention))
    fmt = options.get("dtype", "bf16").replace("fp8_e4m3", "bf16")
    want = Model(device, fmt=fmt, **options).program()
    for stream in (None, torch.cuda.Stream(device.torch_name)):
        near(Model(device, attention, fmt=fmt, **options).program(stream=stream), want)
    assert not messages(caplog)


def test_a_cache_is_freed_with_its_last_reference(device, installed):
    installed("flashinfer")
    for attention in ("flashinfer", "auto", kv.paged_attention):
        model = Model(device, attention)
        model.program()
        gone = weakref.ref(model.cache.pool)
        gc.disable()
        del model
        gc.enable()
        assert gone() is None
