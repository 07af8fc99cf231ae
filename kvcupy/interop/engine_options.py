"""Options that several adapters of engines have: keys, and files on a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..files import make_folder

_MAX_FILES = 16  # of engines that share a folder

_Opened = TypeVar("_Opened")


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
