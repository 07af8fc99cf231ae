"""Tiers in a simulated world (`tests/simulate.py`), and the worlds themselves."""

import pytest

pytest.importorskip("greenlet", reason='pip install "kvcupy[test]"')

from simulated_tiers import tiers
from support.world import run_once, search

NUM_SEEDS = 200  # 10,000 every night


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, 50))
def test_calls_return_what_they_may(first):
    if failure := search(tiers, range(first, first + 50)):
        raise failure


def test_a_seed_decides_a_run():
    runs = [run_once(tiers, seed)[1] for seed in (1, 2, 1)]
    assert runs[0].digest == runs[2].digest != runs[1].digest
    assert runs[0].log == runs[2].log
