"""`python -m kvcupy sender`: an operator watches and drains a running PageSender."""

from __future__ import annotations

import json
import os
import socket
import threading
import time

import pytest
from migration_cases import (  # noqa: F401 -- fixtures
    SECRET,
    assert_pulled,
    contexts,
    eventually,
    filled,
    pair,
    process,
)

import kvcupy as kv
from kvcupy.__main__ import main
from kvcupy.remote.migration import protocol
from kvcupy.remote.migration.operating import OperatedSender


@pytest.fixture
def sender_command(capsys):
    """Run a command, and return its exit status and its report, or its error."""

    def run(*arguments):
        status = main(["sender", *map(str, arguments), "--json"])
        written = capsys.readouterr()
        return status, json.loads(written.out) if written.out else written.err

    return run


@pytest.fixture
def own_socket(tmp_path):
    return {"sender": {"listen": f"unix:{tmp_path}/sender"}}


def test_a_sender_is_watched(own_socket, sender_command, capsys):
    with pair(**own_socket, model="m") as (sender, _, source, _):
        ticket = sender.offer(source.allocator.alloc(2))
        status, report = sender_command("stat", sender.address)
        assert status == 0
        counts = sender.stats()
        assert {name: report[name] for name in counts} == {**counts, "connections": 1}
        assert (report["offers"], report["offered_pages"], report["draining"]) == (1, 2, False)
        assert (report["address"], report["engine"]) == (sender.address, "socket")
        assert report["pid"] == os.getpid() and 0 < report["age_s"] < 1000
        assert report["identity"]["model"] == "m" and report["identity"]["num_layers"] == 3
        assert main(["sender", "stat", sender.address]) == 0
        assert "offered pages" in capsys.readouterr().out
        sender.withdraw(ticket)


def test_a_sender_is_drained(own_socket, sender_command):
    """Pulls of open offers complete, and the command waits for them."""
    with pair(**own_socket) as (sender, receiver, source, target):
        pages = source.allocator.alloc(2)
        ticket = sender.offer(pages)
        status, report = sender_command("drain", sender.address)
        assert (status, report["draining"], report["offers"]) == (0, True, 1)
        refused = source.allocator.alloc(1)
        with pytest.raises(kv.KvcupyError, match="draining"):
            sender.offer(refused)
        source.allocator.free(refused)
        assert sender_command("drain", sender.address, "--deadline", 0.1)[0] == 1
        pulling = threading.Timer(
            0.2, lambda: receiver.pull(ticket, [0, 1], after=False).synchronize()
        )
        pulling.start()
        status, report = sender_command("drain", sender.address, "--deadline", 20)
        pulling.join()
        assert (status, report["offers"], report["completed"]) == (0, 0, 1)
        assert_pulled(target, [0, 1], pages)
        assert sender_command("drain", sender.address, "--undo")[1]["draining"] is False
        assert sender.withdraw(sender.offer(source.allocator.alloc(1)))


def test_the_method_drains():
    with pair() as (sender, receiver, source, _):
        assert sender.drain() is True
        assert sender.drain(undo=True) is True
        ticket = sender.offer(source.allocator.alloc(1))
        start = time.monotonic()
        assert sender.drain(0.05) is False
        assert 0.05 <= time.monotonic() - start < 5
        assert sender.stats()["draining"] is True
        pulling = threading.Timer(0.1, lambda: receiver.pull(ticket, [0], after=False))
        pulling.start()
        assert sender.drain(20) is True
        pulling.join()
        for wrong in (0, -1, "1"):
            with pytest.raises((TypeError, ValueError), match="deadline_s"):
                sender.drain(wrong)


# --- Who may operate a sender ---


def test_a_secret_is_proved(tmp_path, sender_command):
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_bytes(SECRET)
    wrong.write_bytes(SECRET[::-1])
    with pair(secret=SECRET) as (sender, *_):
        assert sender_command("stat", sender.address, "--secret-file", secret)[0] == 0
        for arguments in ([], ["--secret-file", wrong]):
            status, error = sender_command("drain", sender.address, *arguments)
            assert status == 1 and "another secret" in error
        eventually(lambda: sender.stats()["dropped_connections"] == 2)
        assert sender.stats()["draining"] is False


