"""Who may fetch pages; bytes that are changed, cut off, replayed or nonsense."""

from __future__ import annotations

import os
import random
import socket
import ssl
import struct
import threading
import time
from contextlib import suppress

import pytest
from helpers import examples, full_only
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


def port_of(sender):
    return int(sender.address.rpartition(":")[2])


def connected(sender):
    connection = socket.create_connection(("127.0.0.1", port_of(sender)), 10)
    connection.settimeout(10)
    return connection


def ended(connection):
    """Return whether the peer ends a connection."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def flipped(offset, bit):
    """Return a change of one bit at an offset of what passes."""

    def change(data, before):
        if before <= offset < before + len(data):
            data[offset - before] ^= 1 << bit
        return data

    return change


@pytest.mark.parametrize("direction", ["change", "change_up"])
@pytest.mark.parametrize("secret", [full_only(None, id="open"), pytest.param(SECRET, id="secret")])
def test_flipped_bits(direction, secret, proxy, monkeypatch):  # noqa: F811
    """Wherever on the way: the pull fails, or has the right bytes. Never others."""
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 0.5)
    total = 240 if direction == "change_up" else 9000
    rng = random.Random(5)
    offsets = [rng.randrange(total) for _ in range(examples(40))] + [0, 5, 40, 87, 90, 125, 150]
    outcomes = set()
    for offset in offsets:
        between = proxy(**{direction: flipped(offset, rng.randrange(8))})
        with pair(sender={"advertise": between.address}, secret=secret) as made:
            sender, receiver, source, target = made
            between.target = sender.address
            poison(target, range(12))
            pull = receiver.pull(sender.offer(source.allocator.alloc(2)), [4, 7], deadline_s=0.15)
            try:
                pull.synchronize()
                outcomes.add("right")
                assert_pulled(target, [4, 7], [0, 1])
            except kv.TransferError as error:
                outcomes.add(error.reason)
            assert is_poisoned(target, [0, 1, 2, 3, 5, 6, 8, 9, 10, 11])
        between.close()
    if direction == "change":
        assert {"corrupt", "lost"} <= outcomes
    assert "secret" in outcomes


@pytest.mark.parametrize("direction", ["change", "change_up"])
def test_a_message_that_is_changed(direction, proxy):  # noqa: F811
    """In a field in which any number would do: the lease that is granted, a page run."""
    offset = 104 + 5 + 7 if direction == "change" else 96 + 5 + 43
    between = proxy(**{direction: flipped(offset, 1)})
    with pair(sender={"advertise": between.address}) as (sender, receiver, source, _):
        between.target = sender.address
        pull = receiver.pull(sender.offer(source.allocator.alloc(2)), [0, 1])
        assert reason_of(pull) == "lost"
        assert sender.stats()["completed"] == 0


@pytest.mark.parametrize("cut", [0, 30, 88, 140, 200, 1000, 4000])
def test_cut_off(cut, proxy):  # noqa: F811
    between = proxy(lambda data, before: None if before + len(data) > cut else data)
    with pair(sender={"advertise": between.address}) as (sender, receiver, source, _):
        between.target = sender.address
        pull = receiver.pull(sender.offer(source.allocator.alloc(4)), [0, 1, 2, 3])
        assert reason_of(pull) == "lost"


def test_another_secret():
    """Of a receiver, although it has a ticket that it takes for genuine."""
    source = filled()
    with (
        kv.PageSender(source, secret=SECRET) as sender,
        kv.PageReceiver(pool_of(), secret=SECRET[::-1]) as receiver,
        kv.PageReceiver(pool_of()) as without,
    ):
        genuine = protocol.Ticket.decoded(sender.offer(source.allocator.alloc(1)), SECRET)
        for each, secret in ((receiver, SECRET[::-1]), (without, b"")):
            assert reason_of(each.pull(genuine.encoded(secret), [0])) == "secret"
        assert sender.stats()["sent_bytes"] == 0
        assert sender.stats()["offers"] == 1
    source.allocator.check_leaks()


def test_a_proof_with_another_secret():
    with pair(secret=SECRET) as (sender, _, source, _):
        digest = sender._digest
        for version in protocol.VERSIONS:
            with connected(sender) as connection:
                hello = protocol._CLIENT_HELLO.pack(b"KVPM", version, 1, 6, os.urandom(32), digest)
                connection.sendall(hello if version == 3 else hello + bytes(8))
                protocol.receive_exactly(
                    connection, protocol._SERVER_HELLO.size + 32, time.monotonic() + PATIENCE_S
                )
                connection.sendall(os.urandom(32))
                assert ended(connection)
        eventually(lambda: sender.stats()["dropped_connections"] == 2)
        assert source.allocator.num_free == 12


def test_refusals_of_a_peer(monkeypatch):
    """The text is printable and bounded, the reason a known one, and the peer is named."""

    def refuse(channel, reason, message, deadline):
        channel.send(protocol.REFUSED, b"evil\n\x1b[2J\n" + b"x" * 100_000, deadline)

    monkeypatch.setattr(protocol.Channel, "refuse", refuse)
    with pair() as (sender, receiver, source, _):
        ticket = sender.offer(source.allocator.alloc(1))
        sender.withdraw(ticket)
        pull = receiver.pull(ticket, [0])
        assert reason_of(pull) == "lost"
        message = str(pull.failure)
        assert message.isprintable() and len(message) < 1100
        assert message.startswith(f"{sender.address}: ?[2J?xxx")


class Impostor(kv.PageSender):
    """Takes another sender's port and its name, which is public, and serves any request."""

    def __init__(self, pool, ticket, **options):
        super().__init__(pool, listen=ticket.address, **options)
        self._id = ticket.sender_id
        self.offer(pool.allocator.alloc(ticket.num_pages))

    def _claim(self, channel, number, generation, token):
        (offer,) = self._offers.values()
        return super()._claim(channel, offer.number, offer.generation, offer.token)


