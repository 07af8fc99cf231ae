"""Break the kernels in one place at a time, and see whether checks of the operations notice.

`mutants` applies general operators (a comparison, a sign, an index off by one, a condition, a
dropped statement, barrier or clamp) to the code of one file. `Runner` runs each mutant in a
separate process: a broken kernel may write anywhere, or never end.
"""

from __future__ import annotations

import itertools
import multiprocessing
import re
import resource
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[1] / "kernels_src"

MAX_CPU_S, TIMEOUT_S = 15, 120
"""What takes longer has been caught: a mutant that loops forever, or waits for itself."""

Check = Callable[[Any], object]


@dataclass(frozen=True)
class Build:
    """Whether kernels are built strictly, threads that may share a row, flags of the compiler."""

    strict: bool
    lanes: int
    flags: tuple[str, ...] = ()


STRICT = (Build(True, 32), Build(True, 1))
USERS = (Build(False, 1),)


@dataclass(frozen=True)
class Mutant:
    """One change of one file: `old` at `start` becomes `new`."""

    file: str
    operator: str
    start: int
    old: str
    new: str
    name: str  # the file, the line before and after, which occurrence

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        text = path.read_text()
        assert text[self.start :].startswith(self.old), self
        path.write_text(text[: self.start] + self.new + text[self.start + len(self.old) :])


# Operators: each yields the start and end of what it replaces, and the replacement ----------------

