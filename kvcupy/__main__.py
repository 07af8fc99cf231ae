"""The command line: `python -m kvcupy doctor | compile | calibrate | bench | demo`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .probe import environment

if TYPE_CHECKING:
    from .kernels import Specialisation

_SCRIPTS = {
    "bench": ("bench_ops.py", "measure the operations (scripts/bench_ops.py)"),
    "demo": ("overlap_demo.py", "show copies beside computation (scripts/overlap_demo.py)"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m kvcupy", description="KV-cache operations.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what is here, what works, how to get what is missing")
    compiling = commands.add_parser(
        "compile",
        help="compile kernels ahead of their first use",
        description="Compile all kernels into the disk cache: for the devices of this machine, "
        "or, with any of the options, for GPUs that need not be here.",
    )
    compiling.add_argument("--all", action="store_true", help="with NVRTC for all architectures")
    compiling.add_argument("--arch", nargs="+", metavar="sm_90", help="with NVRTC for these")
    compiling.add_argument(
        "--check",
        action="store_true",
        help="with NVRTC, and fail on warnings, spills and too many registers",
    )
    calibrating = commands.add_parser(
        "calibrate",
        help="measure which way of a transfer is the fastest here",
        description='Measure kernels against the copy engine, and keep what method="auto" goes by.',
    )
    calibrating.add_argument("--device", help="such as cuda:1; by default the first GPU, or host")
    calibrating.add_argument("--quick", action="store_true", help="a coarse grid, in seconds")
    for name, (_, purpose) in _SCRIPTS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.command in _SCRIPTS:
        return _run_script(options.command, rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "doctor":
        from . import doctor

        return doctor.main()
    if options.command == "calibrate":
        from . import calibrate

        return calibrate.main(options.device, quick=options.quick)
    return _compile(options)


def _run_script(command: str, arguments: Sequence[str]) -> int:
    script = Path(__file__).resolve().parents[1] / "scripts" / _SCRIPTS[command][0]
    if not script.is_file():
        text = f"{command}: {script.name} comes with the source repository, not with the package"
        print(f"{text}; run this in a checkout.", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, str(script), *arguments], env=environment())


def _compile(options: argparse.Namespace) -> int:
    if not (options.all or options.check or options.arch):
        return _warm()
    from . import compile_check
    from .ops import promises_128_bits

    archs = options.arch or compile_check.ARCHS
    if options.check:
        report = compile_check.check(
            archs=archs, threads=os.cpu_count() or 1, promises_128_bits=promises_128_bits
        )
        print(report)
        return 0 if report.ok else 1
    from .devices import nvrtc

    status = 0
    for arch in archs:
        status |= _compile_all(arch, partial(nvrtc.compile_cubin, arch=arch))
    return status


def _warm() -> int:
    """Compile all kernels for the devices of this machine."""
    from . import device
    from .devices.cuda import why_not

    names = ["host"] if why_not() else ["host", "cuda"]
    return max([_compile_all(name, device(name).load) for name in names])


def _compile_all(target: str, compile_one: Callable[[Specialisation], object]) -> int:
    """Compile all kernels for one target, and say how it went; return the exit status."""
    from .errors import CompileError
    from .ops import specialisations

    def attempt(specialisation: Specialisation) -> CompileError | None:
        try:
            compile_one(specialisation)
        except CompileError as error:
            return error
        return None

    start = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [error for error in pool.map(attempt, specialisations()) if error]
    seconds = time.perf_counter() - start
    count = len(specialisations()) - len(failures)
    print(f"{target:8}{count} kernels ready, {len(failures)} failed, {seconds:.1f} s")
    for first_line in dict.fromkeys(str(error).splitlines()[0] for error in failures):
        print(f"{'':8}{first_line}")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
