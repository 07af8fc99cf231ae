"""kvcupy's operations for JAX: pure functions, which return what kvcupy's own write in place.

JAX's arrays are immutable, so kvcupy's functions read them and refuse to write them. Here
`store_kv` takes caches and returns caches:

    k_cache, v_cache = store_kv(key, value, k_cache, v_cache, slots)

The functions are `store_kv`, `store_mla`, `gather_kv`, `apply_rope`, `rope_store_kv`,
`rope_store_mla`, `paged_attention`, `merge_states`, `store_state`, `gather_state` (of one array
per call) and `update_conv_state`. Each has the arguments of kvcupy's function
but for outputs and streams, and returns, in this order: rows that it rotates (None for a query that
is None), caches and scale caches that it writes, outputs that it allocates.

No cache is copied. Called by itself, a function *donates* the caches that it is passed: the arrays
returned have their memory, and the old ones are deleted, as with
`jax.jit(..., donate_argnums=...)`. Within your own `jax.jit` it is part of that program:
donate the caches to the program, and they are written in place from its arguments to its results.
XLA copies a cache wherever the old one is still needed: where it is not donated, is read after the
call that writes it, or shares memory with a NumPy array. Rows (`query`, `key`) are not donated:
rotated rows are new arrays.

Each call is a custom call of XLA's (`jax.ffi`), with outputs aliased to inputs. On a CPU it runs on
a thread of XLA's; on a GPU it is put on XLA's stream, and the host waits for nothing.

Arguments are checked when a program is traced, before anything is donated: TypeError and ValueError
as of kvcupy's functions. Errors of the call itself (a kernel that cannot be loaded, and in
strict mode an index out of range) are raised by JAX, with the message of kvcupy's error, at the
latest when the arrays are waited for; donated caches are then lost. Else an index out of range is
skipped, and raised by `kvcupy.check_faults`.

Formats: bf16 and fp8 are JAX's own dtypes (from ml_dtypes). Where a cache is uint8, `format`
names what its bytes hold. Scales are numbers, which are compiled in, or arrays.

Sharded arrays: within `jax.shard_map(..., check_vma=False)` each device writes its own part of the
caches; elsewhere XLA gathers them first.

Not offered: gradients and `jax.vmap`. Pools, engines and caches, which change with time, take
NumPy, CuPy and torch arrays.

Examples
--------
>>> import jax.numpy as jnp
>>> k_cache, v_cache = (jnp.zeros((4, 16, 8, 64), jnp.bfloat16) for _ in "kv")
>>> rows, slots = jnp.ones((1, 8, 64), jnp.bfloat16), jnp.array([5])
>>> k_cache, v_cache = store_kv(rows, 2 * rows, k_cache, v_cache, slots)
>>> key, value = gather_kv(k_cache, v_cache, slots)
>>> float(key[0, 0, 0]), float(value[0, 0, 0])
(1.0, 2.0)
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import formats
from ..arrays import ArrayView, contiguous_strides, view_as
from ..ops.bind import bind, vary
from ..ops.call import format_name
from ..ops.rope_table import rope_table as _rope_table
from ..ops.spec import OPERATIONS, STREAMS, Declaration
from . import xla_ffi

__all__ = [
    "apply_rope",
    "gather_kv",
    "gather_state",
    "merge_states",
    "paged_attention",
    "rope_store_kv",
    "rope_store_mla",
    "rope_table",
    "store_kv",
    "store_mla",
    "store_state",
    "update_conv_state",
]

Array = Any

_CACHES = {a.name for each in OPERATIONS.values() for a in each.arguments if a.cache}
"""Names of arguments that may be bytes of another format."""


def rope_table(
    max_positions: int, rotary_dim: int, *, base: float = 10000.0, scaling: Any = None
) -> Array:
    """Return the table of cosines and sines, as `kvcupy.rope_table`.

    Parameters
    ----------
    max_positions, rotary_dim, base, scaling : as in `kvcupy.rope_table`

    Returns
    -------
    float32 (max_positions, rotary_dim) : on JAX's default device

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Stream, Capture: it is computed on the host, and uploaded. Bytes, Source: as
    `kvcupy.rope_table`.

    Examples
    --------
    >>> rope_table(8, 4)[0].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    return jnp.asarray(_rope_table(max_positions, rotary_dim, base=base, scaling=scaling))


