"""Run one part of a report as a separate process, with a time limit and a log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

POLL_S = 0.1
GRACE_S = 20.0  # between the interrupt and the kill: pytest writes its report then


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes
    ----------
    how : "exited", "limit" (stopped after its time limit) or "interrupted"
    status : exit status; negative: the signal that killed it. None if it could not be started
    seconds : running time
    """

    how: str
    status: int | None
    seconds: float


class Interrupts:
    """Counts Ctrl-C and other requests to stop, instead of raising at any point."""

    def __init__(self) -> None:
        self.count = 0

    def _note(self, number: int, frame: Any) -> None:
        self.count += 1

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Count SIGINT, SIGTERM and SIGHUP in the block, instead of handling them as before."""
        names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        before = {name: signal.signal(getattr(signal, name), self._note) for name in names}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(getattr(signal, name), handler)


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    stdout: Path,
    log: Path,
    limit_s: float,
    interrupts: Interrupts,
    grace_s: float = GRACE_S,
) -> Ended:
    """Run a command until it ends, reaches its time limit, or is interrupted.

    Parameters
    ----------
    stdout, log : where its standard output and its standard error go; they may be one file
    limit_s : seconds after which it is stopped
    interrupts : a first request to stop ends the command as Ctrl-C would, a second one kills it
    grace_s : seconds between the interrupt and the kill

    Notes
    -----
    It leads a process group, which is killed when it has ended: processes that it leaves behind
    would hold the GPU.
    """
    start = time.perf_counter()
    with stdout.open("ab") as out, _opened(log, stdout, out) as errors:
        try:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                stderr=errors, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            errors.write(f"{command[0]} could not be started: {error}\n".encode())
            return Ended("exited", None, time.perf_counter() - start)
        how = "exited"
        try:
            while process.poll() is None:
                if interrupts.count:
                    how = "interrupted"
                elif time.perf_counter() - start > limit_s:
                    how = "limit"
                if how != "exited":
                    _stop(process, grace_s, interrupts)
                    break
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
        finally:
            _signal(process, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it may wait for the GPU forever
                process.wait(GRACE_S)
    return Ended(how, process.returncode, time.perf_counter() - start)


def shorten(path: Path, most_bytes: int) -> None:
    """Cut the middle out of a long log."""
    size = path.stat().st_size if path.exists() else 0
    if size <= most_bytes:
        return
    half = most_bytes // 2
    with path.open("r+b") as file:
        head = file.read(half)
        file.seek(size - half)
        tail = file.read()
        file.seek(0)
        file.write(head + f"\n... {size - 2 * half} bytes ...\n".encode() + tail)
        file.truncate()


@contextmanager
def _opened(log: Path, stdout: Path, out: IO[bytes]) -> Iterator[IO[bytes]]:
    if log == stdout:
        yield out
        return
    with log.open("ab") as errors:
        yield errors


def _stop(process: subprocess.Popen[bytes], grace_s: float, interrupts: Interrupts) -> None:
    """Interrupt a process and wait for it, for the grace time or until a second Ctrl-C."""
    insisted = interrupts.count + 1
    end = time.perf_counter() + grace_s
    _signal(process, signal.SIGINT)
    while process.poll() is None and time.perf_counter() < end and interrupts.count < insisted:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
