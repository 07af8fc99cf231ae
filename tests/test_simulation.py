"""Protocols in simulated worlds (`tests/simulate.py`), and the worlds themselves."""

import pytest

pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')

from simulation import PROTOCOLS
from support.world import run_once, search

NUM_SEEDS = 200  # of each protocol; 10,000 every night


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_calls_return_what_they_may(protocol, first):
    if failure := search(PROTOCOLS[protocol], range(first, first + 50)):
        raise failure


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_seed_decides_a_run(protocol):
    runs = [run_once(PROTOCOLS[protocol], seed)[1] for seed in (1, 2, 1)]
    assert runs[0].digest == runs[2].digest != runs[1].digest
    assert runs[0].log == runs[2].log
