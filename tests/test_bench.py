"""`scripts/bench.py models`: what it reports, what it checks, and what it says of baselines."""

from __future__ import annotations

import json
import sys

import bench as bench_script
import numpy as np
import pytest
from benchmarks.operations import attention, candidates, command, store
from benchmarks.operations.baselines import NotMeasured, TorchArrays, own_arrays
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
    monkeypatch.setattr(candidates, "SECONDS", 0.0)  # three rounds


def bench(device_name, *arguments):
    small = ("--device", device_name, "--quick", "--rotate-mb", "1")
    return bench_script.main(["models", *small, *map(str, arguments)])


def measured(device_name, tmp_path, *arguments):
    """Return the report of a run that succeeds."""
    file = tmp_path / "report.json"
    assert bench(device_name, "--json", file, *arguments) == 0
    return json.loads(file.read_text())


def of(report, operation):
    return [row for row in report["rows"] if row["operation"] == operation]


# What it reports ---------------------------------------------------------------------------------


@pytest.mark.covering
@pytest.mark.parametrize(
    ("model", "absent"),
    [
        ("tiny", {"store_mla", "rope_store_mla"}),
        ("tiny-mla", {"store_kv", "rope_store_kv", "gather_kv", "shift_pages"}),
    ],
)
def test_every_operation_of_a_model(device_name, tmp_path, capsys, with_torch, model, absent):
    report = measured(device_name, tmp_path, "--model", model, "--format", "bf16", *SIZES)
    assert {row["operation"] for row in report["rows"]} == set(command.OPERATIONS) - absent
    assert len({row["case"] for row in report["rows"]}) == len(report["rows"])
    for key in ("device", "processor", "versions", "date", "commit", "copy_gb_per_s", "notes"):
        assert key in report
    for row in report["rows"]:
        assert row["model"] in (model, "any") and row["sets"] >= 1
        own = row["us"]["kvcupy"]
        assert own >= row["least_us"]["kvcupy"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / own / 1e3)
        share = 100 * row["gb_per_s"] / row["copy_gb_per_s"]
        assert row["percent_of_copy"] == pytest.approx(share)
        assert row["copy_gb_per_s"] == report["copy_gb_per_s"]
        assert row["ratios"] == pytest.approx(candidates.ratios(row["least_us"]))
        if row["mode"] == "eager":
            assert ("torch" in row["ratios"]) == with_torch, row["not_measured"]
    assert all(row["tflops"] > 0 for row in of(report, "paged_attention"))
    printed = capsys.readouterr().out
    for text in ("us (median)", "GB/s", "% of copy", report["device"]):
        assert text in printed
    assert all(row["case"] in printed for row in report["rows"])


def test_quantised_caches(device_name, tmp_path):
    options = ("--op", "store_kv", "gather_kv", "--format", "fp8_e4m3", "--model", "tiny")
    report = measured(device_name, tmp_path, *options, *SIZES)
    assert {row["format"] for row in report["rows"]} == {"fp8 static"} and report["rows"]


def test_cases_are_those_of_the_models():
    shapes = command.cases(
        command.OPERATIONS, list(MODELS.values()), command.FORMATS, command.QUICK
    )
    assert len({shape.name for shape in shapes}) == len(shapes)
    names = {shape.name for shape in shapes}
    assert "rope_store_kv qwen3-8b bf16 norm T=1" in names
    assert "paged_attention gpt-oss-20b bf16 decode 2 x 256 window=128" in names
    assert "paged_attention gpt-oss-20b bf16 decode 2 x 256" in names
    assert "paged_attention gemma-3-12b bf16 decode 2 x 256 window=1024" not in names
    assert sum(shape.operation == "slot_mapping" for shape in shapes) == 2  # of no model
    for kind in ("cuda", "host"):
        shapes = command.cases(command.OPERATIONS, list(MODELS.values()), ("bf16",),
                               command.SIZES[kind])  # fmt: skip
        assert {shape.model_name for shape in shapes} >= set(MODELS)


def test_bytes_and_products_by_hand():
    full = attention.Shape(TINY, 3, 40)
    # K and V of 40 tokens, 2 heads of 64; a query and an output of 8 heads; 2 bytes each.
    assert full.bytes_moved == 3 * 2 * 2 * (40 * 2 * 64 + 8 * 64)
    assert full.flops == 3 * 40 * 8 * 64 * 2 * 2
    window = attention.Shape(TINY, 1, 40, new=4, window=8)
    assert window.bytes_moved == 2 * 2 * (11 * 2 * 64 + 4 * 8 * 64)
    assert window.flops == 4 * 8 * 8 * 64 * 2 * 2
    latent = attention.Shape(TINY_MLA, 1, 40)
    assert latent.bytes_moved == 2 * (40 * 48 + 4 * (48 + 32))
    assert store.Shape("store_kv", TINY, 4, "fp8 static").bytes_moved == 4 * (256 * 3 + 8)


# What it compares --------------------------------------------------------------------------------


