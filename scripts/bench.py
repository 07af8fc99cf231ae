"""Run one of the benchmarks: operations in the shapes of models unless another is named.

python scripts/bench.py --quick
python scripts/bench.py transfer --json build/transfer.json
python scripts/bench.py scale --help
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import (
    blocks,
    calls,
    frames,
    generate,
    memory,
    migration,
    order,
    scale,
    stores,
    transfer,
)
from benchmarks.operations import command
from common import frame

BENCHMARKS = {
    "models": command,
    "memory": memory,
    "migration": migration,
    "transfer": transfer,
    "scale": scale,
    "blocks": blocks,
    "calls": calls,
    "frames": frames,
    "generate": generate,
    "order": order,
    "stores": stores,
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] not in (*BENCHMARKS, "-h", "--help"):
        arguments.insert(0, "models")
    parser = argparse.ArgumentParser(prog="bench.py", description=__doc__.splitlines()[0])
    names = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        summary = (benchmark.__doc__ or "").splitlines()[0]
        options = names.add_parser(name, help=summary, description=summary)
        frame.add_common_arguments(options)
        benchmark.add_arguments(options)
    parsed = parser.parse_args(arguments)
    benchmark = BENCHMARKS[parsed.benchmark]
    if benchmark is command:
        return command.main(parsed)
    return frame.run(parsed.benchmark, benchmark, parsed)


if __name__ == "__main__":
    sys.exit(main())
