"""`scripts/bench.py models`: what it reports, what it checks, and what it says of baselines."""

from __future__ import annotations

import json
import sys

import bench as bench_script
import numpy as np
import pytest
from benchmarks.operations import command, measure
from benchmarks.operations.baselines import NotMeasured, TorchArrays, own_arrays
from benchmarks.operations.cases import Shape
from common.checks import WrongBytes
from common.models import MODELS, Model

import kvcupy as kv

TINY = Model("tiny", 64, 2, 8, 2, 64, window=24)
TINY_MLA = Model("tiny-mla", 64, 2, 4, 0, 48, latent=32, rope=16)
SIZES = ("--tokens", "4", "--batch", "2", "--context", "40")


@pytest.fixture(autouse=True)
def tiny_models(monkeypatch):
    for model in (TINY, TINY_MLA):
        monkeypatch.setitem(MODELS, model.name, model)
    monkeypatch.setattr(measure, "SECONDS", 0.0)  # three rounds


def bench(device_name, *arguments):
    small = ("--device", device_name, "--quick", "--rotate-mb", "1")
    return bench_script.main(["models", *small, *map(str, arguments)])


def measured(device_name, tmp_path, *arguments):
    """Return the report of a run that succeeds."""
    file = tmp_path / "report.json"
    assert bench(device_name, "--json", file, *arguments) == 0
    return json.loads(file.read_text())


@pytest.mark.covering
@pytest.mark.parametrize(
    ("model", "absent"),
    [
        ("tiny", {"store_mla", "rope_store_mla"}),
        ("tiny-mla", {"store_kv", "rope_store_kv", "gather_kv", "shift_pages"}),
    ],
)
def test_every_operation_of_a_model(device_name, tmp_path, capsys, with_torch, model, absent):
    report = measured(device_name, tmp_path, "--model", model, *SIZES)
    assert {row["operation"] for row in report["rows"]} == set(command.OPERATIONS) - absent
    assert len({row["case"] for row in report["rows"]}) == len(report["rows"])
    for row in report["rows"]:
        assert row["model"] in (model, "any") and row["sets"] >= 1
        own = row["us"]["kvcupy"]
        assert own >= row["least_us"]["kvcupy"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / own / 1e3)
        assert not any("wrong" in why for why in row["not_measured"].values())
        if row["mode"] == "eager" and row["format"] != "fp8_e4m3":
            assert ("torch" in row["ratios"]) == with_torch, row["not_measured"]
    printed = capsys.readouterr().out
    assert all(row["case"] in printed for row in report["rows"])


def test_bytes_and_products_by_hand():
    full = Shape("paged_attention", TINY, 3, context=40)
    # K and V of 40 tokens, 2 heads of 64; a query and an output of 8 heads; 2 bytes each.
    assert full.bytes_moved == 3 * 2 * 2 * (40 * 2 * 64 + 8 * 64)
    assert full.flops == 3 * 40 * 8 * 64 * 2 * 2
    window = Shape("paged_attention", TINY, 1, context=40, new=4, window=8)
    assert window.bytes_moved == 2 * 2 * (11 * 2 * 64 + 4 * 8 * 64)
    assert window.flops == 4 * 8 * 8 * 64 * 2 * 2
    assert Shape("store_kv", TINY, 4, "fp8 static").bytes_moved == 4 * (256 * 3 + 8)


def test_two_reports_are_compared(tmp_path, capsys):
    """Cases in one alone are counted, and differences of the machines are named."""

    def report_of(name, device, **us):
        rows = [{"case": n, "mode": "graph", "us": {"kvcupy": time}} for n, time in us.items()]
        (tmp_path / name).write_text(json.dumps({"device": device, "rows": rows}))
        return str(tmp_path / name)

    before = report_of("a.json", "host", store=6.0, gather=2.0, gone=1.0)
    after = report_of("b.json", "cuda:0", store=4.0, gather=4.0, new=1.0)
    assert bench_script.main(["models", "--compare", before, after]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["store", "graph", "6.00", "4.00", "1.50"], ["gather", "graph", "2.00", "4.00", "0.50"]
    ]  # fmt: skip
    assert lines[4:] == [
        "1 cases are in the first alone", "1 cases are in the second alone",
        "device differs: host, then cuda:0",
    ]  # fmt: skip


# Baselines ---------------------------------------------------------------------------------------

PEERS = {"flashinfer", "vllm"}


def test_what_is_not_installed_is_a_line(device_name, tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    for name in PEERS:
        monkeypatch.setitem(sys.modules, name, None)
    options = ("--op", "store_kv", "--model", "tiny", "--format", "bf16")
    report = measured(device_name, tmp_path, *options, "--tokens", 4, 8)
    for row in report["rows"]:
        assert not PEERS & row["us"].keys() and "flashinfer" in row["not_measured"]
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("flashinfer: not measured: "))
    assert line.endswith("and 1 more)")


def test_others_compute_the_same(device, device_name, tmp_path, monkeypatch):
    """What they are given is right: their signatures, with torch behind them, pass the checks."""
    pytest.importorskip("torch")
    import peer_modules

    peer_modules.install(monkeypatch)
    options = ("--op", "store_kv", "store_mla", "paged_attention", "--model", "tiny", "tiny-mla")
    report = measured(device_name, tmp_path, *options, "--format", "bf16", "fp32", *SIZES)
    host = {"vllm"} if device.name == "host" else set()
    expected = {
        "store_kv tiny bf16 T=4": {"flashinfer"} | host,
        "paged_attention tiny bf16 decode 2 x 40": {"flashinfer"} | host,
        "paged_attention tiny bf16 decode 2 x 40 window=24": {"flashinfer"} | host,
        "paged_attention tiny bf16 prefill 16 of 1 x 32": {"flashinfer"} | host,
        "paged_attention tiny fp32 decode 2 x 40": host,
        "paged_attention tiny fp32 decode 2 x 40 window=24": host,
        "paged_attention tiny fp32 prefill 16 of 1 x 32": host,
        "paged_attention tiny-mla bf16 decode 2 x 40": {"flashinfer"},
        "paged_attention tiny-mla bf16 prefill 16 of 1 x 32": {"flashinfer"},
    }
    for row in report["rows"]:
        if device.name == "host":  # elsewhere the stand-ins may refuse to be captured
            peers = expected.get(row["case"], set())
            assert PEERS & row["ratios"].keys() == peers, row["not_measured"]
        assert not any("wrong" in why for why in row["not_measured"].values())


