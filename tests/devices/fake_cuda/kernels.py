"""Kernels on the stand-in: what the driver is asked to launch is run by the build for this
processor, on the same packed Params, where the stand-in's streams get to it."""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from kvcupy import devices, scratch
from kvcupy.config import config
from kvcupy.devices import cuda, host, nvrtc
from kvcupy.kernels import pointer_fields
from kvcupy.ops import call as op_call

from . import FakeApi

_BUILDS = {}  # specialisation -> host.HostFunction
_FUNCTIONS = 0x10000  # the driver's functions, by number of their specialisation


class Kernels:
    """Loads specialisations as functions of the stand-in's driver, and runs them."""

    def __init__(self, api):
        self.known = []
        self._runtime, self._driver, self._launch = api.runtime, api.driver, api.driver.launchKernel
        api.driver.launchKernel = self.launch

    def compile(self, specialisation, arch):
        self.known.append(specialisation)
        return nvrtc.Compiled(b"image", str(len(self.known) - 1), "", arch)

    def get_function(self, name):
        pointer = _FUNCTIONS + 16 * int(name)
        self._driver.params_bytes[pointer] = self.known[int(name)].kernel.params.itemsize
        return SimpleNamespace(kernel=SimpleNamespace(ptr=pointer))

    def launch(self, function, *numbers):
        grid, block, smem_bytes = numbers[:3], numbers[3:6], numbers[6]
        specialisation = self.known[(function - _FUNCTIONS) // 16]
        dtype = specialisation.kernel.params
        pointers = (dtype.names or ())[: pointer_fields(dtype)]
        build = _BUILDS.setdefault(specialisation, host.HostFunction(specialisation, ()))
        packed = host._config(grid, block, smem_bytes, 1, 0)

        def run(params):
            fields = np.frombuffer(params, dtype)[0]
            if all(self._runtime._reaches(int(fields[name])) for name in pointers if fields[name]):
                assert build.entry(params, packed) == 0, f"{specialisation} failed"

        self._driver.kernels[function] = run
        self._launch(function, *numbers)


def open_device(patch, seed=None):
    """Return a new stand-in as `kv.device("cuda:0")`, with kernels; `patch` ends it."""
    op_call.forget()
    api = FakeApi(seed=seed)
    api.install(patch)
    device = cuda.CudaDevice(0, api)
    patch.setitem(devices._devices, "cuda:0", device)
    patch.setattr(scratch, "_captured", [])
    patch.setattr(config, "_fallback", "error")  # the stand-in has no array arithmetic
    kernels = Kernels(api)
    patch.setattr(nvrtc, "compile_cubin", kernels.compile)
    patch.setattr(api.cupy.RawModule, "get_function", lambda self, name: kernels.get_function(name))
    device.fault_array()
    return device


@contextmanager
def device_of_test(request):
    """Let a test use a new stand-in whose streams run by chance, as `--strict-seed` draws."""
    seed = zlib.crc32(request.node.nodeid.encode()) ^ request.config.option.strict_seed
    with pytest.MonkeyPatch.context() as patch:
        device = open_device(patch, seed)
        yield device
        device.synchronize()
        assert device.context.api.machine.deadlocks == []
    op_call.forget()
