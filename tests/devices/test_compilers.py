"""What the host device does with the compilers of a machine: which it takes, and what it says."""

from __future__ import annotations

import logging
import stat
import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers import Case, fresh_host

import kvcupy as kv
from kvcupy import sources
from kvcupy.devices import cxx

ROOT = Path(__file__).resolve().parents[2]
PAIRS = (("bf16", "bf16"), ("fp16", "fp8_e4m3"), ("fp32", "int8"), ("fp8_e5m2", "fp16"))


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


# What is said ---------------------------------------------------------------------------------


def test_another_cause_is_another_warning(no_compiler, warned):
    for cause in ("no driver", "no driver", "no header"):
        kv.config.fall_back("store_kv", kv.CompileError(cause, "a log"))
    assert len(warned()) == 2
    assert "a log" in warned()[0]


def test_the_host_device_needs_no_cuda_headers(host, monkeypatch, tmp_path, warned):
    monkeypatch.setattr(sources, "header_places", lambda: pytest.fail("looked for headers"))
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path))  # where nothing is compiled yet
    monkeypatch.setattr(kv.config, "fallback", "error")
    case = Case(host, 16)
    case.store_kv(*small(case), range(6))
    assert warned() == []
    assert list(tmp_path.glob("*.so"))


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


@pytest.mark.parametrize("value", ["ignore", "", None, True, "WARN"])
def test_other_settings_are_refused(no_compiler, value):
    with pytest.raises(ValueError, match='fallback: expected "warn" or "error", got'):
        kv.config.fallback = value
    assert kv.config.fallback == "warn"


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
    assert "store_kv runs in NumPy" in message


def test_nothing_falls_back_where_a_compiler_works(host, warned, monkeypatch):
    if cxx.find_compiler() is None:
        pytest.skip("no C++ compiler here")
    case = Case(host, 21)
    case.store_kv(*small(case, ("bf16", "bf16")), range(6))
    assert warned() == []
