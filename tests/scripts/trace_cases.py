"""Small traces, for the scripts that replay one."""

from __future__ import annotations

import itertools


def small_trace(count=120, seed=1):
    """Requests of a synthetic trace."""
    from common.requests import conversations

    return list(itertools.islice(conversations(seed), count))


def small_settings(sizes, **changes):
    """Pages of 1 KiB in two layers."""
    from workloads.simulation import Sizes
    from workloads.trace import Settings, Shape

    return Settings(Sizes(*sizes), Shape(2, 16, 1, 8), **changes)
