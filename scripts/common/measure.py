"""Devices that the scripts run on, and the timelines that they save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvcupy import observe, timeline
from kvcupy.cuda_api import install_cublas

QUICK_NOTE = (
    "--quick: runs this few and short show that it works, not how much it hides; "
    "run it without --quick for that."
)


def require_products(device: Any) -> None:
    """Check that a device can multiply matrices.

    Raises
    ------
    SystemExit : CuPy lacks cuBLAS; the message says how to install it
    """
    square = device.asarray(np.ones((8, 8), np.float32))
    try:
        square.dot(square)
    except ImportError as error:
        raise SystemExit(
            f"{device.name}: this multiplies matrices, for which CuPy needs cuBLAS ({error}): "
            f"{install_cublas()}, or run it with --device host"
        ) from None


def log_compilation() -> None:
    """Log on stderr which kernels are compiled, which makes a first run longer."""
    logger = logging.getLogger("kvcupy")
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(logging.INFO)


@contextmanager
def one_core_per_stream(device: Any) -> Iterator[None]:
    """Limit launches on the host device to one core each, so that another stream has the other."""
    if device.kind != "host":
        yield
        return
    before, device.num_workers = device.num_workers, 1
    try:
        yield
    finally:
        device.num_workers = before


def run_named(
    device: Any,
    name: str,
    function: Callable[[], object],
    stream: Any,
    *,
    reads: tuple[observe.Access, ...] = (),
    writes: tuple[observe.Access, ...] = (),
) -> None:
    """Run array expressions on a stream as an operation that timelines and checkers see."""
    observe.issue(
        lambda: observe.Operation(name, stream, reads, writes),
        lambda: device.run(function, stream),
    )


def save_timeline(
    device: Any, works: Sequence[Callable[[], None]], out: Path | None, stem: str, title: str
) -> None:
    """Run `works` one after another; save what ran when, as JSON and PNG, if there is a folder."""
    if out is None:
        return
    with timeline() as recorded:
        for work in works:
            work()
            device.synchronize()
    out.mkdir(parents=True, exist_ok=True)
    recorded.save(out / f"{stem}.json")
    recorded.plot(out / f"{stem}.png", title=title)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return uint16 of random bit patterns, NaNs included."""
    return rng.integers(0, 1 << 16, shape, dtype=np.uint16)
