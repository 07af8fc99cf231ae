"""`python -m kvcupy compile`: all kernels into the disk cache, in parallel processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import compile_check, ops
from .devices import cache, cxx, nvrtc
from .errors import CompileError
from .jobs import available_cpus, run
from .kernels import Specialisation
from .progress import Progress

_OLDEST = 75  # the kernels use instructions that came with it

Program = tuple[Specialisation, ...]
Compile = Callable[[Program], object]


@dataclass(frozen=True)
class _Attempt:
    """Compile one program after another, in whichever process; return what went wrong in it."""

    compile: Compile

    def __call__(self, program: Program) -> list[str]:
        try:
            self.compile(program)
        except CompileError as error:
            if len(program) > 1:
                return [text for one in program for text in self((one,))]
            return [str(error).splitlines()[0]]
        return []


def main(
    archs: Sequence[str] | None,
    *,
    every_arch: bool,
    check: bool,
    jobs: int | None,
    lines: bool,
) -> int:
    """Compile, say how it went, and return the exit status.

    Parameters
    ----------
    archs, every_arch : for these, or all, architectures with NVRTC; without any, `check` means all,
        and else the devices of this machine are meant
    check : look at what came out (`compile_check.check`)
    jobs : how many processes; None: as many as there are CPUs for this one
    lines : say how far it is where stderr is no terminal

    Raises
    ------
    KeyboardInterrupt : Ctrl-C was pressed; what is done is printed first
    """
    num_jobs = jobs or available_cpus()
    specialisations = ops.specialisations()
    programs = compile_check.programs(specialisations)
    if not (archs or every_arch or check):
        targets = _of_this_machine(programs)
        return max([_compile(*one, num_jobs, lines) for one in targets])
    archs = archs or compile_check.ARCHS
    try:
        require_archs(archs)
    except (ValueError, CompileError) as error:
        print(f"compile: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    if not check:
        targets = [_gpu(arch, programs) for arch in archs]
        return max([_compile(*one, num_jobs, lines) for one in targets])
    with Progress("check", len(specialisations) * len(archs), "kernels", lines=lines) as progress:
        try:
            report = compile_check.check(
                specialisations, archs, jobs=num_jobs, notify=progress.to,
                promises_128_bits=ops.promises_128_bits,
            )  # fmt: skip
        except KeyboardInterrupt:
            _say_stopped(progress)
            raise
    print(report)
    return 0 if report.ok else 1


def require_archs(archs: Sequence[str]) -> None:
    """Refuse what is no architecture that NVRTC can compile these kernels for.

    Raises
    ------
    ValueError : with what it could be
    CompileError : there is no NVRTC, and how to get one
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
            outcomes = run(_Attempt(compile_one), programs, num_jobs, progress.to, len)
        except KeyboardInterrupt:
            _say_stopped(progress)
            raise
    failures = [text for texts in outcomes for text in texts]
    seconds = time.perf_counter() - start
    print(
        f"{target:8}{total - len(failures)} kernels ready, {len(failures)} failed, {seconds:.1f} s"
    )
    for text in dict.fromkeys(failures):
        print(f"{'':8}{text}")
    return 1 if failures else 0


def _say_stopped(progress: Progress) -> None:
    text = f"stopped: {progress.done} of {progress.total} kernels are done"
    print(f"{text}; those stay in {cache.directory()}", file=sys.stderr)
