"""NVTX ranges around operations, for Nsight Systems and other profilers, while `config.nvtx` is.

Importing this lets `config.nvtx` take effect. Ranges are the host's: one lasts while an operation
is issued, and profilers show the kernels and copies that were launched within.
"""

from __future__ import annotations

from typing import Any

from .. import observe
from ..config import config, logger


class Ranges(observe.Observer):
    """An observer that pushes a range named "kvcupy." and the operation, and pops it."""

    def __init__(self) -> None:
        self._nvtx: Any = None

    def before(self, operation: observe.Operation) -> None:
        if self._nvtx is None:
            self._nvtx = _bindings()
        self._nvtx.RangePush(f"kvcupy.{operation.name}")

    def after(self, operation: observe.Operation) -> None:
        self._nvtx.RangePop()

    def failed(self, operation: observe.Operation) -> None:
        self._nvtx.RangePop()


class _NoRanges:
    """Stands in for NVTX where CuPy is not installed."""

    def RangePush(self, name: str) -> None:
        pass

    def RangePop(self) -> None:
        pass


def _bindings() -> Any:
    """Return CuPy's bindings of NVTX; without CuPy, what does nothing, and log that."""
    try:
        from cupy.cuda import nvtx
    except ImportError as error:
        logger.warning("config.nvtx has no effect, because CuPy cannot be imported: %s", error)
        return _NoRanges()
    return nvtx


_ranges = Ranges()


def _switch(shown: bool) -> None:
    if shown:
        observe.attach(_ranges)
    else:
        observe.detach(_ranges)


config.notify_nvtx(_switch)
