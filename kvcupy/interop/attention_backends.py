"""FlashInfer, FlashAttention and user-defined functions in place of kvcupy's own attention.

`PagedKVCache(attention=...)` opens a backend here. Its kernels (`Kernels`) have the signature of
`kvcupy.paged_attention`, and read the tables of the step and the views of the layer without a copy.
Calls that they do not support are left to kvcupy's kernels, and the reason is logged once.

Sources: flashinfer-ai/flashinfer `flashinfer/decode.py`, `prefill.py`, `mla`;
Dao-AILab/flash-attention `flash_attn/flash_attn_interface.py`, `hopper/flash_attn_interface.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from .. import observe
from ..arrays import note_written, tensor_of, view
from ..cache.paged.backends import LayerCall
from ..cache.paged.layers import Layers
from ..cache.paged.step import Step
from ..cache.paged.steps import Steps
from ..cache.paged.tables import block_table
from ..cache.pool import Pool
from ..config import config, logger
from ..devices.protocol import Device, Event, Stream
from ..formats import CACHE_FORMATS, FOUR_BIT, numpy_dtype

NAMES = ("kvcupy", "auto", "flashinfer", "flash_attn")
FLASHINFER_WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation recommends


class Kernels(Protocol):
    """Attention with the signature of `kvcupy.paged_attention`."""

    def __call__(
        self, query: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, *,
        cu_query_lens: Any, out: Any, stream: Stream, **options: Any,
    ) -> Any:  # fmt: skip
        """Return `out`, or an array to copy there, or None or NotImplemented: kvcupy attends."""


class Backend:
    """Attention by other kernels, as `cache.paged.backends.AttentionBackend`."""

    def __init__(self, name: str, kernels: Kernels, device: Device, skips_decode: bool) -> None:
        self._name, self._kernels, self._device = name, kernels, device
        self._library = kernels if isinstance(kernels, Library) else None
        self._skips_decode, self._is_on = skips_decode, True
        self._known: dict[tuple[object, bool], tuple[object, list[Any]]] = {}

    def attend(self, call: LayerCall) -> bool:
        """Write the output, and return True; False leaves the call to kvcupy's kernels."""
        if not self._is_on or (self._skips_decode and "cu_query_lens" not in call.tables):
            return False
        reason = _refusal(call)
        if not reason and self._library is not None:
            reason = self._library.refusal(call)
        if reason:
            self.log(reason)
            return False
        query, out, stream = view(call.query), view(call.out), call.stream
        in_torch = self._library is not None or query.library == "torch"
        done: list[bool] = []

        def run() -> None:
            try:
                result = self._kernels(*arrays, out=written, stream=stream, **options)
                is_done = result is not None and result is not NotImplemented
                if is_done and result is not written:
                    written[...] = result
                done.append(is_done)
            except Exception as error:
                if self._library is None:
                    raise
                self._is_on = False
                done.append(False)
                logger.warning(
                    "attention=%r is off, and kvcupy's kernels attend, because %s: %s", self._name,
                    type(error).__name__, str(error).partition("\n")[0],
                )  # fmt: skip

        def enqueue() -> None:
            self._device.run(run, stream, (query.owner, out.owner, self._kernels))
            if not done:  # a stream of the host device has a thread
                stream.synchronize()

        def describe() -> observe.Operation:
            reads, writes = observe.Access(query, name="query"), observe.Access(out, name="out")
            return observe.Operation(self._name, stream, (reads,), (writes,))

        with _torch_on(stream, self._device, in_torch):
            caches, names = call.caches, ("seq_lens", "cu_query_lens")
            parts: tuple[Any, ...] = block_table(call.tables), *map(call.tables.get, names)
            *tables, starts = self._converted("step", call.tables, parts, in_torch)
            parts = caches["k_cache"], caches["v_cache"]
            k_and_v = self._converted(call.layer, caches, parts, in_torch)
            arrays = [self._array(call.query, in_torch), *k_and_v, *tables]
            written = self._array(call.out, in_torch)
            options = _options(call) | {"cu_query_lens": starts}
            observe.issue(describe, enqueue)
        note_written((call.out,))
        if self._is_on and not done[0]:
            self.log("it returned None or NotImplemented")
        return done[0]

    def log(self, reason: str) -> None:
        """Log once why kvcupy's kernels attend."""
        config.warn_once(f"attention={self._name!r}: kvcupy's kernels attend, because {reason}")

    def _converted(
        self, key: object, source: object, arrays: tuple[Any, ...], in_torch: bool
    ) -> list[Any]:
        """Return `_array` of arrays, once for each source: caches of a layer, tables of a step."""
        known = self._known.get((key, in_torch))
        if known is None or known[0] is not source:
            converted = [None if a is None else self._array(a, in_torch) for a in arrays]
            known = self._known[key, in_torch] = source, converted
        return known[1]

    def _array(self, array: Any, in_torch: bool) -> Any:
        """Return an array as a torch tensor, or else as one of the device's own library."""
        v = view(array)
        if not in_torch:
            return self._device.carrier(v).view(numpy_dtype(v.format))
        return array if v.library == "torch" and v is not array else tensor_of(v)


