"""Releases that speak different versions of the wire, and the trace ids of the newer one."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from migration_cases import SECRET, eventually, pair, process, reason_of  # noqa: F401 -- a fixture

import kvcupy as kv
from kvcupy.remote.migration import protocol

OLD, NEW, NEWER = [3, 4], [3, 5], [4, 5]


def pulled(sender, receiver, **options):
    """Return the reason why a pull fails, or "" if it comes."""
    ticket = sender.ask("offer", pages=[0, 1], **options)["ticket"]
    receiver.ask("pull", ticket=ticket, count=2)
    return receiver.ask("wait", sources=[0, 1])["reason"]


@pytest.mark.parametrize("secret", [None, SECRET.decode()], ids=["open", "secret"])
@pytest.mark.parametrize("first", ["sender", "receiver"])
def test_one_end_is_upgraded_and_then_the_other_and_back(first, secret, process):  # noqa: F811
    """Each end is a process with the versions of its release; all pulls come."""
    order = [(OLD, OLD), (NEW, OLD), (NEW, NEW), (OLD, NEW), (OLD, OLD)]
    for versions in order:
        roles = (first, "receiver" if first == "sender" else "sender")
        options = {"secret": secret} if secret else {}
        started = {
            role: process(role, versions=spoken, options=options)
            for role, spoken in zip(roles, versions, strict=True)
        }
        assert pulled(**started) == ""
        for each in started.values():
            each.kill()


def test_versions_without_a_common_one(process):  # noqa: F811
    sender, old = process("sender", versions=NEWER), process("receiver", versions=OLD)
    assert pulled(sender, old) == "version"
    eventually(
        lambda: sender.ask("stats")["dropped_connections"] == 1
    )  # after the receiver's error
    newer = process("receiver", versions=NEWER)
    assert pulled(process("sender", versions=OLD), newer) == "version"


def test_tickets_name_the_newest_version():
    """In a byte that version 3 leaves 0. The version is chosen from it, never from the wire."""
    with pair() as (sender, receiver, source, _):
        ticket = receiver.inspect(sender.offer(source.allocator.alloc(1)))
        assert ticket.version == protocol.VERSIONS[-1]
        old = replace(ticket, version=0).encoded(b"")
        assert receiver.inspect(old).version == 3
        receiver.pull(old, [0]).synchronize()
    with pair() as (sender, receiver, source, _):
        ticket = receiver.inspect(sender.offer(source.allocator.alloc(1)))
        assert reason_of(receiver.pull(replace(ticket, version=2).encoded(b""), [0])) == "version"


# --- Trace ids ---


def test_trace_ids(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "kvcupy")
    with pair() as (sender, receiver, source, _):
        assert receiver.inspect(sender.offer(source.allocator.alloc(1))).trace_id == ""
        ticket = sender.offer(source.allocator.alloc(2), trace_id="request 7")
        assert receiver.inspect(ticket).trace_id == "request 7"
        receiver.pull(ticket, [0, 1]).synchronize()
        ticket = sender.offer(source.allocator.alloc(2), trace_id="request 8", by_layer=True)
        sender.layer_done(ticket, 0)
        pull = receiver.pull(ticket, [0, 1])
        pull.wait_layer(0)
        sender.withdraw(ticket)
        assert reason_of(pull) == "withdrawn"
        assert "request 8" in str(pull.failure) and sender.address in str(pull.failure)
        for layer in (1, 2):
            sender.layer_done(ticket, layer)
    lines = [record.getMessage() for record in caplog.records if "request 8" in record.getMessage()]
    assert {line.split()[0] for line in lines} >= {"incomplete", "failed"}
    with pair() as (sender, receiver, source, _):
        ticket = sender.offer(source.allocator.alloc(1), trace_id="request 9")
        monkeypatch.setattr(protocol, "VERSIONS", range(*OLD))
        with pytest.raises(kv.TransferError, match="expected version 3 to 3, got 4"):
            receiver.inspect(ticket)


@pytest.mark.parametrize("trace_id", [7, "x" * 129, "two\nlines", "é" * 65])
def test_invalid_trace_ids(trace_id):
    with pair() as (sender, _, source, _):
        pages = source.allocator.alloc(1)
        with pytest.raises((TypeError, ValueError), match="trace_id: expected"):
            sender.offer(pages, trace_id=trace_id)
        source.allocator.free(pages)


def test_damaged_trace_ids():
    """Of one who knows the secret: nothing unprintable gets into a log."""
    with pair(secret=SECRET) as (sender, receiver, source, _):
        ticket = receiver.inspect(sender.offer(source.allocator.alloc(1), trace_id="request"))
        for trace_id in ("a\nb", "\x1b[2J"):
            with pytest.raises(kv.TransferError) as caught:
                receiver.inspect(replace(ticket, trace_id=trace_id).encoded(SECRET))
            assert caught.value.reason == "ticket"
