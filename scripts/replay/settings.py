"""Settings of a replay: sizes, shapes, policy, file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcupy.bench.models import Model

from .content import WORD
from .simulation import Sizes

DISK_BLOCK = 4096  # alignment of pages in a disk tier, bytes
RECORD = 64  # bytes per record of a page there


@dataclass(frozen=True)
class Shape:
    """A page of one block, in bf16: layers, tokens, KV heads, elements per head."""

    layers: int
    tokens: int
    heads: int
    width: int

    @property
    def page_bytes(self) -> int:
        return 2 * 2 * self.layers * self.tokens * self.heads * self.width


def scaled_shape(model: Model, block_tokens: int, scale: int) -> Shape:
    """Return the shape of a model's block, each size divided by `scale`, at least one.

    Raises
    ------
    ValueError
        A page of one layer is no whole number of words.
    """
    sizes = (model.layers, block_tokens, model.kv_heads, model.head_dim)
    shape = Shape(*(max(1, size // scale) for size in sizes))
    if shape.tokens * shape.heads * shape.width * 2 % WORD:
        raise ValueError(f"scale: expected pages of whole 8-byte words, got {scale}")
    return shape


@dataclass(frozen=True)
class Settings:
    """Settings of a replay.

    Attributes
    ----------
    disk : the file of the disk tier; unused if `sizes` has no disk
    running : requests whose leases are held at a time
    eager : insert blocks while they are being written and others are being moved. Evictions, and
        so hits, then depend a little on timing
    host_layout : layout of the host's pool
    """

    sizes: Sizes
    shape: Shape
    policy: str = "lru"
    write: str = "through"
    disk: Path | None = None
    running: int = 1
    eager: bool = False
    host_layout: str = "page_first"

    @property
    def disk_bytes(self) -> int:
        """Size of the file: a header, a table of records, pages."""
        table = _whole(self.sizes.disk * RECORD)
        return DISK_BLOCK + table + self.sizes.disk * _whole(self.shape.page_bytes)


def _whole(num_bytes: int) -> int:
    return -(-num_bytes // DISK_BLOCK) * DISK_BLOCK
