"""Test and measure kvcupy on a GPU, and leave one JSON file that can be attached to an issue.

A split decode repeated many times, verify, the tests of GPUs, transfers, host times, every
operation under compute-sanitizer, the suite on the device and the benchmarks run one after another,
each in a separate process that is stopped after 12 minutes at most: a part that fails, hangs or
crashes is reported, and the next one runs. The report is rewritten after each. Ctrl-C stops the
running part and ends the report there.

Paths, user and host names are replaced in the report. The exit status is 0 if parts passed and none
failed.

    scripts/gpu_report.sh --only smoke
    scripts/gpu_report.sh --minutes 30 --before earlier.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .parts import DECIDING, SMOKE, Part, parts
from .private import ROOT, Anonymizer
from .verdicts import Ended, Verdict

GRACE_S = 20.0  # between the interrupt and the kill
LOG_BYTES = 32 << 20  # of the end of a log
OUT = ROOT / "build" / "gpu_report.json"
_VARIABLES = ("KVCUPY_", "CUDA_", "CUPY_", "PYTORCH_")
_GPU = ("name", "compute_cap", "memory.total", "driver_version", "pcie.link.gen.max",
        "pcie.link.width.max", "power.limit", "mig.mode.current")  # fmt: skip


def say(text: str = "") -> None:
    """Print a line, unless the terminal is gone."""
    with suppress(OSError):
        print(text, flush=True)


# --- The machine ---


def environment() -> dict[str, str]:
    """Return the environment of the parts: the packages are found, and output is unbuffered."""
    paths = (str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(path for path in paths if path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def output(*command: str, timeout_s: float = 60) -> str:
    """Return what a program prints, nothing if it is missing, fails, or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def facts(device: str) -> dict[str, Any]:
    """Return the facts of the machine that the report states."""
    from common.report import describe  # which needs NumPy

    gpus = output("nvidia-smi", f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader")
    busy = output("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader")
    cuda = re.search(r"CUDA\D*Version\s*:\s*([\d.]+)", output("nvidia-smi"))
    fields = [[field.strip() for field in line.split(",")] for line in gpus.splitlines()]
    return {
        **describe(SimpleNamespace(name=device)),
        "GPUs": [dict(zip(_GPU, line, strict=False)) for line in fields],
        "CUDA of the driver": cuda[1] if cuda else None,
        "other processes on the GPUs": len(busy.splitlines()),
        "variables": {n: v for n, v in sorted(os.environ.items()) if n.startswith(_VARIABLES)},
    }


def no_device(device: str) -> str:
    """Return why a device cannot be used, nothing if it may work."""
    if device.partition(":")[0] != "cuda":
        return ""
    code = "from kvcupy.devices import cuda; print('|', cuda.why_not() or '')"
    said = output(sys.executable, "-c", code, timeout_s=300)
    return said.rpartition("|")[2].strip().removeprefix("cuda: ")


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer: on the PATH, in a toolkit, or from a wheel."""
    name = "compute-sanitizer"
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(root, folder) for root in roots if root for folder in ("bin", name)]
    places += [Path(folder, "nvidia/cu13/bin") for folder in sys.path]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)]))


# --- Processes ---


def interrupted(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def run(part: Part, folder: Path, grace_s: float, cwd: Path) -> Ended:
    """Run the command of a part until it ends, reaches its time limit, or is interrupted.

    The process leads a process group, which is killed when it has ended: processes that it leaves
    would hold the GPU.
    """
    log, result = folder / f"{part.name}.log", folder / f"{part.name}.json"
    result.unlink(missing_ok=True)
    command = [word.replace("{result}", str(result)) for word in part.command]
    start, how, status = time.perf_counter(), "exited", None
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command, cwd=cwd, env=environment() | part.variables, stdin=subprocess.DEVNULL,
                stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(part.limit_s)
            except subprocess.TimeoutExpired:
                how = "limit"
            except KeyboardInterrupt:
                how = "interrupted"
            if how != "exited":  # pytest writes its summary then
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                    process.wait(grace_s)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # it may wait for the GPU forever
                process.wait(GRACE_S)
            status = process.returncode
        except OSError as error:
            out.write(f"{command[0]} could not be started: {error}\n".encode())
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return Ended(how, status, time.perf_counter() - start, text, result)


# --- The report ---


class Report:
    """A run of parts, and the file that they fill; their logs are in a folder next to it.

    Parameters
    ----------
    chosen : the parts to run
    out : the file
    about : from `facts`
    options : of the command line, to show
    minutes : after which no other part begins
    """

    def __init__(
        self, chosen: Sequence[Part], out: Path, about: dict[str, Any], options: str = "",
        minutes: float | None = None,
    ) -> None:  # fmt: skip
        self.parts = list(chosen)
        self.results: dict[str, dict[str, Any]] = {
            part.name: {"name": part.name, "group": part.group, "state": "not run", "summary": ""}
            for part in chosen
        }
        self.out, self.about, self.options, self.minutes = out, about, options, minutes
        self.private = Anonymizer.of_this_machine()
        self.cwd, self.grace_s = ROOT, GRACE_S
        self.folder = out.with_name(f"{out.stem}_logs")
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> bool:
        """Run all parts, unless interrupted or out of time; return whether all is well."""
        end = time.perf_counter() + 60 * self.minutes if self.minutes else float("inf")
        result: dict[str, Any] = {}
        for number, part in enumerate(self.parts, 1):
            if result.get("state") == "interrupted" or time.perf_counter() > end:
                break
            say(f"[{number}/{len(self.parts)}] {part.name}")
            result = self.results[part.name]
            result["state"] = "running"
            self.write("running")
            result |= self._run(part)
            took = f" in {result['seconds']:.0f} s" if "seconds" in result else ""
            say(self.private.text(f"      {result['state']}{took}: {result['summary']}"))
        self.write("interrupted" if result.get("state") == "interrupted" else "finished")
        return self.all_well

    def _run(self, part: Part) -> dict[str, Any]:
        if part.missing:
            return {"state": "skipped", "summary": part.missing}
        ended = run(part, self.folder, self.grace_s, self.cwd)
        try:
            verdict = part.judge(ended)
        except Exception as error:  # unexpected output of a tool: the other parts still run
            verdict = Verdict("failed", f"not understood: {type(error).__name__}: {error}")
        result = {name: value for name, value in asdict(verdict).items() if value}
        if ended.how == "interrupted":
            result["state"] = "interrupted"
        return {"summary": "", **result, "seconds": round(ended.seconds, 1)}

    def write(self, state: str) -> None:
        """Write the report so far, atomically."""
        report = {
            "verdict": self.verdict, "state": state, "options": self.options, "counts": self.counts,
            "all_well": state == "finished" and self.all_well, "about": self.about,
            "parts": list(self.results.values()),
        }  # fmt: skip
        unfinished = self.out.with_suffix(".unfinished")
        text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
        unfinished.write_text(self.private.text(text), encoding="utf-8", errors="replace")
        unfinished.replace(self.out)

    @property
    def all_well(self) -> bool:
        """Whether some parts passed and the others were skipped."""
        states = {result["state"] for result in self.results.values()}
        return "passed" in states and states <= {"passed", "skipped"}

    @property
    def counts(self) -> str:
        """How many parts are in which state."""
        states = [result["state"] for result in self.results.values()]
        return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))

    @property
    def verdict(self) -> str:
        """Whether kvcupy works on the machine, by the parts that decide it."""
        results = list(self.results.values())
        deciding = [result for result in results if result["group"] in DECIDING]
        failed = [result for result in deciding if result["state"] == "failed"]
        if failed:
            return f"kvcupy does not work here: {failed[0]['name']}: {failed[0]['summary']}"
        passed = {result["group"] for result in deciding if result["state"] == "passed"}
        missing = [group for group in DECIDING if group not in passed]
        if missing:
            return f"Whether kvcupy works here is open; this did not run: {', '.join(missing)}."
        others = [result["name"] for result in results if result["state"] == "failed"]
        return "kvcupy works here" + (f", but these failed: {', '.join(others)}." * bool(others))


# --- The command line ---


def chosen_parts(available: Sequence[Part], only: Sequence[str] | None) -> list[Part]:
    """Return the parts with some names or groups; all if `only` is empty.

    Raises
    ------
    ValueError
        There is no such part.
    """
    known = {"smoke", *(name for part in available for name in (part.name, part.group))}
    for name in only or ():
        if name not in known:
            raise ValueError(f"--only: expected one of {', '.join(sorted(known))}; got {name}")
    names = {*(only or ()), *(SMOKE if "smoke" in (only or ()) else ())}
    return [part for part in available if not only or part.name in names or part.group in names]


def read(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_report.sh", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--device", default="cuda", help="cuda, cuda:1; host: to try it out")
    add("--only", nargs="+", metavar="PART",
        help=f"smoke, {', '.join(DECIDING)}, transfer, 'host times', sanitizer, suite, bench, or "
        "the name of a part")  # fmt: skip
    add("--minutes", type=float, help="after which no other part begins")
    add("--before", type=Path, metavar="FILE", help="a report; its failed tests run early")
    add("--out", type=Path, default=OUT, help="default: build/gpu_report.json")
    add("--list", action="store_true", help="say what would run, and stop")
    options = parser.parse_args(argv)
    if not re.fullmatch(r"host|cuda(:\d+)?", options.device):
        parser.error(f"--device: expected host, cuda or cuda:1, got {options.device}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = read(argv)
    say("Looking at this machine ...")
    reason, out = no_device(options.device), options.out.absolute()
    try:
        before = json.loads(options.before.read_text())["parts"] if options.before else []
        failed = [test for part in before for test in part.get("failed", ())]
        available = parts(
            options.device, no_device=reason, sanitizer=sanitizer(), before=failed
        )  # fmt: skip
        chosen = chosen_parts(available, options.only)
        if reason:
            say(f"{options.device} cannot be used: {reason}.")
            say("With --device host the report can be tried without a GPU.")
        if options.list:
            say("\n".join(f"{part.name:24}  {part.group:12}  {part.missing}" for part in chosen))
            return 0
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists() and '"verdict"' not in out.read_text(errors="replace")[:100]:
            raise ValueError(f"--out: expected a new file or an earlier report, got {out}")
    except (ValueError, KeyError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    shown = shlex.join(sys.argv[1:] if argv is None else argv)
    return report(chosen, out, facts(options.device), shown, options.minutes)


def report(
    chosen: Sequence[Part], out: Path, about: dict[str, Any], options: str = "",
    minutes: float | None = None,
) -> int:  # fmt: skip
    """Run the parts and return the exit status."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    result = Report(chosen, out, about, options, minutes)
    well = result.run()
    say(f"\n{result.verdict}\n{result.counts}. Please attach to an issue: {out}")
    return 0 if well else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before the first part
        sys.exit(1)