def _refusal(call: LayerCall) -> str:
    """Return why only kvcupy's kernels can attend in a call, or ""."""
    return _first_of({
        "a captured step replays kernels without Python between them": call.stream.capturing,
        "batch_invariant asks for kvcupy's order of sums": call.options.batch_invariant,
        "a step has a token tree": "tree_mask" in call.tables,
        "a sequence has an evicted span": "evicted_starts" in call.tables,
        "a sequence has demoted tokens": "demoted_table" in call.tables,
    })  # fmt: skip


def _first_of(reasons: dict[str, Any]) -> str:
    return next((reason for reason, holds in reasons.items() if holds), "")


def _options(call: LayerCall) -> dict[str, Any]:
    """Return the options of a call by the names of `paged_attention`, without those unset."""
    options = {
        "sm_scale": call.options.sm_scale, "window": call.options.window or None,
        "sink_tokens": call.options.sink_keys or None, "sinks": call.sinks,
        "logits_soft_cap": call.options.soft_cap or None,
        **{name: scale for name, scale in call.caches.items() if "scale" in name},
    }  # fmt: skip
    return {name: value for name, value in options.items() if value is not None}


def _torch_on(stream: Any, device: Device, in_torch: bool) -> AbstractContextManager[object]:
    """Let torch work on a stream, where it has streams."""
    if not in_torch or device.torch_name == "cpu":
        return nullcontext()
    import torch

    _, pointer = stream.__cuda_stream__()
    is_current = torch.cuda.current_stream(device.torch_name).cuda_stream == pointer
    other = None if is_current else torch.cuda.ExternalStream(pointer, device.torch_name)
    context: AbstractContextManager[object] = torch.cuda.stream(other)
    return context


def gpu_of(device: Device) -> str | None:
    """Return the architecture of a GPU, "sm_90"; None on the host, where no package has kernels."""
    return device.arch if device.kind == "cuda" else None


# --- Libraries ------------------------------------------------------------------------------------


