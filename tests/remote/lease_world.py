"""Real senders and receivers in this process, driven step by step along a path of `LeaseModel`.

A `Wire` holds every message until a step delivers it. A `HeldAgent` takes the place of a NIXL agent
and holds every READ. Threads of senders and receivers act at once, and so does the model here
(`World.immediate`).
"""

from __future__ import annotations

import ctypes
import socket
import struct
import time
from contextlib import suppress

import numpy as np
from lease_model import (
    LANDING,
    NO_PULL,
    RECEIVER,
    SENDER,
    USER,
    LeaseModel,
    receivers_are_free,
    senders_are_free,
)
from migration_cases import eventually

import kvcupy as kv
from kvcupy.remote.migration import protocol
from kvcupy.remote.migration.protocol import CHECKSUM, CONFIRMED, DONE, LAYER, PULL, READ, REFUSED

_HANDSHAKE_UP = protocol._CLIENT_HELLO.size + protocol._OFFER.size + 32
_HANDSHAKE_DOWN = protocol._SERVER_HELLO.size + 32
_HEAD = struct.Struct(">BI")
_LONG_S = 1000.0
SECRET = bytes(16)
_IMMEDIATE_VERBS = " grants ", " looks at ", " sends ", " refuses ", " data of "
# Chances of steps that end offers, pulls or connections, relative to others.
_WEIGHTS = {
    "end": 0.1, "fail": 0.1, "cut": 0.1, "kill_sender": 0.1, "kill_receiver": 0.1,
    "read_fails": 0.3, "close_idle": 0.5,
}  # fmt: skip


ACTIONS = {
    "offer", "write", "end", "kill_sender", "kill_receiver", "cut", "close_idle", "sender_receives",
    "sender_leaves", "receiver_receives", "receiver_notices", "pull", "fail", "free", "land",
    "read_fails", "grant", "send", "refuse", "abort",
}  # fmt: skip


class HeldReading:
    """A READ, which lands or fails when `end` is called."""

    def __init__(self, blocks):
        self.blocks, self.failure, self.is_over = blocks, None, False

    def end(self, failure=None):
        if failure is None:
            for local, remote, size in self.blocks:
                ctypes.memmove(local, remote, size)
        self.failure, self.is_over = failure, True

    def done(self):
        return self.is_over

    def drop(self):
        pass


class HeldAgent:
    """In place of `nixl_agents.Agent`."""

    metadata = b"an agent"

    def __init__(self, blocks):
        self.begun = []

    def prepare(self, peer, process, local, remote, sizes, bounds):
        blocks = list(zip(local.tolist(), remote.tolist(), sizes.tolist(), strict=True))
        return [HeldReading(blocks[start:stop]) for start, stop in bounds]

    def begin(self, reading):
        self.begun.append(reading)

    def in_flight(self):
        return [reading for reading in self.begun if not reading.is_over]

    def add_peer(self, metadata):
        return "the peer"

    def release_peer(self, metadata, *, failed):
        pass

    def poll(self):
        pass

    def stop(self):
        pass

    def close(self):
        pass


class End:
    """One end of a connection: parses what arrives from it into messages.

    Attributes
    ----------
    sent : messages that wait for delivery to the other end, (kind, bytes)
    """

    def __init__(self, connection, handshake_bytes, last_kinds):
        self.socket = connection
        self.is_open = True
        self.sent, self.has_sent = [], False
        self._handshake_left = handshake_bytes
        self._last_kinds = last_kinds  # that end what the model regards as one message
        self._data, self._start, self._raw_bytes = bytearray(), 0, 0

    def pump(self, other):
        """Receive what has been sent; pass a handshake on at once."""
        while self.is_open and protocol.any_readable([self.socket], 0):
            try:
                data = self.socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            passed = data[: self._handshake_left]
            self._handshake_left -= len(passed)
            with suppress(OSError):
                other.socket.sendall(passed)
            self._data += data[len(passed) :]
            self._parse()

    def _parse(self):
        while len(self._data) >= self._start + self._raw_bytes + protocol.MIN_MESSAGE_BYTES:
            head = self._start + self._raw_bytes
            kind, length = _HEAD.unpack_from(self._data, head)
            end = head + protocol.MIN_MESSAGE_BYTES + max(0, length - 48)
            if len(self._data) < end:
                return
            self._start, self._raw_bytes = end, 0
            if kind in self._last_kinds:
                self.sent.append((kind, bytes(self._data[:end])))
                self.has_sent = True
                del self._data[:end]
                self._start = 0
            elif kind == LAYER:  # of the engine "socket": the bytes of the layer follow
                self._raw_bytes = struct.unpack_from(">IIQ", self._data, head + _HEAD.size)[2]

    def close(self):
        self.is_open = False
        self.socket.close()