# --- Operations -----------------------------------------------------------------------------------


def _function(declaration: Declaration) -> Callable[..., Any]:
    """Return the pure function of an operation."""
    replaced = declaration.replaced
    inputs = {n: a for n, a in declaration.public_arguments.items() if not a.fresh}
    caches = tuple([n for n, a in inputs.items() if a.output])
    written = tuple([n for n, a in inputs.items() if a.output or n in replaced])
    signature = _signature(declaration)
    extra = tuple([a.returned_if for a in declaration.caller_outputs if a.returned_if])

    def function(*positional: Any, **keywords: Any) -> Any:
        bound = signature.bind(*positional, **keywords)
        bound.apply_defaults()
        values = dict(bound.arguments)
        format = values.pop("format", None)
        arguments = {name: values.pop(name) for name in inputs}
        if values.get("sections") is not None:
            values["sections"] = list(values["sections"])
        allocated = _outputs(declaration, arguments, values, format)
        for name in ("dtype", *extra):
            values.pop(name, None)
        arrays = {name: x for name, x in arguments.items() if _is_array(x)}
        # Arguments that are no arrays are options.
        values |= {name: _number(x) for name, x in arguments.items() if name not in arrays}
        names = [*arrays, *allocated]
        description = {
            "operation": declaration.name,
            "arrays": names,
            "written": [names.index(name) for name in (*written, *allocated) if name in names],
            "allocated": [(shape, dtype.name) for shape, dtype in allocated.values()],
            "options": values,
            "format": format,
        }
        text = json.dumps(description, default=repr)  # what is no number is refused by its name
        donors = tuple([names.index(name) for name in caches if name in arrays])
        results = iter(_program(text, donors)(*arrays.values()))
        returned: list[Any] = []
        for name in written:
            if arguments[name] is not None:
                returned.append(next(results))
            elif inputs[name].optional:  # rows; a scale cache that was left out is not returned
                returned.append(None)
        returned += results
        return tuple(returned) if len(returned) > 1 else returned[0]

    function.__name__ = function.__qualname__ = declaration.name
    function.__doc__ = declaration.documentation + _DOCUMENTATION
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


_DOCUMENTATION = """

On JAX's arrays: a pure function. It returns, as new arrays, the rows that it rotates, then the
caches and scale caches that it writes, which are donated, then the outputs that it allocates. A
query that is None is returned as None. `format` names what caches of uint8 hold.
"""


def _signature(declaration: Declaration) -> inspect.Signature:
    """Return the signature of the public function without outputs and streams."""
    signature = inspect.signature(declaration.function)
    left_out = {*STREAMS, *declaration.output_parameters}
    parameters = [p for n, p in signature.parameters.items() if n not in left_out]
    if declaration.has_caches:
        parameters.append(inspect.Parameter("format", inspect.Parameter.KEYWORD_ONLY, default=None))
    return signature.replace(parameters=parameters)


def _outputs(
    declaration: Declaration, arrays: Mapping[str, Any], options: Mapping[str, Any],
    format: str | None,
) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:  # fmt: skip
    """Return shape and dtype of what a call allocates."""
    if declaration.outputs_of is None:
        return {}
    if options.get("dtype") is not None:
        options = {**options, "dtype": format_name(options["dtype"])}
    views = {
        name: _view_of(x, name, format)
        for name, x in arrays.items()
        if _is_array(x) or declaration.is_required(name)
    }
    outputs = declaration.outputs_of(views, options)
    return {n: (shape, formats.numpy_dtype(each)) for n, (shape, each) in outputs.items()}


