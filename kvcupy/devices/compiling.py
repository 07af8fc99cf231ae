"""Log messages about compiling: a first call may take seconds, and says what for."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("kvcupy")


@contextmanager
def announced(kernel: object, target: str) -> Iterator[None]:
    """Log, for the length of a with block, that a kernel is compiled, and how long it took."""
    logger.info("compiling %s for %s", kernel, target)
    start = time.perf_counter()
    yield
    logger.info("compiled %s for %s in %.1f s", kernel, target, time.perf_counter() - start)
