"""User-defined kernels: compiled for both devices, checked against their mirror, and in order."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kvcupy as kv
from kvcupy.devices import cxx
from kvcupy.ops.kv_operand import OPERAND_PARAMS

SCALE = """\
#include "numeric.cuh"
struct Params {
  const float* source;
  float* target;
  int count;
  float factor;
};
__global__ void scale(const __grid_constant__ Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.count) p.target[i] = p.source[i] * p.factor;
}
"""
FIELDS = [
    ("source", np.uint64), ("target", np.uint64), ("count", np.int32), ("factor", np.float32),
]  # fmt: skip


def scale_kernel(source=SCALE, fields=FIELDS, name="scale", **options):
    return kv.kernel(source, name, fields, **{"writes": ["target"], **options})


@pytest.fixture(scope="module")
def scale():
    return scale_kernel()


@pytest.fixture
def arrays(device):
    return device.asarray(np.arange(6, dtype=np.float32)), device.zeros(6, np.float32)


def call(scale, arrays, **options):
    x, y = arrays
    scale(**{"grid": 2, "block": 4, "source": x, "target": y, "count": 6, "factor": 3, **options})


def test_a_launch(device, scale, arrays):
    call(scale, arrays)
    assert device.to_numpy(arrays[1]).tolist() == [0, 3, 6, 9, 12, 15]


def test_streams_are_in_order(device, scale, arrays):
    x, y = arrays
    main, other = device.stream(), device.stream()
    with kv.order_checker() as checker, kv.timeline() as timeline:
        call(scale, (x, y), stream=main)
        kv.join(other, main)
        call(scale, (y, x), stream=other, factor=2)
        other.synchronize()
    assert device.to_numpy(x).tolist() == [0, 6, 12, 18, 24, 30]
    assert not checker.reports
    assert [span.name for span in timeline.spans] == ["scale", "scale"]


@pytest.mark.races
def test_a_wait_that_is_missing_is_reported(device, scale, arrays):
    x, y = arrays
    main, other = device.stream(), device.stream()
    with kv.order_checker("record") as checker:
        call(scale, (x, y), stream=main)
        call(scale, (y, x), stream=other)
        kv.join(main, other)
        main.synchronize()
    (first, *_) = checker.reports
    assert (first.first.operation, first.second.operation) == ("scale", "scale")
    assert "target" in str(first)


def test_a_graph_reads_its_arrays_at_replay(device, scale, arrays):
    scale.compile(device)
    stream = device.stream()
    with stream.capture() as graph:
        call(scale, arrays, stream=stream)
    device.copy(arrays[0], device.asarray(np.ones(6, np.float32)), stream=stream)
    graph.launch(stream)
    stream.synchronize()
    assert device.to_numpy(arrays[1]).tolist() == [3] * 6


def test_torch_is_told_what_is_written(scale, device):
    torch = pytest.importorskip("torch")
    if device.kind != "host":
        pytest.skip("tensors of the CPU")
    x, y = torch.ones(6), torch.zeros(6)
    before = y._version
    call(scale, (x, y))
    assert y.tolist() == [3] * 6 and (x._version, y._version) == (0, before + 1)
    with pytest.raises(TypeError, match=r"^source: .*no backward"):
        call(scale, (x.requires_grad_(), y))


# --- What is refused ---


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"count": 6.5}, TypeError, r"^count: expected an integer, got 6\.5"),
        ({"count": 2**31}, ValueError, r"^count: expected what fits int32, got 2147483648"),
        ({"factor": "three"}, TypeError, r"^factor: expected a number"),
        ({"factors": 1}, TypeError, r"^scale: expected source, .*got no field factors"),
        ({"source": 1}, TypeError, r"^source: expected an array, got int"),
        ({"grid": -1}, ValueError, r"^grid: "),
        ({"grid": (1, 1, 1, 1)}, ValueError, r"^grid: "),
        ({"block": 0}, ValueError, r"^block: "),
        ({"block": 4.0}, TypeError, r"^block: "),
        ({"smem_bytes": -4}, ValueError, r"^smem_bytes: "),
        ({"stream": "main"}, TypeError, r"^stream: "),
    ],
)
def test_wrong_arguments_of_a_call(device, scale, arrays, changes, error, message):
    with pytest.raises(error, match=message):
        call(scale, arrays, **changes)
    assert not device.to_numpy(arrays[1]).any()


def test_arrays_that_cannot_be_written(scale):
    x = np.ones(8, np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"^target: expected a writable array"):
        call(scale, (x, frozen))
    with pytest.raises(ValueError, match=r"^target: expected memory of its own, got .*source"):
        call(scale, (x[:6], x[2:]))
    with pytest.raises(TypeError, match="missing target"):
        scale(1, 1, source=x, count=1, factor=1)
    assert (x == 1).all()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"source": 3}, TypeError, r"^source: "),
        ({"source": " "}, TypeError, r"^source: "),
        ({"name": "scale("}, ValueError, r"^name: "),
        ({"fields": 7}, TypeError, r"^params: "),
        ({"fields": "f4"}, TypeError, r"^params: "),
        ({"fields": np.dtype(FIELDS[::-1])}, ValueError, r"^params: .*align=True"),
        ({"fields": [("stream", np.int32)]}, ValueError, r"^params: .*stream"),
        ({"writes": "target"}, TypeError, r"^writes: "),
        ({"writes": ["count"]}, ValueError, r"^writes: .*source, target.*got count"),
        ({"reports": "target"}, ValueError, r"^reports: "),
        ({"reports": "count"}, ValueError, r"^reports: "),
        ({"barriers": "yes"}, TypeError, r"^barriers: "),
        ({"struct": ""}, TypeError, r"^struct: "),
    ],
)
def test_wrong_arguments_of_a_kernel(changes, error, message):
    with pytest.raises(error, match=message):
        scale_kernel(**changes)


def test_a_file(tmp_path, device, arrays):
    (tmp_path / "mine.cu").write_text(SCALE)
    call(scale_kernel(tmp_path / "mine.cu"), arrays)
    assert device.to_numpy(arrays[1]).any()
    with pytest.raises(OSError, match=r"none\.cu"):
        scale_kernel(tmp_path / "none.cu")


# --- What is compiled, for the host and by NVRTC ---


@pytest.fixture(params=["host", "sm_90"])
def target(request):
    if request.param == "sm_90":
        pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    return request.param


def test_a_struct_that_differs_does_not_compile(target):
    fields = [*FIELDS[:2], FIELDS[3], FIELDS[2]]
    with pytest.raises(kv.CompileError, match="offset of factor"):
        scale_kernel(fields=fields).compile(target)


def test_errors_name_file_and_line(target, tmp_path):
    (tmp_path / "mine.cu").write_text(SCALE.replace("p.factor", "p.factors"))
    with pytest.raises(kv.CompileError, match=r"mine\.cu(:|\()10"):
        scale_kernel(tmp_path / "mine.cu").compile(target)


def test_headers_of_the_working_directory_are_not_taken(target, tmp_path, monkeypatch):
    """They would be compiled, and kept as the package's own."""
    for name in ("numeric.cuh", "common.cuh"):
        (tmp_path / name).write_text("#error not this one\n")
    monkeypatch.chdir(tmp_path)
    scale_kernel(f"// {tmp_path}\n{SCALE}").compile(target)


