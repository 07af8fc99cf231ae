"""Peers that say nothing, and many peers at once: honest pulls come all the same."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
from migration_cases import (
    PATIENCE_S,
    SECRET,
    assert_pulled,
    contexts,  # noqa: F401 -- a fixture
    eventually,
    filled,
    is_poisoned,
    pair,
    poison,
    pool_of,
    proxy,  # noqa: F401 -- a fixture
    reason_of,
)

import kvcupy as kv
from kvcupy.remote.migration import protocol

NUM_PULLS = 40


def port_of(address):
    return int(address.rpartition(":")[2])


def options(tls, contexts, secret=None):  # noqa: F811
    server, client = contexts if tls else (None, None)
    return {"sender": {"tls": server}, "receiver": {"tls": client}, "secret": secret}


@contextmanager
def silent_sender(receiver, sender, ticket):
    """Yield a ticket that names a port where connections are accepted, but nothing is said."""
    from dataclasses import replace

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp:127.0.0.1:{silent.getsockname()[1]}"
        yield replace(receiver.inspect(ticket), address=address).encoded(sender._secret)


@contextmanager
def strangers(count, sender, hello=b""):
    """Connect from several threads, send `hello`, and reconnect whenever the sender hangs up."""
    over, connected = threading.Event(), []

    def connect():
        while not over.is_set():
            with (
                suppress(OSError),
                socket.create_connection(
                    ("127.0.0.1", port_of(sender.address)), PATIENCE_S
                ) as connection,
            ):
                connection.settimeout(0.1)
                connected.append(None)
                connection.sendall(hello)
                while not over.is_set():
                    try:
                        if not connection.recv(4096):
                            break
                        connection.sendall(bytes(32))  # no proof of the secret
                    except TimeoutError:
                        pass

    threads = [threading.Thread(target=connect) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        eventually(lambda: len(connected) >= count)
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


# --- Silent peers ---


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_silent_receivers(tls, contexts, monkeypatch):  # noqa: F811
    """As many as handshakes are possible at once: they are dropped after a while."""
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 0.5)
    with ExitStack() as stack:
        sender, receiver, source, target = stack.enter_context(pair(**options(tls, contexts)))
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port_of(sender.address))))
            for _ in range(16)
        ]
        eventually(lambda: sender.stats()["connections"] == len(silent))
        eventually(lambda: sender.stats()["connections"] == 0)
        assert sender.stats()["dropped_connections"] == len(silent)
        receiver.pull(sender.offer(source.allocator.alloc(1)), [0]).synchronize()
        assert_pulled(target, [0], [0])


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_silent_sender(tls, contexts):  # noqa: F811
    """A pull ends by its deadline, and at once when it is cancelled, and its pages are free."""
    with pair(**options(tls, contexts)) as (sender, receiver, source, target):
        ticket = sender.offer(source.allocator.alloc(2))
        with silent_sender(receiver, sender, ticket) as elsewhere:
            pages = target.allocator.alloc(2)
            pull = receiver.pull(elsewhere, pages, deadline_s=0.3)
            start = time.monotonic()
            assert reason_of(pull) == "late"
            assert time.monotonic() - start < 3
            target.allocator.free(pages)
            assert target.allocator.num_free == 12

            pages = target.allocator.alloc(2)
            pull = receiver.pull(elsewhere, pages, deadline_s=PATIENCE_S)
            eventually(lambda: pull._sockets)
            pull.cancel()
            start = time.monotonic()
            assert reason_of(pull) == "cancelled"
            assert time.monotonic() - start < 3
            target.allocator.free(pages)
            assert target.allocator.num_free == 12
            assert receiver.stats()["quarantined_pages"] == 0


def test_a_sender_closes_while_a_peer_is_silent(contexts):  # noqa: F811
    sender = kv.PageSender(pool_of(), tls=contexts[0])
    with socket.create_connection(("127.0.0.1", port_of(sender.address))):
        eventually(lambda: sender.stats()["connections"] == 1)
        start = time.monotonic()
        sender.close()
        assert time.monotonic() - start < 3
        assert sender.stats()["connections"] == 0


# --- Crowds ---


def pull_all(sender, receiver, source):
    """Pull 40 offers at once, into the pages of the same numbers."""
    tickets = [sender.offer(source.allocator.alloc(1)) for _ in range(NUM_PULLS)]
    pulls = [receiver.pull(ticket, [i]) for i, ticket in enumerate(tickets)]
    for pull in pulls:
        pull.synchronize()
    assert_pulled(receiver.pool, range(NUM_PULLS), range(NUM_PULLS))


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_many_pulls_at_once(tls, contexts, proxy):  # noqa: F811
    """Over 20 ms of latency each way, more handshakes than a sender makes at a time."""

    def late(data, before):
        time.sleep(0.02)
        return data

    between = proxy(late, late)
    given = options(tls, contexts)
    given["sender"]["advertise"] = between.address
    pools = filled(num_pages=NUM_PULLS), pool_of(num_pages=NUM_PULLS)
    with pair(*pools, **given) as (sender, receiver, source, _):
        between.target = sender.address
        pull_all(sender, receiver, source)
        assert sender.stats()["dropped_connections"] == 0


def hello():
    fields = (b"KVPM", protocol.VERSIONS[-1], 1, 6, os.urandom(32), bytes(16))
    return protocol._CLIENT_HELLO.pack(*fields) + bytes(8)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("is_silent", [False, True], ids=["wrong", "silent"])
def test_strangers_without_the_secret(is_silent, tls, contexts):  # noqa: F811
    """Silent ones are replaced by those who wait, the oldest first; the others fail at once."""
    pools = filled(num_pages=NUM_PULLS), pool_of(num_pages=NUM_PULLS)
    with pair(*pools, **options(tls, contexts, SECRET)) as (sender, receiver, source, _):
        with strangers(32, sender, b"" if is_silent else hello()):
            pull_all(sender, receiver, source)
        assert sender.stats()["dropped_connections"] > 0
        eventually(lambda: len(sender._connections) <= NUM_PULLS)


def test_a_connection_lost_before_the_grant(proxy):  # noqa: F811
    """Is replaced within the deadline; one that carries pages is not."""
    losses = [88, 30, 150]  # in the sender's hello, in its proof, in the grant
    between = proxy()
    between.change = lambda data, before: (
        None if losses and before + len(data) > losses[-1] and losses.pop() else data
    )
    with pair(sender={"advertise": between.address}) as (sender, receiver, source, target):
        between.target = sender.address
        receiver.pull(sender.offer(source.allocator.alloc(2)), [0, 1]).synchronize()
        assert_pulled(target, [0, 1], [0, 1])
        assert not losses


def test_a_peer_that_is_not_a_sender(proxy):  # noqa: F811
    """Its answer cannot change, so the pull fails without another attempt."""
    between = proxy(lambda data, before: b"HTTP/1.1 400 Bad Request".ljust(len(data)))
    with pair(sender={"advertise": between.address}) as (sender, receiver, source, _):
        between.target = sender.address
        pull = receiver.pull(sender.offer(source.allocator.alloc(1)), [0])
        assert reason_of(pull) == "lost" and "not a PageSender" in str(pull.failure)
        assert receiver.stats()["connection_drops"] == {}


@pytest.mark.parametrize("is_reused", [False, True], ids=["new", "reused"])
def test_a_grant_is_lost_and_its_sender_has_not_noticed(is_reused, proxy, monkeypatch):  # noqa: F811
    """The only pull is taken by the lost connection until then, and the receiver tries again."""
    move, leave = kv.PageSender._move, kv.PageSender._leave
    granted, lost = threading.Event(), threading.Event()

    def moved(sender, *arguments, **options):
        granted.set()
        move(sender, *arguments, **options)

    def noticed(sender, channel, offer, *failure):
        if failure:
            eventually(lambda: "taken" in sender.stats()["pull_failures"], "refused as taken")
        leave(sender, channel, offer, *failure)

    def change(data, before):
        if granted.is_set() and not lost.is_set():
            lost.set()
            return None
        return data

    between = proxy(change)
    with pair(sender={"advertise": between.address}) as (sender, receiver, source, target):
        between.target = sender.address
        if is_reused:
            receiver.pull(sender.offer(source.allocator.alloc(2)), [2, 3]).synchronize()
            eventually(lambda: [each.state for each in sender._connections] == ["idle"])
        monkeypatch.setattr(kv.PageSender, "_move", moved)
        monkeypatch.setattr(kv.PageSender, "_leave", noticed)
        pages = source.allocator.alloc(2)
        receiver.pull(sender.offer(pages), [0, 1]).synchronize()
        assert_pulled(target, [0, 1], pages)
        assert lost.is_set()
        assert sender.stats()["pull_failures"]["taken"] >= 1


def test_nobody_listens():
    """A pull from a sender that is gone fails at once, and is not tried until its deadline."""
    with pair() as (_, receiver, source, target):
        poison(target, [0])
        other = kv.PageSender(source)
        ticket = other.offer(source.allocator.alloc(1))
        other.close()
        start = time.monotonic()
        assert reason_of(receiver.pull(ticket, [0], deadline_s=PATIENCE_S)) == "lost"
        assert time.monotonic() - start < 3
        assert is_poisoned(target, [0])


# --- Unix sockets ---


def test_a_full_backlog_of_a_unix_socket(tmp_path):
    """A pull waits for the sender to accept, until its deadline."""
    path = str(tmp_path / "pages")
    address = protocol.Address(path=path)
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as stack:
        server.bind(path)
        server.listen(0)
        stack.enter_context(address.connect(1))
        with pytest.raises(TimeoutError):
            address.connect(0.1)
        threading.Timer(0.2, lambda: stack.enter_context(server.accept()[0])).start()
        stack.enter_context(address.connect(PATIENCE_S))


def test_senders_over_one_stale_socket(tmp_path):
    """One of them gets it; no other takes it away, and nothing is left behind."""
    path = tmp_path / "pages"
    address = protocol.Address(path=str(path))
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(path))
        start, servers, errors = threading.Barrier(4), [], []

        def listen(start=start, servers=servers, errors=errors):
            start.wait()
            try:
                servers.append(address.listen()[0])
            except FileExistsError as error:
                errors.append(error)

        threads = [threading.Thread(target=listen) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(servers), len(errors)) == (1, 3)
        with address.connect(1):  # the path leads to the listening server
            servers[0].accept()[0].close()
        assert list(tmp_path.iterdir()) == [path]
        path.unlink()
        servers[0].close()


def test_a_second_sender_waits_for_the_first_to_listen(tmp_path, monkeypatch):
    """Between the probe of a stale socket and its removal, which must be one step."""
    path = tmp_path / "pages"
    address = protocol.Address(path=str(path))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    unlink, is_first, results = protocol.Path.unlink, [True], []

    def delayed(self, **options):
        if self == path and is_first:
            is_first.pop()
            second.start()
            second.join(0.3)
        unlink(self, **options)

    def listen():
        with pytest.raises(FileExistsError):
            results.append(address.listen()[0])

    second = threading.Thread(target=listen)
    monkeypatch.setattr(protocol.Path, "unlink", delayed)
    server, _ = address.listen()
    second.join()
    assert not results
    with address.connect(1):
        server.accept()[0].close()
    server.close()