def test_an_impostor_after_the_sender_is_gone():
    """Without a secret, a sender proves that it made the ticket."""
    source, target = filled(), pool_of()
    with kv.PageReceiver(target) as receiver:
        sender = kv.PageSender(source)
        ticket = sender.offer(source.allocator.alloc(2))
        sender.close()
        poison(target, range(12))
        with Impostor(pool_of(), receiver.inspect(ticket)) as impostor:
            pull = receiver.pull(ticket, [0, 1])
            assert reason_of(pull) == "lost"
            assert "no longer listens" in str(pull.failure)
            assert impostor.stats()["sent_bytes"] == 0
        assert is_poisoned(target, range(12))


def test_a_receiver_without_a_ticket():
    """Without a secret, a receiver proves that it has a ticket before anything else is read."""
    from dataclasses import replace

    with pair() as (sender, receiver, source, _):
        genuine = receiver.inspect(sender.offer(source.allocator.alloc(1)))
        forged = replace(genuine, token=bytes(16))
        assert reason_of(receiver.pull(forged.encoded(b""), [0])) == "lost"
        version_3 = replace(genuine, version=3)  # a hello that names no offer, as of old receivers
        for ticket in (version_3, genuine):
            with connected(sender) as connection:
                deadline = time.monotonic() + PATIENCE_S
                protocol.as_receiver(connection, b"", sender._digest, ticket, deadline)
        with connected(sender) as connection, pytest.raises(kv.TransferError, match="listens"):
            protocol.as_receiver(connection, b"", sender._digest, forged, deadline)
        eventually(lambda: sender.stats()["dropped_connections"] == 2)


def test_replayed(proxy):  # noqa: F811
    """What a receiver has said once is worth nothing on another connection."""
    between = proxy()
    with pair(sender={"advertise": between.address}, secret=SECRET) as made:
        sender, receiver, source, _ = made
        between.target = sender.address
        ticket = sender.offer(source.allocator.alloc(2), pulls=2)
        receiver.pull(ticket, [0, 1]).synchronize()
        eventually(lambda: sender.stats()["pulls"] == 0)
        sent = sender.stats()["sent_bytes"]
        with connected(sender) as connection:
            connection.sendall(bytes(between.from_receiver[0]))
            assert ended(connection)
        assert sender.stats()["sent_bytes"] == sent
        eventually(lambda: sender.stats()["dropped_connections"] == 1)
        sender.withdraw(ticket)


def test_nonsense(monkeypatch):
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 0.3)
    rng = random.Random(1)
    with pair(secret=SECRET) as (sender, receiver, source, target):
        messages = [
            b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, b"\xff" * 5000, b"KVPM",
            b"KVPM" + b"\1" * 84,
            *(rng.randbytes(rng.randrange(1, 400)) for _ in range(examples(40))),
        ]  # fmt: skip
        for message in messages:
            with connected(sender) as connection:
                with suppress(OSError):  # dropped already
                    connection.sendall(message)
                    connection.shutdown(socket.SHUT_WR)
                assert ended(connection)
        eventually(lambda: sender.stats()["dropped_connections"] == len(messages))
        receiver.pull(sender.offer(source.allocator.alloc(2)), [0, 1]).synchronize()
        assert_pulled(target, [0, 1], [0, 1])


