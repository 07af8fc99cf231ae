"""Run one of the benchmarks; `ops` if none is named.

python scripts/bench.py ops --quick
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

BENCHMARKS = ("attention", "calls", "loading", "ops", "steps", "transfer")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = arguments.pop(0) if arguments and arguments[0] in BENCHMARKS else "ops"
    return int(importlib.import_module(f"benchmarks.{name}").main(arguments))


if __name__ == "__main__":
    sys.exit(main())
