"""Each family of decoders of transformers: equal to its own cache, or refused with a reason."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.24")

from small_models import CACHE  # noqa: E402
from tiny_families import FAMILIES, config_of  # noqa: E402

import kvcupy as kv  # noqa: E402
from kvcupy.interop.transformers import PagedCache  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("quick_host"),
    pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning"),
]
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