def whole(kind, length):
    """Return as many bytes as the sender reads of a message before it looks at them."""
    return lambda channel: struct.pack(">BI", kind, length).ljust(protocol.MIN_MESSAGE_BYTES)


def out_of_turn(channel):
    """Return a genuine message whose turn it is not: DONE before a PULL."""
    least = protocol._MIN_PAYLOAD_BYTES
    message = struct.pack(">BI", protocol.DONE, least) + bytes(least)
    return message + channel._mac(True, message)


@pytest.mark.parametrize(
    "nonsense",
    [whole(1, 2**32 - 1), whole(99, protocol._MIN_PAYLOAD_BYTES),
     whole(protocol.PULL, protocol._MIN_PAYLOAD_BYTES), out_of_turn, whole(1, 3)],
    ids=["huge", "unknown", "forged", "out of turn", "short"],
)  # fmt: skip
def test_nonsense_behind_the_handshake(nonsense, monkeypatch):
    """From one who knows the secret; nothing is allocated for what a length says.

    The sender drops it for what it says, and would wait longer than the test for more of it.
    """
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 60.0)
    with pair(secret=SECRET) as (sender, receiver, source, _):
        ticket = receiver.inspect(sender.offer(source.allocator.alloc(1)))
        with connected(sender) as connection:
            deadline = time.monotonic() + PATIENCE_S
            kept, _ = protocol.as_receiver(connection, SECRET, sender._digest, ticket, deadline)
            connection.sendall(nonsense(kept))
            assert ended(connection)
        eventually(lambda: sender.stats()["connections"] == 0)
        receiver.pull(sender.offer(source.allocator.alloc(1)), [0]).synchronize()


def test_requests_that_ask_for_too_much():
    with pair() as (sender, receiver, source, _):
        ticket = receiver.inspect(sender.offer(source.allocator.alloc(1)))
        from kvcupy.remote.migration.endpoint import PULL_HEAD

        number, generation, token = ticket.number, ticket.generation, ticket.token
        for request, reason in [
            ((number, generation, token, 0, 5, 1, 0), "identity"),
            ((number, generation, token, 4, 1, 1, 0), "identity"),
            ((number, generation, token, 0, 0, 1, 0), "identity"),
            ((number, generation, token, 0, 4, 0, 0), "identity"),
            ((number, generation + 1, token, 0, 4, 1, 0), "ticket"),
            ((number, generation, bytes(16), 0, 4, 1, 0), "ticket"),
            ((number + 1, generation, token, 0, 4, 1, 0), "ticket"),
        ]:
            with connected(sender) as connection:
                deadline = time.monotonic() + PATIENCE_S
                channel, _ = protocol.as_receiver(connection, b"", sender._digest, ticket, deadline)
                channel.send(protocol.PULL, PULL_HEAD.pack(*request), deadline)
                with pytest.raises(kv.TransferError) as caught:
                    channel.receive(deadline)
                assert caught.value.reason == reason
        assert sender.stats()["refused_pulls"] == 7
        assert sender.stats()["sent_bytes"] == 0


def test_another_pool_behind_the_handshake():
    """A receiver that is broken, or lies: its digest is compared before anything is decoded."""
    with pair() as (sender, receiver, source, _):
        ticket = receiver.inspect(sender.offer(source.allocator.alloc(1)))
        with connected(sender) as connection:
            deadline = time.monotonic() + PATIENCE_S
            channel, _ = protocol.as_receiver(connection, b"", bytes(16), ticket, deadline)
            channel.send(protocol.PULL, b"", deadline)
            with pytest.raises(kv.TransferError, match="the pools differ"):
                channel.receive(deadline)


def test_silent_connections(monkeypatch):
    """They are dropped after a while, and do not keep others out for ever."""
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 0.2)
    with pair(sender={"max_connections": 4}) as (sender, receiver, source, _):
        silent = [connected(sender) for _ in range(8)]
        eventually(lambda: sender.stats()["dropped_connections"] >= 4)
        assert sender.stats()["connections"] <= 4
        assert all(map(ended, silent))
        for connection in silent:
            connection.close()
        eventually(lambda: sender.stats()["connections"] == 0)
        receiver.pull(sender.offer(source.allocator.alloc(1)), [0]).synchronize()


