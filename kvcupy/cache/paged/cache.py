"""A paged KV cache for many sequences, whose tables ride a copy stream."""

from __future__ import annotations

from typing import Any

from ...arrays import describe, view
from ...errors import KvcupyError
from ...ops import outputs
from ...ops.attention_checks import check_query
from ..storage import Pool, count
from .contents import Contents
from .layers import Asked, Layers
from .options import DTYPE, PAGE_SIZE, pool_of, rope_of, scales_of
from .sequences import Sequences
from .step import Step, by_sequence
from .steps import Steps
from .tables import StepTables
from .tier_calls import PagedTiers


class PagedKVCache(PagedTiers):
    """Keep K and V of many sequences in pages, and attend with the tokens of a step.

    Parameters
    ----------
    num_layers, num_q_heads, num_kv_heads, head_dim, num_pages, page_size : counts. With `pool` only
        num_q_heads is needed; what else is given, and not left at its default, must agree with it
    v_head_dim : the width of V; None is that of K
    latent_dim : for multi-head latent attention: a token has a row of head_dim elements, the latent
        and then the rope part, and num_kv_heads is 1. See `attention_mla`
    dtype : format of the cache, by name or as a dtype
    k_scale, v_scale : static scales of a quantised cache: a number, or float32 (H,), (L, 1) or
        (L, H). Without any it has one scale a token and head (with latent_dim: scale 1)
    rope : float32 (max_positions, rotary_dim) on the device, from `rope_table`; None: no rotation
    interleaved : pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
    rope_mode : "normal", keys are cached rotated; "inline", cached raw and rotated in attention;
        "none"
    max_batch_tokens : the most tokens of a step
    max_seq_len : tokens a sequence for which a captured step has room; None: what rope has
        positions for, else all pages
    cascade : whether neighbours in a batch that share their first pages attend to those once; None:
        where that moves fewer bytes
    device : a Device or its name; None is the default device
    copy_stream : a stream for tables and page copies; None: one of its own
    pool : a KVPool, or an MLAPool with latent_dim, that has the pages, over existing memory too
        (`KVPool.wrap`); None: one is allocated. Its allocator gives the pages out, so that others
        may take some of them
    slots_in_flight : steps whose tables may be on their way or in use at once

    Attributes
    ----------
    pool : the KVPool or MLAPool that holds the pages
    device : the Device

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    DeviceError, MemoryError : there is no room

    Notes
    -----
    Stream: bookkeeping is host work. The tables of a step go to the device in one copy from pinned
    memory on the copy stream, at the first attention of the step, which waits for it by an event;
    so they overlap what the compute stream was given before. Neither side of a slot of the ring is
    rewritten before its readers are done. Pages are copied on the copy stream too, behind the
    compute streams that wrote them. Each attention asks for its stream anew; a step may use several
    of them, as long as the caller orders its layers.
    Capture: legal for steps of one token a sequence; see `attention`.
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
        self,
        *,
        num_q_heads: int,
        num_layers: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        num_pages: int | None = None,
        page_size: int = PAGE_SIZE,
        dtype: Any = DTYPE,
        rope: Any = None,
        interleaved: bool = False,
        rope_mode: str = "normal",
        max_batch_tokens: int = 8192,
        device: Any = None,
        copy_stream: Any = None,
        slots_in_flight: int = 2,
        v_head_dim: int | None = None,
        latent_dim: int | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        max_seq_len: int | None = None,
        cascade: bool | None = None,
        pool: Pool | None = None,
    ) -> None:
        pool = pool_of(
            pool, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim,
            num_pages=num_pages, page_size=page_size, dtype=dtype, device=device,
            v_head_dim=v_head_dim, latent_dim=latent_dim,
            has_static_scales=k_scale is not None or v_scale is not None,
        )  # fmt: skip
        turning = rope_of(rope, rope_mode, interleaved, pool.device, pool.head_dim, latent_dim)
        if count(num_q_heads, "num_q_heads") % pool.num_kv_heads:
            raise ValueError(
                f"num_q_heads: expected a multiple of {pool.num_kv_heads} KV heads, "
                f"got {num_q_heads}"
            )
        if cascade not in (None, True, False):
            raise ValueError(f"cascade: expected None, True or False, got {cascade!r}")
        room = turning.max_positions or pool.num_pages * pool.page_size
        if max_seq_len is not None:
            room = count(max_seq_len, "max_seq_len")
        layers = Layers(pool, int(num_q_heads), turning, scales_of(pool, k_scale, v_scale))
        sequences = Sequences(pool.allocator, pool.page_size)
        steps = Steps(
            pool, layers, sequences,
            copy_stream=copy_stream, slots_in_flight=count(slots_in_flight, "slots_in_flight"),
            max_batch_tokens=count(max_batch_tokens, "max_batch_tokens"),
            max_positions=turning.max_positions,
            # The pages that such a sequence has at most: behind its sinks there may be a hole.
            max_pages=min(pool.num_pages, -(-room // pool.page_size) + 1),
            cascade=cascade,
        )  # fmt: skip
        super().__init__(pool, sequences, steps, turning.mode, Contents(pool, layers))
        self._layers = layers
        self._num_q_heads = int(num_q_heads)
        self._is_latent = latent_dim is not None

    # --- Attention ---

    def attention(
        self,
        layer: int,
        query: Any,
        key: Any,
        value: Any,
        *,
        out: Any = None,
        sm_scale: float | None = None,
        window: int | None = None,
        sinks: Any = None,
        logits_soft_cap: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Write K and V of the step's tokens in one layer, and attend with their queries.

        Parameters
        ----------
        layer : 0 to num_layers - 1
        query : fp32, fp16 or bf16 (T', Hq, D), the tokens of the step one sequence after another.
            T' may be more than there are: the rest is left alone
        key, value : (T', H, D), (T', H, Dv)
        out : (T', Hq, Dv), written in place; None: allocated, zero past the tokens
        sm_scale, window, sinks, logits_soft_cap : of this layer, as in `paged_attention`
        stream : the compute stream; None: the current one of the query's library

        Returns
        -------
        (T', Hq, Dv) : `out`, or an array of the query's library

        Raises
        ------
        KvcupyError : no step is running
        TypeError, ValueError : an argument does not fit; nothing was written
        CaptureError : in a capture, a step of more than one token a sequence, or somebody else's

        Notes
        -----
        Inputs are not modified. Stream: the first call of a step sends its tables; the stream waits
        for them once. Capture: legal with `out`, in a step of one token a sequence. A launch of the
        graph, between begin_forward and end_forward, runs the step that was begun, of as many
        sequences or fewer; its tables take the place of the last ones before it.
        """
        if self._is_latent:
            raise KvcupyError("this cache holds latents: call attention_mla")
        return self._attend(
            layer, query, key, value, out, Asked(sm_scale, window, sinks, logits_soft_cap), stream
        )

    def attention_qkv(
        self,
        layer: int,
        qkv: Any,
        *,
        out: Any = None,
        sm_scale: float | None = None,
        window: int | None = None,
        sinks: Any = None,
        logits_soft_cap: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Do as `attention` does, with query, key and value in one array.

        Parameters
        ----------
        qkv : (T', Hq + 2 H, D): query heads, then those of K, then of V
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
            out=out, sm_scale=sm_scale, window=window, sinks=sinks,
            logits_soft_cap=logits_soft_cap, stream=stream,
        )  # fmt: skip

    def attention_mla(
        self,
        layer: int,
        query: Any,
        latent: Any,
        rope_key: Any,
        *,
        sm_scale: float,
        out: Any = None,
        window: int | None = None,
        sinks: Any = None,
        logits_soft_cap: float | None = None,
        stream: Any = None,
    ) -> Any:
        """Do as `attention` does, for multi-head latent attention.

        Parameters
        ----------
        query : (T', Hq, R + P): the latent part, absorbed, and the rope part
        latent, rope_key : (T', R), (T', P)
        sm_scale : what scores are multiplied by; it goes with the widths before absorption
        out : (T', Hq, R)
        """
        if not self._is_latent:
            raise KvcupyError("this cache holds K and V: call attention")
        parts = view(latent, "latent"), view(rope_key, "rope_key")
        self._layers.check_latent(*parts, self._running()[0].num_tokens)
        asked = Asked(sm_scale, window, sinks, logits_soft_cap)
        return self._attend(layer, query, *parts, out, asked, stream)

    def _attend(
        self, layer: Any, query: Any, key: Any, value: Any, out: Any, asked: Asked, stream: Any
    ) -> Any:
        step, tables = self._running()
        self.pool.k(layer)  # refuses a layer that there is not
        rows = self._layers.check(query, out, step.num_tokens, asked)
        on = self.device.as_stream(stream, rows.library)
        if out is None:
            shape = (*rows.shape[:2], self._layers.v_width)
            out = outputs.zeros(rows, shape, rows.format, stream)
        given = view(key, "key"), view(value, "value"), view(out, "out")
        found = tables.on(on)
        if not on.capturing:
            step.await_layer(int(layer), on)
        self._layers.run(int(layer), rows, *given, found, asked, on)
        return out

    # --- Tables ---

    def query_positions(self, *, stream: Any = None) -> Any:
        """Return the position of each token of the step, int32 (T,), for work on `stream`.

        Raises
        ------
        KvcupyError : no step is running

        Notes
        -----
        This and the other tables are arrays of the device's own library (NumPy, CuPy) that are
        valid until end_forward.
        """
        return self._table("positions", stream)

    def slot_mapping(self, *, stream: Any = None) -> Any:
        """Return the slot of each token of the step, int64 (T,): `page * page_size + offset`."""
        return self._table("slots", stream)

    def block_table(self, *, stream: Any = None) -> Any:
        """Return the pages of the step's sequences, int32 (B, pages of the longest), then zeros.

        Notes
        -----
        A sequence whose window has slid has unused slots between its sinks and what follows.
        """
        _, tables = self._running()
        found = tables.on(self.device.as_stream(stream, self._library))
        return self.device.carrier(by_sequence(found))

    def page_table_csr(self, *, stream: Any = None) -> tuple[Any, Any, Any]:
        """Return the pages of the step's sequences end to end, as FlashInfer takes them.

        Returns
        -------
        indptr : int32 (B + 1,), where each sequence's pages begin
        indices : int32 (indptr[-1],), the pages
        last_page_len : int32 (B,), slots used of the last page
        """
        self._running()
        found = self._steps.lists().on(self.device.as_stream(stream, self._library))
        indptr, indices, last = map(self.device.carrier, found.values())
        return indptr, indices, last

    def _table(self, name: str, stream: Any) -> Any:
        _, tables = self._running()
        found = tables.on(self.device.as_stream(stream, self._library))
        return self.device.carrier(found[name])

    def _running(self) -> tuple[Step, StepTables]:
        steps = self._steps
        if steps.running is None or steps.tables is None:
            raise KvcupyError("no step is running: call begin_forward first")
        return steps.running, steps.tables
