"""What kvcupy's rotations are measured against: array expressions, and torch as models use it.

torch rotates as transformers does, in the model's dtype with one rounding per operation. The array
expressions, for libraries without bf16, work on its bits and compute in float32. For both, cos and
sin of the tokens were looked up beforehand, as a model does once for all of its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

TORCH_ROUNDINGS = 3  # of cos, of a product, of the sum
NORM_ROUNDINGS = 2  # of the normalised value, and of its product with the weight

Rotate = Callable[[Any, str], Any]  # rows, and "query" or "key"
Write = Callable[[list[Any], Any, list[Any]], None]  # targets, slots, parts


def rotate_and_write(
    rotate: Rotate, write: Write, targets: list[Any], slots: Any, parts: dict[str, Any]
) -> tuple[Any, Any]:
    """Rotate query and key, write key and value if there are targets, return query and key."""
    query, key = rotate(parts["query"], "query"), rotate(parts["key"], "key")
    if targets:
        write(targets, slots, [key, parts["value"]])
    return query, key


def rotation_of_bits(table: Any, interleaved: bool) -> Rotate:
    """Return the rotation of bf16 bits by rows `[cos | sin]` (T, D), in NumPy or CuPy."""
    half = table.shape[1] // 2

    def rotate(bits: Any, name: str) -> Any:
        shape = (len(bits), *(1 for _ in bits.shape[2:]), half)
        cosine, sine = table[:, :half].reshape(shape), table[:, half:].reshape(shape)
        rows = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
        first, second = _pairs_of(rows, interleaved)
        rotated = rows.copy()
        target_first, target_second = _pairs_of(rotated, interleaved)
        target_first[...] = first * cosine - second * sine
        target_second[...] = second * cosine + first * sine
        word = rotated.view(np.uint32)  # rounded to nearest even; there is no NaN
        odd = (word >> np.uint32(16)) & np.uint32(1)
        return ((word + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)

    return rotate


def rotation_by_torch(torch: Any, table: Any, interleaved: bool, norms: dict[str, Any]) -> Rotate:
    """Return the rotation of bf16 tensors by rows `[cos | sin]` (T, D), in bf16."""
    half = table.shape[1] // 2
    cosine, sine = table[:, :half].bfloat16(), table[:, half:].bfloat16()
    if not interleaved:
        cosine, sine = torch.cat((cosine, cosine), dim=-1), torch.cat((sine, sine), dim=-1)
    rotate_pairs = partial(_torch_pairs if interleaved else _torch_halves, torch)

    def rotate(x: Any, name: str) -> Any:
        if name in norms:
            x = _torch_norm(torch, x, norms[name])
        if x.ndim == 2:
            return rotate_pairs(x, cosine, sine)
        return rotate_pairs(x, cosine[:, None], sine[:, None])

    return rotate


def _pairs_of(rows: Any, interleaved: bool) -> tuple[Any, Any]:
    half = rows.shape[-1] // 2
    if interleaved:
        return rows[..., 0::2], rows[..., 1::2]
    return rows[..., :half], rows[..., half:]


def _torch_halves(torch: Any, x: Any, cosine: Any, sine: Any) -> Any:
    first, second = _pairs_of(x, False)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _torch_pairs(torch: Any, x: Any, cosine: Any, sine: Any) -> Any:
    first, second = _pairs_of(x, True)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.stack(rotated, dim=-1).flatten(-2)


def _torch_norm(torch: Any, x: Any, weight: Any) -> Any:
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + 1e-6)
    return weight * values.to(x.dtype)
