"""The roofline counts what stands in the machine code, computes its bounds by the table, and models
how warps wait."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

import roofline
from machine_code import bounds, chips, cubin, model, nvdisasm, paths, sass
from machine_code.bounds import Entry, examine
from machine_code.chips import CHIPS
from machine_code.constants import FirstThread, constant_bank
from machine_code.pieces import Piece, heads_of, pieces_of, row_passes, tiles_of
from machine_code.planned import PlannedDevice
from machine_code.rows import ROWS, _decode, _prefill
from roofline import worse

from kvcupy import precompile
from kvcupy.devices import nvrtc
from kvcupy.errors import CompileError
from kvcupy.kernels import Kernel
from kvcupy.ops import attention, attention_kernels
from kvcupy.ops.launch import unverified

TESTS = Path(__file__).resolve().parents[1]
RECORD = TESTS.parent / "scripts" / "results" / "roofline.json"

# --- Listings -------------------------------------------------------------------------------------


def listing(*lines: str) -> str:
    """Number instructions as nvdisasm does; labels end with a colon."""
    numbered, address = [], 0
    for line in lines:
        if line.endswith(":"):
            numbered.append(line)
        else:
            numbered.append(f"        /*{address:04x}*/                   {line} ;")
            address += 16
    return "\n".join(numbered)


PARAMS_AT = 0x160

# Two nested loops. The inner one is passed as often as the first word of the Params says.
NESTED = listing(
    "MOV R0, RZ",
    ".outer:",
    "LDG.E.128 R4, [R2.64]",
    "LDG.E R3, [R8.64]",
    "MOV R1, c[0x0][0x160]",
    ".inner:",
    "SHFL.BFLY PT, R10, R4, R1, 0x1f",
    "FADD R4, R4, R10",
    "IADD3 R1, R1, -0x1, RZ",
    "ISETP.GT.AND P0, PT, R1, RZ, PT",
    "@P0 BRA `(.inner)",
    "FFMA R12, R4, R5, R12",
    "MUFU.EX2 R13, R12",
    "HMMA.16816.F32 R16, R4, R8, R16",
    "ISETP.NE.AND P1, PT, R3, RZ, PT",
    "@P1 BRA `(.outer)",
    "STG.E.128 [R2.64], R16",
    "EXIT",
)


def read(text: str, *words: int, **options) -> paths.Code:
    params = np.array(words, np.int32).tobytes()
    return paths.Code(text, constant_bank(params, PARAMS_AT, (128, 1, 1), (2, 1, 1)), **options)


ARCHS = tuple(dict.fromkeys(CHIPS[name].arch for name in chips.DEFAULT_CHIPS))
A100, H100, H200 = CHIPS["A100"], CHIPS["H100"], CHIPS["H200"]


def row_of(name: str):
    return next(row for row in ROWS if row.name == name)


def names(path: paths.Path) -> list[str]:
    return [one.opcode for one in path.code]


def test_loops_are_found_inner_ones_first():
    code = read(NESTED, 3)
    inner, outer = code.loops()
    assert inner.blocks < outer.blocks and inner.latches == {inner.header}
    assert code.block(inner.header)[0].opcode == "SHFL.BFLY"
    assert code.block(outer.header)[0].opcode == "LDG.E.128"


def test_a_loop_that_is_passed_once_is_none():
    (outer,) = read(NESTED, 1).loops()
    assert names(read(NESTED, 1).path(outer, 16)).count("SHFL.BFLY") == 1


@pytest.mark.parametrize("trips", [2, 3, 7])
def test_an_inner_loop_counts_as_often_as_the_params_say(trips):
    inner, outer = read(NESTED, trips).loops()
    assert inner.trips == trips and outer.trips is None
    path = read(NESTED, trips).path(outer, 16)
    assert names(path).count("SHFL.BFLY") == trips
    assert path.uncounted == 0 and len(path.code) == 8 + 5 * trips


def test_an_inner_loop_that_nothing_decides_counts_once_and_is_reported():
    code = paths.Code(NESTED)
    path = code.path(code.loops()[1], 16)
    assert names(path).count("SHFL.BFLY") == 1 and path.uncounted == 1


def test_instructions_are_counted_by_pipe_and_loads_by_width():
    code = read(NESTED, 1)
    path = code.path(code.loops()[0], 16)
    assert Counter(map(sass.pipe_of, path.code)) == {
        "global": 2, "alu": 3, "shuffle": 1, "fma": 2, "add": 1, "xu": 1, "tensor": 1, "control": 2,
    }  # fmt: skip
    assert (path.bytes_loaded(16), path.bytes_loaded(4), path.bytes_stored(16)) == (16, 20, 0)
    whole = code.path(None, 16)
    assert whole.bytes_stored(16) == 16 and whole.code[-1].opcode == "EXIT"


def test_products_of_tensor_cores():
    opcodes = "HMMA.16816.F32", "HMMA.1688.F32", "QMMA.16832.F32.E4M3.E4M3", "FFMA"
    codes, _ = sass.parse(listing(*[f"{opcode} R0, R4, R8, R0" for opcode in opcodes]))
    assert list(map(sass.products_of, codes)) == [2048, 1024, 4096, 0]


# What decides a branch: lines, Params, how often the cheapest and the dearest way pass MUFU.SIN.
OPTIONAL = (  # a pointer of the Params, null or not
    "ULDC.64 UR4, c[0x0][0x160]", "ISETP.NE.U32.AND P0, PT, RZ, UR4, PT",
    "ISETP.NE.AND.EX P0, PT, RZ, UR5, PT, P0", "LDG.E.128 R4, [R2.64]", "@!P0 BRA `(.without)",
    "MUFU.SIN R0, R4", "MUFU.SIN R0, R0", ".without:", "EXIT",
)  # fmt: skip
END = "LDG.E.128 R4, [R12.64]", "@P2 BRA `(.right)", "MUFU.SIN R0, R0", ".right:", "EXIT"
DIVISION = (  # 1000 over a word, as compilers write it: an estimate, and two corrections
    "MOV R9, 0x3e8", "I2F.U32.RP R0, c[0x0][0x160]", "MUFU.RCP R0, R0",
    "IADD3 R2, R0, 0xffffffe, RZ", "F2I.FTZ.U32.TRUNC.NTZ R3, R2", "MOV R2, RZ",
    "IADD3 R5, RZ, -R3, RZ", "IMAD R5, R5, c[0x0][0x160], RZ", "IMAD.HI.U32 R2, R3, R5, R2",
    "IMAD.HI.U32 R2, R2, R9, RZ", "IADD3 R5, -R2, RZ, RZ", "IMAD R0, R5, c[0x0][0x160], R9",
    "ISETP.GE.U32.AND P0, PT, R0, c[0x0][0x160], PT", "@P0 IADD3 R0, R0, -c[0x0][0x160], RZ",
    "@P0 IADD3 R2, R2, 0x1, RZ", "ISETP.GE.U32.AND P1, PT, R0, c[0x0][0x160], PT",
    "@P1 IADD3 R2, R2, 0x1, RZ",
)  # fmt: skip
KNOWN = "MOV R0, 0x5", "MOV R2, 0x7", "MOV R8, 0x8085", "MOV R1, 0x6"
PREDICATES = (
    "MOV R0, 0x5", "MOV R2, 0xff", "ISETP.EQ.AND P0, PT, R0, 0x7, PT",
    "ISETP.EQ.AND P1, PT, R0, 0x5, PT",
)  # fmt: skip


def kept(others: str, bit: int) -> tuple[str, ...]:
    """P2 as bit 2 of a word, whose other bits come from another word; R1 is 6, R2 is unknown."""
    return (
        "MOV R0, 0x4", "MOV R1, 0x6", "ISETP.NE.AND P2, PT, R0, c[0x0][0x160], PT",
        f"P2R R3, PR, {others}, 0x4", "ISETP.NE.AND P2, PT, R8, RZ, PT",
        f"LOP3.LUT P2, RZ, R3, {bit:#x}, RZ, 0xc0, !PT", END[0], "@!P2 BRA `(.right)", *END[2:],
    )  # fmt: skip


DECIDED = [
    (OPTIONAL, (0, 0), (0, 0)), (OPTIONAL, (0x1000, 0), (2, 2)), (OPTIONAL, (0, 0x7F), (2, 2)),
    (OPTIONAL, None, (0, 2)),  # nothing is known: two bounds
    *[((*DIVISION, f"ISETP.EQ.AND P2, PT, R2, {quotient:#x}, PT", *END), (divisor,), (0, 0))
      for divisor, quotient in ((1, 1000), (3, 333), (7, 142), (1000, 1))],
    *[((*KNOWN, line, f"ISETP.EQ.AND P2, PT, {result}, PT", *END), (), (0, 0)) for line, result in (
        ("SHFL.BFLY PT, R1, R0, 0x1, 0x1f", "R1, 0x5"),
        ("VIADDMNMX R1, R0, 0x4, R2, !PT", "R1, 0x9"),  # the larger of 5 + 4 and 7
        ("VIADDMNMX R1, R0, 0x4, R2, PT", "R1, 0x7"),
        ("PRMT R1, R0, 0x4000, R2", "R1, 0x7050505"),
        ("PRMT R1, R8, 0x9910, RZ", "R1, 0xffff8085"),  # of 0x8085, by its sign
    )],
    *[((*PREDICATES, *lines, *END), (), (0, 0)) for lines in (
        ("P2R R3, PR, RZ, 0x3", "ISETP.EQ.AND P2, PT, R3, 0x2, PT"),
        ("P2R R3, PR, R2, 0x3", "ISETP.EQ.AND P2, PT, R3, 0xfe, PT"),  # other bits unchanged
        ("MOV R3, 0x80ff", "PRMT R3, R3, 0x9910, RZ", "ISETP.EQ.AND P2, PT, R3, -0x7f01, PT"),
        ("MOV R3, 0x1234", "PRMT R3, R3, 0x0514, R2", "ISETP.EQ.AND P2, PT, R3, 0x340012ff, PT"),
    )],
    *[((f"MOV R0, {word:#x}", "LOP3.LUT P2, RZ, R0, 0x3, RZ, 0xc0, !PT", *END), (), (count, count))
      for word, count in ((4, 1), (5, 0))],
    *[(kept(others, bit), (word,), counts) for word, others, bit, counts in (
        (4, "RZ", 4, (0, 0)), (5, "RZ", 4, (1, 1)), (5, "RZ", 2, (0, 0)), (4, "R1", 2, (1, 1)),
        (4, "R1", 4, (0, 0)), (5, "R2", 4, (0, 1)),
    )],
]  # fmt: skip


@pytest.mark.parametrize(("lines", "words", "counts"), DECIDED)
def test_what_is_known_decides_branches(lines, words, counts):
    text = listing(*lines)
    thread = FirstThread(0, 16) if lines[:4] == KNOWN else None
    code = paths.Code(text) if words is None else read(text, *words, thread=thread)
    ways = [code.path(None, 16, dearest=dearest) for dearest in (False, True)]
    assert tuple(names(way).count("MUFU.SIN") for way in ways) == counts


def test_an_array_that_is_not_there_is_not_read():
    text = listing(
        "MOV R2, c[0x0][0x160]", "MOV R3, c[0x0][0x164]", "LDG.E.128 R8, [R20.64]",
        "ISETP.GE.AND P0, PT, R20, R21, PT", "@P0 BRA `(.other)", "LDG.E R4, [R2.64]",
        "BRA `(.end)", ".other:", "MUFU.RCP R0, R8", "MUFU.RCP R0, R8", "MUFU.RCP R0, R8", ".end:",
        "EXIT",
    )  # fmt: skip
    assert "LDG.E" in names(read(text, 0x1000, 0x7F).path(None, 16))
    assert "LDG.E" not in names(read(text, 0, 0).path(None, 16))


def test_reports_of_faults_are_not_on_the_dearest_way():
    text = listing(
        "LDG.E.128 R4, [R2.64]", "@P0 BRA `(.end)", "MUFU.RCP R0, R4",
        "ATOMG.E.ADD.64.STRONG.GPU PT, R8, [R6.64], R8", ".end:", "EXIT",
    )  # fmt: skip
    assert names(paths.Code(text).path(None, 16, dearest=True)) == ["LDG.E.128", "BRA", "EXIT"]


def test_functions_are_for_rare_cases_and_far_branches_are_not_functions():
    text = listing(
        "LDG.E.128 R4, [R2.64]", "@P0 CALL.REL.NOINC `($division)", "@P1 CALL.REL.NOINC `(.end)",
        "MUFU.RCP R0, R4", ".end:", "EXIT", "$division:", "FFMA R0, R1, R2, R3",
        "FFMA R0, R1, R2, R3", "RET.REL.NODEC R6 `(kernel)",
    )  # fmt: skip
    path = paths.Code(text).path(None, 16)
    assert names(path)[-1] == "EXIT" and "MUFU.RCP" not in names(path)
    assert names(path).count("FFMA") == 2  # there is no way around the call here


def test_among_ways_that_move_as_much_the_one_that_looks_pages_up_counts():
    text = listing(
        "LDG.E.128 R4, [R2.64]", "@P0 BRA `(.end)", "LDG.E R8, [R6.64]", "MUFU.RCP R0, R8",
        ".end:", "EXIT",
    )  # fmt: skip
    assert names(paths.Code(text).path(None, 16))[2:4] == ["LDG.E", "MUFU.RCP"]


@pytest.mark.parametrize("chip", ["A100", "H100", "B200", "RTX PRO 6000"])
def test_a_merge_is_counted_as_declared(chip):
    entry = examine(row_of("merge_states of 2"), CHIPS[chip])
    assert (entry.problems, entry.uncounted_loops) == ([], 0)


def test_an_empty_listing_is_refused():
    with pytest.raises(CompileError, match="no instructions"):
        paths.Code("// nothing")


# --- A kernel that is compiled here ---------------------------------------------------------------

LOOPS = Kernel(
    "loops.cu", "loops",
    np.dtype([("in", np.uint64), ("out", np.uint64), ("count", np.int32), ("bounded", np.int32)],
             align=True),
    "LoopsParams",
)  # fmt: skip


@pytest.mark.parametrize("arch", ARCHS)
def test_what_uses_a_load_waits_for_its_scoreboard(arch):
    """The control codes lie where `Control` reads them, on every architecture."""
    code, controls = compiled(16, arch), controls_of(16, arch)
    checked = 0
    for i, load in enumerate(code.code):
        if load.opcode.startswith("LDG.E.128"):
            user = next(one for one in code.code[i + 1 :] if one.reads & load.writes)
            checked += 1
            assert controls[load.address].result in controls[user.address].waits
    assert checked
    stalls = [controls[one.address].stall for one in code.code if one.name in ("FFMA", "FADD")]
    assert min(stalls) >= 1 and max(stalls) <= 15


def controls_of(num_fmas: int, arch: str) -> dict[int, sass.Control]:
    build = nvrtc.compile_cubin(LOOPS.specialise(num_fmas), arch, kernels_dir=TESTS / "kernels")
    return cubin.controls(build.image, build.lowered_name)


def compiled(num_fmas: int, arch: str, *, bounded: bool = False) -> paths.Code:
    build = nvrtc.compile_cubin(LOOPS.specialise(num_fmas), arch, kernels_dir=TESTS / "kernels")
    resources = cubin.resources(build.image, build.lowered_name)
    assert 8 < resources.registers < 64 and resources.static_bytes == 0
    params = np.zeros((), LOOPS.params)
    params["in"], params["out"], params["count"], params["bounded"] = 1 << 40, 2 << 40, 9, bounded
    text = nvdisasm.sections_of(nvdisasm.disassemble(nvdisasm.find(), build.image))
    constants = constant_bank(params.tobytes(), resources.params_start, (32, 1, 1), (1, 1, 1))
    return paths.Code(text[build.lowered_name], constants)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_fmas", [16, 40])
def test_a_compiled_loop_has_the_instructions_that_its_source_has(arch, num_fmas):
    code = compiled(num_fmas, arch)
    loop = bounds._busiest_loop(code, 16)
    path = code.path(loop, 16)
    # A compiler may move an addition behind the shuffles, and then multiplies and adds.
    assert names(path).count("FFMA") + names(path).count("FMUL") == num_fmas
    assert path.bytes_loaded(16) == 16 and path.uncounted == 0
    assert sum(one.name == "SHFL" for one in path.code) == 3
    assert loop.trips == 9
    whole = code.path(None, 16)
    assert (
        names(whole).count("FFMA") == 9 * names(path).count("FFMA") and whole.bytes_stored(16) == 16
    )


def test_params_decide_branches_of_a_compiled_loop():
    lengths = []
    for bounded in (False, True):
        code = compiled(16, "sm_90", bounded=bounded)
        path = code.path(bounds._busiest_loop(code, 16), 16)
        lengths.append(sum(one.opcode == "MUFU.SIN" for one in path.active()))
    assert lengths == [0, 1]


def test_a_kernel_that_is_not_in_the_cubin_is_refused():
    build = nvrtc.compile_cubin(LOOPS.specialise(16), "sm_90", kernels_dir=TESTS / "kernels")
    with pytest.raises(CompileError, match="no kernel nought"):
        cubin.resources(build.image, "nought")
    with pytest.raises(CompileError, match="not a cubin"):
        cubin.resources(b"nothing at all", "loops")


# --- The model ------------------------------------------------------------------------------------


def test_clocks_of_a_pass_by_hand():
    code, _ = sass.parse(listing(
        "FFMA R0, R1, R2, R3", "FFMA R0, R1, R2, R3", "IMAD R0, R1, R2, R3", "LOP3.LUT R0, R1, R2",
        "MUFU.EX2 R0, R1", "LDS.128 R4, [R0]", "LDS R4, [R0]", "SHFL.BFLY PT, R0, R1, R2, R3",
        "HMMA.16816.F32 R0, R4, R8, R0", "BRA `(.x)",
    ))  # fmt: skip
    # A100: 64 results a clock of FMA and IMAD together, 64 of the ALU, 16 of XU, 1,024 products,
    # 128 bytes of shared memory, four instructions.
    path = paths.Path(tuple(code))
    assert bounds.clocks_of(path, A100) == {
        "issue": 2.5, "fma": 1.5, "imad": 0.5, "alu": 0.5, "xu": 2.0, "lsu": 4 + 1 + 1,
        "tensor": 2.0,
    }  # fmt: skip
    # A10: 128 of FMA, of which IMAD has half.
    ampere = bounds.clocks_of(path, CHIPS["A10"])
    assert (ampere["fma"], ampere["imad"], ampere["tensor"]) == (0.75, 0.5, 4.0)
    off = dataclasses.replace(path, inactive=frozenset(one.address for one in code))
    assert bounds.clocks_of(off, A100) == {"issue": 2.5}


@pytest.mark.parametrize("registers, static, dynamic, warps, expected", [
    (32, 0, 0, 8, 64), (33, 0, 0, 4, 48), (128, 0, 0, 4, 16), (255, 0, 0, 4, 8),
    (32, 0, 50 * 1024, 4, 12), (32, 1024, 50 * 1024, 4, 12), (32, 50 * 1024, 1, 4, 12),
    (32, 0, 0, 1, 32),
])  # fmt: skip
def test_resident_warps_of_an_a100(registers, static, dynamic, warps, expected):
    taken = cubin.Resources(registers, static, PARAMS_AT)
    assert bounds.warps_per_sm(taken, warps, dynamic, A100) == expected


# Latencies that no line below has come from `Control`, as in a kernel.
GOES_ON = sass.Control(1)
TRAFFIC = model.Traffic(
    memory_clocks=500, cache_clocks=200, read_clocks=0.0, write_clocks=0.0, word_bytes=16
)


def way(*lines: str | tuple[str, sass.Control], traffic: model.Traffic = TRAFFIC) -> model.Way:
    pairs = [line if isinstance(line, tuple) else (line, GOES_ON) for line in lines]
    code, _ = sass.parse(listing(*[text for text, _ in pairs]))
    controls = {one.address: control for one, (_, control) in zip(code, pairs, strict=True)}
    return model.Way(paths.Path(tuple(code)), controls, A100, traffic)


def clocks(*lines: str | tuple[str, sass.Control], warps: int = 1, **options) -> float:
    """Return the clocks of a pass, its branch back left out."""
    return model.pass_clocks(way(*lines, **options), warps, warps)


HMMA = model.LATENCIES["HMMA"]
LOAD = "LDG.E.128 R4, [R2.64]", sass.Control(1, result=0)
USE = "FADD R0, R4, R1", sass.Control(1, waits=(0,))


def test_products_that_add_to_each_other_take_their_latency_each():
    chain = ["HMMA.16816.F32 R16, R4, R8, R16"] * 4
    assert clocks(*chain) == 4 * HMMA
    # Others are as many as the tensor cores take: 1,024 of 2,048 a clock, for four schedulers.
    apart = [f"HMMA.16816.F32 R{16 + 4 * i}, R4, R8, R{16 + 4 * i}" for i in range(8)]
    assert clocks(*apart) == 8 * 4 * 2048 / 1024
    assert clocks(*chain, warps=2) == 4 * HMMA
    assert clocks(*chain, warps=8) == 8 * 4 * 4 * 2048 / 1024


def test_a_warp_stalls_as_the_compiler_says_and_others_do_not():
    stalled = ("FADD R0, R0, R1", sass.Control(5)), ("FADD R0, R0, R1", sass.Control(5))
    assert clocks(*stalled) == 10
    assert clocks(*stalled, warps=2) == 10
    assert clocks(*stalled, warps=4) == pytest.approx(
        4 * 2 * 2, abs=1
    )  # two clocks a warp: 16 lanes


def test_a_load_is_waited_for_by_its_scoreboard():
    assert clocks(LOAD, USE) == 501
    assert clocks(LOAD, *["FADD R0, R1, R1"] * 20, USE) == 501
    index = "LDG.E R2, [R12.64]", sass.Control(1, result=1)
    of_index = LOAD[0], sass.Control(1, result=0, waits=(1,))
    assert clocks(index, of_index, USE) == 701
    # A scoreboard is free when the last of its loads is there.
    assert clocks(LOAD, *["FADD R0, R1, R1"] * 20, LOAD, USE) > 501


def test_warps_hide_each_others_latency():
    alone = clocks(LOAD, USE)
    assert clocks(LOAD, USE, warps=2) == pytest.approx(alone, abs=2)  # two passes in the same time
    assert clocks(LOAD, USE, warps=8) == pytest.approx(alone, abs=8)


def test_bytes_in_flight_bound_the_bandwidth():
    """512 bytes per load: by its latency alone, or by a scheduler's share of the bandwidth."""
    alone = clocks(LOAD, USE)
    ample, narrow = (dataclasses.replace(TRAFFIC, read_clocks=n) for n in (0.25, 2.0))
    assert clocks(LOAD, USE, traffic=ample) == alone  # 128 clocks of the share, within the latency
    assert clocks(LOAD, USE, warps=2, traffic=ample) == pytest.approx(alone, abs=2)
    assert clocks(LOAD, USE, warps=8, traffic=ample) == pytest.approx(8 * 512 / 4)
    assert clocks(LOAD, USE, traffic=narrow) == pytest.approx(512 * 2, abs=2)


