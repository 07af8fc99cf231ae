"""A paged KV cache for many sequences."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ... import checks, metrics
from ...arrays import address_of, view
from ...checks import positive_int
from ...config import cache_logger, config
from ...devices.protocol import Stream
from ...errors import CaptureError, InterruptGuard, KvcupyError, ProcessLocal, needs_pages
from ...formats import RopeMode
from ..hazards import CopiedPages
from ..pages import hash_list
from ..pool import Pool
from ..tiered.cache import TieredCache, tokens_of
from ..tiered.prefixes import TierGroup
from . import backends
from .arguments import DTYPE, PAGE_SIZE, Demotion
from .construction import make_parts
from .contents import Contents
from .exchange import Exchange
from .files import SequenceFiles
from .memory_plan import MemoryPlan
from .page_group import PageGroup
from .states import StateLoad
from .step import Step
from .steps import Steps
from .tables import STATE_SLOTS, StepTables, Tables, block_table
from .tiers import Tiers, tier_groups

_NO_STEP = "no step is running: call begin_forward first"
# Calls that need one group without a window or states, and their replacements elsewhere.
_INSTEAD = {
    "enable_sliding_window": "pass SlidingWindow groups",
    "page_table_csr": "use block_table(layer=)",
}


class PagedKVCache(ProcessLocal):
    """Keep K and V of many sequences in pages, and attend with the tokens of a step.

    Parameters
    ----------
    num_layers, num_q_heads, num_kv_heads, head_dim, num_pages, page_size : counts. With `pool` only
        num_q_heads is needed; the others, where they are not left at their defaults, must agree
        with it
    v_head_dim : the width of V; None: head_dim
    latent_dim, rope_dim : for multi-head latent attention, instead of num_kv_heads and head_dim: a
        token has one row, the latent and then the rope part. See `attention_mla`
    dtype : encoding of the cache: an Encoding or its string, or a dtype. The rope part of a latent
        row never gets the Hadamard rotation
    k_scale, v_scale : static scales of a quantised cache: a number, or float32 (H,), (L, 1) or
        (L, H). Without any it has one scale per token and head (with latent_dim: scale 1)
    rope : float32 (max_positions, rotary_dim) on the device, from `rope_table`; None: no rotation
    interleaved : pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
    rope_mode : "normal": keys are cached rotated; "inline": cached raw and rotated in attention;
        "none": not rotated
    max_batch_tokens : the most tokens of a step
    max_seq_len : tokens per sequence that a captured step has space for; None: the positions of
        rope, else all pages
    device : a Device or its name; None: the default device
    copy_stream : a stream for tables and page copies; None: the cache makes one
    pool : a KVPool, or an MLAPool with latent_dim, that has the pages, also over existing memory
        (`KVPool.wrap`); None: one is allocated. Pages come from its allocator, so other users may
        allocate some of them. The slots of a layer must be evenly spaced, so the layouts
        "page_first_direct" and "page_head" are refused
    slots_in_flight : steps whose tables may be uploading or in use at once
    demotion : a `Demotion`: how old tokens are kept in a narrower encoding; None: all are kept in
        dtype
    batch_invariant : whether the bits of a sequence's outputs depend on its tokens alone: not on
        the rest of a batch, on how its prefill was cut into steps, or on where its pages came
        from. True for all caches that are made while `kvcupy.config.batch_invariant` is. What it
        costs: see `paged_attention`. Excludes `demotion`
    attention : whose kernels attend: "kvcupy", "flashinfer", "flash_attn", "auto" (FlashInfer's
        where it is installed and was measured to be faster, else kvcupy's) or a function
    groups : for heterogeneous layers, a list of `FullAttention`, `SlidingWindow`, `Latent` and
        `Recurrent`, in place of the shape of the layers, num_pages, dtype, pool and demotion. Each
        group has its own pool. Layers have their numbers in the model
    memory_bytes : with groups, the bytes of all pools and states. They are divided for sequences of
        num_tokens tokens (None: max_seq_len, or the positions of rope, else 4,096 or as many that
        four sequences fit); see `plan`
    num_tokens : with groups and without memory_bytes, the tokens that the pools hold, of one
        sequence, or of several of max_seq_len tokens

    Attributes
    ----------
    pool : the KVPool or MLAPool that holds the pages; with groups, of the first attention group
    demoted_pool : the KVPool of the demoted pages, or None
    pools : the pools of all groups of attention layers, in order
    sequence_pools : all pools that hold parts of a sequence: of each group, its pool and its pool
        of demoted pages, and then the pool of the states of recurrent layers
    device : the Device

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    NotImplementedError : groups without attention, or whose checkpoint_tokens differ; or several
        groups, or a SlidingWindow, with the `attention` of another library
    ImportError : `attention` names a package that is not installed
    DeviceError, MemoryError : there is not enough memory

    Notes
    -----
    Stream: bookkeeping is host work. The tables of a step are uploaded in one copy from pinned
    memory on the copy stream, at the first attention of the step, which waits for it by an event;
    so the upload overlaps earlier work of the compute stream. Neither pinned nor device memory is
    overwritten before its readers are done. Pages are copied on the copy stream too, after the
    compute streams that wrote them. A step may use several streams, as long as the caller orders
    its layers.
    Capture: legal for steps of one token per sequence; see `attention`.

    Attention: kvcupy's kernels attend, with the reason logged once, for token trees, evicted spans,
    demoted tokens, captured steps, `batch_invariant`, rope_mode "inline" and four-bit caches; for
    what a library does not support; and after a library has raised. Exceptions raised by a
    function propagate. Results are not checked.
    A function has the signature of `paged_attention`: `attention(query, k_cache, v_cache,
    block_table, seq_lens, *, cu_query_lens, out, stream, **options)`. Arrays are torch tensors if
    the query is a torch tensor, else NumPy or CuPy arrays. cu_query_lens is None if each sequence
    has one new token. `options` may contain sm_scale, window, sink_tokens, sinks,
    logits_soft_cap and the scales of the cache; None is left out. `stream` is the current stream of
    the array library. The function writes and returns `out`, or returns another array, which is
    copied to `out`, or None to leave the call to kvcupy.

    Threads: one at a time. A forked child makes its own cache: calls raise KvcupyError there.
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
    0
    >>> cache.sequence_length("b"), cache.num_available_pages, float(out[4, 3, 0])
    (4, 6, 1.0)
    """

    def __init__(
        self, *,
        num_q_heads: int, num_layers: int | None = None, num_kv_heads: int | None = None,
        head_dim: int | None = None, num_pages: int | None = None, page_size: int = PAGE_SIZE,
        dtype: Any = DTYPE, rope: Any = None, interleaved: bool = False,
        rope_mode: RopeMode = "normal",
        max_batch_tokens: int = 8192, device: Any = None, copy_stream: Any = None,
        slots_in_flight: int = 2, v_head_dim: int | None = None, latent_dim: int | None = None,
        rope_dim: int | None = None,
        k_scale: Any = None, v_scale: Any = None, max_seq_len: int | None = None,
        pool: Pool | None = None, demotion: Demotion | None = None,
        batch_invariant: bool = False, attention: Any = "kvcupy",
        groups: Any = None, memory_bytes: int | None = None, num_tokens: int | None = None,
    ) -> None:  # fmt: skip
        checks.flag(batch_invariant, "batch_invariant")
        if batch_invariant and demotion is not None:
            raise ValueError(f"demotion: expected None with batch_invariant, got {demotion!r}")
        batch_invariant = bool(batch_invariant or config.batch_invariant)
        if max_seq_len is not None:
            max_seq_len = positive_int(max_seq_len, "max_seq_len")
        shared: dict[str, Any] = {
            "num_q_heads": positive_int(num_q_heads, "num_q_heads"), "rope": rope,
            "rope_mode": rope_mode, "interleaved": interleaved,
            "batch_invariant": batch_invariant,
        }  # fmt: skip
        max_batch_tokens = positive_int(max_batch_tokens, "max_batch_tokens")
        shape: dict[str, Any] = {
            "num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
            "num_pages": num_pages, "v_head_dim": v_head_dim, "latent_dim": latent_dim,
            "rope_dim": rope_dim, "pool": pool, "k_scale": k_scale, "v_scale": v_scale,
            "demotion": demotion, "page_size": page_size, "dtype": dtype, "device": device,
            "memory_bytes": memory_bytes, "num_tokens": num_tokens,
        }  # fmt: skip
        parts = make_parts(
            shared, groups=groups, attention=attention, max_seq_len=max_seq_len,
            max_batch_tokens=max_batch_tokens, **shape,
        )  # fmt: skip
        self._plan, self._groups, self._states = parts.plan, parts.groups, parts.states
        first = self._groups[0]
        self.pool, self.demoted_pool = first.pool, first.demoted_pool
        self.device = first.pool.device
        self.pools = tuple(group.pool for group in self._groups)
        self._sequences = first.sequences
        # Of each layer of the model, the number of its group and its number in the group.
        self._places = {
            layer: (number, i)
            for number, group in enumerate(self._groups)
            for i, layer in enumerate(group.model_layers)
        }
        self._warned = False
        # One more than the tokens fill: there may be an evicted span after the sink tokens.
        max_pages = -(-(max_seq_len or self._plan.sequence_tokens) // self.pool.page_size) + 1
        whole = [group.num_pages for group in self._groups if not group.window]
        self._steps = Steps(
            self._groups, self._states, copy_stream=copy_stream,
            slots_in_flight=positive_int(slots_in_flight, "slots_in_flight"),
            max_batch_tokens=max_batch_tokens, max_pages=min([*whole, max_pages]),
        )  # fmt: skip
        if not (isinstance(attention, str) and attention == "kvcupy"):
            first.layers.backend = backends.opener(attention, self.pool, first.layers, self._steps)
        access = self._steps.access
        self._contents = [Contents(group, access) for group in self._groups]
        self._files = SequenceFiles(parts.plan, self._groups, self._contents, self._states, access)
        self._tiers = Tiers(self._groups, self._states, access)
        self._exchange = Exchange(
            self._groups, self._states, self._files.cache_fields, self._tiers, access
        )
        self.sequence_pools = self._exchange.pools
        self._guard = InterruptGuard("PagedKVCache", self)
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
        """Pages that are free, or become free when the transfers that touch them are done.

        With groups, of the group that has the fewest.
        """
        self._exchange.reclaim()
        return min(group.pool.allocator.num_available for group in self._groups)

    @property
    def num_available_demoted_pages(self) -> int:
        """Pages for old tokens that are not allocated, of all groups; 0 without `demotion`."""
        self._exchange.reclaim()
        pools = [group.demoted_pool for group in self._groups]
        return sum(pool.allocator.num_available for pool in pools if pool is not None)

    @property
    def total_length(self) -> int:
        """Tokens of all sequences; a shared prefix counts for each."""
        return self._sequences.total_length

    # --- Sequences ---

    def add_sequence(
        self, seq: Hashable, hashes: Any = None, *,
        num_tokens: int | None = None, token_ids: Any = None,
    ) -> None:  # fmt: skip
        """Add a sequence, empty or, with hashes, with the cached blocks of its prompt.

        Parameters
        ----------
        hashes : of the blocks of its prompt, one per page, from `block_hashes`; needs a tiered
            cache (`attach`). The sequence begins with the leading blocks that are cached:
            `sequence_length` is how many tokens need not be computed. Its other full pages go to
            the tiered cache when the sequence is removed
        num_tokens : of its prompt. The last one is left to compute, for its logits: a block that
            ends with it is not taken from the cache. None: all blocks may be
        token_ids : list or array (n,), the tokens of these blocks, to be published by
            `kvcupy.events`; None: unknown

        Raises
        ------
        TypeError, ValueError : an argument does not fit, the sequence exists, a hash comes twice,
            or there is no tiered cache
        CacheFull : there are too few pages for cached blocks; nothing has changed

        Notes
        -----
        Stream: blocks are loaded in the background; the attention of each layer waits for its
        layer. The caller must ensure that the hashes match the tokens.
        """
        if num_tokens is not None:
            num_tokens = positive_int(num_tokens, "num_tokens")
        if hashes is None:
            if token_ids is not None:
                raise ValueError("token_ids: expected None without hashes, got tokens")
            self._sequences.require_new(seq, "seq")
            with self._guard:
                for group in self._groups:
                    group.sequences.add(seq)
                if self._states is not None:
                    self._states.add(seq)
            return
        self._tiers.require("hashes")
        self._sequences.require_new(seq, "seq")
        keys = hash_list(hashes)
        if len(set(keys)) < len(keys):
            raise ValueError("hashes: expected each once, as a chain of them has")
        page_size = self.pool.page_size
        tokens = tokens_of(token_ids, len(keys), page_size)
        most = len(keys)
        if num_tokens is not None:
            if num_tokens < most * page_size:
                raise ValueError(
                    f"num_tokens: expected at least {most * page_size}, the tokens of hashes, got "
                    f"{num_tokens}"
                )
            most = min(most, (num_tokens - 1) // page_size)
        with self._guard, needs_pages("hashes"):
            self._tiers.add(seq, keys, tokens, most)

    def remove_sequence(self, seq: Hashable) -> None:
        """Remove a sequence, in any order; pages that no other shares become free.

        Unshared full pages that have hashes go to the tiered cache instead, unless they are
        demoted. After a load of the sequence that has failed, or during a pull, they become free
        too. So do the host pages of an offloaded sequence: onboard it first to keep its blocks.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        KvcupyError : it belongs to the running step
        """
        self._sequences.find(seq)
        self._steps.require_outside(seq)
        with self._guard:
            published = self._tiers.publish(seq)
            for group, taken in zip(self._groups, published, strict=True):
                group.sequences.remove(seq, taken)
            if self._states is not None:
                self._states.remove(seq)
            self._tiers.remove(seq)

    def fork_sequence(self, parent: Hashable, child: Hashable, at: int | None = None) -> int:
        """Add a sequence that begins with the first tokens of another.

        Parameters
        ----------
        parent, child : a cached sequence, and a new one
        at : how many tokens, 0 to the parent's length; None: all

        Returns
        -------
        int : r, 0 without groups. The child has r tokens less than `at`, because some group cannot
            restore more, not even from tiers: a window has freed them, or no state was kept.
            Append them again

        Raises
        ------
        UnknownSequence, TypeError : there is no such parent, or it cannot be the name of one
        TypeError, ValueError : the child exists, `at` is outside, or the parent's tree is not
            committed
        CacheFull : a partial page or a state is to be copied and none is free; nothing has changed
        KvcupyError : the parent belongs to the running step

        Notes
        -----
        The child inherits tokens, their block hashes and the sliding window. Full pages are
        shared. Stream: a partial one is copied on the copy stream, after all steps so far. Bytes:
        at most one page, read and written.
        """
        with self._guard, needs_pages("child"):
            return self._steps.fork(parent, child, at)

    def pop_tokens(self, seq: Hashable, n: int) -> int:
        """Drop the last `n` tokens of a sequence; other sequences that share their pages keep them.

        Returns
        -------
        int : r, 0 without groups. So many more tokens are dropped; see `fork_sequence`

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        TypeError, ValueError : n is not 0 to its length, or its tree is not committed
        KvcupyError : it belongs to the running step
        DeviceError : a kept state could not be copied; the sequence is empty
        """
        with self._guard:
            return self._steps.pop(seq, n)

    def restorable_length(self, seq: Hashable, at: int) -> int:
        """Return how many of the first `at` tokens of a sequence a fork or a pop would leave.

        Without groups all of them; see `fork_sequence`. With tiers it may be more: they are not
        asked.

        Raises
        ------
        UnknownSequence, TypeError, ValueError : as of `fork_sequence`
        KvcupyError : the sequence belongs to the running step
        """
        return self._steps.restorable_length(seq, at)

    def sequence_length(self, seq: Hashable) -> int:
        """Return how many tokens a sequence has, including an uncommitted tree.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        """
        return self._sequences.find(seq).length

    def enable_sliding_window(self, seq: Hashable, window: int, sink_tokens: int = 0) -> None:
        """Apply StreamingLLM: after each step, keep only the first tokens and the last.

        This is not what a model that was trained with a window computes: for one, pass
        `groups=[kv.SlidingWindow(...)]` to the cache. `sequence_length` stops growing at
        sink_tokens + window.

        Parameters
        ----------
        window : how many of the last tokens remain
        sink_tokens : how many of the first tokens remain too

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        TypeError, ValueError : an argument does not fit, or tokens were evicted after another
            number of sink_tokens
        KvcupyError : it belongs to the running step

        Notes
        -----
        Positions are those in the cache. A step is causal over what is cached and itself. With
        rope_mode "normal", keys keep the rotation that they were written with; "inline" rotates
        them by their positions now. Source: Xiao et al. 2023, StreamingLLM.
        """
        self._require_one_group("enable_sliding_window")
        sequence = self._sequences.find(seq)
        self._steps.require_outside(seq)
        sequence.set_window(window, sink_tokens)
        if self._groups[0].layers.rope.mode == "normal" and not self._warned:
            self._warned = True
            cache_logger.warning(
                "enable_sliding_window is StreamingLLM; for a model that was trained with a window "
                "use groups=[kv.SlidingWindow(...)]. Keys that were cached rotated (rope_mode "
                '"normal") keep their rotation; "inline" rotates them by their positions'
            )

    def clear(self) -> None:
        """Drop all sequences, and the running step if there is one."""
        with self._guard:
            self._steps.abort()
            if self._states is not None:
                self._states.clear()
            for group in self._groups:
                group.sequences.clear()
            self._tiers.clear()

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

        After an error nothing has changed.

        Notes
        -----
        Stream: host work, except that shared partial pages are copied on the copy stream. Host work
        grows with the batch, not with the number of sequences in the cache.
        """
        try:
            self._steps.begin(seqs, append_lens, token_tree)
        except BaseException as error:
            self._guard.note(error)
            raise

    def end_forward(self, *, keep_step: bool = False) -> None:
        """End the step; windows slide. To take it back instead, call `abort_forward`.

        Parameters
        ----------
        keep_step : whether groups with a window keep what all tokens of the step have seen, until
            the next step begins, so that any number of them can be popped; else of the last page

        Raises
        ------
        KvcupyError : no step is running
        TypeError : keep_step is not a bool
        DeviceError, TransferError : layers of an exported sequence could not be sent, and its offer
            is withdrawn; or a state could not be kept. The step has ended

        Notes
        -----
        In strict mode (`kvcupy.config.strict`) a warning names the layers that have not attended
        in a step in which others have. It is legal to fill them with `set_kv`, or to have filled
        them with other kernels.
        """
        checks.flag(keep_step, "keep_step")
        try:
            self._steps.end(keep_step)
        except BaseException as error:
            self._guard.note(error)
            raise

    def abort_forward(self) -> None:
        """End the step and take its tokens back: pages, lengths and trees are as before it.

        Without a running step it does nothing, so it may follow any exception of a step.

        Raises
        ------
        DeviceError, TransferError : the state of a sequence could not be restored, and the sequence
            is empty, or an offer of `export_sequence` not ended. The step is taken back

        Notes
        -----
        Recurrent layers return to the state before the step if the model cannot have updated it,
        which is if it has not asked for `state_slots`, or to the last state that was kept: the
        sequence is then shorter, see `sequence_length`, and its tokens are appended again.
        Stream: as `end_forward`; work on the step's pages may be in flight.
        """
        with self._guard:
            self._steps.abort()

    @contextmanager
    def forward(
        self, seqs: Any, append_lens: Any, *, token_tree: Any = None, keep_step: bool = False
    ) -> Iterator[None]:
        """Begin a step and end it with the block; an exception in it calls `abort_forward`.

        A block that has ended or aborted the step leaves nothing to end.
        """
        checks.flag(keep_step, "keep_step")
        self.begin_forward(seqs, append_lens, token_tree=token_tree)
        try:
            yield
        except BaseException:
            self.abort_forward()
            raise
        if self._steps.running is not None:
            self.end_forward(keep_step=keep_step)

    def commit_token_tree(self, seqs: Any, leaves: Any) -> list[int]:
        """Keep the path from the root to a leaf of each tree, and drop its other nodes.

        Parameters
        ----------
        seqs : sequences with a tree, each once, in any order
        leaves : node of each; -1: no node is kept

        Returns
        -------
        list of int : for each sequence r, 0 without recurrent groups. With them, a tree that is not
            accepted as a whole leaves the state before it, and all its nodes are dropped: append
            the r tokens of the path again. If it is accepted and ends at a checkpoint, the state
            is kept

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit; nothing has changed
        KvcupyError : one belongs to the running step
        DeviceError : a copy or a launch failed, perhaps after others; no node is kept

        Notes
        -----
        Stream: kept tokens are moved next to one another on the copy stream, after all steps so
        far, and before the next. Bytes: each kept token that moves, once.
        """
        with self._guard:
            return self._steps.commit(seqs, leaves)

    # --- Groups of layers ---

    def plan(self) -> MemoryPlan:
        """Return how the memory is divided among the groups; print it for a table.

        Raises
        ------
        ValueError : one sequence of num_tokens, or max_seq_len, does not fit in memory_bytes; says
            how many bytes are missing
        """
        return self._plan.require()

    def state(self, layer: int, name: str) -> Any:
        """Return a part of the states of a recurrent layer, (num_slots, *shape).

        The model reads and writes the rows of `state_slots` in place. A new sequence's are zero.

        Raises
        ------
        TypeError, ValueError : there is no such part
        """
        if self._states is None:
            raise ValueError(f"layer: expected a layer of a recurrent group, got {layer}")
        return self._states.array(layer, name)

    def state_slots(self, *, stream: Any = None) -> Any:
        """Return the row of each of the step's sequences in the states, int32 (B,).

        Raises
        ------
        KvcupyError : no step is running, or there is no recurrent group
        TypeError, ValueError : `stream` is not a stream
        DeviceError : a state could not be copied, and the sequence can only be removed

        Notes
        -----
        Stream: states may be used by work on `stream`, until end_forward; call it for each stream
        that does. Capture: legal; a launch for fewer sequences has -1 for the others.
        """
        if self._states is None:
            raise KvcupyError("this cache has no recurrent group, and so no states")
        step, tables = self._running()
        stream = self.pool._as_stream(stream)
        slots = tables.on(stream)[STATE_SLOTS]
        if not stream.capturing:
            for load in step.parts[0].loads:
                if isinstance(load, (StateLoad, CopiedPages)):  # not pages, layer by layer
                    load.wait(stream)
            tables.states_used = True
        return self.device.carrier(slots)

    def state_slots_of(self, seqs: Any, *, stream: Any = None) -> list[int]:
        """Return the rows of sequences in the states, -1 for a state that is still zero.

        It is for models that read states before their step begins. Work on `stream`, after the
        call, may read the rows until that step begins; they are written in a step alone.

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit
        KvcupyError : there is no recurrent group
        DeviceError : a state could not be copied; the sequence can only be removed
        """
        if self._states is None:
            raise KvcupyError("this cache has no recurrent group, and so no states")
        return self._steps.state_slots_of(seqs, self.pool._as_stream(stream))

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
        sm_scale, window, sink_tokens, sinks, logits_soft_cap : as in `paged_attention`
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
        DeviceError : a launch failed, and may be repeated; or pages of a sequence could not be
            loaded or copied, and the sequence can then only be removed

        Notes
        -----
        Inputs are not modified. Stream: the first call of a step uploads its tables; the stream
        waits for them once. Capture: legal in a step of one token per sequence; for torch tensors,
        with `out`. A launch of the graph, between begin_forward and end_forward, runs the step that
        was begun, of as many sequences or fewer; its tables are uploaded before the launch. Each
        launch writes the output that the captured call allocated.
        """
        return self._attend(
            layer, query, key, value, out, sm_scale, window, sink_tokens, sinks, logits_soft_cap,
            stream, False,
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
        qkv : (T', Hq + 2 H, D): query heads, then K heads, then V heads
        others : as in `attention`
        """
        layers = self._groups[self._place_of(layer)[0]].layers
        self._require_kind(layer, layers.is_latent, False)
        rows = layers.split_qkv(qkv, self._running()[0].num_tokens)
        return self.attention(
            layer, *rows, out=out, sm_scale=sm_scale, window=window, sink_tokens=sink_tokens,
            sinks=sinks, logits_soft_cap=logits_soft_cap, stream=stream,
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
        others : as in `attention`
        """
        parts = view(latent, "latent"), view(rope_key, "rope_key")
        layers = self._groups[self._place_of(layer)[0]].layers
        if layers.is_latent:
            layers.check_latent(*parts, self._running()[0].num_tokens)
        return self._attend(
            layer, query, *parts, out, sm_scale, window, sink_tokens, sinks, logits_soft_cap,
            stream, True,
        )  # fmt: skip

    def _attend(
        self, layer: Any, query: Any, key: Any, value: Any, out: Any,
        sm_scale: Any, window: Any, sink_tokens: Any, sinks: Any, logits_soft_cap: Any, stream: Any,
        is_latent: bool,
    ) -> Any:  # fmt: skip
        step, tables = self._steps.running, self._steps.tables
        place = self._places.get(layer) if type(layer) is int else None
        number, index = place or self._place_of(layer)
        group = self._groups[number]
        layers = group.layers
        if layers.is_latent is not is_latent:
            self._require_kind(layer, layers.is_latent, is_latent)
        if group.window:
            window, sink_tokens = group.window_of(window, sink_tokens)
        if step is None or tables is None:
            raise KvcupyError(_NO_STEP)
        part = step.parts[number]
        rows, options, arrays, pointers, kind = layers.check(
            query, key, value, out, step.num_tokens, sm_scale, window, sink_tokens, sinks,
            logits_soft_cap,
        )  # fmt: skip
        stream = self.device.as_stream(stream, rows.library)
        if out is None:
            out = layers.new_output(rows, stream)
            arrays = (*arrays[:3], out, arrays[4])
            pointers = (*pointers[:3], address_of(out), pointers[4])
        uploaded = tables.on(stream)
        if part.loads and not stream.capturing:
            part.wait_layer(index, stream)
        layers.run(
            index, arrays, pointers, kind, rows, options, uploaded, part.demoted_distance, stream
        )
        part.attended.add(index)
        if part.exports and not stream.capturing:
            for export in part.exports:
                export.layer_written(index, stream)
        return out

    def _require_kind(self, layer: Any, holds_latents: bool, is_latent: bool) -> None:
        """Raise unless a layer holds what a call is for: latents, or K and V."""
        if holds_latents is is_latent:
            return
        held = "latents: call attention_mla" if holds_latents else "K and V: call attention"
        if all(group.layers.is_latent is holds_latents for group in self._groups):
            raise KvcupyError(f"this cache holds {held}")
        expected = "latents" if is_latent else "K and V"
        raise ValueError(f"layer: expected one that holds {expected}, got {layer}, with {held}")

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

    def slot_mapping(self, *, layer: int | None = None, stream: Any = None) -> Any:
        """Return the slot of each token of the step, int64 (T,): `page * page_size + offset`.

        layer : with groups, a layer whose group is asked for

        Raises
        ------
        KvcupyError, TypeError, ValueError : as `query_positions`; or `layer` does not fit
        """
        return self.device.carrier(self._tables_of("slot_mapping", layer, stream)["slots"])

    def block_table(self, *, layer: int | None = None, stream: Any = None) -> Any:
        """Return the pages of the step's sequences, int32 (B, pages of the longest), zero-padded.

        layer : with groups, a layer whose group is asked for

        Raises
        ------
        KvcupyError, TypeError, ValueError : as `query_positions`; or the cache has `demotion`, or
            `layer` does not fit

        Notes
        -----
        A sequence whose window has slid has unused slots between its sink tokens and what follows.
        The pages that a group with a window has freed are negative.
        """
        return self.device.carrier(block_table(self._tables_of("block_table", layer, stream)))

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
        self._require_one_group("page_table_csr")
        self._require_one_pool("page_table_csr", self._groups[0])
        self._running()
        lists = self._steps.lists(self.pool._as_stream(stream))
        indptr, indices, last_page_len = map(self.device.carrier, lists.values())
        return indptr, indices, last_page_len

    # --- Contents ---

    def get_kv(
        self, seq: Hashable, start: int, stop: int, *,
        layer: int | None = None, dtype: Any = None, stream: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Return K and V of the tokens at positions `start` to `stop` - 1, all layers or one.

        Parameters
        ----------
        start, stop : 0 <= start <= stop <= length
        layer : one layer; None: all, which caches with several groups lack as one array
        dtype : format of the result; None: the cache's, or bf16 if that is quantised
        stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

        Returns
        -------
        K, V : (L, n, H, D) and (L, n, H, Dv); of MLA latent (L, n, R) and rope key (L, n, P). Of
            one layer without L

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit, or the window of a group
            has freed some of the tokens

        Notes
        -----
        Keys are rotated if rope_mode is "normal", else raw. Stream: one kernel per layer, after all
        steps so far.
        """
        self._steps.on_device(seq)
        number, layer = self._contents_of("get_kv", layer)
        sequence = self._groups[number].sequences.find(seq)
        return self._contents[number].read(sequence, start, stop, dtype, stream, layer)

    def set_kv(
        self, seq: Hashable, start: int, k: Any, v: Any, *,
        layer: int | None = None, stream: Any = None,
    ) -> None:  # fmt: skip
        """Overwrite K and V of tokens of a sequence; other sequences that share them keep theirs.

        Parameters
        ----------
        start : position of the first; n of them must be cached
        k, v : (L, n, H, D) and (L, n, H, Dv), or of MLA as `get_kv` gives them, in any format;
            quantised if the cache is. Of one layer without L
        layer : as in `get_kv`
        stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

        Raises
        ------
        UnknownSequence, TypeError, ValueError : as `get_kv`
        CacheFull : a shared page must be copied and none is free
        KvcupyError : the sequence belongs to the running step
        CaptureError : the stream is being captured
        DeviceError : a launch failed; the tokens from `start` on are undefined, and may be in
            unshared pages

        After any other error nothing has changed.

        Notes
        -----
        To bring in tokens that were computed elsewhere: begin_forward, end_forward, set_kv.
        """
        self._steps.on_device(seq)
        self._steps.require_outside(seq)
        number, layer = self._contents_of("set_kv", layer)
        group, contents = self._groups[number], self._contents[number]
        sequence = group.sequences.find(seq)
        key, value = contents.check(sequence, start, k, v, layer)
        stop = start + key.shape[1]
        if start == stop:
            return
        stream = self.device.as_stream(stream, key.library)
        if stream.capturing:
            raise CaptureError(f"stream: {stream.name} is being captured; set_kv cannot be")
        with self._guard, needs_pages("seq"):  # it shares them
            group.unshare(self._steps.access, sequence, sequence.places(start, stop))
        for each in self._groups:  # hashes no longer describe the tokens
            del each.sequences.find(seq).hashes[start // self.pool.page_size :]
        contents.write(sequence, start, key, value, stream, layer)

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
        Stream: waits for all steps so far. Capture: illegal. Demoted tokens are converted back to
        dtype, so the file fits a cache without `demotion` too; loading it demotes them again. With
        groups the file has the tokens that windows keep and the live states, and fits a cache of
        equal groups.
        """
        self._steps.settled(seq)
        self._files.save(seq, path)

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
        with needs_pages("path"):
            self._files.load(seq, path)

    # --- Tiers ---

    def attach(self, tiers: TieredCache) -> None:
        """Use a tiered cache, which shares the pages of this one.

        From then on it evicts blocks where new tokens need pages; `num_available_pages` does not
        count the pages of such blocks.

        Parameters
        ----------
        tiers : a TieredCache whose `device_pool` is the `pool` of this cache; with groups,
            `TieredCache(groups=cache, ...)`. A tiered cache belongs to one paged cache

        Raises
        ------
        TypeError, ValueError : it is not a TieredCache, is of another pool, or there is one already

        Notes
        -----
        With `demotion`, host memory for as many demoted pages as `demoted_pool` has is allocated
        when the first sequence with demoted pages is offloaded.
        Stream: a direct call of the tiered cache's `acquire` needs a stream `after` that follows
        all compute streams and the copy stream: blocks may be loaded into pages that a sequence has
        just released, and on which these streams still work.
        """
        self._tiers.attach(tiers)
        self._steps.tiers = self._tiers

    def offload(self, seq: Hashable) -> None:
        """Move a sequence to host memory, and release its pages.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        ValueError : it is offloaded already, its tree is not committed, or there is no tiered cache
        CacheFull : the host pool is full and nothing can be evicted, or there is no space for its
            demoted pages; nothing has changed, except that with groups blocks may be evicted
        KvcupyError : it belongs to the running step
        DeviceError, MemoryError : there is no memory for demoted pages; nothing has changed

        Notes
        -----
        Demoted pages are not converted. With groups, the live state and the kept states go too;
        the newest kept ones come back, as far as slots are free.
        Stream: the copy waits for all steps so far. Pages are free once it has read them, shared
        ones once the other sequences have released them. Until it is brought back the sequence has
        a length and can be removed. Bytes: its pages, shared ones included.
        """
        self._tiers.require("seq")
        self._steps.settled(seq)
        with self._guard, needs_pages("seq"):
            self._tiers.offload(seq)

    def onboard(self, seq: Hashable) -> None:
        """Bring an offloaded sequence back; one that is on the device is left alone.

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        CacheFull : there are too few pages, or with groups no slot; nothing has changed, but blocks
            may be evicted
        DeviceError : it could not be saved when it was offloaded; it can only be removed

        Notes
        -----
        Stream: it is loaded in the background, layer by layer; the attention of each layer waits
        for its layer. The host waits for the save, if that is not done yet.
        """
        self._sequences.find(seq)
        with self._guard, needs_pages("seq"):
            self._tiers.onboard(seq)

    # --- Other caches ---

    def export_sequence(self, seq: Hashable, sender: Any, *, lease_s: float = 30.0) -> bytes:
        """Offer a sequence to a cache of another process, with its window and its hashes.

        Parameters
        ----------
        seq : a sequence with tokens. One of the running step is offered in its state at the end of
            that step, and each layer goes out as soon as its attention has run
        sender : a PageSender of this cache
        lease_s : seconds for which the pages are held. A lease is not renewed

        Returns
        -------
        bytes : the ticket, for `import_sequence` of the other cache

        Raises
        ------
        UnknownSequence, TypeError : there is no such sequence, or it cannot be the name of one
        TypeError, ValueError : an argument does not fit, the sequence is empty or offloaded, its
            tree is not committed, or its window is to slide at the end of the running step
        CacheFull : there is no slot for a copy of its state
        KvcupyError : the sender is closed, or pages of the sequence could not be loaded

        After an error nothing has changed.

        Notes
        -----
        The offer has the sequence's state at the call. The sequence may be extended, forked or
        removed at once: its pages are held until the receiver has them, the lease is over or the
        sender closes. Appending to its last page copies that page first. Pages that are no longer
        held become free at the next call that needs or counts pages; full pages with hashes, of a
        removed sequence, then go to the tiered cache.
        A step that is taken back withdraws the offer: the receiver gets a TransferError.
        Demoted pages are offered unconverted. The two newest kept states are offered too.
        Stream: pages go out after all steps so far, and of the running step after the attention
        of each layer; a step that runs as a graph goes out when it has ended.
        """
        self._steps.on_device(seq)
        step_start = self._steps.start_of(seq)
        with needs_pages("seq"):
            return self._exchange.export(
                seq, sender, step_start=step_start, lease_s=lease_s,
                exports=[part.exports for part in self._steps.parts],
            )  # fmt: skip

    def import_sequence(
        self, seq: Hashable, ticket: bytes, receiver: Any, *,
        deadline_s: float = 30.0,
    ) -> Any:  # fmt: skip
        """Add a sequence that a cache of another process has exported.

        Parameters
        ----------
        ticket : what `export_sequence` of the other cache returned
        receiver : a PageReceiver of this cache
        deadline_s : seconds after which the transfer fails if it is not complete, including the
            rest of the step in which the sequence was exported

        Returns
        -------
        Pull : a handle to wait for the transfer or to cancel it

        Raises
        ------
        TypeError, ValueError : an argument does not fit, the sequence exists, or this cache cannot
            hold the sequence of the ticket, such as one whose pages were demoted by another
            `Demotion`
        TransferError : the ticket was made with another secret or for another kind of pool
        CacheFull : there are too few pages

        After an error nothing has changed.

        Notes
        -----
        The sequence may be used at once. Stream: its pages arrive in the background, layer by
        layer; the attention of each layer waits for its layer, and raises TransferError if the
        transfer fails. The sequence can then only be removed, and its pages become free when
        nothing can land in them any more. A fork or a pop to a kept state that is still on its way
        waits for it on the host.
        """
        self._sequences.require_new(seq, "seq")
        with needs_pages("ticket"):
            pull = self._exchange.add(seq, ticket, receiver, deadline_s)
        self._tiers.receive(seq)
        return pull

    # --- Parts ---

    def _remove_later(self, seqs: Sequence[Hashable]) -> None:
        """Remove sequences without hashes at the next call that needs or counts pages.

        It may be called from any thread, as a finalizer is.
        """
        self._exchange.remove_later(seqs)

    def _can_rewind(self, seq: Hashable, length: int) -> bool:
        """Return whether windows hold what the first `length` tokens of a sequence see."""
        return self._steps.restorable_length(seq, length, with_states=False) == length

    @contextmanager
    def _rewinding(
        self, seqs: Sequence[Hashable], counts: Sequence[int], stream: Stream
    ) -> Iterator[list[int]]:
        """Drop the last tokens of sequences, whose live states the caller overwrites on `stream`.

        Yields the rows of the states, -1 for none, which are dropped if no tokens are left. Call
        `_can_rewind` first.
        """
        with self._steps.rewinding(seqs, counts, stream) as slots:
            yield slots

    def _attached_tiers(self, name: str) -> TieredCache:
        """Return the attached tiers; raise if there are none, naming the argument of a caller."""
        return self._tiers.require(name)

    def _tier_groups(self) -> list[TierGroup]:
        return tier_groups(self._plan, self._groups, self._states, self.pool.page_size)

    @property
    def _is_uniform(self) -> bool:
        """Whether all layers attend to all tokens, and are one group."""
        return len(self._groups) == 1 and not self._groups[0].window and self._states is None

    def _require_one_group(self, name: str) -> None:
        """Raise with what to do instead of a call that is not implemented for several groups."""
        if not self._is_uniform:
            raise NotImplementedError(
                f"{name} is not implemented for a cache with groups: {_INSTEAD[name]}"
            )

    def _require_one_pool(self, name: str, group: PageGroup) -> None:
        """Raise if the pages of a group are of several pools."""
        if group.demoted is not None:
            raise KvcupyError(f"{name}: the pages of a cache with demotion are in two pools")

    def _place_of(self, layer: Any) -> tuple[int, int]:
        """Return the number of a layer's group, and the number of the layer in it."""
        checks.require_int(layer, "layer")
        place = self._places.get(layer)
        if place is None:
            layers = sorted(self._places)
            expected = f"a layer with attention ({', '.join(map(str, layers))})"
            if len(self._plan.groups) == 1 and layers == list(range(len(layers))):
                expected = f"0 to {len(layers) - 1}"
            raise ValueError(f"layer: expected {expected}, got {layer}")
        return place

    def _contents_of(self, name: str, layer: Any) -> tuple[int, int | None]:
        """Return the number of a layer's group, and its number in it; None: all of the only group.

        name : of the call
        """
        if layer is not None:
            return self._place_of(layer)
        if len(self._groups) > 1:
            raise ValueError(f"layer: expected a layer in {name} of a cache with groups, got None")
        return 0, None

    def _tables_of(self, name: str, layer: Any, stream: Any) -> Tables:
        """Return the tables of the group of a layer, by their plain names."""
        group = self._groups[self._contents_of(name, layer)[0]]
        if name == "block_table":
            self._require_one_pool(name, group)
        return group.tables.of(self._tables(stream))

    def _running(self) -> tuple[Step, StepTables]:
        steps = self._steps
        if steps.running is None or steps.tables is None:
            raise KvcupyError(_NO_STEP)
        return steps.running, steps.tables

    def _tables(self, stream: Any) -> Tables:
        _, tables = self._running()
        return tables.on(self.pool._as_stream(stream))


def _sequence_samples(cache: PagedKVCache) -> Iterator[tuple[str, metrics.Labels, float]]:
    yield "kvcupy_sequences", (), len(cache._sequences)
    yield "kvcupy_sequence_tokens", (), cache.total_length
