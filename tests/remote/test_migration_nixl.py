"""Pages between two processes over NIXL itself: UCX over shared memory, and over TCP."""

from __future__ import annotations

import os

import pytest
from line_process import LineProcess, poll
from nixl_world import LAYERS

import kvcupy as kv

pytest.importorskip("nixl_cu12", reason="pip install --no-deps nixl-cu12")

PROGRAM = "from nixl_world import *; w = None"


class Process(LineProcess):
    def ask(self, expression):
        return self.do(f"answer(as_json({expression}))")


class Pair:
    """A process that sends and one that receives."""

    def __init__(self, transport):
        self.transport = transport
        self.environment = {"UCX_TLS": "tcp"} if transport == "tcp" else {}
        self.one, self.two = (Process(PROGRAM, **self.environment) for _ in range(2))
        for process in (self.one, self.two):
            process.reply()

    def begin_test(self):
        self.one = self.renewed(self.one)
        self.two = self.renewed(self.two, "layout='page_first_direct'")

    def renewed(self, process, options=""):
        """Return the process, or one in its place if it is dead, in which nothing has happened."""
        if process.process.poll() is not None:
            process = Process(PROGRAM, **self.environment)
            process.reply()
        process.do(f"w = World({options}, old=w)" if options else "w = World(old=w)")
        return process

    def offer(self, *arguments, **options):
        given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        return self.one.ask(f"w.offer({', '.join(given)})")

    def begin(self, ticket, pages, **options):
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        self.two.do(f"w.begin({ticket!r}, {pages}{given})")

    def outcome(self):
        return self.two.ask("w.outcome()")

    def free(self, process):
        return process.ask("w.allocator.num_free")


@pytest.fixture(scope="module", params=["shm", "tcp"])
def processes(request):
    pair = Pair(request.param)
    yield pair
    for process in (pair.one, pair.two):
        process.end()


@pytest.fixture
def pair(processes):
    processes.begin_test()
    return processes


def test_pages_arrive_and_are_free(pair):
    for seed in range(3):
        pair.begin(pair.offer(seed), [5, 1, 9])
        assert pair.outcome() == "done"
        assert pair.two.ask(f"w.holds([5, 1, 9], {seed})")
        assert poll(lambda: pair.free(pair.one) == 16)
    assert pair.one.ask("w.sender.stats()['completed']") == 3


def test_a_layer_arrives_when_it_is_ready(pair):
    pair.begin(pair.offer(1, ready=1), [5, 1, 9])
    for layer in range(LAYERS):
        pair.two.ask(f"w.pull.wait_layer({layer})")
        assert pair.two.ask(f"w.holds([5, 1, 9], 1, [{layer}])")
        assert pair.two.ask("w.pull._num_arrived") == layer + 1
        if layer + 1 < LAYERS:
            pair.one.ask(f"w.fill(w.pages, 1, [{layer + 1}])")
            pair.one.ask(f"w.announce([{layer + 1}])")
    assert pair.outcome() == "done"


def test_a_killed_sender(pair):
    """Before a pull, and in the middle of one; a new one serves the same receiver."""
    ticket = pair.offer(1)
    pair.one.kill()
    pair.begin(ticket, [5, 1, 9], deadline_s=3.0)
    assert pair.outcome() in ("lost", "late")
    pair.one = pair.renewed(pair.one)
    pair.begin(pair.offer(2, ready=1), [5, 1, 9])
    pair.two.ask("w.pull.wait_layer(0)")
    pair.one.kill()
    assert pair.outcome() in ("lost", "late")
    assert pair.two.ask("w.holds([5, 1, 9], 2, [0])")
    assert poll(lambda: pair.free(pair.two) == 16)
    pair.one = pair.renewed(pair.one)
    pair.begin(pair.offer(3), [2, 3, 4])
    assert pair.outcome() == "done" and pair.two.ask("w.holds([2, 3, 4], 3)")


def test_a_killed_receiver(pair):
    """The lease ends, and the sender serves others."""
    pair.begin(pair.offer(1, ready=1), [5, 1, 9])
    pair.two.ask("w.pull.wait_layer(0)")
    pair.two.kill()
    pair.one.ask("w.expire()")
    assert poll(lambda: pair.free(pair.one) == 16)
    assert pair.one.ask("w.sender.stats()['expired']") == 1
    pair.two = pair.renewed(pair.two)
    pair.begin(pair.offer(2), [5, 1, 9])
    assert pair.outcome() == "done" and pair.two.ask("w.holds([5, 1, 9], 2)")


