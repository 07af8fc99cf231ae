"""Programs over the public classes and functions, in steps that can be repeated after a failure.

A `Program` prepares what its steps need, so that they are calls of the package alone. `state` is
all that a call which raises must leave as it was; `result` is what the program has computed, to be
compared with a run in which nothing failed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import valid_calls
from agents import Network

import kvcupy as kv
from kvcupy.commands import calibrate
from kvcupy.devices import cache as kernel_cache
from kvcupy.remote.migration import agent

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


def proceed(device: Any) -> None:
    """Let work run that nothing waits for: the stand-in for CUDA runs none by itself."""
    if device.kind == "cuda":
        device.context.api.machine.progress()


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


class Allocating(Program):
    """Operations that allocate what they return."""

    def prepare(self, device: Any) -> None:
        arguments = {name: make(device) for name, make in valid_calls.EXAMPLES.items()}
        for call in arguments.values():
            for name in ("out", "lse_out", "k_out", "v_out", "query_out"):
                call.pop(name, None)
        self.arguments = arguments

    def steps(self) -> list[Step]:
        names = ["gather_kv", "paged_attention", "merge_states", "slot_mapping"]
        calls = {name: (getattr(kv, name), self.arguments[name]) for name in names}
        table = self.arguments["slot_mapping"]
        calls["page_table_csr"] = kv.page_table_csr, {
            "block_table": table["block_table"], "seq_lens": table["seq_lens"], "page_size": 4,
        }  # fmt: skip
        slots = self.arguments["store_kv"]["slot_mapping"]
        calls["find_duplicate_slots"] = kv.find_duplicate_slots, {"slot_mapping": slots}
        calls["rope_table"] = kv.rope_table, {
            "max_positions": 32, "rotary_dim": 8, "device": self.device,
        }  # fmt: skip

        if self.device.kind == "cuda":  # the reference, which the stand-in does not run
            del calls["page_table_csr"], calls["find_duplicate_slots"]

        return [
            self.keep(name, functools.partial(function, **options))
            for name, (function, options) in calls.items()
        ]

    def state(self, step: str) -> Any:
        return [bits(self.device, list(call.values())) for call in self.arguments.values()]


class TwoStreams(Call):
    """Rotation and stores on two streams, ordered by events both ways."""

    name = "rope_store_kv"
    outputs = ("k_cache", "v_cache", "v_scale_cache", "query", "key", "query_out")

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.key = device.to_numpy(self.call["key"])
        self.call["alt_stream"] = device.stream()

    def repair(self, step: str) -> None:
        """Bring the keys back, which are rotated in place."""
        if step == "synchronize":
            return
        settle(self.device)
        self.device.copy(self.call["key"], self.device.asarray(self.key))
        self.device.synchronize()

    def reset(self) -> None:
        super().reset()
        self.repair("")

    def result(self) -> dict[str, Any]:
        settle(self.device)
        return {n: bits(self.device, v) for n, v in self.call.items() if n != "alt_stream"}


class SplitAttention(Call):
    """Attention whose keys are split over blocks, by way of a workspace, then merged."""

    name = "paged_attention"
    outputs = ("out", "lse_out")

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        shape, array = (64, 16, 1, 8), valid_calls.array
        self.call = {
            "query": array(device, 1, 4, 8),
            "k_cache": array(device, *shape), "v_cache": array(device, *shape, seed=1),
            "block_table": device.asarray(np.arange(64, dtype=np.int32)[None]),
            "seq_lens": valid_calls.indices(device, 1000),
            "out": device.zeros((1, 4, 8), np.float32),
            "lse_out": device.zeros((1, 4), np.float32),
        }  # fmt: skip


class Checked(Call):
    """An operation, and work of others, under the order checker."""

    outputs = ("k_cache", "v_cache", "v_scale_cache")

    def steps(self) -> list[Step]:
        def run() -> None:
            with kv.order_checker("raise"):
                kv.store_kv(**self.call, stream=self.stream)
                with kv.declare(reads=(self.call["k_cache"],), stream=self.stream):
                    self.stream.call(lambda: None)
                self.stream.synchronize()

        return [("store_kv", run)]

    def state(self, step: str) -> Any:
        from kvcupy import observe

        return super().state(step), len(observe.observers), len(observe.order_observers)


class Explored(Program):
    """A program under the simulated scheduler."""

    def steps(self) -> list[Step]:
        def program(device: Any) -> Any:
            first, second = device.stream(), device.stream()
            call = valid_calls.EXAMPLES["store_kv"](device)
            kv.store_kv(**call, stream=first)
            kv.fork(first, second)
            kv.gather_kv(
                call["k_cache"], call["v_cache"], call["slot_mapping"], k_scale=call["k_scale"],
                v_scale_cache=call["v_scale_cache"], stream=second,
            )  # fmt: skip
            second.synchronize()
            return bits(device, call["k_cache"])

        def run() -> bool:
            explored = kv.explore(program, schedules=3, seed=1)
            if explored.failures:
                raise kv.KvcupyError(str(explored.failures[0]))
            return explored.ok

        return [self.keep("explore", run)]


def pool_of(device: Any, num_pages: int, **options: Any) -> Any:
    options = {"dtype": "fp32", **options}
    return kv.KVPool(num_pages, PAGE, LAYERS, HEADS, WIDTH, device=device, **options)


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


class Pools(Program):
    """Pools in every layout and placement, and over memory that is there."""

    def steps(self) -> list[Step]:
        device = self.device

        def facts(make: Callable[[], Any]) -> list[Any]:
            pool = make()
            return [pool.num_bytes, pool.allocator.num_free, *map(bool, pool.parts)]

        of_four = functools.partial(pool_of, device, 4)
        made: dict[str, Callable[[], Any]] = {
            "layer_first": of_four,
            "page_first": lambda: of_four(layout="page_first"),
            "scales": lambda: of_four(dtype="int8", scales=True),
            "pinned": lambda: of_four(placement="pinned"),
            "pageable": lambda: of_four(placement="pageable"),
            "mla": lambda: kv.MLAPool(4, PAGE, LAYERS, 16, device=device),
            "wrap": lambda: kv.KVPool.wrap(
                *(device.zeros((LAYERS, 4, PAGE, HEADS, WIDTH), "fp32") for _ in range(2))
            ),
        }
        return [self.keep(name, functools.partial(facts, make)) for name, make in made.items()]

    def state(self, step: str) -> Any:
        return sorted(self.results)


class TwoPools(Program):
    """What begins with two pools in other layouts and a stream."""

    far_options: ClassVar[dict[str, Any]] = {"placement": "pinned"}

    def prepare(self, device: Any) -> None:
        far = pool_of(device, 8, layout="page_first", **self.far_options)
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

    method = "auto"

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.far.allocator.free(self.far.allocator.alloc(8)[:3])  # the others are in use
        self.engine: Any = None
        self.copies = [device.zeros((PAGE, HEADS, WIDTH), "fp32") for _ in range(LAYERS)]

    def steps(self) -> list[Step]:
        def make() -> None:
            self.engine = kv.TransferEngine(self.near, self.far, method=self.method)

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
                    proceed(self.device)

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


class EngineOfCopies(Engine):
    """The same by the copy engine."""

    method = "copy"


# --- The paged cache ------------------------------------------------------------------------------


_network = Network(immediate=True)


def standing_in() -> Any:
    """Let senders and receivers be made on a stand-in for NIXL."""
    return mock.patch.object(agent, "NixlAgent", _network.open_agent)


def withdraw(sender: Any) -> None:
    """Take all offers back."""
    for offer in list(sender._offers.values()):
        offer.withdraw()


class Migration(TwoPools):
    """Pages offered and pulled, in one process; a pull that fails is made again, as users do."""

    far_options: ClassVar[dict[str, Any]] = {}

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.sender: Any = None
        self.receiver: Any = None

    def steps(self) -> list[Step]:
        def send() -> None:
            self.close(self.sender)
            with standing_in():
                self.sender = kv.PageSender(self.near)

        def receive() -> None:
            self.close(self.receiver)
            with standing_in():
                self.receiver = kv.PageReceiver(self.far)

        def pull() -> None:
            for attempt in range(3):
                pages = self.near.allocator.alloc(2)
                try:
                    ticket = self.sender.offer(pages, after=self.stream)
                except BaseException:
                    self.near.allocator.free(pages)
                    raise
                try:
                    handle = self.receiver.pull(ticket, [4, 5])
                    proceed(self.device)
                    try:
                        handle.wait_layer(1, self.stream)
                    finally:
                        while not handle.done():
                            proceed(self.device)
                    self.stream.synchronize()
                    return
                except (kv.TransferError, kv.DeviceError):
                    if attempt == 2:
                        raise
                    with suppress(kv.TransferError, kv.DeviceError):
                        self.stream.synchronize()  # it failed with the pull that it waited for
                finally:
                    withdraw(self.sender)
                    while self.near.allocator.num_free < 6:
                        time.sleep(0.001)

        return [("PageSender", send), ("PageReceiver", receive), ("pull", pull)]

    def state(self, step: str) -> Any:
        settle(self.device)
        others = np.delete(pages_of(self.device, self.far), [4, 5], 0).tobytes()
        return others, self.near.allocator.num_free, self.far.allocator.num_free

    def leaks(self) -> list[str]:
        return held_pages(self.near)

    def close(self, *ends: Any) -> None:
        for end in ends or (self.sender, self.receiver):
            if end is not None:
                end.close()


class Paged(Program):
    """Steps, forks, trees, windows and contents of a `PagedKVCache`."""

    options: ClassVar[dict[str, Any]] = {}
    owns_pages = True  # rather than leases
    set_span: tuple[Any, int, int] = ("fork", 2, 5)  # tokens of a sequence that `set_kv` writes

    def cache_options(self, device: Any) -> dict[str, Any]:
        return self.options

    def prepare(self, device: Any) -> None:
        options = {"num_layers": LAYERS, "num_q_heads": 4, "num_kv_heads": HEADS,
                   "head_dim": WIDTH, "num_pages": 24, "page_size": PAGE, "dtype": "fp32",
                   **self.cache_options(device)}  # fmt: skip
        rng = np.random.default_rng(3)
        shapes = [(LAYERS, 10, heads, options["head_dim"]) for heads in (4, HEADS, HEADS)]
        self.rows = [device.asarray(rng.standard_normal(s).astype(np.float32)) for s in shapes]
        self.cache = kv.PagedKVCache(device=device, **options)
        for part in (*self.cache.pool.parts, *self.cache.pool.scale_parts):
            ctypes.memset(part.pointer, 0xA5, part.size * part.itemsize)  # not a run before's bytes
        self.fresh: dict[Any, int] = {}  # tokens that the running step has appended
        self.appended: dict[Any, int] = {}  # tokens of the last step
        self.history: dict[str, list[int]] = {}  # tokens of each step, by sequence
        self.stream = device.stream()

    # Parts of steps.

    def attend(self, layer: int, count: int, stream: Any = None) -> Any:
        arrays = [a[layer][:count] for a in self.rows]
        out = self.cache.attention(layer, *arrays, stream=stream)
        if stream is not None:
            stream.synchronize()
        return out

    def forward(self, names: list[str], counts: list[int], **options: Any) -> list[Any]:
        with self.cache.forward(list(names), counts, **options):
            return [self.attend(layer, sum(counts)) for layer in range(LAYERS)]

    def step(self, names: Any, *counts: int, **options: Any) -> Step:
        """Return a whole step of some sequences."""

        def run() -> None:
            outputs = self.forward(list(names), list(counts), **options)
            self.results[f"out of {names} {counts}"] = outputs
            for name, count in zip(names, counts, strict=True):
                self.history.setdefault(name, []).append(count)

        return "forward", run

    def set_kv(self) -> None:
        name, start, stop = self.set_span
        key, value = (a[:, : stop - start] for a in self.rows[1:])
        self.cache.set_kv(name, start, key, value, stream=self.stream)
        self.stream.synchronize()

    def step_by_layer(self, key: str, names: str, *counts: int) -> list[Step]:
        """Return the calls of a step: begin, each layer, end."""
        cache = self.cache

        def begin() -> None:
            cache.begin_forward(list(names), list(counts))
            self.appended = self.fresh = dict(zip(names, counts, strict=True))

        def attention(layer: int) -> None:
            self.results[f"{key}, layer {layer}"] = self.attend(layer, sum(counts), self.stream)

        def end() -> None:
            if self.fresh:  # ending is over even if it raises
                self.fresh = {}
                cache.end_forward()

        layers = [("attention", functools.partial(attention, layer)) for layer in range(LAYERS)]
        return [("begin", begin), *layers, ("end", end)]

    def steps(self) -> list[Step]:
        cache, results, step = self.cache, self.results, self.step

        def tables() -> None:
            to_numpy = self.device.to_numpy
            slots, table = to_numpy(cache.slot_mapping()), to_numpy(cache.block_table())
            assert slots[0] == table[0, 1] * PAGE + 2, "tables of another step"
            indptr, indices, last_page_len = map(to_numpy, cache.page_table_csr())
            assert indices.tolist() == [*table[0], *table[1][: indptr[2] - indptr[1]]]
            results["tables"] = [to_numpy(cache.query_positions()), indptr, last_page_len]

        tree = step("ab", 4, 3, token_tree=[[-1, 0, 0, 2], [-1, 0, -1]])

        def commit() -> None:
            if cache.sequence_length("a") == 7:  # a failure has dropped the trees
                tree[1]()
            cache.commit_token_tree(["a", "b"], [3, 2])

        begin, first, second, end = self.step_by_layer("step", "ab", 1, 2)
        return [
            ("add", lambda: cache.add_sequence("a")),
            ("add", lambda: cache.add_sequence("b")),
            step("ab", 6, 2),
            ("fork", lambda: cache.fork_sequence("a", "fork", 6)),
            ("fork", lambda: cache.fork_sequence("a", "c", 4)),
            begin, first, ("tables", tables), second, end,
            tree,
            ("commit", commit),
            ("window", lambda: cache.enable_sliding_window("b", 4, 1)),
            step("b", 2),
            self.keep("get_kv", lambda: cache.get_kv("a", 1, 10)),
            ("set_kv", self.set_kv),
            ("save", lambda: cache.save_sequence("fork", self.folder / "fork")),
            ("save", lambda: cache.save_sequence("fork", self.folder / "fork")),  # over the other
            ("load", lambda: cache.load_sequence("loaded", self.folder / "fork")),
            step(["loaded", "c"], 1, 1),
            ("pop", lambda: cache.pop_tokens("a", 2)),
            ("remove", lambda: cache.remove_sequence("fork")),
            step("ac", 1, 3),
        ]  # fmt: skip

    def state(self, step: str) -> Any:
        settle(self.device)
        cache = self.cache
        known = cache._sequences._known
        pages = {}
        allocator = cache.pool.allocator
        # They may have replaced shared pages, and dropped trees.
        writes = step in ("set_kv", "commit")
        for name, sequence in known.items():
            pages[name] = (
                sequence.committed if writes else sequence.length,
                None if writes else (sequence.pages.tolist(), list(sequence.parents)),
                sequence.evicted, list(sequence.hashes), sequence.window, sequence.sink_tokens,
                None if sequence.offloaded is None else sequence.offloaded.pages.tolist(),
            )  # fmt: skip
        running = cache._steps.running
        owners = np.zeros_like(cache._sequences._references)
        for sequence in known.values():
            owners[sequence.pages] += 1
        if running is None and self.owns_pages:
            assert owners.tolist() == cache._sequences._references.tolist()
        return {
            "sequences": pages,
            "references": None if writes else cache._sequences._references.tolist(),
            "total": None if writes else cache.total_length,
            "free": None if writes else (allocator.num_free, allocator.allocated().tolist()),
            "running": None if running is None else (running.names, running.counts),
            "bytes": {name: self.tokens(name, step) for name in known},
            "files": files(self.folder),
        }

    def tokens(self, name: Any, step: str) -> Any:
        """Return the bytes of a sequence's tokens, without those that the step is writing."""
        cache, to_numpy = self.cache, self.device.to_numpy
        sequence = cache._sequences._known[name]
        if sequence.offloaded is not None:
            return None
        fresh = self.appended if step == "end" else self.fresh
        positions = np.arange(sequence.length - fresh.get(name, 0))
        if step == "commit":
            positions = positions[: sequence.committed]
        written, start, stop = self.set_span
        if step == "set_kv" and name == written:
            positions = positions[(positions < start) | (positions >= stop)]
        places = positions + np.where(positions < sequence.sink_tokens, 0, sequence.evicted)
        slots = sequence.slots(places, PAGE)
        seen, first = [], 0
        for pool in (cache.pool, cache.past_pool):
            if pool is None:
                continue
            num_slots = pool.num_pages * PAGE
            own = slots[(slots >= first) & (slots < first + num_slots)] - first
            first += num_slots
            for part in parts_of(pool):
                is_packed = isinstance(part, kv.ArrayView) and part.scales is not None
                array = np.asarray(to_numpy(part.packed if is_packed else part))
                seen.append(array.reshape(num_slots, -1)[own].tobytes())
        return seen

    def result(self) -> dict[str, Any]:
        cache = self.cache
        contents = {name: bits(self.device, cache.get_kv(name, 0, cache.sequence_length(name)))
                    for name in cache._sequences._known}  # fmt: skip
        return {**super().result(), "contents": contents,
                "files": [(name, size) for name, size, _ in files(self.folder)]}  # fmt: skip

    def reset(self) -> None:
        super().reset()
        self.fresh, self.appended = {}, {}
        self.history.clear()
        self.cache.clear()

    def leaks(self) -> list[str]:
        settle(self.device)
        self.cache.clear()
        references = int(self.cache._sequences._references.sum())
        return held_pages(self.cache.pool) + [f"{references} references"] * bool(references)


