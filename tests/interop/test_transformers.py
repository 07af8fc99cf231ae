"""Generation with a `PagedCache` gives what transformers' own cache gives."""

import copy
import importlib
import re
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.16")

from small_models import ALIKE, CACHE, RECURRENT, forward, generate, model_of, prompts, require_same  # noqa: E402

import kvcupy as kv  # noqa: E402
import kvcupy.interop.transformers  # noqa: E402
from kvcupy.interop.transformers import PagedCache, attention_forward  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("quick_host"),
    pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning"),
]


@pytest.mark.parametrize("by_kvcupy", [True, False])
@pytest.mark.parametrize("name", [*ALIKE, *RECURRENT])
def test_greedy(models, name, by_kvcupy):
    """Rows of different lengths, padded on the left; windows shorter than the rows."""
    own = "sdpa" if name in RECURRENT else "eager"
    require_same(models(name), prompts(), "kvcupy" if by_kvcupy else own)


@pytest.mark.parametrize("name", [*ALIKE, *RECURRENT])
def test_beam_search(models, name):
    """Rows are forked, and with them their states."""
    cache = require_same(models(name), prompts(), num_beams=3, num_return_sequences=2)
    assert cache.batch_size == 9


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_samples_of_one_prompt(models, name):
    require_same(models(name), prompts(2), do_sample=True, num_return_sequences=3, top_k=5)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_assisted_generation(models, name):
    """Tokens that the assistant drafts and the model rejects are cropped."""
    model = models(name)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(parameter.abs().mean() * torch.randn_like(parameter) / 4)
    inputs = prompts(1, padding=(0,))
    require_same(model, inputs, assistant_model=assistant)
    require_same(model, inputs, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "qwen3_next", "lfm2", "zamba2"])
def test_a_second_turn_continues_the_first(models, name):
    model, inputs = models(name), prompts(2)
    caches = {
        "eager": transformers.DynamicCache(config=model.config),
        "kvcupy": PagedCache(model.config, num_pages=99, page_size=4),
    }
    turns = {}
    for implementation, cache in caches.items():
        first, _ = generate(model, implementation, cache, inputs)
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, 12 + 3, dtype=torch.long)], 1)
        more = {"input_ids": torch.cat([first, first[:, 6:9]], 1), "attention_mask": mask}
        turns[implementation] = generate(model, implementation, cache, more)[0]
    assert torch.equal(turns["eager"], turns["kvcupy"])


@pytest.mark.parametrize("name", ["gemma3", *RECURRENT])
def test_prefill_in_chunks(models, name):
    """The first chunk is padding in two rows, or in all."""
    require_same(models(name), prompts(padding=(5, 8, 11)), prefill_chunk_size=5)
    if name == "gemma3":
        require_same(models(name), prompts(padding=(5, 0, 11)), prefill_chunk_size=5)


def logits_of(model, implementation, inputs, **options):
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        return model(**inputs, **options).logits.float()[inputs["attention_mask"].bool()]


QUANTISED = {"bf16": 0.02, "fp8_e4m3": 0.1, "int8": 0.03, torch.float8_e5m2: 0.2, None: 0.03}


