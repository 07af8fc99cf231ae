"""Which way a transfer goes if it is left to kvcupy: `method="auto"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from .. import calibration
from ..devices.protocol import Device

METHODS = ("auto", "kernel", "copy", "staged")

DIRECTIONS = ("to_device", "to_host", "within")


@dataclass(frozen=True)
class Thresholds:
    """What decides, in one direction.

    Attributes
    ----------
    copy_from_bytes : from how many bytes a piece on the copy engine wins over the kernel, by the
        number of pieces: (at least so many pieces, bytes) in rising order of pieces
    staged : whether relaying pages on the device first is worth it where that makes pieces long
        enough for the copy engine
    blocks : of a kernel over a link; None: `transfer_kernels.bounded_blocks`
    """

    copy_from_bytes: tuple[tuple[int, int], ...]
    staged: bool
    blocks: int | None = None

    def crossover(self, pieces: int) -> int:
        """Return from how many bytes a piece copies win."""
        found = self.copy_from_bytes[0][1]
        for at_least, num_bytes in self.copy_from_bytes:
            if pieces >= at_least:
                found = num_bytes
        return found


# Without a calibration. vLLM's rule on an H100 (vllm#42212): kernel for 16 pieces and more of less
# than 28 KiB. Stores of a kernel to host memory over PCIe are slow (TensorRT-LLM), so pages whose
# pieces are short are relaid first on the way there.
_LINK = ((1, 0), (16, 28 * 1024))
NEVER = 1 << 62
_BY_KERNEL = Thresholds(((1, NEVER),), staged=False)
DEFAULTS = {
    "to_device": Thresholds(_LINK, staged=False),
    "to_host": Thresholds(_LINK, staged=True),
    "within": _BY_KERNEL,
}


_known: WeakKeyDictionary[Device, dict[str, Thresholds]] = WeakKeyDictionary()


def default(device: Device, direction: str) -> Thresholds:
    """Return what decides without a calibration."""
    return DEFAULTS[direction] if device.has_copy_engine else _BY_KERNEL


def thresholds(device: Device, direction: str) -> Thresholds:
    """Return what decides on a device in a direction: as calibrated, or by default."""
    if device not in _known:
        kept = calibration.load(device.model)
        _known[device] = {d: _read(kept.get(d), default(device, d)) for d in DIRECTIONS}
    return _known[device][direction]


def forget() -> None:
    """Read calibrations anew at the next transfer."""
    _known.clear()


def _read(kept: Any, default: Thresholds) -> Thresholds:
    try:
        steps = tuple(
            (int(pieces), int(num_bytes)) for pieces, num_bytes in kept["copy_from_bytes"]
        )
        blocks = None if kept["blocks"] is None else int(kept["blocks"])
        staged = bool(kept["staged"])
    except (TypeError, KeyError, ValueError):
        return default
    return Thresholds(steps, staged, blocks) if steps else default
