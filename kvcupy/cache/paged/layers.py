"""The work of a paged cache in each layer: write K and V of the new tokens, and attend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ... import scratch
from ...arrays import ArrayView, columns, describe, probe_arguments, strides_of, view
from ...devices.protocol import Device, Stream
from ...errors import DeviceError
from ...ops import checks
from ...ops.attention import LayerArrays, StepAttention, check_options, check_query
from ...ops.attention_call import AttentionOptions
from ...ops.call import NO_ARGUMENTS, Probed, StepOperation, zeros_allocator
from ...ops.merge import merge_states
from ...ops.rope import step_rope_store, step_rope_store_mla, step_rotation
from ...ops.store import LatentArrays, step_store, step_store_mla, store_kv, store_mla
from ..pool import MLAPool, Pool
from .backends import AttentionBackend, LayerCall
from .tables import TRANSPOSED_TABLE, GroupTables, Tables, block_table, demoted_table

_MAX_CHECKED = 256  # kinds of rows that are remembered, and pairs of addresses
_ROWS = ("query", "key", "value", "out", "sinks")

# Tables of a step that are arguments of attention with the same names, where the step has them.
_TABLES = (
    "seq_lens", "query_lens", "cu_query_lens", "tree_mask", "evicted_starts", "evicted_lens",
    "tree_lens", "tree_positions",
)  # fmt: skip


@dataclass(frozen=True)
class Rope:
    """How keys and queries are rotated.

    table : float32 (max_positions, rotary_dim) on the device, or None
    mode : "none", "normal" (cached rotated) or "inline" (cached raw)
    interleaved : pairs of elements that rotate together are neighbours, not halves apart
    first : the first element of a head that is rotated
    """

    table: ArrayView | None
    mode: str
    interleaved: bool
    first: int

    @property
    def max_positions(self) -> int | None:
        """The most tokens of a sequence; None: no limit."""
        return None if self.table is None or self.mode == "none" else self.table.shape[0]


class StepCalls:
    """The calls of a step, which all layers share.

    uploaded : the tables of the step
    tables : of these, the tables of the layers
    store : writes K and V, or latents, perhaps rotated
    rotation : rotates queries where keys are cached raw; else None
    attention : over all keys
    demoted, first, rest : where some tokens are in demoted pages, attention over them, and over the
        keys before and after them
    scratch : memory that all layers use, one after another in the order of a stream: by stream, and
        by the format of rotated queries, or the number of states that are merged
    is_captured : whether a graph reads the tables: it outlives the step, and shares no scratch
    """

    def __init__(self, tables: Tables, rope: Rope, is_latent: bool, group: GroupTables) -> None:
        self.uploaded = tables
        self.tables = tables = group.of(tables)
        slots, self.rotation = tables["slots"], None
        if rope.mode == "normal":
            places = rope.table, tables["positions"], slots
            rope_store = step_rope_store_mla if is_latent else step_rope_store
            self.store: StepOperation = rope_store(*places, interleaved=rope.interleaved)
        else:
            self.store = step_store_mla(slots) if is_latent else step_store(slots)
        rope_table = None
        if rope.mode == "inline":
            rope_table = rope.table
            self.rotation = step_rotation(
                rope_table, tables["positions"], interleaved=rope.interleaved
            )
        self.scratch: dict[tuple[Stream, str | int], tuple[ArrayView, ...]] = {}
        self.is_captured = TRANSPOSED_TABLE in tables
        self.num_tokens = tables["slots"].shape[0]
        shared: dict[str, Any] = {
            "block_table": block_table(tables), "rope_table": rope_table,
            "outlives_step": self.is_captured,
        }  # fmt: skip
        for name in _TABLES:
            if name in tables:
                shared[name] = tables[name]
        self._shared = shared
        self.attention = StepAttention(**shared)
        self.demoted: StepAttention | None = None
        if "demoted_starts" in tables:
            # Old keys are older than all queries: which of them a query sees needs no mask.
            starts, stops = tables["demoted_starts"], tables["demoted_stops"]
            names = (
                "query_lens", "cu_query_lens", "evicted_starts", "evicted_lens", "rope_table",
                "outlives_step",
            )  # fmt: skip
            old: dict[str, Any] = {name: shared[name] for name in names if name in shared}
            self.demoted = StepAttention(
                block_table=demoted_table(tables), seq_lens=stops, key_starts=starts, **old
            )
            self.first = StepAttention(block_table=shared["block_table"], seq_lens=starts, **old)
            self.rest = StepAttention(key_starts=stops, **shared)

    @cached_property
    def masked_demoted(self) -> StepAttention:
        """Attention over old tokens that a window hides from some queries and not from others.

        It has pages by position, as has `attention`, which is then over all other tokens.
        """
        return StepAttention(**{**self._shared, "block_table": demoted_table(self.tables)})


class Layers:
    """The layers of a paged cache.

    scales : for each layer, the static scales of K and V; empty without static scales
    demoted : the layers of the pool of demoted pages, or None
    recent, sinks : numbers of a sequence's last and first tokens that are not in that pool
    batch_invariant : whether attention is, see `paged_attention`
    group : finds the tables of these layers in the tables of a step

    backend : attends where it can; None: kvcupy's kernels do
    is_latent : whether they hold latents, not K and V
    caches : of each layer, the arguments of a gather that name its arrays
    store : the operation that writes K and V, or latents
    stores : of each layer, the arguments of `store` that name its arrays
    """

    def __init__(
        self, pool: Pool, num_q_heads: int, rope: Rope, scales: list[tuple[Any, Any]],
        group: GroupTables, demoted: Layers | None = None, recent: int = 0, sinks: int = 0,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.backend: AttentionBackend | None = None
        self._group = group
        self._batch_invariant = batch_invariant
        self._demoted_layers, self._recent, self._sinks = demoted, recent, sinks
        self._device: Device = pool.device
        self._num_q_heads, self._num_kv_heads = num_q_heads, pool.num_kv_heads
        self._dtype = pool.dtype
        self.rope, self.num_layers = rope, pool.num_layers
        self.is_latent = isinstance(pool, MLAPool)
        self.width = pool.head_dim
        self.v_width = rope.first if self.is_latent else pool.v_head_dim
        self.caches: list[dict[str, Any]] = []
        for layer in range(pool.num_layers):
            k, v = (pool.views(layer)[i] for i in (0, -1))
            arguments: dict[str, Any] = {"k_cache": k, "v_cache": columns(v, 0, self.v_width)}
            if scales:
                arguments["k_scale"], arguments["v_scale"] = scales[layer]
            elif pool.scale_parts:
                arguments["k_scale_cache"] = view(pool.k_scale(layer))
                arguments["v_scale_cache"] = view(pool.v_scale(layer))
            self.caches.append(arguments)
        rotated_width = self.caches[0]["k_cache"].rotated_width
        if rope.mode == "inline" and rope.first < rotated_width:
            raise ValueError(
                'rope_mode: expected "normal" or "none", as RoPE of a key cannot follow the '
                'rotation that it is stored with, got "inline"'
            )
        self.stores = self.caches
        if self.is_latent:
            self.stores = [
                {"cache": c["k_cache"][:, :, 0], "scale": c.get("k_scale")} for c in self.caches
            ]
        self.store: Any = store_mla if self.is_latent else store_kv
        self._arrays = [LayerArrays(**arguments) for arguments in self.caches]
        self._stored: list[Probed] = list(self._arrays)
        if self.is_latent:
            self._stored = [LatentArrays(**arguments) for arguments in self.stores]
        for parts in (self._arrays, self._stored):  # uniform layers share one signature
            for part in parts:
                if part.signatures == parts[0].signatures:
                    part.signatures = parts[0].signatures
        self._rotation = (rope.interleaved, rope.first) if rope.mode == "inline" else (False, 0)
        self._step: StepCalls | None = None  # the last one
        self._kind: Any = None  # of the rows of the last call
        self._checked: dict[Any, ArrayView] = {}  # queries
        # Addresses of query, out and sinks that were checked, for rows of one kind.
        self._allowed: set[tuple[int, int, int]] = set()
        self._allowed_kind: Any = None
        # Of the last call without `out`: a description of its query, and what allocates `out`.
        self._outputs: tuple[Any, Any] = None, None
        # Kind and number of tokens of the last call, its options, and the results of the checks.
        self._last: tuple[Any, ...] = (None,) * 8

    def check(
        self, query: Any, key: Any, value: Any, out: Any, num_tokens: int,
        sm_scale: Any, window: Any, sink_tokens: Any, sinks: Any, logits_soft_cap: Any,
    ) -> tuple[ArrayView, AttentionOptions, tuple[Any, ...], tuple[int, ...], object]:  # fmt: skip
        """Raise the errors of attention, before anything is written.

        Returns
        -------
        a description of the query, which keeps nothing alive (arrays of equal descriptions are
        checked once); the options of attention; the rows: query, key, value, out and sinks; their
        addresses; and their kind, which is one object for all rows of equal descriptions
        """
        arrays = query, key, value, out, sinks
        try:
            pointers, kind = probe_arguments(arrays)
        except (TypeError, DeviceError):
            for name, array in zip(_ROWS, arrays, strict=True):
                if array is not None:
                    view(array, name)  # raises, naming the argument that is not an array
            raise
        if kind != self._kind:
            self._kind = kind
        kind = self._kind
        if kind is not self._allowed_kind:
            self._allowed_kind = kind
            self._allowed.clear()
        addresses = pointers[0], pointers[3], pointers[4]
        last_kind, tokens, scale, width, first_keys, cap, rows, options = self._last
        if (
            kind is last_kind and num_tokens == tokens and sm_scale is scale and window is width
            and sinks is None and sink_tokens is first_keys and logits_soft_cap is cap
            and addresses in self._allowed
        ):  # fmt: skip
            return rows, options, arrays, pointers, kind
        rows = self._checked.get((num_tokens, kind))
        if rows is None:
            rows = self._check_rows(query, out, sinks, num_tokens)
            if not self.is_latent:  # the parts of a latent have been checked
                heads = self._num_kv_heads
                self._require_rows(view(key, "key"), "key", num_tokens, self.width, heads)
                self._require_rows(view(value, "value"), "value", num_tokens, self.v_width, heads)
            if len(self._checked) == _MAX_CHECKED:
                self._checked.clear()
            self._checked[num_tokens, kind] = rows
        if addresses not in self._allowed:
            self._check_addresses(view(query, "query"), out, sinks)
            if len(self._allowed) == _MAX_CHECKED:
                self._allowed.clear()
            self._allowed.add(addresses)
        options = check_options(
            "NHD", sm_scale, True, window, sink_tokens, logits_soft_cap, *self._rotation,
            self._batch_invariant,
        )  # fmt: skip
        if self._demoted_layers is not None and options.window:
            self._check_window(options)
        if sinks is None:
            self._last = (
                kind, num_tokens, sm_scale, window, sink_tokens, logits_soft_cap, rows, options
            )  # fmt: skip
        return rows, options, arrays, pointers, kind

    def new_output(self, rows: ArrayView, stream: Stream) -> Any:
        """Return zeros for the output of queries that `check` has described."""
        described, allocate = self._outputs
        if described is not rows:
            shape = (*rows.shape[:2], self.v_width)
            allocate = zeros_allocator(rows, shape, rows.format)
            self._outputs = rows, allocate
        return allocate(stream)

    def _check_window(self, options: AttentionOptions) -> None:
        """Raise if a window is longer than the recent tokens, or has first keys too."""
        if options.window > self._recent + 1:
            raise ValueError(
                f"window: expected at most {self._recent + 1} tokens, or None, in a cache with "
                f"demotion and recent={self._recent}, got {options.window}"
            )
        if options.sink_keys:
            raise ValueError(
                "sink_tokens: expected none with a window in a cache with demotion, "
                f"got {options.sink_keys}"
            )

    def _check_rows(self, query: Any, out: Any, sinks: Any, num_tokens: int) -> ArrayView:
        rows = view(query, "query")
        check_query(rows)
        self._require_rows(rows, "query", num_tokens, self.width)
        if out is not None:
            written = view(out, "out")
            self._require_rows(written, "out", num_tokens, self.v_width)
            if written.format not in (rows.format, "fp32"):
                raise TypeError(f"out: expected {rows.format} or fp32, got {describe(written)}")
            if written.shape[0] != rows.shape[0]:
                raise ValueError(f"out: expected {rows.shape[0]} rows, got {describe(written)}")
            checks.require_contiguous(written, "out")
            checks.require_output(written, "out")
        if sinks is not None:
            v = view(sinks, "sinks")
            if v.format != "fp32" or v.shape != (self._num_q_heads,):
                raise ValueError(f"sinks: expected fp32 ({self._num_q_heads},), got {describe(v)}")
            self._require_here(v, "sinks")
        return rows.without_owner()

    def _check_addresses(self, query: ArrayView, out: Any, sinks: Any) -> None:
        """Raise if attention could not read or write these arrays."""
        written = None if out is None else view(out, "out")
        logits = None if sinks is None else view(sinks, "sinks")
        checks.require_aligned([("query", query), ("out", written), ("sinks", logits)])
        inputs: list[tuple[str, Any]] = [("sinks", logits)]
        old = [] if self._demoted_layers is None else self._demoted_layers.caches
        inputs += [(name, v) for cache in (*self.caches, *old) for name, v in cache.items()]
        if self.rope.mode == "none":  # else attention reads a rotated copy
            inputs.append(("query", query))
        checks.require_disjoint(
            [("out", written)], [(n, v) for n, v in inputs if isinstance(v, ArrayView)]
        )

    def split_qkv(self, qkv: Any, num_tokens: int) -> tuple[ArrayView, ArrayView, ArrayView]:
        """Return the query, K and V in one array of a step, (T', Hq + 2 H, D)."""
        rows, width, ends = view(qkv, "qkv"), self.width, (self._num_q_heads, -self._num_kv_heads)
        heads = self._num_q_heads + 2 * self._num_kv_heads
        if width != self.v_width:
            raise ValueError(
                f"qkv: expected a cache with one width for K and V, got {width} and {self.v_width}"
            )
        check_query(rows, "qkv")
        if rows.shape[1:] != (heads, width) or rows.shape[0] < num_tokens:
            raise ValueError(
                f"qkv: expected at least {num_tokens} rows of ({heads}, {width}), "
                f"got {describe(rows)}"
            )
        return rows[:, : ends[0]], rows[:, ends[0] : ends[1]], rows[:, ends[1] :]

    def check_latent(self, latent: ArrayView, rope_key: ArrayView, num_tokens: int) -> None:
        """Raise if the parts of a latent have the wrong shape or format."""
        widths = self.v_width, self.width - self.v_width
        for rows, name, width in zip(
            (latent, rope_key), ("latent", "rope_key"), widths, strict=True
        ):
            checks.number_format(rows, name)
            if rows.ndim != 2 or rows.shape[1] != width or rows.shape[0] < num_tokens:
                raise ValueError(
                    f"{name}: expected at least {num_tokens} rows of {width}, got {describe(rows)}"
                )

    def _require_rows(
        self, rows: ArrayView, name: str, num_tokens: int, width: int, num_heads: int = 0
    ) -> None:
        row = (num_heads or self._num_q_heads, width)
        self._require_here(rows, name)
        if rows.ndim != 3 or rows.shape[1:] != row or rows.shape[0] < num_tokens:
            raise ValueError(
                f"{name}: expected at least {num_tokens} rows of {row}, got {describe(rows)}"
            )

    def _require_here(self, v: ArrayView, name: str) -> None:
        if v.device != self._device.name:
            raise ValueError(f"{name}: expected it on {self._device.name}, got {v.device}")

    # --- One layer ---

    def run(
        self, layer: int, arrays: tuple[Any, ...], pointers: tuple[int, ...], kind: object,
        rows: ArrayView, options: AttentionOptions, tables: Tables, demoted_distance: int,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Write the rows of the step's tokens, and attend with them.

        With MLA, the key is the latent and the value the rope key. The arguments come from `check`,
        with `out`; `demoted_distance` comes from the step.
        """
        step = self._step
        if step is None or step.uploaded is not tables:
            step = self._step = StepCalls(tables, self.rope, self.is_latent, self._group)
        query, key, value, out, sinks = arrays
        at_query, at_key, at_value, at_out, at_sinks = pointers
        if rows.shape[0] != step.num_tokens:  # addresses stay as they are
            query, out = view(query)[: step.num_tokens], view(out)[: step.num_tokens]
        if self.rope.mode == "none":
            stored = self._stored[layer]
            step.store.issue((key, value), (at_key, at_value), kind, stored, stream)
        else:
            query = self._rotate(
                layer, (query, key, value), (at_query, at_key, at_value), kind, rows.format, step,
                stream,
            )  # fmt: skip
            at_query = query.pointer
        if self.backend is not None:
            call = LayerCall(layer, self.caches[layer], query, out, sinks, options, tables, stream)
            if self.backend.attend(call):
                return
        passes = [(step.attention, self._arrays[layer], options, True)]
        if step.demoted is not None:
            passes = self._passes(layer, step, options, demoted_distance)
        if len(passes) == 1:
            passes[0][0].issue(
                (query, out, None, sinks), (at_query, at_out, 0, at_sinks), kind, passes[0][1],
                stream, (options,),
            )  # fmt: skip
            return
        count = len(passes)
        scratch = step.scratch.get((stream, count)) or self._borrow_states(step, stream, count)
        states, lse, merged_lse, *parts = scratch
        for (attend, caches, masks, has_sinks), state, state_lse in zip(
            passes, parts[:count], parts[count:], strict=True
        ):
            logits, at_logits = (sinks, at_sinks) if has_sinks else (None, 0)
            attend.issue(
                (query, state, state_lse, logits),
                (at_query, state.pointer, state_lse.pointer, at_logits), kind, caches, stream,
                (masks,),
            )  # fmt: skip
        merge_states(states, lse, None, None, out=out, lse_out=merged_lse, stream=stream)

    def _passes(
        self, layer: int, step: StepCalls, options: AttentionOptions, demoted_distance: int
    ) -> list[tuple[StepAttention, LayerArrays, AttentionOptions, bool]]:
        """Return the passes over the keys of a step: calls, arrays, options, and which has sinks.

        Old tokens have a pass; the results are merged.
        """
        recent, unmasked = self._arrays[layer], options._replace(causal=False, sink_keys=0)
        assert step.demoted is not None and self._demoted_layers is not None
        old = self._demoted_layers._arrays[layer]
        # A graph may be launched for other sequences.
        if 0 < options.window <= demoted_distance + 1 and not step.is_captured:
            return [(step.rest, recent, options, True)]  # the window hides all old tokens
        if options.window:
            return [
                (step.attention, recent, options, True),
                (step.masked_demoted, old, options, False),
            ]
        passes = [(step.rest, recent, options, True), (step.demoted, old, unmasked, False)]
        if self._sinks:
            passes.append((step.first, recent, unmasked, False))
        return passes

    def _rotate(
        self, layer: int, rows: tuple[Any, Any, Any], pointers: tuple[int, int, int], kind: object,
        format: str, step: StepCalls, stream: Stream,
    ) -> ArrayView:  # fmt: skip
        """Write the tokens' rows; return the rotated query, of `format`, in scratch memory."""
        (query, key, value), (at_query, at_key, at_value) = rows, pointers
        scratch = step.scratch.get((stream, format)) or self._borrow_query(step, stream, format)
        whole, copied, rotated = scratch
        if self.is_latent:
            query = view(query)
            latent, query = query[..., : self.rope.first], query[..., self.rope.first :]
            at_query = query.pointer
        stored = self._stored[layer]
        if step.rotation is None:
            # The latent of MLA comes last, and its rope key is what is rotated.
            keys, at_keys = (key, None, value), (at_key, 0, at_value)
            if self.is_latent:
                keys, at_keys = (value, None, key), (at_value, 0, at_key)
            step.store.issue(
                (query, rotated, *keys), (at_query, rotated.pointer, *at_keys), kind, stored, stream
            )
        else:
            step.store.issue((key, value), (at_key, at_value), kind, stored, stream)
            step.rotation.issue(
                (query, rotated, None, None), (at_query, rotated.pointer, 0, 0), kind, NO_ARGUMENTS,
                stream,
            )  # fmt: skip
        if self.is_latent:
            self._device.copy(copied, latent, stream=stream)
        return whole

    def end_step(self) -> None:
        """Return the scratch memory that the layers of the step shared."""
        self._step = None

    def _borrow_query(self, step: StepCalls, stream: Stream, format: str) -> tuple[ArrayView, ...]:
        """Borrow memory for rotated queries: all of it, the part that MLA copies, and the rest."""
        shape = step.num_tokens, self._num_q_heads, self.width
        whole = copied = rotated = borrow(self._device, shape, format, stream)
        if self.is_latent:
            copied, rotated = whole[..., : self.rope.first], whole[..., self.rope.first :]
        if not step.is_captured:
            step.scratch[stream, format] = whole, copied, rotated
        return whole, copied, rotated

    def _borrow_states(self, step: StepCalls, stream: Stream, count: int) -> tuple[ArrayView, ...]:
        """Borrow memory for `count` states: all outputs, all LSE, merged LSE; each output, LSE."""
        rows = step.num_tokens, self._num_q_heads
        states = borrow(self._device, (count, *rows, self.v_width), "fp32", stream)
        lse = borrow(self._device, (count + 1, *rows), "fp32", stream)
        each = (*(states[i] for i in range(count)), *(lse[i] for i in range(count)))
        parts = states, lse[:count], lse[count], *each
        if not step.is_captured:
            step.scratch[stream, count] = parts
        return parts


def borrow(device: Device, shape: tuple[int, ...], format: str, stream: Stream) -> ArrayView:
    """Return scratch memory, reserved until work in flight has used it."""
    strides = strides_of(shape, format)
    memory = scratch.borrow(device, shape[0] * strides[0], stream)
    return ArrayView(
        memory.pointer, shape, strides, format, memory.device,
        library=memory.library, owner=memory.owner,
    )  # fmt: skip