_SWAPS = {
    "comparison": {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    "arithmetic": {
        "+": "-", "-": "+", "*": "+", "/": "*", "%": "/", "&": "|", "|": "&", "^": "|",
        "<<": ">>", ">>": "<<", "+=": "-=", "-=": "+=", "*=": "+=", "|=": "&=",
    },
    "logic": {"&&": "||", "||": "&&"},
}  # fmt: skip
_OPERATOR = re.compile(r"(?<=[\w)\]}] )([<>=!+*/%&|^-]{1,2})(?= [\w(*{!~-])")
_LITERAL = re.compile(r"(?<= [+*/%&<>-] )(\d+)(?![\w.'])|(?<= (?:<<|>>) )(\d+)(?![\w.'])")
_BARRIER = re.compile(r"\b(?:__sync(?:threads|warp)\(\w*\)|wait_for_copy\w*(?:<[^;>]*>)?\(\)|"
                      r"end_copy_group\(\));")  # fmt: skip
_CALL = re.compile(r"(?:^|(?<=[{};]))\s*((?!return|for|while|if|using|static_assert|template)"
                   r"[\w.>-]+(?:<[\w, :]*>)?\([^;{}]*\);)", re.MULTILINE)  # fmt: skip
_ASSIGNMENT = re.compile(r"(?:^|(?<=[{};)]))\s*((?:\*?[\w.]|->|\[[^\]\n]*\])+ [-+*/|&^]?= "
                         r"[^;{}]*;)", re.MULTILINE)  # fmt: skip
_CLAMP = re.compile(r"\b(?:fmaxf|fminf|max|min)(?=\()")
_NOT = re.compile(r"(?<=[( ])!(?=[\w(])")
_NEGATION = re.compile(r"(?<=[(,?:=] )-(?=[a-z(])")


def _closing(code: str, start: int) -> int:
    """Return the position past the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(code)):
        depth += {"(": 1, ")": -1}.get(code[at], 0)
        if depth == 0:
            return at + 1
    raise ValueError(f"unbalanced: {code[start : start + 60]!r}")


def _split(arguments: str) -> list[str]:
    """Return the arguments of a call, without its parentheses."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _edits(code: str) -> Iterator[tuple[str, int, int, str]]:
    """Yield the operator, start, end and replacement of every change of some code."""
    for match in _OPERATOR.finditer(code):
        for operator, swaps in _SWAPS.items():
            if match[1] in swaps:
                yield operator, match.start(), match.end(), swaps[match[1]]
    for match in _LITERAL.finditer(code):
        yield "off by one", match.start(), match.end(), str(int(match[0]) + 1)
    for match in _BARRIER.finditer(code):
        yield "barrier", match.start(), match.end(), ";"
    for pattern in (_CALL, _ASSIGNMENT):
        for match in pattern.finditer(code):
            if not _BARRIER.match(match[1]):
                yield "statement", match.start(1), match.end(1), ";"
    for match in re.finditer(r"\bif(?: constexpr)? (?=\()", code):
        end = _closing(code, match.end())
        for value in ("false", "true"):
            yield "condition", match.end(), end, f"({value})"
    for match in _CLAMP.finditer(code):
        end = _closing(code, match.end())
        for argument in _split(code[match.end() + 1 : end - 1])[:2]:
            yield "clamp", match.start(), end, f"({argument})"
    for match in _NOT.finditer(code):
        yield "negation", match.start(), match.end(), ""
    for match in _NEGATION.finditer(code):
        yield "negation", match.start(), match.end(), ""


# Code ---------------------------------------------------------------------------------------------


def _is_live(text: str, macros: dict[str, int]) -> list[bool]:
    """Return of each line whether it is compiled with some macros."""

    def holds(condition: str) -> bool:
        condition = re.sub(r"defined\(?\s*(\w+)\)?", lambda m: str(int(m[1] in macros)), condition)
        condition = re.sub(r"\b[A-Za-z_]\w*", lambda m: str(macros.get(m[0], 0)), condition)
        condition = re.sub(r"!(?!=)", " not ", condition)
        return bool(eval(condition.replace("&&", " and ").replace("||", " or ").strip()))

    live, stack = [], []  # of each open #if: whether a branch was taken, and whether this one is
    for line in text.splitlines():
        directive = re.match(r"\s*#\s*(ifdef|ifndef|if|elif|else|endif)\b([^/]*)", line)
        if directive:
            word, condition = directive.groups()
            if word in ("ifdef", "ifndef"):
                condition = f"{'!' * (word == 'ifndef')}defined({condition.strip()})"
            if word in ("if", "ifdef", "ifndef"):
                stack.append([holds(condition)] * 2)
            elif word == "elif":
                stack[-1][1] = not stack[-1][0] and holds(condition)
                stack[-1][0] |= stack[-1][1]
            elif word == "else":
                stack[-1][1] = not stack[-1][0]
            else:
                stack.pop()
        live.append(not directive and all(taken for _, taken in stack))
    return live


_NOT_CODE = re.compile(
    r"""//[^\n]*|"[^"\n]*"|^\s*\#[^\n]*|\bstatic_assert\([^;]*;|\btemplate <[^{;]*?>(?=\n)"""
    r"""|\binline constexpr [^;]*;|^constexpr [^;{]*;|\#pragma[^\n]*""",
    re.MULTILINE,
)
_FOR = re.compile(r"\bfor (?=\()")


def _blanked(text: str, macros: dict[str, int]) -> str:
    """Return the code in which mutants may be, as long as the text, with blanks for the rest.

    Increments of loop counters are left out, since mutants of them loop forever, and so are heads
    of loops with constant bounds, past which there are only registers.
    """

    def blank(found: str) -> str:
        return re.sub(r"[^\n]", " ", found)

    live = _is_live(text, macros)
    lines = text.splitlines(keepends=True)
    code = "".join(line if keep else blank(line) for line, keep in zip(lines, live, strict=True))
    unrolled = [match.end() for match in re.finditer(r"#pragma unroll\n\s*for ", code)]
    unrolled += [
        match.end() for match in re.finditer(r"\bfor (?=\(int \w+ = 0; \w+ < k[A-Z])", code)
    ]
    code = _NOT_CODE.sub(lambda m: blank(m[0]), code)
    for start in sorted(set(unrolled)):
        end = _closing(code, start)
        code = code[:start] + blank(code[start:end]) + code[end:]
    for match in _FOR.finditer(code):
        end = _closing(code, match.end())
        step = code.rfind(";", match.end(), end)
        if step > 0:
            code = code[: step + 1] + blank(code[step + 1 : end - 1]) + code[end - 1 :]
    return code


def _by_operator(found: list[Mutant]) -> list[list[Mutant]]:
    return [[m for m in found if m.operator == name] for name in {m.operator: 0 for m in found}]


def mutants(file: str, macros: dict[str, int]) -> list[Mutant]:
    """Return all mutants of the code of a file that is compiled with some macros.

    A sample is the first few: their order does not change with edits elsewhere.
    """
    text = (KERNELS / file).read_text()
    counts: Counter[str] = Counter()
    found = []
    for operator, start, end, new in sorted(
        set(_edits(_blanked(text, macros))), key=lambda e: e[1:]
    ):
        first = text.rfind("\n", 0, start) + 1
        last = text.index("\n", end)
        before = re.sub(r"\s+", " ", text[first:last].partition(" //")[0]).strip()
        after = re.sub(r"\s+", " ", (text[first:start] + new + text[end:last]).partition(" //")[0])
        name = f"{file}: {before} -> {after.strip()}"
        counts[name] += 1
        name += f" #{counts[name]}" if counts[name] > 1 else ""
        found.append(Mutant(file, operator, start, text[start:end], new, name))
    found.sort(key=lambda mutant: zlib.crc32(mutant.name.encode()))
    place = {m: i for ms in _by_operator(found) for i, m in enumerate(ms)}
    return sorted(found, key=place.__getitem__)  # the first of each operator, the second ...


# Processes ----------------------------------------------------------------------------------------


def _check_mutant(
    results: Connection, mutant: Mutant | None, folder: Path, checks: Sequence[Check],
    builds: Sequence[Build],
) -> None:  # fmt: skip
    """Run checks over a folder of kernels, and send what is noticed.

    That is "" if nothing is, and "does not compile: ..." of what is no program.
    """
    import kvcupy as kv
    from kvcupy import devices, sources
    from kvcupy.devices.host import HostDevice
    from kvcupy.ops import call as op_call

    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    kv.config._strict_index_faults = "record"
    kv.config._verify, kv.config._fallback = "never", "error"
    kv.config.strict_seed = zlib.crc32(mutant.name.encode()) if mutant else 0
    sources.kernels_dir = lambda: folder
    noticed = ""
    for build, check in itertools.product(builds, checks):
        device = HostDevice()
        device.extra_flags, device.warp_lanes = ("-O0", *build.flags), build.lanes
        kv.config._strict = build.strict
        devices._devices["host"] = device
        op_call._plans.clear()
        try:
            check(device)
            device.synchronize()
            device.context.raise_fault()
        except kv.CompileError as error:
            noticed = f"does not compile: {error}"
        except BaseException as error:  # pytest's own among them
            noticed = f"{check}: {type(error).__name__}: {error}"
        if noticed:
            break
    results.send(noticed)


class Runner:
    """Runs mutants over a copy of the kernels, each in a fork of a process that has imported all.

    Parameters
    ----------
    folder : where the copy is made
    checks : functions of a device that a process can import, tried in turn until one notices
    builds : for which all of them are
    """

    def __init__(
        self, folder: Path, checks: Sequence[Check], builds: Sequence[Build] = STRICT
    ) -> None:
        self.folder, self.checks, self.builds = folder, checks, builds
        shutil.copytree(KERNELS, folder, dirs_exist_ok=True)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["kernel_checks", "valid_calls"])

    def run(self, mutant: Mutant | None) -> str:
        """Return what is noticed of a mutant, or of the unchanged kernels; "" if nothing is."""
        if mutant:
            mutant.apply(self.folder)
        try:
            return self._run(mutant)
        finally:
            if mutant:
                shutil.copy(KERNELS / mutant.file, self.folder / mutant.file)

    def _run(self, mutant: Mutant | None) -> str:
        receiver, sender = self._processes.Pipe(duplex=False)
        arguments = (sender, mutant, self.folder, self.checks, self.builds)
        child = self._processes.Process(target=_check_mutant, args=arguments, daemon=True)
        child.start()
        sender.close()
        try:
            if not receiver.poll(TIMEOUT_S):
                child.kill()
                return "it does not end"
            return str(receiver.recv())
        except EOFError:
            child.join()
            return f"its process died: {child.exitcode}"
        finally:
            child.join(TIMEOUT_S)
            receiver.close()

    def compiled(self, candidates: Sequence[Mutant], count: int) -> Iterator[tuple[Mutant, str]]:
        """Run mutants until `count` of them were programs; yield each, and what was noticed."""
        for mutant in candidates:
            if count == 0:
                return
            noticed = self.run(mutant)
            if not noticed.startswith("does not compile"):
                count -= 1
                yield mutant, noticed
