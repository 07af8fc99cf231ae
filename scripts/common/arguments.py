"""Types of command-line arguments."""

from __future__ import annotations

import argparse

INTERRUPTED = 130  # the exit status that shells report after Ctrl-C


def positive(text: str) -> int:
    """Read a count of at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return value
