"""Random imports from another process: a sequence as it was when it was exported, or a failure.

Each schedule changes, exports, imports, extends, cancels, withdraws and removes sequences; the
exporting process may be stopped and killed.
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress

import numpy as np
import pytest
from exchange_groups_cases import MIXES, Exporting, pools_of
from exchange_world import PAST, digest_of
from helpers import examples, full_only
from line_process import LineProcess, poll
from paged_tiers_cases import Prefixed

import kvcupy as kv
from kvcupy.remote.migration import nixl_agents

pytestmark = pytest.mark.usefixtures("lenient_host")

PROGRAM = "import kvcupy as kv; kv.config.strict = False; from exchange_world import *"
GROUPS_PROGRAM = f"{PROGRAM}; from exchange_groups_cases import *"
HAS_NIXL = any(importlib.util.find_spec(name) for name in nixl_agents.WHEELS)
NEEDS_NIXL = pytest.mark.skipif(not HAS_NIXL, reason="needs NIXL")


class Importer:
    """The cache of the test's own process."""

    def __init__(self, device, engine, seed, num_pages=16, *, past=False):
        options = PAST if past else {}
        self.side = Prefixed(device, tiered=False, num_pages=num_pages, **options)
        self.cache = self.side.cache
        self.receiver = kv.PageReceiver(self.cache.pool, engine=engine)
        self.receivers, self.past_receiver = [self.receiver], None
        if past:
            self.past_receiver = kv.PageReceiver(self.cache.past_pool, engine=engine)
            self.receivers.append(self.past_receiver)
        self.rng, self.made = np.random.default_rng(seed), 0
        self.present = {}  # by name: the pull, the ticket, and what it must hold
        self.withdrawn = set()  # tickets
        self.compared = self.failed = self.demoted = 0

    def receive(self, ticket, length, holds):
        self.made += 1
        try:
            pull = self.cache.import_sequence(
                self.made, bytes.fromhex(ticket), self.receiver, past_receiver=self.past_receiver
            )
        except kv.CacheFull:
            return
        assert self.cache.sequence_length(self.made) == length
        self.present[self.made] = pull, ticket, holds

    def compare(self, name, *, may_fail=False):
        """Compare a sequence with what was exported, or see that it failed; then drop it."""
        pull, ticket, holds = self.present.pop(name)
        try:
            got = digest_of(self.side, name)
        except kv.TransferError as error:
            was_withdrawn = holds is None or ticket in self.withdrawn
            assert may_fail or was_withdrawn or error.reason == "cancelled", error
            self.failed += 1
        else:
            pull.synchronize()
            assert got == holds
            self.compared += 1
            self.demoted += any(self.cache._sequences.past_range(self.cache._sequences.find(name)))
            with suppress(kv.CacheFull):
                self.side.step(name, [3, 4])
        self.cache.remove_sequence(name)

    def act(self):
        names = list(self.present)
        if not names:
            return
        name = names[int(self.rng.integers(len(names)))]
        kind = self.rng.choice(["compare", "compare", "cancel", "remove"])
        if kind == "compare":
            self.compare(name)
        elif kind == "cancel":
            self.present[name][0].cancel()
        else:
            self.cache.remove_sequence(name)
            del self.present[name]

    def end(self, *, may_fail=False):
        """Compare all that is left; every page must be free then."""
        for name in list(self.present):
            self.compare(name, may_fail=may_fail)
        assert poll(lambda: not any(each.stats()["pulls"] for each in self.receivers))
        for receiver in self.receivers:
            receiver.close()
        assert self.cache.num_available_pages == self.cache.pool.num_pages
        if (past_pool := self.cache.past_pool) is not None:
            assert self.cache.num_available_past_pages == past_pool.num_pages
            past_pool.allocator.check_leaks()
        assert not self.cache._sequences._references.any()
        self.cache.pool.allocator.check_leaks()


@pytest.fixture(scope="module")
def other():
    process = LineProcess(PROGRAM)
    yield process
    process.end()


def begin(process, seed, engine, folder, *, past=False):
    process.do(f"w = Exporter({seed}, {engine!r}, 'unix:{folder}/s', past={past})")


def schedule(process, importer, count):
    """Run a random schedule, and return how many exports there were."""
    exported = 0
    for _ in range(count):
        kind = importer.rng.choice(["change", "export", "export", "act", "act", "withdraw"])
        if kind == "change":
            process.do("w.change()")
        elif kind == "withdraw" and importer.rng.random() < 0.3:
            importer.withdrawn |= set(process.do("answer(w.withdraw_some())"))
        elif kind == "export" and (offered := process.do("answer(w.export())")) is not None:
            exported += 1
            importer.receive(*offered)
        elif kind == "act":
            importer.act()
    return exported


