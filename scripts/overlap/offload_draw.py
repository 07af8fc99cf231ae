"""Timelines of a model of few layers that reads pages on their way from the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common.measure import wall_us
from common.workload import Model

import kvcupy as kv

from .offload_model import BEST, FIRST, OffloadedModel, ways

LAYERS = 6  # so that no colour stands for two things
DRAWN_OF = 5  # the quickest of so many is drawn: the one that other programs disturb least


def draw(
    device: Any, model: Model, bits: np.ndarray[Any, Any], page_size: int, layout: str,
    ratio: float, out: Path,
) -> None:  # fmt: skip
    """Save a timeline of each way, and `timeline`, of two one after the other.

    Parameters
    ----------
    bits, page_size, layout : as of `OffloadedModel`, of which the first layers are taken
    ratio : of the time that "auto" needs to load a layer to what the layer computes
    """
    few = np.ascontiguousarray(bits[:, :, :LAYERS])
    short = OffloadedModel(device, model, few, page_size, layout)
    found = ways(short)
    copy_us = min(wall_us(device, found[BEST].alone) for _ in range(5))
    short.fit(copy_us / short.layers / ratio)
    what = f"{model.name}, {short.layers} layers, pages of {page_size}, {layout}"
    drawn = {name: [way.run] for name, way in found.items()}
    drawn["timeline"] = [found[FIRST].run, found[BEST].run]
    out.mkdir(parents=True, exist_ok=True)
    for name, works in drawn.items():
        recorded = min((record(short, works) for _ in range(DRAWN_OF)), key=length_us)
        stem = name.replace(",", "").replace(" ", "_")
        order = f"{FIRST}; then the engine" if name == "timeline" else name
        recorded.save(out / f"{stem}.json")
        recorded.plot(out / f"{stem}.png", title=f"{what}: {order}")


def record(model: OffloadedModel, works: Sequence[Callable[[], None]]) -> Any:
    """Run a model in some ways one after another and return the timeline."""
    with kv.timeline() as recorded:
        for work in works:
            model.next_turn()
            work()
            model.device.synchronize()
    model.check_reads("drawn")
    return recorded


def length_us(recorded: Any) -> float:
    """Return the time from the first start to the last end."""
    spans = recorded.spans
    return float(max(span.end_us for span in spans) - min(span.start_us for span in spans))
