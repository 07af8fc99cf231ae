"""Rotate query and key by position; alone, or fused with writing key and value into a cache."""

from __future__ import annotations

from typing import Any

from . import plan as call
from .rope_checks import MLA_NAMES, Turning, as_tuple, plan_mla, plan_rotation, plan_store
from .rope_plan import NAMES, NUM_ROWS


def apply_rope(
    query: Any,
    key: Any,
    rope_table: Any,
    positions: Any,
    *,
    interleaved: bool = False,
    sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Any = None,
    key_norm: Any = None,
    eps: float = 1e-6,
    query_out: Any = None,
    key_out: Any = None,
    stream: Any = None,
) -> None:
    """Rotate query and key heads by position, in place or into other arrays.

    Parameters
    ----------
    query : (T', Hq, D) fp32, fp16 or bf16, T' >= T; or None. D is even
    key : (T', H, D)
    rope_table : float32 (max_positions, rotary_dim) `[cos | sin]`, from `rope_table`. The first
        rotary_dim elements of a head turn, the rest pass
    positions : int32 or int64 (T,); with `sections` (3, T). One outside the table is a fault: its
        token is left alone, and `check_faults` raises it
    interleaved : pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
    sections : three counts of pairs that sum to rotary_dim / 2 (mrope): consecutive sections of
        pairs turn by the first, second and third position of a token
    sections_interleaved : pairs take the three positions in turn, while a section has pairs left
        (as Qwen3-VL does)
    query_norm, key_norm : RMSNorm weights (D,), float32 or the rows' format, applied to each head
        before the rotation
    eps : of RMSNorm
    query_out, key_out : shaped like query and key; None: in place
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Arithmetic is float32 with one rounding. Stream: one kernel, in order; query and key of
    different formats take one each. Capture: legal. Bytes: each row read and written once (a norm
    reads it again from L1). Source: sgl-project/sglang pull 9014, vLLM `rotary_embedding`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcupy import rope_table
    >>> q, k = np.ones((1, 2, 4), np.float32), np.ones((1, 1, 4), np.float32)
    >>> apply_rope(q, k, rope_table(8, 4, device="host"), np.array([0]))
    >>> q[0, 0].tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    query_out = query if query_out is None else query_out
    key_out = key if key_out is None else key_out
    arrays = (
        query, query_out, key, key_out, None, None, None, rope_table, query_norm, key_norm,
        positions, None, None, None, None, None,
    )  # fmt: skip
    turning = (interleaved, as_tuple(sections), sections_interleaved, eps)
    pointers, made = call.obtain(
        "apply_rope", NAMES, arrays, NUM_ROWS, turning,
        lambda given, alignment: plan_rotation(given, Turning(*turning), alignment),
    )  # fmt: skip
    made.run(pointers, arrays, stream)


def rope_store_kv(
    query: Any,
    key: Any,
    value: Any,
    rope_table: Any,
    positions: Any,
    k_cache: Any,
    v_cache: Any,
    slot_mapping: Any,
    *,
    interleaved: bool = False,
    sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Any = None,
    key_norm: Any = None,
    eps: float = 1e-6,
    write_key: bool = True,
    query_out: Any = None,
    layout: str = "NHD",
    k_scale: Any = None,
    v_scale: Any = None,
    k_scale_cache: Any = None,
    v_scale_cache: Any = None,
    skip_slot: int | None = None,
    alt_stream: Any = None,
    stream: Any = None,
) -> None:
    """Rotate query and key, and write key and value into a cache, in one launch.

    The rotated key is rounded once to its own format; that value goes to `key` and is what the
    cache stores or quantises.

    Parameters
    ----------
    query, rope_table, positions, interleaved, sections, sections_interleaved, query_norm, key_norm,
    eps, query_out : as in `apply_rope`
    key : (T', H, D) fp32, fp16 or bf16; rotated in place unless `write_key` is False
    value : (T', H, Dv), in one of the same formats
    k_cache, v_cache, layout, k_scale, v_scale, k_scale_cache, v_scale_cache, skip_slot : as in
        `store_kv`
    slot_mapping : int32 or int64 (S,), S <= T. Tokens without a slot, or with a skipped one, are
        rotated all the same
    alt_stream : do it in three launches instead: rotate, then the K copy on `stream` and the V copy
        on this stream, ordered by events both ways. The result is the same; it exists to compare
        with the one launch. Without `write_key` the K copy rotates on its way
    stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    A token whose position is outside the table is neither rotated nor stored. Stream: one kernel,
    in order; a query or value of another format pair than the key's takes one of its own. Capture:
    legal, with `alt_stream` too. Bytes: each row is read once (a norm and dynamic scales read it
    again from L1) and written once a destination.
    Source: sgl-project/sglang pulls 9014 and 9077.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcupy import rope_table
    >>> q, k, v = (np.ones((1, 2, 8), np.float16) for _ in range(3))
    >>> k_cache, v_cache = np.zeros((2, 16, 2, 8), np.float16)
    >>> table = rope_table(32, 8, device="host")
    >>> rope_store_kv(q, k, v, table, np.array([9]), k_cache, v_cache, np.array([5]))
    >>> bool((k_cache[5] == k[0]).all()), float(v_cache[5, 0, 0])
    (True, 1.0)
    """
    query_out = query if query_out is None else query_out
    arrays = (
        query, query_out, key, key if write_key else None, value, k_cache, v_cache, rope_table,
        query_norm, key_norm, positions, slot_mapping, k_scale, v_scale, k_scale_cache,
        v_scale_cache,
    )  # fmt: skip
    turning = (interleaved, as_tuple(sections), sections_interleaved, eps)
    alternate = alt_stream is not None
    options = (turning, layout, skip_slot, type(skip_slot), alternate)
    pointers, made = call.obtain(
        "rope_store_kv", NAMES, arrays, NUM_ROWS, options,
        lambda given, alignment: plan_store(
            given, Turning(*turning), layout, skip_slot, alternate, alignment
        ),
    )  # fmt: skip
    if alternate:
        made.run_on(pointers, arrays, stream, alt_stream)
    else:
        made.run(pointers, arrays, stream)


def rope_store_mla(
    query: Any,
    latent: Any,
    rope_key: Any,
    rope_table: Any,
    positions: Any,
    cache: Any,
    slot_mapping: Any,
    *,
    interleaved: bool = False,
    write_key: bool = True,
    query_out: Any = None,
    scale: Any = None,
    skip_slot: int | None = None,
    stream: Any = None,
) -> None:
    """Rotate the rope parts of an MLA query and key, and write latent and key side by side.

    Parameters
    ----------
    query : (T', Hq, P) fp32, fp16 or bf16, the rope part of the query heads; or None
    latent : (T', R), in one of the same formats
    rope_key : (T', P); rotated in place unless `write_key` is False
    cache : (num_slots, R + P) or (num_pages, page_size, R + P), written in place
    scale : of a quantised cache: None (1), a number, or float32 of one element
    rope_table, positions, slot_mapping, interleaved, query_out, skip_slot, stream : as in
        `rope_store_kv`

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was written
    CompileError : the kernel cannot be compiled and `config.fallback` is "error"

    Notes
    -----
    Stream, Capture: as `rope_store_kv`. Source: vLLM `concat_and_cache_mla_rope_fused`.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcupy import rope_table
    >>> latent, key = np.ones((1, 512), np.float16), np.ones((1, 64), np.float16)
    >>> cache = np.zeros((16, 576), np.float16)
    >>> table = rope_table(32, 64, device="host")
    >>> rope_store_mla(None, latent, key, table, np.array([0]), cache, np.array([3]))
    >>> float(cache[3].sum())
    576.0
    """
    query_out = query if query_out is None else query_out
    arrays = (
        query, query_out, rope_key, rope_key if write_key else None, latent, cache, cache,
        rope_table, None, None, positions, slot_mapping, scale, scale, None, None,
    )  # fmt: skip
    turning = (interleaved, None, False, 0.0)
    pointers, made = call.obtain(
        "rope_store_mla", MLA_NAMES, arrays, NUM_ROWS, (turning, skip_slot, type(skip_slot)),
        lambda given, alignment: plan_mla(given, Turning(*turning), skip_slot, alignment),
    )  # fmt: skip
    made.run(pointers, arrays, stream)
