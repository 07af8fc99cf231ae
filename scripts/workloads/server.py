"""A server of random requests over one paged cache, its tiers and its graphs.

    waiting --admit: cached prefix blocks--> running --goal--> removed, its blocks are published
       ^                                      |   ^
       `-- preempted: pages given up ---------'   |
                       offloaded <----------------'  (to host pages, and back)

Every call that a server may make comes at some time: chunked prefill, decode by calls and by
graphs, forks, beams, token trees, windows, failed steps, dropped tokens, cancelled requests, leases
of others, files, a restart. The rows of each sequence are known beforehand (`rows`), and are
compared with what the cache holds.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
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
GRAPHS = (2, 4, 8)  # sequences that a captured step is for
VOCABULARY, SYSTEM_PROMPTS = 50, 6
IN_FLIGHT = 2  # steps that are launched before the host waits
RECENT, SINKS = 6, 2  # tokens that a cache with a past keeps as they are

KINDS = ("plain", "plain", "plain", "fork", "beam", "tree", "window")


def num_pages(variant: Variant) -> int:
    """Return the pages of a cache's own format; one with a past has the others for that."""
    return NUM_PAGES // 2 if variant.past else NUM_PAGES


class StepFailed(Exception):
    """What a step that is taken back raises."""


@dataclass(eq=False)
class Sequence:
    """A request: its tokens, and what the cache holds of it.

    Attributes
    ----------
    ids, prompt, goal : all tokens known, how many are the prompt, how many there will be
    chains : of the tokens that steps have run, of which `rows` are still cached
    nodes : of the tree that is not committed: parent, chain
    group : of beams
    """

    name: int
    ids: list[int]
    prompt: int
    goal: int
    kind: str = "plain"
    group: int = -1
    chains: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    nodes: list[tuple[int, int]] = field(default_factory=list)
    window: int = 0
    sink_tokens: int = 0
    offloaded: bool = False
    branched: bool = False

    @property
    def fed(self) -> int:
        return len(self.chains)

    @property
    def all_rows(self) -> list[int]:
        """The rows in the cache, including a pending tree's."""
        return [*self.rows, *(row_of(chain) for _, chain in self.nodes)]

    def following(self, tokens: list[int]) -> list[int]:
        """Return the chains of tokens that follow what was run so far."""
        chain = self.chains[-1] if self.chains else 0
        return [chain := next_chain(chain, token) for token in tokens]

    def append(self, chains: list[int]) -> None:
        self.chains += chains
        self.rows += map(row_of, chains)

    def slide(self) -> None:
        surplus = len(self.rows) - self.sink_tokens - self.window
        if self.window and not self.nodes and surplus > 0:
            del self.rows[self.sink_tokens : self.sink_tokens + surplus]

    def path(self, node: int) -> list[int]:
        """Return the nodes from a root to this one."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.nodes[node][0]
        return nodes[::-1]


@dataclass
class Run:
    """What a step runs of a sequence: chains of new tokens; with `parents`, nodes of a tree."""

    sequence: Sequence
    chains: list[int]
    parents: list[int] | None = None

    @property
    def is_decode(self) -> bool:
        return self.parents is None and len(self.chains) == 1


class Decoder:
    """A step of one token for each of up to `batch` sequences, captured."""

    def __init__(self, server: Server, batch: int) -> None:
        stock, device = server.stock, server.device
        self.arrays = [
            device.zeros((LAYERS, batch, *rows.shape[2:]), "fp32")
            for rows in (stock.query, stock.key, stock.value)
        ]
        self.out = device.zeros((LAYERS, batch, Q_HEADS, stock.out_width), "fp32")
        names = [("captured", number) for number in range(batch)]
        for name in names:
            server.cache.add_sequence(name)
        with server.cache.forward(names, [1] * batch), server.compute.capture() as self.graph:
            for layer in range(LAYERS):
                arrays = [array[layer] for array in self.arrays]
                server.attend(layer, arrays, self.out[layer], server.compute)
        for name in names:
            server.cache.remove_sequence(name)

    def run(self, server: Server, rows: list[int]) -> Any:
        """Launch the graph for some rows, and return its outputs."""
        stock, stream = server.stock, server.compute
        for array, source in zip(self.arrays, (stock.query, stock.key, stock.value), strict=True):
            server.device.copy(
                array[:, : len(rows)], server.device.asarray(source[:, rows]), stream=stream
            )
        self.graph.launch(stream)
        return self.out


class Server:
    """Random traffic over one variant of a cache.

    Parameters
    ----------
    folder : for saved sequences
    check_every : sequences are compared in one of so many steps, attention in one of four times
        as many
    lower : returns the options of TieredCache for tiers below host memory, for a host pool

    Attributes
    ----------
    counts : what has happened
    """

    kinds: tuple[str, ...] = KINDS
    graphs: tuple[int, ...] = GRAPHS

    def __init__(
        self, device: Any, variant: Variant, seed: int, folder: Path, *, check_every: int = 4,
        lower: Callable[[Any], dict[str, Any]] = lambda host_pool: {},
    ) -> None:  # fmt: skip
        self.device, self.variant, self.folder, self.lower = device, variant, folder, lower
        self.check_every = check_every
        self.rng = np.random.default_rng((seed, sum(variant.name.encode())))
        self.stock = Stock(variant)
        self.table = None if self.stock.table is None else device.asarray(self.stock.table)
        self.counts: Counter[str] = Counter()
        self.systems = [self._tokens(4, 30) for _ in range(SYSTEM_PROMPTS)]
        self.num_requests = self.num_groups = 0
        self.blocks: Counter[str] = Counter()  # what TieredCaches have counted that are closed
        self._open()

    # --- From start to end ---

    def _open(self) -> None:
        self.compute, self.other, self.copies = (self.device.stream() for _ in range(3))
        self.cache = self._make_cache()
        self.tiers = self._make_tiers()
        self.cache.attach(self.tiers)
        self.decoders = {size: Decoder(self, size) for size in self.graphs}
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.leases: list[tuple[Any, list[int]]] = []
        self.launched: deque[Any] = deque()

    def _make_cache(self) -> Any:
        variant = self.variant
        shape: dict[str, Any] = {"num_kv_heads": 1, "head_dim": variant.width}
        if variant.latent:
            shape = {"latent_dim": LATENT, "rope_dim": ROPE}
        if variant.past:
            shape["demotion"] = kv.Demotion(
                variant.past, recent=RECENT, first=SINKS, num_pages=NUM_PAGES - num_pages(variant)
            )
        return kv.PagedKVCache(
            num_layers=LAYERS, num_q_heads=Q_HEADS, num_pages=num_pages(variant), page_size=PAGE,
            dtype=variant.dtype, rope=self.table, rope_mode="inline" if variant.rope else "normal",
            max_batch_tokens=BUDGET, max_seq_len=MAX_POSITIONS, copy_stream=self.copies,
            device=self.device, **shape,
        )  # fmt: skip

    def _make_tiers(self) -> Any:
        variant = self.variant
        common: dict[str, Any] = {
            "dtype": variant.dtype, "layout": "page_first", "placement": "pinned",
            "device": self.device,
        }  # fmt: skip
        if variant.latent:
            host_pool: Any = kv.MLAPool(HOST_PAGES, PAGE, LAYERS, LATENT, ROPE, **common)
        else:
            scaled = bool(self.cache.pool.scale_parts)
            host_pool = kv.KVPool(
                HOST_PAGES, PAGE, LAYERS, 1, variant.width, scales=scaled, **common
            )
        return kv.TieredCache(
            self.cache.pool, host_pool, write=variant.write, **self.lower(host_pool)
        )

    def _parts(self) -> list[Part]:
        """Return the pages of all groups of layers."""
        cache = self.cache
        tiers = None if self.tiers is None else self.tiers._tiers[0]
        return [Part(cache._sequences, cache.pool, cache.past_pool, tiers)]

    def close(self) -> None:
        """End all that runs; nothing may be left of it.

        Raises
        ------
        Broken : pages are still allocated
        """
        for lease, _ in self.leases:
            lease.release()
        self.leases.clear()
        if self._chance(0.5):
            self.cache.clear()
        else:
            for sequence in self.running:
                self.cache.remove_sequence(sequence.name)
        self.running.clear()
        self._audit()
        self.blocks.update({k: int(v) for k, v in self.tiers.stats().items() if "_blocks" not in k})
        self.tiers.close()
        self.device.synchronize()
        for part in self._parts():
            for pool in (part.pool, part.tiers.host.pool, part.past_pool):
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
        Broken : something is not as it must be
        """
        self._side_call()
        self._onboard()
        self._admit()
        parts = self._choose()
        if parts:
            self._forward(parts)
        self._commit_trees()
        self._branch()
        self._finish()
        self._audit()
        if self.running and self._chance(1 / self.check_every):
            self._compare(self._pick(self.running))
        self.counts["steps"] += 1

    @property
    def _past_pages(self) -> int:
        pool = self.cache.past_pool
        return 0 if pool is None else int(pool.allocator.num_allocated)

    def _audit(self) -> None:
        if self.variant.past:
            most = max(self.counts["most pages of the past"], self._past_pages)
            self.counts["most pages of the past"] = most
        self.tiers.stats()  # which lets it notice what is over
        for number, part in enumerate(self._parts()):
            audit(part, self._leases_of(number))
        require_few("accesses to the pages", len(self.cache._steps.access.order))
        for sequence in self.running:
            length, expected = self.cache.sequence_length(sequence.name), len(sequence.all_rows)
            require(length == expected, f"{sequence.name}: length {length}, expected {expected}")
        self.counts["audits"] += 1

    def _leases_of(self, number: int) -> list[Any]:
        """Return the leases of a part that no sequence holds."""
        return [lease for lease, _ in self.leases]

    # Choices

    def _chance(self, part: float) -> bool:
        return bool(self.rng.random() < part)

    def _pick(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def _tokens(self, least: int, most: int) -> list[int]:
        count = int(self.rng.integers(least, most + 1))
        return [int(token) for token in self.rng.integers(0, VOCABULARY, count)]

    def _hashes(self, ids: list[int]) -> list[int]:
        return kv.block_hashes(ids, PAGE, bits=128)

    def _settled(self) -> list[Sequence]:
        """Return the sequences on the device that have no pending tree."""
        return [s for s in self.running if not s.offloaded and not s.nodes]

    # Admission

    def _request(self) -> Sequence:
        """Draw a request, most of which begin with a system prompt; those change in time."""
        if self._chance(0.02):
            self.systems[int(self.rng.integers(SYSTEM_PROMPTS))] = self._tokens(4, 30)
        prompt = [*(self._pick(self.systems) if self._chance(0.8) else []), *self._tokens(2, 14)]
        goal = len(prompt) + int(self.rng.integers(2, 26))
        sequence = Sequence(self._name(), prompt, len(prompt), goal, self._pick(self.kinds))
        if sequence.kind == "window":
            num_kept = int(self.rng.integers(9, 24))
            sequence.sink_tokens = int(self.rng.integers(0, 6))
            sequence.window = num_kept - sequence.sink_tokens
        return sequence

    def _name(self) -> int:
        self.num_requests += 1
        return self.num_requests

    def _admit(self) -> None:
        if len(self.waiting) < MAX_WAITING and self._chance(0.5):
            self.waiting.append(self._request())
        if not self.waiting or len(self.running) >= MAX_RUNNING:
            return
        sequence = self.waiting[0]
        ids, options = sequence.ids, {}
        if ids and self._chance(0.95):  # a fork of no token, preempted, has none yet
            options = {"hashes": self._hashes(ids), "num_tokens": len(ids)}
        try:
            self.cache.add_sequence(sequence.name, **options)
        except kv.CacheFull:
            self.counts["not admitted"] += 1
            return
        self.waiting.popleft()
        known = self.cache.sequence_length(sequence.name)
        require(known % PAGE == 0, f"{known} tokens are known, expected full blocks")
        require(not known or known < len(ids), f"{known} of all tokens are known")
        sequence.append(sequence.following(ids[:known]))
        if sequence.window:
            self.cache.enable_sliding_window(sequence.name, sequence.window, sequence.sink_tokens)
        self.running.append(sequence)
        self.counts["admitted"] += 1
        self.counts["prefix hits"] += known > 0
        self.counts["tokens of prefix hits"] += known

    # The step itself

    def _choose(self) -> list[Run]:
        """Choose what runs: decodes, trees and chunks of prompts, in any order."""
        resident = [s for s in self.running if self._can_run(s)]
        order = [resident[i] for i in self.rng.permutation(len(resident))]
        if self._chance(0.6):
            decoding = [s for s in order if s.fed >= s.prompt and not s.nodes]
            if len(decoding) > 1:
                order = decoding
        parts: list[Run] = []
        budget = BUDGET
        plain_only = self._chance(0.5)
        for sequence in order[: int(self.rng.integers(1, MAX_BATCH + 1))]:
            if budget < 1:
                break
            part = self._part(sequence, budget, plain_only)
            budget -= len(part.chains)
            parts.append(part)
        return parts

    def _can_run(self, sequence: Sequence) -> bool:
        return not sequence.offloaded

    def _part(self, sequence: Sequence, budget: int, plain_only: bool) -> Run:
        if sequence.nodes or (
            sequence.kind == "tree" and sequence.fed >= sequence.prompt and not plain_only
        ):
            return self._tree(sequence, budget)
        pending = sequence.ids[sequence.fed :]
        if not pending:
            sequence.ids += (pending := self._tokens(1, 1))
        count = min(len(pending), budget, int(self.rng.integers(1, BUDGET + 1)))
        return Run(sequence, sequence.following(pending[:count]))

    def _tree(self, sequence: Sequence, budget: int) -> Run:
        nodes = [*sequence.nodes]
        last = sequence.chains[-1] if sequence.chains else 0
        for token in self._tokens(1, min(6, budget)):
            parent = int(self.rng.integers(-1, len(nodes)))
            nodes.append((parent, next_chain(nodes[parent][1] if parent >= 0 else last, token)))
        added = nodes[len(sequence.nodes) :]
        return Run(sequence, [chain for _, chain in added], [parent for parent, _ in added])

    def _forward(self, parts: list[Run]) -> None:
        while parts:
            names = [part.sequence.name for part in parts]
            trees = [part.parents for part in parts]
            try:
                with self.cache.forward(
                    names, [len(part.chains) for part in parts],
                    token_tree=trees if any(tree is not None for tree in trees) else None,
                ):  # fmt: skip
                    self._run(parts)
                    if self._chance(0.02):
                        raise StepFailed
            except kv.CacheFull:
                self.counts["full"] += 1
                if not self._make_room({part.sequence.name for part in parts}):
                    parts = parts[:-1]
                continue
            except StepFailed:
                self.counts["steps taken back"] += 1
                for part in parts:  # recurrent layers may be at an earlier state now
                    self._shorten(part.sequence)
                return
            break
        for part in parts:
            sequence = part.sequence
            if part.parents is None:
                sequence.append(part.chains)
                self.counts["tokens"] += len(part.chains)
            else:
                sequence.nodes += zip(part.parents, part.chains, strict=True)
                self.counts["nodes of trees"] += len(part.chains)
            sequence.slide()

    def _run(self, parts: list[Run]) -> None:
        rows = [row_of(chain) for part in parts for chain in part.chains]
        stream = self.compute
        if self.decoders and all(part.is_decode for part in parts) and self._chance(0.8):
            out = self.decoders[min(n for n in GRAPHS if n >= len(parts))].run(self, rows)
            self.counts["launched graphs"] += 1
        else:
            if self._chance(0.1):
                stream = self.other
            out = self.device.empty((LAYERS, len(rows), Q_HEADS, self.stock.out_width), "fp32")
            stock = self.stock
            arrays = [
                self.device.asarray(a[:, rows]) for a in (stock.query, stock.key, stock.value)
            ]
            for layer in range(LAYERS):
                self.attend(layer, [array[layer] for array in arrays], out[layer], stream)
        self._update_states(parts, stream)
        if self._chance(1 / (4 * self.check_every)):
            stream.synchronize()
            self._compare_attention(parts, self.device.to_numpy(out))
        self.launched.append(stream.record())
        while len(self.launched) > IN_FLIGHT:
            self.launched.popleft().synchronize()

    def attend(self, layer: int, arrays: list[Any], out: Any, stream: Any) -> None:
        """Attend in one layer of the running step; `arrays` are query, key and value."""
        if self.variant.latent:
            self.cache.attention_mla(layer, *arrays, sm_scale=SM_SCALE, out=out, stream=stream)
        else:
            self.cache.attention(layer, *arrays, out=out, stream=stream)

    def _update_states(self, parts: list[Run], stream: Any) -> None:
        """Do what recurrent layers do, if there are any."""

    def _commit_trees(self) -> None:
        chosen = [s for s in self.running if s.nodes and not s.offloaded and self._chance(0.7)]
        if chosen:
            self._commit(chosen)

    def _commit(self, sequences: list[Sequence]) -> None:
        leaves = [int(self.rng.integers(-1, len(s.nodes))) for s in sequences]
        dropped = self.cache.commit_token_tree([s.name for s in sequences], leaves)
        for sequence, leaf, count in zip(sequences, leaves, dropped, strict=True):
            chains = [sequence.nodes[node][1] for node in sequence.path(leaf)]
            sequence.nodes.clear()
            sequence.append(chains[: len(chains) - count])
            # Which tokens these were is not remembered: it is never recomputed.
            sequence.ids += [-1] * (sequence.fed - len(sequence.ids))
            sequence.slide()
            self.counts["trees committed"] += 1

    # Room

    def _make_room(self, kept: set[int]) -> bool:
        """Preempt the youngest sequence that is not in the step; False if all are."""
        victims = [s for s in self.running if not s.offloaded and s.name not in kept]
        if not victims:
            return False
        victim = victims[-1]
        if victim.nodes:
            self._commit([victim])
        if self._chance(0.5) and self._offload(victim):
            return True
        if victim.window or -1 in victim.ids:
            self.counts["cancelled"] += 1
            self._remove(victim)
            return True
        self._remove(victim)
        victim.chains.clear()
        victim.rows.clear()
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
        sequence.offloaded = bool(sequence.rows)
        self.counts["offloaded"] += 1
        return True

    def _onboard(self) -> None:
        offloaded = [s for s in self.running if s.offloaded]
        idle = len(offloaded) == len(self.running)
        if not offloaded or not (idle or self._chance(0.3)):
            return
        if idle:
            self._release_leases()
        sequence = offloaded[0]
        try:
            self.cache.onboard(sequence.name)
        except kv.CacheFull:
            self.counts["not onboarded"] += 1
            return
        sequence.offloaded = False
        self.counts["onboarded"] += 1

    def _remove(self, sequence: Sequence) -> None:
        self.cache.remove_sequence(sequence.name)
        self.running.remove(sequence)

    # Forks, and the end

    def _branch(self) -> None:
        """Fork what samples several continuations; drop beams for copies of better ones."""
        for sequence in self._settled():
            if sequence not in self.running:  # a beam that was dropped
                continue
            if sequence.kind in ("fork", "beam") and sequence.fed >= sequence.prompt:
                if not sequence.branched:
                    sequence.branched = True
                    if sequence.kind == "beam":
                        self.num_groups += 1
                        sequence.group = self.num_groups
                    for _ in range(int(self.rng.integers(1, 4))):
                        self._fork(sequence, len(sequence.rows))
                elif sequence.kind == "beam" and self._chance(0.1):
                    others = [s for s in self._settled() if s.group == sequence.group]
                    worst = self._pick(others)
                    if worst is not sequence and self._fork(sequence, len(sequence.rows)):
                        self._remove(worst)
                        self.counts["beams dropped"] += 1

    def _fork(self, parent: Sequence, at: int) -> bool:
        if len(self.running) >= MAX_RUNNING:
            return False
        name = self._name()
        try:
            at -= self.cache.fork_sequence(parent.name, name, at)
        except kv.CacheFull:
            self.counts["not forked"] += 1
            return False
        fed = parent.fed if at == len(parent.rows) else at
        self.running.append(
            replace(
                parent, name=name, ids=parent.ids[:fed] if fed < parent.fed else [*parent.ids],
                goal=max(parent.goal, fed + 3), chains=parent.chains[:fed], rows=parent.rows[:at],
                nodes=[], branched=True,
            )
        )  # fmt: skip
        self.counts["forked"] += 1
        return True

    def _finish(self) -> None:
        for sequence in self._settled():
            if sequence.fed >= sequence.goal:
                if self._chance(1 / self.check_every):
                    self._compare(sequence)
                self._remove(sequence)
                self.counts["finished"] += 1

    # Calls beside the steps

    def _side_call(self) -> None:
        calls: list[tuple[float, Callable[[], None]]] = [
            (0.02, self._pop), (0.02, self._fork_somewhere), (0.01, self._cancel),
            (0.02, self._offload_one), (0.02, self._evict), (0.003, self.tiers.flush),
            (0.03, self._lease), (0.002, self._save_and_load), (0.0005, self.restart),
        ]  # fmt: skip
        for part, call in calls:
            if self._chance(part):
                call()
        if self.leases and self._chance(0.2):
            self._release_leases()

    def _pop(self) -> None:
        if candidates := self._settled():
            sequence = self._pick(candidates)
            count = int(self.rng.integers(min(4, len(sequence.rows)) + 1))
            self.cache.pop_tokens(sequence.name, count)
            self.counts["tokens popped"] += self._shorten(sequence)

    def _shorten(self, sequence: Sequence) -> int:
        """Forget the tokens that the cache has dropped of a sequence; return how many."""
        count = len(sequence.all_rows) - self.cache.sequence_length(sequence.name)
        if count:
            del sequence.rows[-count:], sequence.chains[-count:]
            # A token of a tree that is run again is another one.
            again = sequence.ids[sequence.fed :]
            sequence.ids[sequence.fed :] = [max(token, 0) for token in again]
        return count

    def _fork_somewhere(self) -> None:
        candidates = [s for s in self._settled() if not s.window]
        if candidates:
            parent = self._pick(candidates)
            self._fork(parent, int(self.rng.integers(len(parent.rows) + 1)))

    def _cancel(self) -> None:
        if self.running:
            self._remove(self._pick(self.running))
            self.counts["cancelled"] += 1

    def _offload_one(self) -> None:
        if candidates := self._settled():
            self._offload(self._pick(candidates))

    def _evict(self) -> None:
        with suppress(kv.CacheFull):
            self.tiers.evict(int(self.rng.integers(1, 9)))
            self.counts["evictions asked for"] += 1

    def _lease(self) -> None:
        """Pin blocks of a prompt, as another user of the tiered cache would."""
        prompts = [s for s in self.running if -1 not in s.ids]
        if not prompts or len(self.leases) > 1:
            return
        ids = self._pick(prompts).ids
        probe = Sequence(0, ids, 0, 0)
        rows = [row_of(chain) for chain in probe.following(ids)]
        # What is loaded may come to pages that any of these streams still works on.
        kv.join(self.compute, self.other, self.copies)
        try:
            lease = self.tiers.acquire(self._hashes(ids), after=self.compute)
        except kv.CacheFull:
            return
        self.leases.append((lease, rows[: lease.num_blocks * PAGE]))
        self.counts["leased blocks"] += lease.num_blocks

    def _release_leases(self) -> None:
        for lease, rows in self.leases:
            if rows and not self.cache.pool.scale_parts:
                lease.wait()
                pages = lease.pages
                for layer in range(LAYERS):
                    stored = self.device.to_numpy(self.cache.pool.k(layer))[pages]
                    want = self._pages_of(layer, rows)
                    got = stored.reshape(len(rows), -1).astype(np.float32)
                    require(np.array_equal(got, want), f"a leased block differs in layer {layer}")
                self.counts["rows compared"] += len(rows)
            lease.release()
        self.leases.clear()

    def _pages_of(self, layer: int, rows: list[int]) -> Any:
        """Return what `pool.k(layer)` holds of rows: K, or latent and rope part side by side."""
        parts = self.stock.stored if self.variant.latent else self.stock.stored[:1]
        return np.concatenate([p[layer, rows].reshape(len(rows), -1) for p in parts], -1)

    def _save_and_load(self) -> None:
        candidates = [s for s in self._settled() if s.rows]
        if not candidates:
            return
        sequence = self._pick(candidates)
        path = self.folder / f"{self.variant.name}.safetensors"
        self.cache.save_sequence(sequence.name, path)
        copy = replace(sequence, name=self._name())
        try:
            self.cache.load_sequence(copy.name, path)
        except kv.CacheFull:
            return
        self._compare(copy)
        self.cache.remove_sequence(copy.name)
        self.counts["saved and loaded"] += 1

    # Comparisons

    def _compare(self, sequence: Sequence) -> None:
        """Compare all rows of a sequence with what they must be, bit for bit."""
        if sequence.offloaded:
            return
        rows = sequence.all_rows
        stream = self.compute if self._chance(0.5) else None
        got = self.cache.get_kv(sequence.name, 0, len(rows), dtype="fp32", stream=stream)
        if stream is not None:
            stream.synchronize()
        for name, part, stored in zip("KV", got, self.stock.stored, strict=True):
            want, cached = stored[:, rows], self.device.to_numpy(part)
            if not np.array_equal(cached, want.reshape(cached.shape)):
                differs = (cached != want.reshape(cached.shape)).reshape(LAYERS, len(rows), -1)
                layer, token = map(int, np.argwhere(differs.any(2))[0])
                require(
                    False,
                    f"{name} of sequence {sequence.name}, layer {layer}, token {token} of "
                    f"{len(rows)}: {int(differs.any(2).sum())} rows differ",
                )
        self.counts["rows compared"] += len(rows)

    def _visible(self, layer: int, rows: list[int]) -> list[int]:
        """Return the rows that the last of them sees in a layer."""
        return rows

    def _compare_attention(self, parts: list[Run], out: Any) -> None:
        """Compare the outputs of one token of each sequence, in one layer, with float64."""
        layer, start = int(self.rng.integers(LAYERS)), 0
        for part in parts:
            sequence, number = part.sequence, int(self.rng.integers(len(part.chains)))
            chains = part.chains
            if part.parents is None:
                rows = [*sequence.rows, *map(row_of, chains[: number + 1])]
                seen = len(rows)
            else:
                before = Sequence(0, [], 0, 0, nodes=[*sequence.nodes])
                before.nodes += zip(part.parents, chains, strict=True)
                path = before.path(len(sequence.nodes) + number)
                rows = [*sequence.rows, *(row_of(before.nodes[node][1]) for node in path)]
                seen = len(rows)
            want = self.stock.attend(
                layer, self._visible(layer, rows), row_of(chains[number]), np.arange(seen), seen - 1
            )  # fmt: skip
            got = out[layer, start + number]
            error = float(np.abs(got - want).max())
            require(
                error <= TOLERANCE * max(1.0, float(np.abs(want).max())),
                f"attention of sequence {sequence.name}, layer {layer}: off by {error:.2g}",
            )
            start += len(chains)
            self.counts["outputs compared"] += 1
