"""What a paged cache does in each layer: write K and V of the new tokens, and attend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ... import scratch
from ...arrays import ArrayView, contiguous_strides, describe, view
from ...devices.protocol import Device, Stream
from ...formats import FORMATS
from ...ops import checks
from ...ops.attention import attend
from ...ops.attention_checks import Options, check_query
from ...ops.merge import merge_states
from ...ops.rope import apply_rope, rope_store_kv, rope_store_mla
from ...ops.store import store_kv, store_mla
from ..pool import MLAPool
from ..storage import Pool
from .step import by_sequence

Tables = Mapping[str, ArrayView]

MODES = ("none", "normal", "inline")

# What a step's tables call an argument of attention, where it is there.
_PAGED = ("hole_starts", "holes", "tree_lens", "tree_mask", "query_lens")


@dataclass(frozen=True)
class Rope:
    """How keys and queries turn.

    Attributes
    ----------
    table : float32 (max_positions, rotary_dim) on the device, or None
    mode : "none", "normal" (cached rotated) or "inline" (cached raw)
    first : the first element of a head that turns
    """

    table: ArrayView | None
    mode: str
    interleaved: bool
    first: int

    @property
    def max_positions(self) -> int | None:
        """How long a sequence can be; None: any length."""
        return None if self.table is None or self.mode == "none" else self.table.shape[0]

    @property
    def inline(self) -> dict[str, Any]:
        """What attention is told, if it must rotate the keys."""
        if self.mode != "inline":
            return {}
        return {
            "rope_table": self.table,
            "interleaved": self.interleaved,
            "rotary_start": self.first,
        }


@dataclass(frozen=True)
class Asked:
    """What a call asks for in one layer, beside the rows."""

    sm_scale: float | None
    window: int | None
    sinks: Any
    soft_cap: float | None

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "sm_scale": self.sm_scale,
            "window": self.window,
            "sinks": self.sinks,
            "logits_soft_cap": self.soft_cap,
        }

    @property
    def by_position(self) -> bool:
        """Whether masks ask where a query is, beyond what is causal."""
        return self.window is not None


class Layers:
    """The layers of a paged cache.

    Parameters
    ----------
    scales : for each layer, the static scales of K and V; empty if none, or if the pool has its own
    """

    def __init__(
        self, pool: Pool, num_q_heads: int, rope: Rope, scales: list[tuple[Any, Any]]
    ) -> None:
        self._device: Device = pool.device
        self._num_q_heads = num_q_heads
        self.rope = rope
        self._is_latent = isinstance(pool, MLAPool)
        self.width = pool.head_dim
        self.v_width = rope.first if self._is_latent else pool.v_head_dim
        self.caches: list[
            dict[str, Any]
        ] = []  # of each layer: arguments of a store, a gather or attention
        for layer in range(pool.num_layers):
            k, v = (pool.views(layer)[i] for i in (0, -1))
            arguments: dict[str, Any] = {"k_cache": k, "v_cache": v[..., : self.v_width]}
            if scales:
                arguments["k_scale"], arguments["v_scale"] = scales[layer]
            elif pool.scale_parts:
                arguments["k_scale_cache"] = view(pool.k_scale(layer))
                arguments["v_scale_cache"] = view(pool.v_scale(layer))
            self.caches.append(arguments)
        widths = self.width + (0 if self._is_latent else self.v_width)
        # Of a token in a layer: K and V, and the float32 result of its query heads.
        self.key_bytes = pool.num_kv_heads * widths * FORMATS[pool.dtype].itemsize
        self.state_bytes = 4 * num_q_heads * self.v_width
        self._latents = [part[:, :, 0] for part in (c["k_cache"] for c in self.caches)]

    def check(self, query: Any, out: Any, num_tokens: int, asked: Asked) -> ArrayView:
        """Refuse what attention would refuse, before anything is written; return the query."""
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
        Options.of("NHD", asked.sm_scale, True, asked.window, asked.sinks, asked.soft_cap)
        if asked.sinks is not None and checks.is_array(asked.sinks):
            logits = view(asked.sinks, "sinks")
            if logits.format != "fp32" or logits.shape != (self._num_q_heads,):
                raise ValueError(
                    f"sinks: expected an int, or fp32 ({self._num_q_heads},), "
                    f"got {describe(logits)}"
                )
        return rows

    def check_latent(self, latent: ArrayView, rope_key: ArrayView, num_tokens: int) -> None:
        """Refuse parts of the wrong shape or format."""
        widths = self.v_width, self.width - self.v_width
        for rows, name, width in zip(
            (latent, rope_key), ("latent", "rope_key"), widths, strict=True
        ):
            checks.number_format(rows, name)
            if rows.ndim != 2 or rows.shape[1] != width or rows.shape[0] < num_tokens:
                raise ValueError(
                    f"{name}: expected at least {num_tokens} rows of {width}, got {describe(rows)}"
                )

    def _require_rows(self, rows: ArrayView, name: str, num_tokens: int, width: int) -> None:
        wanted = (self._num_q_heads, width)
        if rows.device != self._device.name:
            raise ValueError(f"{name}: expected it on {self._device.name}, got {rows.device}")
        if rows.ndim != 3 or rows.shape[1:] != wanted or rows.shape[0] < num_tokens:
            raise ValueError(
                f"{name}: expected at least {num_tokens} rows of {wanted}, got {describe(rows)}"
            )

    # --- One layer ---

    def run(
        self,
        layer: int,
        query: ArrayView,
        key: ArrayView,
        value: ArrayView,
        out: ArrayView,
        tables: Tables,
        asked: Asked,
        on: Stream,
    ) -> None:
        """Write the rows of the step's tokens, and attend with them.

        `query`, `key`, `value` and `out` have a row for each token, or more. Of MLA, `key` is the
        latent and `value` the rope key.
        """
        num_tokens = tables["slots"].shape[0]
        query, out = _first(query, num_tokens), _first(out, num_tokens)
        if self._is_latent:
            query = self._store_latent(layer, query, key, value, tables, on)
        else:
            query = self._store(layer, query, key, value, tables, on)
        paged: dict[str, Any] = {name: tables[name] for name in _PAGED if name in tables}
        paged.update(self.rope.inline, **asked.arguments)
        if "tail_positions" in tables:
            paged["tail_positions"] = tables["tail_positions"]
        table = by_sequence(tables)
        if "prefix_table" in tables and not asked.by_position:
            self._cascade(layer, query, out, table, tables, paged, on)
        else:
            attend(
                query, block_table=table, seq_lens=tables["seq_lens"], out=out, stream=on,
                **self.caches[layer], **paged,
            )  # fmt: skip

    def _store(
        self,
        layer: int,
        query: ArrayView,
        key: ArrayView,
        value: ArrayView,
        tables: Tables,
        on: Stream,
    ) -> ArrayView:
        """Write K and V; return the query as attention takes it."""
        rope, slots = self.rope, tables["slots"]
        if rope.mode == "normal":
            rotated = self._space(query.shape, query.format, on)
            rope_store_kv(
                query, key, value, rope.table, tables["positions"], slot_mapping=slots,
                interleaved=rope.interleaved, write_key=False, query_out=rotated, stream=on,
                **self.caches[layer],
            )  # fmt: skip
            return rotated
        store_kv(key, value, slot_mapping=slots, stream=on, **self.caches[layer])
        if rope.mode == "none":
            return query
        rotated = self._space(query.shape, query.format, on)
        apply_rope(
            None, query, rope.table, tables["positions"], interleaved=rope.interleaved,
            key_out=rotated, stream=on,
        )  # fmt: skip
        return rotated

    def _store_latent(
        self,
        layer: int,
        query: ArrayView,
        latent: ArrayView,
        rope_key: ArrayView,
        tables: Tables,
        on: Stream,
    ) -> ArrayView:
        """Write latent and rope key; return the query as attention takes it."""
        rope, slots, cache = self.rope, tables["slots"], self._latents[layer]
        scale = self.caches[layer].get("k_scale")
        if rope.mode == "none":
            store_mla(latent, rope_key, cache, slots, scale=scale, stream=on)
            return query
        rotated = self._space(query.shape, query.format, on)
        turning = query[..., rope.first :]
        turned = rotated[..., rope.first :]
        if rope.mode == "normal":
            rope_store_mla(
                turning, latent, rope_key, rope.table, tables["positions"], cache, slots,
                interleaved=rope.interleaved, write_key=False, query_out=turned, scale=scale,
                stream=on,
            )  # fmt: skip
        else:
            store_mla(latent, rope_key, cache, slots, scale=scale, stream=on)
            apply_rope(
                None, turning, rope.table, tables["positions"], interleaved=rope.interleaved,
                key_out=turned, stream=on,
            )  # fmt: skip
        self._device.copy(rotated[..., : rope.first], query[..., : rope.first], stream=on)
        return rotated

    def _cascade(
        self,
        layer: int,
        query: ArrayView,
        out: ArrayView,
        table: ArrayView,
        tables: Tables,
        paged: dict[str, Any],
        on: Stream,
    ) -> None:
        """Attend over shared prefixes, then over the rest of each sequence, and merge the two."""
        num_tokens, num_heads, _ = query.shape
        states = self._space((2, num_tokens, num_heads, self.v_width), "fp32", on)
        lse = self._space((3, num_tokens, num_heads), "fp32", on)
        both: dict[str, Any] = {**self.caches[layer], "stream": on}
        shared = {
            name: value
            for name, value in paged.items()
            if name not in (*_PAGED, "sinks", "tail_positions")
        }
        attend(
            query, block_table=tables["prefix_table"], seq_lens=tables["prefix_lens"],
            query_lens=tables["prefix_queries"], causal=False, out=states[0], lse_out=lse[0],
            **shared, **both,
        )  # fmt: skip
        attend(
            query, block_table=table, seq_lens=tables["seq_lens"], key_starts=tables["key_starts"],
            out=states[1], lse_out=lse[1], **paged, **both,
        )  # fmt: skip
        merge_states(states, lse[:2], None, None, out=out, lse_out=lse[2], stream=on)

    def _space(self, shape: tuple[int, ...], format: str, on: Stream) -> ArrayView:
        """Return a buffer that nobody else uses while work in flight holds it."""
        strides = contiguous_strides(shape, FORMATS[format].itemsize)
        lent = scratch.borrow(self._device, max(1, shape[0] * strides[0]), on)
        return ArrayView(
            lent.pointer,
            shape,
            strides,
            format,
            lent.device,
            library=lent.library,
            owner=lent.owner,
        )


def _first(rows: ArrayView, count: int) -> ArrayView:
    """Return the first rows of an array."""
    return rows if rows.shape[0] == count else rows[:count]
