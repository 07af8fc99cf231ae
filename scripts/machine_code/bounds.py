"""Bounds on the speed of the hot kernels on GPUs that need not be present, and modelled times.

From the code, not a measurement. Each row is a call of an operation: it is planned as for a GPU of
the architecture, its kernels are compiled, and `sass` reads the instructions that a warp issues on
one pass through the loop, or the kernel, that does the work. Counted against the published rates of
a chip, they give a ceiling for each of its resources; the lowest binds.

Where the Params of the launch decide a branch (and on a pass through a whole kernel the number of a
thread and valid indices), the branch is followed. Where data decides, the cheapest way that does
all of the work is counted, and the dearest beside it. A GPU stays below these ceilings.

The time of a call is what `model` makes of the cheapest way: from the first instruction of a block
to the end of the last block, for the pieces that `attention_schedule` cuts, with the schedule, the
merge and the launches. Blocks that merge themselves are looked at without that end of theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, prod
from pathlib import Path

import numpy as np

from kvcupy.devices import nvrtc
from kvcupy.errors import CompileError
from kvcupy.ops.launch import unverified

from . import cubin, model, nvdisasm, paths, sass
from .chips import (
    LAUNCH_US,
    LINK_LATENCY_NS,
    READ_SHARE,
    SCHEDULE_US,
    START_US,
    WRITE_SHARE,
    Chip,
)
from .constants import FirstThread, constant_bank
from .pieces import heads_of, merges_parts, row_passes, without_merge
from .planned import Planned, PlannedDevice
from .rows import SECTOR_BYTES, Row

_REGISTERS_PER_SM, _REGISTERS_STEP = 65536, 256
_SHARED_STEP_BYTES = 128
_L2_BYTES_PER_SM = 64  # per clock: NVIDIA A100 whitepaper


@dataclass(frozen=True)
class Entry:
    """One row on one chip.

    Attributes
    ----------
    registers : per thread
    shared_bytes : per block
    warps_per_sm : that an SM holds at once, of the launch
    asked_bytes : that a warp loads and stores on a pass
    counted : bytes of them that the memory must move; or, `of_products`, two per multiply-add
    instructions, dearest : that a warp issues on a pass, on the cheapest and the dearest way
    uncounted_loops : inner loops on the way that are counted once, as nothing says how often
    ceilings : GB/s, or GFLOPS, that each resource allows at the highest clock; "memory" (or "link",
        "tensor peak") is the published peak
    binds : the lowest of them
    share : of the peak, as the cheapest way allows; at most 1
    dearest_share : as the dearest way allows
    bound_us : of the call's work, at the lowest ceiling
    model_us : modelled time of the call (`model.py`)
    kernels_us : of that, by kernel; the rest is launches
    pass_clocks : for one pass of each warp of an SM
    problems : what does not fit what the row declares
    pipes : instructions by pipe, on the cheapest way
    """

    row: str
    chip: str
    arch: str
    kernel: str
    registers: int
    shared_bytes: int
    warps_per_sm: int
    asked_bytes: float
    counted: float
    instructions: int
    dearest: int
    uncounted_loops: int
    ceilings: dict[str, float]
    binds: str
    share: float
    dearest_share: float
    bound_us: float
    model_us: float
    kernels_us: dict[str, float]
    pass_clocks: int
    slack: float
    problems: list[str] = field(default_factory=list)
    pipes: dict[str, int] = field(default_factory=dict)


def clocks_of(path: paths.Path, chip: Chip) -> dict[str, float]:
    r"""Return the clocks of an SM that a warp keeps each of its resources busy on a pass.

    An instruction that is predicated off takes its issue slot, and no more.

    Examples
    --------
    >>> from .chips import CHIPS
    >>> code, _ = sass.parse("  /*0000*/ FFMA R1, R2, R3, R1 ;\n  /*0010*/ IADD3 R4, R4, R5, RZ ;")
    >>> clocks_of(paths.Path(tuple(code)), CHIPS["A100"])
    {'issue': 0.5, 'fma': 0.5, 'alu': 0.5}
    """
    clocks: dict[str, float] = {}
    for one in path.code:
        for resource, amount in model.clocks_of(one, chip).items():
            if resource == "issue" or one.address not in path.inactive:
                clocks[resource] = clocks.get(resource, 0.0) + amount
    return clocks


def warps_per_sm(
    resources: cubin.Resources, warps_per_block: int, smem_bytes: int, chip: Chip
) -> int:
    """Return how many warps an SM holds at once, by registers, shared memory and its limits.

    Examples
    --------
    >>> from .chips import CHIPS
    >>> taken, h100 = cubin.Resources(registers=128, static_bytes=0, params_start=0), CHIPS["H100"]
    >>> warps_per_sm(taken, 4, 0, h100), warps_per_sm(taken, 4, 100 << 10, h100)
    (16, 8)
    """
    per_warp = _rounded(resources.registers * 32, _REGISTERS_STEP)
    shared = _rounded(smem_bytes + max(resources.static_bytes, chip.reserved_bytes),
                      _SHARED_STEP_BYTES)  # fmt: skip
    # A register file per scheduler, and a warp stays at one of them.
    by_registers = _REGISTERS_PER_SM // model.SCHEDULERS // max(1, per_warp) * model.SCHEDULERS
    blocks = min(
        chip.blocks, chip.warps // warps_per_block, by_registers // warps_per_block,
        chip.shared_bytes // shared if shared else chip.blocks,
    )  # fmt: skip
    return blocks * warps_per_block


def _rounded(n: int, step: int) -> int:
    return -(-n // step) * step


_SCHEDULES = ("attention_starts", "attention_schedule")
_MERGES = ("merge_many",)
_MERGED_WORD_BYTES = 8  # at least, in which states are loaded


@dataclass(frozen=True)
class Compiled:
    """A launch and its machine code.

    Attributes
    ----------
    code : its control flow
    loop, whole : the ways through the loop that moves most, and through the kernel with that loop
        passed once; a kernel that is one pass has no loop
    dearest : the dearest way of a pass
    """

    launch: Planned
    resources: cubin.Resources
    controls: dict[int, sass.Control]
    code: paths.Code
    loop: paths.Path | None
    whole: paths.Path
    dearest: paths.Path

    @property
    def name(self) -> str:
        return self.launch.specialisation.kernel.name


@lru_cache(maxsize=4)
def _launches(row: Row, arch: str, sm_count: int) -> tuple[Compiled | str, ...]:
    """Return what a call launches, in order; of a kernel that no model is needed for, its name."""
    device = PlannedDevice(arch, sm_count)
    with unverified():
        row.call(device)
    launches: list[Compiled | str] = []
    names = [str(launch.specialisation) for launch in device.launches]
    for launch in device.launches:
        name = launch.specialisation.kernel.name
        if name in _SCHEDULES:
            launches.append(name)
        elif name.startswith(row.kernel):
            block = None if row.num_units is None else row.block(launch)
            launches.append(_compiled(launch, arch, row.word_bytes, block))
        elif name in _MERGES:
            merge = _compiled(launch, arch, _MERGED_WORD_BYTES, None)
            launches.append(replace(merge, loop=_states_loop(merge.code)))
    if len(launches) < len(names) or sum(_is_main(each, row) for each in launches) != 1:
        raise ValueError(f"{row.name} {arch}: expected one launch of {row.kernel}*, got {names}")
    return tuple(launches)


def _is_main(each: Compiled | str, row: Row) -> bool:
    return isinstance(each, Compiled) and each.name.startswith(row.kernel)


def _compiled(launch: Planned, arch: str, word_bytes: int, block: int | None) -> Compiled:
    """Compile a kernel and find its ways: with `block`, the ways of that block's first thread."""
    compiled = nvrtc.compile_cubin(launch.specialisation, arch)
    if not compiled.target.startswith("sm_"):
        raise CompileError(f"{launch.specialisation}: this NVRTC is older than {arch}", "")
    image, name = compiled.image, compiled.lowered_name
    resources = cubin.resources(image, name)
    params = without_merge(launch)  # whose loop moves most, in few blocks
    constants = constant_bank(params, resources.params_start, launch.block, launch.grid)
    thread = None if block is None else FirstThread(block, word_bytes)
    code = paths.Code(_listing(image, name), constants, thread)
    loop = _busiest_loop(code, word_bytes) if block is None else None
    passed = code.path(loop, word_bytes)
    whole = passed if loop is None else _whole(code, loop, launch, word_bytes)
    dearest = code.path(loop, word_bytes, dearest=True)
    if passed is None or whole is None or dearest is None or (loop is None and block is None):
        raise CompileError(
            f"{launch.specialisation} {arch}: no way through its code moves data", ""
        )
    return Compiled(
        launch, resources, cubin.controls(image, name), code, None if loop is None else passed,
        whole, dearest,
    )  # fmt: skip


