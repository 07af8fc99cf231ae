"""Drafts for speculative decoding: trees of tokens that followed the same words before.

    history  ... a b c  x y ...  a b c  x z ...  a b c        a b c was followed by x y and x z
    tree     c -- x -- y                                      node 0 is the last token, which is
                   `-- z                                      certain; the others are guesses

The model runs all nodes in one step. Its choice after each node tells which guesses were right: the
longest path of those is kept, and one more token is gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LONGEST_MATCH = 3  # tokens at the end of a history to search for in it


@dataclass(frozen=True)
class Tree:
    """Tokens and the parent of each, which comes before it; node 0 alone has none (-1)."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


def draft_tree(
    history: np.ndarray[Any, Any], *, branches: int, depth: int, nodes: int
) -> Tree | None:
    """Guess what follows a history; None if its end has not occurred before.

    Parameters
    ----------
    history : tokens (T,), the last of which becomes node 0
    branches : continuations to merge, the longest match first, then the latest
    depth : tokens of each, at most
    nodes : of the tree, at most
    """
    tokens, parents = [int(history[-1])], [-1]
    if depth < 1:
        return None
    children: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    for guess in _continuations(history, branches, depth):
        node = 0
        for token in guess:
            child = children.get((node, token))
            if child is None:
                if len(tokens) == nodes:
                    break
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    return Tree(tuple(tokens), tuple(parents)) if len(tokens) > 1 else None


def _continuations(
    history: np.ndarray[Any, Any], branches: int, depth: int
) -> list[tuple[int, ...]]:
    """Return what followed earlier occurrences of the history's end, the longest match first."""
    continuations: dict[tuple[int, ...], None] = {}
    for length in range(min(LONGEST_MATCH, len(history) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(history[:-1], length)
        starts = np.flatnonzero((windows == history[-length:]).all(axis=1)) + length
        for start in starts[::-1].tolist():
            if len(continuations) == branches:
                return list(continuations)
            continuations.setdefault(tuple(history[start : start + depth].tolist()))
    return list(continuations)


def longest_match(tree: Tree, following: Sequence[int]) -> list[int]:
    """Return the path from node 0 on which each node is the model's choice after its parent.

    >>> tree = Tree(tokens=(7, 1, 2, 3), parents=(-1, 0, 1, 0))
    >>> longest_match(tree, [1, 2, 9, 9])
    [0, 1, 2]
    """
    path = [0]
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if parent == path[-1] and tree.tokens[node] == following[parent]:
            path.append(node)
    return path
