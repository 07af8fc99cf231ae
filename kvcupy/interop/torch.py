"""kvcupy's operations for torch: traced by `torch.compile` and `torch.export`, and in CUDA graphs.

The functions have the names, arguments and meaning of kvcupy's own: `store_kv`, `store_mla`,
`gather_kv`, `apply_rope`, `rope_store_kv`, `rope_store_mla`, `paged_attention`, `merge_states`,
`copy_pages`, `shift_pages`, `store_state`, `gather_state`, `update_conv_state`, `slot_mapping`,
`page_table_csr` and `find_duplicate_slots`. They take torch tensors alone and call operators
`torch.ops.kvcupy.*`, whose schemas say what is written.

Formats: the tensors' dtypes, `torch.bfloat16` and `torch.float8_e4m3fn` say. A cache that is
`torch.uint8` goes with `format`, the name of what its bytes hold.

Streams: an operator runs on torch's current stream, as torch's own do; under `torch.compile` and in
`torch.cuda.graph` too. `stream=` takes any stream of kvcupy, CuPy or torch, where nothing is
traced. The tensors are then recorded on it (`Tensor.record_stream`), so that torch's allocator does
not hand their memory out before that stream is done. The stream is kept for as long as the process
lives, since the allocator uses it when a tensor is freed; one of kvcupy's serves again as a later
`device.stream()`.

Gradients: there is no backward. A tensor that requires one is refused, when it is traced or when
the operator runs, unless gradients are off.

Pools: `pool.torch_k(layer)` and `pool.torch_v(layer)` are tensors over a pool's memory, and
`kvcupy.KVPool.wrap` makes a pool over tensors. Take the tensors out of the pool before what is
traced: a graph knows tensors, not pools. For the same reason `transfer_pages`, `PagedKVCache`,
`TransferEngine` and `TieredCache` are no operators: they change what a graph has no notion of, page
lists, streams and transfers in flight. Call them between graphs. Once this module is imported,
compiled code traces kvcupy's own functions of these names as these.

Examples
--------
>>> import torch
>>> cache = torch.zeros(2, 4, 16, 8, 64, dtype=torch.bfloat16)
>>> rows, slots = torch.ones(1, 8, 64, dtype=torch.bfloat16), torch.tensor([5])
>>> store_kv(rows, 2 * rows, cache[0], cache[1], slots)
>>> key, value = gather_kv(cache[0], cache[1], slots)
>>> float(key[0, 0, 0]), float(value[0, 0, 0])
(1.0, 2.0)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor

from .. import devices, formats
from ..arrays import require_no_gradient, tensor_of, view, view_as
from ..formats import Layout, LseBase
from ..ops import attention, merge, rope, store  # noqa: F401  # declare operations
from ..ops import pages as _pages  # noqa: F401
from ..ops import states as _states  # noqa: F401
from ..ops.call import format_name
from ..ops.rope_table import rope_table as _rope_table
from ..ops.spec import OPERATIONS, STREAMS, Argument, Declaration, DType

__all__ = ["as_tensor", "rope_table", *OPERATIONS]


def rope_table(
    max_positions: int,
    rotary_dim: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    device: Any = None,
) -> Tensor:
    """Return `[cos | sin]` of every position, as `kvcupy.rope_table`.

    Parameters
    ----------
    device : a torch device, or its name; None: kvcupy's default device
    others : as in `kvcupy.rope_table`

    Returns
    -------
    float32 (max_positions, rotary_dim)

    Notes
    -----
    Make it before what is traced: it is computed by NumPy.

    Examples
    --------
    >>> rope_table(4096, 128, device="cpu").shape
    torch.Size([4096, 128])
    """
    if isinstance(device, (str, torch.device)):
        device = str(device).replace("cpu", "host")
    table = _rope_table(max_positions, rotary_dim, base=base, scaling=scaling, device=device)
    return as_tensor(table)


# --- Memory ---------------------------------------------------------------------------------------


def as_tensor(array: Any) -> Tensor:
    """Return the memory of an array as a tensor, without a copy.

    Parameters
    ----------
    array : whatever kvcupy takes: `device.zeros((4, 8), "bf16")`, `pool.k_scale(layer)`, an
        ArrayView of `kvcupy.view_as`, an array of NumPy, CuPy or any exporter of DLPack

    Returns
    -------
    tensor that shares the memory and keeps it alive; bf16 and fp8 have torch's dtypes of those

    Raises
    ------
    TypeError : not an array
    ValueError : a stride is negative, which torch does not support

    Examples
    --------
    >>> import kvcupy as kv
    >>> cache = as_tensor(kv.device("host").zeros((4, 8), "bf16"))
    >>> cache.dtype, cache.shape
    (torch.bfloat16, torch.Size([4, 8]))
    """
    if isinstance(array, Tensor):
        return array
    tensor: Tensor = tensor_of(view(array, "array"))
    return tensor


# --- Operators ------------------------------------------------------------------------------------
#
# The operators `torch.ops.kvcupy.*` are made from the declarations of the operations. An operator
# must not return an argument, and its schema says for certain what it writes. So an operation whose
# outputs are optional becomes several operators:
#
#     paged_attention             allocates `out` and returns it
#     paged_attention_out         writes `out`, returns nothing
#     apply_rope                  rotates query and key in place
#     apply_rope_query_out        reads query, writes query_out, rotates key in place
#     rope_store_kv_keep_key      reads key: `write_key=False`
#
# An argument that may be a tensor or a number is two, `k_scale` and `k_scale_number`. `format`
# names the format of caches that are bytes. Operators have no stream: they run on torch's current
# stream, as all operators do.
#
# The kernels are kvcupy's operations on the tensors' memory. They are registered with the
# dispatcher without `torch.library.custom_op`, whose wrapper takes longer than the operation. They
# count what they write in the tensors' versions (`arrays.note_written`), and refuse a tensor that
# requires a gradient, as do the fakes, when a graph is traced.

_F = TypeVar("_F", bound=Callable[..., Any])

Values = Mapping[str, Any]
"""Arguments of a call by name, without those that were left at their defaults."""

_TYPES = {
    "Layout": "str", "LseBase": "str",
    "str": "str", "int": "int", "float": "float", "bool": "bool", "bool | None": "bool?",
    "int | None": "int?", "float | None": "float?", "tuple[int, int, int] | None": "int[]?",
    "DType": "ScalarType?",
}  # fmt: skip
"""Types of a schema by the annotation of an option."""


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
    "gather_state": lambda v: [
        cache.new_empty((v["slots"].shape[0], *cache.shape[1:])) for cache in v["caches"]
    ],
}
"""What operations return whose lengths depend on values, or lists."""


# --- From a declaration to operators --------------------------------------------------------------


@dataclass(frozen=True)
class Operator:
    """One of an operation's operators."""

    declaration: Declaration
    name: str  # in `torch.ops.kvcupy`
    schema: str  # its arguments and returns
    names: tuple[str, ...]  # of its positional arguments
    defaults: Values  # of these arguments
    outputs: tuple[str, ...]  # names of its keyword arguments, which it writes
    # of an argument, and of that which is passed instead where it is a number
    pairs: tuple[tuple[str, str], ...]
    constants: Values  # options of the operation that this operator stands for
    allocates: bool  # whether it returns new tensors

    def kernel(self, *arguments: Any, **named: Any) -> Any:
        """Run the operation; `named` are outputs, and streams, which no operator has."""
        values = dict(zip(self.names, arguments, strict=False))  # defaults at the end do not come
        values |= named
        values |= self.constants
        for name, number_name in self.pairs:
            number = values.pop(number_name, None)
            if number is not None:
                values[name] = number
        for name in self.declaration.several:
            if len(values.get(name) or ()) == 1:
                values[name] = values[name][0]
        format = values.pop("format", None)
        if format is not None:
            for name, argument in self.declaration.public_arguments.items():
                if argument.cache:
                    values[name] = _tagged(values[name], format, name)
        result = self.declaration.function(**values)
        if not self.allocates:
            return None
        if isinstance(result, np.ndarray):  # as `find_duplicate_slots` returns
            return torch.from_numpy(result)
        is_one = self.declaration.returns_several and isinstance(result, Tensor)
        return [result] if is_one else result

    def fake(self, *arguments: Any, **named: Any) -> Any:
        """Return empty tensors of the shapes that the kernel would return."""
        values = dict(zip(self.names, arguments, strict=False), **named)
        places = set()
        for name, value in values.items():
            for x in value if isinstance(value, list) else (value,):
                if isinstance(x, torch.Tensor):
                    _require_no_gradient(x, name)
                    places.add(x.device.type)
                    if "meta" in places and len(places) > 1:
                        raise TypeError(
                            f"{name}: expected tensors with memory, or all on meta, got one on "
                            f"{x.device} and others on {', '.join(places - {x.device.type})}"
                        )
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
        read = {n: o for (n, o), only in zip(replaced.items(), reads, strict=True) if only}
        suffixes = [o.written_if.replace("write_", "keep_") or o.name for o in read.values()]
        yield _operator(
            declaration, "_".join([declaration.name, *suffixes]), replaced.keys() - read.keys(),
            [o for o in read.values() if not o.written_if],
            {o.written_if: False for o in read.values() if o.written_if},
        )  # fmt: skip
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

    left_out = {*STREAMS, *declaration.output_parameters}
    left_out |= {output.returned_if for output in declaration.caller_outputs}
    parts: list[str] = []
    names: list[str] = []
    defaults: dict[str, Any] = {}
    pairs: list[tuple[str, str]] = []

    def add(kind: str, name: str, *default: Any) -> None:
        parts.append(f"{kind} {name}" + "".join(f"={value!r}" for value in default))
        names.append(name)
        defaults.update((name, value) for value in default)

    for name, parameter in declaration.parameters.items():
        if name in left_out:
            continue
        argument = declaration.public_arguments.get(name)
        default = [] if parameter.default is parameter.empty else [parameter.default]
        if argument is None:
            add(_TYPES[str(parameter.annotation)], name, *default)
        elif argument.number:  # two arguments, of which one is passed at most
            pairs.append((name, f"{name}_number"))
            add("Tensor?", name, *default)
            add("int?" if argument.whole else "float?", f"{name}_number", *default)
        else:
            is_written = name in written or (argument.output and not argument.fresh)
            suffix = "[]" if argument.several else "?" if argument.optional or default else ""
            add(tensor(is_written, suffix), name, *default)
    if declaration.has_caches:
        add("str?", "format", None)
    if outputs:
        parts.append("*")
    for output in outputs:
        suffix = "[]" if output.several else "?" if output.returned_if else ""
        parts.append(f"{tensor(True, suffix)} {output.name}" + "=None" * bool(output.returned_if))
    returns = 0 if outputs else declaration.num_returned
    kind = "Tensor[]" if declaration.returns_several else "Tensor"
    schema = f"({', '.join(parts)}) -> ({', '.join([kind] * returns)})"
    return Operator(
        declaration, operator_name, schema, tuple(names), defaults,
        tuple([a.name for a in outputs]), tuple(pairs), constants, bool(returns),
    )  # fmt: skip


