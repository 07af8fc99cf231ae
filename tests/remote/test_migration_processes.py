"""Pages between processes of which one is killed, stopped or silent: nothing wrong arrives, nothing
lands late, and the pages of both are free afterwards.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers import full_only
from migration_cases import (
    PATIENCE_S,
    SHAPE,
    assert_pulled,
    eventually,
    expire_leases,
    filled,
    is_poisoned,
    parts_of,
    poison,
    pool_of,
    process,  # noqa: F401 -- a fixture
    proxy,  # noqa: F401 -- a fixture
    reason_of,
)

import kvcupy as kv
from kvcupy.doctor import environment
from kvcupy.remote.migration import protocol

LARGE = {"head_dim": 512, "v_head_dim": 512, "page_size": 64}  # 1 MiB per page and layer


@pytest.fixture
def receiving():
    """Make receivers whose pages must all be free in the end."""
    made = []

    def make(**options):
        pool = pool_of(**options)
        made.append(kv.PageReceiver(pool))
        return made[-1], pool

    yield make
    for receiver in made:
        receiver.close()
        assert receiver.stats()["pulls"] == receiver.stats()["quarantined_pages"] == 0
        pool = receiver._pool
        pool.allocator.free(pool.allocator.allocated())
        assert pool.allocator.num_free == pool.num_pages


@pytest.mark.parametrize("listen", ["tcp:127.0.0.1:0", "unix"])
def test_from_another_process(process, receiving, listen, tmp_path):  # noqa: F811
    listen = f"unix:{tmp_path}/pages" if listen == "unix" else listen
    sender = process("sender", options={"listen": listen})
    receiver, pool = receiving(layout="page_head")
    for pages in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        receiver.pull(sender.offer(pages), [7, 3, 9, 0, 11]).synchronize()
        assert_pulled(pool, [7, 3, 9, 0, 11], pages)
        eventually(lambda: sender.ask("stats")["free"] == 12)
        eventually(lambda: receiver.stats()["connections"] == 1)  # it is kept for the next pull
    stats = sender.ask("stats")
    assert (stats["completed"], stats["connections"], stats["lost_pulls"]) == (2, 1, 0)
    if listen.startswith("unix"):
        assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o600
        sender.ask("close")
        assert not list(tmp_path.iterdir())


def test_to_another_process(process):  # noqa: F811
    source = filled()
    with kv.PageSender(source) as sender:
        receiver = process("receiver")
        ticket = sender.offer(source.allocator.alloc(3), by_layer=True)
        receiver.ask("pull", ticket=ticket.hex(), count=3)
        receiver.tell("wait_layer", layer=0)
        for layer in range(3):
            sender.layer_done(ticket, layer)
        receiver.answer()
        assert receiver.ask("wait", sources=[0, 1, 2]) == {"reason": ""}
        eventually(lambda: source.allocator.num_free == 12)
    source.allocator.check_leaks()


def test_the_sender_is_killed(process, receiving):  # noqa: F811
    sender = process("sender")
    receiver, pool = receiving()
    pages = pool.allocator.alloc(4)
    poison(pool, range(12))
    pull = receiver.pull(sender.offer([0, 1, 2, 3], by_layer=True), pages)
    sender.ask("layer_done", layer=0)
    pull.wait_layer(0)
    sender.kill()
    assert reason_of(pull) == "lost"  # at the deadline it would be "late"
    assert is_poisoned(pool, range(4, 12))
    pool.allocator.free(pages)
    assert pool.allocator.num_free == 12


def test_a_sender_that_was_killed_before(process, receiving):  # noqa: F811
    sender = process("sender")
    receiver, _ = receiving()
    ticket = sender.offer([0, 1])
    sender.kill()
    assert reason_of(receiver.pull(ticket, [0, 1])) == "lost"
    # Another one on the same port does not know the ticket.
    other = kv.PageSender(pool_of(), listen=sender.hello["address"])
    with pytest.raises(kv.TransferError, match="no longer listens"):
        receiver.pull(ticket, [0, 1]).synchronize()
    other.close()


def test_the_receiver_is_killed(process):  # noqa: F811
    source = filled()
    with kv.PageSender(source) as sender:
        receiver = process("receiver")
        ticket = sender.offer(source.allocator.alloc(3), by_layer=True, lease_s=600)
        receiver.ask("pull", ticket=ticket.hex(), count=3)
        sender.layer_done(ticket, 0)
        receiver.ask("wait_layer", layer=0)
        receiver.kill()
        eventually(lambda: sender.stats()["lost_pulls"] == 1)
        for layer in (1, 2):
            sender.layer_done(ticket, layer)
        # The offer stands until its lease is over: another receiver may fetch it.
        assert sender.stats()["offers"] == 1
        eventually(lambda: expire_leases(sender))
        assert sender.stats()["expired"] == 1


def test_the_receiver_is_stopped(process):  # noqa: F811
    """It holds the pages no longer than its lease, in the middle of a layer, too."""
    source = filled(**LARGE)
    with kv.PageSender(source) as sender:
        receiver = process("receiver", pool=LARGE)
        ticket = sender.offer(source.allocator.alloc(12), by_layer=True, lease_s=600)
        receiver.ask("pull", ticket=ticket.hex(), count=12)
        sender.layer_done(ticket, 0)
        receiver.ask("wait_layer", layer=0)
        receiver.signal(signal.SIGSTOP)
        receiver.wait_until_stopped()
        for layer in (1, 2):  # 24 MiB: more than sockets take
            sender.layer_done(ticket, layer)
        eventually(lambda: expire_leases(sender))
        receiver.signal(signal.SIGCONT)
        # Bytes that were sent under the lease arrive, if the sockets took all of them.
        assert receiver.ask("wait", sources=list(range(12)))["reason"] in ("", "lost", "expired")


@pytest.mark.parametrize("listen", ["tcp:127.0.0.1:0", "unix"])
def test_withdrawn_from_a_stopped_receiver(process, listen, tmp_path):  # noqa: F811
    """Whether the sender is blocked in a send, or has sent all of it: it does not wait."""
    source = filled(**LARGE)
    listen = f"unix:{tmp_path}/pages" if listen == "unix" else listen
    with kv.PageSender(source, listen=listen) as sender:
        receiver = process("receiver", pool=LARGE)
        ticket = sender.offer(source.allocator.alloc(12), by_layer=True, lease_s=600)
        receiver.ask("pull", ticket=ticket.hex(), count=12)
        sender.layer_done(ticket, 0)
        receiver.ask("wait_layer", layer=0)
        receiver.signal(signal.SIGSTOP)
        receiver.wait_until_stopped()
        for layer in (1, 2):
            sender.layer_done(ticket, layer)
        eventually(lambda: next(iter(sender._offers.values())).channels)
        time.sleep(0.1)  # until it is blocked; the test holds wherever it is
        sender.withdraw(ticket)
        eventually(lambda: source.allocator.num_free == 12)


@pytest.mark.parametrize("ends", [full_only("deadline"), "cancel", full_only("close")])
def test_a_stopped_sender_lands_nothing_later(process, receiving, ends):  # noqa: F811
    """It stops in the middle of a layer, and continues when the pages have another owner."""
    sender = process("sender", pool=LARGE)
    receiver, pool = receiving(**LARGE)
    pages = pool.allocator.alloc(12)
    poison(pool, range(12), 0x11)
    sender.ask("stop_after", count=5)  # of 256 KiB each; a layer has 12 MiB
    ticket = sender.offer(range(12))
    pull = receiver.pull(ticket, pages, deadline_s=0.5 if ends == "deadline" else 60)
    sender.wait_until_stopped()
    eventually(lambda: not is_poisoned(pool, [0], 0x11))
    if ends != "deadline":
        (pull.cancel if ends == "cancel" else receiver.close)()
    assert reason_of(pull) == {"deadline": "late", "cancel": "cancelled", "close": "closed"}[ends]
    pool.allocator.free(pages)
    assert sorted(pool.allocator.alloc(12)) == list(range(12))  # another owner's now
    poison(pool, range(12), 0x22)
    sender.signal(signal.SIGCONT)
    eventually(lambda: sender.ask("stats")["lost_pulls"] == 1)
    assert is_poisoned(pool, range(12), 0x22)


def test_a_sender_that_is_blocked_hears_of_the_end(monkeypatch):
    """Over TCP, too, where a receiver that takes nothing more could leave it to its probes."""
    receive_data, taking, opened = protocol.Channel.receive_data, [], threading.Event()

    def receiving(channel, *arguments):
        taking.append(channel)
        assert opened.wait(PATIENCE_S)
        receive_data(channel, *arguments)

    monkeypatch.setattr(protocol.Channel, "receive_data", receiving)
    source, target = filled(**LARGE), pool_of(**LARGE)
    with kv.PageSender(source) as sender, kv.PageReceiver(target) as receiver:
        ticket = sender.offer(source.allocator.alloc(12), lease_s=600)
        pull = receiver.pull(ticket, range(12))
        eventually(lambda: taking)
        time.sleep(0.2)  # until it is blocked; the test holds wherever it is
        pull.cancel()
        opened.set()
        assert reason_of(pull) == "cancelled"
        eventually(lambda: sender.stats()["lost_pulls"] == 1)
        sender.withdraw(ticket)
    source.allocator.check_leaks()


def test_what_lies_on_the_way_lands_nothing_later(process, receiving, proxy):  # noqa: F811
    """Bytes that the network holds back, and delivers when the pull has been given up."""
    between = proxy()
    between.hold_after = 1 << 20
    sender = process("sender", pool=LARGE, options={"advertise": between.address})
    between.target = sender.hello["address"]
    receiver, pool = receiving(**LARGE)
    poison(pool, range(12), 0x11)
    pull = receiver.pull(sender.offer(range(12)), range(12))
    eventually(lambda: not is_poisoned(pool, [0], 0x11))
    pull.cancel()
    assert reason_of(pull) == "cancelled"
    poison(pool, range(12), 0x22)
    between.gate.set()
    eventually(lambda: sender.ask("stats")["lost_pulls"] == 1)
    assert is_poisoned(pool, range(12), 0x22)


def test_forked():
    """A child has neither connections nor pages of its parent's, and leaves its socket alone."""
    source = filled()
    with kv.PageSender(source) as sender, kv.PageReceiver(pool_of()) as receiver:
        ticket = sender.offer(source.allocator.alloc(2))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                refusals = 0
                for call in (lambda: sender.offer([0]), lambda: receiver.pull(ticket, [0, 1])):
                    try:
                        call()
                    except kv.KvcupyError as error:
                        refusals += "expected the process that made it" in str(error)
                sender.close()
                receiver.close()
                status = 0 if refusals == 2 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        receiver.pull(ticket, [0, 1]).synchronize()
        assert_pulled(receiver._pool, [0, 1], [0, 1])
    source.allocator.check_leaks()


