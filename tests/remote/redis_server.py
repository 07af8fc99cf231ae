"""A Redis or Valkey server of one test: free port, Unix socket, nothing saved."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("redis", reason='pip install ".[redis]"')

PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(
    PROGRAM is None, reason="there is no redis-server: apt-get install redis-server"
)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class RedisServer:
    """A server process with options of redis-server, such as "--requirepass", "x"."""

    def __init__(self, folder, *options, tls=False):
        self.folder = Path(folder)
        self.socket = self.folder / "redis.sock"
        self.options = options
        self.port = free_port()
        self.tls = tls
        self.start()

    def start(self):
        self.socket.unlink(missing_ok=True)
        ports = ["--port", "0", "--tls-port", str(self.port)] if self.tls else []
        ports = ports or ["--port", str(self.port)]
        self.process = subprocess.Popen(
            [
                PROGRAM, *ports, "--bind", "127.0.0.1", "--unixsocket", str(self.socket),
                "--dir", str(self.folder), "--save", "", "--appendonly", "no", *self.options,
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 30
        while not self._listens():
            assert self.process.poll() is None and time.monotonic() < end, "it does not start"
            time.sleep(0.01)

    def _listens(self):
        """Return whether both of its addresses are connected to: a socket's file comes earlier."""
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self.socket))
        except OSError:
            return False
        return True

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    @property
    def unix_url(self):
        return f"unix://{self.socket}"

    def pause(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        if self.process.poll() is None:
            self.go_on()
            self.kill()


@contextmanager
def servers_in(tmp_path):
    """Yield a function that starts servers with options; they end with the block."""
    servers = []

    def start(*options, **how):
        folder = tmp_path / f"redis{len(servers)}"
        folder.mkdir()
        servers.append(RedisServer(folder, *options, **how))
        return servers[-1]

    try:
        yield start
    finally:
        for server in servers:
            server.close()


def certificates(folder):
    """Return the files of a CA, and of a certificate of 127.0.0.1 with its key."""
    folder = Path(folder)

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(
        "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=CA", "-days", "2"
    )
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=cache")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    openssl(
        "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2",
        "-CAcreateserial", "-extfile", "names", "-out", "server.pem",
    )  # fmt: skip
    return folder / "ca.pem", folder / "server.pem", folder / "server.key"
