"""Bound calls do what the operation does, whichever of its arguments vary."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import numpy as np
import pytest
from every_call import (
    CALLS,
    array,
    arrays_of,
    gather_kv,
    merge_states,
    paged_attention,
    rope_store_kv,
    store_kv,
)
from stream_cases import Log

import kvcupy as kv
from kvcupy import devices, observe
from kvcupy.devices import cxx
from kvcupy.devices.host import HostDevice
from kvcupy.ops import call as op_call


def without(make, *names):
    """Leave outputs to the call."""
    return lambda device: {n: value for n, value in make(device).items() if n not in names}


def two_streams(device):
    return {**rope_store_kv(device), "stream": device.stream(), "alt_stream": device.stream()}


def pages_of_layers(device):
    call = CALLS["copy_pages"](device)
    return {**call, "cache": [call["cache"], call["cache"].copy()]}


def pages_of_a_pool(device):
    call, pool = CALLS["shift_pages"](device), kv.KVPool(4, 4, 2, 2, 8, dtype="fp32", device=device)
    device.copy(pool.k(1), array(device, 4, 4, 2, 8))
    return {**call, "pool": pool}


def two_states(device):
    call = CALLS["store_state"](device)
    return {**call, **{n: [call[n], call[n][:, :1].copy()] for n in ("states", "caches")}}


def two_gathered(device):
    call = CALLS["gather_state"](device)
    return {**call, **{n: (call[n], call[n][:, :1].copy()) for n in ("caches", "out")}}


def tables(device):
    call = CALLS["slot_mapping"](device)
    return {name: call[name] for name in ("block_table", "seq_lens", "page_size")}


def duplicates(device):
    return {"slot_mapping": device.asarray(np.array([4, 1, 4, -1]))}


def pools(device):
    src, dst = (kv.KVPool(4, 2, 2, 2, 8, dtype="fp32", device=device) for _ in "sd")
    values = np.random.default_rng(5).standard_normal(src.k(0).shape).astype(np.float32)
    device.copy(src.k(0), device.asarray(values))
    pages = {
        n: device.asarray(np.array(p)) for n, p in (("src_pages", [0, 3]), ("dst_pages", [2, 1]))
    }
    return {"src_pool": src, "dst_pool": dst, **pages}


BOUND = {
    **{name: (getattr(kv, name), make) for name, make in CALLS.items()},
    "gather_kv, allocating": (kv.gather_kv, without(gather_kv, "k_out", "v_out")),
    "paged_attention, allocating": (kv.paged_attention, without(paged_attention, "out")),
    "merge_states, allocating": (kv.merge_states, without(merge_states, "out", "lse_out")),
    "store_state of two": (kv.store_state, two_states),
    "gather_state of two": (kv.gather_state, two_gathered),
    "gather_state, allocating": (kv.gather_state, without(CALLS["gather_state"], "out")),
    "gather_state of two, allocating": (kv.gather_state, without(two_gathered, "out")),
    "slot_mapping, allocating": (kv.slot_mapping, without(CALLS["slot_mapping"], "out")),
    "rope_store_kv, in place": (kv.rope_store_kv, without(rope_store_kv, "query_out")),
    "rope_store_kv, two streams": (kv.rope_store_kv, two_streams),
    "copy_pages of layers": (kv.copy_pages, pages_of_layers),
    "shift_pages of a pool": (kv.shift_pages, pages_of_a_pool),
    "page_table_csr": (kv.page_table_csr, tables),
    "find_duplicate_slots": (kv.find_duplicate_slots, duplicates),
    "transfer_pages": (kv.transfer_pages, pools),
}


def parts_of(value):
    """Return the arrays of an argument or a result."""
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in parts_of(item)]
    if hasattr(value, "parts"):
        return list(value.parts)
    return [value] if hasattr(value, "shape") else []


def bits(device, *values):
    device.synchronize()
    return [device.to_numpy(part).tobytes() for value in values for part in parts_of(value)]


def outcome(device, call, result):
    return bits(device, *call.values(), result)


def bound(operation, fixed, examples, names):
    """Bind an operation; arguments that vary come from `examples`."""
    return kv.bind(operation, **{n: kv.vary(examples[n]) if n in names else x
                                 for n, x in fixed.items()})  # fmt: skip


CASES = [
    (name, names)
    for name, (_, make) in BOUND.items()
    for arrays in [list(arrays_of(make(kv.device("host"))))]
    for names in [(), *((array,) for array in arrays), tuple(arrays)]
]


def name_varying(value):
    return value if isinstance(value, str) else " ".join(value) or "nothing varies"


@pytest.mark.parametrize(("name", "names"), CASES, ids=name_varying)
def test_a_bound_call_does_what_the_operation_does(device, name, names):
    """Fixed arguments and those that vary, at other addresses than the examples; twice."""
    operation, make = BOUND[name]
    expected = make(device)
    device.synchronize()
    expected = outcome(device, expected, operation(**expected))
    examples = make(device)
    untouched = bits(device, *examples.values())
    call = make(device)
    device.synchronize()
    prepared = bound(operation, call, examples, names)
    own = {n: call[n] for n in names}
    assert outcome(device, call, prepared(**own)) == expected
    assert bits(device, *examples.values()) == untouched

    later = {**call, **{n: x for n, x in make(device).items() if n in names}}
    device.synchronize()
    twice = make(device)
    for n, x in call.items():
        if n not in names:
            for part, source in zip(parts_of(twice[n]), parts_of(x), strict=True):
                device.copy(part, source)
    device.synchronize()
    expected = outcome(device, twice, operation(**twice))
    assert outcome(device, later, prepared(**{n: later[n] for n in names})) == expected


@pytest.mark.parametrize("name", [n for n, (_, make) in BOUND.items() if n in CALLS])
def test_streams_are_fixed_or_vary(device, name):
    operation, make = BOUND[name]
    expected = make(device)
    device.synchronize()
    expected = outcome(device, expected, operation(**expected))
    main, other = device.stream(), device.stream()
    for given, passed in ((main, {}), (kv.vary(None), {"stream": other}),
                          (kv.vary(main), {"stream": None})):  # fmt: skip
        call = make(device)
        device.synchronize()
        with observe.attached(Log()) as log:
            result = kv.bind(operation, **call, stream=given)(**passed)
        stream = device.as_stream(passed.get("stream", given), "numpy")
        assert [(o.name, o.stream) for o in log.operations] == [(name, stream)]
        assert outcome(device, call, result) == expected


@pytest.mark.parametrize("varying", [("stream",), ("alt_stream",), ("stream", "alt_stream")])
def test_both_streams_of_a_rotation_vary(device, varying):
    expected = rope_store_kv(device)
    device.synchronize()
    expected = outcome(device, expected, kv.rope_store_kv(**expected))
    fixed = {"stream": device.stream(), "alt_stream": device.stream()}
    passed = {name: device.stream() for name in varying}
    call = rope_store_kv(device)
    device.synchronize()
    streams = {n: kv.vary(s) if n in varying else s for n, s in fixed.items()}
    prepared = kv.bind(kv.rope_store_kv, **call, **streams)
    with observe.attached(Log()) as log:
        prepared(**passed)
    main, other = (fixed | passed).values()
    assert [o.stream for o in log.operations] == [main, main, other]
    assert outcome(device, call, None) == expected


@pytest.mark.parametrize("name", CALLS)
def test_announced_as_the_operation_is(device, name):
    operation, make = BOUND[name]
    call = make(device)
    device.synchronize()
    names = tuple(arrays_of(call))
    prepared = bound(operation, call, call, names)
    logs = []
    for issue in (operation, lambda **c: prepared(**{n: c[n] for n in names})):
        with observe.attached(Log()) as log:
            issue(**call)
        logs.append([
            (o.name, o.stream, [[(a.view.pointer, a.view.shape, a.slots is None) for a in accesses]
                                for accesses in (o.reads, o.writes)])
            for o in log.operations
        ])  # fmt: skip
    device.synchronize()
    assert logs[0] == logs[1] and len(logs[0]) == 1


@pytest.mark.parametrize("name", [n for n in CALLS if n != "find_duplicate_slots"])
def test_bound_calls_are_captured(device, name):
    operation, make = BOUND[name]
    expected = make(device)
    device.synchronize()
    expected = outcome(device, expected, operation(**expected))
    stream, call = device.stream(), make(device)
    before = bits(device, *call.values())
    names = tuple(arrays_of(call))
    prepared = bound(operation, {**call, "stream": stream}, call, names)
    with stream.capture() as graph:
        result = prepared(**{n: call[n] for n in names})
    assert bits(device, *call.values()) == before
    graph.launch(stream)
    assert outcome(device, call, result) == expected


# What varies is checked ----------------------------------------------------------------------


def shorter(device, x):
    return x[..., :-1]


def spread_out(device, x):
    wide = device.zeros((*x.shape, 2), x.dtype)[..., 0]
    wide[...] = x
    return wide


def elsewhere(device, x):
    v = kv.arrays.view(x)
    return kv.ArrayView(v.pointer, v.shape, v.strides, v.format, "cuda:7", owner=x)


def other_format(device, x):
    return device.zeros(x.shape, np.float64)


def absent(device, x):
    return None


def number(device, x):
    return 0.5


@pytest.mark.parametrize("change", [shorter, spread_out, elsewhere, other_format, absent, number])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_like_the_example_is_refused(device, name, change):
    operation, make = BOUND[name]
    call = make(device)
    names = tuple(arrays_of(call))
    prepared = bound(operation, call, call, names)
    before = bits(device, *call.values())
    for changed in names:
        if change is spread_out and call[changed].size == 1:
            continue  # which has no strides
        own = {n: call[n] for n in names}
        own[changed] = change(device, own[changed])
        with pytest.raises((TypeError, ValueError), match=f"^{changed}: expected "):
            prepared(**own)
    assert bits(device, *call.values()) == before


OUTPUTS = {
    "store_kv": "k_cache", "store_mla": "cache", "apply_rope": "query_out",
    "rope_store_kv": "v_cache", "rope_store_mla": "cache", "gather_kv": "k_out",
    "copy_pages": "cache", "slot_mapping": "out", "paged_attention": "out",
    "merge_states": "lse_out", "shift_pages": "pool", "store_state": "caches",
    "gather_state": "out", "update_conv_state": "cache",
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_outputs_keep_to_themselves(device, name):
    """An output in the memory of a fixed argument is refused as ever, and nothing moves."""
    operation, make = BOUND[name]
    call, changed = make(device), OUTPUTS[name]
    others = {n: x for n, x in arrays_of(call).items() if n != changed}
    other = max(others, key=lambda n: others[n].nbytes)
    raw = device.zeros(others[other].nbytes + call[changed].nbytes, np.uint8)

    def placed(at, like):
        return raw[at : at + like.nbytes].view(like.dtype).reshape(like.shape)

    first = 0 if call[changed].nbytes > others[other].nbytes else 16
    output, fixed = placed(first, call[changed]), {**call, other: placed(16 - first, others[other])}
    prepared = bound(operation, fixed, call, (changed,))
    before = bits(device, *call.values(), raw)
    for issue in (lambda: operation(**{**fixed, changed: output}),
                  lambda: prepared(**{changed: output})):  # fmt: skip
        with pytest.raises(ValueError, match="expected memory of its own"):
            issue()
    assert bits(device, *call.values(), raw) == before


def test_elements_at_odd_addresses_are_refused(device):
    call = store_kv(device)
    prepared = bound(kv.store_kv, call, call, ("key", "slot_mapping"))
    for name in ("key", "slot_mapping"):
        raw = device.zeros(call[name].nbytes + 1, np.uint8)
        odd = raw[1:].view(call[name].dtype).reshape(call[name].shape)
        own = {n: odd if n == name else call[n] for n in ("key", "slot_mapping")}
        with pytest.raises(ValueError, match=f"^{name}: expected elements at multiples"):
            prepared(**own)


def test_read_only_outputs_are_refused(device):
    call = store_kv(device)
    if not isinstance(call["k_cache"], np.ndarray):
        pytest.skip("this array library has no read-only arrays")
    prepared = bound(kv.store_kv, call, call, ("k_cache",))
    frozen = call["k_cache"].copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"^k_cache: expected a writable array"):
        prepared(k_cache=frozen)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_addresses_aligned_otherwise_take_another_kernel(device, at):
    """Of the 16 bytes that the example lets a thread copy, fewer are left."""
    rows = np.random.default_rng(1).standard_normal((3, 2, 8)).astype(np.float32)
    caches = [device.zeros((16, 2, 8), np.float32) for _ in range(4)]
    slots, key = device.asarray(np.array([3, 0, 9])), device.asarray(rows)
    prepared = kv.bind(kv.store_kv, kv.vary(key), key, *caches[:2], slots)
    raw = device.zeros(rows.size + at, np.float32)
    moved = raw[at:].reshape(rows.shape)
    device.copy(moved, key)
    prepared(key=moved)
    kv.store_kv(key, key, *caches[2:], slots)
    assert bits(device, *caches[:2]) == bits(device, *caches[2:])
    prepared(key=key)
    assert bits(device, *caches[:2]) == bits(device, *caches[2:])


def test_names_are_exact(device):
    call = store_kv(device)
    prepared = bound(kv.store_kv, call, call, ("key", "slot_mapping"))
    own = {n: call[n] for n in ("key", "slot_mapping")}
    for passed, text in (
        ({"key": call["key"]}, "missing slot_mapping"),
        ({}, "missing key; missing slot_mapping"),
        ({**own, "value": call["value"]}, "value is fixed"),
        ({**own, "qwerty": 1}, "no argument qwerty"),
        ({"key": call["key"], "values": call["value"]}, "missing slot_mapping; no argument values"),
    ):
        with pytest.raises(
            TypeError, match=f"^store_kv, bound: expected key, slot_mapping, .*{text}"
        ):
            prepared(**passed)
    for examples, passed in (
        ({"stream": kv.vary(None)}, {}),
        ({"stream": kv.vary(None), "key": kv.vary(call["key"])}, {"key": call["key"]}),
        ({"stream": kv.vary(None), "key": kv.vary(call["key"])}, {"stream": None}),
        ({"key": kv.vary(call["key"])}, {"key": call["key"], "stream": None}),
    ):
        with pytest.raises(TypeError, match=r"got (missing stream|missing key|stream is fixed)$"):
            kv.bind(kv.store_kv, **{**call, **examples})(**passed)
    with pytest.raises(TypeError, match="expected no arguments, got key is fixed"):
        kv.bind(kv.store_kv, **call)(key=call["key"])
    assert "key (3, 2, 8) fp32, slot_mapping (3,) int64 varies" in repr(prepared)
    assert repr(prepared).startswith("<store_kv, bound: ") and "k_cache" in repr(prepared)


# What can be bound ---------------------------------------------------------------------------


@pytest.mark.parametrize("operation", [kv.fork, kv.rope_table, np.add, print, "store_kv", None])
def test_what_cannot_be_bound(operation):
    with pytest.raises(TypeError, match=r"^operation: expected one of kvcupy's"):
        kv.bind(operation, 1, 2)


@pytest.mark.parametrize(
    ("name", "changes", "argument"),
    [
        ("store_kv", {"k_scale": kv.vary(0.5)}, "k_scale"),
        ("store_kv", {"k_scale": kv.vary(None)}, "k_scale"),
        ("store_kv", {"skip_slot": kv.vary(3)}, "skip_slot"),
        ("store_kv", {"skip_slot": kv.vary(np.zeros(1))}, "skip_slot"),
        ("store_kv", {"layout": kv.vary("NHD")}, "layout"),
        ("store_kv", {"layout": kv.vary(np.zeros(1))}, "layout"),
        ("rope_store_kv", {"write_key": kv.vary(np.zeros(1))}, "write_key"),
        ("rope_store_kv", {"alt_stream": kv.vary(None)}, "alt_stream"),
        ("slot_mapping", {"page_size": kv.vary(4)}, "page_size"),
        ("store_kv", {"key": None}, "key"),
        ("store_kv", {"key": kv.vary(None)}, "key"),
        ("store_kv", {"key": kv.vary([1, 2])}, "key"),
        ("store_kv", {"stream": "none"}, "stream"),
        ("store_kv", {"qwerty": 1}, "qwerty"),
    ],
)
def test_what_cannot_vary(device, name, changes, argument):
    operation, make = BOUND[name]
    with pytest.raises(TypeError, match=argument):
        kv.bind(operation, **{**make(device), **changes})()


def test_errors_come_when_binding(device):
    call = store_kv(device)
    with pytest.raises(ValueError, match=r"^value: expected"):
        kv.bind(kv.store_kv, **{**call, "value": kv.vary(call["value"][:2])})
    with pytest.raises(ValueError, match=r"^k_cache: expected memory of its own"):
        kv.bind(kv.store_kv, **{**call, "k_cache": call["v_cache"], "value": call["key"][..., :6],
                                "key": call["key"][..., :6]})  # fmt: skip


def test_zero_tokens(device):
    call = {**store_kv(device), "slot_mapping": device.zeros((0,), np.int64)}
    before = bits(device, *call.values())
    kv.bind(kv.store_kv, **call)()
    assert bits(device, *call.values()) == before


# Lifetime and threads ------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_only_fixed_arrays_are_kept(device, name):
    operation, make = BOUND[name]
    call, examples = make(device), make(device)
    names = tuple(arrays_of(call))[:1]
    prepared = bound(operation, call, examples, names)
    prepared(**{n: call[n] for n in names})
    device.synchronize()
    alive = {n: weakref.ref(x) for n, x in arrays_of(call).items()}
    example = weakref.ref(examples[names[0]])
    del call, examples
    gc.collect()
    assert example() is None
    assert [n for n, ref in alive.items() if ref() is None] == list(names)
    del prepared
    gc.collect()
    assert [n for n, ref in alive.items() if ref() is not None] == []


@pytest.mark.parametrize("name", CALLS)
def test_examples_are_let_go_of_without_the_garbage_collector(device, name):
    """Memory of a GPU must not wait until the collector looks for circles."""
    operation, make = BOUND[name]
    call, examples = make(device), make(device)
    varying = next(iter(arrays_of(call)))
    example = weakref.ref(examples[varying])
    gc.disable()
    try:
        prepared = bound(operation, call, examples, (varying,))
        del examples
        assert example() is None
    finally:
        gc.enable()
    assert prepared is not None


@pytest.mark.races
def test_many_threads_share_a_bound_call(device):
    call = {n: x for n, x in store_kv(device).items() if "scale" not in n}
    call["k_cache"], call["v_cache"] = (device.zeros((64, 2, w), np.float32) for w in (8, 6))
    prepared = bound(kv.store_kv, call, call, ("key", "k_cache", "slot_mapping"))
    failures = []

    def work(seed):
        try:
            key = device.asarray(np.full((3, 2, 8), seed, np.float32))
            cache, slots = device.zeros((64, 2, 8), np.float32), device.asarray(np.arange(3) + seed)
            for _ in range(100):
                prepared(key=key, k_cache=cache, slot_mapping=slots)
            rows = device.to_numpy(cache)
            assert (rows[seed : seed + 3] == seed).all() and np.count_nonzero(rows) == 3 * 16
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_without_a_compiler(monkeypatch, caplog):
    """The reference serves, with the same warning."""
    host = HostDevice()
    monkeypatch.setitem(devices._devices, "host", host)
    monkeypatch.setattr(op_call, "_plans", {})
    monkeypatch.setattr(cxx, "find_compiler", lambda: None)
    monkeypatch.setattr(kv.config, "_warned", set())
    monkeypatch.setattr(kv.config, "fallback", "warn")
    call, plain = store_kv(host), store_kv(host)
    bound(kv.store_kv, call, plain, ("key",))(key=call["key"])
    assert "store_kv runs in NumPy" in caplog.text
    kv.store_kv(**plain)
    assert bits(host, *call.values()) == bits(host, *plain.values())
    monkeypatch.setattr(kv.config, "fallback", "error")
    with pytest.raises(kv.CompileError):
        bound(kv.store_kv, call, plain, ("key",))(key=call["key"])


def test_tensors():
    """Version counters, gradients, and arrays of another library, as in an ordinary call."""
    torch = pytest.importorskip("torch")
    key, cache, slots = torch.randn(2, 2, 8), torch.zeros(8, 2, 8), torch.tensor([1, 6])
    v_cache = torch.zeros(8, 2, 8)
    prepared = kv.bind(kv.store_kv, kv.vary(key), key, kv.vary(cache), v_cache, slots)
    before = cache._version, v_cache._version, key._version
    prepared(key=key, k_cache=cache)
    assert (cache._version > before[0], v_cache._version > before[1]) == (True, True)
    assert key._version == before[2] and torch.equal(cache[slots], key)
    with pytest.raises(TypeError, match=r"^key: .*requires a gradient"):
        prepared(key=key.clone().requires_grad_(), k_cache=cache)
    with torch.no_grad():
        prepared(key=(2 * key).requires_grad_(), k_cache=cache)
    assert torch.equal(cache[slots], 2 * key)
    other = np.zeros((8, 2, 8), np.float32)
    prepared(key=key.numpy(), k_cache=other)
    assert np.array_equal(other[[1, 6]], key.numpy())


# Time ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("only_numpy")
@pytest.mark.parametrize(("names", "most"), [((), 7), (("key", "value"), 9)])
def test_a_bound_call_is_short(lenient_host, names, most):
    """In Python frames; another bound call of the operation in between costs none."""
    device = kv.device("host")
    call = {n: x for n, x in store_kv(device).items() if "scale" not in n}
    call["k_cache"], call["v_cache"] = (device.zeros((8, 2, w), np.float32) for w in (8, 6))
    prepared = bound(kv.store_kv, call, store_kv(device), names)
    own = {n: call[n] for n in names}
    prepared(**own)
    kv.store_kv(**store_kv(device))
    frames = []
    sys.setprofile(lambda frame, event, _: frames.append(frame) if event == "call" else None)
    try:
        prepared(**own)
    finally:
        sys.setprofile(None)
    assert len(frames) <= most, [frame.f_code.co_name for frame in frames]
