"""Operate a store without a pool: list, size, empty, drain and verify its blocks.

`python -m kvcupy store` calls these functions. A store is memory of this machine ("shm:NAME"), a
Redis or Valkey server, or the file of a disk tier.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
from argparse import ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from ...cache.inspection import print_report, records, seconds
from ...cache.tiered import disk_format
from ..wire import checksum
from . import shm
from .backend import BackendLost, StoredBlock
from .store import HEADER_BYTES, BlockHeader

_REDIS_SCHEMES = "redis", "rediss", "unix"
_DROPS_AT_ONCE = 1000


class OperatedStore(Protocol):
    """A store that an operator has opened. `deadline` is a value of `time.monotonic`."""

    def stat(self, deadline: float) -> dict[str, Any]:
        """Return sizes and counts."""
        ...

    def blocks(self, deadline: float) -> Iterator[StoredBlock]:
        """Yield the blocks, as far as ages are known the oldest first."""
        ...

    def is_intact(self, block: StoredBlock, deadline: float) -> bool | None:
        """Return whether a block is as it was stored; None if it is gone or has no checksum."""
        ...

    def drop(self, keys: Sequence[bytes], deadline: float) -> int:
        """Drop blocks, and return their number."""
        ...

    def drain(self, deadline: float, *, undo: bool) -> None:
        """Refuse puts, and wait for those in progress."""
        ...

    def close(self) -> None: ...


def open_store(
    url: str, *, folder: Path | None = None, deadline_s: float = 30.0, **options: Any
) -> _Memory | _Server | _DiskFile:
    """Open a store.

    Parameters
    ----------
    url : "shm:NAME", "redis://..." in all forms of `SharedStore.open`, or the path of a disk tier's
        file
    folder : of "shm:", as for `SharedStore.open`
    deadline_s : time limit for connecting
    options : of a server, as for `SharedStore.open`

    Raises
    ------
    TypeError, ValueError : an argument is invalid, or the file is not a store
    ImportError : redis-py is missing
    OSError, BackendLost : the store does not exist, or is unreachable
    """
    scheme = url.partition(":")[0]
    is_server = scheme.partition("+")[0] in _REDIS_SCHEMES
    if is_server and ("://" in url or url.startswith("unix:/")):
        return _Server(url, time.monotonic() + deadline_s, options)
    if "://" in url:
        raise ValueError(f"url: expected shm:NAME, redis://... or a file, got {scheme}://...")
    if options:
        raise TypeError(f"options: expected none, since {url} is no server, got {min(options)}")
    if scheme == "shm":
        return _Memory(shm.path_of(url) if folder is None else shm.path_of(url, folder))
    return _DiskFile(Path(url))


def verify(store: OperatedStore, deadline: float, *, drop: bool = False) -> dict[str, Any]:
    """Read all blocks, and compare them with their checksums.

    Returns
    -------
    numbers of `blocks`, of those `damaged`, `unverified` (gone meanwhile, or without a checksum)
    and `dropped`, and the keys of damaged blocks
    """
    damaged, count, unverified = [], 0, 0
    for block in store.blocks(deadline):
        count += 1
        verdict = store.is_intact(block, deadline)
        unverified += verdict is None
        if verdict is False:
            damaged.append(block.key)
    return {
        "blocks": count, "damaged": len(damaged), "unverified": unverified,
        "dropped": store.drop(damaged, deadline) if drop and damaged else 0,
        "damaged_keys": [_name(key) for key in damaged],
    }  # fmt: skip


def clear(store: OperatedStore, deadline: float, *, tenant: str | None = None) -> int:
    """Drop all blocks, or the blocks of the tenant with a digest; return their number."""
    dropped = 0
    keys = (b.key for b in store.blocks(deadline) if tenant in (None, b.tenant))
    while some := list(itertools.islice(keys, _DROPS_AT_ONCE)):
        dropped += store.drop(some, deadline)
    return dropped


def evict(store: OperatedStore, count: int, deadline: float) -> int:
    """Drop the `count` oldest blocks, and return their number."""
    return store.drop([b.key for b in itertools.islice(store.blocks(deadline), count)], deadline)


# --- Kinds of stores ---


class _Memory:
    def __init__(self, path: Path) -> None:
        self._backend = shm.ShmBackend(path, None, None)

    def stat(self, deadline: float) -> dict[str, Any]:
        return {
            "kind": "memory", "file": str(self._backend.path), **self._backend.stats(),
            "blocks_of_tenants": dict(Counter(b.tenant for b in self._backend.blocks())),
        }  # fmt: skip

    def blocks(self, deadline: float) -> Iterator[StoredBlock]:
        return self._backend.blocks()

    def is_intact(self, block: StoredBlock, deadline: float) -> bool | None:
        found = self._backend.read(block, deadline)
        return None if found is None else _is_intact(*found, block.key)

    def drop(self, keys: Sequence[bytes], deadline: float) -> int:
        return self._backend.drop(keys, deadline)

    def drain(self, deadline: float, *, undo: bool) -> None:
        self._backend.drain(deadline, undo=undo)

    def remove_file(self, deadline: float) -> None:
        self._backend.remove(deadline)

    def close(self) -> None:
        self._backend.close()


class _Server:
    def __init__(self, url: str, deadline: float, options: dict[str, Any]) -> None:
        from . import redis

        self._backend = redis.open_backend(
            url, None, namespace=b"", capacity_bytes=None, deadline=deadline, **options
        )

    def stat(self, deadline: float) -> dict[str, Any]:
        blocks = list(self._backend.blocks(deadline))
        return {
            "kind": "server", "blocks": len(blocks), "bytes": sum(b.num_bytes for b in blocks),
            "blocks_of_tenants": dict(Counter(b.tenant for b in blocks)),
            **self._backend.memory(deadline),
        }  # fmt: skip

    def blocks(self, deadline: float) -> Iterator[StoredBlock]:
        blocks = list(self._backend.blocks(deadline))
        return iter(sorted(blocks, key=lambda block: -(block.idle_s or 0)))

    def is_intact(self, block: StoredBlock, deadline: float) -> bool | None:
        found = self._backend.read(block, HEADER_BYTES, deadline)
        if found is None:
            return None
        try:
            return _is_intact(*found, bytes.fromhex(block.key.decode().rpartition(":")[2]))
        except ValueError:  # not a key of kvcupy
            return False

    def drop(self, keys: Sequence[bytes], deadline: float) -> int:
        return self._backend.drop(keys, deadline)

    def drain(self, deadline: float, *, undo: bool) -> None:
        raise ValueError("drain: expected shm:NAME; on a server, take the right to SET from users")

    def close(self) -> None:
        self._backend.close()


class _DiskFile:
    """The file of a disk tier, which may be in use; blocks are dropped only if it is not.

    Blocks of an encrypted file have the start of their record instead of a hash, and no known age.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            header = os.pread(self._descriptor, disk_format.BLOCK_BYTES, 0)
            self._version, self._layout, self._identity = disk_format.decode_header(header, path)
            self._is_encrypted = "encryption" in self._identity
            if os.fstat(self._descriptor).st_size < self._layout.num_bytes:
                raise ValueError(f"url: expected a whole file, got a truncated one: {path}")
        except BaseException:
            os.close(self._descriptor)
            raise

    def stat(self, deadline: float) -> dict[str, Any]:
        layout = self._layout
        return {
            **self._identity, "kind": "disk tier", "file": str(self._path),
            "file_version": self._version,
            "blocks": sum(1 for _ in self.blocks(deadline)), "capacity_blocks": layout.num_slots,
            "block_bytes": layout.page_bytes, "file_bytes": layout.num_bytes,
        }  # fmt: skip

    def blocks(self, deadline: float) -> Iterator[StoredBlock]:
        with open(self._descriptor, "rb", closefd=False) as file:
            decoded = [self._decoded(slot, raw) for slot, raw in records(file, self._layout)]
        there = [record for record in decoded if record is not None]
        for record in sorted(there, key=lambda record: record.generation):
            yield StoredBlock(_disk_key(record), record.num_bytes)

    def is_intact(self, block: StoredBlock, deadline: float) -> bool | None:
        record = self._record_of(block.key)
        if record is None or self._is_encrypted:
            return None
        payload = os.pread(self._descriptor, record.num_bytes, self._layout.payload_at(record.slot))
        checksum_of_file = disk_format.checksum_of(self._version)
        return checksum_of_file(record.hash, [memoryview(payload)]) == record.checksum

    def drop(self, keys: Sequence[bytes], deadline: float) -> int:
        self._lock()
        dropped = [record for key in keys if (record := self._record_of(key)) is not None]
        for record in dropped:
            os.pwrite(self._descriptor, disk_format.NO_RECORD, self._layout.record_at(record.slot))
        return len(dropped)

    def drain(self, deadline: float, *, undo: bool) -> None:
        raise ValueError("drain: expected shm:NAME; the file of a disk tier has one writer")

    def remove_file(self, deadline: float) -> None:
        self._lock()
        self._path.unlink()

    def close(self) -> None:
        os.close(self._descriptor)

    def _lock(self) -> None:
        import fcntl

        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                error.errno, "url: expected a file that no process has open", str(self._path)
            ) from None

    def _decoded(self, slot: int, raw: memoryview) -> disk_format.Record | None:
        if self._is_encrypted:
            start = int.from_bytes(raw[:16], "big")
            return disk_format.Record(start, 0, slot, self._layout.page_bytes, b"")
        return disk_format.decode_record(raw, self._layout, slot)

    def _record_of(self, key: bytes) -> disk_format.Record | None:
        """Return the record of a block; None if its slot has another one."""
        slot = int.from_bytes(key[16:], "big")
        raw = os.pread(self._descriptor, disk_format.RECORD_BYTES, self._layout.record_at(slot))
        record = None if raw == disk_format.NO_RECORD else self._decoded(slot, memoryview(raw))
        return record if record is not None and _disk_key(record) == key else None


