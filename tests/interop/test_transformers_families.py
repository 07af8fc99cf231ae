"""Each family of decoders of transformers: equal to its own cache, or refused with a reason."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

from small_models import CACHE  # noqa: E402
from transformers import CONFIG_MAPPING, PreTrainedConfig  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402

import kvcupy as kv  # noqa: E402
from kvcupy.interop.transformers import PagedCache  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("quick_host"),
    pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning"),
]
# --- A tiny configuration of each family of decoders ---

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


# --- Families ---

REFUSALS = (NotImplementedError, TypeError, ValueError, kv.KvcupyError)
# New tokens of each forward; the first that the family computes with its own cache.
SPLITS = ([6, 1, 1, 3, 1], [6, 1, 1, 1, 1, 1, 1], [1] * 12)
IDS = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(3))
# Families that have no comparison, as of transformers 5.24. One that has it fails.
WITHOUT_COMPARISON = {
    "blt": "BltConfig has no num_hidden_layers, which DynamicCache reads",
    "dory": "its masks and its own cache disagree in a window",
    "dots3_note": "its config names 42 layers; dots3_note_text is compared",
    "gemma3n": "it needs timm; gemma3n_text is compared",
    "gemma4_assistant": "it attends to the keys of another model",
    "gemma4_unified_assistant": "it attends to the keys of another model",
    "musicgen": "AutoModelForCausalLM cannot make it from its config",
    "musicgen_melody": "AutoModelForCausalLM cannot make it from its config",
    "xlstm": "its own cache does not fit small heads",
}


def compute(model, cache, split):
    """Return the logits; without a cache, with that which the model makes."""
    logits = []
    for part in IDS.split(split, 1):
        if model.config.model_type == "cpmant":  # its forward drops the tokens of the cache itself
            part = IDS[:, : sum(x.shape[1] for x in logits) + part.shape[1]]
        with torch.no_grad():
            arguments = {} if cache is None else {CACHE: cache}
            outputs = model(input_ids=part, use_cache=True, **arguments)
        if cache is None:
            cache = getattr(outputs, CACHE, None)  # none of a model that has no such argument
        logits.append(outputs.logits)
    return torch.cat(logits, 1)


def reference(name):
    """Return a tiny model, the logits with its own cache, and the new tokens of each forward."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        config_of(name), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)  # a bias that is zero at first hides that it is ignored
    for split in SPLITS[:-1]:
        try:
            return model, compute(model, None, split), split
        except (AssertionError, IndexError, RuntimeError, ValueError):
            continue
    return model, compute(model, None, SPLITS[-1]), SPLITS[-1]


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name):
    """With each attention implementation that the family has."""
    if name in WITHOUT_COMPARISON:
        with pytest.raises(Exception):  # noqa: B017
            reference(name)
        return
    model, expected, split = reference(name)
    outcomes = {}
    for implementation in ("kvcupy", "sdpa", "eager"):
        try:
            model.set_attn_implementation(implementation)
        except ValueError:  # the family has only others
            continue
        try:
            cache = PagedCache(model.config, num_pages=64, page_size=4)
            logits = compute(model, cache, split)
        except REFUSALS as error:
            assert str(error)
            outcomes[implementation] = f"{type(error).__name__}: {error}"
            continue
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        outcomes[implementation] = "equal"
    assert outcomes


REASONS = {
    "recurrent_gemma": "layer 0 keeps its state in the model",
    "jetmoe": "changes the keys of layer 0",
    "moshi": "a window, which the model does not pass",
    "phimoe": "a window, which the model does not pass",
    "inkling2_text": "no position_bias",
    "diffllama": "attends more than once",
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
    """Of the families that "kvcupy" does not compute; at the first forward, before any logits."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(name)).eval()
    model.set_attn_implementation("kvcupy")
    with pytest.raises((NotImplementedError, kv.KvcupyError), match=REASONS[name]):
        compute(model, PagedCache(model.config, num_pages=64, page_size=4), [12])


def test_layers_that_could_share_keys_and_do_not():
    """Gemma 4 marks layers whose keys an assistant may read."""
    config = config_of("gemma4_text")
    assert "store" in config.kv_sharing_modes
    PagedCache(config, num_pages=8)


def test_a_window_in_the_mask_alone_without_a_cache():
    model = transformers.AutoModelForCausalLM.from_config(config_of("phimoe")).eval()
    model.set_attn_implementation("kvcupy")
    with torch.no_grad(), pytest.raises(NotImplementedError, match="a window"):
        model(IDS, use_cache=False)
