"""Two caches of mixed layers, of which one exports sequences and the other imports them."""

from __future__ import annotations

import json
from contextlib import ExitStack

from groups_model import Mixture, full, latent, recurrent, sliding
from line_process import poll

import kvcupy as kv

MIXES = {
    "full, window": lambda: [full(0, 3), sliding(1, 2, window=8)],
    "window with sinks, full, latent": lambda: [
        sliding(0, window=5, sink_tokens=3),
        full(2),
        latent(1, 4),
    ],
    "state, window, full": lambda: [recurrent(0, 2), sliding(1, window=6), full(3)],
    "two states": lambda: [recurrent(0), full(1), recurrent(2), sliding(3, window=40)],
    "windows": lambda: [sliding(0, window=1), sliding(1, window=16, sink_tokens=4)],
}


def pools_of(cache):
    """The pools that have a sender or a receiver each: of pages, and of states."""
    return [*cache.pools, *([] if cache.state_pool is None else [cache.state_pool])]


class Exporting(Mixture):
    """Calls `before["attention"]`, `before["states"]` and `before["end"]` in the next step, once.

    Each is called when the step gets there, with the model's work so far enqueued.
    """

    def __init__(self, groups, device, **options):
        super().__init__(groups, device, **options)
        self.before = {}

    def _attend(self, names, lens):
        self.before.pop("attention", int)()
        super()._attend(names, lens)

    def _update(self, names, lens):
        self.before.pop("states", int)()
        super()._update(names, lens)
        self.before.pop("end", int)()


class GroupsPair:
    """Caches `one` and `two` of a mix, with senders of the former and receivers of the latter."""

    def __init__(self, mix, device, **options):
        self.device = device
        self.one, self.two = (Exporting(mix(), device, **options) for _ in range(2))
        self.two._next = 100_000  # so their tokens differ
        self._stack = ExitStack()
        self.senders, self.receivers = (
            [self._stack.enter_context(end(pool)) for pool in pools_of(side.cache)]
            for end, side in ((kv.PageSender, self.one), (kv.PageReceiver, self.two))
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def prefill(self, name, *counts):
        self.one.add(name)
        for count in counts:
            self.one.step({name: self.one.new(count)})

    def export(self, name, **options):
        return self.one.cache.export_sequence(name, self.senders, **options)

    def export_in_step(self, name, count, when):
        """Append tokens, and export the sequence at a point of their step."""
        tickets = []
        self.one.before[when] = lambda: tickets.append(self.export(name))
        self.one.step({name: self.one.new(count)})
        return tickets[0]

    def receive(self, name, ticket, tokens, **options):
        """Import a sequence of some tokens."""
        pull = self.two.cache.import_sequence(name, ticket, self.receivers, **options)
        self.two.tokens[name] = list(tokens)
        return pull

    def tickets(self, ticket):
        """The tickets of all pools, in order."""
        described = json.loads(self.receivers[0].inspect(ticket).attachment)
        return [ticket, *map(bytes.fromhex, described["tickets"])]

    def settle(self):
        """Wait until no offer is open, no pull is in progress, and nothing is held."""

        def is_settled():
            for side in (self.one, self.two):
                assert side.cache.num_available_pages >= 0  # releases what ended offers have held
            busy = [sender.stats()["offered_pages"] for sender in self.senders]
            return not any([*busy, *(each.stats()["pulls"] for each in self.receivers)])

        assert poll(is_settled), [end.stats() for end in (*self.senders, *self.receivers)]
        is_settled()

    def check(self):
        self.settle()
        self.one.check()
        self.two.check()

    def check_empty(self):
        self.settle()
        self.one.check_empty()
        self.two.check_empty()


class GroupsExporter:
    """The exporting side, in a separate process."""

    def __init__(self, mix, listen, engine="socket"):
        self.side = Exporting(MIXES[mix](), kv.device("host"))
        self.senders = [
            kv.PageSender(pool, listen=f"{listen}.{number}", engine=engine)
            for number, pool in enumerate(pools_of(self.side.cache))
        ]

    def export(self, name, counts, when=None):
        """Export a sequence that is computed in steps; return its ticket and its tokens.

        when : in which part of the last step; None: behind it. "begun": the step is not ended
        """
        side, tickets = self.side, []

        def export():
            tickets.append(side.cache.export_sequence(name, self.senders))

        side.add(name)
        for count in counts[:-1]:
            side.step({name: side.new(count)})
        if when == "begun":
            side.cache.begin_forward([name], counts[-1:])
        else:
            if when is not None:
                side.before[when] = export
            side.step({name: side.new(counts[-1])})
        if not tickets:
            export()
        return tickets[0].hex(), side.tokens[name]

    def leaks(self):
        """How many pages and states are left without sequences; None: some are still held."""
        self.side.cache.clear()
        if not self.side.cache.num_available_pages or any(
            sender.stats()["offered_pages"] for sender in self.senders
        ):
            return None
        pools = pools_of(self.side.cache)
        return sum(pool.num_pages - pool.allocator.num_available for pool in pools)
