"""Where no kernel can be compiled: array expressions, with one warning, and the same results."""

from __future__ import annotations

import gc
import itertools
import logging
import stat
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
from helpers import (
    FORMATS,
    QUANTISED,
    Case,
    all_patterns,
    random_elements,
    rounding_boundaries,
)

import kvcupy as kv
from kvcupy import devices, sources
from kvcupy.devices import cxx
from kvcupy.devices.host import HostDevice

ROOT = Path(__file__).resolve().parents[1]
PAIRS = (("bf16", "bf16"), ("fp16", "fp8_e4m3"), ("fp32", "int8"), ("fp8_e5m2", "fp16"))
EVERY_PAIR = list(itertools.product(FORMATS, FORMATS))
QUANTISING = [pair for pair in EVERY_PAIR if pair[1] in QUANTISED]


def fresh_host(monkeypatch, cache_dir) -> HostDevice:
    """Put a host device in place that has compiled nothing, and whose operations ask it again."""
    host = HostDevice()
    monkeypatch.setitem(devices._devices, "host", host)
    for name, module in list(sys.modules.items()):
        if name.startswith("kvcupy.ops.") and hasattr(module, "_plans"):
            monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(kv.config, "_warned", set())
    monkeypatch.setattr(kv.config, "fallback", "warn")
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(cache_dir))
    return host


@pytest.fixture
def host(monkeypatch, tmp_path):
    return fresh_host(monkeypatch, tmp_path)


