"""The command line: `python -m kvcupy COMMAND`; `--help` lists the commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .progress import INTERRUPTED, count

_READER_GONE = 141  # the exit status that shells report after SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, 2 for a wrong argument."""
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as of `store list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        return _READER_GONE
    return status


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "doctor":
        from .commands import doctor

        return doctor.main()
    if options.command == "calibrate":
        from .commands import calibrate

        return calibrate.main(options.device, quick=options.quick, lines=options.progress)
    if options.command == "verify":
        from .testing import verification

        return verification.main(options.device, json_file=options.json, lines=options.progress)
    from .commands import precompile

    return precompile.main(
        options.arch, every_arch=options.all, jobs=options.jobs, lines=options.progress
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvcupy", description="KV-cache operations.")
    parser.add_argument("--version", action="version", version=f"kvcupy {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what is installed, what works, how to get what is missing")
    verifying = commands.add_parser(
        "verify",
        help="whether the kernels are right on this machine",
        description="Run every kernel family on small hard cases, and compare with the float64 "
        "references. The first line says whether all are right; the exit status is 1 if not.",
    )
    verifying.add_argument(
        "--device", metavar="NAME", help="such as cuda:1; default: a GPU, or host"
    )
    verifying.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes")
    compiling = commands.add_parser(
        "compile",
        help="compile kernels ahead of their first use",
        description="Compile all kernels into the disk cache: for the devices of this machine, "
        "or, with --all or --arch, for GPUs that need not be present. "
        "Ctrl-C stops it; kernels compiled until then are kept.",
    )
    compiling.add_argument("--all", action="store_true", help="with NVRTC for all architectures")
    compiling.add_argument("--arch", nargs="+", metavar="sm_90", help="with NVRTC for these")
    jobs = "processes; default: the number of CPUs"
    compiling.add_argument("--jobs", type=count, metavar="N", help=jobs)
    calibrating = commands.add_parser(
        "calibrate",
        help="measure which transfer method is fastest on this machine",
        description='Measure kernels against the copy engine; method="auto" then follows it.',
    )
    calibrating.add_argument("--device", help="such as cuda:1; default: the first GPU, or host")
    calibrating.add_argument("--quick", action="store_true", help="a coarse grid, in seconds")
    progress = "print progress lines where stderr is not a terminal"
    for command in (compiling, calibrating, verifying):
        command.add_argument("--progress", action="store_true", help=progress)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
