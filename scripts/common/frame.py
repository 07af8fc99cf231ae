"""The frame of all benchmarks and demos: options, errors, and the files of a report.

A benchmark is a module with `add_arguments(parser)` for the options that it alone has,
`run(device, options)`, which returns its part of the report ("rows", and what else there is to
say), and `render(report)`, which returns the report as text. Optional functions:

check_options(parser, options)  ends with an error where options do not fit each other
summary(report)                 returns the report without samples, which is written
problems(report)                returns a line for each problem; the exit status is then 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvcupy import devices
from kvcupy.errors import DeviceError
from kvcupy.progress import INTERRUPTED

from .checks import WrongBytes
from .report import describe, where, write_json


def add_common_arguments(
    parser: argparse.ArgumentParser, *, has_device: bool = True, has_quick: bool = True
) -> None:
    """Add the options that most benchmarks have."""
    add = parser.add_argument
    if has_device:
        add("--device", help="such as cuda:1; default: a GPU if there is one, or host")
    if has_quick:
        add("--quick", action="store_true", help="fewer cases and rounds")
    add("--json", type=Path, metavar="FILE", help="write the report here")


def parse(
    benchmark: ModuleType, argv: Sequence[str] | None, *, has_device: bool = True,
    has_quick: bool = True,
) -> argparse.Namespace:  # fmt: skip
    """Read the command line of a program that is one benchmark.

    Parameters
    ----------
    has_device : False: it runs on the host device, whatever there is
    has_quick : whether there is a shorter run
    """
    parser = argparse.ArgumentParser(description=(benchmark.__doc__ or "").splitlines()[0])
    add_common_arguments(parser, has_device=has_device, has_quick=has_quick)
    benchmark.add_arguments(parser)
    options = parser.parse_args(argv)
    if hasattr(benchmark, "check_options"):
        benchmark.check_options(parser, options)
    return options


def main(benchmark: ModuleType, argv: Sequence[str] | None, **options: bool) -> int:
    """Run a program that is one benchmark, and return the exit status; options as for `parse`."""
    program = Path(str(benchmark.__file__)).stem
    return run(program, benchmark, parse(benchmark, argv, **options), program=program)


def run(
    name: str, benchmark: ModuleType, options: argparse.Namespace, *, program: str = "bench"
) -> int:
    """Run a benchmark: measure, print its tables and where they come from, write its files.

    Parameters
    ----------
    name : in the report
    options : of the command line
    program : the first word of an error

    Returns
    -------
    The exit status. 1: a result was wrong. 2: an option was wrong, or something is not installed.
    130: Ctrl-C was pressed.
    """
    try:
        device = _device(getattr(options, "device", "host"))
        report = {"benchmark": name, **describe(device)}  # now: the tree may change meanwhile
        if hasattr(options, "quick"):
            report["quick"] = options.quick
        report |= benchmark.run(device, options)
    except WrongBytes as error:
        print(f"{program}: wrong result: {error}", file=sys.stderr)
        return 1
    except (OptionError, DeviceError, ImportError) as error:
        print(f"{program}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    print(f"{benchmark.render(report)}\n\n{where(report)}")
    if options.json is not None:
        summary = benchmark.summary(report) if hasattr(benchmark, "summary") else report
        write_json(options.json, summary)
    problems = benchmark.problems(report) if hasattr(benchmark, "problems") else []
    for line in problems:
        print(f"{program}: {line}", file=sys.stderr)
    return 1 if problems else 0


class OptionError(ValueError):
    """An option has a value that the benchmark does not take."""


def _device(name: str | None) -> Any:
    try:
        return devices.get(name)
    except ValueError as error:
        raise OptionError(f"--device: {error}") from None