@pytest.mark.parametrize("ahead, expected", [(0, 500), (1, 250), (3, 125)])
def test_copies_that_run_ahead_hide_each_other(ahead, expected):
    """A group of copies a pass, of which `ahead` may be on their way behind the wait."""
    taken = clocks("LDGSTS.E.BYPASS.128 [R1], [R2.64]", "LDGDEPBAR", f"DEPBAR.LE SB0, {ahead:#x}")
    assert expected <= taken <= expected + 8


def test_a_barrier_costs_and_holds_a_block_together():
    work = ["FADD R0, R1, R1"] * 10
    assert clocks(*work, "BAR.SYNC 0x0") - clocks(*work, "NOP") == model.LATENCIES["BAR"] - 1
    # Two warps that wait for each other are two passes a time; two blocks hide their barriers.
    held = way(*work, "BAR.SYNC 0x0")
    assert model.pass_clocks(held, 2, 2) > model.pass_clocks(held, 2, 1)


def test_code_that_is_not_near_is_fetched():
    near, far = (["FADD R0, R1, R1"] * count for count in (1000, 1400))
    assert clocks(*near) == 1000 * 2
    assert clocks(*far) > 1400 * 2 * 1.1
    first = way(*near).run(1, 2).ends
    assert first[0] > (first[1] - first[0]) + 1000 / 8 * model.LINE_CLOCKS / 2


