"""Try one device for real: store rows through `kvcupy.store_kv` and compare them.

`python -m kvcupy.probe host` prints the outcome as one line of JSON. `probe_apart` runs that in a
separate process, which may crash or hang without harm.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TIMEOUT_S = 300
_MARK = "kvcupy-probe "


@dataclass(frozen=True)
class Probe:
    """The outcome: `state` is "kernel", "fallback", "absent" or "failed"."""

    state: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def works(self) -> bool:
        return self.state in ("kernel", "fallback")

    def cause(self) -> str:
        """Return the first line of what went wrong."""
        return next(iter(self.detail.strip().splitlines()), "no reason given")

    def verdict(self) -> str:
        """Return one line on what the outcome means."""
        if self.state == "kernel":
            return f"yes: rows stored by its kernel are right ({self.seconds:.1f} s)"
        if self.state == "fallback":
            return f"as array expressions only, slower: {self.cause()}"
        return f"no: {self.cause()}"


def probe(name: str) -> Probe:
    """Store two rows on the device `name` and read them back, in this process."""
    start = time.perf_counter()
    if name == "cuda":
        from .devices import cuda

        reason = cuda.why_not()
        if reason:
            return Probe("absent", reason.removeprefix("cuda: "))
    import kvcupy as kv

    kv.config.fallback = "error"
    try:
        _store(name)
        return Probe("kernel", seconds=time.perf_counter() - start)
    except kv.CompileError as error:
        cause = str(error)
    kv.config.fallback = "warn"
    _store(name)
    return Probe("fallback", cause, time.perf_counter() - start)


def _store(name: str) -> None:
    """Store two rows on a device; AssertionError unless they are there, and nothing else is."""
    import numpy as np

    import kvcupy as kv

    device = kv.device(name)
    rows = np.arange(1, 33, dtype=np.float16).reshape(2, 2, 8)
    expected = np.zeros((4, 2, 8), np.float16)
    slots = np.array([3, 1])
    expected[slots] = rows
    k_cache, v_cache = device.zeros((4, 2, 8), "fp16"), device.zeros((4, 2, 8), "fp16")
    kv.store_kv(
        device.asarray(rows), device.asarray(-rows), k_cache, v_cache, device.asarray(slots)
    )
    device.synchronize()
    for cache, contents in ((k_cache, expected), (v_cache, -expected)):
        if not np.array_equal(device.to_numpy(cache), contents):
            raise AssertionError("the cache differs from the rows stored in it")


def environment() -> dict[str, str]:
    """Return the environment of a subprocess that imports this package."""
    home = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH"), home) if p)
    return {**os.environ, "PYTHONPATH": path}


def probe_apart(name: str) -> Probe:
    """Run `probe` in a separate process and return its outcome, even if that crashes or hangs."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", "kvcupy.probe", name],
            env=environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Probe("failed", f"no answer within {TIMEOUT_S} s")
    except OSError as error:
        return Probe("failed", f"{sys.executable} could not be started: {error}")
    for line in reversed(process.stdout.splitlines()):
        if line.startswith(_MARK):
            return Probe(**json.loads(line.removeprefix(_MARK)))
    if process.returncode < 0:
        return Probe("failed", f"its process died of signal {-process.returncode}")
    return Probe("failed", (process.stderr.strip().splitlines() or ["no output"])[-1])


def main() -> None:
    """Print the outcome for the device named on the command line."""
    try:
        outcome = probe(sys.argv[1])
    except Exception as error:
        outcome = Probe("failed", f"{type(error).__name__}: {error}")
    print(_MARK + json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
