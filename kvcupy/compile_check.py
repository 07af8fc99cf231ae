"""`python -m kvcupy compile`: all kernels into the disk cache, and a look at what came out.

A specialisation passes if it compiles without a warning, keeps everything in registers, uses no
more of them than its budget, and, where it promises 16-byte accesses, if they are in its SASS.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from .devices import cache, cxx, nvrtc
from .errors import CompileError
from .kernels import Specialisation
from .progress import Progress, available_cpus, run

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# The most registers a thread of each kernel may use on any architecture. 64 lets 1024 threads share
# a multiprocessor; `store_copy` holds eight 16-byte words at once, which sm_100 spends 66 on.
REGISTER_BUDGET: dict[str, int] = {
    "store_copy": 72,
    "store_convert": 64,
    "store_dynamic": 64,
    "rope_store": 116,  # fp32 rows with a norm into a quantised cache; bf16 rows take 80
    "gather_copy": 72,
    "gather_convert": 64,
    "copy_pages": 64,
    "slot_mapping": 64,
    "transfer_copy": 128,  # a bounded grid: what counts is what one thread has in flight
    "transfer_convert": 128,  # likewise
    "note_fault": 32,
    "attention_starts": 64,
    "attention_decode": 255,  # blocks of 128 threads: two a multiprocessor, whose loads fill it
    "merge_states": 100,  # eight states in flight; two take 60
    "attention_prefill": 255,  # two or three blocks of 128 threads a multiprocessor, as planned
}

_OLDEST = 75  # the kernels use instructions that came with it
_KERNELS_PER_PROGRAM = 8  # more gain nothing
_LARGE = ("attention_decode", "attention_prefill")  # which compile ten times as long as they parse

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_SASS_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,]+)", re.MULTILINE)
_WARNING = re.compile(r"\bwarning\b(?!-number)")
_WIDE_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.E(?:\.\w+)*\.(?:128|256)\b")
_WIDE_STORE = re.compile(r"\bSTG\.E(?:\.\w+)*\.(?:128|256)\b")

Program = tuple[Specialisation, ...]
"""Kernels of one source file, which NVRTC compiles together."""
Compile = Callable[[Program], object]


@dataclass(frozen=True)
class Usage:
    """What ptxas says of one compiled kernel. Stack and spills are summed over its functions."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One specialisation on one architecture; it passes if `problems` is empty."""

    specialisation: str
    arch: str
    usage: Usage | None
    problems: tuple[str, ...]