def _whole(
    code: paths.Code, busiest: paths.Loop, launch: Planned, word_bytes: int
) -> paths.Path | None:
    """Return the way through a kernel with one pass of a loop. Nothing in the code tells how many
    rows of a tile there are; the loops beside that one finish rows."""
    loops = code.loops()
    beside = [
        loop.header for loop in loops
        if loop is not busiest and not any(loop.blocks < other.blocks for other in loops)
    ]  # fmt: skip
    return code.path(None, word_bytes, passes=dict.fromkeys(beside, row_passes(launch)))


def examine(row: Row, chip: Chip) -> Entry:
    """Return a row's entry on a chip.

    Raises
    ------
    CompileError : NVRTC or nvdisasm is missing or fails
    ValueError : the call does not launch one kernel of the row's
    """
    launches = _launches(row, chip.arch, chip.sm_count)
    (main,) = [each for each in launches if isinstance(each, Compiled) and _is_main(each, row)]
    launch, fast = main.launch, main.loop or main.whole

    # A pass
    asked = 32 * (fast.bytes_loaded(row.word_bytes) + fast.bytes_stored(row.word_bytes))
    units = asked / row.asked_bytes(launch)
    pieces = row.pieces(launch)
    heads = heads_of(launch) if pieces else 1
    blocks, problems = len(pieces) * heads if pieces else prod(launch.grid), []
    per_block = units * launch.warps_per_block
    if row.num_units is None:
        if per_block < 1 or per_block % 1:
            problems.append(f"a block asks for {per_block:.3f} x {row.unit} on a pass")
    else:
        declared = row.num_units / (blocks * launch.warps_per_block)
        if abs(units - declared) > row.asked_slack * declared:
            problems.append(f"a warp asks for {units:.3f} x {row.unit}, {declared:.3f} declared")
        units = declared
    tiles = round(sum(1 / piece.parts for piece in pieces))  # of a KV head
    moved = units * row.unit_bytes / (tiles / row.sequences if pieces else 1)
    counted = 2.0 * sum(map(sass.products_of, fast.active())) if row.of_products else moved

    # The chip
    sms = min(chip.sm_count, blocks)
    warps = min(warps_per_sm(main.resources, launch.warps_per_block, launch.smem_bytes, chip),
                ceil(blocks / sms) * launch.warps_per_block)  # fmt: skip
    gigaclocks = sms * chip.clock_mhz * 1e-3  # of all SMs that the launch uses, per second
    name_of_peak, peak = _peak(row, chip)

    def ceilings_of(path: paths.Path) -> dict[str, float]:
        clocks = clocks_of(path, chip)
        return {**{r: counted / c * gigaclocks for r, c in clocks.items()}, name_of_peak: peak}

    ceilings = ceilings_of(fast)
    binds = min(ceilings, key=lambda resource: ceilings[resource])
    dearest_share = min(ceilings_of(main.dearest).values()) / peak

    # The call
    if pieces:
        # Parts begin at whole steps: at a key, at a warp's keys of a pass, or at a block's.
        step = {"attention_decode": 1.0, "attention_decode_mma": units}.get(main.name, per_block)
        passes = [piece.passes(round(step), round(per_block / step)) for piece in pieces]
        heads_run_fastest = launch.grid[0] == heads
        passes = [n for n in passes for _ in range(heads)] if heads_run_fastest else passes * heads
        work = sum(piece.keys for piece in pieces) * heads / units * counted
    else:
        in_units = (row.num_units or blocks * per_block) * row.unit_bytes
        passes = [row.call_bytes / in_units if row.call_bytes else 1.0] * blocks
        work = sum(passes) * launch.warps_per_block * counted
    traffic = _traffic(row, chip, asked, moved, units, sms)
    cut = [piece.parts for piece in pieces if piece.parts > 1 and piece.part == 0]
    clocks, kernels = 0.0, {}
    for each in launches:
        if isinstance(each, str):
            kernels[each] = SCHEDULE_US
        elif each is main:
            clocks, us = _kernel_us(each, chip, traffic, warps, passes)
            kernels[each.name] = us + _merge_parts_us(launch, chip, max(cut, default=1))
        else:
            kernels[each.name] = _merge_us(each, chip, cut, heads)
    us = sum(kernels.values()) + LAUNCH_US * len(kernels)
    return Entry(
        row.name, chip.name, chip.arch, launch.specialisation.expression, main.resources.registers,
        launch.smem_bytes + main.resources.static_bytes, warps, asked, round(counted, 1),
        len(fast.code), len(main.dearest.code), fast.uncounted,
        {r: round(c, 1) for r, c in sorted(ceilings.items(), key=lambda item: item[1])},
        binds, round(ceilings[binds] / peak, 4), round(dearest_share, 4),
        round(1e-3 * work / ceilings[binds], 2), round(us, 1),
        {name: round(each, 1) for name, each in kernels.items()}, round(clocks), row.slack,
        problems, dict(Counter(map(sass.pipe_of, fast.code)).most_common()),
    )  # fmt: skip


