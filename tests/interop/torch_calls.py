"""A call of every operator of `torch.ops.kvcupy`, with tensors on the device of the run."""

from __future__ import annotations

from typing import Any

import torch
import valid_calls

import kvcupy.interop.torch as kvt
from kvcupy.interop.torch import OPERATORS, Operator

Call = dict[str, Any]

NAMES = tuple(each.name for each in OPERATORS)


def tensors(call: Call) -> Call:
    """Return a call's arrays as tensors, each with separate memory."""
    return {n: kvt.as_tensor(x).clone() if hasattr(x, "shape") else x for n, x in call.items()}


def without(call: Call, *names: str) -> Call:
    return {name: x for name, x in call.items() if name not in names}


def zeros(call: Call, **like: str) -> Call:
    """Return a call with outputs like some of its arguments."""
    return {**call, **{name: torch.zeros_like(call[other]) for name, other in like.items()}}


def make_calls(device: Any) -> dict[str, Call]:
    """Return a call of the public function that comes to each operator, by the operator's name."""
    return {each.name: copied(call_of(each, device)) for each in OPERATORS}


def call_of(operator: Operator, device: Any) -> Call:
    declaration = operator.declaration
    call = tensors(valid_calls.example(declaration, device))
    replaced = declaration.replaced
    left_out = {a.name for a in (*declaration.caller_outputs, *replaced.values())}
    call = without(call, *left_out - set(operator.outputs)) | operator.constants
    return zeros(call, **{
        output.name: name for name, output in replaced.items() if output.name in operator.outputs
    })  # fmt: skip


def function_of(name: str) -> str:
    """Return the name of the public function that an operator belongs to."""
    (operator,) = (each for each in OPERATORS if each.name == name)
    return operator.declaration.name


def copied(call: Call) -> Call:
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in call.items()}


def operands(name: str, call: Call) -> tuple[tuple[Any, ...], Call]:
    """Return what an operator takes for a call: positional arguments, and outputs."""
    (operator,) = (each for each in OPERATORS if each.name == name)
    values = without(call, "write_key")
    for several in operator.declaration.several:
        if several in values:
            values[several] = [values[several]]
    schema = getattr(torch.ops.kvcupy, name).default._schema
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    positional = tuple(values.get(n, defaults.get(n)) for n in operator.names)
    return positional, without(values, *operator.names)


def leaves(result: Any) -> list[Any]:
    """Return the tensors of a result."""
    if result is None:
        return []
    return list(result) if isinstance(result, (list, tuple)) else [result]


def assert_same(got: Call, want: Call) -> None:
    """Compare the bits of all tensors of two calls."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        if isinstance(x, torch.Tensor):
            assert_bits(x, want[name], name)


def assert_bits(got: Any, want: Any, what: str) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    bits = [x.detach().cpu().contiguous().view(torch.uint8) for x in (got, want)]
    assert torch.equal(*bits), f"{what}\ngot  {got}\nwant {want}"
