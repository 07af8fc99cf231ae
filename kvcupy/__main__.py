"""The command line: `python -m kvcupy doctor | compile | calibrate | bench | demo`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .probe import environment

_SCRIPTS = {
    "bench": ("bench_ops.py", "measure the operations (scripts/bench_ops.py)"),
    "demo": ("overlap_demo.py", "show copies beside computation (scripts/overlap_demo.py)"),
}
_STOPPED = 130  # what shells report of a program that Ctrl-C has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 2 where it was given something wrong."""
    parser = _parser()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = arguments[0] if arguments else ""
    if command in _SCRIPTS:
        return _run_script(command, arguments[1:])
    options = parser.parse_args(arguments)
    try:
        if options.command == "doctor":
            from . import doctor

            return doctor.main()
        if options.command == "calibrate":
            from . import calibrate

            return calibrate.main(options.device, quick=options.quick, lines=options.progress)
        from . import compile_check

        return compile_check.main(
            options.arch,
            every_arch=options.all,
            with_check=options.check,
            jobs=options.jobs,
            lines=options.progress,
        )
    except KeyboardInterrupt:
        return _STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m kvcupy", description="KV-cache operations.")
    parser.add_argument("--version", action="version", version=f"kvcupy {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="what is here, what works, how to get what is missing")
    compiling = commands.add_parser(
        "compile",
        help="compile kernels ahead of their first use",
        description="Compile all kernels into the disk cache: for the devices of this machine, "
        "or, with any of --all, --arch and --check, for GPUs that need not be here. "
        "Ctrl-C stops it; what was compiled by then is kept.",
    )
    compiling.add_argument("--all", action="store_true", help="with NVRTC for all architectures")
    compiling.add_argument("--arch", nargs="+", metavar="sm_90", help="with NVRTC for these")
    compiling.add_argument(
        "--check",
        action="store_true",
        help="with NVRTC, and fail on warnings, spills and too many registers",
    )
    compiling.add_argument(
        "--jobs", type=_count, metavar="N", help="processes; by default the CPUs there are"
    )
    calibrating = commands.add_parser(
        "calibrate",
        help="measure which way of a transfer is the fastest here",
        description='Measure kernels against the copy engine, and keep what method="auto" goes by.',
    )
    calibrating.add_argument("--device", help="such as cuda:1; by default the first GPU, or host")
    calibrating.add_argument("--quick", action="store_true", help="a coarse grid, in seconds")
    for one in (compiling, calibrating):
        one.add_argument(
            "--progress",
            action="store_true",
            help="where stderr is no terminal, say from time to time how far it is",
        )
    for name, (_, purpose) in _SCRIPTS.items():
        if _script(name).is_file():
            commands.add_parser(name, help=purpose, add_help=False)
    return parser


def _count(text: str) -> int:
    """Read a count of at least one."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


def _script(command: str) -> Path:
    return Path(__file__).resolve().parents[1] / "scripts" / _SCRIPTS[command][0]


def _run_script(command: str, arguments: Sequence[str]) -> int:
    script = _script(command)
    if not script.is_file():
        text = f"{command}: scripts/{script.name} comes with the source repository, not with the"
        print(f"{text} package; run this in a checkout.", file=sys.stderr)
        return 2
    try:
        return subprocess.call([sys.executable, str(script), *arguments], env=environment())
    except KeyboardInterrupt:  # the script has heard of it too
        return _STOPPED


if __name__ == "__main__":
    raise SystemExit(main())
