"""Compile every kernel for every architecture with NVRTC, and check the results.

    python scripts/compile_check.py
    python scripts/compile_check.py --sample
    python scripts/compile_check.py --record scripts/results/kernels.json --update

A specialisation passes if it compiles without a warning, keeps everything in registers, uses no
more of them than its budget, and, where it promises 16-byte accesses, if they are in its SASS.

A record is a file under version control with a line for each kernel, whose diff shows what a change
does to registers. A check against the record compiles the sources that have changed since, and a
sample of the others, which must come out as recorded. The exit status is 1 if a kernel fails or
differs from the record, and 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from common import nvdisasm

from kvcupy import ops, sources
from kvcupy.commands import precompile
from kvcupy.commands.precompile import ARCHS, Program, into_programs, require_archs, say_stopped
from kvcupy.devices import nvrtc
from kvcupy.errors import CompileError
from kvcupy.kernels import Specialisation
from kvcupy.progress import INTERRUPTED, Progress, available_cpus, count, run

# The most registers a thread of each kernel may use on any architecture. 64 lets 1024 threads share
# a multiprocessor; `store_copy` holds eight 16-byte words at once, which sm_100 spends 66 on.
REGISTER_BUDGET: dict[str, int] = {
    "store_copy": 72,
    "store_convert": 64,
    "store_dynamic": 64,
    "store_four_bit": 128,  # fp32 rows, element by element; 16-bit rows in words take 64
    "rope_store": 128,  # bf16 rows into an fp8 cache on sm_100 and sm_120; on sm_90 they take 96
    "gather_copy": 72,
    "gather_convert": 64,
    "gather_four_bit": 80,  # sm_75 into fp8, element by element; the others take 56
    "copy_pages": 64,
    "update_conv_state": 64,
    "shift_rows": 96,  # five blocks fit; CUDA 13.5 takes 90 on sm_120, and 12 takes 78
    "shift_four_bit": 64,
    "slot_mapping": 64,
    "transfer_copy": 128,  # a bounded grid: what counts is what one thread has in flight
    "transfer_convert": 128,  # as transfer_copy
    "transfer_to_four_bit": 128,
    "transfer_from_four_bit": 128,
    "note_fault": 32,
    "attention_starts": 64,
    "attention_schedule": 72,  # one block
    "attention_decode": 255,  # blocks of 128 threads: two a multiprocessor, whose loads fill it
    "attention_decode_mma": 255,  # two or three blocks of 128 threads an SM, as planned
    "attention_decode_latent": 255,  # two blocks of 128 threads an SM, as planned
    "attention_decode_heads": 255,  # a block of 256 threads an SM, as planned
    "merge_states": 64,
    "merge_many": 128,  # eight states in flight; a block has up to 256 threads
    "attention_prefill": 255,  # two or three blocks of 128 threads a multiprocessor, as planned
}

_SAMPLE = 20  # one of so many recorded programs is compiled

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_WARNING = re.compile(r"\bwarning\b(?!-number)")
_WIDE_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.E(?:\.\w+)*\.(?:128|256)\b")
_WIDE_STORE = re.compile(r"\bSTG\.E(?:\.\w+)*\.(?:128|256)\b")

Target = tuple[Program, str]
"""A program, and the architecture that it is compiled for."""
Name = tuple[str, str]
"""A specialisation as text, and an architecture."""


@dataclass(frozen=True)
class Usage:
    """The compiler's figures of one kernel.

    Attributes
    ----------
    registers : per thread
    stack_bytes, spill_bytes : summed over the functions of the kernel
    warnings : lines of the compiler's log
    missing : promised 16-byte accesses that its SASS lacks
    """

    registers: int
    stack_bytes: int = 0
    spill_bytes: int = 0
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Show registers, and what a good kernel does not have."""
        rest = {name: value for name, value in asdict(self).items() if value}
        registers = rest.pop("registers", 0)
        return ", ".join([f"{registers} registers", *(f"{n} {v}" for n, v in rest.items())])


@dataclass(frozen=True)
class Entry:
    """One specialisation on one architecture; it passes if `problems` is empty."""

    specialisation: str
    arch: str
    usage: Usage | None
    problems: tuple[str, ...]


