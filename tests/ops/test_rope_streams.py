"""The rotary operations on two streams, and beside transformers."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import QUANTISED, from_values
from rope_cases import SLOTS, RopeCase, bits, clear_faults, mirrored_array, store_arguments

import kvcupy as kv


def twin_cases(device, seed, pair):
    """Two cases of the same bytes, with their arguments and options."""
    twins = []
    for _ in range(2):
        case = RopeCase(device, seed)
        args = (
            *store_arguments(case, *pair, layout="HND", width=48, v_width=64, rotary_dim=32),
            case.slots([7, 0, -1, 12, 3, 4]),
        )
        options = {"layout": "HND", "query_out": case.output(pair[0], (6, 3, 48))}
        if pair[1] in QUANTISED:
            options |= case.scale_caches(12)
        twins.append((case, args, options))
    return twins


def issue_raw(args, options, **streams):
    kv.rope_store_kv(
        *(a.array for a in args),
        **streams,
        **{name: mirrored_array(value) for name, value in options.items()},
    )


def all_bytes(case):
    return [b.read() for b in case.buffers]


def same_bytes(got, want):
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert np.array_equal(a, b), f"buffer {index}, byte {np.flatnonzero(a != b)[:1]}"


ALT = [
    (("bf16", "bf16"), {}),
    (("fp16", "fp8_e4m3"), {}),
    (("fp32", "int8"), {}),
    (("bf16", "fp8_e5m2"), {"write_key": False}),
    (("bf16", "bf16"), {"write_key": False, "interleaved": True}),
    (("bf16", "bf16"), {"interleaved": True}),
    (("fp16", "fp16"), {"norm": True}),
]


@pytest.mark.parametrize(("pair", "extra"), ALT, ids=str)
def test_two_streams_give_the_same_bytes(device, pair, extra):
    """Bitwise, and both as they should be, faults and scales included."""
    single, double = twin_cases(device, 51, pair)
    for case, _, options in (single, double):
        options |= {name: value for name, value in extra.items() if name != "norm"}
        if "norm" in extra:
            options["key_norm"] = case.rows("fp32", (48,))
    stream, alt = device.stream(), device.stream()
    device.synchronize()
    issue_raw(*single[1:], stream=stream)
    stream.synchronize()
    clear_faults(device)
    issue_raw(*double[1:], stream=stream, alt_stream=alt)
    stream.synchronize()
    clear_faults(device)
    same_bytes(all_bytes(double[0]), all_bytes(single[0]))
    case = RopeCase(device, 52)
    args = store_arguments(case, *pair, layout="NHD")
    case.store(
        *args,
        SLOTS,
        layout="NHD",
        stream=stream,
        alt_stream=alt,
        **{name: value for name, value in extra.items() if name != "norm"},
    )
    case.store(*args, SLOTS, layout="NHD", alt_stream=alt)


def test_work_before_and_after_two_streams_keeps_its_order(device):
    """What `stream` did before is seen, what it does afterwards waits for both."""
    single, double = twin_cases(device, 53, ("bf16", "bf16"))
    stream, alt = device.stream(), device.stream()
    device.synchronize()
    for (case, args, options), extra in ((single, {}), (double, {"alt_stream": alt})):
        fresh = [
            case.device.asarray(case.rng.integers(0, 9, a.array.shape).astype(np.float32))
            for a in (args[1], args[2])
        ]
        device.synchronize()
        for target, source in zip((args[1], args[2]), fresh, strict=True):
            copy = case.device.asarray(from_values(np.asarray(device.to_numpy(source)), "bf16"))
            device.copy(target.array, copy, stream=stream)
        for _ in range(3):
            issue_raw(args, options, stream=stream, **extra)
        device.copy(
            args[2].array, device.zeros(args[2].array.shape, args[2].array.dtype), stream=stream
        )
        stream.synchronize()
        clear_faults(device)
    same_bytes(all_bytes(double[0]), all_bytes(single[0]))


@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("fp16", "fp8_e4m3")], ids="-".join)
def test_two_streams_in_a_graph(device, pair):
    """Captured, nothing runs; a replay reads its arrays then, and gives the bytes of a call."""
    eager, captured = twin_cases(device, 54, pair)
    stream = device.stream()
    streams = {"stream": stream, "alt_stream": device.stream()}
    warm = twin_cases(device, 55, pair)[0]
    device.synchronize()
    issue_raw(*warm[1:], **streams)
    stream.synchronize()
    clear_faults(device)
    before = all_bytes(captured[0])
    with stream.capture() as graph:
        issue_raw(*captured[1:], **streams)
    device.synchronize()
    kv.check_faults(device)
    same_bytes(all_bytes(captured[0]), before)

    for _, args, _ in (eager, captured):  # other content than at capture
        rng = np.random.default_rng(56)
        for arg in args[:3]:
            values = from_values(rng.standard_normal(arg.view.shape), arg.fmt)
            bits(arg.view)[...] = bits(values)
            arg.buffer.restore()
    start = all_bytes(captured[0])
    device.synchronize()
    issue_raw(*eager[1:], stream=stream)
    stream.synchronize()
    clear_faults(device)
    want = all_bytes(eager[0])
    for _ in range(2):
        for buffer, content in zip(captured[0].buffers, start, strict=True):
            with buffer.opened():
                buffer.raw[...] = device.asarray(content.copy())
        device.synchronize()
        graph.launch(stream)
        stream.synchronize()
        clear_faults(device)
        same_bytes(all_bytes(captured[0]), want)


def test_against_transformers(device):
    """Its own function on the same table, in float32: a few units of float32 apart."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    rng = np.random.default_rng(59)
    query, key = (rng.standard_normal((6, heads, 64)).astype(np.float32) for heads in (8, 2))
    table = np.asarray(device.to_numpy(kv.rope_table(4096, 64, device=device)))
    positions = np.array([0, 1, 77, 4095, 4095, 1000])
    cos, sin = (
        torch.from_numpy(np.tile(table[positions][:, part], 2))[None]
        for part in (slice(32), slice(32, 64))
    )
    expected = llama.apply_rotary_pos_emb(
        *(torch.from_numpy(rows).transpose(0, 1)[None] for rows in (query, key)), cos, sin
    )
    live = [device.asarray(rows.copy()) for rows in (query, key)]
    kv.apply_rope(*live, device.asarray(table), device.asarray(positions))
    for got, want in zip(live, expected, strict=True):
        np.testing.assert_allclose(
            device.to_numpy(got), want[0].transpose(0, 1).numpy(), rtol=0, atol=2e-6
        )
