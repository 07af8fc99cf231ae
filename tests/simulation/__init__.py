"""Scenarios of kvcupy's protocols in a simulated world; each checks the results of calls."""

from collections.abc import Callable
from typing import Any

from . import interrupts, migration, sequences, tiered

PROTOCOLS: dict[str, Callable[[Any], object]] = {
    "migration": migration.migration,
    "stale_socket": migration.stale_socket,
    "sequences": sequences.sequences,
    "tiers": tiered.tiers,
    "interrupts": interrupts.interrupts,
}