def _disk_key(record: disk_format.Record) -> bytes:
    """Return the hash and the slot of a block: a hash may have several."""
    return record.hash.to_bytes(16, "big") + record.slot.to_bytes(8, "big")


def _is_intact(header: bytes, contents: memoryview, key: bytes) -> bool | None:
    stored = BlockHeader.decode(header)
    if stored is None or stored.key != key:
        return False
    # What was read from a server has the seal of an encrypted block in the contents.
    if stored.header_bytes + stored.num_bytes != len(header) + len(contents):
        return False
    return checksum([contents]) == stored.checksum if stored.has_checksum else None


def _name(key: bytes) -> str:
    """Return a key as text: keys of servers unchanged, others in hexadecimal."""
    return key.decode() if key.startswith(b"kvcupy:") else key.hex()


# --- The command ---


def add_arguments(parser: Any) -> None:
    """Add the commands of `python -m kvcupy store` and their options."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, purpose in (
        ("list", "print the blocks, as far as ages are known the oldest first"),
        ("stat", "print sizes and counts"),
        ("clear", "drop all blocks, or the blocks of one tenant"),
        ("drain", "shm: refuse the puts of all processes, after the put in progress"),
        ("verify", "read all blocks, and compare them with their checksums"),
        ("evict", "drop the oldest blocks"),
    ):  # fmt: skip
        add = commands.add_parser(action, help=purpose, description=f"{purpose}.").add_argument
        add("url", metavar="URL", help="shm:NAME, redis://..., or the file of a disk tier")
        if action == "clear":
            help = "only of this tenant, as in `stat`"
            add("--tenant", type=_tenant, metavar="DIGEST", help=help)
            add("--remove-file", action="store_true", help="also remove the file")
            add("--yes", action="store_true", help="required: others may use the blocks")
        elif action == "drain":
            add("--undo", action="store_true", help="accept puts again")
        elif action == "verify":
            add("--drop", action="store_true", help="drop damaged blocks")
        elif action == "evict":
            add("count", type=int, metavar="N", help="number of blocks")
        limit = "time limit; default: 60"
        add("--deadline", type=seconds, default=60.0, metavar="SECONDS", help=limit)
        add("--folder", type=Path, help="shm: where its file is; default: /dev/shm")
        help = "the first line of FILE is the password of the server"
        add("--password-file", type=Path, metavar="FILE", help=help)
        help = "option of SharedStore.open for a server, such as ssl_ca_certs=ca.pem"
        add("--option", action="append", default=[], metavar="NAME=VALUE", help=help)
        add("--json", action="store_true", help="print JSON")


def _tenant(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{32}", text):
        raise ArgumentTypeError(f"expected 32 hexadecimal digits, got {text!r}")
    return text


def main(options: Namespace) -> int:
    """Run one command; return 1 if it failed, or found damaged blocks."""
    try:
        return _run(options)
    except (OSError, ValueError, TypeError, ImportError, BackendLost) as error:
        print(f"store: {error}", file=sys.stderr)
        return 1


def _run(options: Namespace) -> int:
    settings: dict[str, Any] = dict(text.partition("=")[::2] for text in options.option)
    if options.password_file is not None:
        settings["password"] = options.password_file.read_text().partition("\n")[0]
    deadline = time.monotonic() + options.deadline
    status = 0
    with closing(
        open_store(options.url, folder=options.folder, deadline_s=options.deadline, **settings)
    ) as store:
        report: Any
        if options.action == "list":
            report = [
                {"key": _name(b.key), "bytes": b.num_bytes, "idle_s": b.idle_s, "tenant": b.tenant}
                for b in store.blocks(deadline)
            ]
        elif options.action == "stat":
            report = store.stat(deadline)
        elif options.action == "verify":
            report = verify(store, deadline, drop=options.drop)
            status = int(bool(report["damaged"]))
        elif options.action == "evict":
            if options.count < 1:
                raise ValueError(f"N: expected at least 1, got {options.count}")
            report = {"dropped": evict(store, options.count, deadline)}
        elif options.action == "drain":
            store.drain(deadline, undo=options.undo)
            report = {"draining": not options.undo}
        elif not options.yes:
            raise ValueError("clear: expected --yes, since it drops blocks that others may use")
        elif not options.remove_file:
            report = {"dropped": clear(store, deadline, tenant=options.tenant)}
        elif isinstance(store, _Server) or options.tenant:
            raise ValueError(
                "--remove-file: expected shm:NAME or a file, and no --tenant: it drops all blocks"
            )
        else:
            report = {"dropped": clear(store, deadline)}
            store.remove_file(deadline)
    if isinstance(report, dict):
        print_report(report, as_json=options.json)
    elif options.json:
        print(json.dumps(report, indent=2))
    else:
        for block in report:
            print(*("-" if value in (None, "") else value for value in block.values()), sep="  ")
    return status