def _peak(row: Row, chip: Chip) -> tuple[str, float]:
    if row.of_products:
        return "tensor peak", 1e3 * chip.tensor_tflops
    return ("link", chip.link_gb_s) if row.over_link else ("memory", chip.memory_gb_s)


def _traffic(
    row: Row, chip: Chip, asked: float, moved: float, units: float, sms: int
) -> model.Traffic:
    """Return what a byte costs that a lane asks for: at the memory, or as sectors of L2."""
    schedulers = model.SCHEDULERS * sms
    memory_clocks: float = chip.memory_clocks
    peak = chip.memory_gb_s
    if row.over_link:
        memory_clocks, peak = LINK_LATENCY_NS * chip.load_mhz * 1e-3, chip.link_gb_s
    per_byte = moved / asked * schedulers * chip.load_mhz * 1e-3 / peak
    of_cache = (
        units * row.unit_sectors * SECTOR_BYTES / asked * schedulers
        / min(chip.l2_bytes_per_clock, _L2_BYTES_PER_SM * sms)
    )  # fmt: skip
    return model.Traffic(
        memory_clocks, chip.cache_clocks, max(per_byte / READ_SHARE, of_cache),
        max(per_byte / WRITE_SHARE, of_cache), row.word_bytes,
    )  # fmt: skip


