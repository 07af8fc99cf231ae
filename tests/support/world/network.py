"""Simulated `socket`, `select` and `ssl`: byte streams with latency, buffers, resets and silence.

    send --> [ buffer of the receiver: (arrival, bytes), ... ] --> receive

Bytes arrive in order, after the latency of their connection. Sends block while the buffer is full.
The connections of a killed process end; a partition only delays their bytes.
"""

from __future__ import annotations

import select as real_select
import socket as real_socket
import ssl as real_ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from .files import kept
from .scheduler import Process, World

_BACKLOG = 128
_CONNECT_TIMEOUT_S = 120.0  # of the system, for peers that do not answer
_TLS_HELLO = b"simulated TLS hello".ljust(64, b".")


class Pipe:
    """One direction of a connection."""

    def __init__(self, world: World, latency_s: float, capacity: int) -> None:
        self.world, self.latency_s, self.capacity = world, latency_s, capacity
        self.chunks: deque[tuple[float, bytes]] = deque()
        self.num_bytes = 0
        self.ends_at = float("inf")  # arrival of the sender's FIN
        self.reader_ends_at = float("inf")  # later bytes are lost, and end the sender's calls
        self.is_reset = False
        self.is_held = False  # by a partition

    def space(self) -> int:
        if self.reader_ends_at <= self.world.now:
            return self.capacity
        return max(0, self.capacity - self.num_bytes)

    def put(self, data: bytes) -> None:
        arrival = self.world.now + self.latency_s
        if self.chunks:
            arrival = max(arrival, self.chunks[-1][0])
        self.chunks.append((arrival, data))
        self.num_bytes += len(data)
        self.world.after(arrival - self.world.now, lambda: None)  # stops the clock there

    def end(self) -> None:
        if self.ends_at == float("inf"):
            last = self.chunks[-1][0] if self.chunks else 0.0
            self.ends_at = max(last, self.world.now + self.latency_s)
            self.world.after(self.ends_at - self.world.now, lambda: None)

    def is_readable(self) -> bool:
        if self.is_held:
            return False
        arrives_at = self.chunks[0][0] if self.chunks else self.ends_at
        return self.is_reset or arrives_at <= self.world.now

    def take(self, count: int) -> bytes:
        """Return up to `count` arrived bytes; none at the end of the stream."""
        taken = bytearray()
        while self.chunks and self.chunks[0][0] <= self.world.now and len(taken) < count:
            arrival, data = self.chunks.popleft()
            piece, rest = data[: count - len(taken)], data[count - len(taken) :]
            taken += piece
            if rest:
                self.chunks.appendleft((arrival, rest))
        self.num_bytes -= len(taken)
        return bytes(taken)