def test_a_taken_branch_and_an_inactive_instruction():
    assert clocks("FADD R0, R1, R1", "NOP") < clocks("FADD R0, R1, R1", "BRA `(.x)")
    code, _ = sass.parse(listing(LOAD[0], USE[0]))
    off = paths.Path(tuple(code), frozenset({code[0].address}))
    controls = {one.address: control for one, (_, control) in zip(code, (LOAD, USE), strict=True)}
    assert model.pass_clocks(model.Way(off, controls, A100, TRAFFIC), 1) < 10


def test_stores_are_written_before_a_kernel_ends():
    slow = dataclasses.replace(TRAFFIC, write_clocks=1.0)
    run = way("STG.E.128 [R2.64], R4", "EXIT", traffic=slow).run(1, 1)
    assert run.ends[-1] < 100 and run.drained > 512


def test_one_row_by_hand():
    """`store bf16` on an A100: its copies of 16 bytes, and what the chip makes of them."""
    entry, chip = examine(ROWS[0], A100), A100
    assert entry.row == "store bf16" and entry.problems == []
    # A token is 2 x 8 x 128 elements of 2 bytes, read and written, by one warp.
    assert entry.asked_bytes == entry.counted == 2 * 2 * 8 * 128 * 2
    per_second = chip.sm_count * chip.clock_mhz * 1e6 / (entry.instructions / 4)
    assert entry.ceilings["issue"] == pytest.approx(8192 * per_second / 1e9, rel=1e-3)
    # 16 words of 512 bytes per warp, 128 bytes a clock; and an index, in a clock.
    assert entry.ceilings["lsu"] == pytest.approx(8192 / 65 * 108 * 1.41, rel=1e-3)
    assert (entry.binds, entry.share) == ("memory", 1.0)
    assert entry.bound_us == pytest.approx(4096 * 8192 / 2039e3, rel=1e-2)
    assert entry.bound_us < entry.model_us < 2.5 * entry.bound_us


