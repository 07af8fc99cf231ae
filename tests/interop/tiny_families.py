"""A tiny configuration of each family of decoders that transformers has."""

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

FAMILIES = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
WIDTH, HEADS, LAYERS = 32, 4, 2
# Of the arguments of a configuration, those that it has.
SMALL = {
    "vocab_size": 64, "vocab_size_per_layer_input": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "is_decoder": True, "is_encoder_decoder": False,
    **dict.fromkeys(("hidden_size", "d_model", "embedding_size", "lru_width"), WIDTH),
    **dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim",
         "ffn_dim", "dff", "dim_ff", "expert_ffn_hidden_size", "ffn_hidden_size",
         "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size",
         "shared_intermediate_size", "intermediate_size_mlp", "hidden_size_per_layer_input",
         "mlp_hidden_size", "prefix_lm_hidden_size"), WIDTH
    ),
    "num_hidden_layers": LAYERS, "num_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_layers": LAYERS, "first_k_dense_replace": 1,
    **dict.fromkeys(
        ("num_attention_heads", "decoder_attention_heads", "encoder_attention_heads", "n_heads"),
        HEADS,
    ),
    "num_key_value_heads": 2, "head_dim": 8, "d_head": 8, "attention_head_dim": 8,
    "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window": 4, "attention_chunk_size": 4,
    # Experts
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    # Latents
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4,
    # States
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_d_head": "auto",
    "mamba_chunk_size": 4, "mamba_d_ssm": 64, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "ssm_state_size": 8, "chunk_size": 4, "use_mamba_kernels": False,
}  # fmt: skip


# What a family needs besides.
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"]}
QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
SPECIAL = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "dots3_note_text": {
        "per_layer_config": None, "layer_types": ["full_attention"] * 2, "num_hidden_layers": 2,
        "num_key_value_heads": 4,
    },
    "codegen": {"rotary_dim": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": ALTERNATING,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "prophetnet": {
        "num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
        "num_decoder_attention_heads": 4,
    },
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"enable_shape": False, "enable_pronunciation": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 11, "n_mamba_heads": 2},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3,
        "num_mem_blocks": 1, "n_mamba_heads": 8, "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def small_of(config_class):
    """Return arguments for a tiny configuration, of its parts too."""
    default, arguments = config_class(), {}
    default.allow_global_per_layer_attribute_access = True
    for name, value in SMALL.items():
        is_other = (
            default.attribute_map.get(name, name) != name and default.attribute_map[name] in SMALL
        )
        is_fixed = isinstance(getattr(config_class, name, None), property)
        if hasattr(default, name) and not is_other and not is_fixed:
            arguments[name] = value
    if "kv_lora_rank" in arguments and "num_key_value_heads" in arguments:
        arguments["num_key_value_heads"] = HEADS
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            arguments[name] = small_of(type(value))
    types = getattr(default, "layer_types", None)
    if types is not None:  # as many layers as have all types
        arguments["num_hidden_layers"] = max(LAYERS, 1 + max(map(types.index, types)))
    return {**arguments, **SPECIAL.get(config_class.model_type, {})}


def config_of(name):
    config_class = CONFIG_MAPPING[name]
    return config_class(**small_of(config_class))
