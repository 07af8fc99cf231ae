"""The order checker and the controls of migration on a GPU, by the stand-in.

Reports and controls are the same as on the host device. Streams run by chance.
"""

from __future__ import annotations

import pytest
import test_checker
import test_migration_controls
from devices.fake_cuda.kernels import device_of_test
from helpers import again

HOST_ONLY = (
    "test_random_programs",
    "test_work_on_the_calling_thread",
    "test_work_that_a_host_function_does",
    "test_memory_that_is_used_again",
    "test_operations_keep_their_own_arrays",
)
TESTS = [name for name in vars(test_checker) if name.startswith("test_") and name not in HOST_ONLY]

globals().update(again(test_checker, *TESTS) | again(test_migration_controls))


@pytest.fixture
def device(request):
    with device_of_test(request) as device:
        yield device


@pytest.fixture
def world(device):
    return test_checker.World(device)
