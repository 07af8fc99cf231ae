r"""Serve a trace by vLLM on the CPU with kvcupy below its cache, and compare every token.

    python scripts/vllm_check.py                        # in an environment with vLLM for the CPU
    python scripts/vllm_check.py --only host kill --trace trace.jsonl --json build/vllm.json
    python scripts/vllm_check.py --layers windows       # a hybrid model

The model is a small Llama, Gemma 3 (sliding windows in two of three layers) or LFM2 (states in two
of three layers) with fixed random weights, large enough that tokens depend on the cache, in
float32, where vLLM's tokens do not depend on the batch. A block of the trace is one of vLLM's
blocks. Each engine is a process. The exit status is 1 if a token is wrong or a check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.report import describe, write_json
from common.requests import requests_of

import kvcupy as kv

BLOCK_TOKENS, MAX_BLOCKS, NEW_TOKENS = 32, 40, 8
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 4, 128, 4, 2, 32, 512
HYBRID_LAYERS, WINDOW = 6, 80
HYBRID_GROUPS = 3  # of two layers
BLOCK_BYTES = LAYERS * 2 * KV_HEADS * BLOCK_TOKENS * HEAD_DIM * 4
NUM_TURNS, TURN_TOKENS = 4, 5 * BLOCK_TOKENS
DEVICE_BLOCKS = 64
HOST, SMALL_HOST = 2**30, 96 * BLOCK_BYTES
STORE_BYTES = 2**29

Prompts = list[list[int]]


def prompts_of(trace: Path | None, count: int) -> Prompts:
    """Return prompts shaped like the requests of a trace, a block for each of its blocks."""
    prompts = []
    for number, request in enumerate(requests_of(trace, count)):
        tokens: list[int] = []
        for block in request.hash_ids[:MAX_BLOCKS]:
            words = random.Random(block)
            tokens += [words.randrange(3, VOCABULARY) for _ in range(BLOCK_TOKENS)]
        words = random.Random(-1 - number)
        prompts.append(tokens + [words.randrange(3, VOCABULARY) for _ in range(5)])
    return prompts


def conversations(count: int) -> Prompts:
    """Return prompts of which each begins with a whole earlier one, or with new tokens.

    No state is computed twice, which on a CPU gives another one in vLLM.
    """
    words = random.Random(0)
    texts = [
        [words.randrange(3, VOCABULARY) for _ in range(NUM_TURNS * TURN_TOKENS + 5)]
        for _ in range(count // NUM_TURNS)
    ]
    return [text[: turn * TURN_TOKENS + 5] for turn in range(1, NUM_TURNS + 1) for text in texts]


def expected_hits(prompts: Prompts) -> int:
    """Count the tokens that a cache without limit serves."""
    known: set[tuple[int, ...]] = set()
    hits = 0
    for prompt in prompts:
        prefixes = [
            tuple(prompt[:end]) for end in range(BLOCK_TOKENS, len(prompt), BLOCK_TOKENS)
        ]  # fmt: skip
        hits += BLOCK_TOKENS * next(
            (i for i, prefix in enumerate(prefixes) if prefix not in known), len(prefixes)
        )
        known.update(prefixes)
    return hits


# --- An engine, in a separate process ---


def write_model(
    folder: Path, layers: str = "full", *,
    width: int = WIDTH, heads: int = HEADS, head_dim: int = HEAD_DIM,
) -> None:  # fmt: skip
    """Write a model with fixed random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    own: dict[str, Any] = {"num_hidden_layers": LAYERS, "head_dim": head_dim}
    if layers == "windows":
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        own |= {"sliding_window": WINDOW, "query_pre_attn_scalar": head_dim}
    elif layers == "states":
        kinds = ["conv", "conv", "full_attention"]
        own |= {
            "conv_dim": width, "conv_dim_out": width, "block_dim": width,
            "block_auto_adjust_ff_dim": False, "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.0,
        }  # fmt: skip
    if layers != "full":
        own |= {"num_hidden_layers": HYBRID_LAYERS, "layer_types": HYBRID_LAYERS // 3 * kinds}
    config = AutoConfig.for_model(
        {"full": "llama", "windows": "gemma3_text", "states": "lfm2"}[layers],
        hidden_size=width, intermediate_size=2 * width, num_attention_heads=heads,
        num_key_value_heads=KV_HEADS, vocab_size=VOCABULARY, max_position_embeddings=4096,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2, **own,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                # Attention is scaled up: else tokens would hardly depend on the cache.
                scale = 2.75 if ".self_attn." in name else 1.0
                if "embed_tokens" in name and layers == "full":  # else tokens depend on it alone
                    scale = width**0.5
                random_weights = torch.randn(weights.shape, generator=generator)
                weights.copy_(random_weights * scale / weights.shape[-1] ** 0.5)
    model.save_pretrained(folder)


def engine(model: str, task: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    options = dict(task.get("engine", {}))
    if task.get("options") is not None:
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvcupyConnector", kv_role="kv_both",
            kv_connector_module_path="kvcupy.interop.vllm_connector",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=task["options"],
        )  # fmt: skip
    return LLM(
        model=model, skip_tokenizer_init=True, enforce_eager=True, block_size=BLOCK_TOKENS,
        dtype="float32", num_gpu_blocks_override=task["blocks"],
        max_model_len=task.get("max_model_len", 1400), max_num_seqs=8, disable_log_stats=False,
        **options,
    )  # fmt: skip


def break_tiers(how: str) -> None:
    """Make stores fail or hang, or many loads fail, from now on."""
    if how == "loads":
        from kvcupy.cache.tiered.holds import HeldBlocks

        rng, load = random.Random(1), HeldBlocks.load

        def fail_often(held: Any, pages: Any, **options: Any) -> Any:
            if rng.random() < 0.4:
                raise kv.DeviceError("load: an injected failure")
            return load(held, pages, **options)

        HeldBlocks.load = fail_often  # type: ignore[method-assign]
        return
    from kvcupy.remote.stores.store import BlockStore

    def broken(*arguments: Any, **options: Any) -> Any:
        if how == "hangs":
            threading.Event().wait()
        raise OSError(5, "an injected failure")

    for name in ("match", "put", "get"):
        setattr(BlockStore, name, broken)


def serve(model: str, task: dict[str, Any], prompts: Prompts) -> None:
    """Serve prompts, and print a line of JSON for each batch."""
    from vllm import SamplingParams

    llm = engine(model, task)
    count, at_once = task.get("new_tokens", NEW_TOKENS), task.get("at_once", 4)
    salts = [{"cache_salt": salt} for salt in task["salts"]] if "salts" in task else None
    for start in range(0, len(prompts), at_once):
        if start == task.get("break_at"):
            break_tiers(task["break"])
        batch = range(start, min(start + at_once, len(prompts)))
        started = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompts[i], **(salts[i] if salts else {})} for i in batch],
            SamplingParams(max_tokens=count, temperature=0, ignore_eos=True),
            use_tqdm=False,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        line = {"start": start, "tokens": tokens, "seconds": seconds}
        line["cached"] = [output.num_cached_tokens for output in outputs]
        line["first_token_s"] = [output.metrics.first_token_latency for output in outputs]
        print(json.dumps(line), flush=True)
    if task.get("wait"):
        sys.stdin.readline()  # until the other engine has the blocks
    llm.llm_engine.engine_core.shutdown()