@dataclass
class Report:
    """What `check` found.

    Attributes
    ----------
    entries : one for each specialisation and architecture, in that order
    nvdisasm : the disassembler, or None: then the width of accesses was not looked at
    seconds : how long it took
    """

    entries: list[Entry] = field(default_factory=list)
    nvdisasm: Path | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with any of them."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """All problems, each with what it is about."""
        return [f"{e.specialisation} {e.arch}: {p}" for e in self.entries for p in e.problems]

    def __str__(self) -> str:
        """Show one line a kernel and architecture: instantiations, and their most registers."""
        groups: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            group = entry.specialisation.partition("<")[0], entry.arch
            groups.setdefault(group, []).append(entry)
        lines = [f"{'kernel':36} {'arch':8} {'count':>5} {'registers':>9} {'problems':>8}"]
        for (kernel, arch), entries in groups.items():
            most = max((e.usage.registers for e in entries if e.usage), default=0)
            wrong = sum(bool(e.problems) for e in entries)
            lines.append(f"{kernel:36} {arch:8} {len(entries):5} {most:9} {wrong:8}")
        lines += self.problems
        if self.nvdisasm is None:
            hint = "pip install nvidia-cuda-nvdisasm"
            lines.append(f"access widths not checked: no nvdisasm ({hint})")
        lines.append(f"{len(self.entries)} compiled in {self.seconds:.1f} s")
        return "\n".join(lines)


def check(
    specialisations: Iterable[Specialisation] | None = None, archs: Sequence[str] = ARCHS, *,
    promises_128_bits: Callable[[Specialisation], bool] = lambda _: False,
    budgets: Mapping[str, int] = REGISTER_BUDGET, jobs: int | None = None,
    kernels_dir: Path | None = None, options: Sequence[str] = (),
    notify: Callable[[int], object] = lambda done: None,
) -> Report:  # fmt: skip
    """Compile and check. Compiled kernels go to the disk cache on the way.

    Parameters
    ----------
    specialisations : by default all that the operations can ask for
    archs : names such as "sm_90"
    promises_128_bits : tells which must have 16-byte loads and stores in their SASS
    budgets : most registers, by kernel name
    jobs : how many processes compile; None: this one alone
    kernels_dir : where the sources are, if not the package's own
    options : further NVRTC options
    notify : called with the number of kernels that are done, after each

    Raises
    ------
    KeyboardInterrupt : Ctrl-C was pressed; what was compiled is in the disk cache
    """
    if specialisations is None:
        from .ops import specialisations as all_specialisations

        specialisations = all_specialisations()
    started, nvdisasm = time.perf_counter(), find_nvdisasm()
    specialisations = list(specialisations)
    tasks = [
        _Task(tuple((one, promises_128_bits(one), budgets.get(one.kernel.name)) for one in program),
              arch, nvdisasm, kernels_dir, tuple(options))
        for program in into_programs(specialisations, promises_128_bits) for arch in archs
    ]  # fmt: skip
    results = []
    if jobs is None:
        for task in tasks:
            for entry in _check_program(task):
                results.append(entry)
                notify(len(results))
    else:
        for entries in run(_check_program, tasks, jobs, notify, _Task.__len__):
            results += entries
    order = {(str(one), arch): n for n, (one, arch) in enumerate(product(specialisations, archs))}
    results.sort(key=lambda entry: order[entry.specialisation, entry.arch])
    return Report(results, nvdisasm, time.perf_counter() - started)


def into_programs(
    specialisations: Iterable[Specialisation],
    promises_128_bits: Callable[[Specialisation], bool] = lambda _: False,
) -> list[Program]:
    """Divide kernels into programs that NVRTC compiles whole, the longest first.

    Parsing a source takes as long as compiling a small kernel of it, so a few of those share a
    program. Those that are disassembled stand together, for nvdisasm takes long to start.
    """
    files: dict[tuple[str, bool], list[Specialisation]] = {}
    for one in specialisations:
        is_large = one.kernel.name in _LARGE
        files.setdefault((one.kernel.source, is_large), []).append(one)
    programs: list[Program] = []
    for (_, is_large), kernels in sorted(files.items(), key=lambda file: not file[0][1]):
        kernels.sort(key=promises_128_bits, reverse=True)
        size = 1 if is_large else _KERNELS_PER_PROGRAM
        programs += [tuple(kernels[i : i + size]) for i in range(0, len(kernels), size)]
    return programs


@dataclass(frozen=True)
class _Task:
    """Kernels of one source to be checked on one architecture, in whichever process.

    `kernels` are specialisations, whether each promises 16-byte accesses, and its budget.
    """

    kernels: tuple[tuple[Specialisation, bool, int | None], ...]
    arch: str
    nvdisasm: Path | None
    kernels_dir: Path | None
    options: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.kernels)


def _check_program(task: _Task) -> list[Entry]:
    """Check kernels together; one by one where a complaint could be about any of them."""
    program = tuple(one for one, _, _ in task.kernels)
    try:
        compiled = nvrtc.compile_program(
            program, task.arch, kernels_dir=task.kernels_dir, options=task.options, verbose=True
        )
        logs = {compiled[0].lowered_name: compiled[0].log}
        if len(task) > 1:
            logs = logs_of_entries(compiled[0].log)
    except CompileError as error:
        if len(task) > 1:
            tasks = [replace(task, kernels=(one,)) for one in task.kernels]
            return [entry for one in tasks for entry in _check_program(one)]
        return [Entry(str(program[0]), task.arch, None, (str(error),))]
    if not compiled[0].target.startswith("sm_"):
        problem = f"compiled to PTX only: this NVRTC is older than {task.arch}"
        return [Entry(str(one), task.arch, None, (problem,)) for one in program]
    sass = {}
    if task.nvdisasm is not None and any(promises for _, promises, _ in task.kernels):
        sass = _divide(disassemble(task.nvdisasm, compiled[0].image), _SASS_SECTION)
    entries = []
    for (specialisation, promises, budget), result in zip(task.kernels, compiled, strict=True):
        usage = read_log(logs[result.lowered_name], result.lowered_name)
        problems = _judge(usage, specialisation.kernel.name, budget)
        if sass and promises:
            problems += missing_wide_accesses(sass[result.lowered_name])
        entries.append(Entry(str(specialisation), task.arch, usage, tuple(problems)))
    return entries


def logs_of_entries(log: str) -> dict[str, str]:
    """Divide a log of `--ptxas-options=-v` by the kernels that it speaks of.

    CompileError if it holds what could belong to any of them, a warning or a function they call.
    """
    logs = _divide(log, _ENTRY)
    if _WARNING.search(log) or any(
        name not in logs or name not in _FUNCTION.findall(logs[name])
        for name in _FUNCTION.findall(log)
    ):
        raise CompileError("the log does not say which kernel it speaks of", log)
    return logs


def read_log(log: str, lowered_name: str) -> Usage:
    """Return what a log of `--ptxas-options=-v` says of a kernel and all functions it calls.

    CompileError if it says nothing of the kernel.
    """
    if lowered_name not in _ENTRY.findall(log):
        raise CompileError(f"the log does not speak of {lowered_name}", log)
    registers = max((int(n) for n in _REGISTERS.findall(log)), default=0)
    frames = [tuple(map(int, numbers)) for numbers in _STACK.findall(log)]
    return Usage(
        registers,
        sum(stack for stack, _, _ in frames),
        sum(stores + loads for _, stores, loads in frames),
        tuple(line.strip() for line in log.splitlines() if _WARNING.search(line)),
    )


def _judge(usage: Usage, kernel: str, budget: int | None) -> list[str]:
    problems = list(usage.warnings)
    if usage.stack_bytes or usage.spill_bytes:
        problems.append(
            f"{usage.stack_bytes} bytes of stack, {usage.spill_bytes} bytes spilled: expected none"
        )
    if budget is None:
        problems.append(f"{kernel} has no entry in REGISTER_BUDGET")
    elif usage.registers > budget:
        problems.append(f"{usage.registers} registers, over the budget of {budget}")
    return problems


def find_nvdisasm() -> Path | None:
    """Return NVIDIA's disassembler from its wheel or from PATH, or None."""
    for entry in dict.fromkeys(sys.path):
        for found in sorted(Path(entry or ".").glob("nvidia/*/bin/nvdisasm"), reverse=True):
            return found
    on_path = shutil.which("nvdisasm")
    return Path(on_path) if on_path else None


