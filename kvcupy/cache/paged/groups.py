"""Groups of layers that are not alike: the data each keeps of a token, and its share of memory.

    FullAttention   K and V of all tokens
    SlidingWindow   K and V of the tokens that some query can still see
    Latent          the latent of all tokens, for multi-head latent attention
    Recurrent       one state per sequence, and states kept for forks

The memory is divided for sequences of one length: each group has room for as many of them as the
others have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...formats import FORMATS, FOUR_BIT, Encoding, num_bytes, numpy_dtype, require_groups, tag
from ...ops import checks
from ..pool import KVPool, MLAPool, Pool, positive_int
from .arguments import DTYPE, Demotion, has_token_scales

_STATES_PER_SEQUENCE = 2  # the live state, and one that is kept
_STATE_ALIGNMENT = 8  # bytes, of each part: of the widest dtype
# Without memory_bytes, states are added up to a sixteenth of the bytes of the pages, or 64 KiB.
_STATES_PART, _MIN_STATES_BYTES = 16, 1 << 16
# With memory_bytes alone: the length of sequences, halved until this number of them fits.
_DEFAULT_LENGTH, _DEFAULT_SEQUENCES = 4096, 4
_MAX_LAYERS_SHOWN = 4  # in the name of a group
_MAX_COUNT = 2**62  # of bytes or tokens


# --- Declarations ---


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Base class of the groups."""

    layers: Sequence[int]

    def __post_init__(self) -> None:
        try:
            layers = list(self.layers)
        except TypeError:
            raise TypeError(f"layers: expected ints, got {self.layers!r}") from None
        for layer in layers:
            checks.require_int(layer, "layers")
            if layer < 0:
                raise ValueError(f"layers: expected numbers from 0 on, got {layer}")
        if not layers or len(set(layers)) < len(layers):
            raise ValueError(f"layers: expected at least one, each once, got {layers}")
        object.__setattr__(self, "layers", tuple(map(int, layers)))

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.layers[:_MAX_LAYERS_SHOWN]))
        more = ", ..." if len(self.layers) > _MAX_LAYERS_SHOWN else ""
        return f"{type(self).__name__} of layers {shown}{more}"

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class AttentionGroup(LayerGroup):
    """Base class of the groups of attention layers."""

    dtype: Any = DTYPE

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(dtype=Encoding.of(self.dtype))

    def token_bytes(self) -> int:
        """Return the bytes of a token in all layers of the group, with its scales."""
        raise NotImplementedError

    def make_pool(self, num_pages: int, page_size: int, device: Any) -> Pool:
        """Return a pool for the group."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class _KVGroup(AttentionGroup):
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        v_head_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        self._set(
            num_kv_heads=positive_int(self.num_kv_heads, "num_kv_heads"),
            head_dim=positive_int(self.head_dim, "head_dim"),
            v_head_dim=positive_int(v_head_dim, "v_head_dim"),
        )
        _require_rows(self.dtype, self.head_dim, "head_dim")
        _require_rows(self.dtype, v_head_dim, "v_head_dim")

    def token_bytes(self) -> int:
        return self._bytes_in(self.dtype)

    def _bytes_in(self, encoding: Encoding) -> int:
        heads = len(self.layers) * self.num_kv_heads
        scales = 2 * num_bytes((heads,), "fp32") if has_token_scales(encoding.format) else 0
        widths = self.head_dim, self.v_head_dim or self.head_dim
        return scales + sum(num_bytes((heads, width), encoding.format) for width in widths)

    def make_pool(self, num_pages: int, page_size: int, device: Any) -> Pool:
        return KVPool(
            num_pages, page_size, len(self.layers), self.num_kv_heads, self.head_dim,
            v_head_dim=self.v_head_dim, dtype=self.dtype,
            scales=has_token_scales(self.dtype.format), device=device,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FullAttention(_KVGroup):
    """Layers that attend to all tokens.

    Parameters
    ----------
    layers : their numbers in the model
    num_kv_heads, head_dim, v_head_dim : of each; v_head_dim None: head_dim
    dtype : encoding of K and V: an Encoding or its string, or a dtype
    demotion : a `Demotion`: how old tokens are kept in a narrower encoding; None: all in dtype

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Examples
    --------
    >>> FullAttention(layers=[5, 11], num_kv_heads=8, head_dim=128).token_bytes()
    8192
    """

    demotion: Demotion | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.demotion is None:
            return
        if not isinstance(self.demotion, Demotion):
            raise TypeError(f"demotion: expected a Demotion, got {self.demotion!r}")
        _require_rows(self.demotion.encoding, self.head_dim, "head_dim")
        _require_rows(self.demotion.encoding, self.v_head_dim or self.head_dim, "v_head_dim")

    def past_token_bytes(self) -> int:
        """Return the bytes of a demoted token in all layers."""
        return 0 if self.demotion is None else self._bytes_in(self.demotion.encoding)


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(_KVGroup):
    """Layers that attend to the last tokens. The pages that no query can see again are freed.

    Parameters
    ----------
    window : how many keys a query sees, itself included
    sink_tokens : how many of the first keys it sees too
    others : as in `FullAttention`

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    """

    window: int
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_int(self.sink_tokens, "sink_tokens")
        if not 0 <= self.sink_tokens < 2**31:
            raise ValueError(f"sink_tokens: expected 0 to 2**31 - 1, got {self.sink_tokens}")
        window = positive_int(self.window, "window")
        if window >= 2**31:
            raise ValueError(f"window: expected 1 to 2**31 - 1, got {window}")
        self._set(window=window, sink_tokens=int(self.sink_tokens))

    def pages_kept(self, page_size: int) -> int:
        """Return the most pages that a sequence has between steps."""
        # The last step may have been of one page, and the first and the last page be partial.
        return -(-self.sink_tokens // page_size) - (-(self.window + 2 * page_size) // page_size) + 1


@dataclass(frozen=True, kw_only=True)
class Latent(AttentionGroup):
    """Layers of multi-head latent attention; see `PagedKVCache.attention_mla`.

    Parameters
    ----------
    layers : their numbers in the model
    latent_dim, rope_dim : widths of the two parts of a row
    dtype : encoding of the rows

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    """

    latent_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("latent_dim", "rope_dim"):
            self._set(**{name: positive_int(getattr(self, name), name)})
        _require_rows(self.dtype, self.latent_dim + self.rope_dim, "latent_dim + rope_dim")

    def token_bytes(self) -> int:
        width = self.latent_dim + self.rope_dim
        return num_bytes((len(self.layers), width), self.dtype.format)

    def make_pool(self, num_pages: int, page_size: int, device: Any) -> Pool:
        return MLAPool(
            num_pages, page_size, len(self.layers), latent_dim=self.latent_dim,
            rope_dim=self.rope_dim, dtype=self.dtype, device=device,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recurrent(LayerGroup):
    """Layers with a state per sequence in place of keys: recurrences and convolutions.

    Parameters
    ----------
    layers : their numbers in the model
    state : by name, shape and dtype of each part of a layer's state
    checkpoint_tokens : the state is kept at the end of a step that ends at a multiple of it

    Raises
    ------
    TypeError, ValueError : an argument does not fit

    Examples
    --------
    >>> state = {"conv": ((64, 3), "bf16"), "ssm": ((64, 8), "fp32")}
    >>> Recurrent(layers=[0, 1], state=state).state_bytes()
    4864
    """

    state: Mapping[str, tuple[Sequence[int], Any]]
    checkpoint_tokens: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.state, Mapping) or not self.state:
            raise TypeError(f"state: expected shapes and dtypes by name, got {self.state!r}")
        state = {}
        for name, entry in self.state.items():
            try:
                shape, dtype = entry
                sizes, element = tuple(shape), tag(numpy_dtype(dtype))
                is_number = element in FORMATS or np.dtype(element).kind in "biufc"
            except (TypeError, ValueError):
                is_number = False
            if not is_number or dtype is None:
                raise TypeError(f"state: expected (shape, dtype) for {name!r}, got {entry!r}")
            numbers = tuple(positive_int(n, "state") for n in sizes)
            if not isinstance(name, str) or not numbers:
                raise ValueError(f"state: expected a name and a shape, got {name!r}: {entry!r}")
            state[name] = numbers, element
        self._set(
            state=state, checkpoint_tokens=positive_int(self.checkpoint_tokens, "checkpoint_tokens")
        )

    def state_bytes(self) -> int:
        """Return the bytes of one state, all layers; each part is padded to 8 bytes."""
        parts = self.state.values()
        return len(self.layers) * sum(part_bytes(shape, dtype) for shape, dtype in parts)


def part_bytes(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of a part of a state, padded so that the next one is aligned."""
    return -(-num_bytes(tuple(shape), dtype) // _STATE_ALIGNMENT) * _STATE_ALIGNMENT


def _require_rows(encoding: Encoding, width: int, name: str) -> None:
    """Raise unless rows of a width can have an encoding."""
    four_bit = FOUR_BIT.get(encoding.format)
    if four_bit is not None:
        require_groups(four_bit, width, name)


def check_groups(groups: Any) -> list[LayerGroup]:
    """Return groups as a list; raise unless a cache can have them together."""
    try:
        listed = list(groups)
    except TypeError:
        raise TypeError(f"groups: expected a list, got {groups!r}") from None
    for group in listed:
        if not isinstance(group, LayerGroup):
            raise TypeError(f"groups: expected groups of layers, got {group!r}")
    if not any(isinstance(group, AttentionGroup) for group in listed):
        raise NotImplementedError("groups: expected at least one group of attention layers")
    for kind in (AttentionGroup, Recurrent):  # a layer may have both side by side
        layers = [layer for group in listed if isinstance(group, kind) for layer in group.layers]
        if len(set(layers)) < len(layers):
            twice = next(layer for i, layer in enumerate(layers) if layer in layers[:i])
            raise ValueError(f"groups: expected each layer in one group, got {twice} in two")
    distances = {g.checkpoint_tokens for g in listed if isinstance(g, Recurrent)}
    if len(distances) > 1:
        raise NotImplementedError(
            f"groups: expected one checkpoint_tokens, got {sorted(distances)}: the recurrent "
            "groups of a sequence share the number of their slot"
        )
    return listed


def refuse_with_groups(**arguments: Any) -> None:
    """Raise if an argument is given that belongs to a group."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}: expected None with groups, got {value!r}")


# --- The plan ---


@dataclass(frozen=True)
class GroupPlan:
    """The part of a group.

    Attributes
    ----------
    group : its declaration
    num_pages : of its pool; 0 of a recurrent group
    num_past_pages : for demoted tokens
    num_slots : states of a recurrent group, else 0
    bytes_per_token : that a sequence grows by; of a window, until it is full
    bytes_per_sequence : of a sequence of the plan's length
    num_bytes : of all pages or slots
    """

    group: LayerGroup
    num_pages: int
    num_past_pages: int
    num_slots: int
    bytes_per_token: int
    bytes_per_sequence: int
    num_bytes: int


@dataclass(frozen=True)
class Plan:
    """How the memory of a cache is divided; `str` of it is a table.

    Attributes
    ----------
    groups : a GroupPlan for each group
    sequence_tokens : the length of the sequences that the memory is divided for
    num_sequences : how many of them fit
    step_tokens : tokens of a step that fit beside full windows
    num_bytes : of all groups
    missing_bytes : how many more one such sequence takes, 0 if it fits
    """

    groups: tuple[GroupPlan, ...]
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

    def require(self) -> Plan:
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
            if part.num_past_pages:
                count += f" + {part.num_past_pages}"
            sizes = part.bytes_per_token, part.bytes_per_sequence, part.num_bytes
            name, layers = type(part.group).__name__, len(part.group.layers)
            yield name, str(layers), count, *(f"{size:,}" for size in sizes)
        sizes = self.bytes_per_token, self.bytes_per_sequence, self.num_bytes
        layers = sum(len(part.group.layers) for part in self.groups)
        yield "all", str(layers), "", *(f"{size:,}" for size in sizes)


@dataclass(frozen=True)
class _Need:
    """Pages or states of one size that a group needs.

    Attributes
    ----------
    unit_bytes : of one of them
    per_sequence : how many a sequence has between steps
    in_step : whether a step needs more, for all sequences together
    most : how many a sequence ever has; None: it may keep any number
    fixed : whether there are `per_sequence` for all sequences together
    """

    unit_bytes: int
    per_sequence: int
    in_step: bool = False
    most: int | None = None
    fixed: bool = False

    def count(self, num_sequences: float, step_pages: int) -> int:
        """Return the number of pages or states for `num_sequences` sequences."""
        if self.fixed:
            return self.per_sequence
        count = int(num_sequences * self.per_sequence) + (step_pages if self.in_step else 0)
        if self.most is not None:
            count = min(count, int(num_sequences * self.most))
        return max(1, count)


def make_plan(
    groups: Sequence[LayerGroup], page_size: int, *, memory_bytes: Any, num_tokens: Any,
    max_seq_len: int | None, max_batch_tokens: int,
) -> Plan:  # fmt: skip
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
        return sum(n.unit_bytes * n.count(count, step) for own in needs for n in own)

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
    missing = max(0, total(needs, 1, step) - budget)
    if total(needs, 0, 0) > budget:
        raise ValueError(
            f"memory_bytes: expected at least {total(needs, 1, step)} for one sequence of "
            f"{length} tokens, got {budget}"
        )
    fits = _largest(lambda count: total(needs, count, step) <= budget)
    plan = _divided(groups, needs, page_size, length, fits, step)
    return replace(plan, missing_bytes=missing)


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
            own = [need]
            if isinstance(group, FullAttention) and group.demotion is not None:
                demotion = group.demotion
                kept = -(-demotion.first // page_size) - (-demotion.recent // page_size) + 2
                past_bytes = page_size * group.past_token_bytes()
                past = _Need(
                    past_bytes, demotion.num_pages or whole, fixed=bool(demotion.num_pages)
                )
                own = [_Need(page_bytes, kept, True, whole), past]
        else:
            assert isinstance(group, Recurrent)
            own = [_Need(group.state_bytes(), num_states)]
        needs.append(own)
    return needs


def _extra_states(
    groups: Sequence[LayerGroup], needs: Sequence[Sequence[_Need]], count: int, step_pages: int
) -> int:
    """Return how many states there may be beside the ones of each sequence."""
    states = sum(group.state_bytes() for group in groups if isinstance(group, Recurrent))
    if not states:
        return 0
    pages = sum(
        need.unit_bytes * need.count(count, step_pages)
        for group, own in zip(groups, needs, strict=True)
        for need in own
        if not isinstance(group, Recurrent)
    )
    most = max(pages // _STATES_PART, _MIN_STATES_BYTES) // states
    return max(0, most - count * _STATES_PER_SEQUENCE)


def _divided(
    groups: Sequence[LayerGroup], needs: Sequence[Sequence[_Need]], page_size: int, length: int,
    num_sequences: float, step_pages: int, extra_states: int = 0,
) -> Plan:  # fmt: skip
    parts = []
    for group, own in zip(groups, needs, strict=True):
        counts = [need.count(num_sequences, step_pages) for need in own]
        slots = 0
        if isinstance(group, Recurrent):
            slots = counts[0] = counts[0] + extra_states
        per_token = group.token_bytes() if isinstance(group, AttentionGroup) else 0
        per_sequence = sum(
            need.unit_bytes * min(need.per_sequence, need.most or need.per_sequence) for need in own
        )
        parts.append(GroupPlan(
            group, 0 if slots else counts[0], sum(counts[1:]), slots, per_token, per_sequence,
            sum(need.unit_bytes * count for need, count in zip(own, counts, strict=True)),
        ))  # fmt: skip
    return Plan(
        tuple(parts), length, num_sequences, step_pages * page_size,
        sum(part.num_bytes for part in parts),
    )  # fmt: skip


def _largest(fits: Callable[[float], bool]) -> float:
    """Return about the largest number that fits; 0 does."""
    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
