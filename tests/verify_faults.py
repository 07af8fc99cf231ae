"""Plant a fault in each device function, and see whether `kv.verify` notices it.

All faults are compiled into one copy of the kernels, and one at a time is switched on: a function
that returns a value returns another one, any other returns at once. The host device lays kernels
out as on a GPU, and takes the branches of `ARCH`. `survey` runs, for each function, the cases that
call it, in a process that may die or never end.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutants import KERNELS, _closing, _is_live

ARCH, TIMEOUT_S, MAX_CPU_S = "sm_90", 300, 60
_MACROS = {"KVCUPY_ARCH": int(ARCH[3:]) * 10}

_SWITCH = """
extern "C" {
int kvcupy_planted = -1;
char kvcupy_reached[4096];
bool kvcupy_is_planted(int number) {
  kvcupy_reached[number] = 1;
  return number == kvcupy_planted;
}
}
"""
_PLANT = """
#include <type_traits>
extern "C" bool kvcupy_is_planted(int number);
template <typename T, typename = void>
constexpr bool kvcupy_is_range = false;
template <typename T>
constexpr bool kvcupy_is_range<T, std::void_t<decltype(T::end)>> = true;
template <typename T>
inline T kvcupy_other(int number, T value) {
  if (!kvcupy_is_planted(number)) return value;
  if constexpr (std::is_same_v<T, bool>) {
    return !value;
  } else if constexpr (kvcupy_is_range<T>) {
    value.end += 64;  // of keys that need no mask: fewer of them only cost time
    return value;
  } else if constexpr (std::is_integral_v<T> || std::is_pointer_v<T>) {
    return value + 1;
  } else {
    for (unsigned i = 0; i < sizeof(T); ++i) reinterpret_cast<char*>(&value)[i] ^= 1;
    return value;
  }
}
"""
_HEAD = '#include "host/cuda_names.h"\n#endif\n'  # of common.cuh, which all others include

_NOT_CODE = re.compile(r"//[^\n]*|\"[^\"\n]*\"|^\s*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_FUNCTION = re.compile(r"__(?:device|global)__\s([^;{}()=]*?)\b(\w+)(?=\()")
_LAMBDA = re.compile(r"\[[&=\w, ]*\]\s*(?:\([^()]*\))?\s*(?:->\s*\w+\s*)?(?={)")
_RETURN = re.compile(r"\breturn\b([^;]*(?:\{[^;]*\})?);")


def _blank(found: re.Match[str] | str) -> str:
    return re.sub(r"[^\n]", " ", found if isinstance(found, str) else found[0])


def _block(code: str, start: int) -> int:
    """Return the position past the brace that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[{}]", code[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return start + match.end()
    raise ValueError(f"unbalanced: {code[start : start + 60]!r}")


def functions(text: str, macros: dict[str, int]) -> Iterator[tuple[str, str, int, int]]:
    """Yield name, type, and the start and end of the body of each function that is compiled."""
    live = _is_live(text, macros)
    lines = text.splitlines(keepends=True)
    code = "".join(line if keep else _blank(line) for line, keep in zip(lines, live, strict=True))
    code = _NOT_CODE.sub(_blank, code)
    code = re.sub(r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)", _blank, code)
    for match in _FUNCTION.finditer(code):
        rest = re.compile(r"\s*(?:const\s*)?(?={)").match(code, _closing(code, match.end()))
        if rest:
            outer = re.findall(r"^struct (\w+)[^;{]*{|^(})", code[: match.start()], re.MULTILINE)
            struct = f"{outer[-1][0]}::" if outer and outer[-1][0] else ""
            kind = re.sub(r"\b(?:__forceinline__|__noinline__|inline|static)\b", "", match[1])
            body = _block(code, rest.end())
            yield struct + match[2], kind.strip(), rest.end(), body


def plant(folder: Path) -> list[str]:
    """Write a copy of the kernels with all faults; return the functions' names by number."""
    shutil.copytree(KERNELS, folder, dirs_exist_ok=True)
    names: list[str] = []
    for path in sorted([*folder.glob("*.cu"), *folder.glob("*.cuh")]):
        text = path.read_text()
        edits: list[tuple[int, int, str]] = []
        for name, kind, start, end in functions(text, _MACROS):
            number, full = len(names), f"{path.name}: {name}"
            earlier = sum(each.partition(" #")[0] == full for each in names)
            names.append(f"{full} #{earlier + 1}" if earlier else full)
            if kind in ("void", "", "explicit"):  # also constructors
                edits.append((start + 1, start + 1, f" if (kvcupy_is_planted({number})) return;"))
                continue
            body = _NOT_CODE.sub(_blank, text[start:end])
            for match in [*_LAMBDA.finditer(body)]:
                last = _block(body, match.end())
                body = body[: match.end()] + _blank(body[match.end() : last]) + body[last:]
            typed = "" if kind == "auto" or "&" in kind else f"<{kind}>"
            for match in _RETURN.finditer(body):
                value = text[start + match.start(1) : start + match.end(1)].strip()
                new = f"return kvcupy_other{typed}({number}, {value});"
                if "&" in kind:  # a choice of two: the other one
                    condition, choice = value.split("?", 1)
                    new = f"return ({condition}) != kvcupy_is_planted({number}) ?{choice};"
                edits.append((start + match.start(), start + match.end(), new))
        for start, end, new in sorted(edits, reverse=True):
            text = text[:start] + new + text[end:]
        if path.name == "common.cuh":
            assert _HEAD in text
            text = text.replace(_HEAD, _HEAD + _PLANT)
        path.write_text(text)
    return names


