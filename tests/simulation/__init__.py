"""Scenarios of kvcupy's protocols in a simulated world; each checks the results of calls."""

from collections.abc import Callable
from typing import Any

from . import interrupts, tiered

PROTOCOLS: dict[str, Callable[[Any], object]] = {
    "tiers": tiered.tiers,
    "interrupts": interrupts.interrupts,
}