def test_what_a_row_declares_is_checked():
    row = row_of("copy_pages bf16")
    assert examine(row, A100).problems == []
    (problem,) = examine(dataclasses.replace(row, num_units=2048), A100).problems
    assert "0.062 x page, 0.125 declared" in problem
    prefill = row_of("prefill bf16 64x64, 4096 of 4096")
    assert examine(prefill, A100).problems == []
    wrong = dataclasses.replace(prefill, asked_bytes=lambda launch: 300.0)
    (problem,) = examine(wrong, A100).problems
    assert "of a KV head on a pass" in problem


def test_a_tile_of_prefill_is_64_keys():
    entry = examine(row_of("prefill bf16 128x128, 8192 of 8192"), H100)
    assert entry.asked_bytes * 4 == 64 * 2 * 128 * 2
    # Four warps of 32 rows: two products of each, for all keys.
    assert entry.counted == 2 * 2 * 32 * 64 * 128


@pytest.mark.parametrize("kv_format, width, keys, asked_per_key", [
    ("nvfp4", 128, 64, 128),  # codes, in words of 8 bytes
    ("mxfp4", 128, 64, 128 + 40),  # and scales and page numbers, in words of 4
    ("nvfp4", 256, 32, 256),
])  # fmt: skip
def test_a_tile_of_prefill_over_codes(kv_format, width, keys, asked_per_key):
    entry = examine(_prefill(2048, 4096, kv_format=kv_format, widths=(width, width)), H100)
    assert entry.problems == [] and entry.asked_bytes * 4 == keys * asked_per_key
    assert entry.pipes["tensor"] * 2048 * 4 == (128 if width == 128 else 64) * keys * 2 * width