def test_forked_while_locks_are_held():
    """By threads that the child does not have: nothing waits for them there."""
    source = filled()
    with kv.PageSender(source) as sender, kv.PageReceiver(pool_of()) as receiver:
        ticket = sender.offer(source.allocator.alloc(2), by_layer=True)
        pull = receiver.pull(ticket, [0, 1])
        locks = [sender._lock, receiver._lock, receiver._workers._lock, pull._lock]
        locks.append(source.allocator._lock)
        held, released = threading.Event(), threading.Event()

        def hold():
            with ExitStack() as stack:
                for lock in locks:
                    stack.enter_context(lock)
                held.set()
                released.wait(PATIENCE_S)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(PATIENCE_S)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            status = 1
            try:
                refusals = []
                for call in (
                    lambda: sender.offer([0]), lambda: sender.layer_done(ticket, 0),
                    lambda: sender.withdraw(ticket), lambda: receiver.pull(ticket, [0, 1]),
                    lambda: pull.synchronize(), lambda: pull.done(), lambda: pull.wait_layer(0),
                    lambda: pull.cancel(), lambda: sender.stats(), lambda: receiver.stats(),
                ):  # fmt: skip
                    try:
                        call()
                    except kv.KvcupyError as error:
                        refusals.append("expected the process that made it" in str(error))
                sender.close()
                receiver.close()
                status = 0 if refusals == [True] * 10 else 2
            finally:
                os._exit(status)
        released.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for layer in range(3):
            sender.layer_done(ticket, layer)
        pull.synchronize()
        assert_pulled(receiver.pool, [0, 1], [0, 1])
    source.allocator.check_leaks()


