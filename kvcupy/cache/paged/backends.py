"""Whose kernels attend in a paged cache: kvcupy's, another library's, or a user's function.

Backends stand above this package: `opener`, which `kvcupy` sets, makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from ...devices.protocol import Stream
from ...ops.attention_call import AttentionOptions
from .tables import Tables


class LayerCall(NamedTuple):
    """Attention of the tokens of a step in one layer, whose K and V are in the pages.

    Attributes
    ----------
    layer : its number
    caches : its K and V with their scales, by the names of `paged_attention`
    query : (T, Hq, D), rotated if keys are cached rotated
    out : (T, Hq, Dv), to be written
    sinks : learned logits, or None
    options : of attention
    tables : of the step
    stream : to run on
    """

    layer: int
    caches: Mapping[str, Any]
    query: Any
    out: Any
    sinks: Any
    options: AttentionOptions
    tables: Tables
    stream: Stream


class AttentionBackend(Protocol):
    """Attends in place of kvcupy's kernels."""

    def attend(self, call: LayerCall) -> bool:
        """Write the output, and return True; False leaves the call to kvcupy's kernels."""


opener: Callable[..., AttentionBackend | None]
"""`kvcupy.interop.attention_backends.open_backend`; set by `kvcupy`, which may import it."""
