"""The compile check complains of what is wrong and of nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

import compile_check
from common import nvdisasm
from compile_check import REGISTER_BUDGET, check, read_log
from helpers import full_only

from kvcupy import ops
from kvcupy.devices import nvrtc
from kvcupy.kernels import Kernel
from kvcupy.ops import attention_kernels, promises_128_bits, store, transfer_kernels

KERNELS = Path(__file__).resolve().parents[1] / "kernels"
PARAMS = np.dtype([("in", np.uint64), ("out", np.uint64), ("count", np.int32)], align=True)
BUDGETS = dict.fromkeys(("wide", "narrow", "warns", "spills", "stack", "broken"), 64)


def specialise(name, value=128):
    return Kernel("faulty.cu", name, PARAMS, "FaultyParams").specialise(value)


def run(*specialisations, archs=("sm_80",), budgets=BUDGETS, **options):
    return check(specialisations, archs, budgets=budgets, kernels_dir=KERNELS, **options)


def test_a_good_kernel_passes_everywhere():
    report = run(specialise("wide"), archs=compile_check.ARCHS, promises_128_bits=lambda _: True)
    assert report.ok, str(report)
    assert [entry.arch for entry in report.entries] == list(compile_check.ARCHS)
    assert all(0 < entry.usage.registers <= 64 for entry in report.entries)


# Kernel, options of `run`, and what its one problem says.
FAULTY = {
    "a warning": ("warns", 128, {}, r"faulty.cu:warns<128> sm_80: .*unused"),
    "spilled registers": ("spills", 30, {"options": ("-maxrregcount=24",)},
                          r", [1-9]\d* bytes spilled: expected none"),
    "an array in memory": ("stack", 16, {}, "64 bytes of stack, 0 bytes spilled"),
    "over the budget": ("spills", 30, {"budgets": {"spills": 40}},
                        "registers, over the budget of 40"),
    "no budget": ("wide", 128, {"budgets": {}}, "wide has no entry in REGISTER_BUDGET"),
    "it does not compile": ("broken", 128, {}, "NoSuchType"),
    "PTX instead of a cubin": ("wide", 128, {"archs": ("sm_999",)}, "sm_999"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTY)
def test_what_is_wrong_is_reported(case):
    name, value, options, said = FAULTY[case]
    report = run(specialise(name, value), **options)
    assert not report.ok and re.search(said, "".join(report.problems), re.DOTALL)
    assert len(report.problems) == 1


def test_narrow_accesses_are_reported_where_wide_ones_are_promised():
    report = run(specialise("narrow"), promises_128_bits=lambda _: True)
    assert report.problems == [
        "faulty.cu:narrow<128> sm_80: no 16-byte load (LDG.E.128) in its SASS",
        "faulty.cu:narrow<128> sm_80: no 16-byte store (STG.E.128) in its SASS",
    ]
    assert run(specialise("narrow")).ok


# Machine code of conversions ----------------------------------------------------------------------

QUANTISE = store.CONVERT.specialise("bfloat16", "fp8_e4m3", 8)
DEQUANTISE = store.GATHER_CONVERT.specialise("fp8_e4m3", "bfloat16", 8)
IN_TRANSIT = transfer_kernels.CONVERT[32].specialise("float", "int8", 8)
DIVISION = re.compile(r"\w*(?:div|rcp)_rn\w*f32\w*")


def machine_code(specialisation, arch, kernels_dir=None):
    (compiled,) = nvrtc.compile_program([specialisation], arch, kernels_dir=kernels_dir)
    code = nvdisasm.disassemble(nvdisasm.find(), compiled.image)
    return nvdisasm.sections_of(code)[compiled.lowered_name]


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("specialisation", [QUANTISE, IN_TRANSIT], ids=str)
def test_no_element_is_divided_by_a_call(specialisation, arch):
    assert not DIVISION.findall(machine_code(specialisation, arch))


def test_a_division_by_a_call_is_noticed(kernel_sources):
    kernel_sources.replace(
        "numeric.cuh", "scale.quotient(a.values[i])", "__fdiv_rn(a.values[i], scale.divisor)"
    )
    assert DIVISION.findall(machine_code(QUANTISE, "sm_90", kernel_sources.folder))


@pytest.mark.parametrize(
    ("specialisation", "instruction"),
    [(QUANTISE, r"F2FP\.\w+\.E4M3\.F32\.PACK_AB"), (DEQUANTISE, r"F2FP\.F16\.E4M3\.UNPACK_B")],
    ids=("quantise", "dequantise"),
)
def test_fp8_is_converted_in_pairs_where_there_are_instructions(specialisation, instruction):
    """Eight elements of K, and of V."""
    assert len(re.findall(instruction, machine_code(specialisation, "sm_90"))) == 8
    assert not re.search(instruction, machine_code(specialisation, "sm_80"))


# Machine code of the merge in the last block ------------------------------------------------------

MERGING = attention_kernels.DECODE_MMA.specialise("bfloat16", 64, 64, 8)


@pytest.fixture(scope="module", params=["sm_90", full_only("sm_75"), full_only("sm_120")])
def merge(request):
    """Machine code of the kernel before its blocks are counted, and after."""
    return re.split(r"ATOMG?\.E\.INC", machine_code(MERGING, request.param))


def test_the_thread_that_counts_fences(merge):
    """The fences of all threads before the barrier release nothing for the one that counts."""
    before, after = (re.findall(r"BAR\.SYNC|MEMBAR|CCTL", part) for part in merge)
    assert before[-2:] == ["BAR.SYNC", "MEMBAR"]
    assert after[:2] == ["CCTL", "BAR.SYNC"] and "MEMBAR" not in after


@pytest.mark.parametrize(("load", "use"), [("LDG.E", "STS"), ("LDG.E.128", "FFMA")])
def test_loads_of_the_merge_are_in_flight_together(load, use, merge):
    """Eight logarithms of a lane and eight words of states of a thread, however many there are."""
    found = re.findall(rf"\b(?:({load})(?:\.[A-Z]+)* R|{use}\b)", merge[1])
    (run,) = "".join("L" if each else " " for each in found).split()
    assert len(run) >= 8


def test_all_functions_of_a_kernel_count():
    log = """ptxas info : Compiling entry function 'k' for 'sm_90'
        ptxas . 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
        ptxas info : Function properties for helper
        ptxas . 16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
        ptxas info : Used 40 registers, used 0 barriers"""
    assert read_log(log, "k") == compile_check.Usage(40, 16, 12, ())


def test_every_kernel_of_the_package_has_a_budget():
    used = {s.kernel.name for s in ops.specialisations()}
    assert used <= REGISTER_BUDGET.keys()


@pytest.mark.slow
def test_every_specialisation_passes_on_every_architecture():
    report = check(promises_128_bits=promises_128_bits)
    assert report.ok, str(report)