@pytest.mark.parametrize("kv_format", ["mxfp4", "nvfp4"])
def test_a_tile_of_decode_over_rows_that_are_padded(kv_format):
    """Rows of 96 elements come as 128, with 8 bytes of scales, and a page number by each lane."""
    entry = examine(_decode(kv_format, width=96), H100)
    assert entry.problems == [] and entry.asked_bytes == 32 * (2 * (64 + 8) + 4)


def test_a_loop_that_copies_is_not_taken_for_the_one_around_it_with_products():
    narrow, wide = (examine(_decode("nvfp4", width=width), H100) for width in (128, 256))
    assert wide.pipes["tensor"] == 2 * narrow.pipes["tensor"] > 0
    assert wide.asked_bytes == 2 * narrow.asked_bytes and wide.problems == []


@pytest.mark.parametrize("name, heads, warps", [
    ("mla bf16 16 heads", 16, 4), ("mla bf16 128 heads, 64 of 4096", 128, 8),
])  # fmt: skip
def test_a_tile_of_latents_is_32_keys_that_are_fetched_once(name, heads, warps):
    entry = examine(row_of(name), A100)
    assert entry.asked_bytes * warps == 32 * 576 * 2
    tiles = 2 if heads == 128 else 1  # which share what is fetched
    assert entry.counted * warps == 32 * 576 * 2 / tiles
    weights_and_rest = 2 * 512
    rows = min(heads, 64)
    assert entry.pipes["tensor"] * 2048 * warps == rows * 32 * (576 + weights_and_rest)


def planned(name: str, kernel: str):
    device = PlannedDevice("sm_90", 132)
    with unverified():
        row_of(name).call(device)
    (launch,) = [
        each for each in device.launches if each.specialisation.kernel.name.startswith(kernel)
    ]
    return launch


def test_one_long_sequence_is_shared_by_all_blocks():
    """Uncut, its blocks would run for 15 of 16 parts of the time with none beside them."""
    launch = planned("decode bf16 group 4, one of 128K among 2K", "attention_decode")
    lens = [128 << 10, *[2 << 10] * 63]
    pieces = pieces_of(launch, lens)
    keys, parts = zip(*[(piece.keys, piece.parts) for piece in pieces], strict=True)
    assert sum(keys) == pytest.approx(sum(lens)) and max(parts) > 20
    assert heads_of(launch) == 8 and tiles_of(launch) == 64
    assert model.makespan(lens, 33) > 10 * sum(lens) / 33
    assert model.makespan(keys, 33) < sum(lens) / 33 / 0.9


