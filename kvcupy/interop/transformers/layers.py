"""The layers of a `PagedCache` as transformers calls them, and which of them a model has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

NAME = "kvcupy"

_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(function: _F) -> _F:
    """Let a method of the cache run between the graphs of a compiled model."""
    disabled: _F = torch.compiler.disable(function, reason="the pages of a cache are no graph's")
    return disabled


@dataclass(frozen=True)
class LayerKind:
    """The contents of a layer's cache."""

    attention: bool = False  # keys and values
    recurrent: bool = False  # states of convolutions and recurrences
    # the attribute of the config with the number of keys that a query sees at most, or None
    window: str | None = None


_KINDS = {
    "full_attention": LayerKind(attention=True),
    "sliding_attention": LayerKind(attention=True, window="sliding_window"),
    "chunked_attention": LayerKind(attention=True, window="attention_chunk_size"),
    "linear_attention": LayerKind(recurrent=True),
    "conv": LayerKind(recurrent=True),
    "hybrid": LayerKind(attention=True, recurrent=True),
    "hybrid_sliding": LayerKind(attention=True, recurrent=True, window="sliding_window"),
    "moe": LayerKind(),
    "mlp": LayerKind(),
}


def kinds_of(config: Any) -> list[LayerKind]:
    """Return what each layer of a model caches; raise if that is something else."""
    types = [_type_of(config, layer) for layer in range(int(config.num_hidden_layers))]
    for layer, kind in enumerate(types):
        if kind not in _KINDS:
            raise NotImplementedError(f"config: layer {layer} is {kind}, not one of {[*_KINDS]}")
    if getattr(config, "num_kv_shared_layers", None) or "reuse" in (
        getattr(config, "kv_sharing_modes", None) or ()
    ):
        raise NotImplementedError(
            "config: expected keys for every layer, got layers that share them"
        )
    return [_KINDS[kind] for kind in types]


def window_of(config: Any, layer: int) -> int | None:
    """Return how many keys a query of a layer sees at most by the config; None: all."""
    kind = _KINDS.get(_type_of(config, layer))
    if kind is None or kind.window is None:
        return None
    return int(getattr(config.per_layer_config[layer], kind.window))


def _type_of(config: Any, layer: int) -> str:
    types = getattr(config, "layer_types", None)
    if types is not None:
        return str(types[layer])
    config = config.per_layer_config[layer]
    for name, attribute in (("sliding", "sliding_window"), ("chunked", "attention_chunk_size")):
        if getattr(config, attribute, None) is not None:
            return f"{name}_attention"
    return "full_attention"


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """A layer with attention, as transformers calls it; all of them are one cache."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: Any, layer: int) -> None:
        super().__init__()
        self._cache, self._index = cache, layer
        self.is_sliding = layer in cache._windows

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing: the first `update` allocates."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self._cache.update(key_states, value_states, self._index, *args, **kwargs)

    @untraced
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length = self._cache.get_seq_length()
        first = 0
        if self._cache._config._attn_implementation != NAME:
            first = self._cache._first_seen(self._index)
        return length + query_length - first, first

    def get_seq_length(self) -> int:
        length: int = self._cache.get_seq_length()
        return length

    def get_max_length(self) -> int:
        return -1  # all rows share the pages


class _States:
    """The states of a layer by number, where models read them before transformers 5.21."""

    def __init__(self, cache: Any, read: str, layer: int) -> None:
        self._cache, self._read, self._layer = cache, read, layer  # a bound method keeps its cache

    def __getitem__(self, state_idx: int) -> Any:
        return getattr(self._cache, self._read)(self._layer, state_idx)


class StateLayer(LinearAttentionCacheLayerMixin):  # type: ignore[misc]
    """A recurrent layer, as transformers calls it."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: Any, layer: int) -> None:
        super().__init__()
        self._cache, self._index = cache, layer
        self.conv_states = _States(cache, "get_conv_state", layer)
        self.recurrent_states = _States(cache, "get_recurrent_state", layer)

    @property
    def is_croppable(self) -> bool:
        croppable: bool = self._cache.is_croppable
        return croppable

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the first forward allocates."""

    def update_conv_state(self, conv_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        return self._cache.update_conv_state(conv_states, self._index, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        return self._cache.update_recurrent_state(
            recurrent_states, self._index, state_idx, **kwargs
        )


class EmptyLayer(StateLayer):
    """A layer that caches nothing."""

    is_croppable = True


class HybridLayer(PagedLayer, StateLayer):
    """A layer with attention and a recurrent part, as transformers calls it."""

    is_croppable = StateLayer.is_croppable

    def __init__(self, cache: Any, layer: int) -> None:
        StateLayer.__init__(self, cache, layer)
        PagedLayer.__init__(self, cache, layer)
