"""The arguments of `paged_attention`, and of `attend`, checked."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import ArrayView, describe
from . import checks
from .attention_sequences import check_rope, check_sequences
from .side import Side

NAMES = (
    "query", "k_cache", "v_cache", "out", "lse_out", "block_table", "seq_lens", "query_lens",
    "k_scale", "v_scale", "k_scale_cache", "v_scale_cache", "sinks", "tree_mask",
)  # fmt: skip
NUM_ROWS = 4  # of these, what is read or written in words

# With what `attend` has beside them; of these, one more is read in words.
ALL_NAMES = (
    "rope_table", *NAMES, "hole_starts", "holes", "key_starts", "tree_lens", "tail_positions",
)  # fmt: skip

_WIDEST = 768  # elements of a row that a warp, or a thread of the host device, has registers for


@dataclass(frozen=True)
class Options:
    """What is asked for beside the arrays. `window` 0, `soft_cap` 0: none.

    The last two say what the rope table turns, where one is given.
    """

    layout: str
    sm_scale: float | None
    causal: bool
    window: int
    sink_keys: int
    soft_cap: float
    interleaved: bool = False
    rotary_start: int = 0

    @classmethod
    def of(
        cls, layout: Any, sm_scale: Any, causal: Any, window: Any, sinks: Any, soft_cap: Any,
        interleaved: Any = False, rotary_start: Any = 0,
    ) -> Options:  # fmt: skip
        """Check the options; `sinks` may be learned logits, which are an array."""
        layout = checks.layout_name(layout)
        if not isinstance(causal, (bool, np.bool_)):
            raise TypeError(f"causal: expected a bool, got {causal!r}")
        if window is not None:
            checks.require_int(window, "window")
            if not 1 <= window < 2**63:
                off = "; None is no window" if window in (-1, 0) else ""  # as others have it
                raise ValueError(f"window: expected None or at least 1, got {window}{off}")
        sink_keys = 0
        if sinks is not None and not checks.is_array(sinks):
            checks.require_int(sinks, "sinks")
            if not 0 <= sinks < 2**63:
                raise ValueError(f"sinks: expected at least 0, got {sinks}")
            sink_keys = int(sinks)
        if not isinstance(interleaved, (bool, np.bool_)):
            raise TypeError(f"interleaved: expected a bool, got {interleaved!r}")
        checks.require_int(rotary_start, "rotary_start")
        if rotary_start < 0:
            raise ValueError(f"rotary_start: expected at least 0, got {rotary_start}")
        return cls(
            layout, _number(sm_scale, "sm_scale"), bool(causal), int(window or 0), sink_keys,
            _number(soft_cap, "logits_soft_cap", positive=True) or 0.0, bool(interleaved),
            int(rotary_start),
        )  # fmt: skip


@dataclass(frozen=True)
class Call:
    """A call whose arguments fit together.

    Attributes
    ----------
    given : the arrays by name, as views; only those that are given
    k, v : the caches, with their scales
    num_tokens, num_heads, num_sequences, max_pages : T, Hq, B, pages a row of the table
    """

    given: dict[str, Any]
    options: Options
    k: Side
    v: Side
    num_tokens: int
    num_heads: int
    num_sequences: int
    max_pages: int

    @property
    def group(self) -> int:
        """Query heads a KV head."""
        return self.num_heads // self.k.cache.num_heads

    @property
    def sm_scale(self) -> float:
        given = self.options.sm_scale
        return 1.0 / math.sqrt(self.k.cache.width) if given is None else given

    @property
    def max_keys(self) -> int:
        """The most keys that the table has room for."""
        return self.max_pages * self.k.cache.page_size

    def view(self, name: str) -> ArrayView | None:
        """Return an array argument, None if it is none."""
        found = self.given.get(name)
        return found if isinstance(found, ArrayView) else None


def check_call(given: dict[str, Any], options: Options) -> Call:
    """Check all arguments; `out` is among them."""
    checks.require_given(given, ("query", "k_cache", "v_cache", "block_table", "seq_lens"))
    checks.require_same_device(given)
    query = given["query"]
    check_query(query)
    num_tokens, num_heads, _ = query.shape
    k, v = (_side(given, prefix, options.layout) for prefix in "kv")
    _require_caches(given, k, v)
    num_kv_heads, width = k.cache.num_heads, k.cache.width
    if query.shape[2] != width:
        raise ValueError(
            f"query: expected width {width} like k_cache {describe(given['k_cache'])}, "
            f"got {describe(query)}"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"query: expected a multiple of the {num_kv_heads} heads of k_cache, got {num_heads}"
        )
    num_sequences, max_pages = _table(given, num_tokens)
    _outputs(given, num_tokens, num_heads, v.cache.width)
    _sinks(given, num_heads)
    _tree_mask(given, num_tokens)
    check_sequences(given, num_sequences)
    check_rope(given, options.rotary_start, width, num_sequences)
    return Call(given, options, k, v, num_tokens, num_heads, num_sequences, max_pages)


def check_query(query: ArrayView, name: str = "query") -> None:
    """Refuse what is no query, whatever else is given."""
    if query.format not in ("fp32", "fp16", "bf16"):
        raise TypeError(f"{name}: expected fp32, fp16 or bf16, got {describe(query)}")
    if query.ndim != 3 or 0 in query.shape[1:]:
        raise ValueError(
            f"{name}: expected (tokens, heads, width) of at least one head and element, "
            f"got {describe(query)}"
        )
    checks.require_contiguous(query, name)


def _side(given: dict[str, Any], prefix: str, layout: str) -> Side:
    name = f"{prefix}_cache"
    form = checks.number_format(given[name], name)
    if given[name].ndim not in (3, 4):
        raise ValueError(
            f"{name}: expected (num_pages, page_size, heads, width) by layout, "
            f"got {describe(given[name])}"
        )
    cache = checks.cache(given[name], name, layout, 3, written=False)
    if 0 in (cache.num_heads, cache.width):
        raise ValueError(f"{name}: expected heads and width, got {describe(given[name])}")
    if cache.width > _WIDEST:
        raise ValueError(f"{name}: expected rows of at most {_WIDEST}, got {cache.width}")
    static = given.get(f"{prefix}_scale")
    scale = checks.scale(static, f"{prefix}_scale", cache.num_heads, form)
    own = checks.scale_cache(
        given.get(f"{prefix}_scale_cache"), f"{prefix}_scale_cache", (f"{prefix}_scale", static),
        cache, form, written=False,
    )  # fmt: skip
    rows = checks.Rows(0, cache.num_heads, cache.width, 0, 0)
    return Side(rows, cache, form, form, scale, own)


def _require_caches(given: dict[str, Any], k: Side, v: Side) -> None:
    if (v.cache.num_slots, v.cache.page_size, v.cache.num_heads) != (
        k.cache.num_slots, k.cache.page_size, k.cache.num_heads
    ):  # fmt: skip
        raise ValueError(
            f"v_cache: expected pages and heads as in k_cache {describe(given['k_cache'])}, "
            f"got {describe(given['v_cache'])}"
        )


def _table(given: dict[str, Any], num_tokens: int) -> tuple[int, int]:
    """Check the table and the lengths; return how many sequences, and pages a row, there are."""
    table, seq_lens = given["block_table"], given["seq_lens"]
    if table.format not in ("int32", "int64"):
        raise TypeError(f"block_table: expected int32 or int64, got {describe(table)}")
    if table.ndim != 2:
        raise ValueError(f"block_table: expected (sequences, max_pages), got {describe(table)}")
    num_sequences, max_pages = table.shape
    if checks.length_of(seq_lens, "seq_lens") != num_sequences:
        raise ValueError(
            f"seq_lens: expected {num_sequences} like block_table, got {describe(seq_lens)}"
        )
    query_lens = given.get("query_lens")
    if query_lens is None:
        if num_tokens != num_sequences:
            raise ValueError(
                f"query: expected {num_sequences} tokens, one a sequence, got {num_tokens}"
            )
    elif checks.length_of(query_lens, "query_lens") != num_sequences:
        raise ValueError(
            f"query_lens: expected {num_sequences} like block_table, got {describe(query_lens)}"
        )
    return num_sequences, max_pages


def _outputs(given: dict[str, Any], num_tokens: int, num_heads: int, width: int) -> None:
    query, out, lse = given["query"], given["out"], given.get("lse_out")
    shape = (num_tokens, num_heads, width)
    if out.format not in (query.format, "fp32"):
        raise TypeError(f"out: expected {query.format} like query, or fp32, got {describe(out)}")
    if out.shape != shape:
        raise ValueError(f"out: expected {shape}, got {describe(out)}")
    checks.require_contiguous(out, "out")
    checks.require_output(out, "out")
    if lse is None:
        return
    if lse.format != "fp32":
        raise TypeError(f"lse_out: expected float32, got {describe(lse)}")
    if lse.shape != shape[:2]:
        raise ValueError(f"lse_out: expected {shape[:2]}, got {describe(lse)}")
    checks.require_output(lse, "lse_out")


def _sinks(given: dict[str, Any], num_heads: int) -> None:
    sinks = given.get("sinks")
    if sinks is None:
        return
    if sinks.format != "fp32":
        raise TypeError(f"sinks: expected an int, or float32 logits, got {describe(sinks)}")
    if sinks.shape != (num_heads,):
        raise ValueError(f"sinks: expected ({num_heads},) like the query, got {describe(sinks)}")


def _tree_mask(given: dict[str, Any], num_tokens: int) -> None:
    mask = given.get("tree_mask")
    if mask is None:
        return
    if mask.format != "bool":
        raise TypeError(f"tree_mask: expected bool, got {describe(mask)}")
    if mask.ndim != 2 or mask.shape[0] != num_tokens:
        raise ValueError(
            f"tree_mask: expected ({num_tokens}, max(query_lens)), got {describe(mask)}"
        )


def _number(value: Any, name: str, *, positive: bool = False) -> float | None:
    if value is None:
        return None
    if type(value) is float and 1e-30 < value < 1e30:  # the usual: float32 has room for it
        return value
    checks.require_number(value, name)
    assert isinstance(value, numbers.Real)
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    if not np.isfinite(rounded) or (positive and not rounded > 0):
        wanted = "a finite float32 above zero" if positive else "a finite float32"
        off = "; None is no cap" if positive and value == 0 else ""
        raise ValueError(f"{name}: expected {wanted}, got {value!r}{off}")
    return float(value)
