"""The scheduler's side asks workers, in other processes of the machine, to offer blocks."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from ...remote.migration.protocol import Address

_TIMEOUT_S = 5.0


class Link:
    """Answers `ask` in a thread, at a socket that only processes of this user can open.

    Parameters
    ----------
    answer : takes the name of a request, its blocks and the trace that it belongs to

    Attributes
    ----------
    path : of the socket
    """

    def __init__(self, answer: Callable[[str, list[int], str], str | None]) -> None:
        self._answer = answer
        name = f"kvcupy-{os.getpid()}-{secrets.token_hex(8)}"
        self.path = str(Path(tempfile.gettempdir(), name))
        self._server, _ = Address(path=self.path).listen()
        threading.Thread(target=self._serve, name="kvcupy link", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return  # closed
            with suppress(OSError, ValueError), connection:  # the scheduler has gone
                connection.settimeout(_TIMEOUT_S)
                question = json.loads(connection.makefile("rb").readline())
                connection.sendall(json.dumps(self._answer(*question)).encode() + b"\n")

    def close(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._server.close()


def ask(paths: Sequence[str], name: str, blocks: Sequence[int], trace: str) -> list[str | None]:
    """Return the answers of workers; OSError or ValueError if one does not answer."""
    question = json.dumps([name, list(blocks), trace]).encode() + b"\n"
    with ExitStack() as stack:
        connections = []
        for path in paths:
            connection = stack.enter_context(Address(path=path).connect(_TIMEOUT_S))
            connection.settimeout(_TIMEOUT_S)
            connection.sendall(question)
            connections.append(connection)
        return [json.loads(each.makefile("rb").readline()) for each in connections]
