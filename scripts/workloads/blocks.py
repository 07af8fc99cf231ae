"""The contents of a block, determined by its hash alone, and their comparison.

A word of a block is a counter-based random number of (hash, layer, K or V, position): no two
blocks, layers or parts agree except by chance, nothing is stored, and any part of any block can be
computed at any time, on any device, by a few array expressions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

WORD = 8  # bytes
_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, odd
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def mix(words: Any) -> Any:
    """Mix 64-bit words in place, bijectively (the finalizer of SplitMix64), and return them."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        words ^= words >> shift
        if factor is not None:
            words *= factor
    return words


def hashes_of(ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return distinct 64-bit hashes of the block numbers of a trace."""
    return mix(np.array(ids, np.uint64) + _STEP)


class Contents:
    """Writes the contents of a pool's pages, and counts the bytes that differ from them.

    Parameters
    ----------
    pool : on a device, "layer_first", so that a page of K of a layer is contiguous
    """

    def __init__(self, pool: Any) -> None:
        self.device = pool.device
        # For K and V, for each layer: words (pages, words of a page).
        self._words = [
            [part[:, layer].reshape(pool.num_pages, -1).view(np.uint64) for layer in range(layers)]
            for part in (pool.device.carrier(view) for view in pool.parts)
            for layers in [pool.num_layers]
        ]
        parts = np.arange(1, 1 + len(pool.parts) * pool.num_layers, dtype=np.uint64)
        self._salts = mix(parts * _STEP).reshape(len(pool.parts), pool.num_layers)
        most = max(layers[0].shape[1] for layers in self._words)
        self._counter = self.device.asarray(np.arange(1, 1 + most, dtype=np.uint64) * _STEP)

    def words(self, part: int, layer: int, hashes: Any) -> Any:
        """Return the contents of a layer of blocks: uint64 (blocks, words per page).

        Parameters
        ----------
        part : 0 for K, 1 for V
        hashes : uint64 (blocks,) on the device
        """
        seeds = mix(hashes ^ self._salts[part, layer])
        count = self._words[part][layer].shape[1]
        return mix(seeds[:, None] + self._counter[None, :count])

    def write(self, layer: int, pages: Any, hashes: Any) -> None:
        """Write a layer of blocks to their pages."""
        for part, layers in enumerate(self._words):
            layers[layer][pages] = self.words(part, layer, hashes)

    def wrong_bytes(self, layer: int, pages: Any, hashes: Any) -> Any:
        """Return how many bytes of a layer of blocks are wrong, as a number on the device."""
        wrong: Any = 0
        for part, layers in enumerate(self._words):
            got, want = layers[layer][pages], self.words(part, layer, hashes)
            wrong += np.count_nonzero(got.view(np.uint8) != want.view(np.uint8))
        return wrong

    def first_wrong(self, pages: Any, hashes: Any) -> str:
        """Name the first wrong byte of blocks, as they are now."""
        for layer in range(self._salts.shape[1]):
            for part, layers in enumerate(self._words):
                got = self.device.to_numpy(layers[layer][pages]).view(np.uint8)
                want = self.device.to_numpy(self.words(part, layer, hashes)).view(np.uint8)
                if (different := np.argwhere(got != want)).size:
                    block, byte = map(int, different[0])
                    return (
                        f"layer {layer}, {'KV'[part]}, block {block}, byte {byte}: "
                        f"got {got[block, byte]}, want {want[block, byte]}"
                    )
        return "right when read again"
