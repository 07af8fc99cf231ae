"""FlashInfer, FlashAttention and user-defined functions in place of kvcupy's own attention.

`PagedKVCache(attention=...)` opens a backend here. It attends over the pages and the page tables of
the cache, without a copy. The first call of each kind runs kvcupy's kernels too, compares, and
leaves their result:

    first call of a kind   theirs -> out, read back | kvcupy's -> out, read back | compare
    later calls            theirs -> out

Calls that a backend does not support, and all calls after a result that differs by more than
rounding explains (`kvcupy.testing.tolerances`), are left to kvcupy's kernels.

Sources: flashinfer-ai/flashinfer `flashinfer/decode.py`, `prefill.py`, `mla`;
Dao-AILab/flash-attention `flash_attn/flash_attn_interface.py`, `hopper/flash_attn_interface.py`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .. import observe, reference
from ..arrays import ArrayView, note_written, tensor_of, view
from ..cache.paged.backends import LayerCall
from ..cache.paged.layers import Layers
from ..cache.paged.step import Step, Steps
from ..cache.paged.tables import Tables, block_table
from ..cache.pool import MLAPool, Pool
from ..config import config, logger
from ..devices.protocol import Device, Event, Stream
from ..formats import CACHE_FORMATS, FOUR_BIT, numpy_dtype
from ..ops.attention_call import AttentionOptions
from ..ops.store import gather_kv
from ..ops.transfer_kernels import upload
from ..testing.arrays import Mismatch, assert_near
from ..testing.tolerances import Array, attention_errors

NAMES = ("kvcupy", "auto", "flashinfer", "flash_attn")
SIXTEEN_BITS = ("fp16", "bf16")
FLASHINFER_WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation recommends

_MAX_WRAPPERS = 16  # of FlashInfer; each has buffers of 8 MB on the GPU and pinned
_MAX_CHECKED_ROWS = 64  # of a sequence
_CHUNK_TOKENS = 4096  # whose K and V are read back at a time


def gpu_of(device: Device) -> str | None:
    """Return the architecture of a GPU, "sm_90"; None on the host, where no package has kernels."""
    return device.arch if device.kind == "cuda" else None


# --- Caches, steps and calls --------------------------------------------------------------------


class CacheArrays(NamedTuple):
    """What all calls of a paged cache share; it does not keep the `PagedKVCache` alive.

    Attributes
    ----------
    pool : of its pages
    layers : of each layer, K and V with their scales, by the names of `paged_attention`
    widths : of a key, and of a value
    is_latent : whether rows are latents of MLA
    rotates_in_attention : whether the rope mode is "inline"
    gpu : as `gpu_of` returns it
    """

    pool: Pool
    layers: list[dict[str, Any]]
    widths: tuple[int, int]
    is_latent: bool
    rotates_in_attention: bool
    gpu: str | None


class Kind(NamedTuple):
    """Traits of a call: a backend supports all calls of a kind or none, and checks one of them.

    Attributes
    ----------
    query_format, out_format : names of number formats
    options : of attention
    has_sinks : whether there are learned sinks
    is_captured : whether the stream is being captured
    has_lens : whether sequences have other numbers of new tokens than one
    has_tree, has_evicted, has_demoted : whether some sequence has a token tree, an evicted span, or
        tokens in the pool of old tokens
    """

    query_format: str
    out_format: str
    options: AttentionOptions
    has_sinks: bool
    is_captured: bool
    has_lens: bool
    has_tree: bool
    has_evicted: bool
    has_demoted: bool


_TRAITS = ("query_lens", "tree_mask", "evicted_starts", "past_table")  # tables, of the last four


class StepArrays:
    """The tables of a step as arrays of one library, for one stream.

    Attributes
    ----------
    step : with the numbers of new tokens, `counts`, and the sequences
    lengths : of the sequences, new tokens included
    block_table, seq_lens, cu_query_lens : as `paged_attention` takes them; cu_query_lens is None
        where all sequences have one new token
    page_indices : the pages of all sequences one after another, where they are asked for
    derived : what a backend derives from them once per step
    """

    def __init__(self, step: Step, tables: Tables, convert: Callable[[ArrayView], Any]) -> None:
        self.step = step
        self.lengths = [sequence.length for sequence in step.sequences]
        self.block_table = convert(block_table(tables))
        self.seq_lens = convert(tables["seq_lens"])
        starts = tables.get("cu_query_lens")
        self.cu_query_lens = None if starts is None else convert(starts)
        self.page_indices: Any = None
        self.derived: dict[Any, Any] = {}


class Operands(NamedTuple):
    """The arrays of a call, of one library."""

    query: Any
    k_cache: Any
    v_cache: Any
    out: Any
    step: StepArrays


class Kernels:
    """Kernels of a library, or a user's function.

    Attributes
    ----------
    name : for messages
    is_library : whether they need torch tensors, and whether exceptions turn them off
    takes_page_lists : whether they need `StepArrays.page_indices`
    """

    name: str
    is_library = takes_page_lists = False

    def refusal(self, kind: Kind) -> str:
        """Return why calls of a kind are not supported, "" if they are."""
        return ""

    def run(self, call: LayerCall, operands: Operands) -> bool:
        """Put attention on the current stream; return False if the call is left to kvcupy."""
        raise NotImplementedError


# --- The backend ----------------------------------------------------------------------------------


class Backend:
    """Attention by other kernels, as `cache.paged.backends.AttentionBackend`.

    Parameters
    ----------
    wins : returns whether calls of a kind should be taken; None: all that are supported
    """

    def __init__(
        self, kernels: Kernels, cache: CacheArrays, steps: Steps,
        wins: Callable[[Kind], bool] | None = None,
    ) -> None:  # fmt: skip
        self._kernels, self._wins = kernels, wins
        self._cache, self._device = cache, cache.pool.device
        self._steps: Steps = weakref.proxy(steps)  # which refers to this, by its layers
        self._is_on = True
        self._serves: dict[Kind, bool] = {}
        self._checked: set[Kind] = set()
        # Traits of the last declined call, so that declining the other layers costs little.
        self._declined: tuple[Any, ...] = (None,) * 4
        self._caches: dict[tuple[bool, int], tuple[Any, Any]] = {}
        self._running: Callable[[], Step | None] = lambda: None  # whose tables these are
        self._tables: Tables | None = None
        self._arrays: dict[tuple[bool, Stream], StepArrays] = {}

    def attend(self, call: LayerCall, own: Callable[[], object]) -> bool:
        """Write the output of a call, and return whether that was done."""
        if not self._is_on:
            return False
        declined = call.tables, call.options, call.stream.capturing, call.sinks is None
        if all(map(operator.is_, declined, self._declined)):
            return False
        query, out, tables = view(call.query), view(call.out), call.tables
        kind = Kind(
            query.format, out.format, call.options, call.sinks is not None, declined[2],
            *[name in tables for name in _TRAITS],
        )  # fmt: skip
        serves = self._serves.get(kind)
        if serves is None:
            serves = self._serves[kind] = self._decide(kind)
        is_checked = kind in self._checked or config.verify == "never"
        if not serves:
            self._declined = declined
            return False
        if not is_checked and self._device.capturing:  # which may not allow the check to wait
            return False
        if not self._run(call, query, out):
            return False
        if not is_checked:
            difference = self._difference(call, query, out, own)
            if difference:
                self._turn_off(f"its result differs: {difference}")
            self._checked.add(kind)
        return True

    def _decide(self, kind: Kind) -> bool:
        """Return whether calls of a kind are supported and wanted; log why not."""
        if self._wins is not None and not self._wins(kind):
            return False
        reason = _first_of({
            "a captured step replays kernels without Python between them": kind.is_captured,
            "batch_invariant asks for kvcupy's order of sums": kind.options.batch_invariant,
            'keys are rotated in attention (rope_mode "inline")': self._cache.rotates_in_attention,
            "a step has a token tree": kind.has_tree,
            "a sequence has an evicted span": kind.has_evicted,
            "a sequence has demoted tokens": kind.has_demoted,
            f"no array library has {self._cache.pool.dtype}": self._cache.pool.dtype in FOUR_BIT,
        }) or self._kernels.refusal(kind)  # fmt: skip
        if reason:
            self._log(reason)
        return not reason

    def _log(self, reason: str) -> None:
        name = self._kernels.name
        config.warn_once(f"attention={name!r}: kvcupy's kernels attend, because {reason}")

    def _turn_off(self, reason: str) -> None:
        self._is_on = False
        logger.warning(
            "attention=%r is off, and kvcupy's kernels attend, because %s", self._kernels.name,
            reason,
        )  # fmt: skip

    def _run(self, call: LayerCall, query: ArrayView, out: ArrayView) -> bool:
        """Run the other kernels; return False, and log why, if the call is left to kvcupy."""
        in_torch = self._kernels.is_library or query.library == "torch"
        done: list[bool] = []

        def run() -> None:
            try:
                done.append(self._kernels.run(call, operands))
            except Exception as error:
                if not self._kernels.is_library:
                    raise
                first_line = "\n".join(str(error).splitlines()[:1])
                self._turn_off(f"{type(error).__name__}: {first_line}")
                done.append(False)

        def enqueue() -> None:
            self._device.run(run, call.stream, (query.owner, out.owner))
            if not done:  # a stream of the host device has a thread
                call.stream.synchronize()

        def describe() -> observe.Operation:
            reads, writes = observe.Access(query, name="query"), observe.Access(out, name="out")
            return observe.Operation(self._kernels.name, call.stream, (reads,), (writes,))

        with _torch_on(call.stream, self._device, in_torch):
            operands = self._operands(call, query, out, in_torch)
            observe.issue(describe, enqueue)
        note_written((call.out,))
        if self._is_on and not done[0]:
            self._log("it returned None or NotImplemented")
        return done[0]

    def _operands(
        self, call: LayerCall, query: ArrayView, out: ArrayView, in_torch: bool
    ) -> Operands:
        """Return the arrays of a call as torch tensors, or else of the device's own library."""

        def convert(array: Any, v: ArrayView) -> Any:
            if not in_torch:
                return self._device.carrier(v).view(numpy_dtype(v.format))
            if v.library == "torch" and not isinstance(array, ArrayView):
                return array
            return tensor_of(v)

        caches = self._caches.get((in_torch, call.layer))
        if caches is None:
            own = self._cache.layers[call.layer]
            k_cache, v_cache = (view(own[name]) for name in ("k_cache", "v_cache"))
            caches = convert(k_cache, k_cache), convert(v_cache, v_cache)
            self._caches[in_torch, call.layer] = caches
        step = self._steps.running
        assert step is not None
        if self._running() is not step or self._tables is not call.tables:
            self._running, self._tables = weakref.ref(step), call.tables
            self._arrays.clear()
        arrays = self._arrays.get((in_torch, call.stream))
        if arrays is None:
            arrays = StepArrays(step, call.tables, lambda v: convert(v, v))
            if self._kernels.takes_page_lists:
                indices = self._steps.lists(call.stream)["indices"]
                arrays.page_indices = convert(indices, indices)
            self._arrays[in_torch, call.stream] = arrays
        return Operands(convert(call.query, query), *caches, convert(call.out, out), arrays)

    # --- Check ---

    def _difference(
        self, call: LayerCall, query: ArrayView, out: ArrayView, own: Callable[[], object]
    ) -> str:
        """Run kvcupy's kernels, and return how the result before them differs; "" if it does not.

        Some rows of the longest, the shortest and the last sequence are compared.
        """
        theirs = self._read(out, call.stream)
        own()
        ours = self._read(out, call.stream)
        rows = self._read(query, call.stream)
        step = self._steps.running
        assert step is not None
        lengths = [sequence.length for sequence in step.sequences]
        stops = np.cumsum(step.counts)
        chosen = {int(np.argmax(lengths)), int(np.argmin(lengths)), len(lengths) - 1}
        for number in sorted(chosen):
            longest_key, largest = self._extremes(call, number)
            first = int(stops[number]) - step.counts[number]
            some = np.unique(
                np.linspace(first, stops[number] - 1, _MAX_CHECKED_ROWS).round().astype(int)
            )
            exact = reference.decode(ours[some], out.format)
            got = reference.decode(theirs[some], out.format)
            allowed, _ = attention_errors(
                {
                    "query": rows[some], "k_cache": longest_key, "v_cache": largest,
                    "seq_lens": np.array(lengths[number : number + 1]),
                    "sm_scale": call.options.sm_scale, "logits_soft_cap": call.options.soft_cap,
                },
                exact, np.zeros(exact.shape[:2]), out.format, rounded_weights=True,
            )  # fmt: skip
            # Inputs that are not numbers make both results NaN, or allow anything.
            any_will_do = (np.isnan(got) & np.isnan(exact)) | np.isnan(allowed)
            got, exact = (np.where(any_will_do, 0, x) for x in (got, exact))
            try:  # either may be off by what is allowed
                where = f"layer {call.layer}, tokens {some[0]} to {some[-1]}"
                assert_near(where, got, exact, 2 * allowed)
            except Mismatch as mismatch:
                return str(mismatch)
        return ""

    def _read(self, array: ArrayView, stream: Stream) -> Array:
        stream.synchronize()
        return self._device.to_numpy(array)

    def _extremes(self, call: LayerCall, number: int) -> tuple[Array, Array]:
        """Return a cache of one key and one value that allow as much as all of a sequence do.

        Its key is as long as the longest of each head; its value has the largest magnitudes.
        """
        assert self._steps.running is not None
        sequence = self._steps.running.sequences[number]
        slots = sequence.slots(sequence.places(0, sequence.length), self._cache.pool.page_size)
        longest: Any = 0.0
        largest: Any = 0.0
        for first in range(0, len(slots), _CHUNK_TOKENS):
            uploaded = upload([slots[first : first + _CHUNK_TOKENS]], self._device, call.stream)[0]
            parts = gather_kv(
                slots=uploaded, dtype="fp32", stream=call.stream, **self._cache.layers[call.layer]
            )
            k, v = (np.abs(self._read(view(part), call.stream)) for part in parts)
            longest = np.fmax(longest, np.sqrt(np.square(k, dtype=np.float64).sum(2)).max(0))
            largest = np.fmax(largest, v.max(0))
        key = np.zeros((1, 1, *k.shape[1:]), np.float32)
        key[0, 0, :, 0] = longest
        return key, np.asarray(largest, np.float32)[None, None]