@pytest.mark.parametrize(
    ("replacement", "why"),
    [
        (lambda *arguments: None, "wrong result: store_kv tiny bf16 T=4, flashinfer, cache 0: "),
        (lambda *arguments: 1 // 0, "ZeroDivisionError: "),
    ],
)
def test_a_baseline_that_fails_is_a_line(device_name, tmp_path, monkeypatch, replacement, why):
    pytest.importorskip("torch")
    import peer_modules

    peer_modules.install(monkeypatch, {"append_paged_kv_cache": replacement})
    options = ("--op", "store_kv", "--model", "tiny", "--format", "bf16", "--tokens", 4)
    (row,) = measured(device_name, tmp_path, *options)["rows"]
    assert row["not_measured"]["flashinfer"].startswith(why) and "flashinfer" not in row["us"]


def test_a_case_too_large_for_the_device_is_a_line(device_name, tmp_path, monkeypatch):
    def build(shape, device, sets):
        raise MemoryError("no 4 GB left")

    monkeypatch.setattr(Shape, "build", build)
    options = ("--op", "store_kv", "--model", "tiny", "--format", "bf16", "--tokens", 4)
    report = measured(device_name, tmp_path, *options)
    assert report["notes"][0] == "store_kv tiny bf16 T=4: not measured: MemoryError: no 4 GB left"


# Checks ------------------------------------------------------------------------------------------


def test_a_wrong_result_of_kvcupy_ends_it(device, monkeypatch, capsys):
    if device.name != "host":
        pytest.skip("the wrong result is put there by the host")
    attend = kv.paged_attention

    def wrong(*arguments, out, **options):
        attend(*arguments, out=out, **options)
        out[...] = (np.asarray(out, np.float32) + 0.1).astype(out.dtype)

    monkeypatch.setattr(kv, "paged_attention", wrong)
    assert bench("host", "--op", "paged_attention", "--model", "tiny", *SIZES) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench: wrong result: paged_attention tiny bf16 decode")


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("store_kv", "cache 0: .* bytes differ"), ("rope_store_kv", "too far off"),
        ("gather_kv", "rows: .* bytes differ"), ("copy_pages", "pages: .* bytes differ"),
        ("shift_pages", "too far off"), ("slot_mapping", "slots: .* bytes differ"),
    ],
)  # fmt: skip
def test_what_was_not_done_is_noticed(device, operation, message):
    built = Shape(operation, TINY, 1).build(device, 2)
    calls = built.kvcupy(own_arrays)
    measure.check(built, "kvcupy", calls)
    with pytest.raises(WrongBytes, match=message):
        measure.check(built, "kvcupy", [calls[0], lambda stream: None])


SINKS = Model("s", 64, 2, 8, 2, 64, sinks=True, window=8)
FEATURES = {
    "window": (TINY, 2, {"context": 40, "window": 24}),
    "window in prefill": (TINY, 2, {"context": 40, "new": 8, "window": 12}),
    "all new": (TINY, 2, {"context": 24, "new": 24}),
    "all new, window": (TINY, 1, {"context": 24, "new": 24, "window": 8}),
    "sinks": (SINKS, 2, {"context": 40, "window": 8}),
    "latent": (TINY_MLA, 2, {"context": 40}),
    "fp8": (TINY, 2, {"context": 40, "format": "fp8_e4m3"}),
}


@pytest.mark.parametrize("name", FEATURES)
def test_attention_agrees_with_float64_and_torch(device, with_torch, name):
    model, count, options = FEATURES[name]
    case = Shape("paged_attention", model, count, **options).build(device, 2)
    measure.check(case, "kvcupy", case.kvcupy(own_arrays))
    with pytest.raises(WrongBytes, match=r"row .* of set 1, head .* is off by"):
        measure.check(case, "kvcupy", [case.kvcupy(own_arrays)[0], lambda stream: None])
    if not with_torch:
        return
    torch = TorchArrays(device)
    measure.check(case, "kvcupy, torch tensors", case.kvcupy(torch.wrap))
    if name in ("sinks", "fp8"):
        with pytest.raises(NotMeasured, match=f"takes no {name}"):
            case.torch(torch.torch, torch.wrap)
    else:
        measure.check(case, "torch", case.torch(torch.torch, torch.wrap))


# Options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--op", "frob"), "bench: --op: expected one of store_kv, "),
        (("--model", "llama-0"), "bench: --model: expected one of llama-3.1-8b, "),
        (("--device", "cuda:63"), "bench: cuda:63"),
        (("--op", "store_mla", "--model", "llama-3.1-8b"), "bench: no case: llama-3.1-8b has none"),
        (("--compare", "a", "b"), "bench: --compare: "),
        (("--prefill", "4:3"), "--prefill: "),
        (("--tokens", "0"), "expected at least 1, got 0"),
    ],
)
def test_a_wrong_option_is_refused(capsys, arguments, said):
    try:
        status = bench_script.main(["models", *arguments])
    except SystemExit as end:
        status = end.code
    assert status == 2 and said in capsys.readouterr().err