# --- Registration ---------------------------------------------------------------------------------

_library = torch.library.Library("kvcupy", "DEF")
_KEYS = (
    "CPU", "CUDA", "QuantizedCPU", "QuantizedCUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU",
    "SparseCsrCUDA", "MkldnnCPU", "AutogradNestedTensor",
)  # fmt: skip
"""Of plain tensors, and of those that the operation refuses by the name of the argument."""


def _register(operator: Operator) -> None:
    known = torch.Tag  # of which older versions of torch have fewer
    tags = [known.pt2_compliant_tag]
    tags.append(getattr(known, "needs_exact_strides", known.needs_fixed_stride_order))
    if operator.declaration.waits and operator.allocates and hasattr(known, "cudagraph_unsafe"):
        tags.append(known.cudagraph_unsafe)
    _library.define(operator.name + operator.schema, tags=tuple(tags))
    for key in _KEYS:
        _library.impl(operator.name, operator.kernel, key)
    for bit in ("Negative", "Conjugate"):  # else torch passes a copy, where it can
        _library.impl(operator.name, torch.library.fallthrough_kernel, bit)
    torch.library.register_fake(f"kvcupy::{operator.name}", operator.fake, lib=_library)


OPERATORS = tuple(
    [operator for declaration in OPERATIONS.values() for operator in operators(declaration)]
)
for _each in OPERATORS:
    _register(_each)