@dataclass
class Report:
    """The result of `check`.

    Attributes
    ----------
    entries : one for each specialisation and architecture, in that order
    compiled : how many of them were compiled; the others are as recorded
    nvdisasm : the disassembler, or None: then the width of accesses was not looked at
    seconds : how long it took
    """

    entries: list[Entry] = field(default_factory=list)
    compiled: int = 0
    nvdisasm: Path | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with any of them."""
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """All problems, each with its kernel and architecture."""
        return [f"{e.specialisation} {e.arch}: {p}" for e in self.entries for p in e.problems]

    def add_recorded(self, usages: Mapping[Name, Usage], budgets: Mapping[str, int]) -> None:
        """Add kernels that were not compiled; what is recorded of them is judged like the rest."""
        for (specialisation, arch), usage in usages.items():
            kernel = specialisation.partition(":")[2].partition("<")[0]
            problems = tuple(_judge(usage, kernel, budgets.get(kernel)))
            self.entries.append(Entry(specialisation, arch, usage, problems))

    def sort(self, specialisations: Iterable[Specialisation], archs: Iterable[str]) -> None:
        """Put the entries in the order of specialisations, then of architectures."""
        pairs = product(map(str, specialisations), archs)
        order = {pair: n for n, pair in enumerate(pairs)}
        self.entries.sort(key=lambda entry: order[entry.specialisation, entry.arch])

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
        recorded = len(self.entries) - self.compiled
        rest = f", {recorded} as recorded" if recorded else ""
        lines.append(f"{self.compiled} compiled in {self.seconds:.1f} s{rest}")
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
    specialisations : by default all that the operations can ask for; those that they cannot ask for
        on an architecture are left out there
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
    specialisations = list(ops.specialisations() if specialisations is None else specialisations)
    report = _check_targets(
        targets_of(specialisations, archs, promises_128_bits, ops.is_reachable), promises_128_bits,
        budgets, jobs, notify, kernels_dir, tuple(options),
    )  # fmt: skip
    report.sort(specialisations, archs)
    return report


def targets_of(
    specialisations: Sequence[Specialisation], archs: Sequence[str],
    promises_128_bits: Callable[[Specialisation], bool] = lambda _: False,
    is_reachable: Callable[[Specialisation, str], bool] = lambda *_: True,
) -> list[Target]:  # fmt: skip
    """Return the programs for each architecture, the longest first.

    `is_reachable` tells which kernels there are on an architecture.
    """
    targets = []
    for arch in archs:
        reachable = [one for one in specialisations if is_reachable(one, arch)]
        targets += [(program, arch) for program in into_programs(reachable, promises_128_bits)]
    return sorted(targets, key=lambda target: target[0][0].kernel.name not in precompile.LARGE)


def _check_targets(
    targets: Iterable[Target], promises_128_bits: Callable[[Specialisation], bool],
    budgets: Mapping[str, int], jobs: int | None, notify: Callable[[int], object],
    kernels_dir: Path | None = None, options: tuple[str, ...] = (),
) -> Report:  # fmt: skip
    started, disassembler = time.perf_counter(), nvdisasm.find()
    tasks = [
        _Task(tuple((one, promises_128_bits(one), budgets.get(one.kernel.name)) for one in program),
              arch, disassembler, kernels_dir, options)
        for program, arch in targets
    ]  # fmt: skip
    results: list[Entry] = []
    if jobs is None:
        for task in tasks:
            for entry in _check_program(task):
                results.append(entry)
                notify(len(results))
    else:
        for entries in run(_check_program, tasks, jobs, notify, _Task.__len__):
            results += entries
    return Report(results, len(results), disassembler, time.perf_counter() - started)


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
        sass = nvdisasm.sections_of(nvdisasm.disassemble(task.nvdisasm, compiled[0].image))
    entries = []
    for (specialisation, promises, budget), result in zip(task.kernels, compiled, strict=True):
        usage = read_log(logs[result.lowered_name], result.lowered_name)
        if sass and promises:
            missing = missing_wide_accesses(sass[result.lowered_name])
            usage = replace(usage, missing=tuple(missing))
        problems = _judge(usage, specialisation.kernel.name, budget)
        entries.append(Entry(str(specialisation), task.arch, usage, tuple(problems)))
    return entries


def logs_of_entries(log: str) -> dict[str, str]:
    """Divide a log of `--ptxas-options=-v` by kernel.

    CompileError if it holds what could belong to any of them, a warning or a function they call.
    """
    logs = nvdisasm.divide(log, _ENTRY)
    if _WARNING.search(log) or any(
        name not in logs or name not in _FUNCTION.findall(logs[name])
        for name in _FUNCTION.findall(log)
    ):
        raise CompileError("the log does not say which kernel it speaks of", log)
    return logs


def read_log(log: str, lowered_name: str) -> Usage:
    """Return what a log of `--ptxas-options=-v` says of a kernel and all functions it calls.

    CompileError if it does not name the kernel.
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
    return [*problems, *usage.missing]