class PagedRotated(Paged):
    """The same with keys that are rotated."""

    def cache_options(self, device: Any) -> dict[str, Any]:
        return {"rope": kv.rope_table(64, WIDTH, device=device)}


class PagedPast(Paged):
    """Old tokens in four bits: demoted, shared, converted back, written and evicted."""

    options: ClassVar[dict[str, Any]] = {
        "demotion": kv.Demotion("nvfp4", recent=4, first=1, num_pages=16), "head_dim": 2 * WIDTH,
    }  # fmt: skip
    set_span = "b", 6, 11

    def steps(self) -> list[Step]:
        cache = self.cache
        number = itertools.count()

        def stepped(names: str, *counts: int) -> list[Step]:
            return self.step_by_layer(f"step {next(number)}", names, *counts)

        path = self.folder / "b"
        return [
            ("add", lambda: cache.add_sequence("a")),
            *stepped("a", 8), *stepped("a", 8),
            ("fork", lambda: cache.fork_sequence("a", "b", 10)),  # within a demoted page
            ("fork", lambda: cache.fork_sequence("a", "c")),
            *stepped("abc", 1, 3, 2),
            ("pop", lambda: cache.pop_tokens("a", 7)),  # in a demoted page too
            *stepped("ac", 2, 4),
            self.keep("get_kv", lambda: cache.get_kv("a", 1, 11)), ("set_kv", self.set_kv),
            ("save", lambda: cache.save_sequence("b", path)),
            ("load", lambda: cache.load_sequence("d", path)),
            ("window", lambda: cache.enable_sliding_window("d", 5, 1)),
            *stepped("bd", 1, 3),
            ("remove", lambda: cache.remove_sequence("c")),
            *stepped("ab", 5, 1),
        ]  # fmt: skip

    def state(self, step: str) -> Any:
        seen = super().state(step)
        seen["free past"] = self.cache.num_available_past_pages
        if step == "end":  # pages that the step has replaced are released, and windows slide
            known = self.cache._sequences._known
            kept = [name for name, sequence in known.items() if not sequence.window]
            return {what: {name: seen[what][name] for name in kept}
                    for what in ("sequences", "bytes")}  # fmt: skip
        if step == "set_kv":  # it may have replaced shared pages
            del seen["free past"]
        return seen

    def repair(self, step: str) -> None:
        """Demote what the end of a step could not: the next end would, once it has been read."""
        if step == "end":
            known, (group,) = self.cache._sequences._known, self.cache._groups
            group.demote(self.cache._steps.access, [known[name] for name in self.appended])

    def leaks(self) -> list[str]:
        return super().leaks() + held_pages(self.cache.past_pool)


