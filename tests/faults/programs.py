"""Programs over the public classes and functions, in steps that can be repeated after a failure.

A `Program` prepares what its steps need, so that they are calls of the package alone. `state` is
all that a call which raises must leave as it was; `result` is what the program has computed, to be
compared with a run in which nothing failed.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import valid_calls

import kvcupy as kv

Step = tuple[str, Callable[[], object]]

LAYERS, PAGE, HEADS, WIDTH = 2, 4, 2, 8


class Program:
    """One program. `device` and `folder` are its own for the run.

    Attributes
    ----------
    launches : whether the fault of this run may come after a launch
    reset : forgets what its steps have done, so that all of them can be repeated; for failures in
        flight, which a call may have returned before
    """

    launches = True

    def __init__(self, device: Any, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.results: dict[str, Any] = {}
        self.call: dict[str, Any] = {}
        self.prepare(device)
        device.synchronize()

    def prepare(self, device: Any) -> None:
        """Make what the steps need."""

    def steps(self) -> list[Step]:
        raise NotImplementedError

    def state(self, step: str) -> Any:
        """Return what `step` may not change if it raises."""
        return {}

    def result(self) -> dict[str, Any]:
        seen = {**self.results, **self.call}
        return {name: bits(self.device, array) for name, array in seen.items()}

    def keep(self, name: str, function: Callable[[], Any]) -> Step:
        """Return the step that calls a function and keeps what it returns."""

        def run() -> None:
            self.results[name] = function()

        return name, run

    def reset(self) -> None:
        settle(self.device)
        self.results.clear()

    def repair(self, step: str) -> None:
        """Do what a failure of `step` takes before it can be repeated, as docstrings say."""

    def leaks(self) -> list[str]:
        """Return what is still held once everything has been removed."""
        return []

    def losses(self) -> list[str]:
        """Return what may be missing after a failure, but not without one."""
        return []

    def close(self) -> None:
        """Release what outlives the objects, such as files and threads."""


def bits(device: Any, array: Any) -> Any:
    """Return an array as bytes, a tuple of arrays as a list of them, anything else unchanged."""
    if isinstance(array, (tuple, list)):
        return [bits(device, part) for part in array]
    if isinstance(array, np.ndarray):
        return array.tobytes()
    if hasattr(array, "dtype") or hasattr(array, "pointer"):
        return np.ascontiguousarray(device.to_numpy(array)).tobytes()
    return array


def settle(device: Any) -> None:
    """Wait for all work; what has failed in flight surfaces here and is dropped."""
    for _ in range(2):
        with suppress(kv.KvcupyError):
            device.synchronize()


def held_pages(*pools: Any) -> list[str]:
    """Return the pools of which some pages are not free."""
    return [
        f"{pool.num_pages - pool.allocator.num_free} pages of {pool}"
        for pool in pools
        if pool.allocator.num_free != pool.num_pages
    ]


# --- Operations -----------------------------------------------------------------------------------


class Call(Program):
    """One operation, on a stream, with outputs that the caller passes."""

    name = "store_kv"
    outputs: tuple[str, ...] = ()  # where several launches write them

    def prepare(self, device: Any) -> None:
        self.call = valid_calls.EXAMPLES[self.name](device)
        self.stream = device.stream()

    def steps(self) -> list[Step]:
        return [(self.name, self.run), ("synchronize", self.stream.synchronize)]

    def run(self) -> None:
        getattr(kv, self.name)(**self.call, stream=self.stream)

    def state(self, step: str) -> Any:
        """Return all arrays, but for those that several launches write."""
        if step == "synchronize":
            return None
        written = self.outputs if self.launches else ()
        return {n: b for n, b in self.result().items() if n not in written}


def pool_of(device: Any, num_pages: int, **options: Any) -> Any:
    shape = PAGE, LAYERS, HEADS, WIDTH
    return kv.KVPool(num_pages, *shape, dtype="fp32", device=device, **options)


def parts_of(pool: Any) -> list[Any]:
    """Return K, then V, of each layer."""
    return [side(layer) for side in (pool.k, pool.v) for layer in range(LAYERS)]


def filled(device: Any, pool: Any, seed: int) -> Any:
    """Fill a pool with random numbers; return it."""
    rng = np.random.default_rng(seed)
    for part in parts_of(pool):
        values = rng.standard_normal(part.shape).astype(np.float32)
        if pool.placement == "device":
            device.copy(part, device.asarray(values))
        else:
            part[...] = values
    device.synchronize()
    return pool


def pages_of(device: Any, pool: Any) -> np.ndarray:
    """Return the bytes of all pages of a pool, (pages, bytes)."""
    arrays = [p if isinstance(p, np.ndarray) else device.to_numpy(p) for p in parts_of(pool)]
    flat = [np.ascontiguousarray(a).reshape(pool.num_pages, -1).view(np.uint8) for a in arrays]
    return np.concatenate(flat, axis=1)


class TwoPools(Program):
    """What begins with two pools in other layouts and a stream."""

    def prepare(self, device: Any) -> None:
        far = pool_of(device, 8, layout="page_first", placement="pinned")
        self.near, self.far = filled(device, pool_of(device, 6), 1), filled(device, far, 2)
        self.stream = device.stream()

    def result(self) -> dict[str, Any]:
        pools = {"near": self.near, "far": self.far}
        return {name: pages_of(self.device, pool).tobytes() for name, pool in pools.items()}


class TransferPages(TwoPools):
    """Pages from a pool to another, by each method."""

    methods = ("kernel", "copy", "staged", "auto")

    def steps(self) -> list[Step]:
        def run(method: str, first: int) -> None:
            kv.transfer_pages(
                self.near, self.far, [0, 2], [first, first + 1], method=method, stream=self.stream
            )
            kv.transfer_pages(self.far, self.near, [7], [5], method=method, stream=self.stream)
            self.stream.synchronize()

        return [
            (method, lambda method=method, first=2 * i: run(method, min(first, 4)))  # type: ignore
            for i, method in enumerate(self.methods)
        ]

    def state(self, step: str) -> Any:
        first = min(2 * self.methods.index(step), 4)
        far, near = pages_of(self.device, self.far), pages_of(self.device, self.near)
        return np.delete(far, [first, first + 1], 0).tobytes(), near[:5].tobytes()


# --- The engine -----------------------------------------------------------------------------------


class Engine(TwoPools):
    """Saves and loads, several in one batch, waited for in every way."""

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.far.allocator.free(self.far.allocator.alloc(8)[:3])  # the others are in use
        self.engine: Any = None
        self.copies = [device.zeros((PAGE, HEADS, WIDTH), "fp32") for _ in range(LAYERS)]

    def steps(self) -> list[Step]:
        def make() -> None:
            self.engine = kv.TransferEngine(self.near, self.far)

        def save() -> None:
            transfers = [self.engine.save([i], [i + 4], after=self.stream) for i in (0, 1)]
            for transfer in transfers:
                transfer.wait(self.stream)
                transfer.synchronize()
            self.stream.synchronize()

        def load() -> None:
            transfers = [self.engine.load([6], [4]), self.engine.load([7], [5])]
            self.engine._flush()
            for layer in range(LAYERS):
                transfers[0].wait_layer(layer, self.stream)
                self.device.copy(self.copies[layer], self.near.k(layer)[4], stream=self.stream)
            transfers[1].wait(self.stream)
            self.stream.synchronize()

        def both() -> None:
            """A save and a load that touch the same pages, polled rather than waited for."""
            load = self.engine.load([4], [3], after=self.stream)
            save = self.engine.save([3], [3], after=self.stream)
            for transfer in (save, load):
                while not transfer.done():
                    pass

        def freed() -> None:
            """Pages that are freed while a transfer touches them."""
            pages = self.far.allocator.alloc(2)
            try:
                transfer = self.engine.save([0, 1], pages)
            finally:
                self.far.allocator.free(pages)
            transfer.synchronize()

        return [("TransferEngine", make), ("save", save), ("load", load), ("both", both),
                ("freed", freed)]  # fmt: skip

    def state(self, step: str) -> Any:
        settle(self.device)
        written = {"save": ([], [4, 5]), "load": ([4, 5], []), "both": ([3], [3]),
                   "freed": ([], [0, 1, 2])}  # fmt: skip
        seen = []
        for pool, pages in zip((self.near, self.far), written.get(step, ([], [])), strict=True):
            seen.append(np.delete(pages_of(self.device, pool), pages, 0).tobytes())
            seen.append((pool.allocator.num_free, pool.allocator.num_allocated))
        return seen

    def result(self) -> dict[str, Any]:
        near, far = pages_of(self.device, self.near), pages_of(self.device, self.far)
        return {"near": near.tobytes(), "far": np.delete(far, [0, 1, 2], 0).tobytes(),
                "copies": bits(self.device, self.copies)}  # fmt: skip

    def leaks(self) -> list[str]:
        for pool in (self.near, self.far):
            pool.allocator.free(pool.allocator.allocated())
        return held_pages(self.near, self.far)


# --- The paged cache ------------------------------------------------------------------------------


class Paged(Program):
    """Steps, forks, trees and contents of a window, full attention and recurrent states."""

    def prepare(self, device: Any) -> None:
        shape = {"num_kv_heads": HEADS, "head_dim": WIDTH, "dtype": "fp32"}
        state = {"conv": ((4, 3), "bf16"), "ssm": ((5,), "fp32")}
        self.cache = kv.PagedKVCache(
            num_q_heads=4, page_size=PAGE, device=device, num_tokens=96, max_batch_tokens=32,
            groups=[
                kv.SlidingWindow(layers=[0], window=5, sink_tokens=1, **shape),
                kv.Recurrent(layers=[1, 2], state=state, checkpoint_tokens=4),
                kv.FullAttention(layers=[3], **shape),
            ],
        )  # fmt: skip
        rng = np.random.default_rng(3)
        shapes = [(8, heads, WIDTH) for heads in (4, HEADS, HEADS)]
        self.rows = [device.asarray(rng.standard_normal(s).astype(np.float32)) for s in shapes]
        self.fresh: dict[Any, int] = {}  # tokens that the running step has appended
        self.appended: dict[Any, int] = {}  # tokens of the last step
        self.written: list[Any] = []  # sequences whose states the running step has updated

    def step(self, key: str, names: str, *counts: int, **options: Any) -> list[Step]:
        """Return the calls of a step: begin, each layer, the states, end."""
        cache = self.cache

        def begin() -> None:
            cache.begin_forward(list(names), list(counts), **options)
            self.appended = self.fresh = dict(zip(names, counts, strict=True))

        def attention(layer: int) -> None:
            arrays = [a[: sum(counts)] for a in self.rows]
            self.results[f"{key}, layer {layer}"] = cache.attention(layer, *arrays)

        def end() -> None:
            self.written = []
            if self.fresh:  # ending is over even if it raises
                self.fresh = {}
                cache.end_forward()

        layers = [("attention", functools.partial(attention, layer)) for layer in (0, 3)]
        states = "states", functools.partial(self.update, names)
        return [("begin", begin), *layers, states, ("end", end)]

    def update(self, names: str) -> None:
        """Write the states of sequences, which follow from their lengths."""
        cache = self.cache
        if cache._steps.running is not None:
            cache.state_slots()
        self.written = list(names)
        for layer, (part, shape) in itertools.product((1, 2), (("conv", (4, 3)), ("ssm", 5))):
            array = cache.state(layer, part)
            for name, slot in zip(names, cache._states.slots(names), strict=True):
                length = cache.sequence_length(name)
                row = np.full(shape, length + layer, np.float32).astype(array.dtype)
                self.device.copy(array[slot], self.device.asarray(row))

    def forward(self, key: str, names: str, *counts: int) -> list[Step]:
        """Return the same step as one call, which takes itself back if it fails."""
        _, *layers, _, _ = self.step(key, names, *counts)

        def run() -> None:
            with self.cache.forward(list(names), list(counts)):
                for _, attention in layers:
                    attention()

        return [("forward", run), ("states", functools.partial(self.update, names))]

    def steps(self) -> list[Step]:
        cache, path = self.cache, self.folder / "a"
        return [
            ("add", lambda: cache.add_sequence("a")), ("add", lambda: cache.add_sequence("b")),
            *self.step("prefill", "ab", 4, 3), *self.step("more", "a", 8),
            *self.forward("whole", "a", 2),
            ("fork", lambda: cache.fork_sequence("a", "c")),
            *self.step("draft", "ac", 3, 3, token_tree=[[-1, 0, 1], [-1, 0, 1]]),
            ("commit", lambda: cache.commit_token_tree(["c", "a"], [2, 1])),
            ("pop", lambda: cache.pop_tokens("c", 0)),
            ("save", lambda: cache.save_sequence("a", path)),
            ("load", lambda: cache.load_sequence("d", path)),
            ("remove", lambda: cache.remove_sequence("a")),
            *self.step("last", "bcd", 1, 2, 1),
        ]  # fmt: skip

    def _rows(self, slot: int) -> list[bytes]:
        arrays = self.cache._states._arrays.values()
        return [np.asarray(self.device.to_numpy(array))[slot].tobytes() for array in arrays]

    def state(self, step: str) -> Any:
        settle(self.device)
        cache, states = self.cache, self.cache._states
        groups: list[Any] = []
        for group in cache._groups:
            known, owners = group.sequences._known, np.zeros_like(group.sequences._references)
            fresh = self.appended if step == "end" else self.fresh
            tokens = {}
            for name, sequence in known.items():
                owners[sequence.pages[sequence.pages >= 0]] += 1
                stop = sequence.committed if step == "commit" else sequence.length
                seen = np.arange(stop - fresh.get(name, 0))[-4:]  # within any window
                slots = sequence.slots(seen, PAGE)
                tokens[name] = (
                    stop,
                    [
                        np.asarray(self.device.to_numpy(part))
                        .reshape(-1, HEADS * WIDTH)[slots]
                        .tobytes()
                        for part in (group.pool.k(0), group.pool.v(0))
                    ],
                )
            if cache._steps.running is None:
                assert owners.tolist() == group.sequences._references.tolist()
            pages = {name: s.pages.tolist() for name, s in known.items()}
            allocated = group.pool.allocator.allocated().tolist()
            # Windows slide, and trees are dropped.
            is_open = step not in ("forward", "end", "commit")
            lists = (pages, allocated) if is_open else None
            groups.append((tokens, lists))
        live = {
            name: self._rows(own.live) for name, own in states._of.items()
            if own.live >= 0 and name not in self.written and name not in self.fresh
        }  # fmt: skip
        for own in states._of.values():  # they may be given up, and none may be wrong
            for length, kept in own.kept.items():
                for (layer, part), array in states._arrays.items():
                    row = np.asarray(self.device.to_numpy(array))[kept.slot].astype(np.float32)
                    assert (row == length + layer).all(), f"state at {length}: {layer} {part}"
        running = cache._steps.running
        return {
            "groups": groups, "live": None if step in ("end", "commit") else live,
            "total": None if step == "commit" else cache.total_length, "files": files(self.folder),
            "running": None if step == "end" or running is None else running.names,
        }  # fmt: skip

    def result(self) -> dict[str, Any]:
        states = self.cache._states
        live = {name: self._rows(own.live) for name, own in states._of.items()}
        return {**super().result(), "live": live}

    def reset(self) -> None:
        super().reset()
        self.fresh, self.appended, self.written = {}, {}, []
        self.cache.clear()

    def leaks(self) -> list[str]:
        settle(self.device)
        self.cache.clear()
        allocator = self.cache._states._allocator
        held = f"{allocator.num_pages - allocator.num_free} states"
        return held_pages(*self.cache.pools) + [held] * (allocator.num_free < allocator.num_pages)


def files(folder: Path) -> list[tuple[str, int, str]]:
    """Return name, size and digest of all files of a folder."""
    return [
        (path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]


# --- Tiers ----------------------------------------------------------------------------------------


class Tiered(Program):
    """Blocks in a `TieredCache`: inserted, evicted, acquired, flushed, closed and opened again.

    A transfer that fails loses the copies that it was to make, and nothing else: so
    blocks may be missing after a failure, and are inserted again; none may be wrong.
    """

    first = 1000  # hash

    def prepare(self, device: Any) -> None:
        self.near = pool_of(device, 4)
        self.far = pool_of(device, 8, layout="page_first", placement="pinned")
        self.compute = device.stream()
        rng = np.random.default_rng(4)
        self.stock = rng.standard_normal((8, 2 * LAYERS, PAGE, HEADS, WIDTH)).astype(np.float32)
        self.blocks = [[device.asarray(part) for part in block] for block in self.stock]
        self.tiers: Any = None

    def open(self) -> None:
        self.tiers = kv.TieredCache(self.near, self.far)

    def insert(self, *blocks: int) -> None:
        """Insert blocks that are not on the device; a stream writes them meanwhile."""
        missing = [b for b in blocks if not self.tiers.match([self.first + b]).device]
        allocator = self.near.allocator
        short = len(missing) - (allocator.num_pages - allocator.num_allocated)
        if short > 0:
            self.tiers.evict(short)
        pages = self.near.allocator.alloc(len(missing))
        try:
            for page, block in zip(pages.tolist(), missing, strict=True):
                for part, values in zip(parts_of(self.near), self.blocks[block], strict=True):
                    self.device.copy(part[page], values, stream=self.compute)
            unneeded = self.tiers.insert(
                [self.first + b for b in missing], pages, after=self.compute
            )
        except BaseException:
            settle(self.device)
            self.near.allocator.free(pages)  # they have stayed the caller's
            raise
        self.near.allocator.free(unneeded)
        self.compute.synchronize()

    def use(self, *blocks: int) -> None:
        """Acquire blocks, and compare their bytes; lost ones are inserted again."""
        while blocks:
            with self.tiers.acquire([self.first + b for b in blocks], deadline_s=0) as lease:
                lease.wait(self.compute)
                self.compute.synchronize()
                pages = pages_of(self.device, self.near)
                for page, block in zip(lease.pages.tolist(), blocks, strict=False):
                    expected = self.stock[block].reshape(-1).view(np.uint8)
                    assert np.array_equal(pages[page], expected), f"block {block} is wrong"
                blocks = blocks[lease.num_blocks :]
            self.lost += len(blocks)
            self.insert(*blocks)

    lost = 0

    def losses(self) -> list[str]:
        return [f"{self.lost} blocks were lost"] if self.lost else []

    def steps(self) -> list[Step]:
        def evict(n: int) -> Callable[[], None]:
            def run() -> None:
                there = int(self.tiers.stats()["device_blocks"])
                self.tiers.evict(min(n, there))

            return run

        def use(*blocks: int) -> Callable[[], None]:
            return lambda: self.use(*blocks)

        return [
            ("TieredCache", self.open),
            ("insert", lambda: self.insert(0, 1)),
            ("insert", lambda: self.insert(2, 3)),
            ("acquire", use(0, 1)),
            ("evict", evict(4)),
            ("acquire", use(0, 1, 2)),
            ("evict", evict(4)),
            ("insert", lambda: self.insert(4, 5)),
            ("evict", evict(2)),
            ("acquire", use(4, 5)),
            ("flush", lambda: self.tiers.flush()),
            ("acquire", use(0, 1, 2, 3)),
            ("close", lambda: self.tiers.close()),
            ("TieredCache", self.open),
            ("clear", lambda: self.tiers.clear()),
        ]

    def state(self, step: str) -> Any:
        """Return which pages are whose: none may be lost, whatever happens to blocks."""
        settle(self.device)
        if self.tiers is None:
            return None
        tiers = self.tiers._tiers[0]
        if not self.tiers.closed:
            self.tiers.stats()
        for tier in (tiers.device, tiers.host):
            allocator = tier.pool.allocator
            assert allocator.num_free == allocator.num_pages - allocator.num_allocated
            owned, allocated = np.flatnonzero(tier.owned).tolist(), allocator.allocated().tolist()
            held = sorted(tier.pages.values())
            assert owned == allocated == held, f"{tier.name}: {owned}, {allocated}, {held}"
            assert not tier.pins, "a block is still leased"
        assert tiers.num_leased == 0
        return None

    def result(self) -> dict[str, Any]:
        return {"stats": int(self.tiers.stats()["device_blocks"])}

    def reset(self) -> None:
        settle(self.device)
        if self.tiers is not None and not self.tiers.closed:
            with suppress(kv.KvcupyError, OSError):
                self.tiers.close()
        self.tiers = None

    def leaks(self) -> list[str]:
        self.reset()
        return held_pages(self.near, self.far)

    def close(self) -> None:
        self.reset()


# Several launches write them: static scales, dynamic scales.
OUTPUTS = {"store_kv": ("k_cache", "v_cache", "v_scale_cache")}


PROGRAMS: dict[str, type[Program]] = {
    name: type(name, (Call,), {"name": name, "outputs": OUTPUTS.get(name, ())})
    for name in valid_calls.EXAMPLES
} | {kind.__name__: kind for kind in (TransferPages, Engine, Paged, Tiered)}
