"""Show copies during computation: of the next step's K/V, or of cached pages that are loaded.

python scripts/overlap_demo.py --out build/overlap
python scripts/overlap_demo.py offload --out build/offload
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import common.one_core  # noqa: F401
from common import frame
from common.measure import log_compilation
from overlap import offload, steps

DEMOS = {"steps": steps, "offload": offload}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] not in (*DEMOS, "-h", "--help"):
        arguments.insert(0, "steps")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = parser.add_subparsers(dest="demo", required=True, metavar="DEMO")
    for name, demo in DEMOS.items():
        summary = (demo.__doc__ or "").splitlines()[0]
        options = names.add_parser(name, help=summary, description=summary)
        frame.add_common_arguments(options)
        demo.add_arguments(options)
    parsed = parser.parse_args(arguments)
    status = frame.run(parsed.demo, DEMOS[parsed.demo], parsed, program="overlap_demo")
    if parsed.out is not None and status == 0:
        print(f"\ntimelines: {parsed.out}")
    return status


if __name__ == "__main__":
    log_compilation()
    sys.exit(main())