class PagedGraph(Paged):
    """A step that is captured, and replayed for later steps."""

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.graph: Any = None
        self.outs = [device.zeros((2, 4, WIDTH), "fp32") for _ in range(LAYERS)]

    def steps(self) -> list[Step]:
        cache, stream = self.cache, self.stream

        def work() -> None:
            for layer in range(LAYERS):
                arrays = [a[layer][:2] for a in self.rows]
                cache.attention(layer, *arrays, out=self.outs[layer], stream=stream)

        def capture() -> None:
            with cache.forward(["a", "b"], [1, 1]):
                with stream.capture() as graph:
                    work()
                graph.launch(stream)
                stream.synchronize()
            self.graph = graph

        def replay() -> None:
            with cache.forward(["a", "b"], [1, 1]):
                self.graph.launch(stream)
                stream.synchronize()

        def read() -> list[Any]:
            return [self.device.to_numpy(out) for out in self.outs]

        return [
            ("add", lambda: cache.add_sequence("a")),
            ("add", lambda: cache.add_sequence("b")),
            self.step("ab", 3, 5),
            ("capture", capture),
            ("replay", replay),
            self.keep("first", read),
            ("replay", replay),
            self.keep("second", read),
        ]


class PagedGroups(Program):
    """A window, full attention and recurrent states in one cache."""

    owns_pages = True  # rather than leases and exports

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

        def update() -> None:
            slots = self.device.to_numpy(cache.state_slots()).tolist()
            self.written = list(names)
            for layer, (part, shape) in itertools.product((1, 2), (("conv", (4, 3)), ("ssm", 5))):
                array = cache.state(layer, part)
                for name, slot in zip(names, slots, strict=True):
                    length = cache.sequence_length(name)
                    row = np.full(shape, length + layer, np.float32).astype(array.dtype)
                    self.device.copy(array[slot], self.device.asarray(row))

        def end() -> None:
            self.written = []
            if self.fresh:  # ending is over even if it raises
                self.fresh = {}
                cache.end_forward()

        layers = [("attention", functools.partial(attention, layer)) for layer in (0, 3)]
        return [("begin", begin), *layers, ("states", update), ("end", end)]

    def steps(self) -> list[Step]:
        cache, path = self.cache, self.folder / "a"
        return [
            ("add", lambda: cache.add_sequence("a")), ("add", lambda: cache.add_sequence("b")),
            *self.step("prefill", "ab", 4, 3), *self.step("more", "a", 8),
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
                if sequence.offloaded is not None:
                    tokens[name] = stop, [b"offloaded"]
                    continue
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
            if cache._steps.running is None and self.owns_pages:
                assert owners.tolist() == group.sequences._references.tolist()
            pages = {name: s.pages.tolist() for name, s in known.items()}
            allocated = group.pool.allocator.allocated().tolist()
            # Windows slide, and trees are dropped.
            is_open = self.owns_pages and step not in ("end", "commit")
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


class PagedGroupsOffloaded(PagedGroups):
    """A sequence of several groups, which goes to host memory and back."""

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.tiers = kv.TieredCache(groups=self.cache, host_bytes=1 << 16)
        self.cache.attach(self.tiers)

    def steps(self) -> list[Step]:
        cache = self.cache

        def offload() -> None:
            if cache._sequences.find("a").offloaded is None:
                cache.offload("a")

        def fork() -> None:
            if "b" not in cache:
                cache.fork_sequence("a", "b", 8)

        move = ("offload", offload), ("onboard", lambda: cache.onboard("a"))
        self.last = self.step("last", "ab", 1, 2)
        return [
            ("add", lambda: cache.add_sequence("a")), *self.made(), *move, ("fork", fork), *move,
            *self.last,
        ]  # fmt: skip

    def made(self) -> list[Step]:
        return [*self.step("prefill", "a", 4), *self.step("more", "a", 4)]

    def repair(self, step: str) -> None:
        """Replace a sequence that could not be saved, loaded or copied, and the running step."""
        cache = self.cache
        has_fork = "b" in cache
        is_running = has_fork and cache._steps.running is not None
        known = [own for group in cache._groups for own in group.sequences._known.values()]
        states = [own.offloaded for own in cache._states._of.values()]
        saves = [away.save for away in states if away is not None]
        if any(map(was_lost, known)) or any(save.failure is not None for save in saves):
            cache.clear()
            cache.add_sequence("a")
            for _, call in self.made():
                call()
            if has_fork:
                cache.fork_sequence("a", "b", 8)
            if is_running:
                for _, call in self.last[: 2 if step == "attention" else 3]:
                    call()

    def reset(self) -> None:
        super().reset()
        self.tiers.clear()

    def leaks(self) -> list[str]:
        self.tiers.clear()
        hosts = [tiers.host.pool for tiers in self.tiers._tiers]
        return super().leaks() + held_pages(*hosts)


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

    write = "through"
    first = 1000  # hash
    kept: tuple[int, ...] = ()  # through closing and opening
    num_host_pages = 8

    def prepare(self, device: Any) -> None:
        self.near = pool_of(device, 4)
        self.far = pool_of(device, self.num_host_pages, layout="page_first", placement="pinned")
        self.compute = device.stream()
        rng = np.random.default_rng(4)
        self.stock = rng.standard_normal((8, 2 * LAYERS, PAGE, HEADS, WIDTH)).astype(np.float32)
        self.blocks = [[device.asarray(part) for part in block] for block in self.stock]
        self.tiers: Any = None

    def open(self) -> None:
        self.tiers = kv.TieredCache(self.near, self.far, write=self.write)

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
            ("close", self.close_tiers),
            ("TieredCache", self.open),
            ("acquire", use(*self.kept)),
            ("clear", lambda: self.tiers.clear()),
        ]

    def close_tiers(self) -> None:
        self.tiers.close()

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


