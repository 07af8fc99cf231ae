"""`python -m kvcupy roofline`: what the machine code of the hot kernels allows, on chips not here.

A bound from the code, not a measurement. Each row is a call of an operation: it is planned as for a
GPU of the architecture, its kernel is compiled, and `sass` reads what a warp issues on one pass of
the loop that does the work. Counted against the published rates of a chip, that gives a ceiling for
each of its resources; the lowest binds. Real kernels stay below it: nothing is said of bank
conflicts, of caches that miss, of the last wave of blocks, or of clocks that fall under load.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np

from . import compile_check, formats, sass
from .arrays import ArrayView, contiguous_strides
from .devices import nvrtc
from .errors import CompileError
from .kernels import Specialisation
from .ops.attention import paged_attention

# --- Chips ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chip:
    """What is published of a GPU.

    Attributes
    ----------
    clock_mhz : boost clock
    memory_gb_s, link_gb_s : peak of its memory, and of PCIe in one direction
    tensor_tflops : fp16 products, dense, float32 sums
    products_per_clock : multiply-adds of fp16 per clock and SM that `mma.sync` reaches
    warps, blocks, shared_bytes : at most, per SM
    reserved_bytes : of shared memory that the system takes from each block
    lanes_per_clock : results per clock and SM, by pipe
    memory_clocks, cache_clocks : latency of a load that misses all caches, or hits L2
    """

    name: str
    sm_count: int
    clock_mhz: float
    memory_gb_s: float
    link_gb_s: float
    tensor_tflops: float
    products_per_clock: float
    warps: int
    blocks: int
    shared_bytes: int
    reserved_bytes: int
    lanes_per_clock: Mapping[str, float]
    memory_clocks: float
    cache_clocks: float


def _lanes(fma: int, half: int, add: int = 64, fp64: int = 2) -> dict[str, float]:
    return {"fma": fma, "imad": 64, "half": half, "alu": 64, "add": add, "xu": 16, "fp64": fp64}


CHIPS: dict[str, Chip] = {
    "sm_75": Chip("T4", 40, 1590, 320, 15.75, 65, 512, 32, 16, 64 << 10, 0, _lanes(64, 64), 500, 188),
    "sm_80": Chip("A100 SXM 80 GB", 108, 1410, 2039, 31.5, 312, 1024, 64, 32, 164 << 10, 1024,
                  _lanes(64, 128, fp64=32), 466, 261),
    "sm_86": Chip("A10", 72, 1695, 600, 31.5, 125, 512, 48, 16, 100 << 10, 1024, _lanes(128, 64), 541, 273),
    "sm_89": Chip("L40S", 142, 2520, 864, 31.5, 362, 512, 48, 24, 100 << 10, 1024, _lanes(128, 64), 541, 273),
    "sm_90": Chip("H100 SXM", 132, 1980, 3350, 63, 989, 1290, 64, 32, 228 << 10, 1024,
                  _lanes(128, 128, fp64=64), 479, 263),
    "sm_100": Chip("B200", 148, 1965, 8000, 63, 2250, 1290, 64, 32, 228 << 10, 1024,
                   _lanes(128, 64, fp64=64), 600, 300),
    "sm_120": Chip("RTX PRO 6000", 188, 2617, 1792, 63, 504, 512, 48, 24, 100 << 10, 1024,
                   _lanes(128, 64, add=128), 541, 273),
}  # fmt: skip
"""A chip by architecture."""

_REGISTERS_PER_SM, _REGISTERS_PER_WARP_STEP = 65536, 256
_SHARED_STEP_BYTES = 128
_ISSUES_PER_CLOCK = 4
_LOCAL_BYTES_PER_CLOCK = 128  # of L1 and shared memory, per SM

# --- Calls, planned without a GPU -----------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A launch that an operation asked for."""

    specialisation: Specialisation
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    smem_bytes: int
    params: bytes

    @property
    def warps_per_block(self) -> int:
        return -(-prod(self.block) // 32)


class _Stream:
    """The one stream of a `PlannedDevice`, which has nothing to wait for."""

    name, priority, capturing, retains_owners, capture_id = "planned", 0, False, True, None

    def __init__(self, device: PlannedDevice) -> None:
        self.device = device

    def wait(self, other: Any) -> None:
        pass


class PlannedDevice:
    """A GPU as far as plans see it: arrays are addresses, and launches are written down.

    Attributes
    ----------
    launches : in the order of issue
    """

    kind, warp_lanes, has_copy_engine, torch_name = "cuda", 32, True, "cuda:0"
    fault_pointer = 1 << 32

    def __init__(self, arch: str) -> None:
        chip = CHIPS[arch]
        self.name = self.model = chip.name
        self.arch, self.sm_count = arch, chip.sm_count
        self.launches: list[Planned] = []
        self._next = 1 << 40
        self._stream = _Stream(self)

    def array(self, *shape: int, format: str) -> ArrayView:
        """Return an array of this device, which no memory stands behind."""
        strides = contiguous_strides(shape, formats.itemsize(format))
        # Operations look a device up by what an array says: a name, or the device itself.
        v = ArrayView(self._next, shape, strides, format, cast(str, self), library="cupy")
        self._next += -(-prod(shape) * v.itemsize // 256) * 256
        return v

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> ArrayView:
        return self.array(*shape, format=formats.tag(np.dtype(dtype)))

    def as_stream(self, stream: Any, library: str = "", name: str = "stream") -> _Stream:
        return self._stream

    def address(self, view: ArrayView) -> int:
        return view.pointer

    def load(self, specialisation: Specialisation) -> Specialisation:
        return specialisation

    def launch(
        self, function: Specialisation, grid: tuple[int, int, int], block: tuple[int, int, int],
        smem_bytes: int, params: bytes, stream: Any, keep: Sequence[object] = (),
    ) -> None:  # fmt: skip
        self.launches.append(Planned(function, grid, block, smem_bytes, bytes(params)))


# --- Rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A call whose kernel is looked at.

    Attributes
    ----------
    name : of the row, unique
    call : issues the operation on a device
    kernel : the name of its kernel begins so; other launches of the call are left out
    unit : what `unit_bytes` are the bytes of
    unit_bytes : that the memory has to move for a unit, however often a kernel asks for them
    padded_bytes : those that a launch's lanes ask for, for a unit
    sharing : blocks of a launch that work on the same units
    in_loop : whether a pass is one of the loop that moves most, not of the whole kernel
    word_bytes : accesses of lanes that are narrower are not of the work, but of indices or scales
    flops_per_unit : 0: the row is of bytes; else it is of products, and its share that of the
        tensor cores
    """

    name: str
    call: Callable[[PlannedDevice], None]
    kernel: str
    unit: str
    unit_bytes: float
    padded_bytes: Callable[[Planned], float]
    sharing: Callable[[Planned], float] = lambda _: 1
    in_loop: bool = True
    word_bytes: int = 16
    of_products: bool = False


_SEQUENCES, _KEYS, _PAGE = 256, 8192, 16


def _attention(
    kv_format: str, *, query_format: str = "bf16", heads: tuple[int, int], widths: tuple[int, int],
    tokens: int = 1, sequences: int = _SEQUENCES, scaled: bool = False,
) -> Callable[[PlannedDevice], None]:  # fmt: skip
    def call(device: PlannedDevice) -> None:
        pages = _KEYS // _PAGE
        query = device.array(sequences * tokens, heads[0], widths[0], format=query_format)
        k_cache = device.array(sequences * pages, _PAGE, heads[1], widths[0], format=kv_format)
        v_cache = device.array(sequences * pages, _PAGE, heads[1], widths[1], format=kv_format)
        if widths[0] != widths[1] and heads[1] == 1:  # MLA: the latent is both
            v_cache = ArrayView(
                k_cache.pointer, v_cache.shape, k_cache.strides, kv_format, k_cache.device,
                library="cupy",
            )  # fmt: skip
        table = device.array(sequences, pages, format="int32")
        options: dict[str, Any] = {}
        if tokens > 1:
            options["query_lens"] = device.array(sequences, format="int32")
        if scaled:
            options |= {"k_scale": 0.5, "v_scale": 0.5}
        paged_attention(
            query, k_cache, v_cache, table, device.array(sequences, format="int32"),
            out=device.array(sequences * tokens, heads[0], widths[1], format=query_format),
            **options,
        )

    return call


def _padded_key_bytes(launch: Planned) -> float:
    """Return the bytes of a key and its value as the attention kernels load them, padded."""
    arguments = launch.specialisation.arguments
    itemsize = _itemsize(arguments[0])
    if launch.specialisation.kernel.name == "attention_decode":
        packs, lanes = int(arguments[2]), 1 << _int_param(launch, "lane_shift")
        return 2 * packs * lanes * 8 * itemsize
    return (int(arguments[1]) + int(arguments[2])) * itemsize


def _itemsize(ctype: str) -> int:
    return next((f.itemsize for f in formats.FORMATS.values() if f.ctype == ctype), 2)


def _int_param(launch: Planned, name: str) -> int:
    record = np.frombuffer(launch.params, launch.specialisation.kernel.params)
    return int(record[name][0])


def _decode(kv_format: str, group: int, width: int = 128) -> Row:
    scaled = kv_format in ("fp8_e4m3", "fp8_e5m2", "int8")
    itemsize = formats.itemsize(kv_format)
    query_format = "bf16" if scaled else kv_format
    call = _attention(kv_format, query_format=query_format, heads=(8 * group, 8),
                      widths=(width, width), scaled=scaled)  # fmt: skip
    return Row(
        f"decode {kv_format} group {group}", call, "attention_", "key of a KV head",
        2 * width * itemsize, _padded_key_bytes, lambda launch: launch.grid[0] / _SEQUENCES,
        word_bytes=min(16, 8 * itemsize),
    )


def _mla(heads: int) -> Row:
    call = _attention("bf16", heads=(heads, 1), widths=(576, 512))
    return Row(
        f"mla bf16 {heads} heads", call, "attention_", "latent of a token", 2 * 576,
        _padded_key_bytes, lambda launch: launch.grid[0] / _SEQUENCES,
    )


def _prefill(k_width: int, v_width: int) -> Row:
    call = _attention("bf16", heads=(32, 8), widths=(k_width, v_width), tokens=1024, sequences=4)
    return Row(
        f"prefill bf16 {k_width}x{v_width}", call, "attention_prefill", "key of a KV head",
        2 * (k_width + v_width), _padded_key_bytes, of_products=True,
    )


ROWS: tuple[Row, ...] = (
    *(_decode(name, group) for name in ("fp16", "bf16", "fp8_e4m3", "int8") for group in (1, 4, 8)),
    _mla(16), _mla(128),
    *(_prefill(*widths) for widths in ((64, 64), (128, 128), (192, 128), (256, 256))),
)  # fmt: skip
"""What `roofline` looks at."""

# --- The model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One row on one chip."""

    row: str
    arch: str
    chip: str
    kernel: str
    registers: int
    shared_bytes: int
    warps_per_sm: int
    bytes_per_pass: float
    instructions: int
    dearest: int
    uncounted_loops: int
    pipes: dict[str, int]
    loads_in_flight: int
    ceilings: dict[str, float]
    unit: str
    binds: str
    share: float
    dearest_share: float
    problems: list[str] = field(default_factory=list)


def clocks_of(code: Iterable[sass.Instruction], chip: Chip) -> dict[str, float]:
    """Return the clocks of an SM that a warp's instructions keep each of its resources busy."""
    lanes = chip.lanes_per_clock
    clocks: Counter[str] = Counter()
    for one in code:
        clocks["issue"] += 1 / _ISSUES_PER_CLOCK  # type: ignore[assignment]
        pipe = sass.pipe_of(one)
        if pipe in ("fma", "fma2", "imad"):
            clocks["fma"] += 32 * (2 if pipe == "fma2" else 1) / lanes["fma"]  # type: ignore
            if pipe == "imad":
                clocks["imad"] += 32 / lanes["imad"]  # type: ignore[assignment]
        elif pipe in ("alu", "add"):
            clocks["alu"] += 32 / lanes[pipe]  # type: ignore[assignment]
        elif pipe in ("half", "xu", "fp64"):
            clocks[pipe] += 32 / lanes[pipe]  # type: ignore[assignment]
        elif pipe == "tensor":
            clocks["tensor"] += sass.products_of(one) / chip.products_per_clock  # type: ignore
        elif pipe in ("global", "shared"):
            clocks["lsu"] += max(1, 32 * one.access_bytes / _LOCAL_BYTES_PER_CLOCK)  # type: ignore
        elif pipe == "shuffle":
            clocks["lsu"] += 1
    return dict(clocks)


def warps_per_sm(
    resources: sass.Resources, warps_per_block: int, smem_bytes: int, chip: Chip
) -> int:
    """Return how many warps an SM holds at once, by registers, shared memory and its limits."""
    per_warp = -(-resources.registers * 32 // _REGISTERS_PER_WARP_STEP) * _REGISTERS_PER_WARP_STEP
    shared = smem_bytes + max(resources.static_bytes, chip.reserved_bytes)
    shared = -(-shared // _SHARED_STEP_BYTES) * _SHARED_STEP_BYTES
    # An SM has four register files, and a warp stays at one of them.
    warps_by_registers = _REGISTERS_PER_SM // 4 // max(1, per_warp) * 4
    blocks = min(
        chip.blocks,
        chip.warps // warps_per_block,
        warps_by_registers // warps_per_block,
        chip.shared_bytes // shared if shared else chip.blocks,
    )
    return blocks * warps_per_block


def pass_clocks(path: sass.Path, chip: Chip, word_bytes: int) -> tuple[float, int]:
    """Return the clocks that a warp alone takes for a pass, and its most bytes in flight per lane.

    It issues an instruction a clock, in order, and stops where one needs what has not arrived:
    registers of a load, or copies to shared memory that it waits for. Loads of the work come from
    memory, narrower ones from L2; all else is immediate.
    """
    ready: dict[str, float] = {}
    groups: list[list[float]] = [[]]
    flying: list[tuple[float, int]] = []
    clock, started, most = 0.0, 0.0, 0
    for turn in range(3):
        started = clock
        for one in path.code:
            clock += 1
            clock = max([clock, *(ready[r] for r in one.reads if r in ready)])
            if one.address in path.inactive:
                continue
            if one.name == "LDGDEPBAR":
                groups.append([])
            elif one.name == "DEPBAR" and len(groups) > 1:
                left = int(one.operands[-1], 16) if one.operands[-1].startswith("0x") else 0
                done = groups[: max(0, len(groups) - 1 - left)]
                clock = max([clock, *(t for group in done for t in group)])
                groups = groups[len(done) :]
            elif one.loads_global or one.name in ("ATOM", "ATOMG"):
                of_work = one.access_bytes >= word_bytes
                arrives = clock + (chip.memory_clocks if of_work else chip.cache_clocks)
                if one.name == "LDGSTS":
                    groups[-1].append(arrives)
                else:
                    ready.update(dict.fromkeys(one.writes, arrives))
                if of_work:
                    flying = [f for f in flying if f[0] > clock] + [(arrives, one.access_bytes)]
                    most = max(most, sum(size for _, size in flying))
                continue
            for register in one.writes:
                ready.pop(register, None)
    return clock - started, most


def examine(row: Row, arch: str) -> list[Entry]:
    """Return a row's entries on an architecture: one for each launch of its kernel."""
    chip, device = CHIPS[arch], PlannedDevice(arch)
    row.call(device)
    launches = [
        launch for launch in device.launches
        if launch.specialisation.kernel.name.startswith(row.kernel)
        and launch.specialisation.kernel.name not in _SMALL
    ]  # fmt: skip
    if not launches:
        names = ", ".join(str(launch.specialisation) for launch in device.launches)
        raise ValueError(f"{row.name}: expected a launch of {row.kernel}*, got {names or 'none'}")
    return [_examine_launch(row, launch, arch, chip) for launch in launches]


_SMALL = ("attention_starts",)


def _examine_launch(row: Row, launch: Planned, arch: str, chip: Chip) -> Entry:
    image, name = _compiled(launch.specialisation, arch)
    resources = sass.resources(image, name)
    code = sass.Code.of(_listing(image, name), launch.params, resources.params_start)
    loop, problems = None, []
    if row.in_loop:
        loop = _busiest_loop(code, row.word_bytes)
        if loop is None:
            problems.append("no loop moves the work")
    fast = code.path(loop, row.word_bytes)
    slow = code.path(loop, row.word_bytes, dearest=True)
    if fast is None or slow is None:
        raise CompileError(f"{launch.specialisation} {arch}: no way through its code", "")
    moved = 32 * (fast.bytes_loaded(row.word_bytes) + fast.bytes_stored(row.word_bytes))
    units = moved / row.padded_bytes(launch)
    per_block = units * launch.warps_per_block
    if row.in_loop and (per_block != int(per_block) or not per_block):
        problems.append(f"a block moves {per_block:.3f} of a {row.unit} per pass")
    warps = warps_per_sm(resources, launch.warps_per_block, launch.smem_bytes, chip)
    useful = units * row.unit_bytes / row.sharing(launch)
    if row.of_products:
        useful = 2.0 * sum(map(sass.products_of, fast.code))
    alone, in_flight = pass_clocks(fast, chip, row.word_bytes)
    per_clock = chip.sm_count * chip.clock_mhz * 1e-3  # G clocks of SMs per second
    peak = chip.tensor_tflops * 1e3 if row.of_products else chip.memory_gb_s

    def ceilings_of(path: sass.Path) -> dict[str, float]:
        return {r: useful / c * per_clock for r, c in clocks_of(path.code, chip).items()}

    ceilings = {**ceilings_of(fast), "latency": useful * warps / alone * per_clock}
    binds = min(ceilings, key=lambda resource: ceilings[resource])
    return Entry(
        row.name, arch, chip.name, launch.specialisation.expression, resources.registers,
        launch.smem_bytes + resources.static_bytes, warps, moved, len(fast.code), len(slow.code),
        fast.uncounted, dict(Counter(map(sass.pipe_of, fast.code)).most_common()), in_flight * 32,
        {resource: round(c, 1) for resource, c in sorted(ceilings.items(), key=lambda c: c[1])},
        "GFLOPS" if row.of_products else "GB/s", binds, round(ceilings[binds] / peak, 4),
        round(min(ceilings_of(slow).values()) / peak, 4), problems,
    )  # fmt: skip


def _busiest_loop(code: sass.Code, word_bytes: int) -> sass.Loop | None:
    """Return the loop that moves most in a pass, the innermost of those that move as much."""
    best, most = None, 0
    for loop in code.loops():
        path = code.path(loop, word_bytes)
        moved = 0 if path is None else path.bytes_loaded(word_bytes) + path.bytes_stored(word_bytes)
        if moved > most:
            best, most = loop, moved
    return best


def _compiled(specialisation: Specialisation, arch: str) -> tuple[bytes, str]:
    compiled = nvrtc.compile_cubin(specialisation, arch)
    if not compiled.target.startswith("sm_"):
        raise CompileError(f"{specialisation}: this NVRTC is older than {arch}", "")
    return compiled.image, compiled.lowered_name


@lru_cache(maxsize=64)
def _listing(image: bytes, name: str) -> str:
    nvdisasm = compile_check.find_nvdisasm()
    if nvdisasm is None:
        raise CompileError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm", "")
    return compile_check.sections_of(compile_check.disassemble(nvdisasm, image))[name]


# --- The command ----------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvcupy roofline", description=__doc__)
    parser.add_argument("--arch", nargs="+", metavar="sm_90", default=["sm_80", "sm_90", "sm_100", "sm_120"])
    parser.add_argument("--op", nargs="+", metavar="NAME", default=[""])
    parser.add_argument("--json", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if any(text in row.name for text in options.op)]
    tasks = [(row, arch) for row in rows for arch in options.arch]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda task: examine(*task), tasks))
    entries = [entry for result in results for entry in result]
    for e in entries:
        lowest = ", ".join(f"{r} {c / _peak(e):.0%}" for r, c in list(e.ceilings.items())[:4])
        print(f"{e.row:24} {e.arch:7} {e.registers:4} regs {e.warps_per_sm:3} warps "
              f"{e.instructions:5}..{e.dearest:<5} instr / {e.bytes_per_pass:6.0f} B  {lowest}  "
              f"[{e.dearest_share:.0%}] {'; '.join(e.problems)}"
              + (f" {e.uncounted_loops} loops once" if e.uncounted_loops else ""))  # fmt: skip
        if options.verbose:
            print(f"    {e.kernel}: {e.pipes}")
    if options.json:
        options.json.write_text(json.dumps([asdict(e) for e in entries], indent=1))
    return 0


def _peak(entry: Entry) -> float:
    chip = CHIPS[entry.arch]
    return chip.tensor_tflops * 1e3 if entry.unit == "GFLOPS" else chip.memory_gb_s


if __name__ == "__main__":
    sys.exit(main())