@pytest.mark.parametrize(
    ("engine", "past"), [
        ("socket", False), ("socket", True), pytest.param("nixl", False, marks=NEEDS_NIXL),
        pytest.param("nixl", True, marks=[NEEDS_NIXL, pytest.mark.full]),
    ],
)  # fmt: skip
def test_random_schedules(device, other, tmp_path, engine, past):
    if other.is_as_it_was:
        other.is_as_it_was = False
        other.reply()
    compared = exported = 0
    demoted = 0
    for seed in range(examples(100 if engine == "socket" and not past else 40)):
        importer = Importer(device, engine, seed, past=past)
        begin(other, seed, engine, tmp_path, past=past)
        other.do("w.change()")
        exported += schedule(other, importer, 14)
        importer.end()
        other.do("w.close()")
        assert poll(lambda: other.do("answer(w.leaks())") == 0)
        compared += importer.compared
        demoted += importer.demoted
    assert compared > exported / 4 > 0, "hardly any schedule compared a sequence"
    assert demoted > 0 or not past, "no sequence had demoted pages"


@pytest.mark.parametrize(
    ("engine", "ending"),
    [
        ("socket", "kill"),
        full_only("socket", "stop"),
        pytest.param("nixl", "kill", marks=[NEEDS_NIXL, pytest.mark.full]),
        pytest.param("nixl", "stop", marks=[NEEDS_NIXL, pytest.mark.full]),
    ],
)
def test_the_exporting_process_ends_in_the_middle(device, tmp_path, engine, ending):
    """Imports that were complete stay; others fail, and can be removed."""
    process = LineProcess(PROGRAM)
    try:
        process.reply()
        for seed in range(1):
            importer = Importer(device, engine, seed, num_pages=24)
            begin(process, seed, engine, tmp_path)
            process.do("[w.change() for _ in range(4)]")
            schedule(process, importer, 6)
            process.send("[answer(w.export()) for _ in range(200)]")
            if ending == "kill":
                process.kill()
            else:
                process.stop()
                for pull, _, _ in importer.present.values():
                    pull.cancel()
                process.go_on()
            importer.end(may_fail=True)
    finally:
        process.end()


# --- Groups of layers ---


@pytest.fixture(scope="module")
def other_with_groups():
    process = LineProcess(GROUPS_PROGRAM)
    process.reply()
    yield process
    process.end()


def importing(device, mix, engine="socket"):
    side = Exporting(MIXES[mix](), device)
    side._next = 100_000
    return side, [kv.PageReceiver(pool, engine=engine) for pool in pools_of(side.cache)]


def assert_nothing_left(side, receivers):
    assert poll(lambda: not any(each.stats()["pulls"] for each in receivers))
    side.check_empty()
    for receiver in receivers:
        receiver.close()


@pytest.mark.parametrize("engine", ["socket", pytest.param("nixl", marks=NEEDS_NIXL)])
@pytest.mark.parametrize("mix", MIXES)
def test_sequences_of_groups(device, other_with_groups, tmp_path, mix, engine):
    side, receivers = importing(device, mix, engine)
    do = other_with_groups.do
    do(f"g = GroupsExporter({mix!r}, 'unix:{tmp_path}/s', {engine!r})")
    for number, when in enumerate([None, "attention", "states", "end"]):
        counts = [(3,), (23, 5), (8, 30), (1, 1, 9)][number]
        ticket, tokens = do(f"answer(g.export({number}, {counts}, {when!r}))")
        side.cache.import_sequence(number, bytes.fromhex(ticket), receivers)
        side.tokens[number] = tokens
        side.step({number: side.new(2)})
        side.step({number: side.new(7)})
    assert poll(lambda: do("answer(g.leaks())") == 0)
    do("[sender.close() for sender in g.senders]")
    assert_nothing_left(side, receivers)


def test_a_process_with_groups_is_killed(device, tmp_path):
    """While a step of an exported sequence runs: no part of the sequence is used."""
    mix = "state, window, full"
    side, receivers = importing(device, mix)
    process = LineProcess(GROUPS_PROGRAM)
    try:
        process.reply()
        process.do(f"g = GroupsExporter({mix!r}, 'unix:{tmp_path}/s')")
        ticket, tokens = process.do("answer(g.export('whole', (20,)))")
        begun, _ = process.do("answer(g.export('begun', (20, 5), 'begun'))")
        whole = side.cache.import_sequence("whole", bytes.fromhex(ticket), receivers)
        whole.synchronize()
        pull = side.cache.import_sequence("begun", bytes.fromhex(begun), receivers)
        process.kill()
        with pytest.raises(kv.TransferError):
            pull.synchronize()
        with pytest.raises(kv.TransferError):
            side.cache.state_slots_of(["begun"])
        side.cache.remove_sequence("begun")
        side.tokens["whole"] = tokens
        side.step({"whole": side.new(3)})
        assert_nothing_left(side, receivers)
    finally:
        process.end()