@contextmanager
def _torch_on(stream: Any, device: Device, in_torch: bool) -> Iterator[None]:
    """Let torch work on a stream, where it has streams."""
    if not in_torch or device.torch_name == "cpu":
        yield
        return
    import torch

    _, pointer = stream.__cuda_stream__()
    if torch.cuda.current_stream(device.torch_name).cuda_stream == pointer:
        yield
        return
    with torch.cuda.stream(torch.cuda.ExternalStream(pointer, device.torch_name)):
        yield


# --- FlashInfer -----------------------------------------------------------------------------------


class FlashInfer(Kernels):
    """FlashInfer's wrappers: planned once per step, for all layers whose calls are alike.

    Plans are made from lengths on the host, so the host does not wait for the GPU, except for the
    previous plan of the same wrapper, whose pinned memory it packs again.
    """

    name = "flashinfer"
    is_library = takes_page_lists = True

    def __init__(self, cache: CacheArrays) -> None:
        self._decode = import_module("flashinfer.decode").BatchDecodeWithPagedKVCacheWrapper
        self._prefill = import_module("flashinfer.prefill").BatchPrefillWithPagedKVCacheWrapper
        self._mla = import_module("flashinfer.mla").BatchMLAPagedAttentionWrapper
        self._cache = cache
        self._wrappers: dict[Any, tuple[Any, Event]] = {}
        self._workspaces: dict[Stream, Any] = {}

    def refusal(self, kind: Kind) -> str:
        """Return why calls of a kind are not supported, "" if they are."""
        cache, arguments, dtype = self._cache, self._cache.layers[0], self._cache.pool.dtype
        reason = _refusal_of_libraries(kind, cache.gpu)
        if reason:
            return reason
        is_fp8 = dtype.startswith("fp8") and not cache.is_latent
        if dtype != kind.query_format and not is_fp8:
            return f"FlashInfer does not take a {dtype} cache and {kind.query_format} queries"
        if "k_scale_cache" in arguments or not all(
            isinstance(arguments.get(name), (int, float, np.number, type(None)))
            for name in ("k_scale", "v_scale")
        ):
            return "FlashInfer takes one number as the scale of a cache"
        if cache.is_latent:
            if cache.widths != (576, 512):
                return f"FlashInfer's MLA is for rows of (576, 512) elements, not {cache.widths}"
            return "FlashInfer's MLA takes no window" if kind.options.window else ""
        allowed = [(64, 64), (128, 128), (256, 256), *([(192, 128)] if kind.has_lens else [])]
        if cache.widths not in allowed:
            return f"FlashInfer is not used for heads of {cache.widths} elements"
        k, v = (view(arguments[name]) for name in ("k_cache", "v_cache"))
        if k.strides != v.strides:
            return "FlashInfer takes K and V of the same strides"
        return ""

    def run(self, call: LayerCall, operands: Operands) -> bool:
        """Plan if the step has no plan for such a call, and run."""
        query, k_cache, v_cache, out, step = operands
        key = call.options, query.dtype, call.stream
        wrapper = step.derived.get(key)
        if wrapper is None:
            wrapper = step.derived[key] = self._planned(key, call, operands)
        if self._cache.is_latent:
            latent = self._cache.widths[1]
            wrapper.run(
                q_nope=query[..., :latent], q_pe=query[..., latent:],
                ckv_cache=k_cache[:, :, 0, :latent], kpe_cache=k_cache[:, :, 0, latent:], out=out,
            )  # fmt: skip
            return True
        scales = {}
        if k_cache.dtype != query.dtype:
            arguments = self._cache.layers[call.layer]
            scales = {n: float(arguments.get(n) or 1.0) for n in ("k_scale", "v_scale")}
        result = wrapper.run(query, (k_cache, v_cache), out=out, **scales)
        if result is not out:  # some of FlashInfer's backends apply v_scale by another copy
            out.copy_(result)
        return True

    def _planned(self, key: Any, call: LayerCall, operands: Operands) -> Any:
        """Return a wrapper that is planned for the step."""
        import torch

        query, k_cache, _, _, arrays = operands
        step, options = arrays.step, call.options
        is_decode = arrays.cu_query_lens is None
        key = *key, is_decode
        wrapper, planned = self._wrappers.get(key) or (None, None)
        if planned is not None:
            planned.synchronize()
        if wrapper is None:
            if len(self._wrappers) == _MAX_WRAPPERS:
                self._wrappers.clear()
                self._workspaces.clear()
            wrapper = self._wrapper(call.stream, query, k_cache, is_decode)
        # On the host, where plans are made: FlashInfer copies what its kernels read.
        host = {name: torch.from_numpy(array) for name, array in step.page_lists().items()}
        starts = torch.from_numpy(np.cumsum([0, *step.counts], dtype=np.int32))
        heads, kv_heads, page_size = query.shape[1], k_cache.shape[2], k_cache.shape[1]
        types = {"q_data_type": query.dtype, "kv_data_type": k_cache.dtype}
        if self._cache.is_latent:
            latent = self._cache.widths[1]
            wrapper.plan(
                qo_indptr=starts, kv_indptr=host["indptr"], kv_indices=arrays.page_indices,
                kv_len_arr=torch.tensor(arrays.lengths, dtype=torch.int32), num_heads=heads,
                head_dim_ckv=latent, head_dim_kpe=query.shape[2] - latent, page_size=page_size,
                causal=True, sm_scale=options.sm_scale or query.shape[2] ** -0.5, **types,
            )  # fmt: skip
        else:
            pages = host["indptr"], arrays.page_indices, host["last_page_len"]
            shape = heads, kv_heads, query.shape[2], page_size
            masks = {"window_left": options.window - 1, "sm_scale": options.sm_scale}
            if is_decode:
                wrapper.plan(*pages, *shape, **masks, **types)
            else:
                wrapper.plan(
                    starts, *pages, *shape, head_dim_vo=self._cache.widths[1], causal=True,
                    **masks, **types,
                )  # fmt: skip
        self._wrappers[key] = wrapper, call.stream.record()
        return wrapper

    def _wrapper(self, stream: Stream, query: Any, k_cache: Any, is_decode: bool) -> Any:
        """Return a new wrapper; wrappers of a stream share a workspace."""
        import torch

        workspace = self._workspaces.get(stream)
        if workspace is None:
            workspace = self._workspaces[stream] = torch.zeros(
                FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=query.device
            )
        # The kernels with Hopper's instructions, which take K and V of 16 bits.
        has_fa3 = self._cache.gpu == "sm_90" and k_cache.dtype == query.dtype
        backend = "fa3" if has_fa3 and query.is_cuda else "auto"
        if self._cache.is_latent:
            return self._mla(workspace, backend=backend)
        if is_decode:
            group = query.shape[1] // k_cache.shape[2]
            return self._decode(workspace, "NHD", use_tensor_cores=group >= 4)
        return self._prefill(workspace, "NHD", backend=backend)


