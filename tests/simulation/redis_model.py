"""A model of a Redis server in a simulated world: the commands that a shared store uses."""

from __future__ import annotations

from typing import Any

from support.world import Simulated

PORT = 6379


class RedisModel:
    """A server process on simulated sockets.

    Attributes
    ----------
    values : values by key; lost when the server restarts
    expires : virtual times by key
    memory_bytes : SETs past it are refused, as with `maxmemory-policy noeviction`
    delay_s : before each reply
    """

    def __init__(self, world: Simulated) -> None:
        self.world = world
        self.memory_bytes = 1 << 30
        self.delay_s = 0.0
        self.is_listening = False
        self.start()

    def start(self) -> None:
        self.values, self.expires = {}, {}
        self.process = self.world.process("redis")
        self.process.start(self._serve).is_daemon = True

    def _serve(self) -> None:
        listener = self.world.socket.create_server(("127.0.0.1", PORT))
        self.is_listening = True
        while True:
            connection, _ = listener.accept()
            self.process.start(self._converse, connection).is_daemon = True

    def _converse(self, connection: Any) -> None:
        reader = _Reader(connection)
        try:
            while True:
                command = reader.command()
                if self.delay_s:
                    self.world.time.sleep(self.delay_s)
                connection.sendall(self._reply(command))
        except (OSError, EOFError):
            connection.close()

    def _reply(self, command: list[bytes]) -> bytes:
        name, *arguments = command
        for key in [key for key, at in self.expires.items() if at <= self.world.now]:
            self.values.pop(key, None)
            del self.expires[key]
        match name.upper():
            case b"PING":
                return b"+PONG\r\n"
            case b"EXISTS":
                return b":%d\r\n" % sum(key in self.values for key in arguments)
            case b"GET":
                value = self.values.get(arguments[0])
                return b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value)
            case b"SET":
                return self._set(*arguments)
            case b"UNLINK" | b"DEL":
                removed = sum(self.values.pop(key, None) is not None for key in arguments)
                return b":%d\r\n" % removed
            case b"HELLO":
                return b"-NOPROTO unsupported protocol version\r\n"
            case b"CLIENT" | b"SELECT" | b"AUTH":
                return b"+OK\r\n"
        return b"-ERR unknown command\r\n"

    def _set(self, key: bytes, value: bytes, *options: bytes) -> bytes:
        if b"NX" in options and key in self.values:
            return b"$-1\r\n"
        if sum(map(len, self.values.values())) + len(value) > self.memory_bytes:
            return b"-OOM command not allowed when used memory > 'maxmemory'.\r\n"
        self.values[key] = value
        if b"PX" in options:
            milliseconds = int(options[options.index(b"PX") + 1])
            self.expires[key] = self.world.now + milliseconds / 1e3
        return b"+OK\r\n"


class _Reader:
    """Reads the commands on a connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._data = b""

    def command(self) -> list[bytes]:
        count = int(self._line()[1:])
        return [self._bulk() for _ in range(count)]

    def _bulk(self) -> bytes:
        length = int(self._line()[1:])
        while len(self._data) < length + 2:
            self._more()
        value, self._data = self._data[:length], self._data[length + 2 :]
        return value

    def _line(self) -> bytes:
        while b"\r\n" not in self._data:
            self._more()
        line, _, self._data = self._data.partition(b"\r\n")
        return line

    def _more(self) -> None:
        data = self._connection.recv(65536)
        if not data:
            raise EOFError
        self._data += data