def test_what_is_compiled_is_kept_by_its_source(monkeypatch):
    scale_kernel().compile("host")

    def fail(*arguments):
        raise kv.CompileError("not kept")

    monkeypatch.setattr(cxx, "_compile", fail)
    scale_kernel().compile("host")
    with pytest.raises(kv.CompileError, match="not kept"):
        scale_kernel(SCALE.replace("*", "+", 1).replace("+", "*", 1) + "// other\n").compile("host")


NESTED = """\
#include "kv_operand.cuh"
struct Mine {
  const char* rows;
  char* cache;
  const float* none;
  KVOperand k;
  int table[2];
};
template <typename TIn, typename TOut, int kCount>
__global__ void __launch_bounds__(32) one_row(const __grid_constant__ Mine p) {
  if (p.none) return;
  Pack<TIn, kCount> in;
  in.load(p.rows + p.k.token_bytes);
  const auto out = convert<TIn, TOut>(in, ScaleDivisor(p.k.scale));
  out.store(p.cache + slot_offset_bytes(p.k.cache, p.table[1], 4, 2));
}
"""


@pytest.mark.parametrize(
    ("table", "error"),
    [([1.5, 2], TypeError), (np.array([1.0, 2.0]), TypeError), ("12", TypeError),
     ([2**31, 0], ValueError), (np.array([0, 2**40 + 1]), ValueError), ([1, 2, 3], ValueError)],
    ids=str,
)  # fmt: skip
def test_a_field_that_is_an_array_holds_all_of_its_value(table, error, arrays):
    """As a number does: nothing is cut off, and nothing wraps."""
    scale = scale_kernel(fields=[*FIELDS, ("table", np.int32, (2,))])
    with pytest.raises(error, match=r"^table: expected (integers|what fits)"):
        call(scale, arrays, table=table)


def test_templates_nested_structs_and_null_pointers(device):
    kernel = kv.kernel(
        NESTED, "one_row<half, int8, 8>",
        [*((n, np.uint64) for n in ("rows", "cache", "none")), ("k", OPERAND_PARAMS),
         ("table", "2i4")],
        writes=["cache"], struct="Mine",
    )  # fmt: skip
    rows = device.asarray(np.arange(16, dtype=np.float16).reshape(2, 8))
    cache = device.zeros((2, 4, 8), np.int8)
    strides = {"page_bytes": 32, "offset_bytes": 8, "head_bytes": 8}
    operand = dict.fromkeys(OPERAND_PARAMS.names, 0) | {
        "token_bytes": 16, "scale": 0.5, "width": 8, "cache": strides,
        "group_scales": dict.fromkeys(OPERAND_PARAMS["group_scales"].names, 0)
        | {"strides": strides},
    }  # fmt: skip
    arguments = {"grid": 1, "block": 1, "rows": rows, "cache": cache, "none": None,
                 "k": operand, "table": [0, 6]}  # fmt: skip
    kernel(**arguments)
    result = device.to_numpy(cache)
    assert result[1, 2].tolist() == [16, 18, 20, 22, 24, 26, 28, 30]
    assert np.count_nonzero(result) == 8
    wrong = {**operand, "cache": {"page_bytes": 32}}
    for field, value, message in (
        ("k", 3, r"^k: expected a mapping of token_bytes"),
        ("k", wrong, r"^k\.cache: expected a mapping of page_bytes, offset_bytes"),
        ("k", {**operand, "width": 1.5}, r"^k\.width: expected an integer"),
        ("table", [1, 2, 3], r"^table: "),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            kernel(**{**arguments, field: value})


def test_the_kernel_of_the_guide():
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")
    page = (Path(__file__).parents[2] / "docs/your_own_kernel.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(code.partition("device = ")[0], names)
    for arch in ("sm_75", "sm_90", "sm_120"):
        names["kernel"].compile(arch)
