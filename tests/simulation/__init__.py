"""Scenarios of kvcupy's protocols in a simulated world; each checks the results of calls."""

from collections.abc import Callable
from typing import Any

from . import interrupts, stores, tiered

PROTOCOLS: dict[str, Callable[[Any], object]] = {
    "shared_memory": stores.shared_memory,
    "redis": stores.redis,
    "mooncake": stores.mooncake_store,
    "disk": tiered.tiered_disk,
    "shared_tiers": tiered.shared_tiers,
    "interrupts": interrupts.interrupts,
}