@pytest.mark.parametrize("own", ["kvcupy", "sdpa"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised(models, dtype, own):
    """Logits of one forward differ by what the format rounds away; None: a bf16 model."""
    model = models("llama") if dtype else model_of("qwen3").bfloat16()
    inputs, cache = prompts(), PagedCache(model.config, num_pages=99, dtype=dtype)
    expected = logits_of(model, "eager", inputs)
    difference = logits_of(model, own, inputs, **{CACHE: cache}) - expected
    assert 0 < difference.norm() / expected.norm() < QUANTISED[dtype]
    assert dtype is not None or cache.pages.pool.dtype == "bf16"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("padded", [False, True])
def test_without_a_cache(models, name, padded):
    inputs = prompts(padding=(5, 0, 11) if padded else (0, 0, 0))
    own, expected = (
        logits_of(models(name), implementation, inputs, use_cache=False)
        for implementation in ("kvcupy", "eager")
    )
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
def test_not_causal(by_layer, padded):
    query, key, value = torch.randn(3, 2, 4, 7, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :3] = not padded
    layer = types.SimpleNamespace(is_causal=False) if by_layer else types.SimpleNamespace()
    options = {} if by_layer else {"is_causal": False}
    own, _ = attention_forward(layer, query, key, value, mask if padded else None, **options)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask[:, None, None]
    ).transpose(1, 2)
    torch.testing.assert_close(own[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert not own[~mask].any()


def test_refused_masks(models):
    """Masks that would be ignored silently."""
    model, ids = models("llama"), prompts()["input_ids"]
    model.set_attn_implementation("kvcupy")
    packed = torch.arange(17).repeat(3, 1) % 8
    with torch.no_grad(), pytest.raises(NotImplementedError, match="packed"):
        model(ids, position_ids=packed, use_cache=False)
    config = model.config
    chunked = copy.deepcopy(config)
    chunked.attention_chunk_size = 4
    from transformers.masking_utils import create_causal_mask

    arguments = {
        "inputs_embeds": torch.zeros(3, 17, 64), "attention_mask": None, CACHE: None,
        "position_ids": None,
    }  # fmt: skip
    with pytest.raises(NotImplementedError, match="chunks"):
        create_causal_mask(config=chunked, **arguments)
    with pytest.raises(NotImplementedError, match="images"):
        create_causal_mask(config=config, or_mask_function=lambda b, h, q, k: q < 3, **arguments)


# --- Pages ---


@pytest.fixture
def llama(models):
    model = models("llama")
    model.set_attn_implementation("kvcupy")
    return model


def state(cache):
    pages = cache.pages
    lengths = [pages.sequence_length(seq) for seq in cache._rows] if pages else []
    free = pages.num_available_pages if pages else None
    return cache.get_seq_length(), lengths, free, cache.batch_size


def test_padding_takes_no_pages(llama):
    cache, inputs = PagedCache(llama.config, num_pages=20, page_size=4), prompts()
    forward(llama, cache, inputs["input_ids"], inputs["attention_mask"])
    assert state(cache) == (17, [12, 17, 6], 20 - 3 - 5 - 2, 3)


def test_rows_that_are_forked_share_pages(llama):
    cache = PagedCache(llama.config, num_pages=20, page_size=4)
    forward(llama, cache, prompts(2, 10, (0, 0))["input_ids"])
    cache.reorder_cache(torch.tensor([1, 1, 1]))
    assert state(cache) == (10, [10, 10, 10], 20 - 3 - 2, 3)  # a partial page each
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert state(cache) == (10, [10, 10], 20 - 3 - 1, 2)
    cache.batch_repeat_interleave(2)
    assert state(cache) == (10, [10] * 4, 20 - 3 - 3, 4)


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("padding", [(0, 0, 0), (5, 0, 11)])
def test_rows_after_reorder_and_crop(llama, padding, count):
    """Each row continues as if computed alone; one of them has fewer than 8 tokens."""
    inputs = prompts(padding=padding)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    new = torch.randint(3, 64, (4, 3))
    parents = [2, 0, 0, 1]
    ids = torch.cat([ids[parents][:, :-count], new], 1)
    mask = torch.cat([mask[parents][:, :-count], torch.ones_like(new)], 1)
    logits = {}
    for name in ("whole", "cropped"):
        cache = PagedCache(llama.config, num_pages=40, page_size=4)
        if name == "cropped":
            forward(llama, cache, inputs["input_ids"], inputs["attention_mask"])
            cache.reorder_cache(torch.tensor(parents))
            cache.crop(-count)
            logits[name] = forward(llama, cache, new, mask)
        else:
            logits[name] = forward(llama, cache, ids, mask)[:, -3:]
    torch.testing.assert_close(logits["cropped"], logits["whole"], rtol=1e-4, atol=1e-4)


def test_reset(llama):
    cache, ids = PagedCache(llama.config, num_pages=20, page_size=4), prompts()["input_ids"]
    first = forward(llama, cache, ids)
    cache.reset()
    assert state(cache) == (0, [], 20, -1)
    assert torch.equal(forward(llama, cache, ids[:2]), first[:2])


# --- Errors ---


def test_a_forward_that_fails_changes_nothing(llama, monkeypatch):
    cache, ids = PagedCache(llama.config, num_pages=20, page_size=4), prompts()["input_ids"]

    def fail(*args, **kwargs):
        raise RuntimeError("in the second layer")

    for before in (0, 10):
        if before:
            forward(llama, cache, ids[:, :before])
        expected = state(cache)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(llama.model.layers[1].mlp, "forward", fail)
            forward(llama, cache, ids[:, before:])
        cache.crop(0)  # takes back what the forward has begun
        assert state(cache)[:2] == expected[:2]
    whole = PagedCache(llama.config, num_pages=20, page_size=4)
    torch.testing.assert_close(
        forward(llama, cache, ids[:, 10:]), forward(llama, whole, ids)[:, 10:], rtol=1e-4, atol=1e-4
    )


def test_too_few_pages(llama):
    cache, ids = PagedCache(llama.config, num_pages=10, page_size=4), prompts()["input_ids"]
    forward(llama, cache, ids[:, :11])
    expected = state(cache)
    with pytest.raises(kv.CacheFull):
        forward(llama, cache, ids[:, 11:])
    with pytest.raises(kv.CacheFull):
        cache.reorder_cache(torch.tensor([0, 0, 0]))  # one of two forks
    assert state(cache) == expected
    forward(llama, cache, ids[:, 11:12])  # the last slot of each row's pages
    with pytest.raises(kv.CacheFull, match=r"all 2 pages \(num_pages\) hold 8"):
        forward(llama, PagedCache(llama.config, num_pages=2, page_size=4), ids)


def test_a_copy_without_pages(llama):
    cache, ids = PagedCache(llama.config, num_pages=10, page_size=4), prompts()["input_ids"]
    forward(llama, cache, ids[:, :11])
    expected = state(cache)
    with pytest.raises(kv.CacheFull, match=r"^num_pages: no room for 3 more rows"):
        copy.deepcopy(cache)
    assert state(cache) == expected


def test_refused_calls(llama):
    cache, inputs = PagedCache(llama.config, num_pages=20, page_size=4), prompts()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    forward(llama, cache, ids, mask)
    before = state(cache)
    new, ones = ids[:, :1], torch.ones(3, 1, dtype=torch.long)
    longer, key = torch.cat([mask, ones], 1), torch.zeros(3, 2, 1, 16)

    def go(*arguments, implementation="kvcupy"):
        llama.set_attn_implementation(implementation)
        forward(llama, cache, *arguments)

    for match, call in {
        "attention_mask: .*no change": lambda: go(new, torch.cat([1 - mask, ones], 1)),
        "attention_mask: .*earlier tokens": lambda: go(new),
        r"attention_mask: .*\(3, 18\)": lambda: go(new, mask),
        "key_states: .*batch of 3": lambda: go(new[:2], longer[:2]),
        "attention_mask: .*sdpa": lambda: go(new, torch.zeros(3, 1, 1, 18)),
        "attn_implementation: .*'kvcupy' .*padding": lambda: go(
            new, longer, implementation="eager"
        ),
        "tokens_to_remove: .*-17 to 0, got 3": lambda: cache.crop(3),
        "tokens_to_remove: .*-17 to 0, got -18": lambda: cache.crop(-18),
        "beam_idx: .*0 to 2, got 3": lambda: cache.reorder_cache(torch.tensor([0, 3])),
        "repeats": lambda: cache.batch_repeat_interleave(0),
        "heads and widths": lambda: cache.update(key[..., :8], key, 1),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
        assert state(cache) == before
    with pytest.raises(TypeError, match=r"tokens_to_remove: expected an int, got -1.5"):
        cache.crop(-1.5)
    with pytest.raises(kv.KvcupyError, match="layer_idx: expected layer 0 next, got 1"):
        cache.attend(1, torch.zeros(3, 4, 1, 16), key, key)
    assert state(cache) == before


def test_training_is_refused(llama):
    ids = prompts()["input_ids"]
    with pytest.raises(TypeError, match="no_grad"):
        llama(ids, **{CACHE: PagedCache(llama.config, num_pages=20)})
    llama.train()
    llama.config.attention_dropout = 0.5
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.5
    try:
        with torch.no_grad(), pytest.raises(ValueError, match="dropout"):
            llama(ids, **{CACHE: PagedCache(llama.config, num_pages=20)})
    finally:
        llama.eval()
        llama.config.attention_dropout = 0.0
        for layer in llama.model.layers:
            layer.self_attn.attention_dropout = 0.0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"num_pages": 0}, ValueError),
        ({"num_pages": 1.5}, TypeError),
        ({"page_size": 0}, ValueError),
        ({"config": object()}, TypeError),
    ],
)
def test_refused_arguments(llama, changes, error):
    arguments = {"config": llama.config, "num_pages": 4, **changes}
    with pytest.raises(error, match=next(iter(changes))):
        PagedCache(**arguments)


