"""A paged cache whose streams are held up, and the same program run inline, one call after another.

Whatever waits for whatever, both must give the same bits. A world that is not `live` is the inline
one: all its streams are None, and its gates are open.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
from engine_cases import PATIENCE_S, poll
from helpers import demoting
from paged_cases import SMALL, random_tree
from stream_cases import Gate, Log

import kvcupy as kv
from kvcupy import observe

HOLD_S = 0.03  # for so long something is held up, that must be waited for


class _Open:
    """The gate of a world without streams."""

    def open(self):
        pass


class World:
    """A cache, two streams that compute, and all that comes out.

    Parameters
    ----------
    live : whether there are streams; else all is inline
    control : whether something must come too early, and is waited for
    copy : the copy stream: "own" of the cache, "given" to it, or one that computes, by its name
    steps, tokens : for how many steps there are rows, and how many rows each has. All of them are
        on the device beforehand, so that a step puts nothing on any stream but what the cache does
    """

    def __init__(
        self, device, live=True, *, control=False, copy="own", steps=14, tokens=20, seed=0,
        **options,
    ):  # fmt: skip
        self.device, self.live = device, live
        self.patience_s = PATIENCE_S if control else HOLD_S
        options = {**SMALL, **options}
        self.streams = dict.fromkeys(("compute", "other", "copy"))
        given = device.as_stream(None)
        if live:
            for name in (*self.streams,):
                self.streams[name] = device.stream()
                self.streams[name].name = name
            if copy in self.streams:
                self.streams["copy"] = self.streams[copy]
            given = None if copy == "own" else self.streams["copy"]
        self.streams["inline"] = None
        self.cache = kv.PagedKVCache(device=device, copy_stream=given, **demoting(options))
        self.layers = range(options["num_layers"])
        self._heads = [options[name] for name in ("num_q_heads", "num_kv_heads", "num_kv_heads")]
        self._width = options["head_dim"]
        self._stock = [self.rows(tokens, [seed, n]) for n in reversed(range(steps))]
        self._stock_of_pages = iter([device.zeros((64,), np.int32) for _ in range(steps)])
        self.seen, self._held = [], []
        self._warm(options.get("slots_in_flight", 2))

    def rows(self, count=1, seed=0):
        """Query, key, value and out of all layers, each (L, count, heads, D)."""
        rng = np.random.default_rng(seed)
        shapes = [(len(self.layers), count, heads, self._width) for heads in self._heads]
        arrays = [self.device.asarray(np.float32(rng.standard_normal(s))) for s in shapes]
        return *arrays, self.device.zeros(shapes[0], np.float32)

    def _warm(self, num_slots):
        """Let every slot of the ring have been used, by a decode step of one sequence."""
        rows = self.rows()
        self.cache.add_sequence("warm")
        with observe.attached(Log()) as log:
            for _ in range(num_slots):
                with self.cache.forward(["warm"], [1]):
                    self.cache.attention(
                        0, *(a[0] for a in rows[:3]), out=rows[3][0], stream=self.streams["compute"]
                    )
        if self.live:
            self.streams["copy"] = next(o.stream for o in log.operations if o.name == "copy")
        self.cache.remove_sequence("warm")
        self.settle()

    def take(self):
        """Rows for the next step."""
        return self._stock.pop()

    def keep(self, label, array):
        """Remember what will be in an array when all is done."""
        self.seen.append((f"{label}, {len(self.seen)}", array))

    # --- What happens ---

    def step(self, names, lens=None, on="compute", trees=None, *, keep=True, aside=None):
        """A whole step.

        Parameters
        ----------
        on : the stream, or one for each layer
        keep : False: an exception takes it back
        aside : called between two layers, and before the end
        """
        names = list(names)
        lens = [1] * len(names) if lens is None else lens
        forward = self.cache.forward(list(names), lens, token_tree=trees)
        with suppress(InterruptedError), forward:
            self.attend(sum(lens), on, aside)
            if aside is not None:
                aside()
            if not keep:
                raise InterruptedError

    def attend(self, count, on="compute", aside=None):
        """Attend in every layer of the step that has begun."""
        query, key, value, out = (a[:, :count] for a in self.take())
        chosen = [on] * len(self.layers) if isinstance(on, str) else on
        for layer, name in zip(self.layers, chosen, strict=True):
            if layer and aside is not None:
                aside()
            self.cache.attention(
                layer, query[layer], key[layer], value[layer],
                out=out[layer], stream=self.streams[name],
            )  # fmt: skip
        self.keep("out", out)

    def prefill(self, *names_and_lens, on="compute"):
        """Add sequences and append to them in one step: name, length, name, length, ..."""
        for name in names_and_lens[::2]:
            self.cache.add_sequence(name)
        self.step(names_and_lens[::2], names_and_lens[1::2], on)

    def read(self, name, on="other"):
        """Take K and V of a sequence out of the cache."""
        length = self.cache.sequence_length(name)
        got = self.cache.get_kv(name, 0, length, stream=self.streams[on])
        for side, array in zip("KV", got, strict=True):
            self.keep(f"{side} of {name}", array)

    def write(self, name, start, count, on="other"):
        """Overwrite tokens of a sequence."""
        _, key, value, _ = self.take()
        self.cache.set_kv(name, start, key[:, :count], value[:, :count], stream=self.streams[on])

    def lists_of(self, name, on="other"):
        """Begin a step of a sequence, and let a stream copy away the numbers of its pages."""
        stream = self.streams[on]
        with self.cache.forward([name], [1]):
            _, pages, _ = self.cache.page_table_csr(stream=stream)
            out = next(self._stock_of_pages)[: pages.shape[0]]
            self.device.copy(out, pages, stream=stream)
        self.keep(f"pages of {name}", out)

    # --- What is late ---

    def gate(self, name):
        """Hold a stream up."""
        if not self.live:
            return _Open()
        self._held.append(self.streams[name])
        return Gate(self.streams[name])

    def settle(self, *names):
        """Wait for all streams; or for some, except those that are held up under another name."""
        if not self.live:
            return
        if not names:
            self.device.synchronize()
        for name in names:
            if self.streams[name] not in self._held:
                self.streams[name].synchronize()

    def done(self, name):
        """Whether a stream has nothing to do."""
        return not self.live or self.streams[name].done()

    def finish(self, gate, name):
        """Give a stream its chance to come too early, then open the gate."""
        poll(lambda: self.done(name), self.patience_s)
        gate.open()

    def finish_on_host(self, gate, work):
        """Do some work that blocks the host until the gate is open."""
        if not self.live:
            work()
            return
        with background(work) as thread:
            inline = self.device.as_stream(None)
            poll(lambda: not thread.is_alive() and inline.done(), self.patience_s)
            gate.open()

    # --- What comes out ---

    def results(self, names=()):
        """All that has been seen, and what sequences hold in the end, as bits."""
        self.settle()
        for name in names:
            if name in self.cache:
                self.read(name, "other")
        self.settle()
        return {
            label: np.ascontiguousarray(self.device.to_numpy(array)).view(np.uint32)
            for label, array in self.seen
        }


def same(got, want):
    """Compare the results of two worlds, bit for bit."""
    assert list(got) == list(want)
    for label, bits in want.items():
        apart = np.argwhere(got[label] != bits)
        if len(apart):
            index = tuple(apart[0].tolist())
            raise AssertionError(
                f"{label}: {len(apart)} of {bits.size} words differ, the first at {index}: "
                f"got {got[label][index]:#x}, want {bits[index]:#x}"
            )


def check(device, program, *, copy="own", **options):
    """Run a program with streams, then inline, and compare what it returns, bit for bit."""
    want = program(World(device, live=False, **options))  # first, so that kernels are loaded
    same(program(World(device, copy=copy, **options)), want)


@contextmanager
def background(work):
    """Run a function on another thread for the length of a block; its exception is raised."""
    failures = []

    def run():
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it never came to its end"
    if failures:
        raise failures[0]


@contextmanager
def dropped_host_wait(monkeypatch, device, index):
    """Let one wait of the host for an event, counted from 0, not happen. Yields those seen."""
    kind, seen = type(device.event()), []
    genuine = kind.synchronize

    def synchronize(self):
        seen.append(self)
        if len(seen) - 1 != index:
            genuine(self)

    with monkeypatch.context() as patch:
        patch.setattr(kind, "synchronize", synchronize)
        yield seen


# --- Steps as graphs ---


class Decoder:
    """A step of one token each for up to `batch` sequences. Where a world is inline, plain calls.

    Parameters
    ----------
    pieces : a graph for each layer, or one for all
    way : how it is captured: between begin and end ("within"), those in the capture ("around"), or
        in a step that is taken back ("taken back")

    Notes
    -----
    Graphs read rows from, and write to, arrays that stay where they are. The stream of a launch
    brings them there, and takes out away; streams take turns at that, as they must for any arrays.
    """

    def __init__(self, world, batch, *, pieces=False, way="within"):
        self.world, self.batch, self.pieces = world, batch, pieces
        self.rows = world.rows(batch)
        self.graphs = []
        self._last = None
        self._names = [("captured", batch, n) for n in range(batch)]
        for name in self._names:
            world.cache.add_sequence(name)
        getattr(self, "_" + way.replace(" ", "_"))()
        for name in self._names:
            world.cache.remove_sequence(name)

    def _within(self):
        with self.world.cache.forward(self._names, [1] * self.batch):
            self._capture()

    def _taken_back(self):
        with suppress(InterruptedError), self.world.cache.forward(self._names, [1] * self.batch):
            self._capture()
            raise InterruptedError

    def _around(self):
        def begin():
            self.world.cache.begin_forward(self._names, [1] * self.batch)

        self._capture(begin, self.world.cache.end_forward)

    def _capture(self, begin=None, end=None):
        world, stream = self.world, self.world.streams["compute"]
        begin, end = (call or (lambda: None) for call in (begin, end))
        if not world.live:
            begin()
            end()
        elif self.pieces:
            begin()
            for layer in world.layers:
                with stream.capture() as graph:
                    self.attend(layer)
                self.graphs.append(graph)
            end()
        else:
            with stream.capture() as graph:
                begin()
                for layer in world.layers:
                    self.attend(layer)
                end()
            self.graphs.append(graph)

    def attend(self, layer, stream="compute"):
        query, key, value, out = (a[layer] for a in self.rows)
        self.world.cache.attention(
            layer, query, key, value, out=out, stream=self.world.streams[stream]
        )

    def step(self, names, on="compute", *, keep=True, aside=None):
        """A step of some sequences; `on`, `keep` and `aside` as in `World.step`."""
        names = list(names)
        if not self.world.live:
            self.world.step(names, None, on, keep=keep, aside=aside)
            return
        with suppress(InterruptedError), self.world.cache.forward(list(names), [1] * len(names)):
            self.launch(len(names), on, aside)
            if aside is not None:
                aside()
            if not keep:
                raise InterruptedError

    def launch(self, count, on="compute", aside=None):
        """Launch the graphs, in the step that has begun."""
        world, device = self.world, self.world.device
        chosen = [on] * len(self.graphs) if isinstance(on, str) else on
        streams = [world.streams[name] for name in chosen[: len(self.graphs)]]
        given = world.take()
        first = device.as_stream(streams[0])
        if self._last is not None and self._last[0] is not first:
            first.wait(self._last[1])
        for array, new in zip(self.rows[:3], given, strict=False):
            device.copy(array, new[:, : self.batch], stream=first)
        arrived = first.record()
        if aside is not None and not self.pieces:
            for _ in world.layers[1:]:
                aside()
        for number, (graph, stream) in enumerate(zip(self.graphs, streams, strict=True)):
            last = device.as_stream(stream)
            if number and aside is not None:
                aside()
            if last is not first:
                last.wait(arrived)
            graph.launch(stream)
            arrived, first = last.record(), last
        out = given[3][:, :count]
        device.copy(out, self.rows[3][:, :count], stream=first)
        self._last = first, first.record()
        world.keep("out", out)


# --- Programs ---


MAX_TOKENS = 24  # of a step


class Program:
    """Makes calls at random. Two of the same seed make the same calls, on whatever streams.

    Parameters
    ----------
    decoders : captured steps, by how many sequences they are for, which then take part
    """

    def __init__(self, world, seed, decoders=None):
        self.world, self.cache, self.decoders = world, world.cache, decoders or {}
        self.rng = np.random.default_rng(seed)
        self.names, self.num_added = [], 0
        self.pending = {}  # nodes of trees to be committed
        self.busy = []  # the sequences of the running step

    def run(self, count):
        calls = [
            self.add, self.step, self.step, self.step, self.step, self.commit, self.fork,
            self.pop, self.remove, self.slide, self.read, self.write, self.late, self.late,
        ]  # fmt: skip
        for _ in range(count):
            call = calls[self.rng.integers(len(calls))]
            try:
                call()
            except kv.CacheFull:
                self.remove()
        self.commit(everyone=True)
        return self.world.results(self.names)

    # Choices

    def chance(self, part):
        return self.rng.random() < part

    def some(self, names, most):
        chosen = self.rng.permutation(len(names))[: self.rng.integers(1, most + 1)]
        return [names[i] for i in chosen]

    def one(self):
        """A sequence that is in no step and has no tree to be committed, or None."""
        names = [name for name in self.names if name not in {*self.pending, *self.busy}]
        return names[self.rng.integers(len(names))] if names else None

    def stream(self):
        return ("compute", "compute", "other", "inline")[self.rng.integers(4)]

    # Calls

    def add(self):
        name = f"s{self.num_added}"
        self.num_added += 1
        self.cache.add_sequence(name)
        self.names.append(name)
        self.world.step([name], [int(self.rng.integers(1, 12))], self.stream())

    def step(self):
        names = self.some(self.names, 4) if self.names else []
        if not names:
            return
        is_decode = self.chance(0.6)
        lens = [1 if is_decode else int(self.rng.integers(1, 6)) for _ in names]
        in_tree = [name in self.pending or self.chance(0.15) for name in names]
        trees = [
            random_tree(self.rng, count, self.pending.get(name, 0)) if tree else None
            for name, count, tree in zip(names, lens, in_tree, strict=True)
        ]
        kept = self.chance(0.9)
        on = (self.stream(), self.stream()) if self.chance(0.2) else self.stream()
        trees = trees if any(in_tree) else None
        self.busy = names
        sizes = [size for size in self.decoders if size >= len(names)]
        try:
            if is_decode and trees is None and sizes and self.chance(0.8):
                decoder = self.decoders[min(sizes)]
                decoder.step(names, on, keep=kept, aside=self.aside)
            else:
                self.world.step(names, lens, on, trees, keep=kept, aside=self.aside)
        finally:
            self.busy = []
        for name, count, tree in zip(names, lens, in_tree, strict=True):
            if tree and kept:
                self.pending[name] = self.pending.get(name, 0) + count

    def aside(self):
        """Do something with other sequences while a step is running."""
        if self.chance(0.3):
            calls = [self.fork, self.pop, self.remove, self.read, self.write]
            with suppress(kv.CacheFull):
                calls[self.rng.integers(len(calls))]()

    def commit(self, everyone=False):
        names = [*self.pending] if everyone else self.some([*self.pending], 3)
        if names:
            leaves = [int(self.rng.integers(-1, self.pending.pop(name))) for name in names]
            self.cache.commit_token_tree(names, leaves)

    def fork(self):
        parent = self.one()
        if parent is not None:
            child = f"s{self.num_added}"
            self.num_added += 1
            length = self.cache.sequence_length(parent)
            at = length if self.chance(0.5) else int(self.rng.integers(length + 1))
            self.cache.fork_sequence(parent, child, at)
            self.names.append(child)

    def pop(self):
        name = self.one()
        if name is not None:
            most = min(5, self.cache.sequence_length(name))
            self.cache.pop_tokens(name, int(self.rng.integers(most + 1)))

    def remove(self):
        names = [name for name in self.names if name not in self.busy]
        if len(names) > 2:
            name = names[self.rng.integers(len(names))]
            self.names.remove(name)
            self.pending.pop(name, None)
            self.cache.remove_sequence(name)

    def slide(self):
        name = self.one()
        if name is not None and self.chance(0.5):
            self.cache.enable_sliding_window(name, int(self.rng.integers(3, 28)), 2)

    def read(self):
        name = self.one()
        if name is not None:
            self.world.read(name, self.stream())

    def write(self):
        name = self.one()
        if name is not None and (length := self.cache.sequence_length(name)):
            start = int(self.rng.integers(length))
            count = int(self.rng.integers(1, min(9, length - start) + 1))
            self.world.write(name, start, count, self.stream())

    def late(self):
        """Hold a stream up for a while, by work on it or until another thread opens a gate."""
        which, seconds = self.rng.integers(5), self.rng.integers(1, 5) / 1000
        name = ("compute", "compute", "other", "copy", "copy")[which]
        by_gate = self.chance(0.5)
        if self.world.live and by_gate:
            threading.Timer(seconds, self.world.gate(name).open).start()
        elif self.world.live:
            self.world.streams[name].call(lambda: time.sleep(seconds))
