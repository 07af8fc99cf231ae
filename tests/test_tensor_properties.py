"""Properties of torch tensors with which memory does not hold the values: refused on every call."""

from __future__ import annotations

import re

import numpy as np
import pytest
import valid_calls

import kvcupy as kv
from kvcupy.arrays.views import TENSOR_PROPERTIES
from kvcupy.ops.spec import OPERATIONS

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, on prototypes


def fake(x):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(x.shape, dtype=x.dtype)


def freed(x):
    x = torch.cat([x, x])[len(x) :]  # at an offset
    x.untyped_storage().resize_(0)
    return x


def quantized(x):
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)


# One or more tensors that have each property, made from a plain one.
MAKERS = {
    "fake": [fake],
    "uninitialized": [lambda x: torch.nn.UninitializedParameter(requires_grad=False)],
    "nested": [
        lambda x: torch.nested.nested_tensor(list(x)),
        lambda x: torch.nested.nested_tensor([x], layout=torch.jagged),
    ],
    "meta": [lambda x: x.to("meta")],
    "device": [],  # none that is always there
    "sparse": [lambda x: x.to_sparse(), lambda x: x.float().to_mkldnn()],
    "memory": [
        freed, torch._to_functional_tensor,
        lambda x: torch._efficientzerotensor(tuple(x.shape), dtype=x.dtype),
        lambda x: torch._efficientzerotensor((2, *x.shape), dtype=x.dtype)[1],
    ],
    "quantized": [quantized],
    "conjugate": [lambda x: x.to(torch.complex64).conj()],
    "negative": [torch._neg_view, lambda x: torch.complex(x.double(), -x.double()).conj().imag],
}  # fmt: skip
PAIRS = [(name, make) for name, makers in MAKERS.items() for make in makers]
IDS = [f"{name}{i}" for name, makers in MAKERS.items() for i in range(len(makers))]


def tensors(call):
    from kvcupy.interop.torch import as_tensor

    return {n: as_tensor(x).clone() if hasattr(x, "shape") else x for n, x in call.items()}


def unchanged(call, before):
    return all(torch.equal(call[n], x) for n, x in before.items())


def said_of(name):
    """The pattern of the message of a property."""
    return ".+".join(map(re.escape, re.split(r"\{[^}]*\}", TENSOR_PROPERTIES[name][1])))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("name", "make"), PAIRS, ids=IDS)
def test_calls_refuse_it_first_and_later(operation, name, make):
    """Each argument, before the signature is known and after one and two calls of it."""
    declaration = OPERATIONS[operation]
    call = tensors(valid_calls.example(declaration, kv.device("host")))
    arrays = {n: x for n, x in call.items() if isinstance(x, torch.Tensor)}
    kv.ops.call.forget()
    for _ in range(3):
        before = {n: x.clone() for n, x in arrays.items()}
        for argument, x in arrays.items():
            if name == "negative" and x.dtype in (torch.uint8, torch.bool):
                continue
            match = rf"^{argument}(\[0\])?: expected an array, got {said_of(name)}$"
            with pytest.raises(TypeError, match=match):
                declaration.function(**{**call, argument: make(x)})
        assert unchanged(call, before)
        declaration.function(**call)


@pytest.mark.parametrize("operation", ["store_kv", "gather_kv", "merge_states", "apply_rope"])
@pytest.mark.parametrize(("name", "make"), PAIRS, ids=IDS)
def test_a_graph_refuses_it_or_computes_right(operation, name, make):
    """As torch's operator; torch itself refuses some, or makes the values of others."""
    import kvcupy.interop.torch as interop

    function = getattr(interop, operation)
    call = tensors(valid_calls.example(OPERATIONS[operation], kv.device("host"), "fp32"))
    call = {n: x for n, x in call.items() if "scale" not in n}
    function(**call)
    for argument, x in call.items():
        before = {n: x.clone() for n, x in call.items()}
        other = make(x)
        try:
            result = function(**{**call, argument: other})
        except Exception as error:
            assert "got None" not in str(error)
            if name in ("nested", "sparse", "quantized", "conjugate", "negative"):
                assert type(error) is TypeError and str(error).startswith(f"{argument}: "), error
            assert unchanged(call, before)
            continue
        if name == "memory":  # torch has made zeros of it
            wanted = function(**{**before, argument: torch.zeros_like(x)})
            torch.testing.assert_close(result, wanted)
        else:
            assert name in ("fake", "meta")  # what traces


@pytest.mark.parametrize(("name", "make"), PAIRS, ids=IDS)
def test_steps_of_a_cache_refuse_it(name, make):
    cache = kv.PagedKVCache(
        num_layers=1, num_q_heads=2, num_kv_heads=2, head_dim=8, num_pages=8, page_size=4,
        dtype="fp32", device="host",
    )  # fmt: skip
    cache.add_sequence(0)
    rows = {n: torch.ones(1, 2, 8) for n in ("query", "key", "value", "out")}
    with cache.forward([0], [1]):
        stored = cache.pool.k(0).copy()
        for argument in rows:
            other = make(rows[argument])
            with pytest.raises((TypeError, ValueError), match=rf"^{argument}: expected"):
                cache.attention(0, **{**rows, argument: other})
        with pytest.raises((TypeError, ValueError), match=r"^qkv: expected"):
            cache.attention_qkv(0, make(torch.ones(1, 6, 8)))
        np.testing.assert_array_equal(cache.pool.k(0), stored)
        cache.attention(0, **rows)