def missing_wide_accesses(sass: str) -> list[str]:
    """Return what is missing of 16-byte loads and stores of global memory.

    >>> missing_wide_accesses("LDG.E.128 R4, [R2.64] ; STG.E.64 [R6.64], R4 ;")
    ['no 16-byte store (STG.E.128) in its SASS']
    """
    expected = (_WIDE_LOAD, "load (LDG.E.128)"), (_WIDE_STORE, "store (STG.E.128)")
    return [f"no 16-byte {name} in its SASS" for wide, name in expected if not wide.search(sass)]


# --- The record ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """The usage of every kernel on every architecture.

    Attributes
    ----------
    compiler : `nvrtc.compiler()`
    digests : of what was compiled, by source (`digests_of`)
    usages : by specialisation and architecture
    """

    compiler: str
    digests: Mapping[str, str]
    usages: Mapping[Name, Usage]

    @staticmethod
    def load(file: Path) -> Record:
        """Read a record; OSError if that fails, ValueError if the file holds something else."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            usages = {
                (specialisation, arch): _from_json(value)
                for specialisation, row in data["kernels"].items()
                for arch, value in row.items()
            }
            return Record(str(data["compiler"]), dict(data["sources"]), usages)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: expected a record, got {error!r}") from error

    def save(self, file: Path) -> None:
        """Write a record, with a line for each source, and for each kernel."""
        rows: dict[str, dict[str, Any]] = {}
        for (specialisation, arch), usage in self.usages.items():
            rows.setdefault(specialisation, {})[arch] = _to_json(usage)
        tables = f'"sources": {_lines(self.digests)},\n  "kernels": {_lines(rows)}'
        text = f'{{\n  "compiler": {json.dumps(self.compiler)},\n  {tables}\n}}\n'
        file.write_text(text, encoding="utf-8")


def _lines(table: Mapping[str, Any]) -> str:
    """Return JSON with a line for each key."""
    lines = [f"\n    {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    return f"{{{','.join(lines)}\n  }}"


def _to_json(usage: Usage) -> Any:
    """Return the number of registers, with a name only where there is more to say."""
    more = {name: value for name, value in asdict(usage).items() if value and name != "registers"}
    return {"registers": usage.registers, **more} if more else usage.registers


def _from_json(value: Any) -> Usage:
    if not isinstance(value, dict):
        return Usage(int(value))
    fields: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value.items()
    }
    return Usage(**fields)


def digests_of(
    programs: Iterable[Program],
    promises_128_bits: Callable[[Specialisation], bool] = lambda _: False,
    kernels_dir: Path | None = None,
) -> dict[str, str]:
    """Return, by source, a digest of all that decides what comes out of it, but for the compiler.

    That is the code, the options, which kernels are compiled together and what they promise.
    """
    parts: dict[str, list[str]] = {}
    for program in programs:
        kernels = [(one.expression, promises_128_bits(one)) for one in program]
        parts.setdefault(program[0].kernel.source, []).append(repr(kernels))
    return {
        source: _sha256(_program_digest(source, kernels_dir), *nvrtc.OPTIONS, *kernels)
        for source, kernels in sorted(parts.items())
    }


_HOST_FOLDER = "host/"  # headers in it are never NVRTC's
_INCLUDE = re.compile(r'^# ?include "([^"]+)"', re.MULTILINE)
_COMMENT_OR_STRING = re.compile(r"""//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")""", re.DOTALL)