class TieredBack(Tiered):
    """Blocks are saved when they are evicted."""

    write = "back"


def finish_store_work(tiers: Any) -> None:
    """Let the thread of the stores do all that is queued, and that can be done by now."""
    worker = tiers._tiers[0].store
    while (step := worker._next(worker._tiers)) is not None or worker.is_writing:
        if step is not None:
            step()
        else:
            tiers.engine.save_stream.synchronize()


class TieredStores(Tiered):
    """Over a store; its thread takes steps when a program asks."""

    first = 2**64
    kept = (0, 1, 2, 3)
    num_host_pages = 4

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.stored: dict[int, list[Any]] = {}

    def open(self) -> None:
        store = SimpleNamespace(
            match=self.match, put=self.put, get=self.get, clear=self.stored.clear, close=len
        )
        self.tiers = kv.TieredCache(self.near, self.far, stores=[store])
        self.tiers._tiers[0].store._thread = threading.current_thread()  # so that none is started

    def match(self, hashes: list[int]) -> int:
        return sum(1 for _ in itertools.takewhile(self.stored.__contains__, hashes))

    def put(self, hashes: list[int], pages: list[int]) -> list[str]:
        for hash, page in zip(hashes, pages, strict=True):
            self.stored[hash] = [np.array(part[page]) for part in parts_of(self.far)]
        return ["stored"] * len(hashes)

    def get(self, hashes: list[int], pages: list[int], *, deadline_s: float | None) -> list[bool]:
        for hash, page in zip(hashes, pages, strict=True):
            for part, values in zip(parts_of(self.far), self.stored[hash], strict=True):
                part[page] = values
        return [True] * len(hashes)

    def insert(self, *blocks: int) -> None:
        super().insert(*blocks)
        finish_store_work(self.tiers)

    def use(self, *blocks: int) -> None:
        self.tiers.prefetch([self.first + b for b in blocks])
        finish_store_work(self.tiers)
        super().use(*blocks)

    def close_tiers(self) -> None:
        self.tiers.close(deadline_s=0)

    def reset(self) -> None:
        settle(self.device)
        if self.tiers is not None and not self.tiers.closed:
            self.tiers.close(deadline_s=0)
        self.tiers = None
        self.stored.clear()


