"""scripts/vllm_demo.py over a stand-in for the interpreter with vLLM: requests, report, errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("scripts_on_path")

# An engine whose tokens depend on the prompt alone. It appends its tasks to a log.
STAND_IN = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path

if sys.argv[1] == "-c":
    print(json.dumps({{"vllm": "0.32.0"}} if "NO_VLLM" not in os.environ else {{}}))
    sys.exit()
task = json.loads(sys.argv[sys.argv.index("--serve") + 1])
prompts = json.loads(Path(sys.argv[-1]).read_text())
options = task["options"] or {{}}
with Path(__file__).with_suffix(".log").open("a") as log:
    log.write(json.dumps(task) + "\\n")
urls = [store["url"].rpartition("/")[2] for store in options.get("stores", ())]
if urls == ["shared"] and "FAILS" in os.environ:
    sys.exit("the engine has failed")
print(json.dumps({{"ready": True}}), flush=True)
wrong = urls == ["disk"] and "WRONG" in os.environ
for i, prompt in enumerate(prompts):
    tokens = [sum(prompt) % 1000, len(prompt) + (wrong and i == 7)]
    print(json.dumps({{
        "start": i, "tokens": [tokens], "cached": [64 if options else 0], "seconds": 1.0,
        "first_token_s": [(len(prompt) - 1000) / 1e3 + 0.1 * (i >= 12)],
    }}), flush=True)
if task["wait"]:
    sys.stdin.readline()
"""


@pytest.fixture
def demo(tmp_path):
    """Run the demo, and return its exit status, its report, and the tasks of its engines."""
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments):
        import vllm_demo

        path = tmp_path / "report.json"
        status = vllm_demo.main(
            ["--python", str(python), "--rounds", "2", "--json", str(path), *map(str, arguments)]
        )
        log = python.with_suffix(".log")
        tasks = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return status, json.loads(path.read_text()) if path.exists() else None, tasks

    return run


def test_every_document_is_evicted_before_its_second_question():
    import vllm_demo

    prompts = vllm_demo.prompts_of()
    assert prompts == vllm_demo.prompts_of()
    half = len(prompts) // 2
    for i, length in enumerate(vllm_demo.DOCUMENT_TOKENS):
        first, second = prompts[i], prompts[half + i]
        assert first[:length] == second[:length] and first[length:] != second[length:]
    assert len({tuple(prompt[:32]) for prompt in prompts}) == half
    device = vllm_demo.DEVICE_BLOCKS * vllm_demo.BLOCK_TOKENS
    longest = max(map(len, prompts))
    assert longest < device
    assert all(sum(map(len, prompts[i : i + half])) > 2 * device for i in range(half))


def test_report(demo, capsys):
    status, report, tasks = demo()
    assert status == 0
    assert [row["case"] for row in report["rows"]] == [
        "vLLM alone", "kvcupy, all empty", "another engine, same store", "restarted, same disk",
    ]  # fmt: skip
    for row in report["rows"]:
        assert (row["first_question_ms"], row["second_question_ms"]) == (440, 440)
        assert row["first_token_ms"] == [40, 200, 360, 520, 680, 840] * 2  # the lesser round
        assert row["requests"] == 24
        assert row["prompt_tokens"] == 2 * 2 * (6 * 1400 + 6 * 40)
        assert row["cached_tokens"] == (0 if row["case"] == "vLLM alone" else 24 * 64)
    assert report["engine_versions"] == {"vllm": "0.32.0"}
    assert "restarted, same disk" in capsys.readouterr().out

    alone, first, other, restarted = (task["options"] for task in tasks)
    assert alone is None
    disk, shared = first["stores"]
    assert other["stores"] == [shared] and restarted["stores"] == [disk] and disk != shared
    assert [task["wait"] for task in tasks] == [False, True, False, False]
    for task in tasks:
        assert task["salts"] == ["0"] * 12 + ["1"] * 12


def test_a_wrong_token_is_noticed(demo, monkeypatch, capsys):
    monkeypatch.setenv("WRONG", "1")
    status, report, _ = demo()
    assert (status, report) == (1, None)
    assert (
        "restarted, same disk: 1 requests have wrong tokens, such as 7" in capsys.readouterr().err
    )


def test_an_engine_that_fails_ends_the_demo_and_the_others(demo, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(AssertionError, match="the engine has failed"):
        demo()


@pytest.mark.parametrize("missing", ["vLLM", "interpreter"])
def test_what_is_missing_is_one_line(demo, monkeypatch, capsys, missing):
    if missing == "vLLM":
        monkeypatch.setenv("NO_VLLM", "1")
        assert demo()[0] == 2
    else:
        assert demo("--python", Path("not") / "there")[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm_demo: ") and missing in line