class Network:
    """Listeners and connections of a world.

    Attributes
    ----------
    latency_s : one-way latency of new connections
    silent : processes whose TCP connections a partition holds back
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.latency_s = world.random.choice([2e-5, 1e-4, 5e-3])
        self.buffer_bytes = world.random.choice([4096, 65536, 1 << 20])
        self.listeners: dict[Any, Any] = {}  # by (host, port); Unix sockets are found as files
        self.connections: list[Any] = []  # sockets that have a peer
        self.silent: set[Process] = set()
        self.ports = 40_000

    def partition(self, process: Process) -> None:
        """Hold all bytes from and to a process; `heal` delivers them."""
        self.world.note(f"partition {process.name}")
        self.silent.add(process)
        self._hold()

    def heal(self, process: Process) -> None:
        self.world.note(f"heal {process.name}")
        self.silent.discard(process)
        self._hold()

    def reset(self, connection: Any) -> None:
        """Break a connection, as a router that forgets it does."""
        self.world.note(f"reset {connection}")
        for pipe in (connection.inbox, connection.outbox):
            pipe.is_reset = True

    def live(self) -> list[Any]:
        return [each for each in self.connections if not each.is_closed and each.inbox is not None]

    def _hold(self) -> None:
        for each in self.connections:
            if each.family == real_socket.AF_UNIX:  # within one machine
                continue
            held = each.process in self.silent or each.peer_process in self.silent
            each.inbox.is_held = each.outbox.is_held = held


def modules_of(world: World, network: Network, files: Any) -> tuple[Any, Any, Any]:
    """Make the modules `socket`, `select` and `ssl` of a world."""

    class Socket:
        def __init__(self, family: Any = None, type: Any = None, proto: int = 0) -> None:
            self.family = real_socket.AF_INET if family is None else family
            self.type = real_socket.SOCK_STREAM if type is None else type
            self.process = world.task.process
            self.process.handles[self] = None
            self.number = files.next_descriptor()
            self.is_closed = False
            self.inbox: Any = None
            self.outbox: Any = None
            self.peer_process: Any = None
            self.timeout: float | None = None
            self.option_timeouts = {real_socket.SO_RCVTIMEO: 0.0, real_socket.SO_SNDTIMEO: 0.0}
            self.queue: deque[Socket] | None = None  # of a listener: connections to accept
            self.address: Any = ("", 0)
            self._is_reset_at_close = False

        def __repr__(self) -> str:
            return f"socket {self.number}"

        # --- Options ---

        def give_to(self, process: Process) -> None:
            self.process.handles.pop(self, None)
            self.process = process
            process.handles[self] = None

        def fileno(self) -> int:
            return -1 if self.is_closed else self.number

        def settimeout(self, seconds: float | None) -> None:
            self._require_open()
            self.timeout = seconds

        def setblocking(self, flag: bool) -> None:
            self.settimeout(None if flag else 0.0)

        def gettimeout(self) -> float | None:
            return self.timeout

        def setsockopt(self, level: int, option: int, value: Any) -> None:
            self._require_open()
            if level == real_socket.SOL_SOCKET and option in self.option_timeouts:
                seconds, microseconds = struct.unpack("@ll", value)
                self.option_timeouts[option] = seconds + microseconds / 1e6
            elif option == real_socket.SO_LINGER:
                self._is_reset_at_close = True

        def getsockname(self) -> Any:
            return self.address

        # --- Connections ---

        def bind(self, address: Any) -> None:
            self._require_open()
            if self.family == real_socket.AF_UNIX:
                files.make_socket(address, self)
                self.address = address
                return
            host, port = address[:2]
            if port == 0:
                network.ports += 1
                port = network.ports
            if (host, port) in network.listeners:
                raise OSError(98, "Address already in use")
            self.address = (host, port)

        def listen(self, backlog: int = _BACKLOG) -> None:
            self._require_open()
            self.queue, self.backlog = deque(), backlog
            if self.family != real_socket.AF_UNIX:
                network.listeners[self.address] = self

        def accept(self) -> tuple[Socket, Any]:
            world.pause()
            self._require_open()
            queue = self.queue
            assert queue is not None
            if not queue:
                if self.timeout == 0.0:
                    raise BlockingIOError(11, "Resource temporarily unavailable")
                self._wait(lambda: bool(queue) or self.is_closed, self.timeout)
                self._require_open()
            accepted = queue.popleft()
            return accepted, accepted.address

        def connect(self, address: Any) -> None:
            world.pause()
            self._require_open()
            listener = self._listener(address)
            if listener is None or listener.is_closed or listener.queue is None:
                self._sleep(network.latency_s)
                raise ConnectionRefusedError(111, "Connection refused")
            is_unix = self.family == real_socket.AF_UNIX
            seconds = self._timeout(real_socket.SO_SNDTIMEO)
            if is_unix and self.timeout is not None:
                seconds = 0.0  # connecting to a full backlog fails at once
            elif seconds is None:
                seconds = _CONNECT_TIMEOUT_S
            deadline = world.now + seconds
            if not is_unix:
                self._sleep(min(network.latency_s, seconds))
            both = {self.process, listener.process}
            is_taken = world.wait(
                lambda: (
                    (is_unix or not network.silent & both)
                    and len(listener.queue) < listener.backlog
                ),
                deadline,
            )
            if not is_taken:
                if is_unix:
                    raise BlockingIOError(11, "Resource temporarily unavailable")
                raise TimeoutError("timed out")
            if listener.is_closed:
                raise ConnectionRefusedError(111, "Connection refused")
            there = Socket(self.family)
            there.give_to(listener.process)
            pair(self, there)
            listener.queue.append(there)

        def _listener(self, address: Any) -> Any:
            if self.family == real_socket.AF_UNIX:
                return files.socket_at(address)
            return network.listeners.get(tuple(address[:2]))

        def shutdown(self, how: int) -> None:
            world.pause()
            self._require_open()
            if self.outbox is None:
                raise OSError(107, "Transport endpoint is not connected")
            self._end()
            self.inbox.ends_at = min(self.inbox.ends_at, world.now)
            self.inbox.chunks.clear()
            self.inbox.num_bytes = 0

        def close(self) -> None:
            world.pause()
            self._closed()

        def detach(self) -> int:
            self.is_closed = True
            return int(self.number)

        def close_by_system(self) -> None:
            self._closed()

        def _closed(self) -> None:
            if self.is_closed:
                return
            self.is_closed = True
            self.process.handles.pop(self, None)
            if network.listeners.get(self.address) is self:
                del network.listeners[self.address]
            for each in self.queue or ():
                each._closed()
            if self.outbox is not None:
                self._end()

        def _end(self) -> None:
            if self._is_reset_at_close:
                self.outbox.is_reset = True
            self.outbox.end()
            self.inbox.reader_ends_at = min(
                self.inbox.reader_ends_at, world.now + self.inbox.latency_s
            )

        # --- Bytes ---

        def _send(self, data: bytes) -> int:
            """Send some of the bytes, and return how many."""
            world.pause()
            self._require_connected()
            outbox = self.outbox
            if not outbox.space():
                self._wait(
                    lambda: outbox.space() > 0 or self._is_broken(),
                    self._timeout(real_socket.SO_SNDTIMEO),
                    real_socket.SO_SNDTIMEO,
                )
            self._require_connected()
            count: int = min(len(data), outbox.space())
            if count > 1 and world.random.random() < 0.1:
                count = world.random.randint(1, count)
            outbox.put(bytes(data[:count]))
            return count

        def _is_broken(self) -> bool:
            return self.is_closed or self.outbox.is_reset or self.inbox.is_reset

        def _receive(self, count: int) -> bytes:
            world.pause()
            self._require_open()
            inbox = self.inbox
            if inbox is None:
                raise OSError(107, "Transport endpoint is not connected")
            if not inbox.is_readable():
                self._wait(
                    lambda: inbox.is_readable() or self.is_closed,
                    self._timeout(real_socket.SO_RCVTIMEO),
                    real_socket.SO_RCVTIMEO,
                )
            self._require_open()
            if inbox.is_reset:
                raise ConnectionResetError(104, "Connection reset by peer")
            data: bytes = inbox.take(count)
            return data

        def send(self, data: Any, flags: int = 0) -> int:
            if flags & real_socket.MSG_DONTWAIT and not self.outbox.space():
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return self._send(bytes(data))

        def sendall(self, data: Any) -> None:
            rest = bytes(data)
            deadline = None if self.timeout is None else world.now + self.timeout
            while rest:
                if deadline is not None and world.now >= deadline:
                    raise TimeoutError("timed out")
                rest = rest[self._send(rest) :]

        def sendmsg(self, buffers: Sequence[Any]) -> int:
            return self._send(b"".join(map(bytes, buffers)))

        def recv(self, count: int, flags: int = 0) -> bytes:
            data = self._receive(count)
            if flags & real_socket.MSG_PEEK and data:
                self.inbox.chunks.appendleft((0.0, data))
                self.inbox.num_bytes += len(data)
            return data

        def recv_into(self, buffer: Any) -> int:
            data = self._receive(len(buffer))
            buffer[: len(data)] = data
            return len(data)

        def recvmsg_into(
            self, buffers: Sequence[Any], ancillary: int = 0, flags: int = 0
        ) -> tuple[int, list[Any], int, Any]:
            total = sum(map(len, buffers))
            data = self._receive(total)
            while len(data) < total and flags & real_socket.MSG_WAITALL:
                try:
                    more = self._receive(total - len(data))
                except (BlockingIOError, TimeoutError, ConnectionResetError):
                    if not data:
                        raise
                    break
                if not more:
                    break
                data += more
            rest = data
            for buffer in buffers:
                count = min(len(buffer), len(rest))
                buffer[:count] = rest[:count]
                rest = rest[count:]
            return len(data), [], 0, None

        # --- Waiting ---

        def _timeout(self, option: int) -> float | None:
            if self.timeout is not None:
                return self.timeout
            return self.option_timeouts[option] or None

        def _wait(self, until: Callable[[], bool], seconds: float | None, option: int = 0) -> None:
            deadline = float("inf") if seconds is None else world.now + seconds
            if not world.wait(until, deadline):
                if self.timeout is None or self.timeout == 0.0:  # the timeout of a socket option
                    raise BlockingIOError(11, "Resource temporarily unavailable")
                raise TimeoutError("timed out")

        def _sleep(self, seconds: float) -> None:
            world.wait(lambda: False, world.now + seconds)

        def _require_open(self) -> None:
            if self.is_closed and not world.is_over:
                raise OSError(9, "Bad file descriptor")

        def _require_connected(self) -> None:
            self._require_open()
            if self.outbox is None:
                raise OSError(107, "Transport endpoint is not connected")
            if self.outbox.is_reset or self.inbox.is_reset:
                raise ConnectionResetError(104, "Connection reset by peer")
            if self.outbox.ends_at < float("inf"):
                raise BrokenPipeError(32, "Broken pipe")
            if self.outbox.reader_ends_at <= world.now:
                raise BrokenPipeError(32, "Broken pipe")

    def pair(here: Socket, there: Socket) -> None:
        latency = network.latency_s
        here.outbox = there.inbox = Pipe(world, latency, network.buffer_bytes)
        there.outbox = here.inbox = Pipe(world, latency, network.buffer_bytes)
        here.peer_process, there.peer_process = there.process, here.process
        network.connections += [here, there]

    class TLSSocket(Socket):
        """A connection after `wrap_socket`; with the bytes of the wrapped one."""

        is_server = False

        def sendmsg(self, buffers: Sequence[Any]) -> int:
            raise NotImplementedError("sendmsg not allowed on instances of SSLSocket")

        def recvmsg_into(self, *arguments: Any) -> Any:
            raise NotImplementedError("recvmsg_into not allowed on instances of SSLSocket")

        def pending(self) -> int:
            return 0

        def do_handshake(self) -> None:
            deadline = float("inf") if self.timeout is None else world.now + self.timeout
            if not self.is_server:
                self.sendall(_TLS_HELLO)
            hello = b""
            while len(hello) < len(_TLS_HELLO):
                if world.now >= deadline:
                    raise TimeoutError("The handshake operation timed out")
                try:
                    piece = self._receive(len(_TLS_HELLO) - len(hello))
                except BlockingIOError:
                    # OpenSSL reports the timeout of a socket option as "would block", and Python
                    # then waits again, without end.
                    continue
                if not piece:
                    raise real_ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
                hello += piece
            if hello != _TLS_HELLO:
                raise real_ssl.SSLError(1, "WRONG_VERSION_NUMBER")
            if self.is_server:
                self.sendall(_TLS_HELLO)

    class SSLContext:
        protocol = real_ssl.PROTOCOL_TLS  # for either end

        def wrap_socket(
            self, connection: Socket, server_side: bool = False,
            do_handshake_on_connect: bool = True, server_hostname: Any = None,
        ) -> TLSSocket:  # fmt: skip
            connection._require_open()
            wrapped: TLSSocket = TLSSocket.__new__(TLSSocket)
            wrapped.__dict__.update(connection.__dict__)
            wrapped.is_server = server_side
            connection.is_closed = True  # its descriptor is the wrapped socket's
            connection.process.handles.pop(connection, None)
            wrapped.process.handles[wrapped] = None
            network.connections.append(wrapped)
            if do_handshake_on_connect:
                try:
                    wrapped.do_handshake()
                except BaseException:
                    wrapped.close()
                    raise
            return wrapped

    class SocketModule(_Constants):
        socket = Socket

        def create_connection(self, address: Any, timeout: float | None = None) -> Socket:
            connection = Socket()
            connection.settimeout(timeout)
            try:
                connection.connect(address)
            except BaseException:
                connection.close()
                raise
            return connection

        def create_server(self, address: Any, *, family: Any = None) -> Socket:
            server = Socket(family)
            try:
                server.bind(address)
                server.listen()
            except BaseException:
                server.close()
                raise
            return server

        def getaddrinfo(self, host: Any, port: Any, *hints: int) -> list[Any]:
            return [(real_socket.AF_INET, real_socket.SOCK_STREAM, 6, "", (host, port))]

        def socketpair(self) -> tuple[Socket, Socket]:
            first, second = Socket(real_socket.AF_UNIX), Socket(real_socket.AF_UNIX)
            pair(first, second)
            first.outbox.latency_s = second.outbox.latency_s = 0.0
            del network.connections[-2:]  # no network lies between
            return first, second

    def is_ready(each: Any, hangup_only: bool = False) -> bool:
        if each.is_closed:
            return True
        if each.queue is not None:
            return bool(each.queue)
        if each.inbox is None:
            return True
        if hangup_only:
            return bool(each.inbox.is_reset or each.inbox.ends_at <= world.now)
        readable: bool = each.inbox.is_readable()
        return readable

    class Poll:
        def __init__(self) -> None:
            self._registered: list[tuple[Any, int]] = []

        def register(self, each: Any, events: int) -> None:
            each._require_open()
            self._registered.append((each, events))

        def poll(self, timeout_ms: float | None = None) -> list[tuple[Any, int]]:
            world.pause()
            hangup = getattr(real_select, "POLLRDHUP", 0)

            def is_any_ready() -> bool:
                return any(is_ready(each, events == hangup) for each, events in self._registered)

            if timeout_ms != 0 and not is_any_ready():
                seconds = float("inf") if timeout_ms is None else timeout_ms / 1e3
                world.wait(is_any_ready, world.now + seconds)
            return [
                (each.number, events) for each, events in self._registered
                if is_ready(each, events == hangup)
            ]  # fmt: skip

    class SelectModule:
        POLLIN = real_select.POLLIN
        POLLRDHUP = getattr(real_select, "POLLRDHUP", 0)
        poll = Poll

        def select(
            self, reading: Sequence[Any], writing: Any, failing: Any, seconds: float | None = None
        ) -> tuple[list[Any], list[Any], list[Any]]:
            deadline = float("inf") if seconds is None else world.now + seconds
            world.wait(lambda: any(map(is_ready, reading)), deadline)
            return [each for each in reading if is_ready(each)], [], []

    class SSLModule:
        SSLSocket = TLSSocket
        SSLError = real_ssl.SSLError
        SSLEOFError = real_ssl.SSLEOFError
        SSLWantReadError = real_ssl.SSLWantReadError
        SSLCertVerificationError = real_ssl.SSLCertVerificationError

    SSLModule.SSLContext = SSLContext  # type: ignore[attr-defined]
    return SocketModule(), SelectModule(), SSLModule()


class _Constants:
    """Constants and errors of the real module `socket`."""

    def __getattr__(self, name: str) -> Any:
        if name.isupper() or name in ("error", "gaierror", "timeout", "has_ipv6"):
            return kept(self, name, getattr(real_socket, name))
        raise AttributeError(f"the simulated module socket has no {name}")