def test_pieces_of_prefill_are_of_what_each_tile_sees():
    launch = planned("prefill bf16 128x128, 2048 of 4096", "attention_prefill")
    pieces = pieces_of(launch, [4096], [2048])
    visible = [4096 - 2048 + 32 * tile for tile in range(1, 65)]  # 32 tokens of 4 heads each
    assert sum(piece.keys for piece in pieces) == pytest.approx(sum(visible))


@pytest.mark.parametrize("name, lens, new, expected", [
    ("decode bf16 group 4, batch-invariant", [8192] * 64, None, [8192] * 64),
    ("prefill bf16 128x128, 2048 of 4096, batch-invariant", [4096], [2048],
     [4096 - 2048 + 4 * tile for tile in range(1, 513)]),
])  # fmt: skip
def test_tiles_that_are_not_cut_see_all_their_keys(name, lens, new, expected):
    pieces = pieces_of(planned(name, "attention_decode"), lens, new)
    assert pieces == [Piece(keys) for keys in expected]


def test_a_block_passes_its_loop_a_whole_number_of_times():
    """Parts are whole steps, and a pass takes steps of all warps."""
    assert [Piece(8192, part, 72).passes(32, 1) for part in range(72)].count(4) == 40
    assert sum(Piece(8192, part, 72).passes(32, 1) for part in range(72)) == 8192 / 32
    assert [Piece(4096, part, 30).passes(32, 4) for part in (0, 14)] == [1, 2]  # 4 and 5 steps
    assert Piece(33).passes(64, 1) == 1 and Piece(0).passes(64, 1) == 0


@pytest.mark.parametrize("name, passes, stores", [
    ("mla bf16 16 heads", 16, 16), ("mla bf16 128 heads, 64 of 4096", 16, 32),
    ("decode bf16 group 4", 1, 1), ("decode bf16 group 8", 2, 2),
    ("prefill bf16 128x128, 2048 of 4096, batch-invariant", 4, 4),
])  # fmt: skip
def test_warps_finish_all_their_rows(name, passes, stores):
    """Nothing in the machine code tells how many rows a tile has."""
    launches = bounds._launches(row_of(name), "sm_90", 132)
    (main,) = [each for each in launches if bounds._is_main(each, row_of(name))]
    assert row_passes(main.launch) == passes
    assert [one.opcode for one in main.whole.code].count("ST.E.128") == stores


def test_tiles_of_a_sequence_share_its_keys():
    """Four tokens of a sequence are one tile, however many tiles the plan allows for."""
    row = row_of("prefill bf16 128x128, 4 of 4096, 64 sequences")
    assert tiles_of(planned(row.name, "attention_prefill")) > 64
    keys_and_values = 64 * 4096 * 8 * 2 * 128 * 2
    assert examine(row, H100).bound_us == pytest.approx(keys_and_values / 3350e3, rel=1e-3)


@pytest.fixture
def launched_merge(monkeypatch):
    """Pieces are merged by a kernel behind them, as on the day of the measurements."""
    monkeypatch.setattr(attention, "merges_parts", lambda specialisation: False)
    bounds._launches.cache_clear()
    yield
    bounds._launches.cache_clear()


@pytest.fixture
def large_tiles(monkeypatch):
    """Tiles of decode have 16 rows, as on the day of the measurements."""
    monkeypatch.setattr(attention_kernels, "DECODE_MMA_FEW_ROWS", 0)


def test_a_merge_takes_longer_for_more_parts_and_for_many_tiles(launched_merge):
    launches = bounds._launches(row_of("decode bf16 group 4, one of 128K among 2K"), "sm_90", 132)
    merge = launches[-1]
    assert merge.name == "merge_many"

    def us(*parts: int, chip: chips.Chip = H100) -> float:
        return bounds._merge_us(merge, chip, parts, 8)

    assert us() < us(2) == us(8)  # eight states at a time
    assert us(16) - us(8) == pytest.approx(us(24) - us(16)) and us(16) > us(8) + 1
    assert us(24, *[2] * 20) == pytest.approx(us(24), rel=0.1)  # all tiles at once
    many = [8] * 1000
    assert us(*many) > 5 * us(8)
    assert us(*many, chip=dataclasses.replace(H100, l2_bytes_per_clock=512)) > 2 * us(*many)


def test_a_wide_row_is_merged_in_parts(launched_merge):
    """Each of four loads all of its states."""
    launches = bounds._launches(row_of("mla bf16 16 heads"), "sm_90", 132)
    code = launches[-1].loop.code
    assert sum(one.loads_global and one.access_bytes == 16 for one in code) == 4 * 8


def test_a_single_sequence_pays_for_launches_and_the_merge():
    entry = examine(row_of("decode bf16 group 4, 1 of 8192"), H100)
    assert set(entry.kernels_us) == {"attention_schedule", "attention_decode_mma"}
    launches = 2 * chips.LAUNCH_US
    assert entry.model_us == pytest.approx(sum(entry.kernels_us.values()) + launches, abs=0.3)
    assert entry.model_us > 2 * entry.bound_us
    uncut = examine(row_of("decode bf16 group 4, 1 of 8192, batch-invariant"), H100)
    assert uncut.model_us > 5 * entry.model_us  # eight blocks


def test_the_last_block_merges_many_parts_in_two_steps():
    """4 heads of 128 floats are 2 KiB of each state, of which an SM reads 64 bytes per clock."""
    launch = planned("decode bf16 group 4, 1 of 8192", "attention_decode_mma")
    chip, wait = dataclasses.replace(H100, cache_clocks=200), 200
    clocks = {1: 0, 2: 5 * wait, 64: 4 * wait + 64 * 32, 65: 2 * (4 * wait + 2 * wait)}
    for parts, expected in clocks.items():
        us = bounds._merge_parts_us(launch, chip, parts)
        assert us * H100.load_mhz == pytest.approx(expected)


def test_a_kernel_merges_states_of_many_rows():
    entry = examine(row_of("mla bf16 128 heads, 1 of 32768"), H100)
    assert entry.kernels_us["merge_many"] > chips.START_US + 1


