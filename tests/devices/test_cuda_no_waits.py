"""No operation makes the host wait, or a stream that the call does not name."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from functools import partial

import numpy as np
import pytest
from valid_calls import EXAMPLES, indices

import kvcupy as kv
from kvcupy.ops.spec import OPERATIONS

BLOCKING = (
    "streamSynchronize", "deviceSynchronize", "eventSynchronize", "memcpy", "memset", "malloc",
    "free", "hostRegister", "hostUnregister", "freeHost", "memGetInfo",
)  # fmt: skip
READS_ON_THE_HOST = {"slot_mapping"}  # without its output, whose length it has to know


@pytest.fixture
def device(device_of_kernels):
    return device_of_kernels


def split_attention(device):
    """A call of `paged_attention` with a workspace."""
    cache = device.zeros((64, 16, 1, 64), "fp16")
    return {
        "query": device.zeros((1, 4, 64), "fp16"), "k_cache": cache, "v_cache": cache,
        "block_table": device.zeros((1, 64), "int32"),
        "seq_lens": device.asarray(np.array([1000], np.int32)),
        "out": device.zeros((1, 4, 64), "fp16"),
    }  # fmt: skip


def transfer_pages(device, **options):
    near = kv.KVPool(4, 2, 2, 1, 8, device=device)
    far = kv.KVPool(4, 2, 2, 1, 8, layout="page_first", placement="pinned", device=device)
    lists = {"src_pages": [0, 2], "dst_pages": [1, 3]}
    return {"src_pool": near, "dst_pool": far, **lists, **options}


CALLS = {
    **EXAMPLES,
    "paged_attention, split": split_attention,
    **{
        f"transfer_pages, {method}": lambda device, method=method: transfer_pages(
            device, method=method
        )
        for method in ("kernel", "copy", "staged")
    },
}  # fmt: skip


def operation_of(name):
    return getattr(kv, name.partition(",")[0])


def without_outputs(name, arguments):
    """Return the arguments without the outputs that the call allocates where they are None."""
    returned = {a.name for a in OPERATIONS[name.partition(",")[0]].arguments if a.returned}
    return {n: value for n, value in arguments.items() if n not in returned}


@pytest.fixture
def blocked(api, monkeypatch):
    """The calls that may make the host wait, as they are made."""
    made = []

    def watch(name):
        original = getattr(api.runtime, name)

        def call(*arguments):
            made.append(name)
            return original(*arguments)

        monkeypatch.setattr(api.runtime, name, call)

    for name in BLOCKING:
        if hasattr(api.runtime, name):
            watch(name)
    return made


ALLOCATING = [name for name in CALLS if "out" in str(inspect.signature(operation_of(name)))]
CASES = [
    (name, how, allocates)
    for name in CALLS
    for how in ("current stream", "stream")
    for allocates in (False, True)
    if not allocates or (name in ALLOCATING and name not in READS_ON_THE_HOST)
]


@pytest.mark.parametrize(("name", "how", "allocates"), CASES)
def test_a_warm_call_waits_for_nothing(api, device, blocked, name, how, allocates):
    arguments = CALLS[name](device)
    if allocates:
        arguments = without_outputs(name, arguments)
    operation, home, stream = operation_of(name), device.stream(), device.stream()
    api.currents[0] = home.cupy
    options = {} if how == "current stream" else {"stream": stream}
    call = partial(operation, **arguments, **options)
    on = home if how == "current stream" else stream
    call()  # loads kernels, and makes memory that later calls use again
    call()
    device.synchronize()
    blocked.clear()
    api.runtime.log.clear()
    launches = len(api.driver.launches)
    kept = [call(), call()]
    assert blocked == []
    used = {entry[1] for entry in api.runtime.log if entry[0] in ("wait", "synchronize")}
    used |= {entry[2] for entry in api.runtime.log if entry[0] in ("record", "memset", "copy")}
    used |= {launch[3] for launch in api.driver.launches[launches:]}
    assert used == {on.pointer}
    device.synchronize()
    del kept


def ragged_attention(device):
    return EXAMPLES["paged_attention"](device) | {"query_lens": indices(device, 1, 1)}


@pytest.mark.parametrize("freed_on", ["current stream", "stream"])
@pytest.mark.parametrize("stream_is", ["current stream", "stream"])
def test_what_is_allocated_is_zeroed_after_what_still_uses_its_memory(
    api, device, freed_on, stream_is
):
    streams = {"current stream": device.stream(), "stream": device.stream()}
    api.currents[0] = streams["current stream"].cupy
    arguments = without_outputs("paged_attention", ragged_attention(device))
    query = arguments["query"]
    with streams[freed_on].cupy:
        array = device.empty(query.shape, query.dtype)
        array.fill(7)  # late
        del array
    output = kv.paged_attention(**arguments, stream=streams[stream_is])
    api.machine.progress(streams[stream_is].pointer)
    assert not output._bytes.any()
    device.synchronize()
    assert not output._bytes.any()


def test_a_warm_step_of_a_paged_cache_waits_for_nothing(api, device, blocked, monkeypatch):
    """But for the upload of the step before the last, as its tables lie in a ring: done here."""
    shape = {"num_layers": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    cache = kv.PagedKVCache(**shape, num_pages=16, page_size=16, device=device)
    queries, rows = device.zeros((1, 4, 64), "bf16"), device.zeros((1, 2, 64), "bf16")
    stream = device.stream()
    cache.add_sequence("a")

    def step():
        with cache.forward(["a"], [1]):
            return [cache.attention(i, queries, rows, rows, stream=stream) for i in range(2)]

    for _ in range(4):
        step()
        device.synchronize()
    blocked.clear()
    query, waits = api.runtime.eventQuery, []
    monkeypatch.setattr(api.runtime, "eventSynchronize", lambda event: waits.append(query(event)))
    kept = step()
    assert blocked == []
    assert set(waits) <= {0}, "events that had not passed"
    device.synchronize()
    del kept


@pytest.mark.parametrize("layers", [None, [0]])
def test_a_warm_transfer_of_lists_asks_cuda_little(api, device, monkeypatch, layers):
    """One copy of both lists, a launch, and one event with which everything is released."""
    stream = device.stream()
    call = partial(
        kv.transfer_pages, **transfer_pages(device, method="kernel", layers=layers), stream=stream
    )
    for _ in range(2):
        call()
        stream.synchronize()
    counts, runtime = Counter(), api.runtime

    def count(name):
        genuine = getattr(runtime, name)

        def counted(*arguments):
            counts[name] += 1
            return genuine(*arguments)

        monkeypatch.setattr(runtime, name, counted)

    for name in ("streamIsCapturing", "eventQuery", "pointerGetAttributes"):
        count(name)
    del runtime.log[:], api.driver.launches[:]
    call()
    assert [entry[0] for entry in runtime.log] == ["copy", "record"]
    assert len(api.driver.launches) == 1
    assert counts["streamIsCapturing"] <= 3, counts
    assert counts["eventQuery"] == counts["pointerGetAttributes"] == 0, counts


def test_what_a_capture_allocates_lives_as_long_as_its_graph(api, device):
    """Replays zero it, although the call that allocated it may have failed then."""
    stream = device.stream()
    with stream.capture() as graph:
        lost = weakref.ref(device.allocate((64,), "fp32", stream, zeroed=True))
    assert lost() is not None
    graph.launch(stream)
    device.synchronize()
    del graph
    assert lost() is None