class Served:
    """A process with an engine, and its output."""

    def __init__(
        self, model: Path, prompts: Path, task: dict[str, Any], python: str = sys.executable
    ) -> None:
        command = [
            python, __file__, "--serve", json.dumps(task), "--model", str(model),
            "--prompts", str(prompts),
        ]  # fmt: skip
        env = {
            **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(task.get("separate", False))),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }  # fmt: skip
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, env=env,
        )  # fmt: skip
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.seconds: list[float] = []
        self.first_token_s: list[float] = []

    def lines(self) -> Iterator[dict[str, Any]]:
        """Read the output, line by line."""
        for text in self.process.stdout or ():
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            for i, tokens in enumerate(line.get("tokens", ())):
                self.tokens[line["start"] + i] = tokens
                self.cached[line["start"] + i] = line["cached"][i]
            if "seconds" in line:
                self.seconds.append(line["seconds"])
            self.first_token_s += line.get("first_token_s", ())
            yield line

    def resume(self) -> None:
        """Let it end, if it waits for another engine."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, *, expect: int | None = 0) -> Served:
        for _ in self.lines():
            pass
        code = self.process.wait(60)
        if expect is not None and code != expect:
            self._errors.seek(0)
            raise AssertionError(f"an engine ended with {code}:\n{self._errors.read()[-2000:]}")
        return self


# --- Checks ---


class Checks:
    """The checks, over the same prompts."""

    def __init__(self, folder: Path, prompts: Prompts, layers: str = "full") -> None:
        self._folder, self.prompts = folder, prompts
        self._groups = 1 if layers == "full" else HYBRID_GROUPS
        self._model = folder / layers
        expected = self._model.with_suffix(".json")
        if not expected.exists():
            write_model(self._model, layers)
            # With states vLLM's tokens on a CPU depend on the batch and on hits.
            task = {"blocks": 4096, "at_once": 1 if layers == "states" else 4}
            alone = self._start(task, prompts).end().tokens
            expected.write_text(json.dumps([alone[i] for i in range(len(prompts))]))
        self._expected = dict(enumerate(json.loads(expected.read_text())))
        different = len({tuple(t) for t in self._expected.values()})
        assert different > 0.9 * len({tuple(p) for p in prompts}), "tokens do not depend on prompts"

    def _start(self, task: dict[str, Any], prompts: Prompts | None = None) -> Served:
        path = self._folder / f"prompts-{time.monotonic_ns()}.json"
        path.write_text(json.dumps(self.prompts if prompts is None else prompts))
        blocks = self._groups * task.get("blocks", DEVICE_BLOCKS)
        return Served(self._model, path, {**task, "blocks": blocks})

    def _compare(self, served: Served) -> dict[str, Any]:
        wrong = [i for i, tokens in served.tokens.items() if tokens != self._expected[i]]
        assert not wrong, f"{len(wrong)} prompts have wrong tokens, such as number {wrong[0]}"
        return {
            "prompts": len(served.tokens),
            "cached_tokens": sum(served.cached.values()),
            "prompt_tokens": sum(len(self.prompts[i]) for i in served.tokens),
            "seconds": round(sum(served.seconds), 3),
        }

    def host(self) -> dict[str, Any]:
        """Serve with a device cache far too small, and host memory for all blocks."""
        task = {"options": {"host_bytes": HOST}, "at_once": 1}
        found = self._compare(self._start(task).end())
        found["expected_cached_tokens"] = expected_hits(self.prompts)
        assert found["cached_tokens"] == found["expected_cached_tokens"], found
        return found

    def batches(self) -> dict[str, Any]:
        """Serve batches of eight, with asynchronous loads, preemptions and chunks."""
        task = {
            "options": {"host_bytes": HOST}, "at_once": 8, "blocks": 90,
            "engine": {"max_num_batched_tokens": 256},
        }  # fmt: skip
        return self._compare(self._start(task).end())

    def separate(self) -> dict[str, Any]:
        """Serve with scheduler and worker in different processes, and a store."""
        task = {
            "options": self._store_options("separate", host_bytes=SMALL_HOST), "separate": True,
            "engine": {"distributed_executor_backend": "mp"},
        }  # fmt: skip
        return self._compare(self._start(task).end())

    def tensor_parallel(self) -> dict[str, Any]:
        """Serve with two workers, each with half of the heads."""
        task = {
            "options": self._store_options("tensor", host_bytes=SMALL_HOST // 2), "separate": True,
            "engine": {"tensor_parallel_size": 2},
        }  # fmt: skip
        return self._compare(self._start(task).end())

    def kill(self) -> dict[str, Any]:
        """Kill an engine in mid-save, and start it again on the same store, several times."""
        options = self._store_options("kill", host_bytes=SMALL_HOST)
        rng, found = random.Random(1), []
        for _ in range(2):
            served = self._start({"options": options})
            stop_at = rng.randrange(len(self.prompts) // 8, len(self.prompts) // 2)
            for line in served.lines():
                if line.get("start", 0) >= stop_at:
                    time.sleep(rng.random() * 0.05)
                    served.process.kill()
                    break
            served.process.wait()
            found.append(self._compare(served)["cached_tokens"])
        last = self._compare(self._start({"options": options}).end())
        assert last["cached_tokens"] > max(found)
        return {**last, "cached_tokens_of_killed": found}

    def store(self) -> dict[str, Any]:
        """Serve with engines on one store, one after the other and two at once."""
        options = self._store_options("shared", host_bytes=SMALL_HOST)
        first = self._compare(self._start({"options": options}).end())
        pair = [self._start({"options": options}) for _ in range(2)]
        both = [self._compare(served.end()) for served in pair]
        assert both[0]["cached_tokens"] > first["cached_tokens"]
        return {"first": first, "second": both[0], "third": both[1]}

    def _broken(self, how: str, options: dict[str, Any]) -> dict[str, Any]:
        half = len(self.prompts) // 8 * 4
        task = {"options": options, "break": how, "break_at": half}
        return self._compare(self._start(task).end())

    def failing_store(self) -> dict[str, Any]:
        """Serve with a store that fails from the middle on."""
        return self._broken("errors", self._store_options("broken", host_bytes=SMALL_HOST))

    def hanging_store(self) -> dict[str, Any]:
        """Serve with a store that hangs from the middle on."""
        return self._broken("hangs", self._store_options("hang", host_bytes=SMALL_HOST))

    def failed_loads(self) -> dict[str, Any]:
        """Serve while many loads to the device fail, from the middle on."""
        return self._broken("loads", {"host_bytes": HOST})

    def _store_options(self, name: str, *, host_bytes: int) -> dict[str, Any]:
        url = f"file:{self._folder}/{name}-{os.getpid()}"
        return {
            "host_bytes": host_bytes, "stores": [{"url": url, "capacity_bytes": STORE_BYTES}]
        }  # fmt: skip


CHECKS: dict[str, Callable[[Checks], dict[str, Any]]] = {
    name: getattr(Checks, name)
    for name in (
        "host", "batches", "separate", "tensor_parallel", "kill", "store",
        "failing_store", "failed_loads", "hanging_store",
    )
}  # fmt: skip


def add_results(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write results to a file, next to earlier ones of other checks."""
    trace = arguments.trace.name if arguments.trace else "synthetic"
    facts = {
        **describe(kv.device("host")), "vllm": version("vllm-cpu"), "trace": trace,
        "layers": arguments.layers,
    }  # fmt: skip
    earlier = {}
    if arguments.json.exists():
        earlier = json.loads(arguments.json.read_text())["checks"]
    write_json(arguments.json, {**facts, "checks": {**earlier, **results}})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trace", type=Path, help="JSON lines; default: synthetic")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--layers", choices=("full", "windows", "states"), default="full")
    parser.add_argument("--only", nargs="+", choices=CHECKS, help="default: all that layers allow")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--folder", type=Path, help="keep model and tokens here, and reuse them")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--prompts", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(
            arguments.model, json.loads(arguments.serve), json.loads(arguments.prompts.read_text())
        )
        return 0
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="kvcupy-vllm-"))
    folder.mkdir(exist_ok=True)
    results: dict[str, Any] = {}
    failed = False
    try:
        if arguments.layers == "states":
            prompts = conversations(arguments.requests)
        else:
            prompts = prompts_of(arguments.trace, arguments.requests)
        checks = Checks(folder, prompts, arguments.layers)
        for name in arguments.only or (["host"] if arguments.layers == "states" else CHECKS):
            started = time.monotonic()
            try:
                results[name] = CHECKS[name](checks)
                text = json.dumps(results[name])
            except AssertionError as error:
                results[name] = {"failed": str(error)}
                text, failed = f"FAILED: {error}", True
            print(f"{name} ({time.monotonic() - started:.0f} s): {text}", flush=True)
            if arguments.json is not None:
                add_results(arguments, results)
    finally:
        if arguments.folder is None:
            with suppress(OSError):
                shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