def test_a_transfer_takes_as_long_as_the_link_has_work():
    entry = examine(row_of("load bf16 pages from pinned memory"), H100)
    moved = 1024 * 32 * 16 * 8 * 128 * 2 * 2
    assert entry.bound_us == pytest.approx(moved / 63e3, rel=1e-3)
    assert entry.bound_us < entry.model_us < 1.3 * entry.bound_us


def test_faster_memory_helps_where_memory_binds():
    copied = [examine(row_of("store bf16"), chip) for chip in (H100, H200)]
    assert copied[0].model_us > 1.2 * copied[1].model_us
    assert copied[0].bound_us / copied[1].bound_us == pytest.approx(4800 / 3350, rel=0.01)
    products = [examine(row_of("prefill bf16 64x64, 4096 of 4096"), chip) for chip in (H100, H200)]
    assert products[0].model_us == pytest.approx(products[1].model_us, rel=0.02)


def test_l2_moves_whole_sectors():
    """A row of nvfp4 has 72 bytes, and lies in three sectors of 32."""
    slow = dataclasses.replace(H100, l2_bytes_per_clock=500)
    entry = examine(row_of("decode nvfp4 group 4"), slow)
    moved = 64 * 8192 * 8 * 2 * 3 * 32
    assert entry.kernels_us["attention_decode_mma"] == pytest.approx(
        moved / (500 * slow.load_mhz), rel=0.06
    )


def test_a_slower_clock_costs_where_instructions_bind():
    name = "mla bf16 128 heads, 64 of 4096"
    slow = dataclasses.replace(H100, load_mhz=H100.load_mhz / 2)
    entry, slower = (examine(row_of(name), chip) for chip in (H100, slow))
    assert slower.bound_us == entry.bound_us
    assert slower.model_us > 1.8 * entry.model_us


def test_a_call_that_launches_no_kernel_of_the_row_is_refused():
    row = dataclasses.replace(ROWS[0], kernel="nought")
    with pytest.raises(ValueError, match=r"expected one launch of nought\*, got .*store_copy"):
        examine(row, A100)


# --- Measurements of an H100 ----------------------------------------------------------------------

_MEASURED = RECORD.with_name("attention_h100.json"), RECORD.with_name("bench_models_cuda.json")


def measured_us(case: str) -> float:
    for file in _MEASURED:
        for row in json.loads(file.read_text())["rows"]:
            if row["case"].endswith(case):
                return row["us"]["kvcupy"] if isinstance(row["us"], dict) else row["us"]
    raise ValueError(case)


@pytest.mark.parametrize("name", [
    "rope_store bf16", "decode bf16 group 4", "decode fp8_e4m3 group 4", "decode nvfp4 group 4",
    "mla bf16 128 heads, 1 of 32768", "prefill bf16 128x128, 2048 of 4096",
    "prefill bf16 64x64, 4096 of 4096", "prefill bf16 128x128, 4 of 4096, 64 sequences",
])  # fmt: skip
def test_a_modelled_time_is_near_the_measured_one(launched_merge, large_tiles, name):
    (row,) = roofline.measured([examine(row_of(name), H100)])
    assert abs(row["error"]) <= 0.17


@pytest.mark.parametrize("row, case", [
    (_decode("bf16", 1, lens=(8192,) * 16), "decode bf16 g1 16x8192"),
    (_decode("bf16", lens=(1024,) * 64, invariant=True), "invariant bf16 64x1024"),
    (_prefill(16, 4096, sequences=16), "append 16x16 of 4096"),
    (_decode("fp8_e4m3", lens=(1024,) * 64), "fp8_e4m3 decode 64 x 1024"),
    (_decode("bf16", lens=(1024,)), "bf16 decode 1 x 1024"),
])  # fmt: skip
def test_a_call_beside_the_fit_is_near_too(launched_merge, large_tiles, row, case):
    assert examine(row, H100).model_us == pytest.approx(measured_us(case), rel=0.17)


# --- The record -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text())


def test_the_record_has_every_row_and_none_has_a_problem(record):
    recorded = {(row["row"], row["chip"]) for row in record["rows"]}
    assert recorded == {
        (row.name, CHIPS[chip].name) for row in ROWS for chip in chips.DEFAULT_CHIPS
    }
    assert [row for row in record["rows"] if row["problems"]] == []


def test_the_record_holds_the_chips_that_were_meant(record):
    for name, chip in record["chips"].items():
        assert chip == json.loads(json.dumps(dataclasses.asdict(CHIPS[name])))
    assert record["rates"] == chips.RATES
    assert record["latencies"] == model.LATENCIES and record["fitted"] == model.FITTED