# --- FlashAttention -------------------------------------------------------------------------------


class FlashAttention(Kernels):
    """FlashAttention 3 on Hopper where it is installed, else FlashAttention 2."""

    name = "flash_attn"
    is_library = True

    def __init__(self, cache: CacheArrays) -> None:
        self._cache = cache
        self._module = self._import(cache.gpu)
        self._is_fa3 = self._module.__name__ == "flash_attn_interface"

    @staticmethod
    def _import(gpu: str | None) -> ModuleType:
        if gpu in (None, "sm_90"):
            try:
                return import_module("flash_attn_interface")
            except ImportError:  # FlashAttention 2 may be there, or is what the error names
                pass
        return import_module("flash_attn.flash_attn_interface")

    def refusal(self, kind: Kind) -> str:
        """Return why calls of a kind are not supported, "" if they are."""
        pool, (k_width, v_width) = self._cache.pool, self._cache.widths
        reason = _refusal_of_libraries(kind, self._cache.gpu)
        if reason:
            return reason
        if self._cache.is_latent:
            return "FlashAttention is not used for latents"
        if pool.dtype != kind.query_format:
            return f"FlashAttention takes no {pool.dtype} cache with {kind.query_format} queries"
        if k_width != v_width or k_width % 8 or k_width > 256:
            return f"FlashAttention is not used for heads of {k_width, v_width} elements"
        if not self._is_fa3 and pool.page_size % 256:
            return f"FlashAttention 2 takes pages of 256 tokens, not {pool.page_size}"
        return ""

    def run(self, call: LayerCall, operands: Operands) -> bool:
        """Attend, and copy the result, as the functions take no output."""
        query, k_cache, v_cache, out, step = operands
        window = call.options.window
        options: dict[str, Any] = {
            "softmax_scale": call.options.sm_scale, "causal": True,
            "window_size": (window - 1, 0) if window else (-1, -1),
        }  # fmt: skip
        is_decode, max_seqlen_q = step.cu_query_lens is None, max(step.step.counts)
        rows = query[:, None] if is_decode else query
        if self._is_fa3 and not is_decode:
            options |= {"cu_seqlens_q": step.cu_query_lens, "max_seqlen_q": max_seqlen_q}
        options["page_table" if self._is_fa3 else "block_table"] = step.block_table
        if self._is_fa3 or is_decode:
            result = self._module.flash_attn_with_kvcache(
                rows, k_cache, v_cache, cache_seqlens=step.seq_lens, **options
            )
        else:
            result = self._module.flash_attn_varlen_func(
                rows, k_cache, v_cache, step.cu_query_lens, self._cu_seq_lens(step), max_seqlen_q,
                max(step.lengths), **options,
            )  # fmt: skip
        out.copy_(result.view_as(out))
        return True

    @staticmethod
    def _cu_seq_lens(step: StepArrays) -> Any:
        """Return 0 and the sums of the lengths, int32 (B + 1,), on the device."""
        import torch

        if "cu_seq_lens" not in step.derived:
            sums = step.seq_lens.cumsum(0, dtype=step.seq_lens.dtype)
            step.derived["cu_seq_lens"] = torch.nn.functional.pad(sums, (1, 0))
        return step.derived["cu_seq_lens"]


