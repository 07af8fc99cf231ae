"""Adapters to other libraries. Each module imports its library, and is imported by who asks.

`torch`, `transformers` and `jax` adapt kvcupy to those. `flashinfer`, `vllm`, `sglang` and `tvm`
have the names and signatures of those projects, whose packages they do not need, over kvcupy's
operations. What those check of their arguments stands here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def describe_tensor(x: Any) -> str:
    """Return shape and dtype of a tensor for an error, or the type of what is none."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        return type(x).__name__
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def require_shape(x: Any, name: str, shape: tuple[int | str, ...]) -> None:
    """Raise unless a tensor has a shape, in which a name stands for any length.

    Raises
    ------
    TypeError : `x` is not an array
    ValueError : it has another shape
    """
    expected = f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise TypeError(f"{name}: expected a tensor {expected}, got {type(x).__name__}")
    if len(x.shape) != len(shape) or any(
        isinstance(n, int) and n != length for n, length in zip(shape, x.shape, strict=True)
    ):
        raise ValueError(f"{name}: expected {expected}, got {describe_tensor(x)}")


def require_dtype(x: Any, name: str, *dtypes: Any) -> None:
    """Raise TypeError unless a tensor has one of some dtypes."""
    if x.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected {expected}, got {describe_tensor(x)}")


def not_offered(name: str, reason: str) -> Callable[..., Any]:
    """Return what raises NotImplementedError with a reason when it is called.

    >>> not_offered("swap", "there is one kernel for both")(1)
    Traceback (most recent call last):
    NotImplementedError: swap: there is one kernel for both
    """

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{name}: {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Raise NotImplementedError: {reason}."
    return refuse