def test_a_sender_that_says_nothing(monkeypatch):
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 0.2)
    with pair() as (sender, receiver, source, _), socket.create_server(("127.0.0.1", 0)) as silent:
        from dataclasses import replace

        ticket = receiver.inspect(sender.offer(source.allocator.alloc(1)))
        elsewhere = replace(ticket, address=f"tcp:127.0.0.1:{silent.getsockname()[1]}")
        assert reason_of(receiver.pull(elsewhere.encoded(b""), [0])) == "lost"
        assert reason_of(receiver.pull(elsewhere.encoded(b""), [0], deadline_s=0.1)) == "late"


def test_addresses_of_other_machines_need_a_secret():
    with pair() as (sender, receiver, source, _):
        from dataclasses import replace

        ticket = receiver.inspect(sender.offer(source.allocator.alloc(1)))
        elsewhere = replace(ticket, address="tcp:192.0.2.1:9")
        with pytest.raises(kv.TransferError, match="secret: expected one, or tls") as caught:
            receiver.pull(elsewhere.encoded(b""), [0])
        assert caught.value.reason == "secret"


def test_socket_files(tmp_path):
    path = tmp_path / "pages"
    listen = f"unix:{path}"
    path.write_text("a file")
    with pytest.raises(OSError):
        kv.PageSender(pool_of(), listen=listen)
    assert path.read_text() == "a file"
    path.unlink()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))  # as a sender leaves it that is killed
    stale.close()
    with kv.PageSender(pool_of(), listen=listen) as sender:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(FileExistsError, match="another sender"):
            kv.PageSender(pool_of(), listen=listen)
        assert sender.address == listen
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError):
        kv.PageSender(pool_of(), listen=f"unix:{tmp_path}/nowhere/pages")


def test_tls(contexts):  # noqa: F811
    server, client = contexts
    with pair(sender={"tls": server}, receiver={"tls": client}) as (
        sender,
        receiver,
        source,
        target,
    ):
        for _ in range(2):
            receiver.pull(sender.offer(source.allocator.alloc(3)), [5, 1, 2]).synchronize()
            assert_pulled(target, [5, 1, 2], [0, 1, 2])
            eventually(lambda: source.allocator.num_free == 12)
        ticket = sender.offer(source.allocator.alloc(3))
        with kv.PageReceiver(pool_of()) as plain:
            assert reason_of(plain.pull(ticket, [0, 1, 2], deadline_s=2)) in ("lost", "late")
        with kv.PageReceiver(pool_of(), tls=ssl.create_default_context()) as stranger:
            assert reason_of(stranger.pull(ticket, [0, 1, 2])) == "lost"


def test_tls_stays_until_a_connection_has_ended(contexts, monkeypatch):  # noqa: F811
    """A thread that still sends while another aborts sends nothing that is not encrypted."""
    ends = socket.socketpair()
    result = {}

    def accept():
        result["peer"] = contexts[0].wrap_socket(ends[0], server_side=True)

    thread = threading.Thread(target=accept)
    thread.start()
    connection = contexts[1].wrap_socket(ends[1], server_hostname="127.0.0.1")
    thread.join()
    channel = protocol.Channel(connection, b"s", b"r", b"d", 2, b"")
    shutdown = socket.socket.shutdown

    def sending(self, how):
        channel.send_data([memoryview(b"content of a page")], 17, time.monotonic() + 5)
        shutdown(self, how)

    monkeypatch.setattr(socket.socket, "shutdown", sending)
    channel.abort()
    sent = b"".join(iter(lambda: socket.socket.recv(result["peer"], 4096), b""))
    assert sent and b"content" not in sent
    result["peer"].close()
    channel.close()


def test_listening_beyond_this_machine():
    """With a secret, tickets name the address that is advertised."""
    with kv.PageSender(
        filled(), listen="tcp:0.0.0.0:0", secret=SECRET, advertise="tcp:127.0.0.1:1"
    ) as sender:
        port = port_of(sender)
        assert sender.address == f"tcp:0.0.0.0:{port}"
        sender._advertised = f"tcp:127.0.0.1:{port}"
        with kv.PageReceiver(pool_of(), secret=SECRET) as receiver:
            pages = sender._pool.allocator.alloc(1)
            receiver.pull(sender.offer(pages), [0]).synchronize()
