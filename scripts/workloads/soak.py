"""Serve random requests over caches of all kinds, and compare what they hold."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from kvcupy.errors import KvcupyError

from .audit import Broken
from .groups import GROUPS, GroupServer
from .rows import VARIANTS
from .server import Server

NAMES = tuple(variant.name for variant in (*VARIANTS, GROUPS))


class Soak:
    """Servers that take steps in turn: a source of work.

    Parameters
    ----------
    names : of the caches, out of `NAMES`
    options : of each `Server`
    """

    total = None

    def __init__(self, device: Any, seed: int, names: tuple[str, ...], **options: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvcupy-soak-")
        self._steps, folder = 0, Path(self._folder.name)
        self.servers = [
            Server(device, variant, seed, folder, **options)
            for variant in VARIANTS if variant.name in names
        ]  # fmt: skip
        if GROUPS.name in names:
            self.servers.append(GroupServer(device, seed, folder, **options))

    def step(self) -> None:
        server = self.servers[self._steps % len(self.servers)]
        try:
            server.step()
        except (Broken, KvcupyError, ValueError) as error:
            raise Broken(f"{server.variant.name}: {error}") from error
        self._steps += 1

    def close(self) -> None:
        with self._folder:
            for server in self.servers:
                try:
                    server.close()
                except (KvcupyError, ValueError) as error:
                    raise Broken(f"{server.variant.name}: {error}") from error

    def report(self) -> dict[str, Any]:
        return {
            "counts": {
                server.variant.name: dict(sorted(server.counts.items()))
                | {name: count for name, count in server.blocks.items() if "hits" in name}
                for server in self.servers
            }
        }

    def problems(self) -> list[str]:
        return [
            f"{server.variant.name}: {server.blocks['failed_loads']} blocks failed to load"
            for server in self.servers
            if server.blocks["failed_loads"]
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, help="some caches")


def make(device: Any, options: argparse.Namespace) -> Soak:
    return Soak(device, options.seed, tuple(options.only))