def was_lost(sequence: Any) -> bool:
    """Return whether a copy of its pages has failed: it can only be removed."""
    offloaded, saves = sequence.offloaded, []
    if offloaded is not None:
        saves = [part.save for part in (offloaded, offloaded.past) if part is not None]
    return any(work.failure is not None for work in (*sequence.loads, *saves))


class PagedTiers(Paged):
    """A `PagedKVCache` with a tiered cache: prefixes, offload and onboard."""

    owns_pages = False

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.host = pool_of(device, 12, layout="page_first", placement="pinned")
        self.tiers = self.make_tiers()
        self.cache.attach(self.tiers)
        self.hashes = kv.block_hashes(range(8), PAGE)

    def make_tiers(self) -> Any:
        return kv.TieredCache(self.cache.pool, self.host)

    def add(self, name: str) -> None:
        self.cache.add_sequence(name, self.hashes)
        if self.history.get("a") and self.cache.sequence_length(name) < 8:  # blocks were lost
            self.cache.remove_sequence(name)
            self.cache.add_sequence(name)
            self.forward([name], [8])

    def steps(self) -> list[Step]:
        cache = self.cache

        def fork() -> None:
            cache.fork_sequence("b", "c", 8)
            self.history["c"] = [8]

        return [
            ("add", lambda: self.add("a")),
            self.step("a", 8),
            ("remove", lambda: cache.remove_sequence("a")),
            ("evict", lambda: self.tiers.evict(int(self.tiers.stats()["device_blocks"]))),
            ("add", lambda: self.add("b")),
            self.step("b", 2),
            ("offload", lambda: cache.offload("b")),
            ("onboard", lambda: cache.onboard("b")),
            self.step("b", 1),
            ("fork", fork),
            self.step("c", 3),
            ("offload", lambda: cache.offload("c")),
            ("remove", lambda: cache.remove_sequence("c")),
        ]

    def repair(self, step: str) -> None:
        """Replace sequences whose pages could not be loaded."""
        cache = self.cache
        for name, sequence in list(cache._sequences._known.items()):
            if not was_lost(sequence):
                continue
            cache.remove_sequence(name)
            cache.add_sequence(name, self.hashes)
            for count in [*([] if cache.sequence_length(name) else [8]),
                          *[n for n in self.history.get(name, []) if n != 8]]:  # fmt: skip
                self.forward([name], [count])

    def state(self, step: str) -> Any:
        seen = super().state(step)
        tiers = self.tiers._tiers[0]
        self.tiers.stats()
        seen["host"] = self.host.allocator.num_free
        if step in ("add", "evict", "remove"):  # blocks may have been evicted, moved or lost
            owned = set(np.flatnonzero(tiers.device.owned).tolist())
            for sequence in self.cache._sequences._known.values():
                owned |= set(sequence.pages.tolist())
            assert set(self.cache.pool.allocator.allocated().tolist()) == owned
            del seen["free"], seen["host"]
        return seen

    def reset(self) -> None:
        super().reset()
        self.tiers.clear()

    def leaks(self) -> list[str]:
        settle(self.device)
        self.cache.clear()
        self.tiers.clear()
        return held_pages(self.cache.pool, self.host)


