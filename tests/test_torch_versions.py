"""What kvcupy writes in torch tensors counts as a change in place, as torch's own operations do."""

from __future__ import annotations

import pytest
import valid_calls

import kvcupy as kv
from kvcupy.ops.spec import OPERATIONS

torch = pytest.importorskip("torch")

SLOTS = torch.tensor([1, 3])


def tensors(call):
    """Return a call's arrays as tensors with separate memory."""
    from kvcupy.interop.torch import as_tensor

    return {n: as_tensor(x).clone() if hasattr(x, "shape") else x for n, x in call.items()}


def version(*tensors):
    return [t._version for t in tensors]


def raised(before, *tensors):
    """Which of the tensors have changed since."""
    return [now > then for now, then in zip(version(*tensors), before, strict=True)]


def test_backward_notices_what_was_rotated():
    """As with `q.mul_`: what the graph has saved is there no more."""
    table = kv.rope_table(16, 8, device="host")
    weight = torch.ones(1, 2, 8, requires_grad=True)
    query = weight * torch.arange(16.0).view(1, 2, 8)
    loss = (query * query).sum()
    with torch.no_grad():
        kv.apply_rope(query, torch.ones(1, 2, 8), torch.from_numpy(table), torch.tensor([3]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_an_operation_writes(name):
    """Counted for the arguments that its declaration says are written, and for no other."""
    declaration = OPERATIONS[name]
    call = tensors(valid_calls.example(declaration, kv.device("host")))
    arrays = {n: x for n, x in call.items() if isinstance(x, torch.Tensor)}
    before = version(*arrays.values())
    declaration.function(**call)
    changed = raised(before, *arrays.values())
    written = {n for n in declaration.written(call) if n in arrays}
    assert {n for n, rose in zip(arrays, changed, strict=True) if rose} == written


def test_other_writes():
    k, v, rows = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8), torch.ones(2, 2, 8)
    tagged = kv.view_as(k, "fp32")[:]
    for call, written in (
        (lambda: kv.device("host").copy(k, v), [k]),
        (lambda: kv.store_kv(rows, rows, tagged, v, SLOTS), [k, v]),
        (lambda: kv.copy_pages((k, v), torch.tensor([0]), torch.tensor([2])), [k, v]),
    ):
        before = version(*written, rows)
        call()
        assert raised(before, *written, rows) == [True] * len(written) + [False]


def test_a_call_that_raises_counts_as_nothing():
    k, v = torch.zeros(4, 2, 8), torch.zeros(4, 2, 8)
    before = version(k, v)
    with pytest.raises(ValueError, match="value"):
        kv.store_kv(torch.ones(2, 2, 8), torch.ones(2, 3, 8), k, v, SLOTS)
    kv.store_kv(torch.ones(0, 2, 8), torch.ones(0, 2, 8), k, v, SLOTS[:0])
    assert version(k, v) == before
