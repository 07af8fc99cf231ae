"""`python -m kvcupy compile`: compile kernels into the disk cache before their first use."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ..devices import cache, cxx, nvrtc
from ..errors import CompileError
from ..kernels import Specialisation
from ..progress import Progress, available_cpus, run

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


_OLDEST = 75  # the kernels use instructions that came with it
_KERNELS_PER_PROGRAM = 8  # more gain nothing
# These compile ten times as long as they parse.
LARGE = (
    "attention_decode", "attention_decode_mma", "attention_decode_heads", "attention_prefill",
)  # fmt: skip

Program = tuple[Specialisation, ...]
"""Kernels of one source file, which NVRTC compiles together."""
Compile = Callable[[Program], object]


def into_programs(
    specialisations: Iterable[Specialisation],
    promises_128_bits: Callable[[Specialisation], bool] = lambda _: False,
) -> list[Program]:
    """Divide kernels into programs that NVRTC compiles whole, the longest first.

    Parsing a source takes as long as compiling a small kernel of it.
    """
    files: dict[tuple[str, bool], list[Specialisation]] = {}
    for specialisation in specialisations:
        kernel = specialisation.kernel
        files.setdefault((kernel.source, kernel.name in LARGE), []).append(specialisation)
    programs: list[Program] = []
    for (_, is_large), kernels in sorted(files.items(), key=lambda file: not file[0][1]):
        kernels.sort(key=promises_128_bits, reverse=True)
        size = 1 if is_large else _KERNELS_PER_PROGRAM
        programs += [tuple(kernels[i : i + size]) for i in range(0, len(kernels), size)]
    return programs


# --- The command ---------------------------------------------------------------------------------


def main(archs: Sequence[str] | None, *, every_arch: bool, jobs: int | None, lines: bool) -> int:
    """Compile for some architectures or the devices of this machine; return the exit status."""
    if complaint := cache.complaint():
        print(f"compile: {complaint} (KVCUPY_CACHE_DIR names another folder)", file=sys.stderr)
        return 2
    num_jobs = jobs or available_cpus()
    if not archs and not every_arch:
        return max([_compile(*target, num_jobs, lines) for target in _of_this_machine()])
    archs = archs or ARCHS
    try:
        require_archs(archs)
    except (ValueError, CompileError, OSError) as error:
        print(f"compile: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return max([_compile(*_gpu(arch), num_jobs, lines) for arch in archs])


def require_archs(archs: Sequence[str]) -> None:
    """Raise ValueError unless NVRTC can compile these kernels for the architectures."""
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


def _of_this_machine() -> list[tuple[str, Compile, list[Program]]]:
    """Return the devices of this machine, what compiles for each, and what there is to compile."""
    from .. import device, ops
    from ..devices.cuda import why_not

    programs = into_programs(ops.specialisations())
    alone: list[Program] = [(kernel,) for program in programs for kernel in program]
    targets: list[tuple[str, Compile, list[Program]]] = [("host", _for_host, alone)]
    if not why_not():
        gpu: Any = device("cuda")
        targets.append(_gpu(gpu.arch))
    return targets


def _for_host(program: Program) -> None:
    """Compile a kernel for this processor, and what shares a launch among threads."""
    cxx.build_pool()
    for specialisation in program:
        cxx.build(specialisation)


def _gpu(arch: str) -> tuple[str, Compile, list[Program]]:
    from .. import ops

    reachable = [each for each in ops.specialisations() if ops.is_reachable(each, arch)]
    return arch, partial(nvrtc.compile_program, arch=arch), into_programs(reachable)


def _compile(
    target: str, compile_one: Compile, programs: Sequence[Program], num_jobs: int, lines: bool
) -> int:
    """Compile all kernels for one target, and say how it went; return the exit status."""
    start, total = time.perf_counter(), sum(map(len, programs))
    with Progress(f"compile {target}", total, "kernels", lines=lines) as progress:
        try:
            outcomes = run(partial(_attempt, compile_one), programs, num_jobs, progress.to, len)
        except KeyboardInterrupt:
            say_stopped(progress)
            raise
    failures = [text for texts in outcomes for text in texts]
    seconds = time.perf_counter() - start
    ready = total - len(failures)
    print(f"{target:8}{ready} kernels ready, {len(failures)} failed, {seconds:.1f} s")
    for text in dict.fromkeys(failures):
        print(f"{'':8}{text}")
    return 1 if failures else 0


def _attempt(compile_one: Compile, program: Program) -> list[str]:
    """Compile a program, in whichever process; return what went wrong in it."""
    try:
        compile_one(program)
    except CompileError as error:
        if len(program) > 1:
            return [text for kernel in program for text in _attempt(compile_one, (kernel,))]
        return [str(error).splitlines()[0]]
    return []


def say_stopped(progress: Progress) -> None:
    """Print how many kernels are compiled after Ctrl-C, and where they are kept."""
    text = f"stopped: {progress.done} of {progress.total} kernels are done"
    print(f"{text}; those stay in {cache.directory()}", file=sys.stderr)
