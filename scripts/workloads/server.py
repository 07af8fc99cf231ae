"""A server of random requests over one paged cache and its tiers.

    waiting --admit: cached prefix blocks--> running --goal--> removed, its blocks are published
       ^                                      |   ^
       `-- preempted: pages given up ---------'   |
                       offloaded <----------------'  (to host pages, and back)

The rows of each sequence are known beforehand (`rows`), and are compared with what the cache holds.
Token trees, windows, captured steps, saved sequences and groups of layers are not served: the state
machines of tests/cache have them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import kvcupy as kv

from .audit import Part, audit, require, require_few
from .rows import (
    LATENT,
    LAYERS,
    MAX_POSITIONS,
    PAGE,
    Q_HEADS,
    ROPE,
    SM_SCALE,
    TOLERANCE,
    Stock,
    Variant,
    next_chain,
    row_of,
)  # fmt: skip

NUM_PAGES, HOST_PAGES = 64, 96
MAX_RUNNING, MAX_BATCH, MAX_WAITING, BUDGET = 12, 8, 4, 24
VOCABULARY, SYSTEM_PROMPTS = 50, 6
IN_FLIGHT = 2  # steps that are launched before the host waits
RECENT, SINKS = 6, 2  # tokens that a cache with a past keeps in 16 bits


class StepFailed(Exception):
    """Raised in a step to abort it."""


@dataclass(eq=False)
class Sequence:
    """A request: its tokens, how many there will be, and the chains of those that have run."""

    name: int
    ids: list[int]
    prompt: int
    goal: int
    chains: list[int] = field(default_factory=list)
    offloaded: bool = False
    branched: bool = False

    @property
    def rows(self) -> list[int]:
        return list(map(row_of, self.chains))

    def following(self, tokens: list[int]) -> list[int]:
        """Return the chains of tokens that follow what has run so far."""
        chain = self.chains[-1] if self.chains else 0
        return [chain := next_chain(chain, token) for token in tokens]


Run = tuple[Sequence, list[int]]
"""A sequence in a step, and the chains of its new tokens."""


class Server:
    """Random traffic over one variant of a cache.

    Parameters
    ----------
    check_every : sequences are compared in one of so many steps, attention in one of four times
        as many

    Attributes
    ----------
    counts : what has happened
    """

    def __init__(self, device: Any, variant: Variant, seed: int, *, check_every: int = 4) -> None:
        self.device, self.variant, self.check_every = device, variant, check_every
        self.rng = np.random.default_rng((seed, sum(variant.name.encode())))
        self.stock = Stock(variant)
        self.table = None if self.stock.table is None else device.asarray(self.stock.table)
        self.counts: Counter[str] = Counter()
        self.systems = [self._tokens(4, 30) for _ in range(SYSTEM_PROMPTS)]
        self.num_requests = 0
        self._open()

    # --- From start to end ---

    def _open(self) -> None:
        self.compute, self.copies = (self.device.stream() for _ in range(2))
        self.cache, self.tiers = self._make_caches()
        self.cache.attach(self.tiers)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.launched: deque[Any] = deque()

    def _make_caches(self) -> tuple[Any, Any]:
        variant = self.variant
        past = NUM_PAGES // 2 if variant.past else 0
        shape: dict[str, Any] = {"num_kv_heads": 1, "head_dim": variant.width}
        if variant.latent:
            shape = {"latent_dim": LATENT, "rope_dim": ROPE}
        if variant.past:
            shape["demotion"] = kv.Demotion(
                variant.past, recent=RECENT, first=SINKS, num_pages=past
            )
        cache = kv.PagedKVCache(
            num_layers=LAYERS, num_q_heads=Q_HEADS, num_pages=NUM_PAGES - past, page_size=PAGE,
            dtype=variant.dtype, rope=self.table, rope_mode="inline" if variant.rope else "normal",
            max_batch_tokens=BUDGET, max_seq_len=MAX_POSITIONS, copy_stream=self.copies,
            device=self.device, **shape,
        )  # fmt: skip
        common: dict[str, Any] = {
            "dtype": variant.dtype, "layout": "page_first", "placement": "pinned",
            "device": self.device,
        }  # fmt: skip
        if variant.latent:
            host_pool: Any = kv.MLAPool(HOST_PAGES, PAGE, LAYERS, LATENT, ROPE, **common)
        else:
            scaled = bool(cache.pool.scale_parts)
            host_pool = kv.KVPool(
                HOST_PAGES, PAGE, LAYERS, 1, variant.width, scales=scaled, **common
            )
        return cache, kv.TieredCache(cache.pool, host_pool, write=variant.write)

    def close(self) -> None:
        """End all that runs.

        Raises
        ------
        Broken : pages are still allocated, or blocks failed to load
        """
        for sequence in self.running:
            self.cache.remove_sequence(sequence.name)
        self.running.clear()
        self._audit()
        stats = self.tiers.stats()
        self.counts.update({name: int(stats[name]) for name in ("device_hits", "host_hits")})
        require(not stats["failed_loads"], f"{stats['failed_loads']} blocks failed to load")
        self.tiers.close()
        self.device.synchronize()
        for pool in (self.cache.pool, self.tiers.host_pool, self.cache.demoted_pool):
            is_free = pool is None or pool.allocator.num_free == pool.num_pages
            require(is_free, f"pages of {pool} are left")
        kv.check_faults(self.device)

    def restart(self) -> None:
        """Lose everything, as a server that is started again."""
        self.close()
        self.counts["restarts"] += 1
        self._open()

    # --- One step ---

    def step(self) -> None:
        """Admit, run a step of some sequences, and make other calls as they come.

        Raises
        ------
        Broken : a page has the wrong owner, or the cache holds other rows than expected
        """
        self._side_call()
        self._onboard()
        self._admit()
        if parts := self._choose():
            self._forward(parts)
        self._branch()
        for sequence in self._resident():
            if len(sequence.chains) >= sequence.goal:
                self._remove(sequence)
                self.counts["finished"] += 1
        self._audit()
        if self.running and self._chance(1 / self.check_every):
            self._compare(self._pick(self.running))
        self.counts["steps"] += 1

    def _audit(self) -> None:
        if (pool := self.cache.demoted_pool) is not None:
            most = max(self.counts["most pages of the past"], pool.allocator.num_allocated)
            self.counts["most pages of the past"] = most
        self.tiers.stats()  # reaps what is done
        cache = self.cache
        audit(Part(cache._sequences, cache.pool, cache.demoted_pool, self.tiers._tiers[0]))
        require_few("accesses to the pages", len(cache._steps.access.order))
        for sequence in self.running:
            length, expected = cache.sequence_length(sequence.name), len(sequence.chains)
            require(length == expected, f"{sequence.name}: length {length}, expected {expected}")
        self.counts["audits"] += 1

    # Choices

    def _chance(self, part: float) -> bool:
        return bool(self.rng.random() < part)

    def _pick(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def _tokens(self, least: int, most: int) -> list[int]:
        count = int(self.rng.integers(least, most + 1))
        return [int(token) for token in self.rng.integers(0, VOCABULARY, count)]

    def _name(self) -> int:
        self.num_requests += 1
        return self.num_requests

    def _resident(self) -> list[Sequence]:
        return [sequence for sequence in self.running if not sequence.offloaded]

    # Admission

    def _request(self) -> Sequence:
        """Draw a request, most of which begin with a system prompt; those change in time."""
        if self._chance(0.02):
            self.systems[int(self.rng.integers(SYSTEM_PROMPTS))] = self._tokens(4, 30)
        prompt = [*(self._pick(self.systems) if self._chance(0.8) else []), *self._tokens(2, 14)]
        goal = len(prompt) + int(self.rng.integers(2, 26))
        return Sequence(self._name(), prompt, len(prompt), goal, branched=self._chance(0.7))

    def _admit(self) -> None:
        if len(self.waiting) < MAX_WAITING and self._chance(0.5):
            self.waiting.append(self._request())
        if not self.waiting or len(self.running) >= MAX_RUNNING:
            return
        sequence = self.waiting[0]
        ids = sequence.ids
        hashes = kv.block_hashes(ids, PAGE, bits=128)
        try:
            self.cache.add_sequence(sequence.name, hashes=hashes, num_tokens=len(ids))
        except kv.CacheFull:
            self.counts["not admitted"] += 1
            return
        self.running.append(self.waiting.popleft())
        known = self.cache.sequence_length(sequence.name)
        require(known % PAGE == 0, f"{known} tokens are known, expected full blocks")
        require(not known or known < len(ids), f"{known} of all tokens are known")
        sequence.chains += sequence.following(ids[:known])
        self.counts.update({
            "admitted": 1, "prefix hits": known > 0, "tokens of prefix hits": known
        })  # fmt: skip

    # The step itself

    def _choose(self) -> list[Run]:
        """Choose what runs: decodes and chunks of prompts, in any order."""
        resident, budget = self._resident(), BUDGET
        parts: list[Run] = []
        order = [resident[i] for i in self.rng.permutation(len(resident))]
        for sequence in order[: int(self.rng.integers(1, MAX_BATCH + 1))]:
            pending = sequence.ids[len(sequence.chains) :]
            if not pending:
                sequence.ids += (pending := self._tokens(1, 1))
            count = min(len(pending), budget, int(self.rng.integers(1, BUDGET + 1)))
            if count:
                parts.append((sequence, sequence.following(pending[:count])))
                budget -= count
        return parts

    def _forward(self, parts: list[Run]) -> None:
        while parts:
            names = [sequence.name for sequence, _ in parts]
            try:
                with self.cache.forward(names, [len(chains) for _, chains in parts]):
                    self._run(parts)
                    if self._chance(0.02):
                        raise StepFailed
            except kv.CacheFull:
                self.counts["full"] += 1
                if not self._make_room(set(names)):
                    parts = parts[:-1]
                continue
            except StepFailed:
                self.counts["steps taken back"] += 1
                for sequence, _ in parts:
                    self._shorten(sequence)
                return
            break
        for sequence, chains in parts:
            sequence.chains += chains
            self.counts["tokens"] += len(chains)

    def _run(self, parts: list[Run]) -> None:
        rows = [row_of(chain) for _, chains in parts for chain in chains]
        stream, stock = self.compute, self.stock
        out = self.device.empty((LAYERS, len(rows), Q_HEADS, stock.out_width), "fp32")
        arrays = [self.device.asarray(a[:, rows]) for a in (stock.query, stock.key, stock.value)]
        for layer in range(LAYERS):
            own = [array[layer] for array in arrays]
            if self.variant.latent:
                self.cache.attention_mla(
                    layer, *own, sm_scale=SM_SCALE, out=out[layer], stream=stream
                )
            else:
                self.cache.attention(layer, *own, out=out[layer], stream=stream)
        if self._chance(1 / (4 * self.check_every)):
            stream.synchronize()
            self._compare_attention(parts, self.device.to_numpy(out))
        self.launched.append((stream.record(), arrays, out))
        while len(self.launched) > IN_FLIGHT:
            self.launched.popleft()[0].synchronize()

    # Room

    def _make_room(self, kept: set[int]) -> bool:
        """Preempt the youngest sequence that is not in the step; False if all are."""
        victims = [s for s in self._resident() if s.name not in kept]
        if not victims:
            return False
        victim = victims[-1]
        if self._chance(0.5) and self._offload(victim):
            return True
        self._remove(victim)
        victim.chains.clear()
        victim.name = self._name()
        self.waiting.appendleft(victim)
        self.counts["preempted, to be recomputed"] += 1
        return True

    def _offload(self, sequence: Sequence) -> bool:
        try:
            self.cache.offload(sequence.name)
        except kv.CacheFull:
            self.counts["not offloaded"] += 1
            return False
        sequence.offloaded = bool(sequence.chains)
        self.counts["offloaded"] += 1
        return True

    def _onboard(self) -> None:
        offloaded = [s for s in self.running if s.offloaded]
        idle = len(offloaded) == len(self.running)
        if not offloaded or not (idle or self._chance(0.3)):
            return
        try:
            self.cache.onboard(offloaded[0].name)
        except kv.CacheFull:
            self.counts["not onboarded"] += 1
            return
        offloaded[0].offloaded = False
        self.counts["onboarded"] += 1

    def _remove(self, sequence: Sequence) -> None:
        self.cache.remove_sequence(sequence.name)
        self.running.remove(sequence)

    # Forks

    def _branch(self) -> None:
        """Fork sequences that sample several continuations."""
        for sequence in self._resident():
            if not sequence.branched and len(sequence.chains) >= sequence.prompt:
                sequence.branched = True
                for _ in range(int(self.rng.integers(1, 4))):
                    self._fork(sequence, len(sequence.chains))

    def _fork(self, parent: Sequence, at: int) -> None:
        if len(self.running) >= MAX_RUNNING:
            return
        name = self._name()
        try:
            at -= self.cache.fork_sequence(parent.name, name, at)
        except kv.CacheFull:
            self.counts["not forked"] += 1
            return
        ids = parent.ids[: at or 1]  # a request has at least one token
        self.running.append(
            replace(
                parent, name=name, ids=ids, goal=max(parent.goal, at + 3), branched=True,
                chains=parent.chains[:at],
            )
        )  # fmt: skip
        self.counts["forked"] += 1

    # Calls between the steps

    def _side_call(self) -> None:
        calls: list[tuple[float, Callable[[Sequence], object]]] = [
            (0.02, self._pop), (0.02, self._offload), (0.01, self._cancel), (0.02, self._evict),
            (0.02, lambda s: self._fork(s, int(self.rng.integers(len(s.chains) + 1)))),
            (0.003, lambda _: self.tiers.flush()),
        ]  # fmt: skip
        for part, call in calls:
            if self._chance(part) and (resident := self._resident()):
                call(self._pick(resident))
        if self._chance(0.0005):
            self.restart()

    def _pop(self, sequence: Sequence) -> None:
        count = int(self.rng.integers(min(4, len(sequence.chains)) + 1))
        self.cache.pop_tokens(sequence.name, count)
        self._shorten(sequence)
        self.counts["tokens popped"] += count

    def _shorten(self, sequence: Sequence) -> None:
        """Forget the tokens that the cache has dropped of a sequence."""
        del sequence.chains[self.cache.sequence_length(sequence.name) :]

    def _cancel(self, sequence: Sequence) -> None:
        self._remove(sequence)
        self.counts["cancelled"] += 1

    def _evict(self, _: Sequence) -> None:
        with suppress(kv.CacheFull):
            self.tiers.evict(int(self.rng.integers(1, 9)))
            self.counts["evictions asked for"] += 1

    # Comparisons

    def _compare(self, sequence: Sequence) -> None:
        """Compare all rows of a sequence with what they must be, bit for bit."""
        rows = sequence.rows
        if sequence.offloaded or not rows:
            return
        stream = self.compute if self._chance(0.5) else None
        got = self.cache.get_kv(sequence.name, 0, len(rows), dtype="fp32", stream=stream)
        if stream is not None:
            stream.synchronize()
        for name, part, stored in zip("KV", got, self.stock.stored, strict=True):
            want, cached = stored[:, rows], self.device.to_numpy(part)
            differs = (cached != want.reshape(cached.shape)).reshape(LAYERS, len(rows), -1).any(2)
            require(
                not differs.any(),
                f"{name} of sequence {sequence.name}: {int(differs.sum())} rows differ, the first "
                f"(layer, token) is {np.argwhere(differs)[:1].tolist()} of {len(rows)} tokens",
            )
        self.counts["rows compared"] += len(rows)

    def _compare_attention(self, parts: list[Run], out: Any) -> None:
        """Compare the outputs of one token of each sequence, in one layer, with float64."""
        layer, start = int(self.rng.integers(LAYERS)), 0
        for sequence, chains in parts:
            number = int(self.rng.integers(len(chains)))
            rows = [*sequence.rows, *map(row_of, chains[: number + 1])]
            want = self.stock.attend(
                layer, rows, rows[-1], np.arange(len(rows)), len(rows) - 1
            )  # fmt: skip
            error = float(np.abs(out[layer, start + number] - want).max())
            require(
                error <= TOLERANCE * max(1.0, float(np.abs(want).max())),
                f"attention of sequence {sequence.name}, layer {layer}: off by {error:.2g}",
            )
            start += len(chains)
            self.counts["outputs compared"] += 1
