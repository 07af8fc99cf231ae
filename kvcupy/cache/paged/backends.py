"""Whose kernels attend in a paged cache: kvcupy's, another library's, or a user's function.

Backends stand above this package: `opener`, which `kvcupy` sets, makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ...devices.protocol import Stream
from ...ops.attention_call import AttentionOptions
from .tables import Tables


class LayerCall(NamedTuple):
    """Attention of the tokens of a step in one layer, whose K and V are in the pages.

    Attributes
    ----------
    layer : its number
    query : (T, Hq, D), rotated if keys are cached rotated
    out : (T, Hq, Dv), to be written
    sinks : learned logits, or None
    options : of attention
    tables : of the step
    stream : to run on
    """

    layer: int
    query: Any
    out: Any
    sinks: Any
    options: AttentionOptions
    tables: Tables
    stream: Stream


class AttentionBackend(Protocol):
    """Attends in place of kvcupy's kernels."""

    def attend(self, call: LayerCall, own: Callable[[], object]) -> bool:
        """Write the output of a call, and return whether that was done.

        False leaves the call to kvcupy's kernels. `own` runs these, to compare results.
        """


def _kvcupys_kernels(attention: Any, pool: Any, layers: Any, steps: Any) -> None:
    return None


opener: Callable[[Any, Any, Any, Any], AttentionBackend | None] = _kvcupys_kernels
"""Returns a backend for an `attention` argument, the pool, `Layers` and `Steps` of a cache.

It raises ValueError for an unknown name, and ImportError if a package is missing. Set by the
package to `kvcupy.interop.attention_backends.open_backend`.
"""


def backend_of(attention: Any, pool: Any, layers: Any, steps: Any) -> AttentionBackend | None:
    """Return the backend that an `attention` argument names; None: kvcupy's kernels."""
    if isinstance(attention, str) and attention == "kvcupy":
        return None
    return opener(attention, pool, layers, steps)
