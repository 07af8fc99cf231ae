"""A Mooncake master and nodes of a test's own, as processes.

As a program: a node, `python mooncake_servers.py MASTER SEGMENT_BYTES`.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def problem():
    """Return why Mooncake cannot be used, "" if it can. Importing it would start threads."""
    if importlib.util.find_spec("mooncake") is None:
        return "there is no Mooncake: pip install kvcupy[mooncake]"
    if ctypes.util.find_library("ibverbs") is None:
        return "there is no libibverbs: apt-get install libibverbs1 libnl-3-200 libnl-route-3-200"
    return ""


PROBLEM = problem()
needs_mooncake = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


def free_ports(count):
    with_listener = [socket.socket() for _ in range(count)]
    for listener in with_listener:
        listener.bind(("127.0.0.1", 0))
    ports = [listener.getsockname()[1] for listener in with_listener]
    for listener in with_listener:
        listener.close()
    return ports


class Servers:
    """A master, and nodes that have the memory."""

    def __init__(self, folder, *options):
        self.folder = Path(folder)
        self.options = options
        self.port, self.metrics_port = free_ports(2)
        self.address = f"127.0.0.1:{self.port}"
        self.nodes = []
        self.start_master()

    @property
    def url(self):
        return f"mooncake://{self.address}"

    def start_master(self):
        (folder,) = importlib.util.find_spec("mooncake").submodule_search_locations
        program = Path(folder) / "mooncake_master"
        with (self.folder / "master.log").open("ab") as log:
            self.master = subprocess.Popen(
                [
                    program, f"--rpc_port={self.port}", "--rpc_address=127.0.0.1",
                    "--metrics_host=127.0.0.1", f"--metrics_port={self.metrics_port}",
                    *self.options,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        end = time.monotonic() + 30
        while True:
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            assert self.master.poll() is None and time.monotonic() < end, "it does not start"
            time.sleep(0.01)

    def add_node(self, segment_bytes):
        with (self.folder / "node.log").open("ab") as log:
            node = subprocess.Popen(
                [sys.executable, __file__, self.address, str(segment_bytes)],
                stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self.nodes.append(node)
        assert node.stdout.readline() == "0\n"
        return node

    def close(self):
        for process in (*self.nodes, self.master):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def pause(process):
    """Stop a process; return when all of it has stopped."""
    process.send_signal(signal.SIGSTOP)
    while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.001)


@contextmanager
def servers_in(tmp_path):
    """Yield what starts masters by their options; they end with the block, and so do nodes."""
    started = []

    def start(*options):
        folder = tmp_path / f"mooncake{len(started)}"
        folder.mkdir()
        started.append(Servers(folder, *options))
        return started[-1]

    try:
        yield start
    finally:
        for servers in started:
            servers.close()


def node(master, segment_bytes):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    print(store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 0, "tcp", "", master), flush=True)
    signal.pause()


if __name__ == "__main__":
    node(sys.argv[1], int(sys.argv[2]))