def report_of(path, **us):
    rows = [{"case": name, "mode": "graph", "us": {"kvcupy": time}} for name, time in us.items()]
    path.write_text(json.dumps({"device": "host", "rows": rows}))
    return path


def test_two_reports_are_compared(tmp_path, capsys):
    """Cases in one alone are counted, and differences of the machines are named."""
    before = report_of(tmp_path / "a.json", store=6.0, gather=2.0, gone=1.0)
    after = report_of(tmp_path / "b.json", store=4.0, gather=4.0, new=1.0)
    after.write_text(after.read_text().replace('"host"', '"cuda:0"'))
    assert bench_script.main(["models", "--compare", str(before), str(after)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[-1] == "times as fast"
    assert [line.split() for line in lines[2:4]] == [
        ["store", "graph", "6.00", "4.00", "1.50"], ["gather", "graph", "2.00", "4.00", "0.50"]
    ]  # fmt: skip
    assert lines[4:] == [
        "1 cases are in the first alone", "1 cases are in the second alone",
        "device differs: host, then cuda:0",
    ]  # fmt: skip


# Baselines ---------------------------------------------------------------------------------------

PEERS = {"flashinfer", "sglang", "vllm"}
OPERATIONS = ("--op", "store_kv", "store_mla", "rope_store_kv", "paged_attention",
              "--model", "tiny", "tiny-mla", "--format", "bf16")  # fmt: skip


def test_what_is_not_installed_is_a_line(device_name, tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    for name in PEERS:
        monkeypatch.setitem(sys.modules, name, None)
    options = ("--op", "store_kv", "--model", "tiny", "--format", "bf16")
    report = measured(device_name, tmp_path, *options, "--tokens", 4, 8)
    for row in report["rows"]:
        assert not PEERS & row["us"].keys() and set(row["not_measured"]) >= PEERS - {"vllm"}
    lines = capsys.readouterr().out.splitlines()
    for name in PEERS - {"vllm"}:
        (line,) = (line for line in lines if line.startswith(f"{name}: not measured: "))
        assert name in line.partition(": not measured: ")[2] and line.endswith("and 1 more)")


def test_without_torch(device_name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    report = measured(device_name, tmp_path, "--op", "slot_mapping", "--batch", 2, "--tokens", 4)
    for row in report["rows"]:
        assert "torch" in row["not_measured"] and "torch" not in row["us"]


def test_others_compute_the_same(device, device_name, tmp_path, capsys, monkeypatch):
    """What they are given is right: their signatures, with torch behind them, pass the checks."""
    pytest.importorskip("torch")
    import peer_modules

    peer_modules.install(monkeypatch)
    report = measured(device_name, tmp_path, *OPERATIONS, *SIZES)
    host = {"vllm"} if device.name == "host" else set()
    expected = {
        "store_kv tiny bf16 T=4": {"flashinfer", "sglang"} | host,
        "paged_attention tiny bf16 decode 2 x 40": {"flashinfer"} | host,
        "paged_attention tiny bf16 decode 2 x 40 window=24": {"flashinfer"} | host,
        "paged_attention tiny bf16 prefill 16 of 1 x 32": {"flashinfer"} | host,
        "paged_attention tiny-mla bf16 decode 2 x 40": {"flashinfer"},
        "paged_attention tiny-mla bf16 prefill 16 of 1 x 32": {"flashinfer"},
    }
    for row in report["rows"]:
        peers = expected.get(row["case"], set())
        if device.name == "host":  # elsewhere the stand-ins may refuse to be captured
            assert PEERS & row["ratios"].keys() == peers, row["not_measured"]
        assert not any("wrong" in why for why in row["not_measured"].values())
    if device.name == "host":
        columns = capsys.readouterr().out.splitlines()[0]
        assert columns.endswith("x torch  x flashinfer  x sglang  x vllm")


@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
def test_floats_beside_vllm_on_a_cpu(device_name, tmp_path, monkeypatch, fmt):
    """vLLM's own kernels take any float there; prefills are of any lengths."""
    pytest.importorskip("torch")
    import peer_modules

    peer_modules.install(monkeypatch)
    options = ("--op", "store_kv", "paged_attention", "--model", "tiny", "--format", fmt)
    report = measured(
        device_name,
        tmp_path,
        *options,
        *SIZES,
        "--prefill",
        "3:40",
        "40:40",
        "--decode",
        "1:9",
        "3:50",
    )
    cases = [row["case"].partition(fmt)[2] for row in report["rows"]]
    assert cases == [" decode 1 x 9", " decode 3 x 50", " decode 3 x 50 window=24",
                     " prefill 3 of 1 x 40",
                     " prefill 40 of 1 x 40"]  # fmt: skip
    for row in report["rows"]:
        assert ("vllm" in row["ratios"]) == (device_name == "host"), row["not_measured"]


@pytest.mark.parametrize("text", ["3", "3:", "4:3", "0:3", "a:3"])
def test_prefills_that_are_none(device_name, capsys, text):
    with pytest.raises(SystemExit):
        bench(device_name, "--prefill", text)
    assert "--prefill: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("replacement", "why"),
    [
        (lambda *arguments: None, "wrong result: store_kv tiny bf16 T=4, sglang, cache 0: "),
        (lambda *arguments: 1 // 0, "ZeroDivisionError: "),
    ],
)
def test_a_baseline_that_fails_is_a_line(device_name, tmp_path, monkeypatch, replacement, why):
    pytest.importorskip("torch")
    import peer_modules

    peer_modules.install(monkeypatch, {"store_cache": replacement})
    options = ("--op", "store_kv", "--model", "tiny", "--format", "bf16", "--tokens", 4)
    (row,) = measured(device_name, tmp_path, *options)["rows"]
    assert row["not_measured"]["sglang"].startswith(why) and "sglang" not in row["us"]


def test_a_case_too_large_for_the_device_is_a_line(device_name, tmp_path, monkeypatch):
    def build(shape, device, sets):
        raise MemoryError("no 4 GB left")

    monkeypatch.setattr(store.Shape, "build", build)
    options = ("--op", "store_kv", "slot_mapping", "--model", "tiny", "--format", "bf16")
    report = measured(device_name, tmp_path, *options, *SIZES)
    assert {row["operation"] for row in report["rows"]} == {"slot_mapping"}
    assert report["notes"][0] == "store_kv tiny bf16 T=4: not measured: MemoryError: no 4 GB left"


def test_more_tokens_than_positions_and_pages_of_any_size(device_name, tmp_path):
    small = ("--model", "tiny", "--format", "bf16", "--page-size", 24, "--batch", 2)
    report = measured(
        device_name, tmp_path, "--op", "slot_mapping", "rope_store_kv", "--tokens", 9000, *small
    )
    assert len(report["rows"]) == 3
    kv.check_faults(device_name)


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
    assert "is off by" in line


FEATURES = {
    "window": attention.Shape(TINY, 2, 40, window=24),
    "window in prefill": attention.Shape(TINY, 2, 40, new=8, window=12),
    "all new": attention.Shape(TINY, 2, 24, new=24),
    "all new, window": attention.Shape(TINY, 1, 24, new=24, window=8),
    "sinks": attention.Shape(Model("s", 64, 2, 8, 2, 64, sinks=True, window=8), 2, 40, window=8),
    "latent": attention.Shape(TINY_MLA, 2, 40),
    "fp8": attention.Shape(TINY, 2, 40, format="fp8_e4m3"),
    "fp32": attention.Shape(TINY, 1, 20, new=4, format="fp32"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_attention_agrees_with_float64_and_torch(device, monkeypatch, with_torch, name):
    monkeypatch.setattr(attention, "BANK", 997)  # values repeat, and results are right all the same
    case = FEATURES[name].build(device, 2)
    candidates.check(case, "kvcupy", case.kvcupy(own_arrays))
    with pytest.raises(WrongBytes, match=r"row .* of set 1, head .* is off by"):
        candidates.check(case, "kvcupy", [case.kvcupy(own_arrays)[0], lambda stream: None])
    if not with_torch:
        return
    torch = TorchArrays(device)
    candidates.check(case, "kvcupy, torch tensors", case.kvcupy(torch.wrap))
    if name in ("sinks", "fp8"):
        with pytest.raises(NotMeasured, match=f"takes no {name}"):
            case.torch(torch.torch, torch.wrap)
    else:
        candidates.check(case, "torch", case.torch(torch.torch, torch.wrap))


# Options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--op", "frob"), "bench: --op: expected one of store_kv, "),
        (("--model", "llama-0"), "bench: --model: expected one of llama-3.1-8b, "),
        (
            ("--format", "fp9"),
            "bench: --format: expected one of bf16, fp8_e4m3, fp16, fp32, got fp9",
        ),
        (("--device", "frob"), "bench: --device: "),
        (("--device", "cuda:63"), "bench: cuda:63"),
        (("--op", "store_mla", "--model", "llama-3.1-8b"), "bench: no case: llama-3.1-8b has none"),
        (("--compare", "a", "b"), "bench: --compare: "),
    ],
)
def test_a_wrong_option_is_one_line(capsys, arguments, said):
    assert bench_script.main(["models", *arguments]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(said) and printed.out == ""


def test_a_file_of_something_else_is_named(tmp_path, capsys):
    file = tmp_path / "other.json"
    for text in ("[]", '{"rows": [{"case": "x"}]}', "no JSON"):
        file.write_text(text)
        assert bench_script.main(["models", "--compare", str(file), str(file)]) == 2
        line = f"bench: --compare: expected a file that --json has written, got {file}\n"
        assert capsys.readouterr().err == line


@pytest.mark.parametrize("option", ["--tokens", "--batch", "--context", "--rotate-mb"])
def test_a_size_below_one_is_refused(capsys, option):
    with pytest.raises(SystemExit) as end:
        bench_script.main(["models", option, "0"])
    assert end.value.code == 2
    assert "expected at least 1, got 0" in capsys.readouterr().err