def test_without_a_secret_the_socket_is_the_users(own_socket, sender_command, monkeypatch):
    with pair(**own_socket) as (sender, *_):
        assert sender_command("stat", sender.address)[0] == 0
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        status, error = sender_command("drain", sender.address)
        assert status == 1 and "a Unix socket of the sender's user" in error
        assert sender.stats()["draining"] is False
    with pair() as (sender, *_):  # over loopback anyone can connect
        status, error = sender_command("drain", sender.address)
        assert status == 1 and "operators need the secret" in error
        assert sender.stats()["draining"] is False


def test_a_pull_needs_a_ticket_after_the_hello_of_an_operator():
    """Its keys are public without a secret; the token of the offer is not."""
    with pair() as (sender, _, source, _):
        ticket = sender.offer(source.allocator.alloc(1))
        operated = OperatedSender(sender.address)
        request = kv.remote.migration.endpoint.PULL_HEAD.pack(1, 0, bytes(16), 0, 1, 1, 0)
        deadline = time.monotonic() + 20
        operated._channel.send(protocol.PULL, request, deadline)
        with pytest.raises(kv.TransferError) as caught:
            operated._channel.receive(deadline)
        assert caught.value.reason in ("identity", "ticket")
        operated.close()
        assert sender.withdraw(ticket)


def test_tls(contexts, tmp_path, sender_command):  # noqa: F811
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    with kv.PageSender(filled(), tls=contexts[0], secret=SECRET) as sender:
        options = ["--secret-file", secret, "--ca-file", tmp_path / "certificate.pem"]
        assert sender_command("stat", sender.address, *options)[0] == 0
        assert sender_command("stat", sender.address, "--secret-file", secret)[0] == 1


# --- What a sender does not take ---


@pytest.mark.parametrize(
    "request_bytes",
    [b"", b"{", b"[]", b"\xff", b'{"action": "close"}', b'{"action": "drain"}', b"[" * 4000,
     b'{"action": "stat"' + b" " * 5000 + b"}", b'{"action": "drain", "undo": 1e999}'],
    ids=["empty", "open", "list", "bytes", "unknown", "partial", "deep", "long", "infinite"],
)  # fmt: skip
def test_other_requests_are_refused(request_bytes, own_socket):
    with pair(**own_socket) as (sender, *_):
        operated = OperatedSender(sender.address)
        deadline = time.monotonic() + 20
        operated._channel.send(protocol.OPERATE, request_bytes, deadline)
        with pytest.raises(kv.TransferError, match="does not know the request"):
            operated._channel.receive(deadline)
        operated.close()
        assert sender.stats()["draining"] is False


def test_older_senders_do_not_answer(process, sender_command):  # noqa: F811
    ticket = bytes.fromhex(process("sender", versions=[3, 4]).ask("offer", pages=[0])["ticket"])
    status, error = sender_command("stat", protocol.Ticket.decoded(ticket, b"").address)
    assert status == 1 and "release does not answer operators" in error


def test_a_peer_that_is_not_a_sender(sender_command):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n".ljust(200))
                connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        status, error = sender_command("stat", f"tcp:127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert status == 1
    assert error.startswith("sender: tcp:127.0.0.1:")
    assert error.endswith(": the peer is not a PageSender\n")


def test_wrong_arguments(own_socket, sender_command, tmp_path):
    with pair(**own_socket) as (sender, *_):
        for name, wrong in (("secret", 1), ("tls", "yes"), ("deadline_s", 0), ("deadline_s", "1")):
            with pytest.raises((TypeError, ValueError), match=name):
                OperatedSender(sender.address, **{name: wrong})
        status, error = sender_command("stat", sender.address, "--cert-file", tmp_path / "c.pem")
        assert status == 1 and "--cert-file: expected --ca-file too" in error
        with pytest.raises(SystemExit):
            sender_command("drain", sender.address, "--deadline", "-1")
        assert not sender.stats()["draining"]


@pytest.mark.parametrize("address", ["unix:/nowhere/sender", "tcp:127.0.0.1:1", "here"])
def test_no_sender(address, sender_command):
    status, error = sender_command("stat", address)
    assert status == 1 and error.startswith("sender: ")