@pytest.fixture
def no_compiler(monkeypatch, host):
    """The host device on a machine without a C++ compiler; a warning of NumPy's is an error."""
    monkeypatch.setattr(cxx, "find_compiler", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield host


@pytest.fixture
def warned(caplog):
    """The messages logged so far."""
    caplog.set_level(logging.WARNING, logger="kvcupy")
    return lambda: [r.getMessage() for r in caplog.records if r.name.startswith("kvcupy")]


def small(case, pair=("fp32", "fp16"), tokens=6):
    """K, V and their caches of eight slots."""
    return (
        case.input(pair[0], (tokens, 2, 8), name="key"),
        case.input(pair[0], (tokens, 2, 6), name="value"),
        case.output(pair[1], (8, 2, 8), name="k_cache"),
        case.output(pair[1], (8, 2, 6), name="v_cache"),
    )


def arrays_of(args):
    return [arg.array for arg in args]


# The same results -----------------------------------------------------------------------------


def telling_values(source, target):
    """Every pattern of a small format; from fp32, all rounding boundaries and noise."""
    noise = random_elements(np.random.default_rng(1), source, 2048)
    if source == target == "fp32":
        return noise
    if source == "fp32":
        return np.concatenate([rounding_boundaries(target), noise])
    return np.concatenate([all_patterns(source), noise])


@pytest.mark.parametrize(("source", "target"), EVERY_PAIR)
def test_every_pair_of_formats(no_compiler, source, target):
    case = Case(no_compiler, 1)
    values = telling_values(source, target)
    values = np.resize(values, (-(-values.size // 512), 2, 256))
    tokens = len(values)
    slots = case.rng.permutation(tokens)
    key = case.place(values, source, name="key")
    value = case.place(values[::-1], source, name="value")
    scales = {"k_scale": 0.37, "v_scale": np.float32([3.0, 1 / 3])} if target in QUANTISED else {}
    for options in ({}, scales):
        caches = [case.output(target, (tokens, 2, 256), name=f"{s}_cache") for s in "kv"]
        case.store_kv(key, value, *caches, slots, **options)


@pytest.mark.parametrize(("source", "target"), QUANTISING)
def test_dynamic_scales(no_compiler, source, target):
    case = Case(no_compiler, 2)
    values = np.resize(case.rng.permutation(telling_values(source, target)), (40, 3, 32))
    key = case.place(values, source, name="key")
    value = case.input(source, (40, 3, 24), name="value")
    caches = [case.output(target, (12, 4, 3, width)) for width in (32, 24)]
    case.store_kv(
        key, value, *caches, case.rng.permutation(np.arange(-4, 50))[:40],
        k_scale_cache=case.output("fp32", (48, 3), name="k_scale_cache"),
        v_scale_cache=case.output("fp32", (48, 3), name="v_scale_cache"),
    )  # fmt: skip


SCALES = {
    "none": None, "float": 0.7, "one element": np.float32([1.3]),
    "per head": np.float32([0.2, 5.0, 1e-3]), "dynamic": "dynamic",
}  # fmt: skip


@pytest.mark.parametrize(("k", "v"), list(itertools.permutations(SCALES, 2)))
def test_scales_differ_for_key_and_value(no_compiler, k, v):
    case = Case(no_compiler, 3)
    key, value = case.input("bf16", (7, 3, 16)), case.input("bf16", (7, 3, 10))
    caches = [case.output("fp8_e4m3", (3, 4, 3, width)) for width in (16, 10)]
    options = {}
    for side, name in (("k", k), ("v", v)):
        if name == "dynamic":
            options[f"{side}_scale_cache"] = case.output("fp32", (12, 3))
        else:
            options[f"{side}_scale"] = SCALES[name]
    case.store_kv(key, value, *caches, [7, -1, 0, 11, 3, 2, -5], **options)


CACHES = {
    "NHD": ((4, 3, 2, 12), None),
    "HND": ((4, 2, 3, 12), None),
    "slots": ((12, 2, 12), None),
    "NHD strided": ((4, 2, 3, 2, 17), lambda a: a[:, 1, :, :, 2:14]),
    "HND strided": ((2, 4, 5, 3, 12), lambda a: a[1, :, 1:5:3]),
    "pages reversed": ((4, 3, 2, 12), lambda a: a[::-1]),
    "2-D": ((12, 12), None),
}
ROWS = {
    "contiguous": ((9, 2, 12), None),
    "packed QKV": ((9, 6, 12), lambda a: a[:, 2:4]),
    "reversed": ((9, 2, 12), lambda a: a[::-1, ::-1]),
    "one row for all": ((1, 1, 12), lambda a: np.broadcast_to(a, (9, 2, 12))),
    "wider, more than slots": ((11, 2, 15), lambda a: a[..., 3:]),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cache", CACHES)
def test_layouts_and_strides(no_compiler, cache, rows, pair):
    case = Case(no_compiler, 4)
    key, value = (case.input(pair[0], *ROWS[rows]) for _ in range(2))
    if cache == "2-D":
        key, value = (arg.sub(lambda a: a[:, 0]) for arg in (key, value))
    caches = [case.output(pair[1], *CACHES[cache]) for _ in range(2)]
    options = {"layout": "HND"} if cache.startswith("HND") else {}
    slots = case.slots([11, -1, 3, 0, -(2**31), 7, 5, 2, 10], "int32", -2)
    case.store_kv(key, value, *caches, slots, **options)


def test_slots(no_compiler):
    """Padding, a sink, slots past the end, none at all."""
    case = Case(no_compiler, 5)
    for pair in PAIRS:
        case.store_kv(*small(case, pair), [5, 0, 7, -1, 3, 1], skip_slot=7)
        case.store_kv(*small(case, pair), [8, 0, 2**40, -1, -(2**63), 2**63 - 1])
        case.store_kv(*small(case, pair), case.slots([3, 2**31 - 1, 1], "int32"))
        case.store_kv(*small(case, pair), [])
    scale_caches = [case.output("fp32", (8, 2)) for _ in range(2)]
    case.store_kv(*small(case, ("bf16", "int8")), [3, 8, -1, 7, 6, 0], skip_slot=7,
                  k_scale_cache=scale_caches[0], v_scale_cache=scale_caches[1])  # fmt: skip


def test_key_and_value_of_different_kinds(no_compiler):
    case = Case(no_compiler, 6)
    key, value = case.input("fp32", (5, 2, 8)), case.input("bf16", (5, 2, 6))
    k_cache, v_cache = case.output("fp8_e4m3", (8, 2, 8)), case.output("bf16", (8, 2, 6))
    case.store_kv(key, value, k_cache, v_cache, [3, 8, 9, 1, 0], k_scale=0.1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(("source", "target"), EVERY_PAIR)
def test_mla(no_compiler, source, target, paged):
    case = Case(no_compiler, 7)
    latent = case.input(source, (6, 20), lambda a: a[:, 3:])
    rope_key = case.input(source, (9, 5))
    cache = case.output(target, (3, 4, 25) if paged else (12, 25), lambda a: a[..., 2:24])
    for scale in (None, 0.37, np.float32([1.7])) if target in QUANTISED else (None, 1.0):
        case.store_mla(latent, rope_key, cache, [11, -1, 0, 12, 7, 4], scale=scale, skip_slot=7)


def test_torch_tensors(no_compiler):
    torch = pytest.importorskip("torch")
    case = Case(no_compiler, 8)
    args = small(case)
    for arg in args:
        arg.array = torch.from_numpy(arg.array)
    case.store_kv(*args, [2, 0, -1, 7, 6, 1])


def test_the_expressions_really_run(no_compiler, monkeypatch, warned):
    """The control of the tests above: no kernel was launched in them."""
    monkeypatch.setattr(no_compiler, "launch", lambda *a: pytest.fail("a kernel was launched"))
    case = Case(no_compiler, 9)
    case.store_kv(*small(case), range(6))
    assert len(warned()) == 1


# Faults, errors and streams -------------------------------------------------------------------


def test_faults_are_counted_and_cleared(no_compiler):
    case = Case(no_compiler, 10)
    args = arrays_of(small(case, ("bf16", "bf16")))
    kv.store_kv(*args, np.array([0, 9, 8, -1, 1, 2**40]))
    kv.store_kv(*args, np.array([77, 3], np.int32))
    with pytest.raises(kv.IndexFault, match=r"store_kv: slot_mapping\[1\] is 9.*were 3 more"):
        kv.check_faults(no_compiler)
    kv.check_faults(no_compiler)


def test_wrong_arguments_still_raise(no_compiler, warned):
    case = Case(no_compiler, 11)
    key, value, k_cache, v_cache = arrays_of(small(case))
    slots = case.slots(range(6)).array
    for error, args, options in (
        (ValueError, (key, value, v_cache, k_cache, slots), {}),
        (TypeError, (key, value, k_cache, v_cache, slots.astype(np.float32)), {}),
        (ValueError, (key, value, k_cache, k_cache, slots), {}),
        (ValueError, (key[:5], value, k_cache, v_cache, slots), {}),
        (ValueError, (key, value, k_cache, v_cache, slots), {"k_scale": 2.0}),
        (ValueError, (key, value, k_cache, v_cache, slots), {"layout": "NDH"}),
        (TypeError, (key, value, k_cache, v_cache, slots), {"skip_slot": 1.5}),
        (TypeError, (key, value, k_cache, v_cache, slots), {"stream": 3}),
    ):
        with pytest.raises(error):
            kv.store_kv(*args, **options)
        case.check("", [])
    assert warned() == []


def test_an_explicit_stream_keeps_its_order(no_compiler):
    """The first store waits at a gate, the second overwrites it, the caller goes on at once."""
    case = Case(no_compiler, 12)
    stream, gate = no_compiler.stream(), threading.Event()
    args = small(case, ("fp32", "fp16"), tokens=12)
    first = [arg.array for arg in args]
    second = [arg.array[6:] for arg in args[:2]]
    slots = case.slots(range(6))
    stream.call(gate.wait)
    before = [array.copy() for array in first[2:]]
    kv.store_kv(*first, slots.array, stream=stream)
    kv.store_kv(*second, *first[2:], slots.array, stream=stream)
    assert all(np.array_equal(a, b) for a, b in zip(first[2:], before, strict=True))
    gate.set()
    stream.synchronize()
    later = [arg.sub(lambda a: a[6:]) for arg in args[:2]]
    case.store_kv(*later, *args[2:], slots)


def test_arrays_live_until_the_stream_has_used_them(no_compiler):
    stream, gate = no_compiler.stream(), threading.Event()
    caches = [np.zeros((8, 2, 4), np.float16) for _ in range(2)]
    stream.call(gate.wait)
    key = np.full((2, 2, 4), 3, np.float32)
    kv.store_kv(key, key, *caches, np.array([1, 5]), stream=stream)
    alive = weakref.ref(key)
    del key
    gc.collect()
    assert alive() is not None
    gate.set()
    stream.synchronize()
    assert (caches[1][[1, 5]] == 3).all()
    gc.collect()
    assert alive() is None


def test_in_a_graph(no_compiler):
    case = Case(no_compiler, 13)
    args, slots = small(case), case.slots([5, 2, -1, 0, 7, 1])
    stream = no_compiler.stream()
    with stream.capture() as graph:
        kv.store_kv(*arrays_of(args), slots.array, stream=stream)
    case.check("", [])
    graph.launch(stream)
    stream.synchronize()
    case.store_kv(*args, slots)


# What is said ---------------------------------------------------------------------------------


def test_one_warning_an_operation_and_cause(no_compiler, warned):
    case = Case(no_compiler, 14)
    for pair in PAIRS:  # many signatures, one cause
        for _ in range(3):
            case.store_kv(*small(case, pair), range(6))
    (message,) = warned()
    assert message.startswith("store_kv runs as array expressions, slowly, because ")
    assert "no C++ compiler was found" in message
    assert f"pip install '{ROOT}[host]'" in message
    for _ in range(2):
        case.store_mla(case.input("bf16", (2, 3)), case.input("bf16", (2, 2)),
                       case.output("bf16", (4, 5)), [0, 2])  # fmt: skip
    assert [m.split()[0] for m in warned()] == ["store_kv", "store_mla"]


def test_another_cause_is_another_warning(no_compiler, warned):
    for cause in ("no driver", "no driver", "no header"):
        kv.config.fall_back("store_kv", kv.CompileError(cause, "a log"))
    assert len(warned()) == 2
    assert "a log" in warned()[0]


def test_no_warning_before_anything_runs(no_compiler, warned):
    case = Case(no_compiler, 15)
    case.store_kv(*small(case, tokens=0), [])
    assert warned() == []


def test_the_host_device_needs_no_cuda_headers(host, monkeypatch, tmp_path, warned):
    monkeypatch.setattr(sources, "header_places", lambda: pytest.fail("looked for headers"))
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path))  # where nothing is compiled yet
    monkeypatch.setattr(kv.config, "fallback", "error")
    case = Case(host, 16)
    case.store_kv(*small(case), range(6))
    assert warned() == []
    assert list(tmp_path.glob("*.so"))


def test_error_raises_and_changes_nothing(no_compiler, monkeypatch, warned):
    monkeypatch.setattr(kv.config, "fallback", "error")
    case = Case(no_compiler, 17)
    args, slots = arrays_of(small(case)), case.slots(range(6)).array
    for _ in range(2):
        with pytest.raises(kv.CompileError, match="no C\\+\\+ compiler was found"):
            kv.store_kv(*args, slots)
        case.check("", [])
    assert warned() == []


def test_the_setting_counts_at_the_call(no_compiler, monkeypatch):
    """A signature planned under one setting obeys the other one later."""
    case = Case(no_compiler, 18)
    args, slots = small(case), case.slots(range(6))
    case.store_kv(*args, slots)
    kv.config.fallback = "error"
    with pytest.raises(kv.CompileError):
        kv.store_kv(*arrays_of(args), slots.array)
    kv.config.fallback = "warn"
    case.store_kv(*args, slots)


def test_an_error_raised_again_is_no_longer(no_compiler, monkeypatch):
    """Each raise has a traceback of its own; one exception would collect them all."""
    monkeypatch.setattr(kv.config, "fallback", "error")
    args = [np.zeros((2, 2, 4), np.float32) for _ in range(4)]
    depths = []
    for _ in range(3):
        with pytest.raises(kv.CompileError) as caught:
            kv.store_kv(*args, np.arange(2))
        depths.append(len(caught.traceback))
    assert depths[1] == depths[2]


@pytest.mark.parametrize("value", ["ignore", "", None, True, "WARN"])
def test_other_settings_are_refused(no_compiler, value):
    with pytest.raises(ValueError, match='fallback: expected "warn" or "error", got'):
        kv.config.fallback = value
    assert kv.config.fallback == "warn"


@pytest.mark.parametrize("setting", ["warn", "error"])
def test_no_array_is_kept_after_the_call(no_compiler, monkeypatch, setting):
    """Neither by a remembered plan nor by the traceback of its cause."""
    monkeypatch.setattr(kv.config, "fallback", setting)
    key = np.zeros((2, 2, 4), np.float32)
    caches = [np.zeros((8, 2, 4), np.int8) for _ in range(2)]
    scales = [np.zeros((8, 2), np.float32), np.ones(2, np.float32)]
    slots = np.array([1, 5])
    try:
        kv.store_kv(key, key, *caches, slots, k_scale_cache=scales[0], v_scale=scales[1])
    except kv.CompileError as error:
        assert setting == "error", error
    alive = [weakref.ref(a) for a in (key, *caches, *scales, slots)]
    del key, caches, scales, slots
    gc.collect()
    assert [ref() is not None for ref in alive] == [False] * 6


# Compilers that fail --------------------------------------------------------------------------


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Make an executable that plays a compiler, and let $CXX name it."""

    def make(script: str, *, executable: bool = True):
        path = tmp_path / "my c++"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | (stat.S_IXUSR if executable else 0))
        monkeypatch.setenv("CXX", f"'{path}' --flag")
        return path

    cxx.find_compiler.cache_clear()
    yield make
    cxx.find_compiler.cache_clear()


def test_cxx_comes_first_with_its_flags(compiler):
    path = compiler("echo 'my compiler 1.0'; echo more")
    assert cxx.find_compiler() == cxx.Compiler((str(path), "--flag"), "my compiler 1.0")


@pytest.mark.parametrize("script", ["exit 1", "kill $$"])
def test_a_compiler_that_does_not_answer_is_passed_over(compiler, warned, script):
    path = compiler(script)
    for _ in range(2):
        found = cxx.find_compiler()
        assert found is None or found.command[0] != str(path)
    (message,) = warned()
    assert message.startswith("CXX=") and str(path) in message and "is ignored" in message


@pytest.mark.parametrize("value", ["/no/such/compiler", "g++ 'unclosed", " "])
def test_a_useless_cxx_is_passed_over(compiler, monkeypatch, warned, value):
    monkeypatch.setenv("CXX", value)
    found = cxx.find_compiler()
    assert ["is ignored" in message for message in warned()] == [True] * bool(value.strip())
    assert found is None or not value.startswith(found.command[0] + " ")


def test_a_compiler_that_cannot_be_started_is_passed_over(compiler):
    path = compiler("echo 1.0", executable=False)
    found = cxx.find_compiler()
    assert found is None or found.command[0] != str(path)


def test_a_compiler_that_fails_is_reported_with_its_log(host, compiler, warned):
    compiler(
        '[ "$2" = --version ] && echo 1.0 && exit; echo "kernel.cpp: no space left" >&2; exit 3'
    )
    case = Case(host, 19)
    case.store_kv(*small(case), range(6))
    (message,) = warned()
    assert "my c++ failed on KVCUPY_HOST_KERNEL" in message
    assert "kernel.cpp: no space left" in message
    kv.config.fallback = "error"
    with pytest.raises(kv.CompileError) as caught:
        kv.store_kv(*arrays_of(small(case)), np.arange(6))
    assert caught.value.log == "kernel.cpp: no space left\n"


@pytest.mark.parametrize("script", ["", 'while [ "$1" != -o ]; do shift; done; echo text > "$2"'])
def test_a_compiler_that_makes_nothing_loadable(host, compiler, warned, script):
    compiler(f'[ "$2" = --version ] && echo 1.0 && exit; {script or "true"}')
    case = Case(host, 20)
    case.store_kv(*small(case), range(6))
    (message,) = warned()
    assert "store_kv runs as array expressions" in message


def test_nothing_falls_back_where_a_compiler_works(host, warned, monkeypatch):
    if cxx.find_compiler() is None:
        pytest.skip("no C++ compiler here")
    case = Case(host, 21)
    case.store_kv(*small(case, ("bf16", "bf16")), range(6))
    assert warned() == []
