"""Decode steps of a world as graphs: captured once, launched for any sequences there are."""

from __future__ import annotations

from contextlib import suppress


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
