"""The order checker and the controls of migration on a GPU, by the stand-in.

Reports and controls are the same as on the host device. Streams run by chance.
"""

from __future__ import annotations

import pytest
import test_checker
import test_migration_controls
import test_threads
from devices.fake_cuda.kernels import device_of_test
from helpers import again

HOST_ONLY = (
    "test_random_programs",
    "test_work_on_the_calling_thread",
    "test_work_that_a_host_function_does",
    "test_the_host_and_a_function_that_runs_later",
    "test_memory_that_is_used_again",
    "test_operations_keep_their_own_arrays",
)
TESTS = [name for name in vars(test_checker) if name.startswith("test_") and name not in HOST_ONLY]

THREADS = (
    "test_a_poll_whose_answer_is_ignored",
    "test_the_answer_of_a_poll_is_true",
    "test_an_answer_counts_for_the_moment_of_the_poll",
    "test_streams_that_are_idle_when_the_block_begins_are_fine",
    "test_another_thread_was_quicker",
)

globals().update(again(test_checker, *TESTS) | again(test_migration_controls))
globals().update(again(test_threads, *THREADS))


@pytest.fixture
def device(request):
    with device_of_test(request) as device:
        yield device


@pytest.fixture
def world(device, request):
    of_threads = request.node.originalname.startswith("test_threads_")
    return (test_threads if of_threads else test_checker).World(device)
