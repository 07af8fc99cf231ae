"""`arrays.Prober`: what it has learnt saves time, and changes nothing of what a probe says."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import arrays
from kvcupy.arrays import Prober, probe_arguments

torch = pytest.importorskip("torch")


def arguments():
    """Return tensors, one of them twice, and None between them."""
    rows = torch.arange(16.0).reshape(2, 2, 4)
    return [rows, None, torch.zeros(3, dtype=torch.int64), None, torch.ones(2, 4), rows]


def learnt(example=None):
    prober, example = Prober(), tuple(arguments() if example is None else example)
    signatures = prober.probe(example)[1]
    prober.learn(example, signatures)
    assert prober.probe is not probe_arguments
    return prober, signatures


def test_arguments_like_those_are_not_read_again(monkeypatch):
    prober, signatures = learnt()
    like = tuple(arguments())
    expected = probe_arguments(like)
    monkeypatch.setattr(arrays, "probe_arguments", lambda *_: pytest.fail("read again"))
    pointers, same = prober.probe(like)
    assert (pointers, same) == expected and same is signatures


CHANGES = {
    "format": lambda a: a.__setitem__(4, a[4].half()),
    "shape": lambda a: a.__setitem__(4, a[4][:1]),
    "strides": lambda a: a.__setitem__(4, torch.ones(4, 2).T),
    "twice no more": lambda a: a.__setitem__(5, a[0].clone()),
    "twice, another": lambda a: a.__setitem__(4, a[0]),
    "None for a tensor": lambda a: a.__setitem__(4, None),
    "a tensor for None": lambda a: a.__setitem__(1, torch.ones(2)),
    "a number for None": lambda a: a.__setitem__(1, 0.5),
    "an array for None": lambda a: a.__setitem__(1, np.ones(2)),
    "an empty array for None": lambda a: a.__setitem__(1, np.ones(0)),
    "an array for a tensor": lambda a: a.__setitem__(4, a[4].numpy()),
    "a view for a tensor": lambda a: a.__setitem__(4, kv.view_as(a[2].int(), "fp32")),
    "a parameter": lambda a: a.__setitem__(4, torch.nn.Parameter(a[4], requires_grad=False)),
    "empty": lambda a: a.__setitem__(4, torch.ones(0, 4)),
    # In place: the very objects that the prober has seen, at the addresses where they were.
    "transposed in place": lambda a: a[0].transpose_(1, 2),
    "squeezed in place": lambda a: a[2].unsqueeze_(0),
    "shortened in place": lambda a: a[4].resize_(1, 4),
    "other strides in place": lambda a: a[4].as_strided_((2, 4), (0, 1)),
    "another format in place": lambda a: setattr(a[4], "data", a[4].data.view(torch.int32)),
    "other memory in place": lambda a: a[4].set_(torch.zeros(2, 4)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", ["plain", "inference"])
def test_what_has_changed_is_seen(change, mode):
    with torch.inference_mode(mode == "inference"):
        seen = arguments()
        prober, _ = learnt(seen)
        assert prober.probe(tuple(seen)) == probe_arguments(tuple(seen))
        CHANGES[change](seen)
        assert prober.probe(tuple(seen)) == probe_arguments(tuple(seen))


REFUSED = {
    "a gradient": lambda a: a[4].requires_grad_(),
    "a leaf": lambda a: a.__setitem__(4, a[4].clone().requires_grad_()),
    "no memory any more": lambda a: a[4].untyped_storage().resize_(0),
    "a meta tensor": lambda a: a.__setitem__(4, a[4].to("meta")),
    "a sparse tensor": lambda a: a.__setitem__(4, a[4].to_sparse()),
    "no array": lambda a: a.__setitem__(4, [1, 2]),
    "no array for None": lambda a: a.__setitem__(1, "none"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_has_become_illegal_is_refused(change):
    seen = arguments()
    prober, _ = learnt(seen)
    REFUSED[change](seen)
    with pytest.raises(TypeError):
        prober.probe(tuple(seen))


def test_a_tensor_that_needs_a_gradient_is_not_learnt():
    """Whether it is refused depends on the thread, not on the tensor."""
    prober, example = Prober(), (torch.ones(2, requires_grad=True),)
    with torch.no_grad():
        prober.learn(example, prober.probe(example)[1])
        assert prober.probe is probe_arguments
    with pytest.raises(TypeError, match="gradient"):
        prober.probe(example)


def test_nothing_is_kept_alive():
    seen = arguments()
    prober, _ = learnt(seen)
    prober.probe(tuple(seen))
    alive = [weakref.ref(x) for x in seen if x is not None]
    del seen
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


@pytest.mark.parametrize("missing", [AttributeError, TypeError, RuntimeError])
def test_without_guards_every_call_is_read(monkeypatch, missing):
    """torch's guards belong to no public interface: a version may not have them."""

    def refuse(*_, **__):
        raise missing("not in this version")

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", refuse)
    arrays._tensor_guards.cache_clear()
    try:
        prober, example = Prober(), tuple(arguments())
        prober.learn(example, prober.probe(example)[1])
        assert prober.probe is probe_arguments
    finally:
        arrays._tensor_guards.cache_clear()


def test_guards_that_overlook_something_are_not_used(monkeypatch):
    class Careless:
        def __init__(self, *tensors, **_):
            self.shapes = [x.shape for x in tensors]

        def check(self, *tensors):
            return [x.shape for x in tensors] == self.shapes

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Careless)
    arrays._tensor_guards.cache_clear()
    try:
        assert arrays._tensor_guards() is None
    finally:
        arrays._tensor_guards.cache_clear()


def test_operations_learn_and_see_changes(lenient_host):
    """Calls of one signature teach it; a transposed array is then another signature."""
    key = torch.arange(8.0).reshape(1, 2, 4)
    cache, slots = torch.zeros(4, 2, 4), torch.tensor([1])
    for _ in range(5):
        kv.store_kv(key, key, cache, torch.zeros(4, 2, 4), slots)
    assert torch.equal(cache[1], key[0])
    key.transpose_(1, 2)
    with pytest.raises(ValueError, match="key"):
        kv.store_kv(key, key, cache, torch.zeros(4, 2, 4), slots)
    key.transpose_(1, 2)
    kv.store_kv(key, key, cache, torch.zeros(4, 2, 4), torch.tensor([2]))
    assert torch.equal(cache[2], key[0])
    prepared = kv.bind(kv.store_kv, kv.vary(key), key, cache, torch.zeros(4, 2, 4), slots)
    for factor in (2, 3, 4):
        prepared(key=factor * key)
    assert torch.equal(cache[1], 4 * key[0])
    with pytest.raises(ValueError, match="key"):
        prepared(key=torch.zeros(1, 4, 2).transpose(1, 2)[:, :1])
