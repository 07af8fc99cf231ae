"""The order of streams on a GPU, by the stand-in: they progress at random, by `--strict-seed`.

Each order is tested as on the host device, and each control, in which a wait is left out, must go
wrong here too. Outputs of captured steps, which a GPU allocates in another way,
are compared there as well, and many threads share two caches.
"""

from __future__ import annotations

import pytest
import test_paged_graphs
import test_paged_order
import test_tiered_stores
from devices.fake_cuda.kernels import device_of_test
from helpers import again

pytestmark = pytest.mark.again

ORDERS = ("test_order", "test_without_the_wait_it_goes_wrong")

globals().update(
    again(test_paged_order, *ORDERS, "test_tables_outgrow_their_slots")
    | again(test_paged_graphs, "test_a_graph_writes_the_outputs_that_its_capture_allocated")
    | again(test_tiered_stores, "test_many_threads_of_two_caches")
)


@pytest.fixture
def device(request):
    with device_of_test(request) as device:
        yield device