def test_a_receiver_that_was_stopped_beyond_the_lease(pair):
    """What it reads then was written after the lease: it is not passed on."""
    pair.begin(pair.offer(1, ready=1), [5, 1, 9])
    pair.two.ask("w.pull.wait_layer(0)")
    pair.two.stop()
    pair.one.ask("w.expire()")
    assert poll(lambda: pair.free(pair.one) == 16)
    pair.one.ask("w.set_all(w.pages, -1.0)")
    pair.two.go_on()
    assert pair.outcome() in ("expired", "done")
    if pair.two.ask("w.failure()") is None:  # it had all before the stop
        assert pair.two.ask("w.holds([5, 1, 9], 1)")


def test_a_sender_that_is_stopped(pair):
    """UCX needs it for most READs: they land late, in pages that nobody else has by then."""
    pair.begin(pair.offer(1), [5, 1, 9])
    assert pair.outcome() == "done"  # they are connected
    ticket = pair.offer(2)
    pages = pair.two.ask("w.allocator.alloc(3).tolist()")
    pair.one.stop()
    pair.begin(ticket, pages, deadline_s=1.0)
    assert poll(lambda: pair.two.ask("w.failure()") == "late")
    pair.two.ask(f"w.allocator.free({pages})")
    others = pair.two.ask("w.allocator.alloc(w.allocator.num_free).tolist()")
    assert not set(others) & set(pages) and len(others) == 13
    pair.two.ask(f"w.set_all({others}, -2.0)")
    pair.one.go_on()
    assert pair.outcome() == "late"
    assert poll(lambda: pair.free(pair.two) == 3)
    assert pair.two.ask(f"w.is_all({others}, -2.0)")
    pair.begin(pair.offer(3), pages)
    assert pair.outcome() == "done" and pair.two.ask(f"w.holds({pages}, 3)")


def test_a_sender_that_is_closed_and_made_again(pair):
    ticket = pair.offer(1)
    pair.begin(ticket, [5, 1, 9])
    assert pair.outcome() == "done"
    ticket = pair.offer(2)
    pair.one.ask("w.sender.close()")
    assert pair.free(pair.one) == 16
    pair.begin(ticket, [5, 1, 9], deadline_s=3.0)
    assert pair.outcome() in ("lost", "late", "closed")
    pair.one.ask("setattr(w, 'sender', None)")
    pair.begin(pair.offer(3), [5, 1, 9])
    assert pair.outcome() == "done" and pair.two.ask("w.holds([5, 1, 9], 3)")


def test_in_one_process():
    """The example of the docs; many layers and pages at once."""
    shape = {"page_size": 16, "num_layers": 8, "num_kv_heads": 8, "head_dim": 128, "dtype": "fp16"}
    one, other = (kv.KVPool(64, **shape, device="host", layout=layout)
                  for layout in ("page_first_direct", "layer_first"))  # fmt: skip
    for layer in range(8):
        one.k(layer)[...] = layer
        one.v(layer)[...] = -layer
    with kv.PageSender(one) as sender, kv.PageReceiver(other) as receiver:
        for _ in range(3):
            ticket = sender.offer(one.allocator.alloc(40))
            receiver.pull(ticket, range_of(40)).synchronize()
            assert poll(lambda: one.allocator.num_free == 64)
    for layer in range(8):
        assert (other.k(layer)[1:41] == layer).all() and (other.v(layer)[1:41] == -layer).all()


def range_of(count):
    return list(range(1, count + 1))


def test_nixl_that_is_missing(monkeypatch):
    from kvcupy.remote.migration import agent

    monkeypatch.setattr(agent, "WHEELS", ("nixl_of_nobody",))
    pool = kv.KVPool(2, 2, 1, 1, 8, device="host")
    with pytest.raises(ImportError, match="pip install --no-deps nixl-cu12"):
        kv.PageSender(pool)
    assert agent.Process.current().pid == os.getpid() and not agent.Process.current().is_dead()