class Library:
    """Base of the adapters of libraries, each of which is `Kernels`."""

    unsupported = ""

    def __init__(self, pool: Pool, layers: Layers, steps: Steps) -> None:
        self.dtype, self.widths = pool.dtype, (layers.width, layers.v_width)
        self.is_latent, self.gpu = layers.is_latent, gpu_of(pool.device)
        self._steps: Steps = weakref.proxy(steps)  # which refers to this, by its layers
        self._seen: Callable[[], Step | None] = lambda: None
        self._derived: dict[Any, Any] = {}

    def refusal(self, call: LayerCall) -> str:
        """Return why a call is not supported, or ""."""
        options, query, out = call.options, view(call.query).format, view(call.out).format
        formats = ("fp16", "bf16") if self.dtype.startswith("fp8") else (self.dtype,)
        return _first_of({
            f"the query is {query}": query not in formats,
            f"the output is {out}": out != query,
            "there are learned sinks": call.sinks is not None,
            "a window leaves first tokens visible": options.window and options.sink_keys,
            # By tanh.approx, whose relative error is 2**-11: of a score of 50 that is 2 %.
            "other libraries approximate the soft cap": options.soft_cap,
            "FlashInfer's MLA takes no window": self.is_latent and options.window,
        })  # fmt: skip

    def step(self) -> tuple[Step, dict[Any, Any]]:
        """Return the running step, and what was derived from it."""
        step = self._steps.running
        assert step is not None
        if self._seen() is not step:
            self._seen, self._derived = weakref.ref(step), {}
        return step, self._derived


class FlashInfer(Library):
    """FlashInfer's wrappers: planned once per step, for all layers of equal options.

    The host makes plans from lengths that it has; it waits only for the previous plan of a wrapper,
    whose pinned memory is packed again.
    """

    def __init__(self, pool: Pool, layers: Layers, steps: Steps) -> None:
        super().__init__(pool, layers, steps)
        self._decode = import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
        self._prefill = import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
        self._mla = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        self._workspace: Any = None  # of all wrappers, which run one after another
        self._last_run: tuple[Stream, Event] | None = None
        # For decode and for other steps: wrappers of the first plan of a step, the second, ...
        self._wrappers: dict[bool, list[tuple[Any, Event | None]]] = {True: [], False: []}
        caches, widths = layers.caches[0], [(64, 64), (128, 128), (256, 256)]
        scales = [scale for name, scale in caches.items() if "scale" in name]
        is_plain = pool.dtype in ("fp16", "bf16")
        self.unsupported = _first_of({
            f"FlashInfer does not take {pool.dtype} here": not is_plain
                and (layers.is_latent or not pool.dtype.startswith("fp8")),
            "FlashInfer takes one number as the scale of a cache": not all(
                isinstance(scale, (int, float, np.number, type(None))) for scale in scales),
            f"FlashInfer is not used for heads of {self.widths} elements":
                self.widths not in ([(576, 512)] if layers.is_latent else widths),
            "FlashInfer takes K and V of the same strides": not layers.is_latent
                and caches["k_cache"].strides != caches["v_cache"].strides,
        })  # fmt: skip

    def __call__(
        self, query: Any, k_cache: Any, v_cache: Any, *tables: Any, cu_query_lens: Any, out: Any,
        stream: Stream, sm_scale: float | None = None, window: int = 0, **scales: float,
    ) -> Any:  # fmt: skip
        """Plan if the step has no plan for such a call, and run."""
        if self._last_run is not None and self._last_run[0] is not stream:
            stream.wait(self._last_run[1])
        key, (_, plans) = (query.dtype, sm_scale, window), self.step()
        if key not in plans:
            is_decode = cu_query_lens is None
            plans[key] = self._plan(query, k_cache, is_decode, sm_scale, window, stream)
        result = out  # some kernels apply v_scale in another array
        if self.is_latent:
            latent = self.widths[1]
            plans[key].run(
                q_nope=query[..., :latent], q_pe=query[..., latent:],
                ckv_cache=k_cache[:, :, 0, :latent], kpe_cache=k_cache[:, :, 0, latent:], out=out,
            )  # fmt: skip
        else:
            factors = {name: float(scale) for name, scale in scales.items()}
            result = plans[key].run(query, (k_cache, v_cache), out=out, **factors)
        self._last_run = stream, stream.record()
        return result

    def _plan(
        self, query: Any, k_cache: Any, is_decode: bool, sm_scale: float | None, window: int,
        stream: Stream,
    ) -> Any:  # fmt: skip
        """Return a wrapper that is planned for the step."""
        import torch

        step, plans = self.step()
        wrappers, number = self._wrappers[is_decode], len(plans)
        if number == len(wrappers):
            wrappers.append((self._wrapper(query, k_cache, is_decode), None))
        wrapper, planned = wrappers[number]
        if planned is not None:
            planned.synchronize()
        # FlashInfer plans on the host, and copies what its kernels read.
        host = {name: torch.from_numpy(array) for name, array in step.page_lists().items()}
        indices = host["indices"]
        if query.is_cuda:  # copies from pinned memory do not wait
            indices = indices.pin_memory().to(query.device, non_blocking=True)
        starts = torch.from_numpy(np.cumsum([0, *step.counts], dtype=np.int32))
        heads, kv_heads, page_size = query.shape[1], k_cache.shape[2], k_cache.shape[1]
        options: dict[str, Any] = {
            "sm_scale": sm_scale, "q_data_type": query.dtype, "kv_data_type": k_cache.dtype
        }  # fmt: skip
        if self.is_latent:
            latent, lengths = self.widths[1], [s.length for s in step.sequences]
            options["sm_scale"] = sm_scale or query.shape[2] ** -0.5
            wrapper.plan(
                qo_indptr=starts, kv_indptr=host["indptr"], kv_indices=indices,
                kv_len_arr=torch.tensor(lengths, dtype=torch.int32), num_heads=heads,
                head_dim_ckv=latent, head_dim_kpe=query.shape[2] - latent, page_size=page_size,
                causal=True, **options,
            )  # fmt: skip
        else:
            shape = heads, kv_heads, query.shape[2], page_size
            arguments: tuple[Any, ...] = host["indptr"], indices, host["last_page_len"], *shape
            options["window_left"] = window - 1
            if not is_decode:
                arguments, options["causal"] = (starts, *arguments), True
            wrapper.plan(*arguments, **options)
        wrappers[number] = wrapper, stream.record()
        return wrapper

    def _wrapper(self, query: Any, k_cache: Any, is_decode: bool) -> Any:
        import torch

        if self._workspace is None:
            self._workspace = torch.zeros(
                FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device
            )
        # The kernels with Hopper's instructions, which take K and V of 16 bits.
        has_fa3 = self.gpu == "sm_90" and k_cache.dtype == query.dtype and query.is_cuda
        backend = "fa3" if has_fa3 else "auto"
        if self.is_latent:
            return self._mla(self._workspace, backend=backend)
        if is_decode:
            group = query.shape[1] // k_cache.shape[2]
            return self._decode(self._workspace, "NHD", use_tensor_cores=group >= 4)
        return self._prefill(self._workspace, "NHD", backend=backend)


