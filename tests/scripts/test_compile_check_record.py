"""The record of the compile check: what it spares, what it finds, and when it is out of date."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")

import compile_check
from compile_check import Comparison, Record, Usage, digests_of, targets_of

from kvcupy import ops
from kvcupy.devices import nvrtc
from kvcupy.kernels import Kernel
from kvcupy.ops import attention_kernels, store

GATHER = Kernel("gather.cu", "gather_copy", store.COPY.params, "CacheRowsParams").specialise(16)
COPIES = [store.COPY.specialise(word) for word in (16, 1)]
ARCHS = ("sm_80", "sm_90")
PARAMS = np.dtype([])


# The file ------------------------------------------------------------------------------------

USAGES = {
    ("store.cu:store_copy<16>", "sm_80"): Usage(64),
    ("store.cu:store_copy<16>", "sm_90"): Usage(70, 16, 8, ("a warning",), ("no wide load",)),
    ("store.cu:store_copy<1>", "sm_80"): Usage(0),
    ("store.cu:store_copy<2>", "sm_80"): Usage(0, 16),
}


def test_a_record_reads_as_it_was_written_a_line_per_kernel(tmp_path):
    record = Record("NVRTC 1.2.3", {"store.cu": "0" * 64}, USAGES)
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record
    lines = (tmp_path / "record.json").read_text().splitlines()
    (line,) = (line for line in lines if "store_copy<16>" in line)
    assert '"sm_80": 64,' in line and '"spill_bytes": 8' in line
    assert '    "store.cu:store_copy<1>": {"sm_80": 0},' in lines


# The digest of a source ----------------------------------------------------------------------


def digests():
    return digests_of([(GATHER,), tuple(COPIES), tuple(attention_kernels.specialisations()[:1])])


@pytest.mark.parametrize(
    "name, old, new, changed",
    [
        ("store.cu", "const int", "const  /* why */\tint", set()),
        ("store.cu", "\n}", "  // why\n\n  }", set()),
        ("store.cu", "const int", "volatile const int", {"store.cu"}),
        ("cache_rows.cuh", "const int", "volatile const int", {"store.cu", "gather.cu"}),
        ("common.cuh", "using u32", "using u33", {"store.cu", "gather.cu", "attention.cu"}),
        ("attention_end.cuh", "const int", "volatile const int", {"attention.cu"}),
        ("merge.cu", "const int", "volatile const int", set()),
        ("host/copy.h", "const", "volatile const", set()),
    ],
)
def test_what_changes_the_digest(kernel_sources, name, old, new, changed):
    before, file = digests(), kernel_sources.folder / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    after = digests()
    assert {source for source in before if before[source] != after[source]} == changed


def test_the_code_of_the_host_device_is_not_nvrtcs(kernel_sources):
    """The digest leaves it out, so no GPU kernel may include it."""
    folder, nothing = kernel_sources.folder, Kernel("nothing.cu", "nothing", PARAMS, "Params")
    shutil.rmtree(folder / "host")
    for source in {one.kernel.source for one in ops.specialisations()}:
        text = f'#include "{source}"\ntemplate <int> __global__ void nothing() {{}}\n'
        (folder / "nothing.cu").write_text(text)
        nvrtc.compile_program([nothing.specialise(1)], "sm_90", kernels_dir=folder)


# What is compiled ----------------------------------------------------------------------------

MANY = [
    Kernel(source, name, PARAMS, "Params").specialise(n)
    for source, name, count in (
        ("a.cu", "attention_decode", 99), ("b.cu", "small", 99), ("c.cu", "one", 1),
    )
    for n in range(count)
]  # fmt: skip
DIGESTS = {"a.cu": "1", "b.cu": "2", "c.cu": "3"}


def compared(kernels=MANY, digests=DIGESTS, archs=ARCHS, **fields):
    usages = {(str(one), arch): Usage(9) for one in MANY for arch in ARCHS}
    record = Record(**{"compiler": "", "digests": DIGESTS, "usages": usages} | fields)
    return Comparison(record, digests, targets_of(kernels, archs))


def counts(comparison):
    names = [program[0].kernel.source for program, _ in comparison.targets]
    return {source: names.count(source) for source in DIGESTS}


def test_one_program_of_twenty_is_compiled_and_all_of_a_changed_source():
    comparison = compared()
    assert comparison.unchanged == DIGESTS.keys() and not comparison.changed
    assert counts(comparison) == {"a.cu": -(-2 * 99 // 20), "b.cu": -(-2 * 13 // 20), "c.cu": 1}
    comparison = compared(digests=DIGESTS | {"b.cu": "4"})
    assert comparison.changed == {"b.cu"}
    assert counts(comparison) == {"a.cu": 10, "b.cu": 2 * 13, "c.cu": 1}


@pytest.mark.parametrize("kernels", [MANY[:-1], [*MANY, MANY[-1].kernel.specialise("new")]])
def test_kernels_that_come_or_go_are_a_change_of_their_source(kernels):
    assert compared(kernels).changed == {"c.cu"}


# The command ---------------------------------------------------------------------------------


class Command:
    """`scripts/compile_check.py` of a few kernels for two architectures, in this process."""

    def __init__(self, monkeypatch, folder):
        self.file, self.compiled = folder / "record.json", []
        self._monkeypatch = monkeypatch
        self.kernels(GATHER, *COPIES)
        really = nvrtc.compile_program
        monkeypatch.setenv("KVCUPY_CACHE_DIR", str(folder / "cache"))
        monkeypatch.setattr(compile_check, "ARCHS", ARCHS)
        monkeypatch.setattr(compile_check, "run", lambda f, tasks, *_: [f(t) for t in tasks])
        monkeypatch.setattr(
            nvrtc, "compile_program",
            lambda program, arch, **more: (
                self.compiled.append((program[0].kernel.source, arch))
                or really(program, arch, **more)
            ),
        )  # fmt: skip

    def kernels(self, *specialisations):
        self._monkeypatch.setattr(ops, "specialisations", lambda: list(specialisations))

    def __call__(self, *more):
        """Return the exit status."""
        self.compiled.clear()
        return compile_check.main(["--record", str(self.file), *more])

    def edit(self, *path, value):
        """Change a value of the record."""
        data = json.loads(self.file.read_text())
        place = data
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        self.file.write_text(json.dumps(data))

    @property
    def remedy(self):
        return f"python scripts/compile_check.py --record {self.file} --update"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A record of the kernels of `Command`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        command = Command(monkeypatch, tmp_path_factory.mktemp("record"))
        assert command("--update") == 0
        assert len(command.compiled) == 4
        return command.file.read_text()


@pytest.fixture
def command(written, monkeypatch, tmp_path):
    command = Command(monkeypatch, tmp_path)
    command.file.write_text(written)
    return command


ROW = ("kernels", "store.cu:store_copy<16>")


def test_what_has_not_changed_is_compiled_in_part(command, capsys):
    assert command() == 0
    assert sorted(source for source, _ in command.compiled) == ["gather.cu", "store.cu"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("3 compiled in ") and last.endswith(" s, 3 as recorded")


def test_a_changed_source_is_compiled_whole_and_may_come_out_the_same(
    command, kernel_sources, capsys
):
    with (kernel_sources.folder / "gather.cu").open("a") as file:
        file.write("constexpr int kUnused = 1;\n")
    assert command() == 0
    assert sorted(source for source, _ in command.compiled) == ["gather.cu"] * 2 + ["store.cu"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        f"changed, but compiled as recorded: gather.cu; to spare that, run `{command.remedy}`"
    )
    assert command("--update") == 0
    assert command() == 0
    assert len(command.compiled) == 2


def test_other_registers_than_recorded_fail_until_the_record_is_updated(command, capsys):
    recorded = json.loads(command.file.read_text())["kernels"][ROW[1]]["sm_90"]
    command.edit("sources", "store.cu", value="old")
    command.edit(*ROW, "sm_90", value=96)
    assert command() == 1
    *_, difference, last = capsys.readouterr().out.splitlines()
    assert difference == f"{ROW[1]} sm_90: recorded 96 registers, got {recorded} registers"
    assert last == f"record is out of date: run `{command.remedy}`"
    assert command("--update") == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"written: {command.file}"
    assert command() == 0
    assert json.loads(command.file.read_text())["kernels"][ROW[1]]["sm_90"] == recorded


def test_the_sample_finds_what_is_not_true(command, written, capsys):
    for arch in ARCHS:
        command.edit(*ROW, arch, value=1)
    assert command() == 1
    *_, difference, wrong, last = capsys.readouterr().out.splitlines()
    assert difference.startswith(f"{ROW[1]} sm_") and "recorded 1 registers, got" in difference
    assert wrong.endswith("not as recorded: store.cu")
    assert last == f"record is out of date: run `rm {command.file}; {command.remedy}`"
    assert command("--update") == 1, "what else is wrong of that source is not known"
    command.file.unlink()
    assert command("--update") == 0
    assert command.file.read_text() == written


@pytest.mark.parametrize(
    "value, problem",
    [
        ({"registers": 50, "spill_bytes": 8}, "0 bytes of stack, 8 bytes spilled: expected none"),
        ({"registers": 50, "stack_bytes": 16}, "16 bytes of stack, 0 bytes spilled: expected none"),
        ({"registers": 50, "warnings": ["warning: this"]}, "warning: this"),
        ({"registers": 50, "missing": ["no 16-byte load"]}, "no 16-byte load"),
        (73, "73 registers, over the budget of 72"),
    ],
    ids=str,
)
def test_what_is_recorded_is_judged_like_what_is_compiled(
    command, monkeypatch, capsys, value, problem
):
    monkeypatch.setattr(compile_check, "sample_of", lambda *_: set())
    assert command() == 0
    command.edit(*ROW, "sm_90", value=value)
    assert command() == 1
    assert f"{ROW[1]} sm_90: {problem}" in capsys.readouterr().out.splitlines()
    assert not command.compiled


def test_a_sample_without_a_record(command, capsys):
    """Enough to see of another compiler in each change; one of the small programs a source."""
    assert compile_check.main(["--sample", "--jobs", "1"]) == 0
    assert sorted(source for source, _ in command.compiled) == ["gather.cu", "store.cu"]
    assert "as recorded" not in capsys.readouterr().out


def test_with_another_compiler_all_is_compiled_and_compared_with_budgets_alone(
    command, written, monkeypatch, capsys
):
    command.edit("compiler", value="NVRTC 1.2.3")
    command.edit(*ROW, "sm_90", value=999)
    assert command() == 0
    assert len(command.compiled) == 4
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == f"{command.file} is of NVRTC 1.2.3: not compared with {nvrtc.compiler()}"
    assert last.startswith("6 compiled in ")
    assert command("--update") == 0
    assert command.file.read_text() == written
    command.edit("compiler", value="NVRTC 1.2.3")
    monkeypatch.setattr(
        compile_check, "REGISTER_BUDGET", compile_check.REGISTER_BUDGET | {"store_copy": 20}
    )
    assert command() == 1


def test_kernels_that_came_and_went_are_said(command, capsys):
    new = store.COPY.specialise(8)
    command.kernels(GATHER, COPIES[0], new)
    assert command() == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{COPIES[1]} sm_80: recorded, but there is no such kernel" in lines
    assert any(line.startswith(f"{new} sm_90: recorded nothing, got ") for line in lines)
    assert lines[-1] == f"record is out of date: run `{command.remedy}`"
    assert command("--update") == 0
    assert command() == 0


def test_what_is_unreachable_or_not_asked_for_is_not_compiled(command, monkeypatch):
    assert command("--arch", "sm_80") == 0
    assert {arch for _, arch in command.compiled} == {"sm_80"}
    monkeypatch.setattr(ops, "is_reachable", lambda one, arch: (one, arch) != (GATHER, "sm_80"))
    assert command("--update") == 0
    assert ("gather.cu", "sm_80") not in command.compiled
    assert json.loads(command.file.read_text())["kernels"][str(GATHER)].keys() == {"sm_90"}


@pytest.mark.parametrize(("arguments", "said"), [
    ("--record FILE --arch sm_89", "--record: expected some of sm_80, sm_90, got sm_89"),
    ("--record FILE --arch sm_80 --update", "--record: expected all of sm_80, sm_90, got sm_80"),
    ("--record nowhere/record.json", "--record: expected a file that --update has written, got"),
    ("--record nowhere/record.json --update", "--record: expected a file that --update has writ"),
    ("--arch sm_90 sm_42", "--arch: expected "), ("--arch frob", "--arch: expected "),
    ("--arch 90", "--arch: expected "), ("--update", "--update: expected --record FILE"),
    ("--sample --record FILE", "--sample: expected no --record"),
])  # fmt: skip
def test_options_that_do_not_fit_are_one_line(command, capsys, arguments, said):
    words = [str(command.file) if word == "FILE" else word for word in arguments.split()]
    try:
        status = compile_check.main(words)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_records_kernels_are_those_of_the_package():
    """What it says of them, `scripts/compile_check.py --record` checks."""
    root = Path(__file__).resolve().parents[2]
    record = Record.load(root / "scripts" / "results" / "kernels.json")
    reachable = {
        (str(one), arch)
        for one in ops.specialisations()
        for arch in compile_check.ARCHS
        if ops.is_reachable(one, arch)
    }
    assert record.usages.keys() == reachable
