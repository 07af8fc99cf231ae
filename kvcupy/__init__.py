"""KV-cache kernels for LLM inference: CUDA sources compiled at run time, streams made explicit.

Importing this touches no device, imports neither CuPy nor torch, and compiles nothing.
"""

from .arrays import ArrayView, view_as
from .config import config
from .devices import default_device, device
from .errors import CaptureError, CompileError, DeviceError, IndexFault, KvcupyError
from .faults import check_faults
from .ops.store import find_duplicate_slots, store_kv, store_mla
from .streams import fork, join, keep_alive
from .timeline import timeline

__version__ = "0.1.0"

__all__ = [
    "ArrayView",
    "CaptureError",
    "CompileError",
    "DeviceError",
    "IndexFault",
    "KvcupyError",
    "check_faults",
    "config",
    "default_device",
    "device",
    "find_duplicate_slots",
    "fork",
    "join",
    "keep_alive",
    "store_kv",
    "store_mla",
    "timeline",
    "view_as",
]