class FlashAttention(Library):
    """FlashAttention 3 on Hopper where it is installed, else FlashAttention 2."""

    def __init__(self, pool: Pool, layers: Layers, steps: Steps) -> None:
        super().__init__(pool, layers, steps)
        module: Any = None
        if self.gpu in (None, "sm_90"):
            with suppress(ImportError):  # version 2 may be installed, or is what the error names
                module = import_module("flash_attn_interface")
        self._is_fa3 = module is not None
        self._module: Any = module or import_module("flash_attn.flash_attn_interface")
        width, size = layers.width, pool.page_size
        self.unsupported = _first_of({
            "FlashAttention is not used for latents": layers.is_latent,
            f"FlashAttention does not take {pool.dtype} here": pool.dtype not in ("fp16", "bf16"),
            f"FlashAttention is not used for heads of {self.widths} elements":
                self.widths != (width, width) or width % 8 or width > 256,
            f"FlashAttention 2 takes pages of 256 tokens, not {size}":
                not self._is_fa3 and size % 256,
        })  # fmt: skip

    def __call__(
        self, query: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, *,
        cu_query_lens: Any, out: Any, stream: Stream, sm_scale: float | None = None,
        window: int = 0,
    ) -> Any:  # fmt: skip
        """Return the result; the functions take no output."""
        options: dict[str, Any] = {
            "softmax_scale": sm_scale, "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
            "page_table" if self._is_fa3 else "block_table": block_table,
        }  # fmt: skip
        (step, derived), is_decode = self.step(), cu_query_lens is None
        if is_decode or self._is_fa3:
            if not is_decode:
                options |= {"cu_seqlens_q": cu_query_lens, "max_seqlen_q": max(step.counts)}
            result = self._module.flash_attn_with_kvcache(
                query[:, None] if is_decode else query, k_cache, v_cache, cache_seqlens=seq_lens,
                **options,
            )  # fmt: skip
            return result.view_as(out)
        if seq_lens not in derived:  # 0 and the sums of the lengths
            sums = seq_lens.new_zeros(len(seq_lens) + 1)
            sums[1:] = seq_lens.cumsum(0)
            derived[seq_lens] = sums
        return self._module.flash_attn_varlen_func(
            query, k_cache, v_cache, cu_query_lens, derived[seq_lens], max(step.counts),
            max(s.length for s in step.sequences), **options,
        )  # fmt: skip


