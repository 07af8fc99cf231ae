"""Adapters to other libraries. Nothing imports a module of this package before it is asked for.

`torch` and `transformers` adapt kvcupy to the libraries of these names. `flashinfer`, `vllm`
and `sglang` have functions of those projects, whose packages they do not need, over kvcupy's
operations. The checks of arguments that they share are here. `attention_backends` is the
reverse: attention of FlashInfer and FlashAttention over the pages of a `kvcupy.PagedKVCache`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_tensor(x: Any) -> str:
    """Return shape and dtype of an array for an error, or the type of another object."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return type(x).__name__
    library = type(x).__module__.partition(".")[0]
    other = "" if library == "torch" else f" of {library}"
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}{other}"


def require_shape(x: Any, name: str, shape: tuple[int | str, ...], *dtypes: Any) -> None:
    """Raise unless a tensor has a shape, in which a name stands for any length, and a dtype.

    Raises
    ------
    TypeError : `x` is not an array, or has none of `dtypes`, if there are any
    ValueError : it has another shape
    """
    lengths = getattr(x, "shape", ())
    if hasattr(x, "dtype") and len(lengths) == len(shape):
        for expected, length in zip(shape, lengths, strict=True):
            if expected != length and not isinstance(expected, str):
                break
        else:
            if dtypes and x.dtype not in dtypes:
                require_dtype(x, name, *dtypes)  # raises
            return
    # Only now: describing shapes takes longer than all checks of a call.
    expected_shape = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: expected a tensor {expected_shape}, got {type(x).__name__}")
    raise ValueError(f"{name}: expected {expected_shape}, got {describe_tensor(x)}")


def require_dtype(x: Any, name: str, *dtypes: Any) -> None:
    """Raise TypeError unless a tensor has one of some dtypes."""
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {describe_tensor(x)}")


def require_indices(x: Any, name: str, rows: Mapping[str, Any] | None = None) -> None:
    """Raise unless a tensor is int32 or int64 (T,), and each of `rows` has T rows or more."""
    import torch

    require_shape(x, name, ("tokens",), torch.int64, torch.int32)
    count = x.shape[0]  # len() of a tensor takes longer
    for rows_name, array in (rows or {}).items():
        if array.shape[0] < count:
            expected = f"at least {count} rows like {name}"
            raise ValueError(f"{rows_name}: expected {expected}, got {describe_tensor(array)}")


def require_cos_sin_cache(x: Any) -> None:
    """Raise unless a tensor is a float32 table of rotations; another dtype is a ValueError."""
    require_shape(x, "cos_sin_cache", ("max_position", "rotary_dim"))
    if str(x.dtype) != "torch.float32":
        raise ValueError(f"cos_sin_cache: expected float32, got {describe_tensor(x)}")


def split_heads(x: Any, name: str, head_size: int) -> Any:
    """View (nnz, heads * head_size) as (nnz, heads, head_size)."""
    require_shape(x, name, ("nnz", "heads * head_size"))
    if head_size < 1 or x.shape[1] % head_size:
        got = describe_tensor(x)
        raise ValueError(f"{name}: expected a multiple of head_size {head_size}, got {got}")
    return x.unflatten(1, (-1, head_size))
