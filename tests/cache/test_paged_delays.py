"""Long random programs on a paged cache whose streams are late: the bits stay the same."""

from __future__ import annotations

import pytest
from paged_cases import rope_of
from paged_program import MAX_TOKENS, Program
from paged_world import check

from kvcupy.cache.hazards import AccessOrder

ROOM = {"steps": 150, "tokens": MAX_TOKENS, "num_pages": 16}
CASES = {
    "one slot": {"slots_in_flight": 1},
    "two slots": {},
    "three slots": {"slots_in_flight": 3},
    "given": {"copy": "given"},
    "compute": {"copy": "compute"},
    "other": {"copy": "other", "slots_in_flight": 1},
    "rotated": {"rope": rope_of(8)},
    "inline": {"rope": rope_of(8), "rope_mode": "inline", "slots_in_flight": 1},
    "past": {"past": "fp8_e4m3", "recent": 5, "sinks": 3},
    "past, one slot": {"past": "int8", "recent": 2, "num_past_pages": 5, "slots_in_flight": 1},
    "pages of one": {"page_size": 1, "num_pages": 60},
}  # fmt: skip


@pytest.mark.usefixtures("quick_host")
@pytest.mark.covering
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_late_streams_change_nothing(device, name, seed):
    options, seed = {**ROOM, **CASES[name]}, 10 * [*CASES].index(name) + seed
    if "rope" in options:
        options["rope"] = device.asarray(options["rope"])
    check(device, lambda world: Program(world, seed).run(150), seed=seed, **options)


@pytest.mark.races
def test_without_access_order_it_goes_wrong(device, monkeypatch):
    """The control of the test above: tables keep their order, pages do not.

    A GPU calls host functions one after the other, so not every seed's delays disturb it.
    """

    def differs(seed):
        def program(world):
            with monkeypatch.context() as patch:
                if world.live:
                    patch.setattr(AccessOrder, "begin", lambda self, stream: None)
                return Program(world, seed).run(150)

        try:
            check(device, program, seed=seed, **ROOM)
        except AssertionError as error:
            assert "differ" in str(error)
            return True
        return False

    assert any(differs(seed) for seed in range(1, 9))
