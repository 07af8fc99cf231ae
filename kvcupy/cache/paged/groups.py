"""Groups of heterogeneous layers: the data each keeps of a token.

FullAttention   K and V of all tokens
SlidingWindow   K and V of the tokens that some query can still see
Latent          the latent of all tokens, for multi-head latent attention
Recurrent       one state per sequence, and states kept for forks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import checks
from ...checks import positive_int
from ...formats import FORMATS, FOUR_BIT, Encoding, num_bytes, numpy_dtype, require_groups, tag
from ..pool import KVPool, MLAPool, Pool
from .arguments import DTYPE, Demotion, has_token_scales

_STATE_ALIGNMENT = 8  # bytes, of each part: of the widest dtype
_MAX_LAYERS_SHOWN = 4  # in the name of a group


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """Base class of the groups."""

    layers: Sequence[int]

    def __post_init__(self) -> None:
        layers = checks.as_list(self.layers, "layers", "ints")
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

    def demoted_token_bytes(self) -> int:
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
    checkpoint_tokens : the state is kept at the end of a step that ends at a multiple of it, or
        once such a step's tree is accepted

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


def group_of(pool: Pool, latent_dim: int | None, demotion: Demotion | None) -> AttentionGroup:
    """Return the group of all layers of a pool."""
    layers = range(pool.num_layers)
    if latent_dim is not None:
        rope_dim = pool.head_dim - latent_dim
        return Latent(layers=layers, latent_dim=latent_dim, rope_dim=rope_dim, dtype=pool.encoding)
    return FullAttention(
        layers=layers, num_kv_heads=pool.num_kv_heads, head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim, dtype=pool.encoding, demotion=demotion,
    )  # fmt: skip


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
    listed = checks.as_list(groups, "groups", "groups of layers")
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
