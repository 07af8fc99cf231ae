"""The order checker knows every wait of the paged cache, of its ring of tables and of its graphs.

Whatever the streams do, it is silent; and it reports each wait that is left out, in whichever order
the streams then happen to run.
"""

from __future__ import annotations

import access_order_cases
import graph_order_cases
import mixed_order_cases
import page_order_cases
import pytest
import table_order_cases
from helpers import full_only

import kvcupy as kv

pytestmark = pytest.mark.usefixtures("quick_host")

CASES = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("tables", table_order_cases.ORDER_CASES), ("pages", page_order_cases.ORDER_CASES),
        ("access", access_order_cases.ORDER_CASES), ("graphs", graph_order_cases.ORDER_CASES),
        ("mixed", mixed_order_cases.ORDER_CASES),
    )
    for name, case in cases.items()
}  # fmt: skip
SOME = [name if i % 6 == 0 else full_only(name) for i, name in enumerate(CASES)]


@pytest.mark.parametrize("name", SOME)
def test_with_all_waits_it_is_silent(device, monkeypatch, name):
    case = CASES[name]
    case.inline(device)  # a kernel that is loaded behind a gate would wait for it
    with kv.order_checker() as checker:
        _, waits = case.run(device, monkeypatch)
    assert (checker.reports, checker.unresolved, waits) == ([], 0, case.waits)


@pytest.mark.races
@pytest.mark.parametrize("name", SOME)
def test_a_wait_that_is_left_out_is_reported(device, monkeypatch, name):
    case = CASES[name]
    case.inline(device)  # a kernel that is loaded behind a gate would wait for it
    with kv.order_checker("record") as checker:
        case.run(device, monkeypatch, case.drop, control=True)
    assert checker.reports
