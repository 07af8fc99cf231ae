"""The operators `torch.ops.kvcupy.*`, made from the declarations of the operations.

An operator must not return an argument, and its schema says for certain what it writes. So an
operation whose outputs are optional becomes several operators:

    paged_attention             allocates `out` and returns it
    paged_attention_out         writes `out`, returns nothing
    apply_rope                  rotates query and key in place
    apply_rope_query_out        reads query, writes query_out, rotates key in place
    rope_store_kv_keep_key      reads key: `write_key=False`

An argument that may be a tensor or a number is two, `k_scale` and `k_scale_number`. `format` names
the format of caches that are bytes. Operators have no stream: they run on torch's current one, as
all operators do.

The kernels are kvcupy's operations on the tensors' memory. They are registered with the dispatcher
without `torch.library.custom_op`, whose wrapper takes longer than the operation. They count what
they write in the tensors' versions (`arrays.note_written`), and refuse a tensor that requires a
gradient, as do the fakes, when a graph is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch

from .. import formats
from ..arrays import require_no_gradient, view_as
from ..ops import attention, merge, rope, store  # noqa: F401  # declare operations
from ..ops.indexing import find_duplicate_slots
from ..ops.pages import copy_pages
from ..ops.spec import OPERATIONS, STREAMS, Argument, Declaration

Values = Mapping[str, Any]
"""Arguments of a call by name, without those that were left at their defaults."""

_TYPES = {
    "str": "str", "int": "int", "float": "float", "bool": "bool", "int | None": "int?",
    "float | None": "float?", "tuple[int, int, int] | None": "int[]?", "DType": "ScalarType?",
}  # fmt: skip
"""Types of a schema by the annotation of an option."""


# --- What the operations that return tensors allocate ---------------------------------------------


class _Described(NamedTuple):
    shape: tuple[int, ...]
    format: str


def new_outputs(declaration: Declaration, values: Values) -> dict[str, torch.Tensor]:
    """Return empty tensors for the outputs of a call that are to be allocated, by name."""
    assert declaration.outputs_of is not None
    options = {n: p.default for n, p in declaration.parameters.items()} | dict(values)
    if options.get("dtype") is not None:
        options["dtype"] = _format_of(options["dtype"])
    tensors = {n: x for n, x in values.items() if isinstance(x, torch.Tensor)}
    described = {}
    for name, tensor in tensors.items():
        is_cache = declaration.public_arguments[name].cache
        described[name] = _described(tensor, values.get("format") if is_cache else None)
    like = next(iter(tensors.values()))
    return {
        name: like.new_empty(shape, dtype=_dtype_of(format))
        for name, (shape, format) in declaration.outputs_of(described, options).items()
    }


def _described(tensor: torch.Tensor, format: str | None) -> _Described:
    """Return shape and format of a tensor; of bytes that hold another format, of that."""
    shape = tuple(tensor.shape)
    if format is None:
        return _Described(shape, _format_of(tensor.dtype))
    four_bit = formats.FOUR_BIT.get(format)
    if four_bit is not None:
        shape = (*shape[:-1], shape[-1] // four_bit.group_bytes * four_bit.group)
    return _Described(shape, format)


def _format_of(dtype: Any) -> str:
    """Return kvcupy's name of a dtype."""
    return formats.tag(str(dtype).removeprefix("torch."))


def _dtype_of(format: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, formats.numpy_dtype(format).name)
    return dtype


def _length() -> Any:
    """Return a length that only the values of an argument decide."""
    return torch.library.get_ctx().new_dynamic_size()


def _page_table(v: Values) -> Any:
    table, num_sequences = v["block_table"], v["seq_lens"].shape[0]
    lengths = (num_sequences + 1, _length(), num_sequences)
    return tuple(table.new_empty((n,), dtype=torch.int32) for n in lengths)


_FAKES: dict[str, Callable[[Values], Any]] = {
    "slot_mapping": lambda v: v["block_table"].new_empty((_length(),), dtype=torch.int64),
    "page_table_csr": _page_table,
    "find_duplicate_slots": lambda v: v["slot_mapping"].new_empty((_length(),), device="cpu"),
}
"""What operations return whose lengths depend on values."""


# --- Where an operator differs from the operation -------------------------------------------------


def _copy_pages(cache: list[Any], *arguments: Any, **options: Any) -> None:
    """Copy pages of the arrays of a list; a list of one takes the shorter path."""
    copy_pages(cache[0] if len(cache) == 1 else cache, *arguments, **options)


def _duplicate_slots(slot_mapping: Any) -> Any:
    return torch.from_numpy(find_duplicate_slots(slot_mapping))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "copy_pages": _copy_pages,
    "find_duplicate_slots": _duplicate_slots,
}


