"""Pools for pages that move between processes, processes that hold them, and what lies between.

The content of a page follows from its number, so that every process knows what all of them hold.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import kvcupy as kv
from kvcupy.doctor import environment

PATIENCE_S = 60
SECRET = b"a secret of at least sixteen bytes"
HEADS = 4  # of the model
SHAPE = {"num_pages": 12, "page_size": 4, "num_layers": 3, "head_dim": 16}


def pool_of(heads=range(HEADS), *, kind="kv", v_head_dim=24, **options):
    """Return a pool of host memory that holds some heads of the model."""
    shape = {**SHAPE, "dtype": "fp16", "device": "host", "placement": "pinned", **options}
    if kind == "mla":
        del shape["head_dim"]
        return kv.MLAPool(**shape, latent_dim=40)
    return kv.KVPool(**shape, num_kv_heads=len(heads), v_head_dim=v_head_dim)


def parts_of(pool):
    """Yield number of the part, layer, and its bytes (pages, page_size, heads, width)."""
    for group in pool.groups:
        for number, part in enumerate((*group.parts, *group.scale_parts)):
            for i, layer in enumerate(group.layers):
                from kvcupy.arrays import array_at

                v = part[:, i]
                shape = (*v.shape[:-1], v.shape[-1] * v.itemsize)
                strides = (*v.strides[:-1], 1)
                dtype = np.dtype(np.uint8)
                yield number, layer, array_at(v.owner, v.pointer, shape, dtype, strides)


def content(page, layer, part, shape, heads):
    """Return what a page of the model has, uint8, in some of its heads."""
    page_size, _, width = shape
    rng = np.random.default_rng([7, int(page), layer, part])
    return rng.integers(0, 256, (page_size, HEADS, width), np.uint8)[:, heads.start : heads.stop]


def fill(pool, heads=range(HEADS), pages=None):
    """Write its content to each page."""
    if not isinstance(pool, kv.KVPool):
        heads = range(1)
    for part, layer, array in parts_of(pool):
        for page in range(pool.num_pages) if pages is None else pages:
            array[page] = content(page, layer, part, array.shape[1:], heads)


def assert_pulled(pool, pages, sources, heads=range(HEADS), layers=None):
    """Check that pages hold what the pages `sources` of the senders have."""
    if not isinstance(pool, kv.KVPool):
        heads = range(1)
    for part, layer, array in parts_of(pool):
        if layers is not None and layer not in layers:
            continue
        for page, source in zip(pages, sources, strict=True):
            expected = content(source, layer, part, array.shape[1:], heads)
            assert (array[page] == expected).all(), f"page {page}, layer {layer}, part {part}"


def poison(pool, pages, value=0xA5):
    for _, _, array in parts_of(pool):
        array[list(pages)] = value


def is_poisoned(pool, pages, value=0xA5):
    return all((array[list(pages)] == value).all() for _, _, array in parts_of(pool))


def eventually(condition, what=""):
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never came true: {what or condition}"
        time.sleep(0.002)


def keep_leases(sender):
    """Let the only offer stand for an hour from now and from each renewal, and return it.

    Its receiver renews it after a third of the lease all the same, and may be as late as it is on a
    busy machine.
    """

    (offer,) = sender._offers.values()

    def renew():
        offer.expires = time.monotonic() + 3600

    offer.renew = renew
    renew()
    return offer


def expire_leases(sender):
    """End the leases of all offers; return whether all pages of the pool are free."""
    for offer in list(sender._offers.values()):
        offer.expires = 0.0
    sender._notify()
    return sender.pool.allocator.num_free == sender.pool.num_pages


def reason_of(pull):
    """Wait for a pull that must fail, and return why it did."""
    with pytest.raises(kv.TransferError) as caught:
        pull.synchronize()
    return caught.value.reason


@contextmanager
def pair(sender_pool=None, receiver_pool=None, *, sender=None, receiver=None, **common):
    """A sender and a receiver of this process, whose pages are all free in the end."""
    sender_pool = sender_pool or filled()
    receiver_pool = receiver_pool or pool_of()
    with (
        kv.PageSender(sender_pool, **common, **(sender or {})) as source,
        kv.PageReceiver(receiver_pool, **common, **(receiver or {})) as target,
    ):
        yield source, target, sender_pool, receiver_pool
    sender_pool.allocator.check_leaks()
    eventually(lambda: sender_pool.allocator.num_free == sender_pool.num_pages)


def filled(heads=range(HEADS), **options):
    pool = pool_of(heads, **options)
    fill(pool, heads)
    return pool


# --- Processes ------------------------------------------------------------------------------------


class Process:
    """Another process with a pool, and a sender or receiver of it (`migration_process.py`)."""

    def __init__(self, role, **options):
        here = Path(__file__).resolve()
        folders = here.parents[2], here.parents[1], here.parents[1] / "cache", here.parent
        path = os.pathsep.join(map(str, folders))
        self.popen = subprocess.Popen(
            [sys.executable, str(here.with_name("migration_process.py")), role,
             json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={**environment(), "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        self.hello = self.answer()

    def ask(self, command, **arguments):
        self.tell(command, **arguments)
        return self.answer()

    def tell(self, command, **arguments):
        self.popen.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self.popen.stdin.flush()

    def answer(self):
        ready, _, _ = select.select([self.popen.stdout], [], [], PATIENCE_S)
        assert ready, "the process does not answer"
        return json.loads(self.popen.stdout.readline())

    def offer(self, pages, **options):
        return bytes.fromhex(self.ask("offer", pages=list(pages), **options)["ticket"])

    def signal(self, number):
        self.popen.send_signal(number)

    def wait_until_stopped(self):
        eventually(lambda: self.state() == "T", "the process has stopped")

    def state(self):
        text = Path(f"/proc/{self.popen.pid}/stat").read_text()
        return text.rpartition(")")[2].split()[0]

    def kill(self):
        with suppress(ProcessLookupError):
            self.popen.kill()
        self.popen.wait()
        self.popen.stdin.close()
        self.popen.stdout.close()


@pytest.fixture
def process():
    """Start processes, which are killed in the end."""
    started = []

    def start(role, **options):
        started.append(Process(role, **options))
        return started[-1]

    yield start
    for each in started:
        each.signal(signal.SIGCONT)
        each.kill()


@pytest.fixture
def contexts(tmp_path):
    """TLS of a sender, and of a receiver that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command, to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)


