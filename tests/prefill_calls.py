"""Launches of the attention kernels on tensor cores, Params filled by hand, and float64 sums."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from helpers import DTYPE, address, to_device

from kvcupy.config import shared_bytes
from kvcupy.ops import attention_kernels as kernels
from kvcupy.ops.attention_call import FORMAT_NUMBERS, PARAMS, PIECE
from kvcupy.ops.attention_choice import grid_of

LOG2_E = float(np.log2(np.e))


@dataclass
class Call:
    """One launch: ragged sequences over pages in any order, unused slots NaN."""

    fmt: str = "fp16"
    seq_lens: tuple[int, ...] = (70, 5, 131)
    query_lens: tuple[int, ...] = (70, 3, 40)
    heads: tuple[int, int] = (2, 1)
    widths: tuple[int, int] = (64, 64)
    page_size: int = 16
    causal: bool = True
    window: int = 0
    sink_keys: int = 0
    soft_cap: float = 0.0
    learned: bool = False
    tree: bool = False
    splits: int = 1
    merges: bool = False  # the splits by itself
    sm_scale: float | None = None
    padding: int = 0  # rows of the query that belong to no sequence
    missing: tuple[tuple[int, int], ...] = ()  # (sequence, entry) of the table: `wrong_page`
    wrong_page: int = -1
    index: str = "int32"
    # Or "prefill of 128 rows", "decode", "decode of 8 rows", "latent", "heads": on tensor cores.
    kernel: str = "prefill"
    arch: str = "sm_86"  # whose shared memory "heads" makes use of
    seed: int = 0

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        num_heads, num_kv_heads = self.heads
        tokens = sum(self.query_lens)
        pages_of = [-(-max(n, 0) // self.page_size) for n in self.seq_lens]
        num_pages = sum(pages_of) + 2
        order = iter(rng.permutation(num_pages))
        self.table = np.full((len(self.seq_lens), max(pages_of) + 1), 2147480000, self.index)
        kind = DTYPE[self.fmt]

        def values(*shape):
            return rng.standard_normal(shape).astype(kind)

        caches = [values(num_pages, self.page_size, num_kv_heads, n) for n in self.widths]
        used = np.zeros((num_pages, self.page_size), bool)
        for b, (length, count) in enumerate(zip(self.seq_lens, pages_of, strict=True)):
            for i, page in enumerate(itertools.islice(order, count)):
                self.table[b, i] = page
                used[page, : max(0, min(length - i * self.page_size, self.page_size))] = True
        for b, i in self.missing:
            used[self.table[b, i]] = False
            self.table[b, i] = self.wrong_page
        self.query = values(tokens + self.padding, num_heads, self.widths[0])
        self.query[tokens:] = np.nan
        self.logits = rng.standard_normal(num_heads).astype(np.float32)
        self.mask = np.zeros((tokens, max(self.query_lens)), bool)
        start = 0
        for n in self.query_lens:  # each new token sees itself and some before it
            own = np.tril(rng.random((n, n)) < 0.5) | np.eye(n, dtype=bool)
            if n > 3:
                own[:, 1] = False  # and there is one that none sees
            self.mask[start : start + n, :n] = own
            start += n
        if self.tree:
            for b, (n, new) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
                if new > 3:
                    key = n - new + 1
                    used[self.table[b, key // self.page_size], key % self.page_size] = False
        for cache in caches:
            cache[~used] = np.nan
        self.k_cache, self.v_cache = caches

    @property
    def scale(self):
        return self.sm_scale if self.sm_scale is not None else self.widths[0] ** -0.5

    def visible(self, position, first_new, row, length):
        """Return which keys of its sequence a query sees; `row` is its row of the mask."""
        keys = np.arange(length)
        seen = np.ones(length, bool)
        if self.tree:
            new = keys >= first_new
            seen[new] = self.mask[row, keys[new] - first_new]
            if self.window:
                old = ~new
                seen[old] = (keys[old] > position - self.window) | (keys[old] < self.sink_keys)
            return seen & (position >= 0)
        if self.causal:
            seen = keys <= position
        if self.window:
            seen &= (keys > position - self.window) | (keys < self.sink_keys)
        return seen & (position >= 0 or not (self.causal or self.window))

    def expected(self):
        """Return (out, lse) in float64, one row at a time."""
        num_heads, num_kv_heads = self.heads
        out = np.zeros((len(self.query), num_heads, self.widths[1]))
        lse = np.full(out.shape[:2], -np.inf)
        start = 0
        for b, (length, count) in enumerate(zip(self.seq_lens, self.query_lens, strict=True)):
            keys = np.arange(max(length, 0))
            pages = self.table[b, keys // self.page_size]
            there = (pages >= 0) & (pages < len(self.k_cache))
            at = np.where(there, pages, 0), keys % self.page_size
            k, v = (c[at].astype(np.float64) for c in (self.k_cache, self.v_cache))
            for i in range(count):
                position = length - count + i
                seen = self.visible(position, length - count, start + i, len(keys)) & there
                for h in range(num_heads):
                    kv_head = h // (num_heads // num_kv_heads)
                    query = self.query[start + i, h].astype(np.float64)
                    score = k[seen, kv_head] @ query * self.scale
                    if self.soft_cap:
                        score = self.soft_cap * np.tanh(score / self.soft_cap)
                    every = np.append(score, self.logits[h]) if self.learned else score
                    if not every.size:
                        continue
                    top = every.max()
                    weights = np.exp(every - top)
                    lse[start + i, h] = top + np.log(weights.sum())
                    out[start + i, h] = weights[: len(score)] @ v[seen, kv_head] / weights.sum()
            start += count
        return out, lse

    def run(self, device):
        """Launch, and return (out, lse), merged if there are several splits."""
        num_heads, num_kv_heads = self.heads
        rows = len(self.query)
        if self.kernel in ("decode", "decode of 8 rows"):
            tile_rows, threads = 16 if self.kernel == "decode" else 8, kernels.DECODE_MMA_THREADS
            chosen = kernels.decode_mma_specialisation(self.fmt, *self.widths, rows=tile_rows)
            smem_bytes = kernels.decode_mma_smem_bytes(chosen)
        elif self.kernel == "latent":
            chosen = kernels.latent_specialisation(self.fmt)
            tile_rows, threads = kernels.DECODE_MMA_ROWS, kernels.DECODE_MMA_THREADS
            smem_bytes = kernels.latent_smem_bytes(chosen)
        elif self.kernel == "heads":
            chosen = kernels.heads_specialisation(self.fmt, shared_bytes(self.arch))
            tile_rows, threads = kernels.HEADS_ROWS, kernels.HEADS_THREADS
            smem_bytes = kernels.heads_smem_bytes(chosen)
        else:
            tile_rows = 128 if self.kernel == "prefill of 128 rows" else 64
            chosen = kernels.prefill_specialisation(self.fmt, *self.widths, rows=tile_rows)
            threads = kernels.PREFILL_THREADS
            smem_bytes = kernels.prefill_smem_bytes(chosen)
        arrays = {
            "query": self.query, "k_cache": self.k_cache, "v_cache": self.v_cache,
            "block_table": self.table, "seq_lens": np.array(self.seq_lens, self.index),
            "cu_query_lens": np.cumsum((0, *self.query_lens), dtype=np.int32),
            "out": np.full((rows, num_heads, self.widths[1]), 7, DTYPE[self.fmt]),
            "lse": np.full((rows, num_heads), 7, np.float32),
        }  # fmt: skip
        if self.learned:
            arrays["sinks"] = self.logits
        if self.tree:
            arrays["tree_mask"] = self.mask
        group = num_heads // num_kv_heads
        tiles = rows * group // tile_rows + len(self.seq_lens)
        if self.splits > 1:
            arrays["pieces"] = self._pieces(tile_rows, group)
            shape = (tiles * self.splits, num_kv_heads, tile_rows)
            arrays["partial_out"] = np.full((*shape, self.widths[1]), 7, np.float32)
            arrays["partial_lse"] = np.full(shape, 7, np.float32)
            if self.merges:
                arrays["counters"] = np.zeros(shape[:2], np.uint32)
        placed = {name: to_device(device, array) for name, array in arrays.items()}
        params = np.zeros((), PARAMS)
        for name, array in placed.items():
            params[name] = address(array)
        params["faults"] = device.fault_pointer
        for side, cache, width in zip("kv", (self.k_cache, self.v_cache), self.widths, strict=True):
            params[side]["cache"] = cache.strides[:3]
            params[side]["scale"], params[side]["width"] = 1, width
        for name, array in (("query", self.query), ("out", arrays["out"]), ("lse", arrays["lse"])):
            params[f"{name}_token_bytes"], params[f"{name}_head_bytes"] = array.strides[:2]
        params["table_row_bytes"], params["table_entry_bytes"] = self.table.strides
        params["seq_len_bytes"] = self.table.itemsize
        params["table_index_bytes"] = params["length_index_bytes"] = self.table.itemsize
        params["sink_bytes"] = 4
        params["mask_row_bytes"], params["mask_column_bytes"] = self.mask.strides
        params["mask_columns"] = self.mask.shape[1]
        params["num_pages"], params["max_pages"] = len(self.k_cache), self.table.shape[1]
        params["window"], params["sink_keys"] = self.window, self.sink_keys
        params["table_operation"], params["length_operation"] = 77, 78
        params["starts_operation"] = 79
        params["score_scale"] = self.scale * (1 if self.soft_cap else LOG2_E)
        params["soft_cap"], params["cap_scale"] = self.soft_cap, self.soft_cap * LOG2_E
        params["inverse_cap"] = 1 / self.soft_cap if self.soft_cap else 0
        params["num_tokens"], params["num_sequences"] = rows, len(self.seq_lens)
        params["state_rows"], params["num_heads"] = tile_rows, num_heads
        params["query_format"] = params["out_format"] = FORMAT_NUMBERS[self.fmt]
        params["group"], params["causal"] = group, self.causal
        shift = self.page_size.bit_length() - 1
        params["page_size"] = self.page_size
        params["page_shift"] = shift if 1 << shift == self.page_size else -1
        blocks = len(arrays["pieces"]) if self.splits > 1 else tiles
        grid = grid_of(chosen, blocks, num_kv_heads)
        device.launch(
            device.load(chosen), grid, (threads, 1, 1), smem_bytes, params.tobytes(),
            device.as_stream(None), tuple(placed.values()),
        )  # fmt: skip
        device.synchronize()
        after = {
            name: np.asarray(device.to_numpy(array)).astype(np.float64)
            for name, array in placed.items()
            if name in ("out", "lse", "partial_out", "partial_lse", "counters")
        }
        out, lse = after["out"], after["lse"]
        used = sum(self.query_lens)
        if self.splits == 1 or self.merges:
            assert not np.any(after.get("counters", 0)), "the next layer would count on"
            assert (out[used:] == 7).all() and (lse[used:] == 7).all(), "rows of no sequence"
            return out[:used], lse[:used]
        assert (out == 7).all() and (lse == 7).all(), "written though there are splits"
        states, rows = self._states_of_tokens(tile_rows, group)
        outs, lses = (
            # (splits, tokens, group, kv_heads, ...), and heads of a group are neighbours
            np.swapaxes(after[name][states, :, rows], 2, 3).reshape(
                *states.shape[:2], num_heads, -1
            )
            for name in ("partial_out", "partial_lse")
        )
        for name in ("partial_out", "partial_lse"):
            after[name][states, :, rows] = 7
            assert (after[name] == 7).all(), "rows of no sequence"
        return merged(outs, lses[..., 0])

    def _pieces(self, tile_rows, group):
        """Cut each tile into as many pieces, in any order."""
        pieces, start = [], 0
        for sequence, new in enumerate(self.query_lens):
            first = start * group // tile_rows + sequence
            for row in range(0, new * group, tile_rows):
                tile = first + row // tile_rows
                pieces += [
                    (sequence, row, part, self.splits, tile * self.splits + part)
                    for part in range(self.splits)
                ]
            start += new
        return np.random.default_rng(self.seed).permutation(np.array(pieces, PIECE))

    def _states_of_tokens(self, tile_rows, group):
        """Return where tokens are in the states: (splits, tokens, group) and (1, tokens, group)."""
        states, rows, start = [], [], 0
        for sequence, new in enumerate(self.query_lens):
            packed = np.arange(new * group).reshape(new, group)
            tiles = start * group // tile_rows + sequence + packed // tile_rows
            states.append(tiles * self.splits + np.arange(self.splits)[:, None, None])
            rows.append(packed % tile_rows)
            start += new
        return np.concatenate(states, 1), np.concatenate(rows)[None]

    def check(self, device):
        out, lse = self.run(device)
        used = sum(self.query_lens)
        want_out, want_lse = (w[:used] for w in self.expected())
        # A weight is rounded to the format; the output too.
        near = {"fp16": 2.0**-10, "bf16": 2.0**-7}[self.fmt]
        value = np.nanmax(np.abs(self.v_cache.astype(np.float64)))
        shown = f"seed {self.seed}, order {getattr(device, 'thread_order_seed', None)}"
        np.testing.assert_allclose(out, want_out, rtol=near, atol=near * value, err_msg=shown)
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-4, err_msg=shown)


def merged(outs, lses):
    """Merge the states of pieces in float64."""
    with np.errstate(divide="ignore", invalid="ignore"):
        top = lses.max(0)
        weights = np.where(np.isinf(lses), 0.0, np.exp(lses - top))
        total = weights.sum(0)
        out = (weights[..., None] * outs).sum(0) / total[..., None]
        return np.where(total[..., None] > 0, out, 0.0), top + np.log(total)
