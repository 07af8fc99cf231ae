"""kvcupy's operations for torch: traced by `torch.compile` and `torch.export`, and in CUDA graphs.

The functions have the names, arguments and meaning of kvcupy's own: `store_kv`, `store_mla`,
`gather_kv`, `apply_rope`, `rope_store_kv`, `rope_store_mla`, `paged_attention`, `merge_states`,
`copy_pages`, `slot_mapping`, `page_table_csr` and `find_duplicate_slots`. They take torch tensors
alone and call operators `torch.ops.kvcupy.*` (`torch_operators`), whose schemas say what is
written.

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
lists, streams and transfers in flight. Call them between graphs. Calls that `kvcupy.bind` has
prepared are not traced either. Once this module is imported, compiled code traces kvcupy's own
functions of these names as these.

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

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import devices, formats
from ..arrays import tensor_of, view
from ..ops.call import format_name
from ..ops.rope_table import rope_table as _rope_table
from ..ops.spec import OPERATIONS, STREAMS, Declaration
from .torch_operators import KERNELS, OPERATORS, new_outputs

__all__ = [
    "apply_rope",
    "as_tensor",
    "copy_pages",
    "find_duplicate_slots",
    "gather_kv",
    "merge_states",
    "page_table_csr",
    "paged_attention",
    "rope_store_kv",
    "rope_store_mla",
    "rope_table",
    "slot_mapping",
    "store_kv",
    "store_mla",
]

_ops = torch.ops.kvcupy


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


# --- Operations -----------------------------------------------------------------------------------


def _function(declaration: Declaration) -> Callable[..., Any]:
    """Return the function that calls the operators of an operation."""
    operators = {each.name: each for each in OPERATORS if each.declaration is declaration}
    defaults = {name: getattr(_ops, name).default for name in operators}
    signature = _signature(declaration)
    parameters = signature.parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = {n for n, p in parameters.items() if p.default is p.empty}
    replaced = [(a.name, a.written_if) for a in declaration.replaced.values()]
    caller_outputs = [a.name for a in declaration.caller_outputs]
    returned = [(a.name, a.returned_if) for a in declaration.caller_outputs]
    returned = [(n, o) for n, o in returned if o or declaration.public_arguments[n].returned]
    several = [a.name for a in declaration.public_arguments.values() if a.several]

    def function(*arguments: Any, **options: Any) -> Any:
        values = dict(zip(positional, arguments, strict=False)) | options
        if len(arguments) > len(positional) or not required <= values.keys() <= parameters.keys():
            signature.bind(*arguments, **options)  # raises, naming what is too much or missing
        streams = {name: values.pop(name, None) for name in STREAMS if name in parameters}
        for name in several:
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
            result = _on_streams(defaults[operator], call, outputs, streams)
        if chosen.allocates:
            return tuple(result) if isinstance(result, list) else result
        results = tuple([outputs[name] for name in names])
        return results if len(results) > 1 else results[0] if results else None

    function.__name__ = function.__qualname__ = declaration.name
    function.__doc__ = declaration.documentation + _DOCUMENTATION
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


_DOCUMENTATION = """

On tensors: `torch.ops.kvcupy` does it, which `torch.compile` traces. `format` names what caches of
torch.uint8 hold ("fp8_e4m3", say). `stream` is None where a call is traced. A tensor that requires
a gradient is refused.
"""


def _signature(declaration: Declaration) -> inspect.Signature:
    """Return the signature of the operation's public function, with `format` if it has caches."""
    signature = inspect.signature(declaration.function)
    parameters = list(signature.parameters.values())
    if any(a.cache for a in declaration.public_arguments.values()):
        format = inspect.Parameter("format", inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters.append(format)
    return signature.replace(parameters=parameters)


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
    if not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, formats.numpy_dtype(format_name(dtype)).name)
    chosen: torch.dtype = dtype
    return chosen


def _on_streams(
    operator: Any, arguments: list[Any], outputs: dict[str, Tensor], streams: dict[str, Any]
) -> Any:
    """Run an operator's kernel on streams of any library, and let torch's allocator know."""
    if torch.compiler.is_compiling():
        name = next(iter(streams)) if streams["stream"] is not None else "alt_stream"
        raise TypeError(
            f"{name}: expected None in torch.compile and torch.export, where an operator runs on "
            "torch's current stream"
        )
    result = KERNELS[operator](*arguments, **outputs, **streams)
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


store_kv = _function(OPERATIONS["store_kv"])
store_mla = _function(OPERATIONS["store_mla"])
gather_kv = _function(OPERATIONS["gather_kv"])
apply_rope = _function(OPERATIONS["apply_rope"])
rope_store_kv = _function(OPERATIONS["rope_store_kv"])
rope_store_mla = _function(OPERATIONS["rope_store_mla"])
paged_attention = _function(OPERATIONS["paged_attention"])
merge_states: Callable[..., tuple[Tensor, Tensor]] = _function(OPERATIONS["merge_states"])
copy_pages = _function(OPERATIONS["copy_pages"])
slot_mapping = _function(OPERATIONS["slot_mapping"])
page_table_csr = _function(OPERATIONS["page_table_csr"])
find_duplicate_slots = _function(OPERATIONS["find_duplicate_slots"])

# torch's tracer inlines the function that this attribute names; nothing else reads it. Without it
# the tracer breaks the graph at each of kvcupy's own functions and compiles pieces of their Python,
# which then take milliseconds per call.
for _name, _declaration in OPERATIONS.items():
    _declaration.function.__dict__["_torchdynamo_inline"] = globals()[_name]
