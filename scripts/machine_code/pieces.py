"""The pieces of keys that blocks of a planned attention launch take, and how evenly they end."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcupy.devices.host import HostDevice
from kvcupy.ops.attention_call import PARAMS, PIECE
from kvcupy.ops.attention_kernels import schedule_specialisation

if TYPE_CHECKING:
    from .bounds import Planned


def tiles_of(launch: Planned) -> int:
    """Return how many tiles a KV head has in an attention launch."""
    (record,) = np.frombuffer(launch.params, PARAMS)
    return int(record["num_tiles"] if record["pieces"] else launch.grid[1])


def heads_of(launch: Planned) -> int:
    """Return the KV heads of an attention launch."""
    (record,) = np.frombuffer(launch.params, PARAMS)
    return int(record["num_heads"]) // int(record["group"])


def pieces_of(
    launch: Planned, seq_lens: Sequence[int], query_lens: Sequence[int] | None = None
) -> list[float]:
    """Return the keys of each piece of a KV head, in the order of blocks; empty without pieces.

    Parameters
    ----------
    launch : of an attention kernel
    seq_lens, query_lens : of its sequences; None: one new token each

    Notes
    -----
    `attention_schedule` runs on this processor, with the Params of the launch, whose attention is
    causal and has no window.
    """
    params = np.frombuffer(launch.params, PARAMS).copy()
    if not params["pieces"][0]:
        return []
    device = HostDevice()
    dtype = {4: np.int32, 8: np.int64}[int(params["length_index_bytes"][0])]
    arrays = {
        "seq_lens": np.array(seq_lens, dtype),
        "pieces": np.zeros(int(params["num_pieces"][0]), PIECE),
        "split_tiles": np.zeros((int(params["num_split_tiles"][0]), 4), np.int32),
    }
    if query_lens is not None:
        arrays["cu_query_lens"] = np.cumsum([0, *query_lens], dtype=np.int32)
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
    rows, group = int(params["tile_rows"][0]), int(params["group"][0])
    keys = []
    for sequence, first_row, _, parts, _ in arrays["pieces"].tolist():
        if sequence < 0:
            continue
        new = 1 if query_lens is None else query_lens[sequence]
        last_row = min(first_row + rows, new * group) - 1
        keys.append((seq_lens[sequence] - new + last_row // group + 1) / parts)
    return keys


def busy_share(pieces: Sequence[float], places: int) -> float:
    """Return the share of the time at which places for blocks are taken, until the last block ends.

    Each block begins where another has ended, in order, and takes time as it has keys.

    Examples
    --------
    >>> busy_share([2, 1, 1], 2), busy_share([1, 1, 2], 2)
    (1.0, 0.6666666666666666)
    """
    ends = [0.0] * max(1, places)
    for keys in pieces:
        heapq.heapreplace(ends, ends[0] + keys)
    longest = max(ends)
    return sum(pieces) / (longest * len(ends)) if longest else 1.0
