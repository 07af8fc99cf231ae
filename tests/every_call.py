"""One valid call of each operation, made from its declaration (`kvcupy.ops.spec`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers import from_values

from kvcupy.ops.call import Operation
from kvcupy.ops.spec import OPERATIONS, Argument, Declaration

Call = dict[str, Any]
"""Arguments by name."""

SIZES = {
    "tokens": 3, "sequences": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 6,
    "pages": 2, "all_pages": 4, "page_size": 4, "slots": 8, "max_pages": 2, "positions": 16,
    "rotary_dim": 4, "latent_dim": 12, "rope_dim": 4, "latent_width": 16, "one": 1,
    "channels": 8, "conv_inputs": 3,
}  # fmt: skip


def array(device: Any, *shape: int, fmt: str = "fp32", seed: int = 0) -> Any:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return device.asarray(from_values(values, fmt))


def indices(device: Any, *values: int) -> Any:
    return device.asarray(np.array(values))


def example(
    declaration: Declaration, device: Any, cache_format: str = "int8", **sizes: int
) -> Call:
    """Return a call that has outputs and every kind of scale, but no optional index arrays.

    `sizes` replace some of `SIZES`.
    """
    call = {
        name: values(argument, device, cache_format, seed, SIZES | sizes)
        for seed, (name, argument) in enumerate(declaration.public_arguments.items())
        if argument.in_example and argument.shape
    }
    return call | {
        name: SIZES[name]
        for name, parameter in declaration.parameters.items()
        if parameter.default is parameter.empty and name not in declaration.public_arguments
    }


def values(
    argument: Argument, device: Any, cache_format: str = "int8", seed: int = 99,
    sizes: dict[str, int] = SIZES,
) -> Any:  # fmt: skip
    """Return an array for an argument, whether examples have it or not."""
    if argument.example is not None:
        return device.asarray(np.array(argument.example))
    shape = tuple(sizes[name] for name in argument.shape.split())
    if argument.cache:
        return device.zeros(shape, from_values(0.0, cache_format).dtype)
    if argument.fresh:
        return device.zeros(shape, np.float32)
    if "scale" in argument.name:
        return device.asarray(np.full(shape, 0.5, np.float32))
    return array(device, *shape, seed=seed)


def arrays_of(call: Call) -> Call:
    """Return the arguments that are arrays."""
    return {name: value for name, value in call.items() if hasattr(value, "shape")}


def _maker(declaration: Declaration) -> Callable[[Any], Call]:
    def make(device: Any) -> Call:
        return example(declaration, device)

    make.__name__ = declaration.name
    return make


CALLS = {n: _maker(each) for n, each in OPERATIONS.items() if isinstance(each, Operation)}
"""Of every operation that launches kernels, a function from a device to a valid call."""


def kv_caches(device: Any, fmt: str = "int8", **scales: Any) -> Call:
    """Return caches of eight slots in two pages, with scales of each kind."""
    call = example(OPERATIONS["store_kv"], device, fmt)
    caches = {name: call[name] for name in ("k_cache", "v_cache")}
    return caches | (scales or {name: call[name] for name in ("k_scale", "v_scale_cache")})


store_kv, gather_kv, apply_rope, rope_store_kv, copy_pages, paged_attention, merge_states = (
    CALLS[name]
    for name in (
        "store_kv", "gather_kv", "apply_rope", "rope_store_kv", "copy_pages", "paged_attention",
        "merge_states",
    )
)  # fmt: skip