# --- Functions ------------------------------------------------------------------------------------


def _calls_operators(typed: _F) -> _F:
    """Return a function of the name and signature of `typed` that calls an operation's operators.

    Type checkers and editors see `typed`, whose body never runs.
    """
    declaration = OPERATIONS[typed.__name__]
    operators = {each.name: each for each in OPERATORS if each.declaration is declaration}
    defaults = {name: getattr(torch.ops.kvcupy, name).default for name in operators}
    signature = inspect.signature(typed)
    parameters = signature.parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    known = tuple(parameters)
    required = [n for n, p in parameters.items() if p.default is p.empty]
    replaced = [(a.name, a.written_if) for a in declaration.replaced.values()]
    caller_outputs = [a.name for a in declaration.caller_outputs]
    returned = [(a.name, a.returned_if) for a in declaration.caller_outputs]
    returned = [(n, o) for n, o in returned if o or declaration.public_arguments[n].returned]
    # Dynamo cannot trace the first access to a cached property.
    several, returns_several = declaration.several, declaration.returns_several

    def function(*arguments: Any, **options: Any) -> Any:
        values = dict(zip(positional, arguments, strict=False)) | options
        # Comparisons of sets are what Dynamo of torch 2.11 cannot trace.
        fit = all([n in values for n in required]) and all([n in known for n in values])
        if len(arguments) > len(positional) or not fit:
            signature.bind(*arguments, **options)  # raises, naming what is too much or missing
        streams = {name: values.pop(name, None) for name in STREAMS if name in parameters}
        is_one = False
        for name in several:
            if values.get(name) is not None:
                is_one |= isinstance(values[name], Tensor)
                values[name] = _tensors(values[name], name)
        if values.get("dtype") is not None:
            values["dtype"] = _torch_dtype(values["dtype"])
        outputs: dict[str, Any] = {}
        operator = declaration.name
        for name, option in replaced:
            if option:
                operator += "" if values.pop(option, True) else option.replace("write_", "_keep_")
            elif values.get(name) is not None:
                outputs[name] = values.pop(name)
                operator += f"_{name}"
        names = [name for name, option in returned if not option or values.get(option)]
        passed = [name for name in caller_outputs if values.get(name) is not None]
        if passed or len(names) > declaration.num_returned:
            operator += "_out"
            if any(values.get(name) is None for name in names):
                # Rows of a skipped slot, and those past the last sequence, stay zero.
                present = {name: x for name, x in values.items() if x is not None}
                for name, new in new_outputs(declaration, present).items():
                    outputs[name] = new.zero_()
            outputs |= {name: values[name] for name in passed}
        chosen = operators[operator]
        for name, number_name in chosen.pairs:
            if not isinstance(values.get(name), Tensor):
                values[number_name] = values.pop(name, None)
        call = [values.get(name, chosen.defaults.get(name)) for name in chosen.names]
        if all(stream is None for stream in streams.values()):
            result = defaults[operator](*call, **outputs)
        else:
            result = _on_streams(chosen.kernel, call, outputs, streams)
        if not chosen.allocates:
            results = tuple([outputs[name] for name in names])
            result = results if len(results) > 1 else results[0] if results else None
        if returns_several and is_one:
            return result[0]
        return tuple(result) if isinstance(result, list) else result

    functools.update_wrapper(function, typed)
    function.__doc__ = declaration.documentation + _DOCUMENTATION
    return cast(_F, function)


