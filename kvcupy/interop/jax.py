"""kvcupy's operations for JAX: pure functions, which return what kvcupy's own write in place.

JAX's arrays are immutable, so kvcupy's functions read them and refuse to write them. Here
`store_kv` takes caches and returns caches:

    k_cache, v_cache = store_kv(key, value, k_cache, v_cache, slots)

No cache is copied. Called by itself, a function *donates* the caches that it is passed: the arrays
returned have their memory, and the old ones are deleted, as with
`jax.jit(..., donate_argnums=...)`. Within a `jax.jit` of your own it is part of that program:
donate the caches to the program, and they are written in place from its arguments to its results.
XLA copies a cache wherever the old one is still needed: where it is not donated, is read after the
call that writes it, or shares memory with a NumPy array. Rows (`query`, `key`) are not donated:
rotated rows are new arrays.

Each call is a custom call of XLA's (`jax.ffi`), with outputs aliased to inputs. On a CPU it runs on
a thread of XLA's; on a GPU it is put on XLA's stream, and the host waits for nothing.

Arguments are checked when a program is traced, before anything is donated: TypeError and ValueError
as of kvcupy's functions. What is seen only in the call (a kernel that cannot be loaded, and in
strict mode an index out of range) is raised by JAX, with the message of kvcupy's error, at the
latest when the arrays are waited for; donated caches are then lost. Else an index out of range is
skipped, and raised by `kvcupy.check_faults`.

Formats: bf16 and fp8 are JAX's own dtypes (those of ml_dtypes). Where a cache is uint8, `format`
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

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import formats
from ..arrays import ArrayView, contiguous_strides, view_as
from ..ops.attention import paged_attention as _paged_attention
from ..ops.bind import bind, vary
from ..ops.call import format_name
from ..ops.merge import merge_states as _merge_states
from ..ops.rope import apply_rope as _apply_rope
from ..ops.rope import rope_store_kv as _rope_store_kv
from ..ops.rope import rope_store_mla as _rope_store_mla
from ..ops.rope_table import rope_table as _rope_table
from ..ops.store import gather_kv as _gather_kv
from ..ops.store import store_kv as _store_kv
from ..ops.store import store_mla as _store_mla
from . import xla_ffi

__all__ = [
    "apply_rope",
    "gather_kv",
    "merge_states",
    "paged_attention",
    "rope_store_kv",
    "rope_store_mla",
    "rope_table",
    "store_kv",
    "store_mla",
]

Array = Any
Scale = Any

_OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        _store_kv, _store_mla, _apply_rope, _rope_store_kv, _rope_store_mla, _gather_kv,
        _paged_attention, _merge_states,
    )
}  # fmt: skip
_CACHES = ("k_cache", "v_cache", "cache")


# --- Stores and gathers ---------------------------------------------------------------------------


def store_kv(
    key: Array,
    value: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    layout: str = "NHD",
    format: str | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    skip_slot: int | None = None,
) -> tuple[Array, ...]:
    """Return caches with K and V rows written into their slots, as `kvcupy.store_kv`.

    Parameters
    ----------
    k_cache, v_cache, k_scale_cache, v_scale_cache : donated
    format : of caches that are uint8, "fp8_e4m3" say; None: the dtype says it
    others : as in `kvcupy.store_kv`

    Returns
    -------
    (k_cache, v_cache) : followed by the scale caches that were passed

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was donated

    Notes
    -----
    Stream, Capture: see the module. Bytes, Source: as `kvcupy.store_kv`.

    Examples
    --------
    >>> k_cache, v_cache = jnp.zeros((16, 8, 64), jnp.uint8), jnp.zeros((16, 8, 64), jnp.uint8)
    >>> rows, slots = jnp.ones((1, 8, 64)), jnp.array([3])
    >>> caches = store_kv(rows, rows, k_cache, v_cache, slots, format="fp8_e4m3", v_scale=0.5)
    >>> [float(each.view(jnp.float8_e4m3fn)[3, 0, 0]) for each in caches]
    [1.0, 2.0]
    """
    arguments = {
        "key": key, "value": value, "k_cache": k_cache, "v_cache": v_cache,
        "slot_mapping": slot_mapping, "k_scale": k_scale, "v_scale": v_scale,
        "k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache,
    }  # fmt: skip
    caches = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
    options = {"layout": layout, "skip_slot": skip_slot}
    return _call("store_kv", arguments, options, caches, donated=caches, format=format)


def store_mla(
    latent: Array,
    rope_key: Array,
    cache: Array,
    slot_mapping: Array,
    *,
    format: str | None = None,
    scale: Scale = None,
    skip_slot: int | None = None,
) -> Array:
    """Return the cache with latent and rotated key of MLA side by side, as `kvcupy.store_mla`.

    Parameters
    ----------
    cache : donated
    format : as in `store_kv`
    others : as in `kvcupy.store_mla`

    Returns
    -------
    cache

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was donated

    Notes
    -----
    Stream, Capture: see the module. Bytes, Source: as `kvcupy.store_mla`.

    Examples
    --------
    >>> latent, key = jnp.ones((1, 4)), jnp.full((1, 1), 2.0)
    >>> store_mla(latent, key, jnp.zeros((16, 5)), jnp.array([7]))[7].tolist()
    [1.0, 1.0, 1.0, 1.0, 2.0]
    """
    arguments = {
        "latent": latent, "rope_key": rope_key, "cache": cache, "slot_mapping": slot_mapping,
        "scale": scale,
    }  # fmt: skip
    caches = ("cache",)
    options = {"skip_slot": skip_slot}
    return _call("store_mla", arguments, options, caches, donated=caches, format=format)[0]


def gather_kv(
    k_cache: Array,
    v_cache: Array,
    slots: Array,
    *,
    layout: str = "NHD",
    format: str | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    dtype: Any = None,
) -> tuple[Array, Array]:
    """Return the K and V rows of slots, dequantised if the format says so, as `kvcupy.gather_kv`.

    Parameters
    ----------
    format : as in `store_kv`
    dtype : of the rows. None: the cache's if it is not quantised, else bfloat16
    others : as in `kvcupy.gather_kv`

    Returns
    -------
    (key, value) : zero where a slot is skipped

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Stream, Capture: see the module. Bytes, Source: as `kvcupy.gather_kv`.

    Examples
    --------
    >>> cache = jnp.arange(8.0).reshape(4, 1, 2)
    >>> [rows[:, 0].tolist() for rows in gather_kv(cache, -cache, jnp.array([2, -1]))]
    [[[4.0, 5.0], [0.0, 0.0]], [[-4.0, -5.0], [-0.0, -0.0]]]
    """
    arguments = {
        "k_cache": k_cache, "v_cache": v_cache, "slots": slots, "k_scale": k_scale,
        "v_scale": v_scale, "k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache,
    }  # fmt: skip
    outputs = {
        "k_out": _rows_of(k_cache, "k_cache", slots, layout, format, dtype),
        "v_out": _rows_of(v_cache, "v_cache", slots, layout, format, dtype),
    }
    key, value = _call("gather_kv", arguments, {"layout": layout}, (), outputs, format=format)
    return key, value


# --- Rotation -------------------------------------------------------------------------------------


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


def apply_rope(
    query: Array | None,
    key: Array,
    rope_table: Array,
    positions: Array,
    *,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Array | None = None,
    key_norm: Array | None = None,
    eps: float = 1e-6,
) -> tuple[Array | None, Array]:
    """Return query and key heads rotated by position, as `kvcupy.apply_rope`.

    Parameters
    ----------
    query, key, others : as in `kvcupy.apply_rope`; nothing is donated

    Returns
    -------
    (query, key) : new arrays; None for a query that is None

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Stream, Capture: see the module. Bytes: where the rows are needed afterwards XLA copies them
    first. Source: as `kvcupy.apply_rope`.

    Examples
    --------
    >>> query, key = apply_rope(None, jnp.ones((1, 1, 4)), rope_table(8, 4), jnp.array([0]))
    >>> query, key[0, 0].tolist()
    (None, [1.0, 1.0, 1.0, 1.0])
    """
    arguments = {
        "query": query, "key": key, "rope_table": rope_table, "positions": positions,
        "query_norm": query_norm, "key_norm": key_norm,
    }  # fmt: skip
    options = _rotation(interleaved, sections, sections_interleaved, eps)
    rotated = _call("apply_rope", arguments, options, ("query", "key"))
    return (None, *rotated) if query is None else rotated


def rope_store_kv(
    query: Array | None,
    key: Array,
    value: Array,
    rope_table: Array,
    positions: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    interleaved: bool = False,
    sections: Sequence[int] | None = None,
    sections_interleaved: bool = False,
    query_norm: Array | None = None,
    key_norm: Array | None = None,
    eps: float = 1e-6,
    layout: str = "NHD",
    format: str | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    skip_slot: int | None = None,
) -> tuple[Any, ...]:
    """Return query and key rotated and caches with key and value, as `kvcupy.rope_store_kv`.

    Parameters
    ----------
    k_cache, v_cache, k_scale_cache, v_scale_cache : donated
    format : as in `store_kv`
    others : as in `kvcupy.rope_store_kv`

    Returns
    -------
    (query, key, k_cache, v_cache) : followed by the scale caches that were passed; None for a query
        that is None

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was donated

    Notes
    -----
    Stream, Capture: see the module. Bytes: as `apply_rope`. Source: as `kvcupy.rope_store_kv`.

    Examples
    --------
    >>> key, cache = jnp.ones((1, 2, 8)), jnp.zeros((16, 2, 8))
    >>> query, key, k_cache, v_cache = rope_store_kv(
    ...     None, key, key, rope_table(32, 8), jnp.array([9]), cache, cache + 0, jnp.array([5])
    ... )
    >>> bool((k_cache[5] == key[0]).all()), float(v_cache[5, 0, 0])
    (True, 1.0)
    """
    arguments = {
        "query": query, "key": key, "value": value, "rope_table": rope_table,
        "positions": positions, "query_norm": query_norm, "key_norm": key_norm,
        "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping,
        "k_scale": k_scale, "v_scale": v_scale,
        "k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache,
    }  # fmt: skip
    caches = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
    options = _rotation(interleaved, sections, sections_interleaved, eps)
    options |= {"layout": layout, "skip_slot": skip_slot}
    written = ("query", "key", *caches)
    results = _call("rope_store_kv", arguments, options, written, donated=caches, format=format)
    return (None, *results) if query is None else results


def rope_store_mla(
    query: Array | None,
    latent: Array,
    rope_key: Array,
    rope_table: Array,
    positions: Array,
    cache: Array,
    slot_mapping: Array,
    *,
    interleaved: bool = False,
    format: str | None = None,
    scale: Scale = None,
    skip_slot: int | None = None,
) -> tuple[Any, Array, Array]:
    """Return the rope parts of an MLA query and key rotated, and the cache with latent and key.

    Parameters
    ----------
    cache : donated
    format : as in `store_kv`
    others : as in `kvcupy.rope_store_mla`

    Returns
    -------
    (query, rope_key, cache) : None for a query that is None

    Raises
    ------
    TypeError, ValueError : an argument does not fit; nothing was donated

    Notes
    -----
    Stream, Capture: see the module. Bytes: as `apply_rope`. Source: as `kvcupy.rope_store_mla`.

    Examples
    --------
    >>> latent, key, cache = jnp.ones((1, 12)), jnp.ones((1, 4)), jnp.zeros((16, 16))
    >>> table, index = rope_table(32, 4), jnp.array([0])
    >>> query, key, cache = rope_store_mla(None, latent, key, table, index, cache, index)
    >>> float(cache[0].sum())
    16.0
    """
    arguments = {
        "query": query, "latent": latent, "rope_key": rope_key, "rope_table": rope_table,
        "positions": positions, "cache": cache, "slot_mapping": slot_mapping, "scale": scale,
    }  # fmt: skip
    options = {"interleaved": interleaved, "skip_slot": skip_slot}
    written, caches = ("query", "rope_key", "cache"), ("cache",)
    results = _call("rope_store_mla", arguments, options, written, donated=caches, format=format)
    return (None, *results) if query is None else results


def _rotation(
    interleaved: bool, sections: Sequence[int] | None, sections_interleaved: bool, eps: float
) -> dict[str, Any]:
    return {
        "interleaved": interleaved,
        "sections": None if sections is None else list(sections),
        "sections_interleaved": sections_interleaved,
        "eps": eps,
    }


# --- Attention ------------------------------------------------------------------------------------


def paged_attention(
    query: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    query_lens: Array | None = None,
    layout: str = "NHD",
    format: str | None = None,
    sm_scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    sinks: Any = None,
    logits_soft_cap: float | None = None,
    tree_mask: Array | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    k_scale_cache: Array | None = None,
    v_scale_cache: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """Return the attention of the newest tokens of each sequence, as `kvcupy.paged_attention`.

    Parameters
    ----------
    format : as in `store_kv`
    return_lse : whether to return the log-sum-exp of the scores too
    others : as in `kvcupy.paged_attention`; nothing is donated

    Returns
    -------
    (T, Hq, Dv), or that and float32 (T, Hq) : new arrays

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Stream, Capture: see the module. Bytes, Source: as `kvcupy.paged_attention`.

    Examples
    --------
    >>> k, v = jnp.ones((4, 2, 1, 8)), jnp.arange(64.0).reshape(4, 2, 1, 8)
    >>> out = paged_attention(jnp.ones((1, 2, 8)), k, v, jnp.array([[2, 0]]), jnp.array([3]))
    >>> float(out[0, 1, 0])  # the mean of 32, 40 and 0, over pages 2 and 0
    24.0
    """
    arguments = {
        "query": query, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table,
        "seq_lens": seq_lens, "query_lens": query_lens, "sinks": sinks, "tree_mask": tree_mask,
        "k_scale": k_scale, "v_scale": v_scale,
        "k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache,
    }  # fmt: skip
    options = {
        "layout": layout, "sm_scale": sm_scale, "causal": causal, "window": window,
        "logits_soft_cap": logits_soft_cap,
    }  # fmt: skip
    shape = np.shape(query)
    width = _view_of(v_cache, "v_cache", format).shape[-1:]
    outputs = {"out": ((*shape[:-1], *width), _dtype_of(query))}
    if return_lse:
        outputs["lse_out"] = (shape[:-1], np.dtype(np.float32))
    results = _call("paged_attention", arguments, options, (), outputs, format=format)
    return results if return_lse else results[0]


def merge_states(
    out_a: Array,
    lse_a: Array,
    out_b: Array | None = None,
    lse_b: Array | None = None,
    *,
    lse_base: str = "e",
) -> tuple[Array, Array]:
    """Combine the attention of the same queries over different keys, as `kvcupy.merge_states`.

    Parameters
    ----------
    out_a, lse_a, out_b, lse_b, lse_base : as in `kvcupy.merge_states`; nothing is donated

    Returns
    -------
    (out, lse) : new arrays

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Notes
    -----
    Stream, Capture: see the module. Bytes, Source: as `kvcupy.merge_states`.

    Examples
    --------
    >>> a, b = jnp.ones((1, 1, 2)), jnp.full((1, 1, 2), 5.0)
    >>> out, lse = merge_states(a, jnp.zeros((1, 1)), b, jnp.log(jnp.full((1, 1), 3.0)))
    >>> out.round(4).tolist(), jnp.exp(lse).round(4).tolist()
    ([[[4.0, 4.0]]], [[4.0]])
    """
    arguments = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    shape = np.shape(out_a)[-3:]
    outputs = {"out": (shape, _dtype_of(out_a)), "lse_out": (shape[:2], np.dtype(np.float32))}
    out, lse = _call("merge_states", arguments, {"lse_base": lse_base}, (), outputs)
    return out, lse


# --- Calls ----------------------------------------------------------------------------------------

_Described = tuple[tuple[int, ...], np.dtype[Any]]


def _call(
    operation: str,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
    written: Sequence[str],
    outputs: Mapping[str, _Described] | None = None,
    *,
    donated: Sequence[str] = (),
    format: str | None = None,
) -> tuple[Any, ...]:
    """Call an operation of kvcupy as part of a program of XLA's.

    Parameters
    ----------
    arguments : by name; what is no array becomes an option
    written : which of them the operation writes and the call returns, where they are arrays
    outputs : shape and dtype of what the operation writes besides, and the call returns after those
    donated : which arguments are donated where no other program is being traced
    format : of caches that are uint8
    """
    arrays = {name: x for name, x in arguments.items() if _is_array(x)}
    numbers = {name: _number(x) for name, x in arguments.items() if name not in arrays}
    allocated = {name: (shape, dtype.name) for name, (shape, dtype) in (outputs or {}).items()}
    names = [*arrays, *allocated]
    description = {
        "operation": operation,
        "arrays": names,
        "written": [names.index(name) for name in (*written, *allocated) if name in names],
        "allocated": list(allocated.values()),
        "options": {**options, **numbers},
        "format": format,
    }
    text = json.dumps(description, default=repr)  # what is no number is refused by its name
    donors = tuple(names.index(name) for name in donated if name in arrays)
    results: tuple[Any, ...] = _program(text, donors)(*arrays.values())
    return results


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
    bind(_OPERATIONS[call["operation"]], **views, **call["options"])


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
    _OPERATIONS[description["operation"]](**arrays, **description["options"], stream=call.stream)


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


def _dtype_of(x: Any) -> np.dtype[Any]:
    return np.dtype(getattr(x, "dtype", np.float32))


def _view_of(
    array: Any, name: str, format: str | None, device: str = "host", address: int = 1 << 44
) -> ArrayView:
    """Return a view like that of an array, at an address where nothing is."""
    if not _is_array(array):
        raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
    shape, dtype = tuple(array.shape), _dtype_of(array)
    tag, strides = formats.tag(dtype), contiguous_strides(shape, dtype.itemsize)
    return _tagged(ArrayView(address, shape, strides, tag, device), name, format)


def _tagged(v: ArrayView, name: str, format: str | None) -> ArrayView:
    return view_as(v, format) if format and name in _CACHES and v.format == "uint8" else v


def _rows_of(
    cache: Any, name: str, slots: Any, layout: str, format: str | None, dtype: Any
) -> _Described:
    """Return shape and dtype of the rows that are gathered from a cache."""
    v = _view_of(cache, name, format)
    own = formats.FORMATS.get(v.format)
    if dtype is None:
        dtype = "bf16" if own is None or own.quantised else v.format
    row = v.shape[1:] if v.ndim != 4 else (v.shape[1 if layout == "HND" else 2], v.shape[3])
    return (*np.shape(slots)[:1], *row), formats.numpy_dtype(format_name(dtype))
