"""How threads are laid over rows: vector width, lanes a row, block and grid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_BLOCK = 128
_SMALLEST_BLOCK_ALONE = 8  # where each thread takes a row
_BLOCKS_PER_WORKER = 4
_MAX_LANES = 512
_UNROLL = 4  # words in flight a thread, as in kernels_src/store.cu


@dataclass(frozen=True)
class Geometry:
    """`lanes` threads (a power of two) share a row; a block holds whole groups of lanes."""

    lanes: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]

    @property
    def lane_shift(self) -> int:
        return self.lanes.bit_length() - 1


def widest(numbers: Iterable[int]) -> int:
    """Return the widest word (16, 8, 4, 2 or 1 bytes) that divides all of the numbers.

    >>> widest([256, 24, 0])
    8
    """
    together = 16
    for n in numbers:
        together |= n
    return together & -together


def spread(
    num_rows: int,
    words: int,
    multiprocessors: int,
    *,
    warp_lanes: int = 32,
    whole_warps: bool = False,
    most_lanes: int = _MAX_LANES,
) -> Geometry:
    """Lay threads over `num_rows` rows of `words` words.

    Where threads do not step together (`warp_lanes` 1) each takes a row. Else a row gets a lane a
    word up to one warp, so that a warp's accesses are whole sectors, then more
    warps so that no thread has more than four words in flight at a time; and as many as it can use
    when there are too few rows to occupy the device. Small work goes in small blocks, so that it
    spreads over all multiprocessors; where threads do not step together, in blocks of a few rows,
    for several workers to share what is left once one has found that it takes long.
    """
    lanes = min(_power_of_two(words), warp_lanes)
    most_lanes = 1 if warp_lanes == 1 else most_lanes
    while lanes < most_lanes and lanes * _UNROLL < words:
        lanes *= 2
    while lanes < min(most_lanes, words) and num_rows * lanes < multiprocessors * 2 * _BLOCK:
        lanes *= 2
    alone = warp_lanes == 1 and not whole_warps
    smallest = max(lanes, _SMALLEST_BLOCK_ALONE if alone else 32)
    wanted = multiprocessors * (_BLOCKS_PER_WORKER if alone else 1)
    block = max(smallest, _BLOCK)
    while block > smallest and num_rows * lanes < wanted * block:
        block //= 2
    rows_a_block = block // lanes
    return Geometry(lanes, (-(-num_rows // rows_a_block), 1, 1), (block, 1, 1))


def require_countable(num_rows: int, name: str) -> None:
    """Refuse more rows than a kernel counts in an int, with a block to spare."""
    most = 2**31 - 1024
    if num_rows > most:
        raise ValueError(
            f"{name}: expected at most {most} rows (tokens times heads), got {num_rows}"
        )


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
