"""How the memory of a cache is divided among its groups of layers.

It is divided for sequences of one length: each group has room for as many of them as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...checks import positive_int
from ..pool import KVPool, Pool
from .groups import AttentionGroup, FullAttention, LayerGroup, Recurrent, SlidingWindow

_STATES_PER_SEQUENCE = 2  # the live state, and one that is kept
# Without memory_bytes, states are added up to a sixteenth of the bytes of the pages, or 64 KiB.
_STATES_PART, _MIN_STATES_BYTES = 16, 1 << 16
# With memory_bytes alone: the length of sequences, halved until this number of them fits.
_DEFAULT_LENGTH, _DEFAULT_SEQUENCES = 4096, 4
_MAX_COUNT = 2**62  # of bytes or tokens


@dataclass(frozen=True)
class GroupMemory:
    """The part of a group.

    Attributes
    ----------
    group : its declaration
    num_pages : of its pool; 0 of a recurrent group
    num_demoted_pages : for demoted tokens
    num_slots : states of a recurrent group, else 0
    bytes_per_token : that a sequence grows by; of a window, until it is full
    bytes_per_sequence : of a sequence of the plan's length
    num_bytes : of all pages or slots
    """

    group: LayerGroup
    num_pages: int
    num_demoted_pages: int
    num_slots: int
    bytes_per_token: int
    bytes_per_sequence: int
    num_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """How the memory of a cache is divided; `str` of it is a table.

    Attributes
    ----------
    groups : a GroupMemory for each group
    sequence_tokens : the length of the sequences that the memory is divided for
    num_sequences : how many of them fit
    step_tokens : tokens of a step that fit in addition to full windows
    num_bytes : of all groups
    missing_bytes : how many more one such sequence takes, 0 if it fits
    """

    groups: tuple[GroupMemory, ...]
    sequence_tokens: int
    num_sequences: float
    step_tokens: int
    num_bytes: int
    missing_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        return sum(part.bytes_per_token for part in self.groups)

    @property
    def bytes_per_sequence(self) -> int:
        return sum(part.bytes_per_sequence for part in self.groups)

    def require(self) -> MemoryPlan:
        """Return the plan; ValueError unless one sequence fits."""
        if self.missing_bytes:
            parts = "; ".join(f"{p.group}: {p.bytes_per_sequence} bytes" for p in self.groups)
            raise ValueError(
                f"memory_bytes: expected at least {self.num_bytes + self.missing_bytes} bytes for "
                f"one sequence of {self.sequence_tokens} tokens ({parts}), got {self.num_bytes}: "
                f"{self.missing_bytes} bytes are missing"
            )
        return self

    def __str__(self) -> str:
        heads = "group", "layers", "pages or slots", "B/token", "B/sequence", "bytes"
        rows = [heads, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
            for row in rows
        ]
        return "\n".join([
            *lines,
            f"{self.num_sequences:.3g} sequences of {self.sequence_tokens} tokens, in steps of "
            f"up to {self.step_tokens}",
        ])  # fmt: skip

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for part in self.groups:
            count = str(part.num_slots or part.num_pages)
            if part.num_demoted_pages:
                count += f" + {part.num_demoted_pages}"
            sizes = part.bytes_per_token, part.bytes_per_sequence, part.num_bytes
            name, layers = type(part.group).__name__, len(part.group.layers)
            yield name, str(layers), count, *(f"{size:,}" for size in sizes)
        sizes = self.bytes_per_token, self.bytes_per_sequence, self.num_bytes
        layers = sum(len(part.group.layers) for part in self.groups)
        yield "all", str(layers), "", *(f"{size:,}" for size in sizes)


@dataclass(frozen=True)
class _Need:
    """Pages or states of one size that a group needs.

    unit_bytes : of one of them
    per_sequence : how many a sequence has between steps
    in_step : whether a step needs more, for all sequences together
    most : how many a sequence ever has; None: it may keep any number
    fixed : whether there are `per_sequence` for all sequences together
    elsewhere : how many of `most` a fixed pool holds, for all sequences together; None: the rest
    """

    unit_bytes: int
    per_sequence: int
    in_step: bool = False
    most: int | None = None
    fixed: bool = False
    elsewhere: int | None = None

    def count(self, num_sequences: float, step_pages: int) -> int:
        """Return the number of pages or states for `num_sequences` sequences."""
        if self.fixed:
            return self.per_sequence
        count = int(num_sequences * self.per_sequence)
        if self.most is not None and self.elsewhere is not None:
            count = max(count, int(num_sequences * self.most) - self.elsewhere)
        count += step_pages if self.in_step else 0
        if self.most is not None:
            count = min(count, int(num_sequences * self.most))
        return max(1, count)


def make_plan(
    groups: Sequence[LayerGroup], page_size: int, *, memory_bytes: Any, num_tokens: Any,
    max_seq_len: int | None, max_batch_tokens: int,
) -> MemoryPlan:  # fmt: skip
    """Divide the memory of a cache, by `memory_bytes` or for `num_tokens`."""
    tokens = None if num_tokens is None else _count(num_tokens, "num_tokens")
    step_pages = -(-max_batch_tokens // page_size)
    if memory_bytes is None:
        if tokens is None:
            raise ValueError("memory_bytes: expected a number, or num_tokens, with groups")
        length = min(tokens, max_seq_len or tokens)
        needs = _needs(groups, page_size, length, _STATES_PER_SEQUENCE)
        count = -(-tokens // length)
        extra = _extra_states(groups, needs, count, step_pages)
        extra = min(extra, -(-tokens // page_size))
        return _divided(groups, needs, page_size, length, count, step_pages, extra)
    budget = _count(memory_bytes, "memory_bytes")

    def total(needs: Sequence[Sequence[_Need]], count: float, step: int) -> int:
        return sum(n.unit_bytes * n.count(count, step) for each in needs for n in each)

    length = tokens or max_seq_len or _DEFAULT_LENGTH
    if not (tokens or max_seq_len):
        while length > page_size:
            needs = _needs(groups, page_size, length, _STATES_PER_SEQUENCE)
            if total(needs, _DEFAULT_SEQUENCES, step_pages) <= budget:
                break
            length //= 2
    step = step_pages
    for states in (_STATES_PER_SEQUENCE, 1):
        needs = _needs(groups, page_size, length, states)
        step = step_pages
        while step > 1 and total(needs, 1, step) > budget:
            step //= 2
        if total(needs, 1, step) <= budget:
            break
    least = total(needs, 1, step)
    if total(needs, 0, 0) > budget:
        raise ValueError(
            f"memory_bytes: expected at least {least} for one sequence of "
            f"{length} tokens, got {budget}"
        )
    fits = _largest(lambda count: total(needs, count, step) <= budget)
    plan = _divided(groups, needs, page_size, length, fits, step)
    return replace(plan, missing_bytes=least - plan.num_bytes if least > budget else 0)


def plan_of_pool(
    group: AttentionGroup, pool: Pool, demoted_pool: KVPool | None, length: int | None,
    max_batch_tokens: int,
) -> MemoryPlan:  # fmt: skip
    """Describe the memory of a cache of one group, for sequences of a length; None: of all."""
    page_size, counts = pool.page_size, [pool.num_pages]
    if demoted_pool is not None:
        counts.append(demoted_pool.num_pages)
    length = length or sum(counts) * page_size
    (needs,) = _needs([group], page_size, length, 0)
    page_bytes = sum(v.num_bytes for v in (*pool.parts, *pool.scale_parts)) // pool.num_pages
    needs[0] = replace(needs[0], unit_bytes=page_bytes)  # without scales if they are static
    fits = sum(counts) / -(-length // page_size)
    step_pages = -(-max_batch_tokens // page_size)
    part = replace(_memory(group, needs, counts), bytes_per_token=page_bytes // page_size)
    return MemoryPlan((part,), length, fits, step_pages * page_size, part.num_bytes)


def _count(value: Any, name: str) -> int:
    count = positive_int(value, name)
    if count >= _MAX_COUNT:
        raise ValueError(f"{name}: expected less than 2**62, got {count}")
    return count


def _needs(
    groups: Sequence[LayerGroup], page_size: int, length: int, num_states: int
) -> list[list[_Need]]:
    """Return what one sequence needs, by group."""
    whole = -(-length // page_size)
    needs = []
    for group in groups:
        if isinstance(group, AttentionGroup):
            page_bytes = page_size * group.token_bytes()
            need = _Need(page_bytes, whole, most=whole)
            if isinstance(group, SlidingWindow):
                need = _Need(page_bytes, group.pages_kept(page_size), True, whole)
            units = [need]
            if isinstance(group, FullAttention) and group.demotion is not None:
                demotion = group.demotion
                kept = -(-demotion.first // page_size) - (-demotion.recent // page_size) + 2
                demoted_bytes = page_size * group.demoted_token_bytes()
                demoted = _Need(
                    demoted_bytes, demotion.num_pages or whole, fixed=bool(demotion.num_pages)
                )
                # Pages that a pool of fixed size has no room for stay in dtype.
                need = _Need(page_bytes, kept, True, whole, elsewhere=demotion.num_pages)
                units = [need, demoted]
        else:
            assert isinstance(group, Recurrent)
            units = [_Need(group.state_bytes(), num_states)]
        needs.append(units)
    return needs


def _extra_states(
    groups: Sequence[LayerGroup], needs: Sequence[Sequence[_Need]], count: int, step_pages: int
) -> int:
    """Return how many states there may be besides the ones of each sequence."""
    states = sum(group.state_bytes() for group in groups if isinstance(group, Recurrent))
    if not states:
        return 0
    pages = sum(
        need.unit_bytes * need.count(count, step_pages)
        for group, units in zip(groups, needs, strict=True)
        for need in units
        if not isinstance(group, Recurrent)
    )
    most = max(pages // _STATES_PART, _MIN_STATES_BYTES) // states
    return max(0, most - count * _STATES_PER_SEQUENCE)


def _divided(
    groups: Sequence[LayerGroup], needs: Sequence[Sequence[_Need]], page_size: int, length: int,
    num_sequences: float, step_pages: int, extra_states: int = 0,
) -> MemoryPlan:  # fmt: skip
    parts = []
    for group, units in zip(groups, needs, strict=True):
        counts = [need.count(num_sequences, step_pages) for need in units]
        if isinstance(group, Recurrent):
            counts[0] += extra_states
        parts.append(_memory(group, units, counts))
    return MemoryPlan(
        tuple(parts), length, num_sequences, step_pages * page_size,
        sum(part.num_bytes for part in parts),
    )  # fmt: skip


def _memory(group: LayerGroup, needs: Sequence[_Need], counts: Sequence[int]) -> GroupMemory:
    """Return the part of a group that has `counts` of what it needs."""
    pairs = zip(needs, counts, strict=True)
    sizes = (
        group.token_bytes() if isinstance(group, AttentionGroup) else 0,
        sum(need.unit_bytes * need.count(1, 0) for need in needs),
        sum(need.unit_bytes * count for need, count in pairs),
    )
    if isinstance(group, Recurrent):
        return GroupMemory(group, 0, 0, counts[0], *sizes)
    return GroupMemory(group, counts[0], sum(counts[1:]), 0, *sizes)


def _largest(fits: Callable[[float], bool]) -> float:
    """Return about the largest number that fits; 0 does."""
    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