def _kernel_us(
    kernel: Compiled, chip: Chip, traffic: model.Traffic, warps: int, passes: Sequence[float]
) -> tuple[float, float]:
    """Return the clocks of a pass, and how long a kernel takes.

    Parameters
    ----------
    warps : that an SM holds at once
    passes : of each block through the loop, in the order in which they begin
    """
    of_block = ceil(kernel.launch.warps_per_block / model.SCHEDULERS)
    own = max(of_block, warps // model.SCHEDULERS)
    places = min(chip.sm_count, len(passes)) * max(1, warps // kernel.launch.warps_per_block)
    whole = model.Way(kernel.whole, kernel.controls, chip, traffic)
    if kernel.loop is None:
        count = ceil(sum(passes) / places * own)  # of a scheduler
        run = whole.run(own, min(count, own * _MAX_WAVES), warps_per_block=of_block)
        each = run.drained / len(run.ends)
        return each * own, START_US + each * count / chip.load_mhz
    loop = model.Way(kernel.loop, kernel.controls, chip, traffic)
    each = model.pass_clocks(loop, own, of_block)
    ends = whole.run(own, 2 * own, warps_per_block=of_block).ends
    cold, warm = ends[own - 1], ends[-1] - ends[own - 1]
    blocks = [(cold if i < places else warm) + max(0.0, n - 1) * each for i, n in enumerate(passes)]
    return each, START_US + model.makespan(blocks, places) / chip.load_mhz


_MAX_WAVES = 8  # simulated; longer queues repeat them
_MERGED_AT_ONCE = 8  # states of a row, by a block of attention or a stripe of `merge_many`


def _merge_us(kernel: Compiled, chip: Chip, parts: Sequence[int], heads: int) -> float:
    """Return how long it takes to merge tiles that are cut into so many parts, in their order."""
    if not parts:
        return START_US + 2 * chip.cache_clocks / chip.load_mhz  # the list is empty
    launch = kernel.launch
    (record,) = np.frombuffer(launch.params, launch.specialisation.kernel.params)
    has_block_per_row = launch.specialisation.arguments[-1] == "true"
    rows_per_block = 1 if has_block_per_row else prod(launch.block) >> int(record["lane_shift"])
    blocks_per_tile = ceil(heads * int(record["state_rows"]) / rows_per_block)
    at_once = _MERGED_AT_ONCE << int(record["stripe_shift"])
    passes = [ceil(n / at_once) for n in parts for _ in range(blocks_per_tile)]
    sms = min(chip.sm_count, len(passes))
    warps = min(warps_per_sm(kernel.resources, launch.warps_per_block, launch.smem_bytes, chip),
                ceil(len(passes) / sms) * launch.warps_per_block)  # fmt: skip
    per_byte = model.SCHEDULERS * sms / min(chip.l2_bytes_per_clock, _L2_BYTES_PER_SM * sms)
    traffic = model.Traffic(
        chip.cache_clocks, chip.cache_clocks, per_byte, per_byte, _MERGED_WORD_BYTES
    )
    return _kernel_us(kernel, chip, traffic, warps, passes)[1]


def _states_loop(code: paths.Code) -> paths.Path | None:
    """Return a pass over states in `merge_many`: for each part of a wide row, its innermost loop
    that loads them."""
    passes = ((loop, code.path(loop, _MERGED_WORD_BYTES)) for loop in code.loops())
    moving = (each for each in passes if each[1] and _bytes_moved(each[1], _MERGED_WORD_BYTES))
    innermost, once = next(moving, (None, None))
    if innermost is None or once is None:
        return None
    around = [loop.trips or 1 for loop in code.loops() if innermost.blocks < loop.blocks]
    return replace(once, code=once.code * prod(around))


_MAX_PARTS = 64  # kMostMerged of attention_merge.cuh
_MAX_STATE_BYTES = 256 << 10  # kMergedBytes
# To L2, before states are loaded: a state is written, a fence, the counter, LSEs.
_ROUND_TRIPS = 4


def _merge_parts_us(launch: Planned, chip: Chip, parts: int) -> float:
    """Return how long the last block of a tile merges what it and others left of so many parts."""
    if parts < 2 or not merges_parts(launch):
        return 0.0
    (record,) = np.frombuffer(launch.params, launch.specialisation.kernel.params)
    state_bytes = 4 * int(record["state_rows"]) * int(record["v"]["width"])
    max_parts = min(_MAX_PARTS, _MAX_STATE_BYTES // state_bytes)
    levels = [parts] if parts <= max_parts else 2 * [ceil(parts**0.5)]
    clocks = 0.0
    for n in levels:
        in_turn = ceil(n / _MERGED_AT_ONCE) * chip.cache_clocks
        clocks += _ROUND_TRIPS * chip.cache_clocks + max(
            in_turn, n * state_bytes / _L2_BYTES_PER_SM
        )
    return clocks / chip.load_mhz


def _busiest_loop(code: paths.Code, word_bytes: int) -> paths.Loop | None:
    """Return the loop that moves most in a pass, the innermost of those that move as much.

    Of those, one with products comes before one that only copies what they take.
    """
    work = {}
    for loop in code.loops():
        path = code.path(loop, word_bytes)
        moved = 0 if path is None else _bytes_moved(path, word_bytes)
        if path is not None and moved:
            work[loop] = moved, any(map(sass.products_of, path.active()))
    return max(work, key=work.__getitem__, default=None)


def _bytes_moved(path: paths.Path, word_bytes: int) -> int:
    return path.bytes_loaded(word_bytes) + path.bytes_stored(word_bytes)


@lru_cache(maxsize=16)
def _listing(image: bytes, name: str) -> str:
    return nvdisasm.sections_of(nvdisasm.disassemble(disassembler(), image))[name]


def disassembler() -> Path:
    path = nvdisasm.find()
    if path is None:
        raise CompileError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm", "")
    return path