def disassemble(nvdisasm: Path, cubin: bytes) -> str:
    """Return the SASS of a cubin; CompileError if nvdisasm refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [str(nvdisasm), "-c", str(file)], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise CompileError("nvdisasm failed", done.stderr)
    return done.stdout


def _divide(text: str, head: re.Pattern[str]) -> dict[str, str]:
    """Return what stands from each head to the next, by the name in the head."""
    heads = list(head.finditer(text))
    ends = [found.start() for found in heads[1:]] + [len(text)]
    return {found[1]: text[found.start() : end] for found, end in zip(heads, ends, strict=True)}


def missing_wide_accesses(sass: str) -> list[str]:
    """Return what is missing of 16-byte loads and stores of global memory.

    >>> missing_wide_accesses("LDG.E.128 R4, [R2.64] ; STG.E.64 [R6.64], R4 ;")
    ['no 16-byte store (STG.E.128) in its SASS']
    """
    expected = (_WIDE_LOAD, "load (LDG.E.128)"), (_WIDE_STORE, "store (STG.E.128)")
    return [f"no 16-byte {name} in its SASS" for wide, name in expected if not wide.search(sass)]


# --- The command ---------------------------------------------------------------------------------


def _attempt(compile_one: Compile, program: Program) -> list[str]:
    """Compile a program, in whichever process; return what went wrong in it."""
    try:
        compile_one(program)
    except CompileError as error:
        if len(program) > 1:
            return [text for one in program for text in _attempt(compile_one, (one,))]
        return [str(error).splitlines()[0]]
    return []


def main(
    archs: Sequence[str] | None, *, every_arch: bool, with_check: bool, jobs: int | None,
    lines: bool,
) -> int:  # fmt: skip
    """Compile, say how it went, and return the exit status.

    Parameters
    ----------
    archs, every_arch : for these, or all, architectures with NVRTC; without any, a check means all,
        and else the devices of this machine are meant
    with_check : look at what came out (`check`)
    jobs : how many processes; None: as many as there are CPUs for this one
    lines : say how far it is where stderr is no terminal

    Raises
    ------
    KeyboardInterrupt : Ctrl-C was pressed; what is done is printed first
    """
    num_jobs = jobs or available_cpus()
    from . import ops

    specialisations = ops.specialisations()
    programs = into_programs(specialisations)
    if not (archs or every_arch or with_check):
        targets = _of_this_machine(programs)
        return max([_compile(*one, num_jobs, lines) for one in targets])
    archs = archs or ARCHS
    try:
        require_archs(archs)
    except (ValueError, CompileError) as error:
        print(f"compile: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    if not with_check:
        targets = [_gpu(arch, programs) for arch in archs]
        return max([_compile(*one, num_jobs, lines) for one in targets])
    with Progress("check", len(specialisations) * len(archs), "kernels", lines=lines) as progress:
        try:
            report = check(
                specialisations, archs, jobs=num_jobs, notify=progress.to,
                promises_128_bits=ops.promises_128_bits,
            )  # fmt: skip
        except KeyboardInterrupt:
            _say_stopped(progress)
            raise
    print(report)
    return 0 if report.ok else 1


def require_archs(archs: Sequence[str]) -> None:
    """Raise ValueError for what is no architecture that NVRTC can compile these kernels for.

    CompileError if there is no NVRTC, with how to get one.
    """
    nvrtc.nvrtc_version()
    known = [n for n in nvrtc.supported_archs() if n >= _OLDEST]
    for arch in archs:
        try:
            number = nvrtc.arch_number(arch)
        except ValueError:
            raise ValueError(f"--arch: expected names such as sm_90, got {arch}") from None
        newer = bool(known) and number > known[-1]  # compiled to PTX, which a driver translates
        if number < _OLDEST or (known and number not in known and not newer):
            names = ", ".join(f"sm_{n}" for n in known) or f"sm_{_OLDEST} and newer"
            raise ValueError(f"--arch: expected one of {names}, got {arch}")


def _of_this_machine(programs: list[Program]) -> list[tuple[str, Compile, list[Program]]]:
    """Return the devices of this machine, what compiles for each, and what there is to compile."""
    from . import device
    from .devices.cuda import why_not

    alone: list[Program] = [(one,) for program in programs for one in program]
    targets: list[tuple[str, Compile, list[Program]]] = [("host", _for_host, alone)]
    if not why_not():
        gpu: Any = device("cuda")
        targets.append(_gpu(gpu.arch, programs))
    return targets


def _for_host(program: Program) -> None:
    """Compile a kernel for this processor, and what shares a launch among threads."""
    cxx.build_pool()
    for specialisation in program:
        cxx.build(specialisation)


def _gpu(arch: str, programs: list[Program]) -> tuple[str, Compile, list[Program]]:
    return arch, partial(nvrtc.compile_program, arch=arch), programs


def _compile(
    target: str, compile_one: Compile, programs: Sequence[Program], num_jobs: int, lines: bool
) -> int:
    """Compile all kernels for one target, and say how it went; return the exit status."""
    start, total = time.perf_counter(), sum(map(len, programs))
    with Progress(f"compile {target}", total, "kernels", lines=lines) as progress:
        try:
            outcomes = run(partial(_attempt, compile_one), programs, num_jobs, progress.to, len)
        except KeyboardInterrupt:
            _say_stopped(progress)
            raise
    failures = [text for texts in outcomes for text in texts]
    seconds = time.perf_counter() - start
    ready = total - len(failures)
    print(f"{target:8}{ready} kernels ready, {len(failures)} failed, {seconds:.1f} s")
    for text in dict.fromkeys(failures):
        print(f"{'':8}{text}")
    return 1 if failures else 0


def _say_stopped(progress: Progress) -> None:
    text = f"stopped: {progress.done} of {progress.total} kernels are done"
    print(f"{text}; those stay in {cache.directory()}", file=sys.stderr)