# --- What lies between ----------------------------------------------------------------------------


class Proxy:
    """Forwards connections to a sender (`target`), and changes what passes as a test asks.

    Parameters
    ----------
    change, change_up : take the bytes that come from the sender, or from the receiver, and how many
        came before on this connection; return the bytes to forward. `None` ends the connection
    """

    def __init__(self, change=None, change_up=None):
        self.target = None
        self.change = change or (lambda data, before: data)
        self.change_up = change_up or (lambda data, before: data)
        self.from_receiver = []  # bytes by connection
        self.gate = threading.Event()  # `hold_after` bytes wait for it
        self.hold_after = None
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self._server.getsockname()[1]}"
        self._sockets = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(("127.0.0.1", int(self.target.rpartition(":")[2])))
                self._sockets += [near, far]
                sent = bytearray()
                self.from_receiver.append(sent)
                threading.Thread(target=self._up, args=(near, far, sent), daemon=True).start()
                threading.Thread(target=self._down, args=(far, near), daemon=True).start()

    def _up(self, source, target, sent):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                changed = self.change_up(bytearray(data), len(sent))
                sent += data
                if changed is None:
                    break
                target.sendall(changed)
        self._end(source, target)

    def _down(self, source, target):
        before = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                changed = self.change(bytearray(data), before)
                before += len(data)
                if changed is None:
                    break
                if self.hold_after is not None and before > self.hold_after:
                    self.gate.wait(PATIENCE_S)
                target.sendall(changed)
        self._end(source, target)
        with suppress(OSError):  # a blocked peer notices the end only when there is space again
            while source.recv(1 << 16):
                pass

    @staticmethod
    def _end(*sockets):
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self):
        self.gate.set()
        self._end(*self._sockets)
        for each in self._sockets:
            each.close()


@pytest.fixture
def proxy():
    """Make proxies, which are closed in the end."""
    made = []

    def make(change=None, change_up=None):
        made.append(Proxy(change, change_up))
        return made[-1]

    yield make
    for each in made:
        each.close()
