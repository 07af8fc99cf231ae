"""Options that several adapters of engines have: stores, and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..files import make_folder

_MAX_FILES = 16  # of engines that share a folder

_Opened = TypeVar("_Opened")


class StoreOptions(NamedTuple):
    """A store of an engine: the arguments of `BlockStore.open`."""

    url: str
    capacity_bytes: int | None = None


def store_options(stores: Any) -> list[StoreOptions]:
    """Check the option `stores` of an engine, the nearest first.

    Parameters
    ----------
    stores : list of URLs, or of dicts with "url" and "capacity_bytes"

    Raises
    ------
    TypeError, ValueError : it is something else

    Examples
    --------
    >>> store_options([{"url": "file:/mnt/kv", "capacity_bytes": 2**30}, "redis://cache:6379"])[1]
    StoreOptions(url='redis://cache:6379', capacity_bytes=None)
    """
    if not isinstance(stores, (list, tuple)) or not stores:
        kind = "an empty list" if isinstance(stores, (list, tuple)) else type(stores).__name__
        raise TypeError(f"stores: expected a list of URLs, got {kind}")
    checked = []
    for store in stores:
        fields = {"url": store} if isinstance(store, str) else store
        if isinstance(store, StoreOptions):
            fields = store._asdict()
        if not isinstance(fields, Mapping) or not {"url"} <= set(fields) <= {
            "url", "capacity_bytes"
        }:  # fmt: skip
            kind = type(store).__name__
            raise TypeError(
                f'stores: expected URLs, or dicts with "url" and "capacity_bytes", got {kind}'
            )
        url, capacity_bytes = fields["url"], fields.get("capacity_bytes")
        if not isinstance(url, str):
            raise TypeError(f"stores: expected a str as url, got {type(url).__name__}")
        if capacity_bytes is not None and type(capacity_bytes) is not int:
            raise TypeError(f"capacity_bytes: expected an int, got {capacity_bytes!r}")
        checked.append(StoreOptions(url, capacity_bytes))
    return checked


def as_key(encryption_key: Any) -> Any:
    """Return an encryption key of a JSON file as bytes; errors do not contain it.

    Parameters
    ----------
    encryption_key : 64 hexadecimal digits, or "file:PATH" of a file with them or with 32 bytes;
        others are returned unchanged

    Examples
    --------
    >>> as_key("00" * 32) == bytes(32)
    True
    """
    if not isinstance(encryption_key, str):
        return encryption_key
    text = encryption_key
    if text.startswith("file:"):
        key = Path(text.removeprefix("file:")).read_bytes()
        if len(key) == 32:
            return key
        text = key.decode("ascii", "replace").strip()
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError("encryption_key: expected 64 hexadecimal digits, got other text") from None


def open_file(
    disk_path: Any, identity: str, opened: Callable[[Path], _Opened], *, rank: int = 0
) -> _Opened:
    """Open the file of an engine.

    Parameters
    ----------
    disk_path : a file, or a folder in which each identity and each engine has a file: an existing
        one, or a path that ends with "/"
    identity : distinguishes blocks of other engines
    opened : opens a file; raises BlockingIOError if another engine has it open
    rank : of the worker, which has its own file
    """
    path = Path(disk_path).expanduser()
    if str(disk_path).endswith("/"):
        make_folder(path)
    if not path.is_dir():
        return opened(path if rank == 0 else path.with_name(f"{path.name}.rank{rank}"))
    for number in range(_MAX_FILES - 1):
        try:
            return opened(path / f"{identity}-{number}.kv")
        except BlockingIOError:  # another engine of this identity uses it
            continue
    return opened(path / f"{identity}-{_MAX_FILES - 1}.kv")