def _refusal_of_libraries(kind: Kind, gpu: str | None) -> str:
    """Return why neither library is used for calls of a kind, "" if one may be."""
    options = kind.options
    return _first_of({
        "the cache is not on a GPU": gpu is None,
        f"the query is {kind.query_format}": kind.query_format not in SIXTEEN_BITS,
        f"the output is {kind.out_format}": kind.out_format != kind.query_format,
        "there are learned sinks": kind.has_sinks,
        "a window leaves first tokens visible": bool(options.window and options.sink_keys),
        # By tanh.approx, whose relative error is 2**-11: of a score of 50 that is 2 %.
        "other libraries approximate the soft cap": bool(options.soft_cap),
    })  # fmt: skip


def _first_of(refusals: dict[str, Any]) -> str:
    """Return the first reason that holds, or ""."""
    return next((reason for reason, holds in refusals.items() if holds), "")


# --- Functions of users ---------------------------------------------------------------------------


class UserFunction(Kernels):
    """A function with the signature of `kvcupy.paged_attention`; it says itself what it leaves."""

    def __init__(self, function: Callable[..., Any], cache: CacheArrays) -> None:
        self.name = getattr(function, "__qualname__", type(function).__qualname__)
        self._function, self._cache = function, cache

    def run(self, call: LayerCall, operands: Operands) -> bool:
        """Call the function; copy its result if it is another array than the output."""
        query, k_cache, v_cache, out, step = operands
        arguments = self._cache.layers[call.layer]
        options = {
            "sm_scale": call.options.sm_scale, "window": call.options.window or None,
            "sink_tokens": call.options.sink_keys or None, "sinks": call.sinks,
            "logits_soft_cap": call.options.soft_cap or None,
            **{name: scale for name, scale in arguments.items() if "scale" in name},
        }  # fmt: skip
        result = self._function(
            query, k_cache, v_cache, step.block_table, step.seq_lens,
            cu_query_lens=step.cu_query_lens, out=out, stream=call.stream,
            **{name: value for name, value in options.items() if value is not None},
        )  # fmt: skip
        if result is None or result is NotImplemented:
            return False
        if result is not out:
            out[...] = result
        return True


