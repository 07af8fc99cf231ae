"""Serves prompts with vLLM on a CPU, and prints their tokens: `vllm_tier_process.py FOLDER [TIER]`.

FOLDER gets a small model with random weights; TIER is the configuration of a secondary tier. vLLM
has no worker that copies between the device cache and its CPU tier on a CPU, so `Spec` has one.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

BLOCK = 32
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",  # else it waits for hosts out of reach
}  # fmt: skip


class Worker(OffloadingWorker):
    """Copies blocks between the cache and the CPU tier at once."""

    memory: Path | None = None

    def __init__(self, caches, spec):
        self._caches = caches
        region = SharedOffloadRegion(
            engine_id=spec._engine_id, num_chunks=spec.num_chunks, rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )  # fmt: skip
        Worker.memory = Path(region.mmap_path)
        self._chunks = [region.create_next_worker_view(t.page_size_bytes) for t in caches.tensors]
        self._finished = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(self, job_id, blocks, chunks, *, is_store):
        pairs = zip(blocks.block_ids, chunks.chunk_ids, strict=True)
        for refs, count in zip(self._caches.group_data_refs, blocks.group_sizes, strict=True):
            for _ in range(count):
                block, chunk = next(pairs)
                for number in {ref.tensor_idx for ref in refs}:
                    cached = self._caches.tensors[number].tensor[block].view(torch.int8).flatten()
                    offloaded = self._chunks[number][chunk][: len(cached)]
                    target, source = (offloaded, cached) if is_store else (cached, offloaded)
                    target.copy_(source)
        self._finished.append(TransferResult(job_id=job_id, success=True))
        return True

    def get_finished(self):
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids):
        pass


class Spec(TieringOffloadingSpec):
    def get_worker(self, kv_caches):
        self._worker = self._worker or Worker(kv_caches, self)
        return self._worker


def save_model(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)  # so that tokens depend on all of the cache
    model.save_pretrained(folder)


def main(folder, tier=None):
    from vllm import LLM, SamplingParams

    model = Path(folder) / "model"
    if not model.exists():
        save_model(model)
    options = {}
    if tier is not None:
        extra = {
            "spec_name": "Spec", "spec_module_path": Path(__file__).stem,
            "cpu_bytes_to_use": 24 * BLOCK * 2**12, "secondary_tiers": [json.loads(tier)],
        }  # fmt: skip
        options["kv_transfer_config"] = {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }  # fmt: skip
    llm = LLM(
        str(model), dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
        block_size=BLOCK, max_model_len=1024, num_gpu_blocks_override=40, **options,
    )  # fmt: skip
    random.seed(1)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    prompts = [random.choices(range(512), k=10 * BLOCK + 7) for _ in range(6)]
    outputs = [
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]
        for prompt in prompts + prompts
    ]
    print(json.dumps({
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }))  # fmt: skip
    sys.stdout.flush()
    llm.llm_engine.engine_core.shutdown()
    if Worker.memory is not None:
        Worker.memory.unlink(missing_ok=True)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    sys.modules[Path(__file__).stem] = sys.modules[__name__]  # which vLLM imports
    main(*sys.argv[1:])
