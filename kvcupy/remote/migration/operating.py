"""Operate a running `PageSender` from another process: `python -m kvcupy sender` calls this."""

from __future__ import annotations

import json
import ssl
import sys
import time
from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import Any

from ...cache.inspection import print_report, seconds
from ...errors import TransferError
from . import protocol
from .endpoint import positive_seconds
from .protocol import OPERATE, Address, Channel, Lost

_POLL_S = 0.05


class OperatedSender:
    """An operator's connection to a sender.

    Parameters
    ----------
    address : listening address of the sender, as in `PageSender.address`
    secret : the sender's; without one, only a Unix socket of the sender's user is accepted
    tls : ssl.SSLContext for clients; None if the sender does not use TLS
    deadline_s : time limit for connecting

    Raises
    ------
    TypeError, ValueError : an argument is invalid
    TransferError : the peer is not a sender, or one with another secret or of another release
    OSError, Lost : the sender is unreachable
    """

    def __init__(
        self, address: str, *, secret: bytes | None = None, tls: ssl.SSLContext | None = None,
        deadline_s: float = protocol.HANDSHAKE_S,
    ) -> None:  # fmt: skip
        where, key = Address.parse(address, "address"), protocol.checked_secret(secret)
        tls = protocol.checked_tls(tls, "clients")
        deadline_s = positive_seconds(deadline_s, "deadline_s")
        deadline = time.monotonic() + deadline_s
        connection = where.connect(deadline_s)
        try:
            if tls is not None:
                name = where.host or None
                connection = protocol.encrypt(
                    connection, tls, deadline, lambda encrypted: None, server_hostname=name
                )
            self._channel: Channel
            self._channel, _ = protocol.as_receiver(connection, key, bytes(16), None, deadline)
        except BaseException:
            connection.close()
            raise

    def stat(self) -> dict[str, Any]:
        """Return `PageSender.stats`, and the address, engine, identity, age and process."""
        return self._ask({"action": "stat"})

    def drain(self, deadline_s: float = 0.0, *, undo: bool = False) -> dict[str, Any]:
        """Make the sender refuse new offers, or accept them again; return its `stat`.

        Parameters
        ----------
        deadline_s : maximum time to wait until no offer is open
        """
        end = time.monotonic() + deadline_s
        answer = self._ask({"action": "drain", "undo": undo})
        while not undo and answer["offers"] and time.monotonic() < end:
            time.sleep(_POLL_S)
            answer = self.stat()
        return answer

    def close(self) -> None:
        self._channel.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + protocol.HANDSHAKE_S
        self._channel.send(OPERATE, json.dumps(request).encode(), deadline)
        answer = json.loads(self._channel.receive(deadline, OPERATE)[1])
        if not isinstance(answer, dict):
            raise Lost("the sender's answer is not a JSON object")
        return answer


# --- The command ---


def add_arguments(parser: Any) -> None:
    """Add the commands of `python -m kvcupy sender` and their options."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, purpose in (
        ("stat", "print counts, identity and age"),
        ("drain", "refuse new offers; pulls of open ones still complete"),
    ):
        add = commands.add_parser(action, help=purpose, description=f"{purpose}.").add_argument
        add("address", metavar="ADDRESS", help="tcp:HOST:PORT or unix:PATH, as the sender listens")
        if action == "drain":
            add("--undo", action="store_true", help="accept offers again")
            waits = "wait until no offer is open; the exit status is 1 if some are left"
            add("--deadline", type=seconds, metavar="SECONDS", help=waits)
        add("--secret-file", type=Path, metavar="FILE", help="contains the sender's secret")
        add("--ca-file", type=Path, metavar="FILE", help="use TLS, and trust these certificates")
        add("--cert-file", type=Path, metavar="FILE", help="with --ca-file: certificate and key")
        add("--json", action="store_true", help="print JSON")


def main(options: Namespace) -> int:
    """Run one command; return 1 if it failed, or offers are left at the deadline."""
    try:
        return _run(options)
    except (OSError, ValueError, TypeError, TransferError, Lost) as error:
        print(f"sender: {options.address}: {error}", file=sys.stderr)
        return 1


def _run(options: Namespace) -> int:
    secret = None if options.secret_file is None else options.secret_file.read_bytes()
    tls = None
    if options.cert_file is not None and options.ca_file is None:
        raise ValueError("--cert-file: expected --ca-file too, which enables TLS")
    if options.ca_file is not None:
        tls = ssl.create_default_context(cafile=options.ca_file)
        if options.cert_file is not None:
            tls.load_cert_chain(options.cert_file)
    status = 0
    with closing(OperatedSender(options.address, secret=secret, tls=tls)) as sender:
        if options.action == "stat":
            report = sender.stat()
        else:
            report = sender.drain(options.deadline or 0.0, undo=options.undo)
            status = int(options.deadline is not None and not options.undo and report["offers"] > 0)
    print_report(report, as_json=options.json)
    return status