_DOCUMENTATION = """

On tensors: `torch.ops.kvcupy` does it, which `torch.compile` traces. `format` names what caches of
torch.uint8 hold ("fp8_e4m3", say). `stream` is None where a call is traced. A tensor that requires
a gradient is refused.
"""


def _tensors(value: Any, name: str) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return list(value)
    hint = "; of a pool, take pool.torch_k(layer) and pool.torch_v(layer)"
    raise TypeError(
        f"{name}: expected a tensor, or a list or tuple of them, got {type(value).__name__}{hint}"
    )


def _torch_dtype(dtype: Any) -> torch.dtype:
    return dtype if isinstance(dtype, torch.dtype) else _dtype_of(format_name(dtype))


def _on_streams(
    kernel: Callable[..., Any],
    arguments: list[Any],
    outputs: dict[str, Tensor],
    streams: dict[str, Any],
) -> Any:
    """Run a kernel, which takes streams of any library, and let torch's allocator know."""
    if torch.compiler.is_compiling():
        name = next(iter(streams)) if streams["stream"] is not None else "alt_stream"
        raise TypeError(
            f"{name}: expected None in torch.compile and torch.export, where an operator runs on "
            "torch's current stream"
        )
    result = kernel(*arguments, **outputs, **streams)
    returned = result if isinstance(result, tuple) else (result,)
    for value in (*arguments, *outputs.values(), *returned):
        for x in value if isinstance(value, list) else (value,):
            if isinstance(x, Tensor) and x.is_cuda:
                _record(x, streams.values())
    return result