def _program_digest(source: str, folder: Path | None) -> str:
    """Return a digest of the code that NVRTC compiles for one file of the kernels, without comments
    and blanks: the file and all that it includes, but for what only the host device does."""
    folder = folder or sources.kernels_dir()
    codes: dict[str, str] = {}
    pending = [source]
    while pending:
        name = pending.pop()
        if name not in codes and not name.startswith(_HOST_FOLDER):
            text = (folder / name).read_text(encoding="utf-8")
            text = _COMMENT_OR_STRING.sub(lambda match: match[1] or " ", text)
            lines = (" ".join(line.split()) for line in text.splitlines())
            codes[name] = "\n".join(line for line in lines if line)
            pending += _INCLUDE.findall(codes[name])
    return _sha256("".join(f"{name}\0{codes[name]}\0" for name in sorted(codes)))


def _sha256(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def sample_of(targets: Iterable[Target], digests: Mapping[str, str]) -> set[Target]:
    """Draw some programs of each source; any edit of the sources, `digests`, draws others."""
    seed, by_source = "".join(digests.values()), dict[str, list[Target]]()
    for target in targets:
        by_source.setdefault(target[0][0].kernel.source, []).append(target)
    sample: set[Target] = set()
    for programs in by_source.values():
        programs.sort(key=lambda target: _sha256(seed, target[1], *map(str, target[0])))
        sample.update(programs[: -(-len(programs) // _SAMPLE)])
    return sample


class Comparison:
    """A record compared with the kernels of this tree.

    Parameters
    ----------
    record : by the same compiler
    digests : `digests_of` the present sources
    targets : all that is to be checked, on some of the record's architectures

    Attributes
    ----------
    unchanged, changed : sources that the record speaks for, and the others
    targets : what is to be compiled: all of the changed sources, a sample of the others
    """

    def __init__(
        self, record: Record, digests: Mapping[str, str], targets: Sequence[Target]
    ) -> None:
        archs = {arch for _, arch in targets}
        self._recorded = {name: u for name, u in record.usages.items() if name[1] in archs}
        self._kernels = {(str(one), arch) for program, arch in targets for one in program}
        differing = {_source(name) for name in self._recorded.keys() ^ self._kernels}
        same = {source for source in digests if digests[source] == record.digests.get(source)}
        self.unchanged = same - differing
        self.changed = digests.keys() - self.unchanged
        sample = sample_of([t for t in targets if t[0][0].kernel.source in self.unchanged], digests)
        self.targets = [
            target for target in targets
            if target[0][0].kernel.source in self.changed or target in sample
        ]  # fmt: skip

    def others(self, compiled: Mapping[Name, Usage | None]) -> dict[Name, Usage]:
        """Return what the record has of kernels that were not compiled."""
        return {name: self._recorded[name] for name in self._kernels - compiled.keys()}

    def differences(self, compiled: Mapping[Name, Usage | None]) -> dict[Name, str]:
        """Return what came out otherwise than recorded, and what is recorded but is no more.

        Kernels that do not compile (None) are not among them.
        """
        differences = {
            name: f"recorded {self._recorded.get(name, 'nothing')}, got {usage}"
            for name, usage in compiled.items()
            if usage is not None and usage != self._recorded.get(name)
        }
        stale = self._recorded.keys() - self._kernels
        return differences | {name: "recorded, but there is no such kernel" for name in stale}

    def contradictions(self, differences: Iterable[Name]) -> list[str]:
        """Return the unchanged sources of differing kernels: their record is wrong."""
        return sorted(self.unchanged & {_source(name) for name in differences})


def _source(name: Name) -> str:
    return name[0].partition(":")[0]


# --- The command ---------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        require_archs(options.arch)
        known = None
        if options.record is not None:
            known = _load(options.record, options.arch, update=options.update)
    except (ValueError, CompileError, OSError) as error:
        print(f"compile_check: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    try:
        return _check_all(options, known)
    except KeyboardInterrupt:
        return INTERRUPTED


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--arch", nargs="+", metavar="sm_90", default=ARCHS, help="default: all")
    add("--sample", action="store_true", help="a sample, which any edit of the sources draws anew")
    record = "compare with this record; compile what has changed since, and a sample of the rest"
    add("--record", type=Path, metavar="FILE", help=record)
    update = "write the results to the record, which need not exist"
    add("--update", action="store_true", help=update)
    add("--jobs", type=count, metavar="N", default=available_cpus(), help="processes")
    add("--progress", action="store_true", help="print lines where stderr is not a terminal")
    options = parser.parse_args(argv)
    if options.update and options.record is None:
        parser.error("--update: expected --record FILE with it")
    if options.sample and options.record is not None:
        parser.error("--sample: expected no --record with it")
    return options


def _load(file: Path, archs: Sequence[str], *, update: bool) -> Record | None:
    """Read the record; None if it does not exist yet and is to be written."""
    if not set(archs) <= set(ARCHS) or (update and set(archs) != set(ARCHS)):
        expected = f"{'all' if update else 'some'} of {', '.join(ARCHS)}"
        raise ValueError(f"--record: expected {expected}, got {', '.join(archs)}")
    if update and nvdisasm.find() is None:
        raise ValueError("--update: expected nvdisasm (pip install nvidia-cuda-nvdisasm)")
    if file.exists():
        return Record.load(file)
    if not update or not file.parent.is_dir():
        raise ValueError(f"--record: expected a file that --update has written, got {file}")
    return None


def _check_all(options: argparse.Namespace, record: Record | None) -> int:
    """Check kernels, against a record if there is one; return the exit status."""
    archs, file, update = options.arch, options.record, options.update
    specialisations, promises = ops.specialisations(), ops.promises_128_bits
    digests = _digests()
    targets = targets_of(specialisations, archs, promises, ops.is_reachable)
    if record is not None and record.compiler != nvrtc.compiler():
        print(f"{file} is of {record.compiler}: not compared with {nvrtc.compiler()}")
        record = None
    comparison = None
    if record is not None:
        comparison = Comparison(record, digests, targets)
        targets = comparison.targets
    elif options.sample:
        drawn = sample_of(targets, digests)
        targets = [target for target in targets if target in drawn]
    total = sum(len(program) for program, _ in targets)
    with Progress("check", total, "kernels", lines=options.progress) as progress:
        try:
            report = _check_targets(targets, promises, REGISTER_BUDGET, options.jobs, progress.to)
        except KeyboardInterrupt:
            say_stopped(progress)
            raise
    compiled = {(e.specialisation, e.arch): e.usage for e in report.entries}
    if comparison is not None:
        report.add_recorded(comparison.others(compiled), REGISTER_BUDGET)
    report.sort(specialisations, archs)
    print(report)
    holds = True
    if comparison is not None:
        holds = _say_differences(comparison, compiled, f"{file}", update=update)
    if file is not None and update and holds:
        holds = _write(file, digests, report)
    return 0 if report.ok and holds else 1


def _digests() -> dict[str, str]:
    """Return `digests_of` all that there is to compile."""
    programs = into_programs(ops.specialisations(), ops.promises_128_bits)
    return digests_of(programs, ops.promises_128_bits)


def _say_differences(
    comparison: Comparison, compiled: Mapping[Name, Usage | None], file: str, *, update: bool
) -> bool:
    """Say where kernels differ from the record; return whether it holds or can be updated."""
    differences = comparison.differences(compiled)
    for (specialisation, arch), text in sorted(differences.items()):
        print(f"{specialisation} {arch}: {text}")
    command = f"python scripts/compile_check.py --record {file} --update"
    if wrong := comparison.contradictions(differences):
        # Others of these sources, which were not compiled, may differ too.
        print(f"unchanged since they were recorded, and yet not as recorded: {', '.join(wrong)}")
        command = f"rm {file}; {command}"
    elif update or not differences:
        if comparison.changed and not update:
            changed = ", ".join(sorted(comparison.changed))
            print(f"changed, but compiled as recorded: {changed}; to spare that, run `{command}`")
        return True
    print(f"record is out of date: run `{command}`")
    return False


def _write(file: Path, digests: Mapping[str, str], report: Report) -> bool:
    """Write the record, and return True; False if something that belongs in it is not known."""
    usages = {(e.specialisation, e.arch): e.usage for e in report.entries if e.usage is not None}
    if len(usages) < len(report.entries):
        print(f"not written: {file}, as not all kernels compile")
        return False
    if digests != _digests():
        print(f"not written: {file}, as the sources have changed meanwhile")
        return False
    Record(nvrtc.compiler(), digests, usages).save(file)
    print(f"written: {file}")
    return True


if __name__ == "__main__":
    sys.exit(main())
