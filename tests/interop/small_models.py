"""Small models of transformers with random weights, and what they generate."""

import inspect

import torch
import transformers

from kvcupy.interop.transformers import PagedCache

# The models' argument: "cache" since transformers 5.24, "past_key_values" before.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
ALIKE = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"sliding_window": 8, "head_dim": 16, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM", {"sliding_window": 8, "head_dim": 16, "layer_types": ALTERNATING}
    ),
    "gpt_oss": (
        "GptOssForCausalLM", {"sliding_window": 8, "head_dim": 16, "num_local_experts": 4}
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
}  # fmt: skip


LINEAR, FULL = "linear_attention", "full_attention"
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
DELTA_RULE = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_chunk_size": 4}
RECURRENT = {
    "jamba": ("JambaForCausalLM", {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1,
        "mamba_d_state": 8, "use_mamba_kernels": False,
    }),
    "bamba": ("BambaForCausalLM", {"attn_layer_indices": [1], **MAMBA2}),
    "granite4": ("GraniteMoeHybridForCausalLM", {
        "layer_types": [LINEAR, FULL, LINEAR], "num_local_experts": 2, "num_experts_per_tok": 1,
        "shared_intermediate_size": 64, **MAMBA2,
    }),
    "falcon_h1": ("FalconH1ForCausalLM", {"mamba_d_ssm": 64, **MAMBA2}),
    "qwen3_next": ("Qwen3NextForCausalLM", {
        "head_dim": 16, "layer_types": [LINEAR, FULL, LINEAR], **EXPERTS,
        "shared_expert_intermediate_size": 32, **DELTA_RULE,
    }),
    "lfm2": ("Lfm2ForCausalLM", {
        "layer_types": ["conv", FULL, "conv"], "block_auto_adjust_ff_dim": False,
    }),
    "zamba2": ("Zamba2ForCausalLM", {
        "layers_block_type": [LINEAR, "hybrid", "hybrid"], "num_mem_blocks": 1, "n_mamba_heads": 8,
        "mamba_d_state": 8, "chunk_size": 4, "attention_head_dim": 32, "num_key_value_heads": 4,
        "adapter_rank": 8,
    }),
    "nemotron_h": ("NemotronHForCausalLM", {
        "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR], "num_hidden_layers": 5,
        "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 2, "chunk_size": 4, "n_routed_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    }),
}  # fmt: skip
CHUNKED = {
    "llama4": ("Llama4ForCausalLM", {
        "attention_chunk_size": 8, "head_dim": 16, "num_local_experts": 2,
        "intermediate_size_mlp": 64, "no_rope_layers": [1, 1, 0],
    }),
}  # fmt: skip
MODELS = {**ALIKE, **RECURRENT, **CHUNKED}


def model_of(name, **changes):
    class_name, settings = MODELS[name]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**{**SMALL, **settings, **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
            elif parameter.ndim == 2 and not name.endswith("A_log"):
                parameter.mul_(4)  # far from uniform attention
    return model


def prompts(batch=3, length=17, padding=(5, 0, 11)):
    ids = torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row, count in enumerate(padding[:batch]):
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def forward(model, cache, ids, mask=None):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, **{CACHE: cache}).logits


def generate(model, implementation, cache, inputs, **options):
    """Return tokens, and logits of each step."""
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    torch.manual_seed(11)
    result = model.generate(
        **inputs, **{CACHE: cache}, return_dict_in_generate=True, output_logits=True, **options
    )
    return result.sequences, torch.stack(result.logits)


def require_same(model, inputs, implementation="kvcupy", **options):
    cache = PagedCache(model.config, num_pages=200, page_size=4)
    expected, logits = generate(model, "eager", None, inputs, **options)
    tokens, own_logits = generate(model, implementation, cache, inputs, **options)
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(own_logits, logits, rtol=1e-4, atol=1e-4)
    return cache