class PagedTiersPast(PagedTiers):
    """A sequence with demoted pages, which goes to host memory and back."""

    options: ClassVar[dict[str, Any]] = {
        "demotion": kv.Demotion("fp8_e4m3", recent=3, num_pages=12)
    }  # fmt: skip

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        self.add_demoted()
        self.cache.offload("a")  # the stand-in for CUDA does not run the reference for it
        self.cache.onboard("a")

    def add_demoted(self) -> None:
        self.cache.add_sequence("a")
        for count in (8, 6):
            self.forward(["a"], [count])

    def steps(self) -> list[Step]:
        def offload() -> None:
            if self.cache._sequences.find("a").offloaded is None:
                self.cache.offload("a")

        onboard = ("onboard", lambda: self.cache.onboard("a"))
        read = self.keep("get_kv", lambda: self.cache.get_kv("a", 0, 14))
        return [("offload", offload), onboard, read] * 2

    def repair(self, step: str) -> None:
        """Replace the sequence if its pages were not copied."""
        if was_lost(self.cache._sequences.find("a")):
            self.cache.remove_sequence("a")
            self.add_demoted()

    def reset(self) -> None:
        super().reset()
        settle(self.device)
        self.add_demoted()

    def leaks(self) -> list[str]:
        held = super().leaks() + held_pages(self.cache.past_pool)
        for engine in self.cache._tiers._past_engines.values():
            held += held_pages(engine.host_pool)
        return held


