"""A paged KV cache for many sequences."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ... import devices, metrics
from ...arrays import address_of, describe, view
from ...config import cache_logger
from ...devices.protocol import Stream
from ...errors import CaptureError, KvcupyError, ProcessLocal
from ...formats import FORMATS, Encoding
from ...ops import call, checks
from ...ops.attention import check_query
from ..hashes import hash_list
from ..pool import KVPool, MLAPool, Pool, positive_int
from ..tiered.cache import TieredCache
from .contents import Contents
from .exchange import (
    Exports,
    PullProtocol,
    ReceiverProtocol,
    SenderProtocol,
    SequencePull,
    decode_state,
    encode_state,
)
from .layers import Layers, rope_of, scales_of
from .moves import Tiers
from .past import Demotion, Past, past_pool_of
from .sequences import CachedSequence, Sequences
from .step import Step, Steps, require_on_device
from .tables import StepTables, Tables, block_table

_PAGE_SIZE, _DTYPE = 16, "bf16"  # defaults
_NO_STEP = "no step is running: call begin_forward first"


class PagedKVCache(ProcessLocal):
    """Keep K and V of many sequences in pages, and attend with the tokens of a step.

    Parameters
    ----------
    num_layers, num_q_heads, num_kv_heads, head_dim, num_pages, page_size : counts. With `pool` only
        num_q_heads is needed; the others, where they are not left at their defaults, must agree
        with it
    v_head_dim : the width of V; None is that of K
    latent_dim, rope_dim : for multi-head latent attention, instead of num_kv_heads and head_dim: a
        token has one row, the latent and then the rope part. See `attention_mla`
    dtype : encoding of the cache: an Encoding or its string, or a dtype. Of latents the rope part
        is never rotated
    k_scale, v_scale : static scales of a quantised cache: a number, or float32 (H,), (L, 1) or
        (L, H). Without any it has one scale per token and head (with latent_dim: scale 1)
    rope : float32 (max_positions, rotary_dim) on the device, from `rope_table`; None: no rotation
    interleaved : pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
    rope_mode : "normal": keys are cached rotated; "inline": cached raw and rotated in attention;
        "none": not rotated
    max_batch_tokens : the most tokens of a step
    max_seq_len : tokens per sequence that a captured step has space for; None: the positions of
        rope, else all pages
    cascade : whether neighbours in a batch that share their first pages read those once; None:
        where that moves fewer bytes
    device : a Device or its name; None is the default device
    copy_stream : a stream for tables and page copies; None: one of its own
    pool : a KVPool, or an MLAPool with latent_dim, that has the pages, also over existing memory
        (`KVPool.wrap`); None: one is allocated. Pages come from its allocator, so that other users
        may allocate some of them
    slots_in_flight : steps whose tables may be uploading or in use at once
    demotion : a `Demotion`: how old tokens are kept in a narrower encoding; None: all are kept in
        dtype. See the notes on precision

    Attributes
    ----------
    pool : the KVPool or MLAPool that holds the pages
    past_pool : the KVPool of the demoted pages, or None
    device : the Device

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    DeviceError, MemoryError : there is not enough memory

    Notes
    -----
    Stream: bookkeeping is host work. The tables of a step are uploaded in one copy from pinned
    memory on the copy stream, at the first attention of the step, which waits for it by an event;
    so the upload overlaps earlier work of the compute stream. Neither pinned nor device memory is
    overwritten before its readers are done. Pages are copied on the copy stream too, behind the
    compute streams that wrote them. A step may use several streams, as long as the caller orders
    its layers.
    Capture: legal for steps of one token per sequence; see `attention`.

    Precision: with `demotion`, the end of a step demotes each page of its sequences that holds none
    of their first `first` and none of their last `recent` committed tokens: it is converted on the
    copy stream, behind all work on it so far, and is free. Where no page for old tokens is free, it
    stays in dtype until the end of a later step. A page that several sequences
    share is converted once: each moves to the demoted page when it leaves its own window, and the
    last frees the other. A token that is demoted stays so, also if tokens behind it are popped;
    appending to a demoted page, or forking within it, converts it back to dtype with the values
    that are left. Scales are one per token and head, or those of groups. Attention reads each
    format by a launch of its own and merges them. Not with `demotion`: latent_dim, k_scale and
    v_scale, cascade=True, a `window` of attention longer than recent + 1 or with first keys, and
    page tables for other libraries. `offload` and `export_sequence` move demoted pages as they are.

    Threads: one at a time.
    Source: apache/tvm `src/runtime/vm/paged_kv_cache.cc` and pull 16692; Kwon et al. 2023.

    Examples
    --------
    >>> import numpy as np
    >>> cache = PagedKVCache(
    ...     num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=8, num_pages=8, page_size=4,
    ...     dtype="fp32", device="host",
    ... )
    >>> cache.add_sequence("a")
    >>> rows = np.ones((5, 4, 8), np.float32)
    >>> with cache.forward(["a"], [5]):
    ...     out = cache.attention(0, rows, rows[:, :2], rows[:, :2])
    >>> cache.fork_sequence("a", "b", at=4)
    >>> cache.sequence_length("b"), cache.num_available_pages, float(out[4, 3, 0])
    (4, 6, 1.0)
    """

    def __init__(
        self, *,
        num_q_heads: int, num_layers: int | None = None, num_kv_heads: int | None = None,
        head_dim: int | None = None, num_pages: int | None = None, page_size: int = _PAGE_SIZE,
        dtype: Any = _DTYPE, rope: Any = None, interleaved: bool = False, rope_mode: str = "normal",
        max_batch_tokens: int = 8192, device: Any = None, copy_stream: Any = None,
        slots_in_flight: int = 2, v_head_dim: int | None = None, latent_dim: int | None = None,
        rope_dim: int | None = None,
        k_scale: Any = None, v_scale: Any = None, max_seq_len: int | None = None,
        cascade: bool | None = None, pool: Pool | None = None,
        demotion: Demotion | None = None,
    ) -> None:  # fmt: skip
        if isinstance(pool, MLAPool) and latent_dim is None and pool.rope_dim:
            latent_dim = pool.latent_dim
        if isinstance(pool, MLAPool) and latent_dim is not None and rope_dim is None:
            rope_dim = pool.head_dim - positive_int(latent_dim, "latent_dim")
            if rope_dim < 1:
                raise ValueError(
                    f"latent_dim: expected less than {pool.head_dim}, got {latent_dim}"
                )
        pool = _pool_of(
            pool, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim,
            num_pages=num_pages, page_size=page_size, dtype=dtype, device=device,
            v_head_dim=v_head_dim, latent_dim=latent_dim, rope_dim=rope_dim,
            has_static_scales=k_scale is not None or v_scale is not None,
        )  # fmt: skip
        rotary = rope_of(rope, rope_mode, interleaved, pool.device, pool.head_dim, latent_dim)
        if positive_int(num_q_heads, "num_q_heads") % pool.num_kv_heads:
            heads = f"{pool.num_kv_heads} KV heads"
            raise ValueError(f"num_q_heads: expected a multiple of {heads}, got {num_q_heads}")
        if not (cascade is None or isinstance(cascade, (bool, np.bool_))):
            raise ValueError(f"cascade: expected None, True or False, got {cascade!r}")
        self.past_pool = past_pool_of(pool, demotion)
        num_all_pages = pool.num_pages
        if self.past_pool is not None:
            if cascade:
                raise ValueError("cascade: expected None or False with demotion, got True")
            if k_scale is not None or v_scale is not None:
                raise ValueError("k_scale, v_scale: expected None with demotion")
            cascade = False
            num_all_pages += self.past_pool.num_pages
        max_tokens = rotary.max_positions or num_all_pages * pool.page_size
        if max_seq_len is not None:
            max_tokens = positive_int(max_seq_len, "max_seq_len")
        self.pool = pool
        self.device = pool.device
        self._num_q_heads = int(num_q_heads)
        self._is_latent = latent_dim is not None
        self._rope_mode = rotary.mode
        self._warned = False
        kept = (0, 0) if demotion is None else (demotion.recent, demotion.first)
        past_layers = None
        if self.past_pool is not None:
            past_layers = Layers(self.past_pool, self._num_q_heads, rotary, [])
        self._layers = Layers(
            pool, self._num_q_heads, rotary, scales_of(pool, k_scale, v_scale), past_layers, *kept
        )
        self._past: Past | None = None
        past_allocator = None
        if self.past_pool is not None and past_layers is not None:
            self._past = Past(pool, self.past_pool, self._layers, past_layers, *kept)
            past_allocator = self.past_pool.allocator
        self._sequences = Sequences(pool.allocator, pool.page_size, past_allocator)
        self._steps = Steps(
            pool, self._layers, self._sequences,
            copy_stream=copy_stream,
            slots_in_flight=positive_int(slots_in_flight, "slots_in_flight"),
            max_batch_tokens=positive_int(max_batch_tokens, "max_batch_tokens"),
            # One more than the tokens fill: there may be an evicted span behind the sinks.
            max_pages=min(num_all_pages, -(-max_tokens // pool.page_size) + 1),
            cascade=cascade,
            past=self._past,
        )  # fmt: skip
        self._contents = Contents(pool, self._layers, self._steps.access, self._past)
        self._tiers = Tiers(pool, self._sequences, self._steps.access, self.past_pool)
        self._exports = Exports(pool, self._sequences, self._steps.access, self._tiers)
        metrics.follow(self, _sequence_samples)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {len(self._sequences)} sequences, {self.total_length} "
            f"tokens, {self.num_available_pages} of {self.pool.num_pages} pages free, "
            f"{self.pool!r}>"
        )

    def __contains__(self, seq: object) -> bool:
        return seq in self._sequences

    @property
    def num_available_pages(self) -> int:
        """Pages that are not allocated, and that nothing holds back for an unknown time."""
        self._exports.reclaim()
        return self.pool.allocator.num_available

    @property
    def num_available_past_pages(self) -> int:
        """Pages for old tokens that are not allocated; 0 without `demotion`."""
        if self.past_pool is None:
            return 0
        self._exports.reclaim()
        return self.past_pool.allocator.num_available

    @property
    def total_length(self) -> int:
        """Tokens of all sequences; a shared prefix counts for each."""
        return self._sequences.total_length

    # --- Sequences ---

    def add_sequence(self, seq: Hashable, hashes: Any = None) -> None:
        """Add a sequence, empty or, with hashes, with the cached blocks of its prompt.

        Parameters
        ----------
        hashes : of the blocks of its prompt, one per page, as `block_hashes` gives them; they need
            a tiered cache (`attach`). The sequence begins with the leading blocks that are cached:
            `sequence_length` says how many tokens need not be computed. Its other full pages go to
            the tiered cache when the sequence is removed

        Raises
        ------
        TypeError, ValueError : an argument does not fit, the sequence exists, a hash comes twice,
            or there is no tiered cache
        CacheFull : there are too few pages for cached blocks; nothing has changed

        Notes
        -----
        Stream: blocks are loaded in the background; the attention of each layer waits for its own
        part. That hashes describe the tokens is up to the caller. Where the logits of a prompt's
        last token are needed, leave out the hash of the block that ends with it.
        """
        if hashes is None:
            self._sequences.add(seq)
            return
        self._tiers.require("hashes")
        self._sequences.require_new(seq, "seq")
        keys = hash_list(hashes)
        if len(set(keys)) < len(keys):
            raise ValueError("hashes: expected each once, as a chain of them has")
        self._sequences.share(seq, self._tiers.acquire(keys)).hashes = keys

    def remove_sequence(self, seq: Hashable) -> None:
        """Remove a sequence, in any order; pages that no other shares become free.

        Full pages of its own that have hashes go to the tiered cache instead.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        KvcupyError : it belongs to the running step
        """
        sequence = self._sequences.find(seq)
        self._steps.require_outside(seq)
        self._sequences.remove(seq, self._tiers.publish(sequence))

    def fork_sequence(
        self,
        parent: Hashable,
        child: Hashable,
        at: int | None = None,
        *,
        inherit_window: bool = True,
    ) -> None:
        """Add a sequence that begins with the first tokens of another.

        Parameters
        ----------
        parent, child : a cached sequence, and a new one
        at : how many tokens, 0 to the parent's length; None: all
        inherit_window : whether the child gets the parent's sliding window. False: it has none,
            and `at` is at most the parent's sink_tokens, because those behind may be evicted

        Raises
        ------
        UnknownSequence, TypeError : there is no such parent, or it cannot be the name of one
        TypeError, ValueError : the child exists, `at` is outside, or the parent's tree is not
            committed
        CacheFull : a partial page is to be copied and none is free; nothing has changed
        KvcupyError : the parent belongs to the running step

        Notes
        -----
        The child inherits tokens, their block hashes and the sliding window. Full pages are
        shared. Stream: a partial one is copied on the copy stream, behind all steps so far. Bytes:
        at most one page, read and written.
        """
        source = self._settled(parent, "parent")
        self._sequences.require_new(child, "child")
        if at is None:
            at = source.length
        checks.require_int(at, "at")
        if not 0 <= at <= source.length:
            raise ValueError(f"at: expected 0 to {source.length}, got {at}")
        if not inherit_window and source.window and at > source.sink_tokens:
            raise ValueError(
                f"at: expected at most the {source.sink_tokens} sink_tokens of the parent's "
                f"sliding window with inherit_window=False, got {at}"
            )
        self._steps.fork(source, child, int(at), inherit_window)

    def pop_tokens(self, seq: Hashable, n: int) -> None:
        """Drop the last `n` tokens of a sequence; other sequences that share their pages keep them.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        TypeError, ValueError : n is not 0 to its length, or its tree is not committed
        KvcupyError : it belongs to the running step
        """
        sequence = self._settled(seq)
        checks.require_int(n, "n")
        if not 0 <= n <= sequence.length:
            raise ValueError(f"n: expected 0 to {sequence.length}, got {n}")
        self._sequences.truncate(sequence, sequence.length - int(n))
        del sequence.hashes[sequence.length // self.pool.page_size :]

    def sequence_length(self, seq: Hashable) -> int:
        """Return how many tokens a sequence has, those of a tree to be committed included.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        """
        return self._sequences.find(seq).length

    def enable_sliding_window(self, seq: Hashable, window: int, sink_tokens: int = 0) -> None:
        """After each step, keep only the first tokens of a sequence and the last.

        Parameters
        ----------
        window : how many of the last tokens remain
        sink_tokens : how many of the first tokens remain too

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        TypeError, ValueError : an argument does not fit, or tokens were evicted behind another
            number of sink_tokens
        KvcupyError : it belongs to the running step

        Notes
        -----
        Positions are those in the cache. A step is causal over what is cached and itself. With
        rope_mode "normal", keys keep the rotation that they were written with; "inline" rotates
        them by their positions now. Source: Xiao et al. 2023, StreamingLLM.
        """
        sequence = self._sequences.find(seq)
        self._steps.require_outside(seq)
        positive_int(window, "window")
        checks.require_int(sink_tokens, "sink_tokens")
        if not 0 <= sink_tokens < 2**31:
            raise ValueError(f"sink_tokens: expected 0 to 2**31 - 1, got {sink_tokens}")
        if sequence.evicted and sink_tokens != sequence.sink_tokens:
            raise ValueError(
                f"sink_tokens: expected {sequence.sink_tokens} as before, got {sink_tokens}"
            )
        sequence.window, sequence.sink_tokens = int(window), int(sink_tokens)
        if self._rope_mode == "normal" and not self._warned:
            self._warned = True
            cache_logger.warning(
                'a window slides over keys that were cached rotated (rope_mode "normal"): they '
                'keep their rotation; "inline" rotates them by their positions'
            )

    def clear(self) -> None:
        """Drop all sequences, and the running step if there is one."""
        self._steps.abort()
        self._sequences.clear()

    # --- Steps ---

    def begin_forward(self, seqs: Any, append_lens: Any, *, token_tree: Any = None) -> None:
        """Begin a step that appends tokens to sequences: lengths grow, pages are allocated.

        Parameters
        ----------
        seqs : sequences, each once; rows of the step come in this order
        append_lens : new tokens of each, at least 1, together at most max_batch_tokens
        token_tree : for each sequence the parents of its new tokens, which are nodes of a tree,
            numbered on from those not yet committed; -1: a root, which follows the last committed
            token. None in place of a list: plain tokens, one after another

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit, or a sequence with an
            uncommitted tree would get plain tokens
        CacheFull : there are too few pages
        KvcupyError : a step is running

        After an error everything is as it was.

        Notes
        -----
        Stream: host work, but for partial pages that are shared: they are copied on the copy
        stream. Host work grows with the batch, not with the number of sequences in the cache.
        """
        self._steps.begin(seqs, append_lens, token_tree)

    def end_forward(self) -> None:
        """End the step; windows slide.

        Raises
        ------
        KvcupyError : no step is running
        DeviceError, TransferError : layers of an exported sequence could not be sent, and its offer
            is withdrawn; the step has ended
        """
        self._steps.end()

    @contextmanager
    def forward(self, seqs: Any, append_lens: Any, *, token_tree: Any = None) -> Iterator[None]:
        """Begin a step and end it with the block; an exception takes its tokens back."""
        self.begin_forward(seqs, append_lens, token_tree=token_tree)
        try:
            yield
        except BaseException:
            self._steps.abort()
            raise
        self.end_forward()

    def commit_token_tree(self, seqs: Any, leaves: Any) -> None:
        """Keep the path from the root to a leaf of each tree, and drop its other nodes.

        Parameters
        ----------
        seqs : sequences with a tree, each once, in any order
        leaves : node of each; -1: no node is kept

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit; nothing has changed
        KvcupyError : one belongs to the running step
        DeviceError : a copy or a launch was refused, perhaps after others; no node is kept

        Notes
        -----
        Stream: kept tokens are moved next to one another on the copy stream, behind all steps so
        far, and before the next. Bytes: each kept token that moves, once.
        """
        self._steps.commit(seqs, leaves)

    # --- Attention ---

    def attention(
        self, layer: int, query: Any, key: Any, value: Any, *,
        out: Any = None, sm_scale: float | None = None, window: int | None = None,
        sink_tokens: int | None = None, sinks: Any = None, logits_soft_cap: float | None = None,
        stream: Any = None,
    ) -> Any:  # fmt: skip
        """Write K and V of the step's tokens in one layer, and attend with their queries.

        Parameters
        ----------
        layer : 0 to num_layers - 1
        query : fp32, fp16 or bf16 (T', Hq, D), the tokens of the step one sequence after another.
            T' may be more than their number: rows past the tokens are ignored
        key, value : (T', H, D), (T', H, Dv)
        out : (T', Hq, Dv), written in place; None: allocated, zero past the tokens
        sm_scale, window, sink_tokens, sinks, logits_soft_cap : of this layer, as in
            `paged_attention`
        stream : the compute stream; None: the current one of the query's library

        Returns
        -------
        (T', Hq, Dv) : `out`, or an array of the query's library

        Raises
        ------
        KvcupyError : no step is running
        TypeError, ValueError : an argument does not fit; nothing was written
        CaptureError : in a capture, a step of more than one token per sequence, torch tensors
            without `out`, or a stream that another library captures
        DeviceError : a launch was refused, and may be repeated; or pages of a sequence could not be
            loaded or copied, and then it can only be removed

        Notes
        -----
        Inputs are not modified. Stream: the first call of a step uploads its tables; the stream
        waits for them once. Capture: legal in a step of one token per sequence; for torch tensors,
        with `out`. A launch of the graph, between begin_forward and end_forward, runs the step that
        was begun, of as many sequences or fewer; its tables are uploaded before the launch. An
        output that the captured call allocated is written by each launch.
        """
        if self._is_latent:
            raise KvcupyError("this cache holds latents: call attention_mla")
        return self._attend(
            layer, query, key, value, out, sm_scale, window, sink_tokens, sinks, logits_soft_cap,
            stream,
        )  # fmt: skip

    def attention_qkv(
        self, layer: int, qkv: Any, *,
        out: Any = None, sm_scale: float | None = None, window: int | None = None,
        sink_tokens: int | None = None, sinks: Any = None, logits_soft_cap: float | None = None,
        stream: Any = None,
    ) -> Any:  # fmt: skip
        """Do as `attention` does, with query, key and value in one array.

        Parameters
        ----------
        qkv : (T', Hq + 2 H, D): query heads, then those of K, then of V
        layer, out, sm_scale, window, sink_tokens, sinks, logits_soft_cap, stream : as in
            `attention`
        """
        rows, width = view(qkv, "qkv"), self._layers.width
        heads = self._num_q_heads + 2 * self.pool.num_kv_heads
        num_tokens = self._running()[0].num_tokens
        if width != self._layers.v_width:
            raise ValueError(f"qkv: expected a cache with one width for K and V, got {self.pool}")
        check_query(rows, "qkv")
        if rows.shape[1:] != (heads, width) or rows.shape[0] < num_tokens:
            raise ValueError(
                f"qkv: expected at least {num_tokens} rows of ({heads}, {width}), "
                f"got {describe(rows)}"
            )
        ends = self._num_q_heads, self._num_q_heads + self.pool.num_kv_heads
        return self.attention(
            layer, rows[:, : ends[0]], rows[:, ends[0] : ends[1]], rows[:, ends[1] :],
            out=out, sm_scale=sm_scale, window=window, sink_tokens=sink_tokens, sinks=sinks,
            logits_soft_cap=logits_soft_cap, stream=stream,
        )  # fmt: skip

    def attention_mla(
        self, layer: int, query: Any, latent: Any, rope_key: Any, *,
        sm_scale: float, out: Any = None, window: int | None = None,
        sink_tokens: int | None = None, sinks: Any = None, logits_soft_cap: float | None = None,
        stream: Any = None,
    ) -> Any:  # fmt: skip
        """Do as `attention` does, for multi-head latent attention.

        Parameters
        ----------
        query : (T', Hq, R + P): the latent part, absorbed, and the rope part
        latent, rope_key : (T', R), (T', P)
        sm_scale : what scores are multiplied by; it depends on the widths before absorption
        out : (T', Hq, R)
        layer, window, sink_tokens, sinks, logits_soft_cap, stream : as in `attention`
        """
        if not self._is_latent:
            raise KvcupyError("this cache holds K and V: call attention")
        parts = view(latent, "latent"), view(rope_key, "rope_key")
        self._layers.check_latent(*parts, self._running()[0].num_tokens)
        return self._attend(
            layer, query, *parts, out, sm_scale, window, sink_tokens, sinks, logits_soft_cap, stream
        )

    def _attend(
        self, layer: Any, query: Any, key: Any, value: Any, out: Any,
        sm_scale: Any, window: Any, sink_tokens: Any, sinks: Any, logits_soft_cap: Any, stream: Any,
    ) -> Any:  # fmt: skip
        step, tables = self._steps.running, self._steps.tables
        if step is None or tables is None:
            raise KvcupyError(_NO_STEP)
        if type(layer) is not int or not 0 <= layer < self.pool.num_layers:
            self.pool.k(layer)  # raises, unless it is an integer of NumPy
        layers = self._layers
        rows, options, arrays, pointers, kind = layers.check(
            query, key, value, out, step.num_tokens, sm_scale, window, sink_tokens, sinks,
            logits_soft_cap,
        )  # fmt: skip
        own = self.device.as_stream(stream, rows.library)
        if out is None:
            shape = (*rows.shape[:2], layers.v_width)
            out = call.zeros(rows, shape, rows.format, own)
            arrays = (*arrays[:3], out, arrays[4])
            pointers = (*pointers[:3], address_of(out), pointers[4])
        uploaded = tables.on(own)
        if step.loads and not own.capturing:
            step.wait_layer(int(layer), own)
        layers.run(
            int(layer), arrays, pointers, kind, rows, options, uploaded, step.past_distance, own
        )
        if step.exports and not own.capturing:
            for export in step.exports:
                export.layer_written(int(layer), own)
        return out

    # --- Tables ---

    def query_positions(self, *, stream: Any = None) -> Any:
        """Return the position of each token of the step, int32 (T,), for work on `stream`.

        Raises
        ------
        KvcupyError : no step is running
        TypeError, ValueError : `stream` is not a stream

        Notes
        -----
        This and the other tables are arrays of the device's own library (NumPy, CuPy) that are
        valid until end_forward.
        """
        return self.device.carrier(self._tables(stream)["positions"])

    def slot_mapping(self, *, stream: Any = None) -> Any:
        """Return the slot of each token of the step, int64 (T,): `page * page_size + offset`.

        Raises
        ------
        KvcupyError, TypeError, ValueError : as `query_positions`
        """
        return self.device.carrier(self._tables(stream)["slots"])

    def block_table(self, *, stream: Any = None) -> Any:
        """Return the pages of the step's sequences, int32 (B, pages of the longest), zero-padded.

        Raises
        ------
        KvcupyError, TypeError, ValueError : as `query_positions`; or the cache has `demotion`

        Notes
        -----
        A sequence whose window has slid has unused slots between its sink tokens and what follows.
        """
        self._require_one_pool("block_table")
        return self.device.carrier(block_table(self._tables(stream)))

    def page_table_csr(self, *, stream: Any = None) -> tuple[Any, Any, Any]:
        """Return the pages of the step's sequences in CSR form, as FlashInfer takes them.

        Returns
        -------
        indptr : int32 (B + 1,), where each sequence's pages begin
        indices : int32 (indptr[-1],), the pages
        last_page_len : int32 (B,), slots in use of each last page

        Raises
        ------
        KvcupyError, TypeError, ValueError : as `query_positions`; or the cache has `demotion`
        """
        self._require_one_pool("page_table_csr")
        self._running()
        lists = self._steps.lists(self._stream(stream))
        indptr, indices, last_page_len = map(self.device.carrier, lists.values())
        return indptr, indices, last_page_len

    # --- Contents ---

    def get_kv(
        self, seq: Hashable, start: int, stop: int, *, dtype: Any = None, stream: Any = None
    ) -> tuple[Any, Any]:
        """Return K and V of the tokens at positions `start` to `stop` - 1, all layers.

        Parameters
        ----------
        start, stop : 0 <= start <= stop <= length
        dtype : format of the result; None: the cache's, or bf16 if that is quantised
        stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

        Returns
        -------
        K, V : (L, n, H, D) and (L, n, H, Dv); of MLA latent (L, n, R) and rope key (L, n, P)

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit

        Notes
        -----
        Keys as they are cached: rotated in rope_mode "normal". Stream: one kernel per layer, behind
        all steps so far.
        """
        sequence = self._on_device(seq)
        for name, number in (("start", start), ("stop", stop)):
            checks.require_int(number, name)
        if not 0 <= start <= sequence.length:
            raise ValueError(f"start: expected 0 to {sequence.length}, got {start}")
        if not start <= stop <= sequence.length:
            raise ValueError(f"stop: expected {start} to {sequence.length}, got {stop}")
        return self._contents.read(sequence, start, stop, dtype, stream)

    def set_kv(self, seq: Hashable, start: int, k: Any, v: Any, *, stream: Any = None) -> None:
        """Overwrite K and V of tokens of a sequence; other sequences that share them keep theirs.

        Parameters
        ----------
        start : position of the first; n of them must be cached
        k, v : (L, n, H, D) and (L, n, H, Dv), or of MLA as `get_kv` gives them, in any format;
            quantised if the cache is
        stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit
        CacheFull : a shared page must be copied and none is free
        KvcupyError : the sequence belongs to the running step
        CaptureError : the stream is being captured
        DeviceError : a launch was refused; the tokens from `start` on are undefined, and may be in
            pages of their own

        After any other error nothing has changed.

        Notes
        -----
        To bring in tokens that were computed elsewhere: begin_forward, end_forward, set_kv.
        """
        sequence = self._on_device(seq)
        self._steps.require_outside(seq)
        checks.require_int(start, "start")
        key, value = self._contents.check(k, v)
        stop = start + key.shape[1]
        if not 0 <= start <= stop <= sequence.length:
            raise ValueError(
                f"start: expected {key.shape[1]} tokens from there within {sequence.length}, "
                f"got {start}"
            )
        if start == stop:
            return
        own = self.device.as_stream(stream, key.library)
        if own.capturing:
            raise CaptureError(f"stream: {own.name} is being captured; set_kv cannot be")
        self._steps.unshare(sequence, sequence.places(start, stop))
        del sequence.hashes[start // self.pool.page_size :]  # they no longer describe the tokens
        self._contents.write(sequence, start, key, value, own)

    def save_sequence(self, seq: Hashable, path: str | Path) -> None:
        """Write the tokens of a sequence to a safetensors file, bit for bit, with its window.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        TypeError, ValueError : its tree is not committed, or `path` is not the name of a file
        KvcupyError : it belongs to the running step
        ImportError : the package safetensors is missing
        OSError : the file cannot be written; one that was there is left as it was

        Notes
        -----
        Stream: waits for all steps so far. Capture: illegal. Demoted tokens are written as
        `get_kv` gives them; loading the file demotes them again.
        """
        self._contents.save(self._settled(seq), path)

    def load_sequence(self, seq: Hashable, path: str | Path) -> None:
        """Add a sequence from a file of `save_sequence`.

        Raises
        ------
        TypeError, ValueError : the sequence exists, or the file does not fit this cache
        CacheFull : there are too few pages
        ImportError : the package safetensors is missing
        OSError : the file cannot be read

        After an error nothing has changed.
        """
        self._sequences.require_new(seq, "seq")
        saved = self._contents.open(path)
        sequence = self._sequences.add(seq)
        try:
            reserved = self._sequences.reserve([sequence], [saved.length])
            self._sequences.grow([sequence], [saved.length], reserved)
            sequence.window, sequence.sink_tokens = saved.window, saved.sink_tokens
            self._contents.restore(sequence, saved)
            self._steps.demote([sequence])
        except BaseException:
            self._sequences.remove(seq)
            raise

    # --- Tiers ---

    def attach(self, tiers: TieredCache, *, num_past_host_pages: int | None = None) -> None:
        """Use a tiered cache, which shares the pages of this one.

        From then on it evicts blocks where new tokens need pages; `num_available_pages` does not
        count the pages of such blocks.

        Parameters
        ----------
        tiers : a TieredCache whose `device_pool` is the `pool` of this cache. A tiered cache
            belongs to one paged cache
        num_past_host_pages : with `demotion`, pages in host memory for demoted pages of offloaded
            sequences; None: as many as in `past_pool`. They are allocated when the first is
            offloaded

        Raises
        ------
        TypeError, ValueError : it is not a TieredCache, is of another pool, or there is one
            already; or num_past_host_pages does not fit

        Notes
        -----
        Stream: who calls `acquire` of the tiered cache beside this one gives it a stream `after`
        that is behind all compute streams and the copy stream: what is loaded may come to pages
        that a sequence has just released, and that they still work on.
        """
        self._tiers.attach(tiers, num_past_host_pages)

    def offload(self, seq: Hashable) -> None:
        """Move a sequence to host memory, and release its pages.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        ValueError : it is offloaded already, its tree is not committed, or there is no tiered cache
        CacheFull : the host pool is full, and nothing can be evicted, or there is no room for its
            demoted pages; nothing has changed
        KvcupyError : it belongs to the running step
        DeviceError, MemoryError : there is no memory for demoted pages; nothing has changed

        Notes
        -----
        Demoted pages are moved as they are, not converted.
        Stream: the copy waits for all steps so far. Pages are free once it has read them, shared
        ones once the other sequences have released them. Until it is brought back the sequence has
        a length and can be removed. Bytes: its pages, shared ones included.
        """
        self._tiers.require("seq")
        self._tiers.offload(self._settled(seq))

    def onboard(self, seq: Hashable) -> None:
        """Bring an offloaded sequence back; one that is on the device stays as it is.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        CacheFull : there are too few pages; nothing has changed
        DeviceError : it could not be saved when it was offloaded; it can only be removed

        Notes
        -----
        Stream: it is loaded in the background, layer by layer; the attention of each layer waits
        for its own part. The host waits for the save, if that is not done yet.
        """
        self._tiers.onboard(self._sequences.find(seq))

    # --- Other caches ---

    def export_sequence(
        self, seq: Hashable, sender: SenderProtocol, *,
        lease_s: float = 30.0, past_sender: SenderProtocol | None = None,
    ) -> bytes:  # fmt: skip
        """Offer a sequence to a cache of another process, with its window and its hashes.

        Parameters
        ----------
        seq : a sequence with tokens, also one of the running step: what is offered is then the end
            of that step, and each layer goes out as soon as its attention has run
        sender : a PageSender of the `pool` of this cache
        lease_s : seconds for which the pages are held, unless a receiver renews that
        past_sender : a PageSender of `past_pool`, for demoted pages; None: there must be none. It
            has the secret of `sender`

        Returns
        -------
        bytes : the ticket, for `import_sequence` of a cache over there

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        TypeError, ValueError : an argument does not fit, the sequence is empty or offloaded, its
            tree is not committed, some of its pages are demoted and there is no `past_sender`, or
            its window is to slide at the end of the running step
        KvcupyError : the sender is closed, or pages of the sequence could not be loaded

        After an error nothing has changed.

        Notes
        -----
        What is offered is the sequence as it is at the call. It may be extended, forked or removed
        at once: its pages are held until the receiver has them, the lease is over or the sender
        closes. Who appends to its last page copies that page first. Pages that are let go become
        free at the next call that needs pages, or asks for `num_available_pages`; full ones with
        hashes of a removed sequence go to the tiered cache then.
        A step that is taken back withdraws the offer: the receiver gets a TransferError.
        Demoted pages are offered as they are, by an offer of their own that the ticket names; who
        withdraws the ticket leaves that to its lease.
        Stream: pages go out behind all steps so far, and of the running step behind the attention
        of each layer; a step that runs as a graph goes out when it has ended.
        """
        sequence = self._exported(seq)
        if getattr(sender, "pool", None) is not self.pool:
            raise ValueError("sender: expected a PageSender of the pool of this cache")
        self._check_past(past_sender, "past_sender", "PageSender")
        if past_sender is None and any(self._sequences.past_range(sequence)):
            raise ValueError(
                f"past_sender: expected a PageSender of past_pool, for {seq!r} has demoted pages, "
                "got None"
            )
        step = self._steps.running if self._steps.is_running(seq) else None
        export = self._exports.start(
            sequence, sender, past_sender,
            partial(encode_state, sequence, self._exchanged(), self.pool.page_size),
            self._exchanged_past() or {}, by_layer=step is not None, lease_s=lease_s,
        )  # fmt: skip
        if step is not None:
            step.exports.append(export)
        return export.ticket

    def import_sequence(
        self, seq: Hashable, ticket: bytes, receiver: ReceiverProtocol, *,
        deadline_s: float = 30.0, past_receiver: ReceiverProtocol | None = None,
    ) -> PullProtocol | SequencePull:  # fmt: skip
        """Add a sequence that a cache of another process has exported.

        Parameters
        ----------
        ticket : what `export_sequence` returned over there
        receiver : a PageReceiver of the `pool` of this cache
        deadline_s : seconds after which the transfer has failed if it is not complete, the rest of
            a step included in which the sequence was exported
        past_receiver : a PageReceiver of `past_pool`, for demoted pages; None: there must be none.
            It has the secret of `receiver`

        Returns
        -------
        Pull : the transfer, for who wants to wait for it, or to cancel it; a `SequencePull`, which
            is used alike, if there are demoted pages beside others

        Raises
        ------
        TypeError, ValueError : an argument does not fit, the sequence exists, or the ticket is of a
            sequence that this cache cannot hold, such as one with pages that were demoted with
            another `past`, `recent` or `sinks`
        TransferError : the ticket was made with another secret or for another kind of pool
        CacheFull : there are too few pages

        After an error nothing has changed.

        Notes
        -----
        The sequence may be used at once. Stream: its pages arrive in the background, layer by
        layer; the attention of each layer waits for its own part, which raises TransferError if the
        transfer fails. The sequence can then only be removed, and its pages become free when
        nothing can land in them any more.
        """
        self._sequences.require_new(seq, "seq")
        if getattr(receiver, "pool", None) is not self.pool:
            raise ValueError("receiver: expected a PageReceiver of the pool of this cache")
        self._check_past(past_receiver, "past_receiver", "PageReceiver")
        offered = receiver.inspect(ticket)
        state, num_pages, demoted = decode_state(
            offered.attachment, self._exchanged(), self.pool.page_size, self._exchanged_past()
        )
        pulled: list[tuple[ReceiverProtocol, bytes, int]] = []  # with the number of pages
        if demoted is None:
            pulled.append((receiver, ticket, num_pages))
        elif past_receiver is None:
            raise ValueError(
                "past_receiver: expected a PageReceiver of past_pool, for the ticket has demoted "
                "pages, got None"
            )
        else:
            if num_pages > demoted.count:
                pulled.append((receiver, ticket, num_pages - demoted.count))
            pulled.append((past_receiver, demoted.ticket or ticket, demoted.count))
        for by, named, count in pulled:
            if (got := by.inspect(named).num_pages) != count:
                raise ValueError(f"ticket: expected {count} pages of its sequence, got {got}")
        start, count = (0, 0) if demoted is None else (demoted.start, demoted.count)
        pages, past_pages = self._sequences.allocate_both(num_pages - count, count)
        combined = self._sequences.combine(pages, past_pages, start)
        pulls: list[PullProtocol] = []
        try:
            after = self._steps.access.copy_stream_behind_all()
            for by, named, _ in pulled:
                into = pages if by is receiver else past_pages
                pulls.append(by.pull(named, into, deadline_s=deadline_s, after=after))
        except BaseException:
            for pull in pulls:
                pull.cancel()
            self._sequences.free(combined)
            raise
        self._sequences.receive(seq, state, combined, pulls)
        return pulls[0] if len(pulls) == 1 else SequencePull((pulls[0], pulls[1]))

    def _exported(self, seq: Hashable) -> CachedSequence:
        """Return a sequence that can be exported."""
        sequence = self._on_device(seq)
        if sequence.parents:
            raise ValueError(f"seq: {seq!r} has a token tree: call commit_token_tree first")
        if sequence.length == 0:
            raise ValueError(f"seq: expected a sequence with tokens, got {seq!r}, which is empty")
        if self._steps.is_running(seq) and sequence.num_beyond_window:
            raise ValueError(
                f"seq: the window of {seq!r} slides at the end of the step; export it after that"
            )
        return sequence

    def _exchanged(self) -> dict[str, str]:
        """Return what caches that exchange sequences must have in common."""
        return {**self._contents.fields(), "page_size": str(self.pool.page_size)}

    def _exchanged_past(self) -> dict[str, str] | None:
        """Return what caches that exchange demoted pages must have in common; None without past."""
        past = self._past
        if past is None:
            return None
        kept = {"past": past.pool.stored_as, "recent": past.recent, "sinks": past.sinks}
        return {name: str(value) for name, value in kept.items()}

    def _check_past(self, end: Any, name: str, kind: str) -> None:
        """Raise unless a sender or receiver of demoted pages is None, or of the past's pool."""
        if end is None:
            return
        if self.past_pool is None:
            raise ValueError(f"{name}: expected None without past, got {end!r}")
        if getattr(end, "pool", None) is not self.past_pool:
            raise ValueError(f"{name}: expected a {kind} of the past_pool of this cache")

    # --- Parts ---

    def _on_device(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence; raise if it is offloaded."""
        sequence = self._sequences.find(seq, name)
        require_on_device(sequence, seq, name)
        return sequence

    def _settled(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence; raise if it is in the running step or its tree is not committed."""
        sequence = self._on_device(seq, name)
        self._steps.require_outside(seq, name)
        if sequence.parents:
            raise ValueError(f"{name}: {seq!r} has a token tree: call commit_token_tree first")
        return sequence

    def _require_one_pool(self, name: str) -> None:
        """Raise if the pages of a sequence may be of two pools."""
        if self._past is not None:
            raise KvcupyError(f"{name}: the pages of a cache with past are of two pools")

    def _running(self) -> tuple[Step, StepTables]:
        steps = self._steps
        if steps.running is None or steps.tables is None:
            raise KvcupyError(_NO_STEP)
        return steps.running, steps.tables

    def _tables(self, stream: Any) -> Tables:
        return self._running()[1].on(self._stream(stream))

    def _stream(self, stream: Any) -> Stream:
        return self.device.as_stream(stream, self.pool.parts[0].library)


def _sequence_samples(cache: PagedKVCache) -> Iterator[tuple[str, metrics.Labels, float]]:
    yield "kvcupy_sequences", (), len(cache._sequences)
    yield "kvcupy_sequence_tokens", (), cache.total_length


def _pool_of(
    pool: Pool | None, *, num_layers: int | None, num_kv_heads: Any, head_dim: Any,
    num_pages: int | None, page_size: int, dtype: Any, device: Any, v_head_dim: int | None,
    latent_dim: int | None, rope_dim: int | None, has_static_scales: bool,
) -> Pool:  # fmt: skip
    """Return `pool`, whose geometry must agree with the other arguments, or a new pool."""
    if pool is not None:
        _require_kind(pool, latent_dim)
    if latent_dim is not None:
        row = positive_int(latent_dim, "latent_dim") + positive_int(rope_dim, "rope_dim")
        if v_head_dim is not None:
            raise ValueError(f"v_head_dim: expected None with latent_dim, got {v_head_dim}")
        for name, value, own in (("num_kv_heads", num_kv_heads, 1), ("head_dim", head_dim, row)):
            if value is not None and positive_int(value, name) != own:
                raise ValueError(f"{name}: expected None or {own} with latent_dim, got {value}")
        head_dim = row
    elif rope_dim is not None:
        raise ValueError(f"rope_dim: expected None without latent_dim, got {rope_dim}")
    if pool is not None:
        counts = {
            "num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "num_pages": num_pages, "v_head_dim": v_head_dim,
            "page_size": None if page_size == _PAGE_SIZE else page_size,
        }  # fmt: skip
        _require_pool(
            pool, counts, None if dtype is _DTYPE else dtype, device, latent_dim, has_static_scales
        )
        return pool
    shared: dict[str, Any] = {
        "num_pages": num_pages, "page_size": page_size, "num_layers": num_layers,
        "dtype": dtype, "device": device,
    }  # fmt: skip
    if latent_dim is None:
        format = FORMATS.get(Encoding.of(dtype).format)  # groups of four bits have scales anyway
        dynamic = format is not None and format.quantised and not has_static_scales
        return KVPool(  # raises for None, by the argument's name
            **shared, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim,
            scales=dynamic,
        )  # fmt: skip
    return MLAPool(**shared, latent_dim=latent_dim, rope_dim=head_dim - latent_dim)


def _require_kind(pool: Any, latent_dim: int | None) -> None:
    """Raise TypeError unless a pool is of K and V, or of latents, as the other arguments say."""
    expected = KVPool if latent_dim is None else MLAPool
    if not isinstance(pool, expected):
        beside = "without" if latent_dim is None else "with"
        raise TypeError(
            f"pool: expected a {expected.__name__} {beside} latent_dim, got {type(pool).__name__}"
        )


def _require_pool(
    pool: Any, counts: dict[str, int | None], dtype: Any, device: Any, latent_dim: int | None,
    has_static_scales: bool,
) -> None:  # fmt: skip
    """Raise if the other arguments contradict a pool, or attention cannot read its pages."""
    for name, value in counts.items():
        if value is not None and positive_int(value, name) != getattr(pool, name):
            raise ValueError(f"{name}: expected {getattr(pool, name)} as in pool, got {value}")
    own = pool.encoding
    if dtype is not None and Encoding.of(dtype) not in (own, Encoding(own.format)):
        raise ValueError(f"dtype: expected {pool.encoding} as in pool, got {dtype!r}")
    if device is not None and devices.get(device) is not pool.device:
        raise ValueError(f"device: expected {pool.device.name} as in pool, got {device!r}")
    if pool.placement != "device":
        raise ValueError(f"pool: expected pages on the device, got {pool}")
    if isinstance(pool, MLAPool) and pool.rope_dim and latent_dim != pool.latent_dim:
        raise ValueError(f"latent_dim: expected {pool.latent_dim} as in pool, got {latent_dim}")
    if has_static_scales and pool.scale_parts:
        raise ValueError(f"k_scale, v_scale: expected None with the scales of {pool}")