# --- Opening --------------------------------------------------------------------------------------

_LIBRARIES: dict[str, tuple[Callable[[CacheArrays], Kernels], str]] = {
    "flashinfer": (FlashInfer, "`pip install flashinfer-python`"),
    "flash_attn": (
        FlashAttention, "`pip install flash-attn`, or FlashAttention 3 (`flash_attn_interface`)"
    ),
}  # fmt: skip


def open_backend(attention: Any, pool: Pool, layers: Layers, steps: Steps) -> Backend | None:
    """Return the backend of a `PagedKVCache`; None: kvcupy's kernels.

    Raises
    ------
    ValueError : `attention` is not one of `NAMES`, and not callable
    ImportError : the package of that name is missing
    """
    cache = CacheArrays(
        pool, layers.caches, (layers.width, layers.v_width), isinstance(pool, MLAPool),
        layers.rope.mode == "inline", gpu_of(pool.device),
    )  # fmt: skip
    if callable(attention):
        return Backend(UserFunction(attention, cache), cache, steps)
    if not isinstance(attention, str) or attention not in NAMES:
        raise ValueError(
            f"attention: expected one of {', '.join(NAMES)}, or a function, got {attention!r}"
        )
    if attention == "auto":
        return _best_backend(cache, steps)
    make, remedy = _LIBRARIES[attention]
    try:
        kernels: Kernels = make(cache)
    except ImportError as error:
        raise ImportError(f"attention: {attention!r} needs {remedy}: {error}") from error
    return Backend(kernels, cache, steps)


def _best_backend(cache: CacheArrays, steps: Steps) -> Backend | None:
    """Return FlashInfer for the calls in which it was measured to be faster, if installed."""
    gpu, is_latent = cache.gpu, cache.is_latent
    if gpu is None or CACHE_FORMATS[cache.pool.dtype].quantised:  # of which nothing was measured
        return None
    try:
        kernels = FlashInfer(cache)
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):
            config.warn_once(f"attention='auto': FlashInfer cannot be imported: {error}")
        return None

    def wins(kind: Kind) -> bool:
        # On an H100 (scripts/results/attention_h100.json, bench_mla_cuda.json): MLA of 128 heads
        # over 64 sequences of 4,096 tokens takes FlashInfer 135 us and kvcupy 506 us, and prefill
        # of 2,048 of 4,096 tokens 207 and 446 us. Decode of K and V is about equal: 713 and 736 us
        # for 64 sequences of 8,192 tokens, and where lengths differ kvcupy is faster.
        return is_latent or (kind.has_lens and int(gpu.removeprefix("sm_")) >= 90)

    return Backend(kernels, cache, steps, wins)