# --- Opening --------------------------------------------------------------------------------------

_LIBRARIES: dict[str, tuple[type[FlashInfer | FlashAttention], str]] = {
    "flashinfer": (FlashInfer, "`pip install flashinfer-python`"),
    "flash_attn": (
        FlashAttention, "`pip install flash-attn`, or FlashAttention 3 (`flash_attn_interface`)"
    ),
}  # fmt: skip


def open_backend(attention: Any, pool: Pool, layers: Layers, steps: Steps) -> Backend | None:
    """Return the backend of a `PagedKVCache`; None: kvcupy's kernels."""
    name = attention
    library: Any = None
    if callable(attention):
        name = getattr(attention, "__qualname__", type(attention).__qualname__)
    elif not isinstance(attention, str) or attention not in NAMES:
        raise ValueError(
            f"attention: expected one of {', '.join(NAMES)}, or a function, got {attention!r}"
        )
    elif attention == "auto" and not _may_win(pool, layers):
        return None
    else:
        make, remedy = _LIBRARIES["flashinfer" if attention == "auto" else attention]
        try:
            library = make(pool, layers, steps)
        except ImportError as error:
            if attention != "auto":
                raise ImportError(f"attention: {attention!r} needs {remedy}: {error}") from error
            if not isinstance(error, ModuleNotFoundError):
                config.warn_once(f"attention='auto': FlashInfer cannot be imported: {error}")
            return None
    skips_decode = name == "auto" and not layers.is_latent
    backend = Backend(name, library or attention, pool.device, skips_decode)
    reason = _first_of({
        'keys are rotated in attention (rope_mode "inline")': layers.rope.mode == "inline",
        f"no array library has {pool.dtype}": pool.dtype in FOUR_BIT,
        "the cache is not on a GPU": library is not None and library.gpu is None,
    }) or (library is not None and library.unsupported)  # fmt: skip
    if not reason:
        return backend
    backend.log(reason)
    return None


def _may_win(pool: Pool, layers: Layers) -> bool:
    """Return whether FlashInfer was measured to be faster in some steps.

    On an H100 (scripts/results/attention_h100.json, bench_mla_cuda.json): MLA of 128 heads over 64
    sequences of 4,096 tokens takes FlashInfer 135 us and kvcupy 506 us, and prefill of 2,048 of
    4,096 tokens 207 and 446 us. Decode of K and V is about equal: 713 and 736 us for 64 sequences
    of 8,192 tokens, and where lengths differ kvcupy is faster. Quantized caches were not measured.
    """
    gpu = gpu_of(pool.device)
    if gpu is None or CACHE_FORMATS[pool.dtype].quantised:
        return False
    return layers.is_latent or int(gpu.removeprefix("sm_")) >= 90