def _record(tensor: Tensor, streams: Any) -> None:
    """Keep torch's allocator from reusing a tensor's memory before the streams have passed.

    kvcupy keeps its arguments by itself, but not in a capture that torch began, whose allocator
    reuses what is freed meanwhile for later work of the same capture. The allocator records an
    event on each stream when the tensor is freed, so the streams must not be destroyed before.
    """
    for stream in streams:
        if stream is None:
            continue
        known: Any = devices.get(f"cuda:{tensor.device.index}").as_stream(stream)
        known.lend()
        if not isinstance(stream, torch.cuda.Stream):
            stream = torch.cuda.ExternalStream(known.pointer, tensor.device)
        tensor.record_stream(stream)


Scale: TypeAlias = Tensor | float | None
Tensors: TypeAlias = Tensor | Sequence[Tensor]
Stream: TypeAlias = Any  # of kvcupy, CuPy or torch


@_calls_operators
def store_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *,
    layout: Layout = "NHD", k_scale: Scale = None, v_scale: Scale = None,
    k_scale_cache: Tensor | None = None, v_scale_cache: Tensor | None = None,
    skip_slot: int | None = None, stream: Stream = None, format: str | None = None,
) -> None: ...  # fmt: skip


@_calls_operators
def store_mla(
    latent: Tensor, rope_key: Tensor, cache: Tensor, slot_mapping: Tensor, *,
    scale: Scale = None, skip_slot: int | None = None, stream: Stream = None,
    format: str | None = None,
) -> None: ...  # fmt: skip


@_calls_operators
def gather_kv(
    k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, layout: Layout = "NHD",
    k_scale: Scale = None, v_scale: Scale = None, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, k_out: Tensor | None = None, v_out: Tensor | None = None,
    dtype: DType = None, stream: Stream = None, format: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    raise NotImplementedError


@_calls_operators
def apply_rope(
    query: Tensor | None, key: Tensor, rope_table: Tensor, positions: Tensor, *,
    interleaved: bool = False, sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False, query_norm: Tensor | None = None,
    key_norm: Tensor | None = None, eps: float = 1e-6, query_out: Tensor | None = None,
    key_out: Tensor | None = None, stream: Stream = None,
) -> None: ...  # fmt: skip


@_calls_operators
def rope_store_kv(
    query: Tensor | None, key: Tensor, value: Tensor, rope_table: Tensor, positions: Tensor,
    k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, interleaved: bool = False,
    sections: tuple[int, int, int] | None = None, sections_interleaved: bool = False,
    query_norm: Tensor | None = None, key_norm: Tensor | None = None, eps: float = 1e-6,
    write_key: bool = True, query_out: Tensor | None = None, layout: Layout = "NHD",
    k_scale: Scale = None, v_scale: Scale = None, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, skip_slot: int | None = None, alt_stream: Stream = None,
    stream: Stream = None, format: str | None = None,
) -> None: ...  # fmt: skip


@_calls_operators
def rope_store_mla(
    query: Tensor | None, latent: Tensor, rope_key: Tensor, rope_table: Tensor, positions: Tensor,
    cache: Tensor, slot_mapping: Tensor, *, interleaved: bool = False, write_key: bool = True,
    query_out: Tensor | None = None, scale: Scale = None, skip_slot: int | None = None,
    stream: Stream = None, format: str | None = None,
) -> None: ...  # fmt: skip


@overload
def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    query_lens: Tensor | None = None, cu_query_lens: Tensor | None = None, layout: Layout = "NHD",
    sm_scale: float | None = None, causal: bool = True, window: int | None = None,
    sink_tokens: int | None = None, sinks: Tensor | None = None,
    logits_soft_cap: float | None = None, tree_mask: Tensor | None = None, k_scale: Scale = None,
    v_scale: Scale = None, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, batch_invariant: bool | None = None,
    return_lse: Literal[False] = False, out: Tensor | None = None, lse_out: Tensor | None = None,
    stream: Stream = None, format: str | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    query_lens: Tensor | None = None, cu_query_lens: Tensor | None = None, layout: Layout = "NHD",
    sm_scale: float | None = None, causal: bool = True, window: int | None = None,
    sink_tokens: int | None = None, sinks: Tensor | None = None,
    logits_soft_cap: float | None = None, tree_mask: Tensor | None = None, k_scale: Scale = None,
    v_scale: Scale = None, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, batch_invariant: bool | None = None,
    return_lse: Literal[True], out: Tensor | None = None, lse_out: Tensor | None = None,
    stream: Stream = None, format: str | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@_calls_operators
def paged_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *,
    query_lens: Tensor | None = None, cu_query_lens: Tensor | None = None, layout: Layout = "NHD",
    sm_scale: float | None = None, causal: bool = True, window: int | None = None,
    sink_tokens: int | None = None, sinks: Tensor | None = None,
    logits_soft_cap: float | None = None, tree_mask: Tensor | None = None, k_scale: Scale = None,
    v_scale: Scale = None, k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None, batch_invariant: bool | None = None,
    return_lse: bool = False, out: Tensor | None = None, lse_out: Tensor | None = None,
    stream: Stream = None, format: str | None = None,
) -> Any: ...  # fmt: skip


