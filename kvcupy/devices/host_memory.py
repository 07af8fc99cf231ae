"""Host memory: anonymous pages near a chosen processor, and copies."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .protocol import require_runs

PAGE_BYTES = mmap.PAGESIZE

_MAP_FAILED = ctypes.c_void_p(-1).value
_MBIND = {"x86_64": 237, "aarch64": 235}  # a system call without a function in the C library
_MPOL_PREFERRED = 1
_MADV_DONTFORK = 10
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def map_pages(num_bytes: int) -> tuple[int, int]:
    """Map private pages; return their address and their size in bytes, rounded up to whole pages.

    They stay until `unmap`. A Python mmap would be unmapped when the interpreter exits, while a
    thread or a GPU may still use it. OSError if the system has no room for them.
    """
    rounded = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc().mmap(None, rounded, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address is None or address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"mapping {rounded} bytes")
    return int(address), rounded


def unmap(address: int, num_bytes: int) -> None:
    """Unmap pages. The address must not be used again."""
    _libc().munmap(address, num_bytes)


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Prefer a NUMA node for pages not yet touched; return whether the system accepted it."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // _LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    bits = words * _LONG_BITS + 1  # the system call subtracts one
    arguments = (number, address, num_bytes, _MPOL_PREFERRED, ctypes.addressof(mask), bits, 0)
    return bool(_libc().syscall(*(ctypes.c_long(a) for a in arguments)) == 0)


def keep_from_children(address: int, num_bytes: int) -> bool:
    """Exclude pages from processes forked from now on; return whether the system does so.

    A forked child shares private pages until one of the two writes. On Linux before 5.9, and in
    WSL2, the writer gets the copy, even if it is the parent: the processor would then use a new
    page, and a GPU that has locked the old one would not see it. A child that touches the pages
    crashes.
    """
    return bool(_libc().madvise(address, num_bytes, _MADV_DONTFORK) == 0)


def node_of_pci_device(bus_id: str, pci_devices: Path) -> int | None:
    """Return the NUMA node of a PCI device ("0000:3B:00.0"); None if the system does not say."""
    try:
        node = int((pci_devices / bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    )  # fmt: skip
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.syscall.restype = ctypes.c_long
    return libc


def copy_array(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
    """Copy an array to another of the same shape and dtype."""
    if target.flags.c_contiguous and source.flags.c_contiguous:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, target.nbytes)
    else:
        np.copyto(target, source)


def copy_of_runs(
    dst: np.ndarray[Any, Any], src: np.ndarray[Any, Any], sizes: np.ndarray[Any, Any]
) -> Callable[[], object]:
    """Return a function that copies runs one by one; it may be called again."""
    require_runs(dst, src, sizes)
    arguments = dst.tolist(), src.tolist(), sizes.tolist()  # later changes do not count
    # The map is exhausted within C: there may be tens of thousands of short runs.
    return lambda: deque(map(ctypes.memmove, *arguments), maxlen=0)