@pytest.mark.parametrize("listen", ["tcp:127.0.0.1:0", "unix:{}/pages"])
def test_a_forked_child_outlives_the_sender(listen, tmp_path, process):  # noqa: F811
    """Its parent is killed: the child keeps neither a connection nor the address."""
    listen = listen.format(tmp_path)
    sender = process("sender", options={"listen": listen})
    with kv.PageReceiver(pool_of()) as receiver:
        ticket = sender.offer([0, 1], by_layer=True, lease_s=PATIENCE_S)
        pull = receiver.pull(ticket, [0, 1], deadline_s=PATIENCE_S)
        eventually(lambda: sender.ask("stats")["pulls"] == 1)
        child = sender.ask("fork")["child"]
        try:
            start = time.monotonic()
            sender.kill()
            assert reason_of(pull) == "lost"
            assert reason_of(receiver.pull(ticket, [0, 1], deadline_s=PATIENCE_S)) == "lost"
            assert time.monotonic() - start < 5
            kv.PageSender(pool_of(), listen=sender.hello["address"]).close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_guide_in_two_terminals(tmp_path):
    guide = Path(__file__).resolve().parents[2] / "docs" / "migration.md"
    programs = re.findall(r"```py\n# (\w+\.py)\n(.*?)```", guide.read_text(), re.DOTALL)
    assert [name for name, _ in programs] == ["prefill.py", "decode.py"]
    root = str(Path(__file__).resolve().parents[2])
    started = []
    for name, code in programs:
        (tmp_path / name).write_text(code)
        command = [sys.executable, name]
        started.append(subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
            env={**environment(), "PYTHONPATH": root},
        ))  # fmt: skip
    try:
        printed = [each.communicate(timeout=PATIENCE_S)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    assert printed == ["1 offer completed\n", "4.0 4.0\n"]
    assert not (tmp_path / "pages.sock").exists()


def test_pools_of_the_cases():
    """The sizes that the tests above rely on."""
    pool = pool_of(**LARGE)
    assert SHAPE["num_layers"] == 3
    assert all(a[0].nbytes >= 256 << 10 for _, _, a in parts_of(pool))
