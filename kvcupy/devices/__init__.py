"""Devices by name, and the check for index faults."""

from __future__ import annotations

import os
from typing import Any

from .. import cuda_api, faults
from ..arrays import ArrayView
from ..config import logger
from ..errors import DeviceError, process_lock
from .protocol import Device, is_device

_devices: dict[str, Device] = {}
_logged: set[str] = set()  # reasons why the default device is the host
_lock = process_lock()


def get(device: Any = None) -> Device:
    """Return a Device from its name, a Device or torch's device, or the default one for None."""
    if device is None:
        return default_device()
    if type(device).__module__ == "torch" and type(device).__name__ == "device":
        device = "cpu" if device.type == "cpu" else str(device)
    if not isinstance(device, str):
        if not is_device(device):
            raise TypeError(f'device: expected a Device, "cpu" or "cuda:0", got {device!r}')
        device_object: Device = device
        return device_object
    known = _devices.get(device)
    return known if known is not None else _open(device)


def of(view: ArrayView, name: str) -> Device:
    """Return the device of an argument."""
    try:
        return get(view.device)
    except DeviceError as error:
        raise DeviceError(f"{name}: expected an array of a usable device, got {error}") from None


def _open(name: str) -> Device:
    kind, colon, index = name.partition(":")
    # At most as many digits as any GPU's number has: int() refuses thousands of them.
    numbered = kind == "cuda" and index.isascii() and index.isdigit() and len(index) < 10
    if kind not in ("host", "cpu", "cuda") or (colon and not numbered):
        hint = '; did you mean "cuda"?' if kind == "gpu" else ""
        expected = '"host", "cpu", "cuda" or "cuda:<number>"'
        raise ValueError(f"device: expected {expected}, got {name!r}{hint}")
    full_name = f"cuda:{int(index or 0)}" if kind == "cuda" else "host"
    with _lock:
        if full_name not in _devices:
            if full_name == "host":
                from .host import HostDevice

                _devices[full_name] = HostDevice()
            else:
                from .cuda import CudaDevice

                _devices[full_name] = CudaDevice(int(index or 0))
        _devices[name] = _devices[full_name]
        return _devices[name]


def default_device() -> Device:
    """Return `cuda:0` if a GPU is usable, else `host`.

    The reason is logged once where there is an NVIDIA driver and CUDA_VISIBLE_DEVICES is not empty.
    """
    from .cuda import why_not

    reason = why_not()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if reason and reason not in _logged and not hidden and cuda_api.driver_version():
        _logged.add(reason)
        logger.warning("the default device is the host: %s", reason)
    return get("host" if reason else "cuda:0")


def device(name: Any) -> Device:
    """Return a device by name: "host" or "cpu", "cuda" (the first GPU) or "cuda:1".

    A `torch.device` of one of them, or a Device, is accepted here and for every `device` argument.

    Raises
    ------
    TypeError, ValueError : there is no such name
    DeviceError : there is no such GPU, or it cannot be used

    Examples
    --------
    >>> device("host").name, device("cpu") is device("host")
    ('host', True)
    """
    return get(name)


def check_faults(device: Any = None) -> None:
    """Raise the first index fault of a device since the last check, and clear the record.

    Parameters
    ----------
    device : Device or its name; None: the default device

    Raises
    ------
    IndexFault : names the operation, the position in the index array, what was expected and got
        there, and how many faults there were
    TypeError, ValueError, DeviceError : there is no such device
    DeviceError : work on it has failed
    CaptureError : a stream of it is being captured

    Notes
    -----
    Stream: waits for all work on the device. Capture: illegal.
    """
    target = get(device)
    target.synchronize()
    fault = faults.recorded(target.to_numpy(target.fault_array()))
    if fault is not None:
        target.fault_array().fill(0)
        target.synchronize()
        raise fault
