"""What `attend` is told of each sequence beside its length, checked: holes, trees, positions."""

from __future__ import annotations

from typing import Any

from ..arrays import ArrayView, describe
from . import checks


def check_sequences(given: dict[str, Any], num_sequences: int) -> None:
    """Check the arrays with one entry a sequence, and that those are together which belong so."""
    for name in ("hole_starts", "holes", "key_starts", "tree_lens"):
        counts = given.get(name)
        if counts is None:
            continue
        if counts.format != "int32":
            raise TypeError(f"{name}: expected int32, got {describe(counts)}")
        if counts.shape != (num_sequences,):
            raise ValueError(
                f"{name}: expected ({num_sequences},) like block_table, got {describe(counts)}"
            )
    for name, other in (("hole_starts", "holes"), ("holes", "hole_starts")):
        if name in given and other not in given:
            raise ValueError(f"{other}: expected an array beside {name}, got None")
    if "tree_lens" in given and "tree_mask" not in given:
        raise ValueError("tree_lens: expected None without tree_mask, got an array")


def check_rope(given: dict[str, Any], rotary_start: int, width: int, num_sequences: int) -> None:
    """Check the rope table against keys of `width` elements, and the positions in it."""
    table, tail = given.get("rope_table"), given.get("tail_positions")
    if table is not None:
        _check_table(table, rotary_start, width)
    if tail is None:
        return
    for other in ("rope_table", "tree_mask"):
        if other not in given:
            raise ValueError(f"tail_positions: expected None without {other}, got an array")
    if tail.format != "int32":
        raise TypeError(f"tail_positions: expected int32, got {describe(tail)}")
    if tail.ndim != 2 or tail.shape[0] != num_sequences:
        raise ValueError(
            f"tail_positions: expected ({num_sequences}, max(tree_lens)), got {describe(tail)}"
        )


def _check_table(table: ArrayView, rotary_start: int, width: int) -> None:
    if table.format != "fp32":
        raise TypeError(f"rope_table: expected float32, got {describe(table)}")
    if table.ndim != 2 or table.shape[0] < 1 or table.shape[1] < 2 or table.shape[1] % 2:
        raise ValueError(
            f"rope_table: expected (max_positions, rotary_dim), not empty and rotary_dim even, "
            f"got {describe(table)}"
        )
    checks.require_contiguous(table, "rope_table")
    if rotary_start + table.shape[1] > width:
        raise ValueError(
            f"rotary_start: expected at most {width - table.shape[1]}, for {table.shape[1]} of the "
            f"{width} elements of k_cache turn, got {rotary_start}"
        )