# The process that runs cases ----------------------------------------------------------------------


def _open(folder: Path) -> Any:
    """Return the switch, and let the host device run the kernels of a folder as a GPU does."""
    import kvcupy as kv
    from kvcupy import devices, sources
    from kvcupy.config import shared_bytes
    from kvcupy.devices.host import HostDevice

    source, library = folder / "switch.cpp", folder / "switch.so"
    if not library.exists():
        source.write_text(_SWITCH)
        subprocess.run(["c++", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    switch = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    sources.kernels_dir = lambda: folder
    kv.config._verify, kv.config._fallback = "never", "error"
    device = HostDevice()
    device.warp_lanes, device.sm_count = 32, 132
    device.arch, device.shared_bytes = ARCH, shared_bytes(ARCH)
    device.thread_order_seed = 3  # by index, a block that lacks a barrier may be right
    device.extra_flags = ("-O0", f"-DKVCUPY_ARCH={_MACROS['KVCUPY_ARCH']}")
    devices._devices["host"] = device
    return switch


def work(folder: Path) -> None:
    """Answer the parent: "cases" with what each calls; a number with the case that notices it."""
    from kvcupy import devices
    from kvcupy.testing import Case, Outcome, cases, run_case, verification
    from kvcupy.testing.cases import own_cases

    switch = _open(folder)
    planted = ctypes.c_int.in_dll(switch, "kvcupy_planted")
    reached = (ctypes.c_char * 4096).in_dll(switch, "kvcupy_reached")
    device = devices.get("host")
    every = [*cases(), *own_cases(), *verification._further_cases(device.arch)]

    def run(case: Case, seed: int = 0) -> Outcome:
        function = verification.function_of(case)
        return run_case(case, function, device=device, records_faults=True, seed=seed)

    for line in sys.stdin:
        if line == "cases\n":
            for number, case in enumerate(every):
                reached.raw = bytes(4096)
                run(case)  # compiles
                start = time.perf_counter()
                outcome = run(case)
                seconds = time.perf_counter() - start
                called = [i for i, hit in enumerate(reached.raw) if hit]
                print(json.dumps([number, str(outcome), seconds, called]), flush=True)
            print("null", flush=True)
            continue
        fault, numbers = json.loads(line)
        noticed, sane = "", True
        for number in numbers:
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)  # ends a process that loops
            planted.value = fault
            # Memory that a fault leaves unwritten holds results of other data.
            outcome = run(every[number], seed=fault + 1)
            planted.value = -1
            if outcome.failed:
                noticed = f"{outcome.operation}, {outcome.case}"
                sane = not run(every[number]).failed
                break
        print(json.dumps([noticed, sane]), flush=True)


class _Worker:
    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(KERNELS.parent)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder)], bufsize=0, env=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def ask(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, timeout_s: float | None = None) -> Any:
        """Return the answer; EOFError if the process died, TimeoutError if none comes."""
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return json.loads(line)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def survey(folder: Path) -> dict[str, str]:
    """Return, by function, what notices its fault: a case, or the signal that ends the process.

    "no answer" if a case does not end, "" if no case notices it.
    """
    names = plant(folder)
    worker, calling = _Worker(folder), dict[int, list[tuple[float, int]]]()
    worker.ask("cases")
    while (case := worker.answer()) is not None:
        number, outcome, seconds, called = case
        assert outcome.endswith(": conforms"), outcome
        for fault in called:
            calling.setdefault(fault, []).append((seconds, number))
    results: dict[str, str] = {}
    for fault, name in enumerate(names):
        cases = [number for _, number in sorted(calling.get(fault, []))]
        if worker.process.poll() is not None:
            worker = _Worker(folder)
        worker.ask(json.dumps([fault, cases]))
        try:
            results[name], sane = worker.answer(TIMEOUT_S)
        except EOFError:  # a wild address, as on a GPU, or a heap that was written to
            results[name], sane = signal.Signals(-worker.process.wait()).name, False
        except TimeoutError:
            results[name], sane = "no answer", False
        if not sane:
            worker.end()
    worker.end()
    return results


if __name__ == "__main__":
    work(Path(sys.argv[1]))
