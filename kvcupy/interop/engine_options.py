"""Options that several adapters of engines have: stores, and keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class StoreOptions(NamedTuple):
    """A store of an engine: the arguments of `BlockStore.open`."""

    url: str
    capacity_bytes: int | None = None


def store_options(stores: Any) -> list[StoreOptions]:
    """Check the option `stores` of an engine, the nearest first."""
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
    """Return an encryption key of a JSON file as bytes; errors do not contain it."""
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
