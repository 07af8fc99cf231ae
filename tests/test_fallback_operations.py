"""The operations after `store_kv` where no kernel can be compiled.

What `tests/ops` asks of the kernels is asked of the array expressions here: the same tests, with
the same tolerances, on a host device without a compiler.
"""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest
from ops import (
    test_copy_pages,
    test_gather,
    test_indexing,
    test_rope,
    test_rope_any,
    test_rope_errors,
    test_rope_store,
    test_rope_streams,
)

import kvcupy as kv
from kvcupy import devices
from kvcupy.devices import cxx
from kvcupy.devices.host import HostDevice
from kvcupy.ops import plan


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """A host device without a compiler, on which nothing may be launched."""
    host = HostDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices._devices, "host", host)
        patch.setattr(plan, "_plans", {})
        patch.setattr(cxx, "find_compiler", lambda: None)
        patch.setattr(host, "launch", lambda *a: pytest.fail("a kernel was launched"))
        patch.setattr(kv.config, "fallback", "warn")
        patch.setattr(kv.config, "_warned", set())
        patch.setenv("KVCUPY_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield host


@pytest.fixture(autouse=True)
def warnings_are_errors():
    """A user who falls back sees one message of kvcupy's, and none of NumPy's."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def again(module: ModuleType, *without: str) -> dict[str, object]:
    """Return the tests of a module that use the device, under names of this one."""
    subject = module.__name__.rpartition(".test_")[2]
    tests = {name: one for name, one in vars(module).items() if name.startswith("test_")}
    missing = set(without) - set(tests)
    assert not missing, f"{module.__name__} has no {missing}"
    return {
        f"test_{subject}_{name.removeprefix('test_')}": one
        for name, one in tests.items()
        if name not in without
    }


globals().update(
    again(test_rope, "test_tolerance_tells_mistakes")
    | again(test_rope_any)
    | again(test_rope_store)
    | again(test_rope_streams)
    | again(test_rope_errors)
    | again(test_gather)
    | again(test_copy_pages)
    | again(test_indexing)
)