@_calls_operators
def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor | None, lse_b: Tensor | None, *,
    out: Tensor | None = None, lse_out: Tensor | None = None, lse_base: LseBase = "e",
    stream: Stream = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    raise NotImplementedError


@_calls_operators
def copy_pages(
    cache: Tensors, src_pages: Tensor, dst_pages: Tensor, *, stream: Stream = None
) -> None: ...


@_calls_operators
def shift_pages(
    pool: Tensor, pages: Tensor, delta: Tensor | int, rope_table: Tensor, *,
    out_pages: Tensor | None = None, interleaved: bool = False, stream: Stream = None,
    format: str | None = None,
) -> None: ...  # fmt: skip


@_calls_operators
def store_state(
    states: Tensors, caches: Tensors, slots: Tensor, *, skip_slot: int | None = None,
    stream: Stream = None,
) -> None: ...  # fmt: skip


@overload
def gather_state(
    caches: Tensor, slots: Tensor, *, out: Tensor | None = None, skip_slot: int | None = None,
    stream: Stream = None,
) -> Tensor: ...  # fmt: skip


@overload
def gather_state(
    caches: Sequence[Tensor], slots: Tensor, *, out: Sequence[Tensor] | None = None,
    skip_slot: int | None = None, stream: Stream = None,
) -> tuple[Tensor, ...]: ...  # fmt: skip


@_calls_operators
def gather_state(
    caches: Tensors, slots: Tensor, *, out: Tensors | None = None, skip_slot: int | None = None,
    stream: Stream = None,
) -> Any: ...  # fmt: skip


@_calls_operators
def update_conv_state(
    x: Tensor, cache: Tensor, slots: Tensor, cu_query_lens: Tensor, *,
    skip_slot: int | None = None, stream: Stream = None,
) -> None: ...  # fmt: skip


@_calls_operators
def slot_mapping(
    block_table: Tensor, seq_lens: Tensor, append_lens: Tensor, page_size: int, *,
    out: Tensor | None = None, stream: Stream = None,
) -> Tensor:  # fmt: skip
    raise NotImplementedError


@_calls_operators
def page_table_csr(
    block_table: Tensor, seq_lens: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError


@_calls_operators
def find_duplicate_slots(slot_mapping: Tensor) -> Tensor:
    raise NotImplementedError


# torch's tracer inlines the function that this attribute names; nothing else reads it. Without it
# the tracer breaks the graph at each of kvcupy's own functions and compiles pieces of their Python,
# which then take milliseconds per call.
for _name, _declaration in OPERATIONS.items():
    _declaration.function.__dict__["_torchdynamo_inline"] = globals()[_name]
