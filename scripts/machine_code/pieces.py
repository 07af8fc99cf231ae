"""The pieces of keys that blocks of a planned attention launch take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvcupy.devices.host import HostDevice
from kvcupy.ops.attention_call import PARAMS, PIECE
from kvcupy.ops.attention_kernels import schedule_specialisation

from .planned import Planned


class Piece(NamedTuple):
    """The keys of a tile that a block takes.

    Attributes
    ----------
    visible : keys of the tile
    part, parts : which of how many parts of them it takes
    """

    visible: int
    part: int = 0
    parts: int = 1

    @property
    def keys(self) -> float:
        return self.visible / self.parts

    def passes(self, step: int, steps_per_pass: int) -> int:
        """Return the passes of its loop. Parts begin at whole steps, as in `keys_of` of
        `attention.cuh`.

        >>> [Piece(8192, part, 72).passes(32, 1) for part in (0, 1)]
        [3, 4]
        """
        steps = -(-self.visible // step)
        own = steps * (self.part + 1) // self.parts - steps * self.part // self.parts
        return -(-own // steps_per_pass)


_ROWS_AT_ONCE = {
    "attention_decode_mma": 4, "attention_decode_latent": 1, "attention_decode_heads": 4,
}  # fmt: skip
"""Rows of a tile that the warps of a block finish at once, each of which is a pass of a loop."""


def row_passes(launch: Planned) -> int:
    """Return the passes of the loop in which a warp of an attention kernel finishes rows."""
    at_once = _ROWS_AT_ONCE.get(launch.specialisation.kernel.name)
    if at_once is None:
        return 1
    (record,) = np.frombuffer(launch.params, PARAMS)
    alone = _WHOLE_TILE_ROWS if record["cu_query_lens"] else int(record["group"])
    return -(-(int(record["state_rows"]) or min(alone, _WHOLE_TILE_ROWS)) // at_once)


_WHOLE_TILE_ROWS = 16  # of a decode kernel whose tiles no schedule cuts


def tiles_of(launch: Planned) -> int:
    """Return how many tiles a KV head has in an attention launch."""
    (record,) = np.frombuffer(launch.params, PARAMS)
    return int(record["num_tiles"] if record["pieces"] else launch.grid[1])


def heads_of(launch: Planned) -> int:
    """Return the KV heads of an attention launch."""
    (record,) = np.frombuffer(launch.params, PARAMS)
    return int(record["num_heads"]) // int(record["group"])


def merges_parts(launch: Planned) -> bool:
    """Return whether the last block of a tile merges what the others have left."""
    params = launch.specialisation.kernel.params
    if params is not PARAMS:
        return False
    (record,) = np.frombuffer(launch.params, PARAMS)
    return bool(record["counters"])


def without_merge(launch: Planned) -> bytes:
    """Return the Params of a launch as if another kernel merged its pieces."""
    if not merges_parts(launch):
        return launch.params
    record = np.frombuffer(launch.params, PARAMS).copy()
    record["counters"] = 0
    return record.tobytes()


def pieces_of(
    launch: Planned, seq_lens: Sequence[int], query_lens: Sequence[int] | None = None
) -> list[Piece]:
    """Return the pieces of a KV head, in the order of blocks.

    Parameters
    ----------
    launch : of an attention kernel
    seq_lens, query_lens : of its sequences; None: one new token each

    Notes
    -----
    `attention_schedule` runs on this processor, with the Params of the launch, whose attention is
    causal and has no window. Without it, a tile of each sequence is a block's.
    """
    params = np.frombuffer(launch.params, PARAMS).copy()
    group, has_pieces = int(params["group"][0]), bool(params["pieces"][0])
    rows = int(params["tile_rows"][0])
    if not has_pieces:  # a tile of each sequence, or at most one more than their packed rows take
        more = tiles_of(launch) - len(seq_lens)
        rows = int(params["num_tokens"][0]) * group // more if query_lens and more else group
    new = [1] * len(seq_lens) if query_lens is None else query_lens

    def visible(sequence: int, first_row: int) -> int:
        last_row = min(first_row + rows, new[sequence] * group) - 1
        return seq_lens[sequence] - new[sequence] + last_row // group + 1

    if not has_pieces:
        return [
            Piece(visible(i, first))
            for i in range(len(seq_lens)) for first in range(0, new[i] * group, rows)
        ]  # fmt: skip
    device = HostDevice()
    dtype = {4: np.int32, 8: np.int64}[int(params["length_index_bytes"][0])]
    arrays = {
        "seq_lens": np.array(seq_lens, dtype),
        "pieces": np.zeros(int(params["num_pieces"][0]), PIECE),
    }
    if query_lens is not None:
        arrays["cu_query_lens"] = np.cumsum([0, *query_lens], dtype=np.int32)
    params["split_tiles"] = params["counters"] = 0
    for name, array in arrays.items():
        params[name] = array.ctypes.data
    params["seq_len_bytes"] = arrays["seq_lens"].itemsize
    params["faults"] = device.fault_pointer
    stream = device.as_stream(None)
    device.launch(
        device.load(schedule_specialisation(1)), (1, 1, 1), (1, 1, 1), 0, params.tobytes(), stream,
        tuple(arrays.values()),
    )  # fmt: skip
    device.synchronize()
    return [
        Piece(visible(sequence, first_row), part, parts)
        for sequence, first_row, part, parts, _ in arrays["pieces"].tolist()
        if sequence >= 0
    ]
