"""`overlap_demo.py offload` and `bench.py transfer`: what they report, what they notice."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from stream_cases import Gate, run_ahead

import kvcupy as kv
from kvcupy.cache.engine import Transfer

pytestmark = pytest.mark.usefixtures("scripts_on_path")


def only_on_the_host(device):
    if device.name != "host":
        pytest.skip("the wrong byte, or the late one, is the host's")


def offload(device_name, *arguments):
    import overlap_demo

    return overlap_demo.main(["offload", "--device", device_name, "--quick", *map(str, arguments)])


def bench(device_name, *arguments):
    import bench

    quick = ["--device", device_name, "--quick", "--case-mb", "0.1"]
    return bench.main(["transfer", *quick, *map(str, arguments)])


@pytest.fixture
def flip_byte(monkeypatch):
    """Let every transfer be followed by one wrong bit in the last of its target pages."""
    from kvcupy.ops.transfer import PreparedTransfer

    issue = PreparedTransfer.issue

    def wrong(self, pairs, stream, **options):
        issue(self, pairs, stream, **options)
        part = kv.device("host").carrier(self.plan.transfers[0].dst.parts[0])

        def flip():
            part[pairs.dst[-1], 0].reshape(-1).view(np.uint8)[5] ^= 2

        kv.device("host").run(flip, kv.device("host").as_stream(stream))

    monkeypatch.setattr(PreparedTransfer, "issue", wrong)


# The demo ------------------------------------------------------------------------------------

WAYS = ["load all, then compute", "a copy per page", "engine"]


@pytest.mark.usefixtures("lenient_host")
def test_demo_reports_every_way(device_name, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, report = tmp_path / "out", tmp_path / "new" / "report.json"
    sizes = ("--page-sizes", 1, 16, "--layouts", "page_first")
    assert offload(device_name, *sizes, "--json", report, "--out", out) == 0
    read = json.loads(report.read_text())

    cases = [(row["page_size"], row["layout"], row["way"]) for row in read["rows"]]
    assert cases == [(size, "page_first", way) for size in (1, 16) for way in WAYS]
    for row in read["rows"]:
        assert row["copy_ms"] >= row["least_copy_ms"] > 0
        assert row["total_ms"] >= row["least_total_ms"] > 0
        shown = row["total_ms"] - row["compute_ms"]
        assert row["hidden"] == pytest.approx((row["copy_ms"] - shown) / row["copy_ms"])
        assert isinstance(row["least_hidden"], float) and row["runs"] >= 1
        assert 0 < row["hidden_at_most"] <= 1 - 1 / read["layers"]
        assert row["gb_per_s"] == pytest.approx(read["bytes_loaded"] / row["copy_ms"] / 1e6)
    assert read["bytes_loaded"] == read["tokens_loaded"] * read["layers"] * 2 * 8 * 128 * 2

    printed = capsys.readouterr()
    assert "of the copy hidden in 2 cases" in printed.out
    assert "pages of 16, page_first ..." in printed.err
    assert lanes(out / "timeline.json") == {"load", "compute"}
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("matmul") == names.count("gather_kv") == 2 * read["layers"] == 8
    assert {f"load {layer}" for layer in range(4)} <= set(names)
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def lanes(path):
    events = json.loads(path.read_text())["traceEvents"]
    return {e["args"]["name"] for e in events if e["name"] == "thread_name"}


def test_demo_notices_one_wrong_byte(device, flip_byte, capsys):
    only_on_the_host(device)
    assert offload("host", "--page-sizes", 16, "--layouts", "layer_first") == 1
    said = capsys.readouterr().err
    assert re.search(r"wrong result: load all, then compute: .* \d of .* bytes differ", said)


@pytest.mark.parametrize("way", ["a copy per page", "engine"])
def test_demo_notices_a_layer_that_does_not_wait(device, monkeypatch, way):
    """Control: pages come late, and with the compute stream's wait removed it reads old ones."""
    only_on_the_host(device)
    from common.checks import WrongBytes
    from common.measure import random_bits
    from common.models import MODELS
    from overlap.offload import OffloadedModel, ways

    bits = random_bits(np.random.default_rng(0), (2, 32, 3, 2, 16))
    model = OffloadedModel(device, MODELS["llama-3.1-70b-tp8"], bits, 4, "page_first")
    found = ways(model)[way]

    def late_run(*, is_control=False):
        model.shuffle_pages()
        gate = Gate(model.loader)
        found.run()
        run_ahead([gate], model.main, is_control=is_control)
        device.synchronize()

    late_run()
    model.check_reads(way)
    model.check_pages(way)

    def deaf_wait_layer(self, layer, stream):
        self._sent()

    wait = type(model.main).wait
    deaf = lambda self, other: None if self is model.main else wait(self, other)  # noqa: E731
    monkeypatch.setattr(Transfer, "wait_layer", deaf_wait_layer)
    monkeypatch.setattr(type(model.main), "wait", deaf)
    late_run(is_control=True)
    model.check_pages(way)  # they did come
    with pytest.raises(WrongBytes, match=f"{way}: K as "):
        model.check_reads(way)


# The benchmark -------------------------------------------------------------------------------

METHODS = ["kernel", "copy", "staged", "auto"]


def test_bench_reports_every_section(device_name, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert bench(device_name, "--json", report) == 0
    read = json.loads(report.read_text())
    for row in read["rows"]:
        token_bytes = row["row_bytes"] * row["layers"] * (1 if row["latent"] else 2)
        assert row["bytes"] == row["pages"] * row["page_size"] * token_bytes
        for name, us in row["us"].items():
            assert us >= row["least_us"][name] > 0
            assert row["gb_per_s"][name] == pytest.approx(row["bytes"] / us / 1e3)
        assert read["peak_gb_per_s"][row["direction"]] > 0

    def of(section):
        return [row for row in read["rows"] if row["section"] == section]

    scattered = of("scattered")
    assert {row["row_bytes"] for row in scattered} == {1024}
    assert {row["page_size"] for row in scattered} == {1}
    each = "one copy per page and layer"
    assert [list(row["us"]) for row in scattered] == [[each, *METHODS]] * 4
    assert [row["direction"] for row in scattered] == ["to device", "to host"] * 2
    for row in scattered:
        for name, ratio in row["ratios"].items():
            assert ratio == pytest.approx(row["us"][each] / row["us"][name])
    assert {row["latent"] for row in of("rows")} == {True, False}
    assert {tuple(row["layouts"]) for row in of("layouts")} == {
        ("layer_first", "page_first"), ("layer_first", "page_first_direct")
    }  # fmt: skip
    assert "times as fast" in capsys.readouterr().out


def test_bench_notices_one_wrong_byte(device, flip_byte, capsys):
    only_on_the_host(device)
    assert bench("host", "--sections", "rows") == 1
    said = capsys.readouterr().err
    assert re.search(r"kernel, to device, part 0: 1 of .* bytes differ", said)


def test_bench_notices_what_an_earlier_transfer_has_left(device):
    from benchmarks.pools import Pools, Shape
    from common.checks import WrongBytes
    from common.timers import DIRECTIONS

    case, stream = Pools(device, Shape(64, 4, 2, 5, ("layer_first", "page_head"))), device.stream()
    for direction in DIRECTIONS:
        case.scatter()
        case.copy_each_page(direction, stream)
        device.synchronize()
        case.check("copies", direction)
        case.scatter()
        with pytest.raises(WrongBytes, match=r"nothing, .* part 0"):
            case.check("nothing", direction)
        case.transfer(direction, stream, method="kernel")
        device.synchronize()
        case.check("kernel", direction)
