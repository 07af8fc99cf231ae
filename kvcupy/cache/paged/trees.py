"""Token trees: drafts that branch, each node with its parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...ops import checks

Ints = np.ndarray[Any, Any]


def check_nodes(parents: Any, pending: int, count: int, name: str) -> list[int]:
    """Return the parents of a step's nodes as a list of ints.

    Parameters
    ----------
    parents : of the nodes `pending` to `pending + count` - 1 of a tree
    name : of the argument, for errors

    Raises
    ------
    TypeError, ValueError : they are not `count`, or one is no root and no earlier node
    """
    try:
        given = parents.tolist() if isinstance(parents, np.ndarray) else list(parents)
    except TypeError:
        raise TypeError(f"{name}: expected a list of parents, got {parents!r}") from None
    if len(given) != count:
        raise ValueError(f"{name}: expected {count} parents, one an appended token, got {given}")
    for node, parent in enumerate(given, pending):
        checks.require_int(parent, name)
        if not -1 <= parent < node:
            raise ValueError(
                f"{name}: expected for node {node} a parent from -1 to {node - 1}, got {parent}"
            )
    return [int(parent) for parent in given]


def depths(parents: Sequence[int]) -> list[int]:
    """Return how far below its root each node is.

    >>> depths([-1, 0, 0, 2, -1])
    [0, 1, 1, 2, 0]
    """
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def mask(parents: Sequence[int]) -> Ints:
    """Return which nodes each node sees: itself and its ancestors, bool (nodes, nodes).

    >>> mask([-1, 0, 0]).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    sees = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees


def path(parents: Sequence[int], leaf: int) -> list[int]:
    """Return the nodes from the root to a leaf; none for leaf -1.

    >>> path([-1, 0, 0, 2], 3)
    [0, 2, 3]
    """
    nodes = []
    while leaf >= 0:
        nodes.append(leaf)
        leaf = parents[leaf]
    return nodes[::-1]
