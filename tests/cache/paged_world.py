"""A paged cache whose streams are held up, and the same program run inline, one call after another.

Whatever waits for whatever, both must give the same bits. A world that is not `live` is the inline
one: all its streams are None, and its gates are open.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from engine_cases import PATIENCE_S, poll
from helpers import demoting
from paged_cases import SMALL
from stream_cases import Gate, Log
from table_cases import background

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
