"""The schedule of attention against one in NumPy."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
from helpers import address

from kvcupy.ops import attention_kernels as kernels
from kvcupy.ops.attention_call import PARAMS, PIECE
from kvcupy.ops.attention_choice import choose_schedule

PAGE = 16
HEADS = 8  # of the cache


class Batch:
    """Sequences of a call, the bounds of its shapes, and the pieces that the kernel gives them."""

    def __init__(self, lens, news=None, *, group=4, rows=16, table=None, running=66, width=128):
        self.lens, self.news = list(lens), news
        self.group, self.rows, self.running = group, rows, running
        self.table = -(-(max(1, *lens) if table is None else table) // PAGE) * PAGE
        self.tokens = sum(news) if news else len(lens)
        cache = SimpleNamespace(num_heads=HEADS, width=width)
        operand = SimpleNamespace(cache=cache, cache_format=SimpleNamespace(name="bf16"))
        call = SimpleNamespace(
            options=SimpleNamespace(window=0, batch_invariant=False), k=operand, v=operand,
            max_keys=self.table, num_tokens=self.tokens, num_sequences=len(lens), group=group,
            is_ragged=bool(news),
        )  # fmt: skip
        kernel = SimpleNamespace(kernel=kernels.DECODE_MMA)
        tiling = SimpleNamespace(rows=rows, blocks_per_sm=4, heads=1, specialisation=kernel)
        device = SimpleNamespace(sm_count=2 * running, warp_lanes=32)
        self.bounds = choose_schedule(device, call, tiling)

    def schedule(self, device, lanes):
        arrays = {
            "seq_lens": np.array(self.lens, np.int64),
            "pieces": np.full(self.bounds.num_pieces, 77, PIECE),
            "split_tiles": np.full((self.bounds.num_split_tiles, 4), 77, np.int32),
            "counters": np.full((self.bounds.num_states, HEADS), 77, np.uint32),
        }
        if self.news:
            arrays["cu_query_lens"] = np.cumsum([0, *self.news], dtype=np.int32)
        params = np.zeros((), PARAMS)
        for name, array in arrays.items():
            params[name] = address(array)
        for name, value in asdict(self.bounds).items():
            params[name] = value
        params["num_tokens"], params["num_sequences"] = self.tokens, len(self.lens)
        params["group"], params["num_heads"] = self.group, HEADS * self.group
        params["seq_len_bytes"] = params["length_index_bytes"] = 8
        params["page_size"], params["page_shift"] = PAGE, 4
        params["max_pages"], params["causal"] = self.table // PAGE, True
        params["starts_operation"] = -1
        params["faults"] = device.fault_pointer
        chosen = kernels.schedule_specialisation(lanes)
        device.launch(
            device.load(chosen), (1, 1, 1), (kernels.schedule_threads(lanes), 1, 1), 0,
            params.tobytes(), device.as_stream(None), tuple(arrays.values()),
        )  # fmt: skip
        device.synchronize()
        num_parts = np.count_nonzero(arrays["pieces"]["parts"] > 1)
        assert not arrays["counters"][:num_parts].any(), "blocks would count on"
        assert (arrays["counters"][num_parts:] == 77).all()
        pieces = [((sequence, row), *rest) for sequence, row, *rest in arrays["pieces"].tolist()]
        return pieces, arrays["split_tiles"].tolist()

    def tiles(self):
        """Return (sequence and row, first row of all, rows, keys) of each tile that has rows."""
        found, start = [], 0
        for sequence, length in enumerate(self.lens):
            new = self.news[sequence] if self.news else 1
            packed = new * self.group
            length = min(max(length, 0), self.table)
            for row in range(0, packed, self.rows):
                rows = min(self.rows, packed - row)
                last = self.lens[sequence] - new + (row + rows - 1) // self.group + 1
                keys = min(length, max(0, last))
                found.append(((sequence, row), start * self.group + row, rows, keys))
            start += new
        return found

    def expected(self):
        """Return the parts of each tile that has rows, by its number."""
        tiles = self.tiles()
        total = sum(keys for *_, keys in tiles)
        least = -(-total // self.running)
        if least > self.bounds.least_keys:
            pieces = self.running * self.bounds.most_rounds
            least = max(-(-total // pieces), self.bounds.least_keys)
        least = max(least, self.bounds.min_keys)
        tried = []
        for candidate in range(32):
            length = (least + least * (candidate % 8) // 8) << candidate // 8
            parts = {number: max(1, -(-keys // length)) for number, _, _, keys in tiles}
            longest = max([-(-keys // parts[number]) for number, _, _, keys in tiles], default=0)
            rounds = -(-sum(parts.values()) // self.running)
            time = min(rounds * longest, -(-total // self.running) + longest)
            tried.append((time + rounds * (self.bounds.least_keys // 4), candidate, parts))
        return min(tried, key=lambda each: each[:2])[2]


def batches():
    rng = np.random.default_rng(5)
    yield Batch([257])
    yield Batch([1, 0, 5000, 0])
    yield Batch([131072, *[2048] * 63])
    yield Batch([4096] * 8)
    yield Batch([300] * 1100, running=4)  # more tiles than threads
    yield Batch([*range(2100), 9000], running=9)  # than those whose keys are kept
    yield Batch([9000, 10], group=40)
    yield Batch([40_000, 3], table=1000)  # longer than the table
    yield Batch([-5, 2000, 700], running=1)
    yield Batch([3000, 700, 20], [1000, 1, 20], rows=64)
    yield Batch([5000, 0, 900], [0, 3, 60], rows=64, group=1, running=3)
    for _ in range(30):
        count = int(rng.integers(1, 40))
        lens = rng.lognormal(6, 2, count).astype(int).tolist()
        news = [int(rng.integers(0, min(n, 300) + 1)) for n in lens] if rng.random() < 0.5 else None
        yield Batch(
            lens, news, group=int(rng.integers(1, 20)), rows=int(rng.choice([4, 16, 64])),
            running=int(rng.integers(1, 140)), table=max(257, *lens),
        )  # fmt: skip


def check_attention_schedule(device, lanes=None):
    """Each tile has its pieces once, in the order that is meant, whatever the lengths are."""
    for batch in batches():
        want = batch.expected()
        first_rows = {number: (row, rows) for number, row, rows, _ in batch.tiles()}
        pieces, split_tiles = batch.schedule(device, lanes or device.warp_lanes)
        used = [piece for piece in pieces if piece[0][0] >= 0]
        assert sorted((tile, part) for tile, part, _, _ in used) == sorted(
            (tile, part) for tile, parts in want.items() for part in range(parts)
        )
        assert all(parts == want[tile] for tile, _, parts, _ in used)
        states = {tile: state - part for tile, part, parts, state in used if parts > 1}
        assert all(state == states[tile] + part for tile, part, parts, state in used if parts > 1)
        own = [state for _, _, parts, state in used if parts > 1]
        assert sorted(own) == list(range(len(own))), "states overlap"
        assert sorted(tile for tile in split_tiles if tile[1]) == sorted(
            [*first_rows[tile], want[tile], state] for tile, state in states.items()
        )
        whole = [tile for tile, _, parts, _ in used if parts == 1]
        assert whole == sorted(whole, reverse=True), "the last tiles come first"
        assert [parts > 1 for _, _, parts, _ in used] == sorted(
            (parts > 1 for _, _, parts, _ in used), reverse=True
        )
