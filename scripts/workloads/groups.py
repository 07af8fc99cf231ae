"""A server of random requests over a cache with groups: a window, full attention and a state.

    layer 0   windowed attention     rows as in `rows`
    layer 1   full attention         rows as in `rows`
    layer 2   recurrent              the chain of all tokens so far: any other token makes another

So the state says which tokens have passed. Forks, dropped tokens and failed steps return to what
all groups can restore, and the rest is run again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import kvcupy as kv

from .audit import Part, audit_states, audit_tiers, require
from .rows import LAYERS, MAX_POSITIONS, PAGE, Q_HEADS, WIDTH, Variant
from .server import (
    BUDGET,
    HOST_PAGES,
    KINDS,
    Run,
    Sequence,
    Server,
)

WINDOW, FULL, STATE = 0, 1, 2  # layers
WINDOW_TOKENS, CHECKPOINT_TOKENS = 11, 2 * PAGE
STATE_WORDS = 16  # as many bytes as a page
GROUPS = Variant("groups")


class GroupServer(Server):
    """Random traffic over a cache with groups; parameters as of `Server`."""

    kinds = tuple(kind for kind in KINDS if kind != "window")
    graphs = ()

    def __init__(self, device: Any, seed: int, folder: Path, **options: Any) -> None:
        self.wrong_states: list[str] = []
        super().__init__(device, GROUPS, seed, folder, **options)

    def _make_cache(self) -> Any:
        shape: dict[str, Any] = {"num_kv_heads": 1, "head_dim": WIDTH, "dtype": self.variant.dtype}
        return kv.PagedKVCache(
            num_q_heads=Q_HEADS, page_size=PAGE, num_tokens=6 * MAX_POSITIONS,
            max_batch_tokens=BUDGET, max_seq_len=MAX_POSITIONS, copy_stream=self.copies,
            device=self.device, groups=[
                kv.SlidingWindow(layers=[WINDOW], window=WINDOW_TOKENS, **shape),
                kv.FullAttention(layers=[FULL], **shape),
                kv.Recurrent(
                    layers=[STATE], state={"chain": ((STATE_WORDS,), np.uint64)},
                    checkpoint_tokens=CHECKPOINT_TOKENS,
                ),
            ],
        )  # fmt: skip

    def _make_tiers(self) -> Any:
        host_bytes = HOST_PAGES * self.cache.pools[0].page_bytes
        return kv.TieredCache(groups=self.cache, host_bytes=host_bytes, **self.lower(None))

    def _parts(self) -> list[Part]:
        return [
            Part(group.sequences, group.pool, None, self.tiers._tiers[number])
            for number, group in enumerate(self.cache._groups)
        ]

    # --- Steps ---

    def _can_run(self, sequence: Sequence) -> bool:
        return (
            super()._can_run(sequence) and not sequence.nodes
        )  # a tree is committed after one step

    def _tree(self, sequence: Sequence, budget: int) -> Run:
        """Return a chain: there is one state per sequence."""
        chains = sequence.following(self._tokens(1, min(6, budget)))
        return Run(sequence, chains, list(range(-1, len(chains) - 1)))

    def _update_states(self, parts: list[Run], stream: Any) -> None:
        """Compare the states before a step, and advance them."""
        state, slots = self.cache.state(STATE, "chain"), self.cache.state_slots(stream=stream)
        before = [part.sequence.chains[-1] if part.sequence.chains else 0 for part in parts]
        after = [part.chains[-1] for part in parts]
        names = [part.sequence.name for part in parts]

        def advance() -> None:
            rows = self.device.to_numpy(slots).tolist()
            for name, row, old, new in zip(names, rows, before, after, strict=True):
                if not (state[row] == np.uint64(old)).all():
                    self.wrong_states.append(f"the state of sequence {name} differs")
                state[row] = np.uint64(new)

        self.device.run(advance, stream)

    def _visible(self, layer: int, rows: list[int]) -> list[int]:
        return rows[-WINDOW_TOKENS:] if layer == WINDOW else rows

    # --- Leases ---

    def _leases_of(self, number: int) -> list[Any]:
        leases = [lease.leases[number] for lease, _ in self.leases if lease.num_blocks]
        return [lease for lease in leases if lease is not None]

    def _release_leases(self) -> None:
        for lease, rows in self.leases:
            lease.wait()
            for number, indices in enumerate(lease.indices[:LAYERS]):
                pages = lease.leases[number].pages
                self._compare_pages(number, pages, indices, rows, "a leased block")
            lease.release()
        self.leases.clear()

    # --- Comparisons ---

    def _audit(self) -> None:
        super()._audit()
        require(not self.wrong_states, "; ".join(self.wrong_states))
        audit_states(self.cache._states)
        audit_tiers(self.tiers._tiers[LAYERS], self.cache._states._of.values())

    def _compare(self, sequence: Sequence) -> None:
        """Compare the state of a sequence, and the rows that its groups keep, bit for bit."""
        if sequence.nodes or not sequence.rows or sequence.offloaded:
            return
        (slot,) = self.cache.state_slots_of([sequence.name])
        self.device.synchronize()
        state = self.device.to_numpy(self.cache.state(STATE, "chain")[slot])
        differs = (state != np.uint64(sequence.chains[-1])).any()
        require(not differs, f"the state of sequence {sequence.name} differs")
        for number, group in enumerate(self.cache._groups):
            own = group.sequences.find(sequence.name)
            for load in own.loads:
                load.synchronize()
            kept = np.flatnonzero(own.pages >= 0)
            seen = max(0, len(sequence.rows) - (group.window or len(sequence.rows)) + 1)
            require(
                set(range(seen // PAGE, len(own.pages))) <= set(kept.tolist()),
                f"sequence {sequence.name} lacks pages that a window sees",
            )
            what = f"sequence {sequence.name}"
            self._compare_pages(number, own.pages[kept], kept.tolist(), sequence.rows, what)

    def _compare_pages(
        self, number: int, pages: Any, indices: list[int], rows: list[int], what: str
    ) -> None:
        """Compare pages of a group, by their indices in a sequence of some rows."""
        pool = self.cache.pools[number]
        for name, cached, stored in zip(
            "KV", (pool.k(0), pool.v(0)), self.stock.stored, strict=True
        ):
            got = self.device.to_numpy(cached)[pages].astype(np.float32)
            for page, index in zip(got, indices, strict=True):
                want = stored[number, rows[index * PAGE : (index + 1) * PAGE]]
                require(
                    np.array_equal(page[: len(want)], want),
                    f"{name} of {what}, layer {number}, page {index}: rows differ",
                )
        self.counts["rows compared"] += len(pages) * PAGE
