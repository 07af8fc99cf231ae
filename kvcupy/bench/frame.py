"""What all benchmarks share: their options, their errors, and what becomes of a report.

A benchmark is a module, or an object, with `add_arguments(parser)` for the options that it alone
has, `run(device, options)`, which returns its part of the report ("rows", and what else there is to
say), and `render(report)`, which returns the report as text. One with an option `--plot` has
`plot(report, path)` too.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Protocol, cast

from .. import devices
from ..errors import DeviceError
from .checks import WrongBytes
from .report import describe, require_matplotlib, where, write_json


class Benchmark(Protocol):
    """What can be measured; see the module's docstring."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, device: Any, options: argparse.Namespace) -> dict[str, Any]: ...

    def render(self, report: dict[str, Any]) -> str: ...


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    add = parser.add_argument
    add("--device", help="such as cuda:1; default: a GPU if there is one, or host")
    add("--quick", action="store_true", help="fewer cases and rounds")
    add("--json", type=Path, metavar="FILE", help="write the report here")


def count(text: str) -> int:
    """Read an argument that is at least one."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)


def run(
    name: str, benchmark: Benchmark, options: argparse.Namespace, *, program: str = "bench"
) -> int:
    """Run a benchmark: measure, print its tables and where they come from, write its files.

    Parameters
    ----------
    name : in the report
    options : the common ones, and those of the benchmark
    program : the first word of an error

    Returns
    -------
    The exit status. 1: a result was wrong. 2: an option was wrong, or something is not installed.
    """
    picture = getattr(options, "plot", None)
    try:
        device = _device(options.device)
        if picture is not None:
            require_matplotlib()  # before all is measured, not after
        about = describe(device)  # now: the tree may change while this runs
        report = {"benchmark": name, **about, "quick": options.quick}
        report |= benchmark.run(device, options)
    except WrongBytes as error:
        print(f"{program}: wrong result: {error}", file=sys.stderr)
        return 1
    except (OptionError, DeviceError, ImportError) as error:
        print(f"{program}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"{benchmark.render(report)}\n\n{where(report)}")
    if options.json is not None:
        write_json(options.json, report)
    if picture is not None:
        cast(Any, benchmark).plot(report, picture)
    return 0


class OptionError(ValueError):
    """An option has a value that the benchmark does not take."""


def _device(name: str | None) -> Any:
    try:
        return devices.get(name)
    except ValueError as error:
        raise OptionError(f"--device: {error}") from None
