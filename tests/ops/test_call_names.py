"""Arguments keep their names from the public function to the function that makes the plan."""

from __future__ import annotations

import inspect

import pytest
from valid_calls import EXAMPLES as CALLS
from valid_calls import arrays_of

import kvcupy as kv
from kvcupy.ops.call import Operation


@pytest.fixture
def prepared(monkeypatch):
    """The operations that were prepared, with their arrays and what makes their plans."""
    log, prepare = [], Operation.prepare

    def spy(self, arrays, options, make):
        log.append((self, arrays, make))
        return prepare(self, arrays, options, make)

    monkeypatch.setattr(Operation, "prepare", spy)
    return log


@pytest.mark.parametrize("operation", CALLS)
def test_arrays_are_passed_in_the_order_of_the_declaration(device, prepared, operation):
    call = CALLS[operation](device)
    getattr(kv, operation)(**call)
    passed = arrays_of(call)
    assert prepared
    for declared, arrays, _ in prepared:
        by_name = dict(zip(declared.names, arrays, strict=True))
        own = {name: array for name, array in passed.items() if name in by_name}
        assert [name for name, array in own.items() if by_name[name] is not array] == []
        assert len(own) >= 3


@pytest.mark.parametrize("operation", CALLS)
def test_a_plan_takes_the_arguments_by_their_names(device, prepared, operation):
    getattr(kv, operation)(**CALLS[operation](device))
    for declared, _, make in prepared:
        parameters = inspect.signature(make).parameters.values()
        named = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        assert named and named <= set(declared.names)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            assert named == set(declared.names)
