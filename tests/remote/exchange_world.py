"""Sequences that a process exports at random, and what each of them held at the call."""

from __future__ import annotations

import hashlib

import numpy as np
from paged_tiers_cases import NUM_LAYERS, PAGE, VOCABULARY, Prefixed

import kvcupy as kv

PAST = {"past": "fp8_e4m3", "recent": 5, "sinks": 2, "num_past_pages": 20}


def digest_of(side, name):
    """What a sequence holds, as text: its values, and the bytes of its demoted pages."""
    parts = side.bits(name)
    if side.cache.past_pool is not None:
        parts += [part for part in side.raw(name)[2 * NUM_LAYERS :] if isinstance(part, bytes)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class Exporter:
    """A cache whose sequences change at random, and a sender.

    Parameters
    ----------
    engine, listen : of the sender
    past : whether old pages are demoted; they have a separate sender
    """

    def __init__(self, seed, engine, listen, num_pages=24, *, past=False):
        options = PAST if past else {}
        self.side = Prefixed(kv.device("host"), tiered=False, num_pages=num_pages, **options)
        self.cache = self.side.cache
        self.sender = kv.PageSender(self.cache.pool, engine=engine, listen=listen)
        self.ends, self.past_sender = [self.sender], None
        if past:
            self.past_sender = kv.PageSender(
                self.cache.past_pool, engine=engine, listen=f"{listen}past"
            )
            self.ends.append(self.past_sender)
        self.rng = np.random.default_rng(seed)
        self.names, self.made, self.tickets = [], 0, []

    def tokens(self, count):
        return self.rng.integers(0, VOCABULARY, count).tolist()

    def change(self):
        """Do something to some sequence; pages may run out."""
        rng, cache = self.rng, self.cache
        kind = rng.choice(["add", "step", "fork", "pop", "slide", "remove"])
        try:
            if kind == "add" or not self.names:
                self.made += 1
                name = f"s{self.made}"
                cache.add_sequence(name)
                self.names.append(name)
                self.side.step(name, self.tokens(int(rng.integers(1, 3 * PAGE))))
                return
            name = self.names[int(rng.integers(len(self.names)))]
            length = cache.sequence_length(name)
            if kind == "step":
                self.side.step(name, self.tokens(int(rng.integers(1, PAGE))))
            elif kind == "fork":
                self.made += 1
                cache.fork_sequence(name, f"s{self.made}", at=int(rng.integers(1, length + 1)))
                self.names.append(f"s{self.made}")
            elif kind == "pop" and length > 1:
                cache.pop_tokens(name, int(rng.integers(1, length)))
            elif kind == "slide" and not cache._sequences.find(name).evicted:
                cache.enable_sliding_window(name, int(rng.integers(2, 7)), int(rng.integers(0, 3)))
            elif kind == "remove":
                cache.remove_sequence(name)
                self.names.remove(name)
        except kv.CacheFull:
            for name in [n for n in self.names if not cache.sequence_length(n)]:
                cache.remove_sequence(name)
                self.names.remove(name)

    def export(self, lease_s=20.0):
        """Export some sequence, now or within a step; None without a sequence or a page for it.

        Returns ticket, length and contents; contents None: the step was taken back.
        """
        if not self.names:
            return None
        name = self.names[int(self.rng.integers(len(self.names)))]
        sequence = self.cache._sequences.find(name)
        if self.rng.random() < 0.5 or sequence.window:
            ticket = self._export(name, lease_s)
            length, holds = self.cache.sequence_length(name), digest_of(self.side, name)
        else:
            tokens = self.tokens(int(self.rng.integers(1, 2 * PAGE)))
            try:
                self.cache.begin_forward([name], [len(tokens)])
            except kv.CacheFull:
                return None
            rows, before = self.side.rows(tokens), int(self.rng.integers(NUM_LAYERS + 1))
            is_taken_back = self.rng.random() < 0.2
            for layer in range(NUM_LAYERS):
                if layer == before:
                    ticket = self._export(name, lease_s)
                self.side.attend(layer, rows)
            if before == NUM_LAYERS:
                ticket = self._export(name, lease_s)
            length, holds = self.cache.sequence_length(name), None
            if is_taken_back:
                self.cache._steps.abort()
            else:
                holds = digest_of(self.side, name)  # ending the step may demote some of it
                self.cache.end_forward()
        self.tickets.append(ticket)
        return ticket.hex(), length, holds

    def _export(self, name, lease_s):
        return self.cache.export_sequence(
            name, self.sender, lease_s=lease_s, past_sender=self.past_sender
        )

    def close(self):
        for end in self.ends:
            end.close()

    def withdraw_some(self):
        """Withdraw half of the tickets, and return them."""
        chosen = [ticket for ticket in self.tickets if self.rng.random() < 0.5]
        for ticket in chosen:
            self.sender.withdraw(ticket)
        return [ticket.hex() for ticket in chosen]

    def leaks(self):
        """How many pages and references are left without sequences; None: some are still held."""
        if any(end.stats()["offered_pages"] for end in self.ends):
            return None
        self.cache.clear()
        self.names.clear()
        missing = self.cache.pool.num_pages - self.cache.num_available_pages
        if (past_pool := self.cache.past_pool) is not None:
            missing += past_pool.num_pages - self.cache.num_available_past_pages
        return missing + int(self.cache._sequences._references.sum())
