"""The pieces of keys that blocks of a planned attention launch take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcupy.devices.host import HostDevice
from kvcupy.ops.attention_call import PARAMS, PIECE
from kvcupy.ops.attention_kernels import schedule_specialisation

from .planned import Planned


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
) -> list[tuple[float, int]]:
    """Return keys of the pieces of a KV head, and of how many its tile has, in the order of blocks.

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
            (visible(i, first), 1)
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
        (visible(sequence, first_row) / parts, parts)
        for sequence, first_row, _, parts, _ in arrays["pieces"].tolist()
        if sequence >= 0
    ]
