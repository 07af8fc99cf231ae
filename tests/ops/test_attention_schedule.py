"""The pieces that blocks of attention take, against a schedule in NumPy and the times of a GPU."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from schedule_checks import Batch, check_attention_schedule

from kvcupy.devices.host import HostDevice


@pytest.mark.parametrize("lanes", [1, 32])
def test_each_tile_has_its_pieces_once(lanes):
    check_attention_schedule(HostDevice(), lanes)


def span(pieces, running):
    """Return the time of blocks that begin in order, each when another has ended."""
    ends = [0.0] * running
    for keys in pieces:
        heapq.heapreplace(ends, ends[0] + keys)
    return max(ends)


@pytest.mark.parametrize(
    ("lens", "most"),
    [
        ([131072, *[2048] * 63], 1.08), ([8192] * 64, 1.04), ([4096] * 8, 1.04),
        ([8192] * 48, 1.04), ([131072], 1.06), ([32768, *[1024] * 256], 1.15),
        ([1024 * n for n in range(1, 17)], 1.25),
    ],
)  # fmt: skip
def test_blocks_end_together(lens, most):
    """Slots of an H100 for each of 8 heads. Without pieces, the first batch would take 16 times."""
    batch = Batch(lens)
    keys = {number: keys for number, _, _, keys in batch.tiles()}
    pieces, _ = batch.schedule(HostDevice(), 1)
    times = [keys[tile] / parts for tile, _, parts, _ in pieces if tile[0] >= 0]
    assert span(times, batch.running) <= most * sum(times) / batch.running


def test_bounds_hold_for_any_lengths():
    """The bounds come from shapes; pieces and states of the worst lengths fit them."""
    rng = np.random.default_rng(9)
    for _ in range(300):
        sequences, table = int(rng.integers(1, 50)), int(rng.integers(257, 4000))
        choices = ([0, 1, table], [table], [257, table // 2], range(table + 1))
        lens = rng.choice(list(choices[rng.integers(4)]), sequences).tolist()
        batch = Batch(
            lens, table=table, running=int(rng.integers(1, 70)), rows=int(rng.choice([16, 64])),
            group=int(rng.choice([1, 8, 100])),
        )  # fmt: skip
        parts, bounds = batch.expected().values(), batch.bounds
        split = [each for each in parts if each > 1]
        assert sum(parts) <= bounds.num_pieces
        assert len(split) <= bounds.num_split_tiles
        assert sum(split) <= bounds.num_states
        assert max(parts) <= bounds.most_parts
