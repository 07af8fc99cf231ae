"""Two caches of mixed layers, of which one exports sequences and the other imports them."""

from __future__ import annotations

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


POINTS = ["attention", "states", "end"]  # of a step, in order


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

    def __init__(self, mix, device, *, other=None, kind=Exporting, **options):
        self.device = device
        self.one, self.two = (kind(each(), device, **options) for each in (mix, other or mix))
        self.two._next = 100_000  # so their tokens differ
        self._stack = ExitStack()
        self.sender = self._stack.enter_context(kv.PageSender(self.one.cache))
        self.receiver = self._stack.enter_context(kv.PageReceiver(self.two.cache))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def prefill(self, name, *counts):
        self.one.add(name)
        for count in counts:
            self.one.step({name: self.one.new(count)})

    def export(self, name, **options):
        return self.one.cache.export_sequence(name, self.sender, **options)

    def export_in_step(self, name, count, when):
        """Append tokens, and export the sequence at a point of their step."""
        tickets = []
        self.one.before[when] = lambda: tickets.append(self.export(name))
        self.one.step({name: self.one.new(count)})
        return tickets[0]

    def receive(self, name, ticket, tokens, **options):
        """Import a sequence of some tokens."""
        pull = self.two.cache.import_sequence(name, ticket, self.receiver, **options)
        self.two.tokens[name] = list(tokens)
        return pull

    def withdraw(self):
        """Take all offers back, as a step does that is taken back."""
        for offer in list(self.sender._offers.values()):
            offer.withdraw()

    def settle(self):
        """Wait until no offer is open, no pull is in progress, and nothing is held."""

        def is_settled():
            for side in (self.one, self.two):
                assert side.cache.num_available_pages >= 0  # releases what ended offers have held
            return not (self.sender.stats()["offered_pages"] or self.receiver.stats()["pulls"])

        assert poll(is_settled), [end.stats() for end in (self.sender, self.receiver)]
        is_settled()

    def check(self):
        self.settle()
        self.one.check()
        self.two.check()

    def check_empty(self):
        self.settle()
        self.one.check_empty()
        self.two.check_empty()