class Exchange(Program):
    """Sequences that a cache exports and imports again.

    Attributes
    ----------
    sender, receiver : of the cache
    """

    cache: Any

    def prepare(self, device: Any) -> None:
        super().prepare(device)
        with standing_in():
            self.sender, self.receiver = kv.PageSender(self.cache), kv.PageReceiver(self.cache)
        self.ticket = b""

    def export(self, name: str = "a") -> None:
        self.ticket = self.cache.export_sequence(name, self.sender)

    def import_(self, name: str, count: int, source: str = "a") -> None:
        """Import the offer of so many tokens; one that a failure has ended is made again."""
        cache = self.cache
        for is_last in (False, True):
            if not self.is_open:
                cache.fork_sequence(source, "again", count)
                self.export("again")
                cache.remove_sequence("again")
            try:
                pull = cache.import_sequence(name, self.ticket, self.receiver)
                while not pull.done():
                    proceed(self.device)
                    time.sleep(0)
                while self.is_open:  # until the sender has the notification
                    time.sleep(0.001)
                return
            except BaseException as error:
                if name in cache:
                    cache.remove_sequence(name)
                if is_last or getattr(error, "reason", "") not in ("failed", "lost"):
                    raise

    @property
    def is_open(self) -> bool:
        """Whether an offer can still be imported."""
        return bool(self.sender.stats()["offers"])

    def take_back(self) -> None:
        """End all offers of the last export, and release what they have held."""
        withdraw(self.sender)
        self.cache.num_available_pages  # noqa: B018

    def state(self, step: str) -> Any:
        self.cache.num_available_pages  # noqa: B018 - what ended exports have held is released
        seen: dict[str, Any] = super().state(step)
        if step == "import":  # the offer may have failed, and its pages are released
            return {name: of for name, of in seen.items() if name in _BEYOND_OFFERS}
        if step == "end":  # it is over, and the offer is withdrawn
            return {name: of for name, of in seen.items() if name in _BEYOND_PAGES}
        return seen

    def reset(self) -> None:
        super().reset()
        self.take_back()

    def leaks(self) -> list[str]:
        self.take_back()
        return super().leaks()

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


# Of a state.
_BEYOND_PAGES = "sequences", "total", "files"
_BEYOND_OFFERS = *_BEYOND_PAGES, "bytes", "groups", "live"


class PagedExchange(Exchange, Paged):
    """Sequences that are exported, and imported by the same cache, also in a running step."""

    owns_pages = False

    def steps(self) -> list[Step]:
        cache = self.cache

        begin, first, second, end = self.step_by_layer("step", "a", 3)
        return [
            ("add", lambda: cache.add_sequence("a")),
            self.step("a", 6),
            ("export", self.export),
            self.step("a", 2),
            ("import", lambda: self.import_("b", 6)),
            self.step("b", 1),
            begin, first, ("export", self.export), second, end,
            ("import", lambda: self.import_("c", 11)),
            ("remove", lambda: cache.remove_sequence("a")),
            self.step("c", 1),
        ]  # fmt: skip


class PagedGroupsExchange(Exchange, PagedGroups):
    """The same of several groups, with kept states, to which the imported sequence returns."""

    owns_pages = False

    def steps(self) -> list[Step]:
        cache = self.cache
        return [
            ("add", lambda: cache.add_sequence("a")),
            *self.step("prefill", "a", 4), *self.step("more", "a", 4),
            ("export", self.export),
            ("import", lambda: self.import_("b", 8)),
            *self.step("last", "ab", 1, 2),
        ]  # fmt: skip


# --- Streams, graphs, timelines -------------------------------------------------------------------


class Streams(Program):
    """Streams that wait for one another, host functions, events with times."""

    def prepare(self, device: Any) -> None:
        self.call = valid_calls.EXAMPLES["store_kv"](device)
        self.main = self.side = None
        self.seen: list[str] = []

    def steps(self) -> list[Step]:
        device = self.device

        def streams() -> None:
            self.main, self.side = device.stream(), device.stream()

        def forked() -> None:
            kv.fork(self.main, self.side)
            kv.store_kv(**self.call, stream=self.side)
            kv.join(self.main, self.side)
            kv.keep_alive([self.call["key"]], self.side)
            self.main.synchronize()

        def called() -> None:
            self.main.call(lambda: self.seen.append("called"))

        def synchronized() -> None:
            self.main.synchronize()
            self.results["seen"] = list(self.seen)

        def timed() -> None:
            first, last = (device.event(timing=True) for _ in range(2))
            self.main.record(first)
            self.main.record(last)
            assert last.elapsed_us(first) >= 0
            self.results["timed"] = True

        return [
            ("stream", streams),
            ("fork", forked),
            ("call", called),
            ("synchronize", synchronized),
            ("event", timed),
        ]

    def reset(self) -> None:
        super().reset()
        self.seen.clear()


class Graph(Program):
    """Operations of two streams in a graph, launched several times."""

    def prepare(self, device: Any) -> None:
        self.store, self.gather = (
            valid_calls.EXAMPLES[name](device) for name in ("store_kv", "gather_kv")
        )
        self.gather |= {name: self.store[name] for name in ("k_cache", "v_cache", "v_scale_cache")}
        self.call = self.store | self.gather
        self.main, self.side = device.stream(), device.stream()
        self.graph: Any = None

    def steps(self) -> list[Step]:
        def capture() -> None:
            with self.main.capture() as graph:
                kv.store_kv(**self.store, stream=self.main)
                kv.fork(self.main, self.side)
                kv.gather_kv(**self.gather, stream=self.side)
                kv.join(self.main, self.side)
            self.graph = graph

        def launch() -> None:
            self.graph.launch(self.main)
            self.main.synchronize()

        def inline() -> None:
            self.graph.launch(self.side)
            self.side.synchronize()

        return [("capture", capture), ("launch", launch), ("launch", inline)]

    def state(self, step: str) -> Any:
        settle(self.device)
        return self.main.capturing, self.side.capturing


class Timeline(Program):
    """An operation under a timeline, which is saved."""

    def prepare(self, device: Any) -> None:
        self.call, self.stream = valid_calls.EXAMPLES["store_kv"](device), device.stream()
        self.recorded: Any = None

    def steps(self) -> list[Step]:
        def record() -> None:
            with kv.timeline() as recorded:
                kv.store_kv(**self.call, stream=self.stream)
                self.stream.synchronize()
            self.recorded = recorded
            self.results["spans"] = [span.name for span in recorded.spans]

        def save() -> None:
            self.recorded.save(self.folder / "timeline.json")

        return [("timeline", record), ("save", save)]

    def state(self, step: str) -> Any:
        from kvcupy import observe

        return len(observe.observers)