def test_the_model_is_near_what_an_h100_took(record):
    """The kernels may be newer than the measurements."""
    errors = roofline.errors_of(record["measured"])
    assert len(errors) >= 25
    assert errors[len(errors) // 2] <= 0.08 and errors[-1] <= 0.25


def test_the_page_has_the_tables_of_the_record(record):
    page = (TESTS.parent / "docs" / "measurements.md").read_text()
    assert roofline.tables(record) in page


def test_times_of_another_compiler_are_recorded(record):
    assert record["nvrtc"].startswith("12.")
    for version, models in record["model_us_of_other_compilers"].items():
        assert version.startswith("13.") and set(models) == {row.name for row in ROWS}


def test_every_number_of_a_chip_has_a_source():
    numbers = {field.name for field in dataclasses.fields(chips.Chip)} - {"name", "sources"}
    for chip in CHIPS.values():
        named = {name for names in chip.sources for name in names.split(", ")}
        assert named == numbers and all(chip.sources.values())
    assert {chip.arch for chip in CHIPS.values()} == set(precompile.ARCHS)


def test_peaks_agree_with_clocks():
    """Rates per clock, where they are not taken from the peak of the board."""
    for name in ("T4", "A100", "A10", "L40S", "RTX PRO 6000"):
        chip = CHIPS[name]
        peak = 2 * chip.products_per_clock * chip.sm_count * chip.clock_mhz * 1e-6
        assert peak == pytest.approx(chip.tensor_tflops, rel=0.02), name


def entry_of(row: dict) -> Entry:
    return Entry(**row)


def test_a_row_that_got_worse_is_reported(record):
    row = next(row for row in record["rows"] if 0.1 < row["share"] < 0.9)
    entry = entry_of(row)
    assert worse([entry], record) == []
    slightly = dataclasses.replace(entry, share=entry.share * 0.98)
    assert worse([slightly], record) == []
    (line,) = worse([dataclasses.replace(entry, share=entry.share * 0.9)], record)
    assert line.startswith(f"{row['row']}, {row['chip']}: share ") and "slack 3%" in line
    (line,) = worse([dataclasses.replace(entry, dearest_share=0.0)], record)
    assert "dearest_share 0.0%" in line
    slower = dataclasses.replace(entry, model_us=round(entry.model_us * 1.04, 2))
    assert worse([slower], record) == []
    (line,) = worse([dataclasses.replace(entry, model_us=entry.model_us * 1.1)], record)
    assert "us by the model, was" in line and "slack 5%" in line
    (line,) = worse([dataclasses.replace(entry, problems=["it is odd"])], record)
    assert line.endswith("it is odd")
    assert worse([dataclasses.replace(entry, row="new", share=0.0)], record) == []


# --- The command ----------------------------------------------------------------------------------

COMMAND = ["--arch", "sm_80", "--op", "store bf16", "--jobs", "1"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Return what the command printed, and its table and picture."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("roofline")
    file, image = folder / "table.json", folder / "table.png"
    arguments = [*COMMAND, "--json", str(file), "--plot", str(image), "--verbose"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert roofline.main(arguments) == 0
    return said.getvalue(), json.loads(file.read_text()), image


def test_a_table_is_printed_written_and_drawn(table):
    said, written, image = table
    assert "store_copy<16>: " in said and "100%" in said and "a pass of the warps of an SM" in said
    assert written["what"].startswith("From the machine code, not measured")
    assert [row["row"] for row in written["rows"]] == [
        "store bf16", "store bf16, one token", "store bf16 to fp8_e4m3",
        "store bf16 to fp8_e4m3, dynamic scales", "store bf16 to nvfp4", "store bf16 to mxfp4",
        "store bf16 to int4", "store bf16 to nvfp4, rotated", "store bf16 to int4, rotated",
        "rope_store bf16",
    ]  # fmt: skip
    assert image.read_bytes()[:4] == b"\x89PNG"


def test_tables_are_written_between_their_marks(record, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- roofline: tables -->\nold\n<!-- roofline: end -->\nbehind\n")
    roofline.write_page(page, record)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("Before", "behind") and "old" not in lines
    row = next(row for row in record["measured"] if row["row"] == "decode bf16 group 4")
    shown = f"| {row['bound_us']:.1f} | {row['model_us']:.1f} | {row['measured_us']:.1f} |"
    assert any(line.startswith(f"| decode bf16 group 4 {shown}") for line in lines)
    page.write_text("no marks")
    with pytest.raises(ValueError, match="--page: expected <!-- roofline"):
        roofline.write_page(page, record)


ROW = "store bf16 to mxfp4"  # one of the table: to compile all of them again would say no more


def recorded_row(table):
    """Return a copy of the table with `ROW` alone."""
    rows = [row for row in table[1]["rows"] if row["row"] == ROW]
    return copy.deepcopy({**table[1], "rows": rows})


@pytest.mark.parametrize("change, status, line", [
    (1.0, 0, "none of 1 rows is worse"), (2.0, 1, "to accept this: python scripts/roofline.py"),
])  # fmt: skip
def test_against_a_table(table, tmp_path, capsys, change, status, line):
    recorded = recorded_row(table)
    recorded["rows"][0]["dearest_share"] *= change
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps(recorded))
    assert roofline.main([*COMMAND, "--op", ROW, "--against", str(file)]) == status
    assert line in capsys.readouterr().out


def test_times_of_another_nvrtc_are_added_and_compared(table, tmp_path, capsys, monkeypatch):
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps(recorded_row(table)))
    assert roofline.main([*COMMAND, "--op", ROW, "--add-to", str(file)]) == 2
    assert "another NVRTC" in capsys.readouterr().err
    monkeypatch.setattr(roofline, "version", lambda: "13.9")
    assert roofline.main([*COMMAND, "--op", ROW, "--add-to", str(file)]) == 0
    written = json.loads(file.read_text())
    (row,) = written["rows"]
    models = written["model_us_of_other_compilers"]
    assert models == {"13.9": {ROW: {row["chip"]: row["model_us"]}}}
    assert roofline.main([*COMMAND, "--op", ROW, "--against", str(file)]) == 0
    models["13.9"][ROW][row["chip"]] /= 2
    file.write_text(json.dumps(written))
    assert roofline.main([*COMMAND, "--op", ROW, "--against", str(file)]) == 1
    assert "us by the model" in capsys.readouterr().out


def test_what_was_measured_stands_beside_the_model(capsys):
    assert roofline.main(["--arch", "sm_90", "--op", "store bf16, one token", "--jobs", "1"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "errors:" in line)
    assert line == "errors: median 16%, largest 16%"


def test_another_nvrtc_is_no_failure(table, tmp_path, capsys):
    recorded = recorded_row(table)
    recorded["nvrtc"] = "11.0"
    recorded["rows"][0]["model_us"] = 0.1
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps(recorded))
    assert roofline.main([*COMMAND, "--op", ROW, "--against", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"worse: {ROW}" in said and "not a failure: NVRTC is " in said


@pytest.mark.parametrize("arguments, line", [
    (["--arch", "frob"], "roofline: --arch: expected names such as sm_90, got frob"),
    (["--arch", "sm_103"], "roofline: --arch: expected one of "),
    (["--op", "nought"], "roofline: --op: expected part of one of store bf16, "),
    (["--against", "nought.json"], "roofline: [Errno 2] No such file"),
    (["--page", "page.md", *COMMAND], "roofline: --page: expected --json or --add-to beside it"),
    (["--against", __file__], "roofline: --against: expected a file that --json has written"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(capsys, arguments, line):
    assert roofline.main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(line) and said.err.count("\n") == 1


def test_without_a_disassembler_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(nvdisasm, "find", lambda: None)
    assert roofline.main(COMMAND) == 2
    assert capsys.readouterr().err == (
        "roofline: nvdisasm is missing: pip install nvidia-cuda-nvdisasm\n"
    )
