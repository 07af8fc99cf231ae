"""The operators `torch.ops.kvcupy.*`: one table, from which schemas, kernels and fakes are made.

A row of `TABLE` names an operation of kvcupy, its arguments, which of them it writes, and what it
returns. An operator must not return an argument, and its schema says for certain what it writes. So
an operation whose outputs are optional becomes several operators:

    paged_attention             allocates `out` and returns it
    paged_attention_out         writes `out`, returns nothing
    apply_rope                  rotates query and key in place
    apply_rope_query_out        reads query, writes query_out, rotates key in place
    rope_store_kv_keep_key      reads key: `write_key=False`

An argument that may be a tensor or a number is two, `k_scale` and `k_scale_number`. Operators have
no stream: they run on torch's current one, as all operators do.

The kernels are kvcupy's operations on the tensors' memory. They are registered with the dispatcher
as they are: what `torch.library.custom_op` puts around a function takes longer than the operation.
They count what they write in the tensors' versions (`arrays.note_written`), and refuse a tensor
that requires a gradient, as do the fakes, when a graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from .. import formats
from ..arrays import require_no_gradient, view_as
from ..ops.attention import paged_attention
from ..ops.indexing import find_duplicate_slots, page_table_csr, slot_mapping
from ..ops.merge import merge_states
from ..ops.pages import copy_pages
from ..ops.rope import apply_rope, rope_store_kv, rope_store_mla
from ..ops.store import gather_kv, store_kv, store_mla

Values = Mapping[str, Any]
"""Arguments of a call by name, without those that were left at their defaults."""


@dataclass(frozen=True)
class InPlace:
    """An argument that is written in place, unless the caller says otherwise.

    Parameters
    ----------
    argument : its name
    output : the argument that is written instead, where it is passed
    option : the option that is False where the argument is only read
    suffix : of the operator that only reads it
    """

    argument: str
    suffix: str
    output: str = ""
    option: str = ""


@dataclass(frozen=True)
class Row:
    """An operation as operators.

    Parameters
    ----------
    name : of the operation
    function : takes the arguments by name, and streams
    arguments : a schema's, where "!" marks what is written, and "Tensor|float" may be either
    in_place : which of them are written by some operators and only read by others
    caches : which of them may be bytes whose format the argument `format` names
    outputs : written by the operator "_out"; the other has none of them, writes nothing, and
        returns new tensors
    fake : makes the new tensors, empty, from the arguments
    returns : how many there are
    waits : whether the host waits for the values of an argument where there are no outputs
    """

    name: str
    function: Callable[..., Any]
    arguments: str
    in_place: tuple[InPlace, ...] = ()
    caches: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    fake: Callable[[Values], Any] | None = None
    returns: int = 0
    waits: bool = False


# --- What the operations that return tensors allocate ---------------------------------------------


def out_of_attention(v: Values) -> Any:
    """Return what attention fills."""
    query = v["query"]
    width = _width_of_rows(v["v_cache"].shape[-1], v.get("format"))
    return query.new_empty((*query.shape[:2], width))


def rows_of_gather(v: Values) -> Any:
    """Return what a gather fills: rows of K and of V."""
    return tuple(_empty_rows(v, cache) for cache in ("k_cache", "v_cache"))


def _empty_rows(v: Values, name: str) -> Any:
    """Return what a gather from the cache of a name fills."""
    cache, num_tokens = v[name], v["slots"].shape[0]
    if cache.ndim == 4 and v.get("layout", "NHD") == "HND":
        shape = (num_tokens, cache.shape[1], cache.shape[3])
    else:
        shape = (num_tokens, *cache.shape[2 if cache.ndim == 4 else 1 :])
    shape = (*shape[:-1], _width_of_rows(shape[-1], v.get("format")))
    return cache.new_empty(shape, dtype=v.get("dtype") or _dtype_of_rows(cache, v.get("format")))


def _width_of_rows(size: int, format: str | None) -> int:
    """Return the elements of a row of a cache; of a four-bit format `size` counts bytes."""
    four_bit = formats.FOUR_BIT.get(format or "")
    return size if four_bit is None else size // four_bit.group_bytes * four_bit.group


def _dtype_of_rows(cache: Any, format: str | None) -> Any:
    """Return the dtype that the rows of a cache are gathered as, unless another is asked for."""
    known = formats.CACHE_FORMATS.get(format or _format_of(cache))
    return torch.bfloat16 if known is not None and known.quantised else cache.dtype


def _format_of(tensor: Any) -> str:
    """Return kvcupy's name of a tensor's dtype."""
    return formats.tag(str(tensor.dtype).removeprefix("torch."))


def merged(v: Values) -> Any:
    """Return what a merge fills: out and lse."""
    out, lse = v["out_a"], v["lse_a"]
    if v.get("out_b") is None:  # N states, on the first axis
        out, lse = out[0], lse[0]
    return torch.empty_like(out, memory_format=torch.contiguous_format), lse.new_empty(lse.shape)


def _length() -> Any:
    """Return a length that only the values of an argument decide."""
    return torch.library.get_ctx().new_dynamic_size()


def _slots(v: Values) -> Any:
    return v["block_table"].new_empty((_length(),), dtype=torch.int64)


def _page_table(v: Values) -> Any:
    table, num_sequences = v["block_table"], v["seq_lens"].shape[0]
    lengths = (num_sequences + 1, _length(), num_sequences)
    return tuple(table.new_empty((n,), dtype=torch.int32) for n in lengths)


def _duplicates(v: Values) -> Any:
    return v["slot_mapping"].new_empty((_length(),), device="cpu")


# --- Where an operator differs from the operation -------------------------------------------------


def _copy_pages(cache: list[Any], *arguments: Any, **options: Any) -> None:
    """Copy pages of the arrays of a list, of which one alone takes the shorter way."""
    copy_pages(cache[0] if len(cache) == 1 else cache, *arguments, **options)


def _duplicate_slots(slot_mapping: Any) -> Any:
    return torch.from_numpy(find_duplicate_slots(slot_mapping))


# --- The table ------------------------------------------------------------------------------------

_CACHES = ("k_cache", "v_cache")
_STATIC_SCALES = "str? format=None, Tensor|float k_scale, Tensor|float v_scale"
_SCALES = f"{_STATIC_SCALES}, Tensor!? k_scale_cache=None, Tensor!? v_scale_cache=None"
_READ_SCALES = _SCALES.replace("!", "")
_SECTIONS = "int[]? sections=None, bool sections_interleaved=False"
_ROTATION = (
    f"bool interleaved=False, {_SECTIONS}, Tensor? query_norm=None, Tensor? key_norm=None, "
    "float eps=1e-6"
)
_QUERY = InPlace("query", suffix="query_out", output="query_out")

TABLE = (
    Row(
        "store_kv",
        store_kv,
        "Tensor key, Tensor value, Tensor! k_cache, Tensor! v_cache, Tensor slot_mapping, "
        f"str layout='NHD', {_SCALES}, int? skip_slot=None",
        caches=_CACHES,
    ),
    Row(
        "store_mla",
        store_mla,
        "Tensor latent, Tensor rope_key, Tensor! cache, Tensor slot_mapping, "
        "str? format=None, Tensor|float scale, int? skip_slot=None",
        caches=("cache",),
    ),
    Row(
        "apply_rope",
        apply_rope,
        f"Tensor? query, Tensor key, Tensor rope_table, Tensor positions, {_ROTATION}",
        in_place=(_QUERY, InPlace("key", suffix="key_out", output="key_out")),
    ),
    Row(
        "rope_store_kv",
        rope_store_kv,
        "Tensor? query, Tensor key, Tensor value, Tensor rope_table, Tensor positions, "
        f"Tensor! k_cache, Tensor! v_cache, Tensor slot_mapping, {_ROTATION}, str layout='NHD', "
        f"{_SCALES}, int? skip_slot=None",
        in_place=(_QUERY, InPlace("key", suffix="keep_key", option="write_key")),
        caches=_CACHES,
    ),
    Row(
        "rope_store_mla",
        rope_store_mla,
        "Tensor? query, Tensor latent, Tensor rope_key, Tensor rope_table, Tensor positions, "
        "Tensor! cache, Tensor slot_mapping, bool interleaved=False, str? format=None, "
        "Tensor|float scale, int? skip_slot=None",
        in_place=(_QUERY, InPlace("rope_key", suffix="keep_key", option="write_key")),
        caches=("cache",),
    ),
    Row(
        "gather_kv",
        gather_kv,
        "Tensor k_cache, Tensor v_cache, Tensor slots, str layout='NHD', "
        f"{_READ_SCALES}, ScalarType? dtype=None",
        caches=_CACHES,
        outputs=("Tensor! k_out", "Tensor! v_out"),
        fake=rows_of_gather,
        returns=2,
    ),
    Row(
        "paged_attention",
        paged_attention,
        "Tensor query, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
        "Tensor? query_lens=None, str layout='NHD', float? sm_scale=None, bool causal=True, "
        "int? window=None, Tensor|int sinks, float? logits_soft_cap=None, "
        f"Tensor? tree_mask=None, {_READ_SCALES}",
        caches=_CACHES,
        outputs=("Tensor! out", "Tensor!? lse_out=None"),
        fake=out_of_attention,
        returns=1,
    ),
    Row(
        "merge_states",
        merge_states,
        "Tensor out_a, Tensor lse_a, Tensor? out_b, Tensor? lse_b, str lse_base='e'",
        outputs=("Tensor! out", "Tensor! lse_out"),
        fake=merged,
        returns=2,
    ),
    Row("copy_pages", _copy_pages, "Tensor![] cache, Tensor src_pages, Tensor dst_pages"),
    Row(
        "slot_mapping",
        slot_mapping,
        "Tensor block_table, Tensor seq_lens, Tensor append_lens, int page_size",
        outputs=("Tensor! out",),
        fake=_slots,
        returns=1,
        waits=True,
    ),
    Row(
        "page_table_csr",
        page_table_csr,
        "Tensor block_table, Tensor seq_lens, int page_size",
        fake=_page_table,
        returns=3,
        waits=True,
    ),
    Row(
        "find_duplicate_slots",
        _duplicate_slots,
        "Tensor slot_mapping",
        fake=_duplicates,
        returns=1,
        waits=True,
    ),
)


# --- From a row to operators ----------------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """One of a row's operators.

    Attributes
    ----------
    name : in `torch.ops.kvcupy`
    schema : its arguments and returns
    names : of its positional arguments
    pairs : of an argument, and of that which is passed instead where it is a number
    constants : options of the operation that this operator stands for
    allocates : whether it returns new tensors
    """

    row: Row
    name: str
    schema: str
    names: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    constants: Values
    allocates: bool

    def kernel(self, *arguments: Any, **named: Any) -> Any:
        """Run the operation; `named` are outputs, and streams, which no operator has."""
        values = dict(zip(self.names, arguments, strict=False))  # defaults at the end do not come
        values |= named
        values |= self.constants
        for name, number_name in self.pairs:
            number = values.pop(number_name, None)
            if number is not None:
                values[name] = number
        format = values.pop("format", None)
        if format is not None:
            for name in self.row.caches:
                values[name] = _tagged(values[name], format, name)
        result = self.row.function(**values)
        return result if self.allocates else None

    def fake(self, *arguments: Any, **named: Any) -> Any:
        """Return empty tensors of the shapes that the kernel would return."""
        values = dict(zip(self.names, arguments, strict=False), **named)
        for name, value in values.items():
            for x in value if isinstance(value, list) else (value,):
                if isinstance(x, torch.Tensor):
                    _require_no_gradient(x, name)
        return self.row.fake(values) if self.allocates and self.row.fake is not None else None


def _require_no_gradient(x: Any, name: str) -> None:
    try:
        require_no_gradient(x)
    except TypeError as error:
        raise TypeError(f"{name}: expected an array, {error}") from None


def _tagged(cache: Any, format: str, name: str) -> Any:
    """Return bytes as a cache of a format; of a tensor that is one already, the tensor."""
    if cache.dtype == torch.uint8:
        return view_as(cache, format)
    if _format_of(cache) != format:
        raise TypeError(f"{name}: expected {format}, or uint8 that holds it, got {cache.dtype}")
    return cache


def operators(row: Row) -> Iterator[Operator]:
    """Return the operators of a row: one for each way to pass its optional outputs."""
    for reads in product((False, True), repeat=len(row.in_place)):
        read = [each for each, only_reads in zip(row.in_place, reads, strict=True) if only_reads]
        instead = tuple(f"Tensor! {each.output}" for each in read if each.output)
        constants = {each.option: False for each in read if each.option}
        name = "_".join([row.name, *(each.suffix for each in read)])
        written = {each.argument for each in row.in_place} - {each.argument for each in read}
        yield _operator(row, name, written, instead, constants)
    if row.outputs:
        yield _operator(row, f"{row.name}_out", set(), row.outputs, {})


def _operator(
    row: Row, operator_name: str, written: set[str], outputs: tuple[str, ...], constants: Values
) -> Operator:
    letters = iter("abcdefgh")

    def marked(kind: str) -> str:
        return kind.replace("!", f"({next(letters)}!)") if "!" in kind else kind

    parts: list[str] = []
    names: list[str] = []
    pairs: list[tuple[str, str]] = []
    for declared in row.arguments.split(", "):
        kind, argument = declared.split(" ", 1)
        name = argument.partition("=")[0]
        kind, _, number = kind.partition("|")
        if number:  # two arguments, of which one is passed at most
            pairs.append((name, f"{name}_number"))
            names += pairs[-1]
            parts += [f"{kind}? {name}=None", f"{number}? {name}_number=None"]
            continue
        names.append(name)
        kind = kind.replace("Tensor", "Tensor!") if name in written else kind
        parts.append(f"{marked(kind)} {argument}")
    if outputs:
        parts += ["*", *map(marked, outputs)]
    returns = 0 if outputs else row.returns
    schema = f"({', '.join(parts)}) -> ({', '.join(['Tensor'] * returns)})"
    return Operator(
        row, operator_name, schema, tuple(names), tuple(pairs), constants, bool(returns)
    )


# --- Registration ---------------------------------------------------------------------------------

KERNELS: dict[Any, Callable[..., Any]] = {}
"""By operator, what the dispatcher runs; it takes streams too."""

_library = torch.library.Library("kvcupy", "DEF")


def _register(operator: Operator) -> None:
    known = torch.Tag  # of which older versions of torch have fewer
    tags = [known.pt2_compliant_tag]
    tags.append(getattr(known, "needs_exact_strides", known.needs_fixed_stride_order))
    if operator.row.waits and operator.allocates and hasattr(known, "cudagraph_unsafe"):
        tags.append(known.cudagraph_unsafe)
    _library.define(operator.name + operator.schema, tags=tuple(tags))
    for key in ("CPU", "CUDA"):
        _library.impl(operator.name, operator.kernel, key)
    torch.library.register_fake(f"kvcupy::{operator.name}", operator.fake, lib=_library)
    KERNELS[getattr(torch.ops.kvcupy, operator.name).default] = operator.kernel


OPERATORS = tuple([operator for row in TABLE for operator in operators(row)])
for _each in OPERATORS:
    _register(_each)
