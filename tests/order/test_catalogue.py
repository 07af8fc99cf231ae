"""The programs of the catalogue are right in every order, and each of their waits is needed."""

from __future__ import annotations

import catalogue
import helpers
import numpy as np
import protocols
import pytest

pytestmark = pytest.mark.usefixtures("lenient_host")

PROGRAMS = [
    name for name, program in vars(protocols).items()
    if getattr(program, "__module__", "") == protocols.__name__ and callable(program)
    and not isinstance(program, type) and program.__code__.co_varnames[:1] == ("device",)
]  # fmt: skip
SCHEDULES = 40 if helpers.full else 4


@pytest.fixture(autouse=True)
def on_the_host(device):
    """The simulated device is one of the host."""
    if device.kind != "host":
        pytest.skip("the simulated device is one of the host")
    yield
    device.fault_array().fill(0)  # without a wait, indices may be garbage


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_right_in_every_order_and_passes_no_wait_that_is_not_listed(name):
    program = catalogue.program_of(name)
    assert catalogue.problems_of(program, SCHEDULES) == []
    assert catalogue.passed(program, 3) - catalogue.NEEDED.keys() - catalogue.NOT_NEEDED.keys() == (
        set()
    )


@pytest.mark.parametrize("site", catalogue.NEEDED)
def test_a_wait_that_is_left_out_is_reported(site):
    program = catalogue.program_of(catalogue.NEEDED[site])
    assert catalogue.problems_of(program, 60, without=site)


def test_a_program_that_races_is_a_problem():
    """The control: a wait that is missing in the program itself."""

    def program(device):
        x, y = device.zeros(4, "fp32"), device.zeros(4, "fp32")
        device.copy(x, np.ones(4, np.float32), stream=device.stream())
        device.copy(y, x, stream=device.stream())
        device.synchronize()
        return y

    problems = catalogue.problems_of(program, 20)
    assert any("RAW" in p for p in problems) and any("seed" in p for p in problems)
