"""The names of `checks` for attention, until it uses them itself."""

from __future__ import annotations

from typing import Any

from ..arrays import ArrayView
from .checks import OPERAND_PARAMS as PARAMS
from .checks import KVNames, KVOperand

__all__ = ["PARAMS", "Side"]


class Side(KVOperand):
    """K or V, with a method that writes records."""

    def write(self, params: Any, width: int) -> None:
        """Fill the Params of this side."""
        cache, scales = self.cache, self.scale_cache
        params["token_bytes"], params["head_bytes"] = self.rows.token_bytes, self.rows.head_bytes
        params["cache"] = (cache.page_bytes, cache.offset_bytes, cache.head_bytes)
        params["scale"], params["scale_head_bytes"] = self.scale.value, self.scale.head_bytes
        if scales is not None:
            params["scale_cache_slot_bytes"], params["scale_cache_head_bytes"] = scales.strides
        params["width"] = width

    def cache_view(self, pointer: int, like: ArrayView) -> ArrayView:  # type: ignore[override]
        """Return the cache by pages, (num_pages, page_size, heads, width)."""
        named = self._replace(names=KVNames("", "cache", ""))
        whole = ArrayView(
            pointer, like.shape, like.strides, like.format, like.device, owner=like.owner
        )
        return KVOperand.cache_view(named, {"cache": whole})