# --- Calls ----------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _program(description: str, donors: tuple[int, ...]) -> Callable[..., Any]:
    """Return the program of one call: checked when it is traced, compiled for each signature."""
    call = json.loads(description)
    written = call["written"]

    def run(*arrays: Any) -> Any:
        # Results are memory that the call is passed, so that what it leaves alone is as it was.
        arrays += tuple(jnp.zeros(shape, dtype) for shape, dtype in call["allocated"])
        _check(call, arrays)
        results = [jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in written]
        aliases = {i: number for number, i in enumerate(written)}
        foreign = jax.ffi.ffi_call(_TARGET, results, input_output_aliases=aliases)
        return tuple(foreign(*arrays, call=description))

    run.__name__ = run.__qualname__ = call["operation"]
    return jax.jit(run, donate_argnums=donors)  # type: ignore[no-any-return]


def _check(call: Mapping[str, Any], arrays: Sequence[Any]) -> None:
    """Raise what the operation would raise for arrays of these shapes, and compile its kernel.

    `bind` checks a call without making it. It looks at no element, so the arrays may be nowhere.
    """
    backend = jax.default_backend()
    if backend not in ("cpu", "gpu"):
        raise NotImplementedError(f"kvcupy runs on CPUs and NVIDIA's GPUs, got JAX on {backend}")
    device, address = ("host" if backend == "cpu" else "cuda:0"), 1 << 44
    views = {}
    for name, array in zip(call["arrays"], arrays, strict=True):
        views[name] = vary(_view_of(array, name, call["format"], device, address))
        address += (array.size * array.dtype.itemsize | 4095) + 1
    bind(OPERATIONS[call["operation"]].function, **views, **call["options"])


def _execute(call: xla_ffi.Call) -> None:
    """Do what a program of XLA's asks for."""
    description = _parsed(call.attribute)
    for number, i in enumerate(description["written"]):
        if call.results[number].pointer != call.arguments[i].pointer:
            name = description["arrays"][i]
            raise RuntimeError(f"{name}: expected its memory as result {number} of the call")
    format = description["format"]
    arrays = {
        name: _tagged(v, name, format)
        for name, v in zip(description["arrays"], call.arguments, strict=True)
    }
    OPERATIONS[description["operation"]].function(
        **arrays, **description["options"], stream=call.stream
    )


@lru_cache(maxsize=1024)
def _parsed(description: str) -> Any:
    return json.loads(description)


_TARGET = "kvcupy"  # the custom call's name, in programs that were exported too
_HANDLERS = {  # kept, for XLA may call them until the process ends
    "cpu": xla_ffi.handler(_execute, on_gpu=False),
    "CUDA": xla_ffi.handler(_execute, on_gpu=True),
}
for _platform, _handler in _HANDLERS.items():
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handler), platform=_platform)


# --- Arrays that may be tracers -------------------------------------------------------------------


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray)) or (hasattr(x, "shape") and np.ndim(x) > 0)


def _number(x: Any) -> Any:
    """Return a number of NumPy's as Python's; anything else is for the operation to refuse."""
    return x.item() if isinstance(x, np.generic) else x


def _view_of(
    array: Any, name: str, format: str | None, device: str = "host", address: int = 1 << 44
) -> ArrayView:
    """Return a view with the layout of an array, at an unused address."""
    if not _is_array(array):
        raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
    shape, dtype = tuple(array.shape), np.dtype(getattr(array, "dtype", np.float32))
    tag, strides = formats.tag(dtype), contiguous_strides(shape, dtype.itemsize)
    return _tagged(ArrayView(address, shape, strides, tag, device), name, format)


def _tagged(v: ArrayView, name: str, format: str | None) -> ArrayView:
    return view_as(v, format) if format and name in _CACHES and v.format == "uint8" else v


store_kv = _function(OPERATIONS["store_kv"])
store_mla = _function(OPERATIONS["store_mla"])
apply_rope = _function(OPERATIONS["apply_rope"])
rope_store_kv = _function(OPERATIONS["rope_store_kv"])
rope_store_mla = _function(OPERATIONS["rope_store_mla"])
gather_kv = _function(OPERATIONS["gather_kv"])
paged_attention = _function(OPERATIONS["paged_attention"])
merge_states = _function(OPERATIONS["merge_states"])
store_state = _function(OPERATIONS["store_state"])
gather_state = _function(OPERATIONS["gather_state"])
update_conv_state = _function(OPERATIONS["update_conv_state"])