# --- Files ----------------------------------------------------------------------------------------


class Blocks(Program):
    """A block store in files: opened by two users, blocks put and got, some evicted, cleared."""

    def prepare(self, device: Any) -> None:
        self.pools = [kv.KVPool(8, PAGE, LAYERS, HEADS, WIDTH, device="host") for _ in range(2)]
        self.stores: list[kv.BlockStore | None] = [None, None]
        self.hashes = kv.block_hashes(range(8), 1)
        for page in range(8):
            for part in self.pools[0].parts:
                kv.arrays.array_at(
                    part.owner, part.pointer, part.shape, np.dtype(np.uint16), part.strides
                )[page] = page + 1

    def steps(self) -> list[Step]:
        def open_(n: int, capacity_bytes: int | None) -> Callable[[], None]:
            def run() -> None:
                self.stores[n] = kv.BlockStore.open(
                    f"file:{self.folder}/store", self.pools[n], capacity_bytes=capacity_bytes
                )

            return run

        def put(*pages: int) -> Callable[[], None]:
            def run() -> None:
                hashes = [self.hashes[page] for page in pages]
                outcomes = self.stores[0].put(hashes, pages)
                if not {*outcomes} <= {"stored", "known"}:  # the disk was full, or failed
                    outcomes = self.stores[0].put(hashes, pages)
                assert {*outcomes} <= {"stored", "known"}, outcomes

            return run

        def get(num_blocks: int) -> Callable[[], None]:
            def run() -> None:
                there = self.stores[1].get(self.hashes, range(8))
                for page, hit in enumerate(there):
                    contents = {bits(None, self.pools[1].k(i)[page]) for i in range(LAYERS)}
                    expected = np.full((PAGE, HEADS, WIDTH), page + 1, np.uint16).tobytes()
                    assert not hit or contents == {expected}, f"page {page}: wrong bytes"
                # A full disk costs a block that is evicted, an error of a read the block.
                assert num_blocks - 1 <= sum(there) <= num_blocks

            return run

        return [
            ("BlockStore", open_(0, 40_000)), ("BlockStore", open_(1, None)),
            ("put", put(0, 1, 2)), ("get", get(3)), ("put", put(3, 4, 5)), ("put", put(6, 7)),
            ("get", get(8)), ("clear", lambda: self.stores[1].clear()),
        ]  # fmt: skip

    def state(self, step: str) -> Any:
        """Return the blocks there are, but for those that the step puts."""
        reader = self.stores[1]
        return None if reader is None or step in ("put", "clear") else reader.match(self.hashes)

    def close(self) -> None:
        for store in self.stores:
            if store is not None:
                store.close()


def cache_in(folder: Path) -> Any:
    """Put the disk cache in a folder."""
    return mock.patch.dict("os.environ", {"KVCUPY_CACHE_DIR": str(folder)})


class KernelCache(Program):
    """The disk cache of compiled kernels: entries made, found again, linked under a second name."""

    def steps(self) -> list[Step]:
        content = b"kernel" * 1000

        def of(name: str) -> Any:
            def run() -> None:
                with cache_in(self.folder / "cache"):
                    made = kernel_cache.get_or_make(f"cubin-{name}", lambda: content)
                    self.results[f"bytes {name}"] = made
                    path = kernel_cache.file(
                        f"host-{name}", ".so", lambda path: path.write_bytes(content)
                    )
                    self.results[f"file {name}"] = path.read_bytes().startswith(content)
                    kernel_cache.store(f"cubin-{name}-2", content, aliases=[f"cubin-{name}-3"])

            return run

        return [("compile", of("a")), ("load", of("a")), ("compile", of("b"))]

    def state(self, step: str) -> Any:
        """Return the files that are neither entries nor locks: none may be left behind."""
        return [path.name for path in self.folder.rglob(".new-*")]

    def result(self) -> dict[str, Any]:
        with cache_in(self.folder / "cache"):
            names = ("cubin-a", "cubin-b")
            loaded = {name: kernel_cache.load(name) for name in names}
        whole = {None, b"kernel" * 1000}
        assert set(loaded.values()) <= whole, "an entry that is not whole was served"
        return dict(self.results)


class Calibration(Program):
    """Thresholds of transfers, stored for a device."""

    def steps(self) -> list[Step]:
        def save() -> str:
            with cache_in(self.folder):
                return calibrate.save("a model", {"model": "a model"}).name

        return [self.keep("save", save)] * 2

    def state(self, step: str) -> Any:
        return files(self.folder)


# --- All of them ----------------------------------------------------------------------------------


OUTPUTS = {"store_kv": ("k_cache", "v_cache", "v_scale_cache")}  # static scales, dynamic scales


def _calls() -> Iterator[type[Program]]:
    for name in valid_calls.EXAMPLES:
        doc = f"`{name}` on a stream."
        yield type(name, (Call,), {"name": name, "outputs": OUTPUTS.get(name, ()), "__doc__": doc})


def programs() -> dict[str, type[Program]]:
    """Return all programs by name."""
    found = {kind.__name__: kind for kind in _calls()}
    bases = Program, Call, TwoPools, Exchange
    for kind in globals().values():
        if inspect.isclass(kind) and issubclass(kind, Program) and kind not in bases:
            found[kind.__name__] = kind
    return found


PROGRAMS = programs()

HOST_ALONE = ("Blocks", "KernelCache", "Calibration", "Explored", "Checked")
"""What is about files or the host device; the others run on the stand-in for CUDA too."""