# --- From a declaration to operators --------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """One of an operation's operators.

    Attributes
    ----------
    name : in `torch.ops.kvcupy`
    schema : its arguments and returns
    names : of its positional arguments
    defaults : of these arguments
    outputs : names of its keyword arguments, which it writes
    pairs : of an argument, and of that which is passed instead where it is a number
    constants : options of the operation that this operator stands for
    allocates : whether it returns new tensors
    """

    declaration: Declaration
    name: str
    schema: str
    names: tuple[str, ...]
    defaults: Values
    outputs: tuple[str, ...]
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
            for name, argument in self.declaration.public_arguments.items():
                if argument.cache:
                    values[name] = _tagged(values[name], format, name)
        function = _FUNCTIONS.get(self.declaration.name) or self.declaration.function
        result = function(**values)
        return result if self.allocates else None

    def fake(self, *arguments: Any, **named: Any) -> Any:
        """Return empty tensors of the shapes that the kernel would return."""
        values = dict(zip(self.names, arguments, strict=False), **named)
        for name, value in values.items():
            for x in value if isinstance(value, list) else (value,):
                if isinstance(x, torch.Tensor):
                    _require_no_gradient(x, name)
        if not self.allocates:
            return None
        fake = _FAKES.get(self.declaration.name)
        if fake is not None:
            return fake(values)
        outputs = tuple(new_outputs(self.declaration, values).values())
        return outputs[0] if len(outputs) == 1 else outputs


def _require_no_gradient(x: Any, name: str) -> None:
    try:
        require_no_gradient(x)
    except TypeError as error:
        raise TypeError(f"{name}: expected an array, {error}") from None


def _tagged(cache: Any, format: str, name: str) -> Any:
    """Return bytes as a cache of a format; of a tensor that is one already, the tensor."""
    if format not in formats.CACHE_FORMATS:
        known = ", ".join(formats.CACHE_FORMATS)
        raise ValueError(f"format: expected one of {known}, got {format!r}")
    if cache.dtype == torch.uint8:
        return view_as(cache, format)
    if _format_of(cache.dtype) != format:
        raise TypeError(f"{name}: expected {format}, or uint8 that holds it, got {cache.dtype}")
    return cache


def operators(declaration: Declaration) -> Iterator[Operator]:
    """Return the operators of an operation: one for each way to pass its optional outputs."""
    replaced = declaration.replaced
    for reads in product((False, True), repeat=len(replaced)):
        read = [name for name, only_reads in zip(replaced, reads, strict=True) if only_reads]
        outputs = [replaced[name] for name in read if not replaced[name].written_if]
        options = [replaced[name].written_if for name in read if replaced[name].written_if]
        suffixes = [
            replaced[name].written_if.replace("write_", "keep_") or replaced[name].name
            for name in read
        ]
        name = "_".join([declaration.name, *suffixes])
        written = replaced.keys() - set(read)
        yield _operator(declaration, name, written, outputs, dict.fromkeys(options, False))
    outputs = list(declaration.caller_outputs)
    if outputs:
        yield _operator(declaration, f"{declaration.name}_out", set(), outputs, {})


def _operator(
    declaration: Declaration, operator_name: str, written: set[str], outputs: list[Argument],
    constants: Values,
) -> Operator:  # fmt: skip
    letters = iter("abcdefgh")

    def tensor(is_written: bool, suffix: str) -> str:
        return f"Tensor({next(letters)}!){suffix}" if is_written else f"Tensor{suffix}"

    left_out = {*STREAMS}
    for output in declaration.caller_outputs:
        left_out |= {output.name, output.returned_if}
    for output in declaration.replaced.values():
        left_out |= {output.name, output.written_if}
    parts: list[str] = []
    names: list[str] = []
    defaults: dict[str, Any] = {}
    pairs: list[tuple[str, str]] = []
    for name, parameter in declaration.parameters.items():
        if name in left_out:
            continue
        argument = declaration.public_arguments.get(name)
        has_default = parameter.default is not parameter.empty
        default = f"={parameter.default!r}" if has_default else ""
        if argument is not None and argument.number:
            # Two arguments, of which one is passed at most.
            pairs.append((name, f"{name}_number"))
            parts += [f"Tensor? {name}=None", f"float? {name}_number=None"]
            names += pairs[-1]
            defaults |= dict.fromkeys(pairs[-1])
            continue
        if argument is None:
            kind = _TYPES[str(parameter.annotation)]
        else:
            is_written = name in written or (argument.output and not argument.fresh)
            is_optional = argument.optional or has_default
            suffix = "[]" if argument.several else "?" if is_optional else ""
            kind = tensor(is_written, suffix)
        parts.append(f"{kind} {name}{default}")
        names.append(name)
        if has_default:
            defaults[name] = parameter.default
    if any(a.cache for a in declaration.public_arguments.values()):
        parts.append("str? format=None")
        names.append("format")
        defaults["format"] = None
    if outputs:
        parts.append("*")
    for output in outputs:
        is_optional = bool(output.returned_if)
        default = "=None" if is_optional else ""
        parts.append(f"{tensor(True, '?' if is_optional else '')} {output.name}{default}")
    returns = 0 if outputs else declaration.num_returned
    schema = f"({', '.join(parts)}) -> ({', '.join(['Tensor'] * returns)})"
    return Operator(
        declaration, operator_name, schema, tuple(names), defaults,
        tuple([a.name for a in outputs]), tuple(pairs), constants, bool(returns),
    )  # fmt: skip


# --- Registration ---------------------------------------------------------------------------------

KERNELS: dict[Any, Callable[..., Any]] = {}
"""By operator, what the dispatcher runs; it takes streams too."""

_library = torch.library.Library("kvcupy", "DEF")


def _register(operator: Operator) -> None:
    known = torch.Tag  # of which older versions of torch have fewer
    tags = [known.pt2_compliant_tag]
    tags.append(getattr(known, "needs_exact_strides", known.needs_fixed_stride_order))
    if operator.declaration.waits and operator.allocates and hasattr(known, "cudagraph_unsafe"):
        tags.append(known.cudagraph_unsafe)
    _library.define(operator.name + operator.schema, tags=tuple(tags))
    for key in ("CPU", "CUDA"):
        _library.impl(operator.name, operator.kernel, key)
    torch.library.register_fake(f"kvcupy::{operator.name}", operator.fake, lib=_library)
    KERNELS[getattr(torch.ops.kvcupy, operator.name).default] = operator.kernel


OPERATORS = tuple(
    [operator for declaration in OPERATIONS.values() for operator in operators(declaration)]
)
for _each in OPERATORS:
    _register(_each)