def test_older_releases_are_refused(monkeypatch):
    """The floor is one in all places that name it."""
    root = Path(__file__).resolve().parents[2]
    floor = re.search(r'"transformers>=(5\.\d+)"', (root / "pyproject.toml").read_text())[1]
    assert f'"transformers>={floor},<6"' in (root / "scripts/common/needs.py").read_text()
    assert f"release {floor}" in (root / "docs/torch_and_transformers.md").read_text()
    monkeypatch.setattr("transformers.__version__", "5.15.1")
    with pytest.raises(
        ImportError, match=rf"^transformers: expected release {floor} or newer, got"
    ):
        importlib.reload(kvcupy.interop.transformers)


def test_refused_models():
    config = transformers.Qwen3Config(num_hidden_layers=2, layer_types=["full_attention"] * 2)
    config.layer_types[1] = "indexed_attention"
    with pytest.raises(NotImplementedError, match="layer 1 is indexed_attention"):
        PagedCache(config, num_pages=4)
    config.layer_types = ["linear_attention"] * 2
    with pytest.raises(NotImplementedError, match="at least one layer with attention"):
        PagedCache(config, num_pages=4)
    mixed = transformers.LlamaConfig(num_hidden_layers=2)
    mixed.per_layer_config = {1: {"num_attention_heads": 16}}
    with pytest.raises(NotImplementedError, match=r"num_attention_heads .*\[32, 16\]"):
        PagedCache(mixed, num_pages=4)
    config.layer_types, config.num_kv_shared_layers = ["full_attention"] * 2, 1
    with pytest.raises(NotImplementedError, match="layers that share them"):
        PagedCache(config, num_pages=4)
