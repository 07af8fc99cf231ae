"""The record of the compile check: what came out of every kernel, in a file under version control.

It has one line for each kernel, so that the diff of a change shows what it does to registers. A
check against the record compiles the sources that have changed since, and a sample of the others,
which must come out as recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import sources
from .devices import nvrtc
from .kernels import Specialisation

_SAMPLE = 20  # of so many programs of an unchanged source, one is compiled

Program = tuple[Specialisation, ...]
"""Kernels of one source file, which NVRTC compiles together."""
Target = tuple[Program, str]
"""A program, and the architecture that it is compiled for."""
Name = tuple[str, str]
"""A specialisation as text, and an architecture."""


@dataclass(frozen=True)
class Usage:
    """What came out of one kernel.

    Attributes
    ----------
    registers : per thread
    stack_bytes, spill_bytes : summed over the functions of the kernel
    warnings : lines of the compiler's log
    missing : what its SASS lacks of the 16-byte accesses that it promises
    """

    registers: int
    stack_bytes: int = 0
    spill_bytes: int = 0
    warnings: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Show registers, and what a good kernel does not have."""
        rest = {name: value for name, value in asdict(self).items() if value}
        registers = rest.pop("registers", 0)
        return ", ".join([f"{registers} registers", *(f"{n} {v}" for n, v in rest.items())])


@dataclass(frozen=True)
class Record:
    """What came out of every kernel, on every architecture.

    Attributes
    ----------
    compiler : `nvrtc.compiler()`
    digests : of what was compiled, by source (`digests_of`)
    usages : what came out
    """

    compiler: str
    digests: Mapping[str, str]
    usages: Mapping[Name, Usage]

    @staticmethod
    def load(file: Path) -> Record:
        """Read a record; OSError if that fails, ValueError if the file holds something else."""
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            usages = {
                (specialisation, arch): _from_json(value)
                for specialisation, row in data["kernels"].items()
                for arch, value in row.items()
            }
            return Record(str(data["compiler"]), dict(data["sources"]), usages)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file}: expected a record, got {error!r}") from error

    def save(self, file: Path) -> None:
        """Write a record, with a line for each source, and for each kernel."""
        rows: dict[str, dict[str, Any]] = {}
        for (specialisation, arch), usage in self.usages.items():
            rows.setdefault(specialisation, {})[arch] = _to_json(usage)
        tables = f'"sources": {_lines(self.digests)},\n  "kernels": {_lines(rows)}'
        text = f'{{\n  "compiler": {json.dumps(self.compiler)},\n  {tables}\n}}\n'
        file.write_text(text, encoding="utf-8")


def _lines(table: Mapping[str, Any]) -> str:
    """Return JSON with a line for each key."""
    lines = [f"\n    {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    return f"{{{','.join(lines)}\n  }}"


def _to_json(usage: Usage) -> Any:
    """Return the number of registers, with a name only where there is more to say."""
    fields = {name: value for name, value in asdict(usage).items() if value}
    return usage.registers if fields.keys() <= {"registers"} else fields


def _from_json(value: Any) -> Usage:
    if not isinstance(value, dict):
        return Usage(int(value))
    fields: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value.items()
    }
    return Usage(**fields)


def digests_of(
    programs: Iterable[Program],
    promises_128_bits: Callable[[Specialisation], bool] = lambda _: False,
    kernels_dir: Path | None = None,
) -> dict[str, str]:
    """Return, by source, a digest of all that decides what comes out of it, but for the compiler.

    That is the code, the options, which kernels are compiled together and what they promise.
    """
    parts: dict[str, list[str]] = {}
    for program in programs:
        kernels = [(one.expression, promises_128_bits(one)) for one in program]
        parts.setdefault(program[0].kernel.source, []).append(repr(kernels))
    return {
        source: _sha256(sources.program_digest(source, kernels_dir), *nvrtc.OPTIONS, *kernels)
        for source, kernels in sorted(parts.items())
    }


def _sha256(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


class Comparison:
    """A record beside the kernels that there are now.

    Parameters
    ----------
    record : by the same compiler
    digests : `digests_of` the present sources
    targets : all that is to be checked, on some of the record's architectures

    Attributes
    ----------
    unchanged, changed : sources that the record speaks for, and the others
    targets : what is to be compiled: all of the changed sources, a sample of the others
    """

    def __init__(
        self, record: Record, digests: Mapping[str, str], targets: Sequence[Target]
    ) -> None:
        archs = {arch for _, arch in targets}
        self._recorded = {name: u for name, u in record.usages.items() if name[1] in archs}
        self._kernels = {(str(one), arch) for program, arch in targets for one in program}
        differing = {_source(name) for name in self._recorded.keys() ^ self._kernels}
        same = {source for source in digests if digests[source] == record.digests.get(source)}
        self.unchanged = same - differing
        self.changed = digests.keys() - self.unchanged
        sample = self._sample(targets, "".join(digests.values()))
        self.targets = [
            target for target in targets
            if target[0][0].kernel.source in self.changed or target in sample
        ]  # fmt: skip

    def _sample(self, targets: Sequence[Target], seed: str) -> set[Target]:
        """Draw some programs of each unchanged source; any edit of the sources draws others."""
        sample: set[Target] = set()
        for source in self.unchanged:
            programs = [target for target in targets if target[0][0].kernel.source == source]
            programs.sort(key=lambda target: _sha256(seed, target[1], *map(str, target[0])))
            sample.update(programs[: -(-len(programs) // _SAMPLE)])
        return sample

    def others(self, compiled: Mapping[Name, Usage | None]) -> dict[Name, Usage]:
        """Return what the record has of kernels that were not compiled."""
        return {name: self._recorded[name] for name in self._kernels - compiled.keys()}

    def differences(self, compiled: Mapping[Name, Usage | None]) -> dict[Name, str]:
        """Return what came out otherwise than recorded, and what is recorded but is no more.

        Kernels that do not compile (None) are not among them.
        """
        differences = {
            name: f"recorded {self._recorded.get(name, 'nothing')}, got {usage}"
            for name, usage in compiled.items()
            if usage is not None and usage != self._recorded.get(name)
        }
        stale = self._recorded.keys() - self._kernels
        return differences | {name: "recorded, but there is no such kernel" for name in stale}

    def contradictions(self, differences: Iterable[Name]) -> list[str]:
        """Return the unchanged sources among those of differences: the record is wrong of them."""
        return sorted(self.unchanged & {_source(name) for name in differences})


def _source(name: Name) -> str:
    return name[0].partition(":")[0]
