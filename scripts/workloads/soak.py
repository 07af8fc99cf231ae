"""Serve random requests over caches of all kinds, and compare what they hold."""

from __future__ import annotations

import argparse
from typing import Any

from kvcupy.errors import KvcupyError

from .audit import Broken
from .rows import VARIANTS
from .server import Server

NAMES = tuple(variant.name for variant in VARIANTS)


class Soak:
    """Servers that take steps in turn: a source of work.

    Parameters
    ----------
    names : of the caches, out of `NAMES`
    options : of each `Server`
    """

    total = None

    def __init__(self, device: Any, seed: int, names: tuple[str, ...], **options: Any) -> None:
        self._steps = 0
        chosen = [variant for variant in VARIANTS if variant.name in names]
        self.servers = [Server(device, variant, seed, **options) for variant in chosen]

    def step(self) -> None:
        server = self.servers[self._steps % len(self.servers)]
        try:
            server.step()
        except (Broken, KvcupyError, ValueError) as error:
            raise Broken(f"{server.variant.name}: {error}") from error
        self._steps += 1

    def close(self) -> None:
        for server in self.servers:
            try:
                server.close()
            except (KvcupyError, ValueError) as error:
                raise Broken(f"{server.variant.name}: {error}") from error

    def report(self) -> dict[str, Any]:
        counts = {server.variant.name: server.counts for server in self.servers}
        return {"counts": {name: dict(sorted(own.items())) for name, own in counts.items()}}

    def problems(self) -> list[str]:
        return []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="some caches")


def make(device: Any, options: argparse.Namespace) -> Soak:
    return Soak(device, options.seed, tuple(options.only))
