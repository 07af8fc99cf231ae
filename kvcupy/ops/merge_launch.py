"""`merge.merge_launch` for attention, by positions, until it names its arrays."""

from __future__ import annotations

from typing import Any, cast

from . import plan
from .call import Launch
from .merge import merge_launch as by_name


class OldLaunch:
    """A launch with the attributes that attention reads."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.function, self.grid, self.block = launch.function, launch.grid, launch.block
        self.smem_bytes = launch.smem_bytes

    def params(self, addresses: tuple[int, ...], faults: int) -> bytes:
        """Return the packed Params."""
        chosen = self.launch._choose((*addresses[:64], *[0] * (64 - len(addresses)), 0))
        return self.launch._pack.pack(*chosen, faults) + self.launch.constants


def merge_launch(device: Any, *, pointers: Any, **options: Any) -> plan.Launch:
    """Lay out a merge whose addresses are at positions."""
    fields = ("out_a", "lse_a", "sinks", "num_valid", "out", "lse")
    by_field = {f: str(i) for f, i in zip(fields, pointers, strict=True) if i is not None}
    names = tuple(map(str, range(64)))
    new = by_name(device, pointers=by_field, names=names, **options)
    return cast(plan.Launch, OldLaunch(new))