class Wire:
    """A connection between a receiver and a sender."""

    def __init__(self, near, target, is_nixl):
        far = socket.create_connection(("127.0.0.1", target))
        for each in (near, far):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.is_cut = False
        last = (LAYER,) if is_nixl else ()
        self.receiver = End(near, _HANDSHAKE_UP, (PULL, READ, DONE))
        self.sender = End(far, _HANDSHAKE_DOWN, (*last, CHECKSUM, CONFIRMED, REFUSED))

    def pump(self):
        self.receiver.pump(self.sender)
        self.sender.pump(self.receiver)
        if self.is_cut or not self.receiver.is_open:
            self.sender.sent.clear()
        if self.is_cut or not self.sender.is_open:
            self.receiver.sent.clear()

    def deliver(self, source, target):
        _, data = source.sent.pop(0)
        target.socket.sendall(data)


class World:
    """The senders and receivers of a model, and its present state.

    The model's connections keep the order in which they were made, as the wires do.

    Attributes
    ----------
    patience_s : time for the threads to reach the model's state
    pause_s : time after which they must still be in it
    """

    patience_s, pause_s = 10.0, 0.0

    def __init__(self, engine, seed, waiting_for_done, secret=SECRET, **options):
        self.waiting_for_done, self.secret = waiting_for_done, secret
        self.model = LeaseModel(engine, **options)
        self.state = self.model.initial()
        self.is_nixl, self.engine = engine == "nixl", engine
        self.rng = np.random.default_rng(seed)
        self.path, self.actions = [], set()
        self.listeners, self.wires, self.gone = [], [], []
        self.senders, self.tickets, self.released = [], [], []
        self.receivers, self.pulls = [], []
        for _ in range(self.model.num_senders):
            self.listeners.append(socket.create_server(("127.0.0.1", 0)))
            self.senders.append(self.new_sender(len(self.senders)))
            self.tickets.append([])
            self.released.append([])
        for _ in range(self.model.num_receivers):
            self.receivers.append(self.new_receiver())
            self.pulls.append([None] * self.model.receiver_pages)

    def new_pool(self, num_pages):
        return kv.KVPool(num_pages, 4, 1, 1, 8, dtype="fp16", device="host")

    def new_sender(self, s):
        port = self.listeners[s].getsockname()[1]
        return kv.PageSender(
            self.new_pool(self.model.sender_pages), engine=self.engine, secret=self.secret,
            advertise=f"tcp:127.0.0.1:{port}",
        )  # fmt: skip

    def new_receiver(self):
        return kv.PageReceiver(
            self.new_pool(self.model.receiver_pages), engine=self.engine, secret=self.secret,
            max_quarantined_pages=self.model.receiver_pages + 1,
        )  # fmt: skip

    def close(self):
        for listener in self.listeners:
            listener.close()
        for wire in self.wires:
            wire.receiver.close()
            wire.sender.close()
        endpoints = [*self.receivers, *self.senders, *self.gone]
        for endpoint in endpoints if self.is_nixl else ():
            for reading in endpoint._engine._agent.in_flight():
                reading.end(RuntimeError("the world is closed"))
        for endpoint in endpoints:
            endpoint.close()

    # --- Steps ---

    def walk(self, num_steps):
        """Take random steps, and compare with the model after each."""
        for _ in range(num_steps):
            steps = [
                step for step in self.model.enabled(self.state)
                if step[2].__name__ not in self.immediate
            ]  # fmt: skip
            if not steps:
                return
            weights = np.array([_WEIGHTS.get(step[2].__name__, 1) for step in steps])
            self.take(steps[self.rng.choice(len(steps), p=weights / weights.sum())])

    def follow(self, path):
        """Take the steps of a path while the model has them, and then those that free all pages."""
        for text in path:
            steps = [step for step in self.model.enabled(self.state) if step[0] == text]
            if steps and steps[-1][2].__name__ not in self.immediate:
                self.take(steps[-1])
            elif not any(verb in text for verb in _IMMEDIATE_VERBS):
                break
        while steps := [
            step for step in self.model.enabled(self.state)
            if step[1] in (SENDER, RECEIVER, LANDING) and step[2].__name__ not in self.immediate
        ]:  # fmt: skip
            self.take(steps[0])
        assert senders_are_free(self.state) and receivers_are_free(self.state)

    @property
    def immediate(self):
        """Actions that the threads take at once."""
        return {"grant", "send", "refuse"} | (set() if self.is_nixl else {"land"})

    def take(self, step):
        text, cause, action, *arguments = step
        self.path.append(text)
        self.actions.add(action.__name__)
        getattr(self, action.__name__)(*arguments, cause)
        self.state = action(self.state, *arguments)
        while True:
            soon = [each for each in self.model.enabled(self.state)
                    if each[2].__name__ in self.immediate and each[1] != "fault"]  # fmt: skip
            if not soon:
                break
            self.actions.add(soon[0][2].__name__)
            self.state = soon[0][2](self.state, *soon[0][3:])
        self.compare()

    def compare(self):
        """Wait until what can be observed is what the model has."""
        expected = self.expected()
        self.reach(expected)
        if self.pause_s:
            time.sleep(self.pause_s)
            self.reach(expected)

    def reach(self, expected):
        deadline = time.monotonic() + self.patience_s
        while (observed := self.observed()) != expected:
            if time.monotonic() > deadline:
                lines = [f"{n:4d}. {text}" for n, text in enumerate(self.path, 1)]
                differs = [
                    f"{name}: expected {expected[name]}, got {observed[name]}"
                    for name in expected if expected[name] != observed[name]
                ]  # fmt: skip
                raise AssertionError("\n".join([*lines, *differs, str(self.state)]))
            time.sleep(0.0005)

    def expected(self):
        state = self.state
        return {
            "pages of senders": [
                self.model.sender_pages
                - sum(o.life == sender.life and not o.released for o in sender.offers)
                for sender in state.senders
            ],
            "open offers": [
                sum(o.life == sender.life and not o.ended for o in sender.offers)
                for sender in state.senders
            ],
            "served pulls": [
                sum(c.sender == s and c.serving >= 0 and c.sender_open for c in state.connections)
                for s in range(self.model.num_senders)
            ],
            "pulls that wait for DONE": [
                sum(c.sender == s and c.stage == "sent" and c.sender_open
                    for c in state.connections)
                for s in range(self.model.num_senders)
            ],
            "releases": [
                [int(o.released) for o in sender.offers if o.life == sender.life]
                for sender in state.senders
            ],
            "pages of receivers": [pulls.count(NO_PULL) for pulls in state.receivers],
            "quarantined": [
                sum(pull != NO_PULL and pull.phase == "failed" and pull.in_flight > 0
                    for pull in pulls)
                for pulls in state.receivers
            ],
            "pulls": [
                ["" if not pull or pull.freed else
                 pull.phase if pull.phase in ("completed", "failed") else "running"
                 for pull in pulls]
                for pulls in state.receivers
            ],
            "in flight": [
                sum(pull.in_flight for pull in pulls if pull) for pulls in state.receivers
            ],
            "connections": [
                (c.receiver_open, c.sender_open, [each[0] for each in c.up],
                 [each[0] for each in c.down])
                for c in state.connections
            ],
        }  # fmt: skip

    def observed(self):
        self.pump()
        name_of = {
            PULL: "PULL", READ: "READ", DONE: "DONE", CONFIRMED: "CONFIRMED", REFUSED: "REFUSED",
            LAYER: "GRANT", CHECKSUM: "CHECKSUM" if self.is_nixl else "GRANT",
        }  # fmt: skip
        return {
            "pages of senders": [sender.pool.allocator.num_free for sender in self.senders],
            "open offers": [sender.stats()["offers"] for sender in self.senders],
            "served pulls": [sender.stats()["pulls"] for sender in self.senders],
            "pulls that wait for DONE": [
                list(self.waiting_for_done.values()).count(port_of(sender))
                for sender in self.senders
            ],
            "releases": [list(counts) for counts in self.released],
            "pages of receivers": [each.pool.allocator.num_free for each in self.receivers],
            "quarantined": [each.stats()["quarantined_pages"] for each in self.receivers],
            "pulls": [[outcome_of(pull) for pull in pulls] for pulls in self.pulls],
            "in flight": [
                len(each._engine._agent.in_flight()) if self.is_nixl else 0
                for each in self.receivers
            ],
            "connections": [
                (wire.receiver.is_open, wire.sender.is_open,
                 [name_of[kind] for kind, _ in wire.receiver.sent],
                 [name_of[kind] for kind, _ in wire.sender.sent])
                for wire in self.wires
            ],
        }  # fmt: skip

    def pump(self):
        """Accept connections, and receive messages without delivering them."""
        for s, listener in enumerate(self.listeners):
            while protocol.any_readable([listener], 0):
                near, _ = listener.accept()
                self.wires.append(Wire(near, port_of(self.senders[s]), self.is_nixl))
        for wire in self.wires:
            wire.pump()
        for wire in list(self.wires):  # to another sender than the ticket's: closed unasked
            if not (wire.receiver.is_open or wire.receiver.has_sent):
                wire.sender.close()
                self.wires.remove(wire)

    # --- Actions of the model ---

    def offer(self, s, cause):
        pool = self.senders[s].pool
        number = len(self.released[s])
        page = pool.allocator.alloc(1)
        counts = self.released[s]
        counts.append(0)

        def release(pages):
            counts[number] += 1
            pool.k(0)[pages] = pool.v(0)[pages] = 0
            pool.allocator.free(pages)

        ticket = self.senders[s].offer(
            page, by_layer=True, lease_s=_LONG_S, pulls=self.model.num_pulls, release=release
        )
        self.tickets[s].append((ticket, page))

    def write(self, s, k, cause):
        ticket, page = self.tickets[s][k]
        pool = self.senders[s].pool
        pool.k(0)[page] = pool.v(0)[page] = 1 + k
        self.senders[s].layer_done(ticket, 0, kv.device("host").stream())

    def end(self, s, k, cause):
        sender, ticket = self.senders[s], self.tickets[s][k][0]
        if cause == USER:
            assert sender.withdraw(ticket)
        else:
            offer, deadline = sender._offer_of(ticket), time.monotonic() + self.patience_s
            while not offer.ended and time.monotonic() < deadline:
                offer.expires = 0.0  # again, if the last message of a receiver renews it
                sender._notify()
                time.sleep(0.0005)

    def kill_sender(self, s, cause):
        for wire, c in zip(self.wires, self.state.connections, strict=True):
            if c.sender == s:
                wire.sender.close()
        self.gone.append(self.senders[s])
        self.senders[s] = self.new_sender(s)
        self.released[s] = []

    def kill_receiver(self, r, cause):
        def connect(*_):
            raise kv.TransferError("the process is dead", "lost")

        self.receivers[r]._connect = connect
        for wire, c in zip(self.wires, self.state.connections, strict=True):
            if c.receiver == r:
                wire.receiver.close()
        self.gone.append(self.receivers[r])
        self.receivers[r] = self.new_receiver()
        self.pulls[r] = [None] * self.model.receiver_pages

    def cut(self, n, cause):
        """Lose what is in flight; each end notices by a separate step."""
        self.wires[n].is_cut = True

    def close_idle(self, n, cause):
        sender = self.senders[self.state.connections[n].sender]
        name = self.wires[n].sender.socket.getsockname()

        def evict():
            with sender._lock:
                for each in sender._connections:
                    if each.state == "idle" and has_peer(each.socket, name):
                        sender._evict(each)
                        return True

        eventually(evict)

    def sender_receives(self, n, cause):
        def counts():
            stats = sender.stats()
            return [stats[name] for name in ("pulls", "refused_pulls", "lost_pulls")]

        sender, wire = self.senders[self.state.connections[n].sender], self.wires[n]
        is_pull, before = wire.receiver.sent[0][0] == PULL, counts()
        wire.deliver(wire.receiver, wire.sender)
        if is_pull:  # a refusal cannot be observed if the receiver has closed the connection
            eventually(lambda: counts() != before)

    def abort(self, n, cause):
        sender = self.senders[self.state.connections[n].sender]
        name = self.wires[n].sender.socket.getsockname()
        with sender._lock:
            sender._to_abort = [
                (0.0 if has_peer(channel.socket, name) else at, offer, channel)
                for at, offer, channel in sender._to_abort
            ]
        sender._notify()

    def sender_leaves(self, n, cause):
        self.wires[n].sender.close()

    def receiver_receives(self, n, cause):
        self.wires[n].deliver(self.wires[n].sender, self.wires[n].receiver)

    def receiver_notices(self, n, cause):
        self.wires[n].receiver.close()

    def pull(self, r, s, k, cause):
        receiver, pulls = self.receivers[r], self.pulls[r]
        idle = sum(
            c.receiver == r and c.receiver_open and c.pull < 0 for c in self.state.connections
        )
        eventually(lambda: receiver.stats()["connections"] >= idle)
        page = receiver.pool.allocator.alloc(1)
        pull = receiver.pull(self.tickets[s][k][0], page, deadline_s=_LONG_S, after=False)
        pulls[self.state.receivers[r].index(NO_PULL)] = pull, page, 1 + k, receiver.pool

    def fail(self, r, i, cause):
        pull = self.pulls[r][i][0]
        if cause == USER:
            pull.cancel()
        else:
            pull._fail(kv.TransferError("the deadline has passed", "late"))

    def free(self, r, i, cause):
        self.receivers[r].pool.allocator.free(self.pulls[r][i][1])
        self.pulls[r][i] = None

    def land(self, r, i, flipped, cause):
        reading = self.receivers[r]._engine._agent.in_flight()[0]  # they end in their order
        if flipped is not None:
            reading.blocks = [(local, local, 0) for local, _, _ in reading.blocks]
        reading.end()

    def read_fails(self, r, i, cause):
        reading = self.receivers[r]._engine._agent.in_flight()[0]
        reading.end(RuntimeError("a READ has failed"))


def noting(receive, waiting_for_done):
    """Wrap `Channel.receive` to note the channels that wait for DONE, with their senders' ports."""

    def wrapped(channel, deadline, *kinds):
        if DONE in kinds:
            with suppress(OSError):  # reset
                waiting_for_done[channel] = channel.socket.getsockname()[1]
        try:
            return receive(channel, deadline, *kinds)
        finally:
            waiting_for_done.pop(channel, None)

    return wrapped


def port_of(sender):
    return protocol.Address.parse(sender.address, "listen").port


def has_peer(connection, name):
    with suppress(OSError):  # reset
        return connection.getpeername() == name
    return False


def outcome_of(held):
    """Return "failed", "completed" if the page has the bytes of the offer, "running", or ""."""
    if held is None:
        return ""
    pull, page, value, pool = held
    try:
        if not pull.done():
            return "running"
    except kv.TransferError:
        return "failed"
    is_right = (pool.k(0)[page] == value).all() and (pool.v(0)[page] == value).all()
    return "completed" if is_right else "wrong bytes"
