"""The groups of layers of a model: each has a table of blocks, and a prefix needs some of each.

    full attention   [0][1][2][3][4][5]      all blocks of a prefix
    window                     [3][4][5]     its last blocks
    state                            [5]     the state at its end

vLLM takes the blocks of all groups from one pool, and a block of any group is a page of that pool.
So the tiers need not know groups: the hashes of their blocks differ.

Source: vllm-project/vllm `vllm/v1/core/single_type_kv_cache_manager.py` (what each group keeps).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import lcm
from typing import Any

from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from ...cache.tiered.prefixes import GroupBlocks, longest
from .options import setting

BlockKey = tuple[int, int]  # number of a group, and the index of its block in a prefix
Keys = list[list[int]]  # hashes of consecutive blocks of a prefix, by group

NULL_BLOCK = 0  # vLLM's block in tables where a group needs none

_FULL = ("full_attention", "mla_attention", "sink_full_attention")
_WINDOWS = ("sliding_window", "sliding_window_mla")


@dataclass(frozen=True)
class Group:
    """A group of layers."""

    block_tokens: int  # tokens of a block
    per_unit: int  # blocks of a unit of prefixes
    needs: GroupBlocks  # what a prefix needs of the group, in units
    kind: str  # as in vLLM's KV events
    window: int | None
    layers: tuple[str, ...]  # their names, in the order of their pages
    mask: int  # distinguishes the hashes of the group

    def needed_of(self, unit: int) -> range:
        """Return the indices of the blocks that a prefix needs of a unit."""
        end = (unit + 1) * self.per_unit
        return range(end - (1 if self.needs.is_state else self.per_unit), end)


@dataclass(frozen=True)
class Groups:
    """All groups of a model."""

    groups: tuple[Group, ...]
    unit_tokens: int  # the length of a prefix in tokens is a multiple of this
    hash_tokens: int  # tokens of each of a request's block hashes

    @classmethod
    def of(cls, config: Any, kv_cache_config: Any) -> Groups:
        """Return the groups of vLLM's VllmConfig and KVCacheConfig."""
        block_tokens = int(setting(config, "cache_config.block_size", 1))
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        sizes = [int(getattr(spec, "block_size", block_tokens)) for spec in specs]
        unit = lcm(*sizes)
        groups = []
        for number, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
            kind, window = (
                get_kv_cache_spec_kind(spec).value,
                get_kv_cache_spec_sliding_window(spec),
            )
            is_usable = kind in _FULL or (kind in _WINDOWS and window is not None)
            if kind == "mamba":
                is_usable = getattr(spec, "mamba_cache_mode", None) == "align"
            if not is_usable or not getattr(spec, "prefix_cacheable", True):
                raise ValueError(
                    "KvcupyConnector: expected layers with full attention, sliding windows or "
                    f'states in mamba_cache_mode="align", got {spec!r}'
                )
            needs = GroupBlocks()
            if kind == "mamba":
                needs = GroupBlocks(1, is_state=True)
            elif window is not None:
                tokens = window - 1 + getattr(spec, "extra_retained_tokens", 0)
                needs = GroupBlocks(-(-tokens // unit))
            layers = tuple(getattr(kv_cache_config.kv_cache_groups[number], "layer_names", ()))
            mask = _mask(number)
            groups.append(Group(size, unit // size, needs, kind, window, layers, mask))
        hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or unit
        return cls(tuple(groups), unit, int(hash_tokens))

    def __len__(self) -> int:
        return len(self.groups)

    def num_blocks(self, number: int, numbers: Sequence[int]) -> int:
        """Return how many full blocks of a group a request has.

        numbers : one for each of the request's hashes, in this method and those below
        """
        return len(numbers) * self.hash_tokens // self.groups[number].block_tokens

    def num_units(self, numbers: Sequence[int]) -> int:
        return len(numbers) * self.hash_tokens // self.unit_tokens

    def key(self, number: int, index: int, numbers: Sequence[int]) -> int:
        """Return the hash of a block in the tiers."""
        group = self.groups[number]
        return numbers[self.last_hash(number, index)] ^ group.mask

    def last_hash(self, number: int, index: int) -> int:
        """Return the index of the last of a request's hashes in a block; -1 before the first."""
        return (index + 1) * self.groups[number].block_tokens // self.hash_tokens - 1

    def keys(self, numbers: Sequence[int], first: int, end: int) -> Keys:
        """Return the hashes of the blocks of units from `first` on in the tiers."""
        found = []
        for group in self.groups:
            step = group.block_tokens // self.hash_tokens
            start, stop = (n * group.per_unit * step for n in (first, end))
            found.append([n ^ group.mask for n in numbers[start + step - 1 : stop : step]])
        return found

    def leading(self, keys: Keys, num_units: int) -> Keys:
        """Return the hashes of the blocks of the first units."""
        return [
            own[: num_units * group.per_unit] for own, group in zip(keys, self.groups, strict=True)
        ]

    def needed(self, length: int) -> list[BlockKey]:
        """Return the blocks that a prefix of `length` units needs, unit by unit."""
        found = [
            (unit, number, index)
            for number, group in enumerate(self.groups)
            for unit in group.needs.needed(length)
            for index in group.needed_of(unit)
        ]
        return [(number, index) for _, number, index in sorted(found)]

    def longest(
        self, length: int, first_missing: Callable[[int, Sequence[int]], int | None]
    ) -> int:
        """Return the length of the longest usable prefix of up to `length` units.

        first_missing : returns the first of some blocks of a group, by index, that is missing
        """

        def first_missing_unit(number: int, units: Sequence[int]) -> int | None:
            group = self.groups[number]
            missing = first_missing(number, [i for u in units for i in group.needed_of(u)])
            return None if missing is None else missing // group.per_unit

        return longest([group.needs for group in self.groups], length, first_missing_unit)

    def blocks_of(
        self, tables: Sequence[Sequence[int]], first: int, end: int
    ) -> dict[BlockKey, int]:
        """Return the engine's blocks of the units from `first` on that it keeps."""
        return {
            (number, index): block
            for number, (group, table) in enumerate(zip(self.groups, tables, strict=True))
            for index, block in enumerate(
                table[first * group.per_unit : end * group.per_unit], first * group.per_unit
            )
            if block != NULL_BLOCK
        }

    def describe(self) -> str:
        """Describe the groups, for the identity of their blocks."""
        return "; ".join(
            f"{g.kind} {g.window} {g.block_tokens} {','.join(g.layers)}" for g in self.groups
        )  # fmt: skip


def number_of(hash: Any, salt: bytes) -> int:
    """Return one of vLLM's block hashes as an int of 128 bits."""
    if isinstance(hash, int):
        hash = hash.to_bytes((hash.bit_length() + 7) // 8, "little")
    digest = blake2b(hash, digest_size=16, key=salt).digest()
    return int.from_bytes(digest, "little") | 2**64  # an int of more than 64 bits


def _mask(number: int) -> int:
    """Return what is combined with the hashes of a group: nothing for the first one."""
    digest = blake2b(b"group %d" % number, digest_size=8).digest()
    return int.from_bytes(digest, "little") if number else 0
