"""Every operation on a stream, in a graph, and with arrays of torch, from its declaration."""

from __future__ import annotations

from typing import Any

import every_call
import numpy as np
import pytest
from stream_cases import delay

import kvcupy as kv
from kvcupy.ops.spec import OPERATIONS

operations = pytest.mark.parametrize("operation", every_call.CALLS)


def valid_call(device: Any, operation: str) -> dict[str, Any]:
    """Return a call whose outputs hold numbers that no operation leaves there."""
    call = every_call.CALLS[operation](device)
    for argument in OPERATIONS[operation].caller_outputs:
        if argument.name in call:
            call[argument.name][...] = 77
    return call


def inputs_of(call: dict[str, Any], operation: str) -> list[str]:
    """Return the arrays of numbers and indices that a call only reads, but for scales and sums."""
    written = set(OPERATIONS[operation].written(call))
    return [
        name for name, array in call.items()
        if name not in written and hasattr(array, "shape") and "scale" not in name
        and name != "cu_query_lens" and array.dtype in (np.float32, np.int32, np.int64)
    ]  # fmt: skip


def bits(device: Any, call: dict[str, Any]) -> dict[str, bytes]:
    device.synchronize()
    return {n: device.to_numpy(a).tobytes() for n, a in call.items() if hasattr(a, "shape")}


def outcome(device: Any, operation: str, **more: Any) -> dict[str, bytes]:
    """Return the bytes of a call's arrays after it, with other numbers where it has any."""
    call = valid_call(device, operation)
    for name in inputs_of(call, operation):
        call[name][...] = call[name][::-1].copy()
    device.synchronize()
    getattr(kv, operation)(**call, **more)
    return bits(device, call)


@operations
def test_a_stream_keeps_the_order_of_a_slow_producer(device, operation):
    """What the stream writes late is what the operation reads."""
    want = outcome(device, operation)
    call, stream = valid_call(device, operation), device.stream()
    late = {name: call[name][::-1].copy() for name in inputs_of(call, operation)}
    device.synchronize()
    delay(stream)
    for name, array in late.items():
        device.copy(call[name], array, stream=stream)
    getattr(kv, operation)(**call, stream=stream)
    stream.synchronize()
    assert bits(device, call) == want


@operations
def test_a_captured_call_runs_at_replay(device, operation):
    """It reads its arrays then; captured, nothing runs, and a refused call leaves nothing."""
    want = outcome(device, operation)
    call, stream = valid_call(device, operation), device.stream()
    device.synchronize()
    before = bits(device, call)
    with stream.capture() as graph:
        with pytest.raises((TypeError, ValueError)):
            getattr(kv, operation)(**call | {next(iter(call)): 1.5}, stream=stream)
        getattr(kv, operation)(**call, stream=stream)
    assert bits(device, call) == before != want
    for name in inputs_of(call, operation):
        call[name][...] = call[name][::-1].copy()
    start = {name: array.copy() for name, array in call.items() if hasattr(array, "shape")}
    for _ in range(2):
        for name, array in start.items():
            device.copy(call[name], array)
        device.synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert bits(device, call) == want
    kv.check_faults(device)


@pytest.mark.parametrize("fmt", ["int8", "fp8_e4m3", "bf16"])
@operations
def test_tensors_of_torch(device, operation, fmt):
    """With the bytes of the same call with this device's arrays; new outputs are tensors too."""
    torch = pytest.importorskip("torch")
    from kvcupy.interop.torch import as_tensor

    if device.kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    declaration = OPERATIONS[operation]
    plain, call = (
        {
            name: value
            for name, value in every_call.example(declaration, device, fmt).items()
            if fmt != "bf16" or "scale" not in name
        }
        for _ in range(2)
    )
    tensors = {n: as_tensor(a) if hasattr(a, "shape") else a for n, a in call.items()}
    for outputs in ((), {a.name for a in declaration.arguments if a.returned}):
        for each in (plain, call, tensors):
            for name in outputs:
                each.pop(name, None)
        device.synchronize()
        want = getattr(kv, operation)(**plain)
        got = getattr(kv, operation)(**tensors)
        assert bits(device, call) == bits(device, plain)
        for made, expected in zip(results_of(got), results_of(want), strict=True):
            assert isinstance(made, torch.Tensor)
            assert device.to_numpy(made).tobytes() == device.to_numpy(expected).tobytes()
    kv.check_faults(device)


def results_of(returned: Any) -> tuple[Any, ...]:
    if returned is None:
        return ()
    return returned if isinstance(returned, tuple) else (returned,)
