"""Models of mixed layers generate with a `PagedCache` what they generate with transformers' cache.

Layers with a window have their own pages, recurrent layers states.
"""

import copy
import gc
import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.16")

from helpers import examples  # noqa: E402
from small_models import (  # noqa: E402
    CACHE,
    CHUNKED,
    RECURRENT,
    forward,
    generate,
    model_of,
    prompts,
    require_same,
)

import kvcupy as kv  # noqa: E402
from kvcupy.interop.transformers import PagedCache  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("quick_host"),
    pytest.mark.filterwarnings("error:`past_key_values`:FutureWarning"),
]


@pytest.mark.parametrize("name", CHUNKED)
def test_chunked_attention(models, name):
    """The model masks the chunks; their layers keep the tokens of one."""
    cache = require_same(models(name), prompts(), "sdpa")
    require_same(models(name), prompts(), "sdpa", num_beams=3)
    require_same(models(name), prompts(padding=(5, 8, 11)), "eager", prefill_chunk_size=5)
    require_same(models(name), prompts(1, padding=(0,)), "sdpa", prompt_lookup_num_tokens=9)
    groups = [part.group for part in cache.pages.plan().groups]
    assert {getattr(group, "window", None) for group in groups} == {None, 8}
    with pytest.raises(NotImplementedError, match="sdpa"):
        require_same(models(name), prompts())


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_assisted_generation_past_the_windows(models, name):
    """Drafts are longer than a window and a page; most of their tokens are taken back."""
    model, inputs = models(name), prompts(1, padding=(0,))
    require_same(model, inputs, prompt_lookup_num_tokens=14, max_new_tokens=20)
    assistant = model_of(name, num_hidden_layers=1, layer_types=["full_attention"])
    require_same(model, inputs, assistant_model=assistant, max_new_tokens=20)


def test_assisted_generation_over_convolutions(models):
    """Drafts are longer than the convolutions are wide; accepted, rejected, and of a model."""
    model, inputs = models("lfm2"), prompts(1, padding=(0,))
    for count in (2, 14):
        require_same(model, inputs, prompt_lookup_num_tokens=count, max_new_tokens=20)
    assistant = model_of("llama", num_hidden_layers=1)
    require_same(model, inputs, assistant_model=assistant, max_new_tokens=20)
    require_same(model, inputs, assistant_model=copy.deepcopy(model), max_new_tokens=20)


@pytest.mark.parametrize("name", [name for name in RECURRENT if name != "lfm2"])
def test_assisted_generation_is_refused_for_states(models, name):
    model, inputs = models(name), prompts(1, padding=(0,))
    cache = PagedCache(model.config, num_pages=99)
    with pytest.raises((ValueError, NotImplementedError), match=r"cropped|stateful|recurrent"):
        generate(model, "kvcupy", cache, inputs, prompt_lookup_num_tokens=3)


def table_of_models():
    """The rows of the guide's table, by model."""
    guide = Path(__file__).resolve().parents[2] / "docs" / "mixed_layers.md"
    rows = guide.read_text().split("| models |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: rest for names, *rest in cells for name in names.split(", ")}


def test_the_table_of_models(models):
    """The guide says which groups each model has; other tests, what can be done with them."""
    table = table_of_models()
    names = {title.lower().replace(" ", "").replace("-", "_"): title for title in table}
    mixed = {"mistral", "gemma2", "gemma3", "gpt_oss", *RECURRENT, *CHUNKED}
    assert set(names) == mixed
    for name, title in names.items():
        groups, attention, beams, assisted = table[title]
        model = model_with(models, name, "eager")
        cache = PagedCache(model.config, num_pages=99)
        forward(model, cache, prompts()["input_ids"])
        kinds = [type(part.group).__name__ for part in cache.pages.plan().groups]
        assert re.findall(r"`(\w+)`", groups) == kinds, title
        assert ('"kvcupy"' in attention) == (name not in CHUNKED), title
        assert (beams, assisted) == ("yes", "yes" if cache.is_croppable else "no"), title


def model_with(models, name, implementation):
    model = models(name)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba", "falcon_h1", "lfm2"])
def test_random_calls(models, name):
    """Random forwards, forks and, without states, crops: as with transformers' cache."""
    random = torch.Generator().manual_seed(5)
    model = models(name)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=random)

    for _ in range(examples(4)):
        batch, crops = int(draw(1, 4)), name in ("llama", "gemma3", "lfm2")
        own = PagedCache(model.config, num_pages=300, page_size=int(draw(1, 6)), max_batch_size=4)
        peer = transformers.DynamicCache(config=model.config)
        if crops:
            own.activate_past_recording(), peer.activate_past_recording()
        for _ in range(8):
            action = int(draw(0, 4)) if peer.get_seq_length() else 0
            if action < 2:
                count = int(draw(1, 12))
                ids = draw(3, 64, batch, count)
                model.set_attn_implementation("eager")
                expected = forward(model, peer, ids)
                model.set_attn_implementation("sdpa" if int(draw(0, 3)) == 0 else "kvcupy")
                torch.testing.assert_close(forward(model, own, ids), expected, rtol=1e-4, atol=1e-4)
                if crops:
                    left = int(draw(0, peer.get_seq_length() if name == "llama" else count))
                    peer.crop(-left), own.crop(-left)
            else:
                rows = draw(0, batch, int(draw(1, 5)))
                batch = len(rows)
                peer.reorder_cache(rows), own.reorder_cache(rows)
            assert own.get_seq_length() == peer.get_seq_length()


# --- Copies ---

COPIED = ["llama", "deepseek_v3", "gemma3", "llama4", "jamba", "falcon_h1", "lfm2"]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", COPIED)
def test_prompts_continue_copies_of_a_shared_prefix(models, name, beams, copied):
    """transformers' recipe: bit for bit what copies of its cache give, and the pages return."""
    model, shared = model_with(models, name, "sdpa"), prompts(1, 14, (0,))["input_ids"]
    caches = (
        PagedCache(model.config, num_pages=300, page_size=4, max_batch_size=3 * beams),
        transformers.DynamicCache(config=model.config),
    )
    for cache in caches:
        forward(model, cache, shared)
        cache.reorder_cache(torch.zeros(beams, dtype=torch.long))
    pages = caches[0].pages
    before = pages.num_available_pages
    options = {"max_new_tokens": 9, "num_beams": beams, "do_sample": False, "pad_token_id": 0}
    for seed in range(3):
        more = torch.randint(3, 64, (1, 3), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": torch.cat([shared, more], 1), **options, "output_logits": True}
        own, peer = (
            model.generate(**inputs, **{CACHE: fork(cache)}, return_dict_in_generate=True)
            for cache, fork in zip(caches, (copied, copy.deepcopy), strict=True)
        )
        assert torch.equal(own.sequences, peer.sequences)
        assert torch.equal(torch.stack(own.logits), torch.stack(peer.logits))
        del own
        assert pages.num_available_pages == before
        assert caches[0].get_seq_length() == 14
    del caches, cache
    assert pages.num_available_pages == pages.pool.num_pages


@pytest.mark.parametrize("implementation", ["kvcupy", "sdpa"])
@pytest.mark.parametrize("name", COPIED)
def test_copies_go_on_independently(models, name, implementation):
    """Random forwards, forks, resets and copies of a family of caches."""
    if name in CHUNKED and implementation == "kvcupy":
        implementation = "eager"
    random = torch.Generator().manual_seed(4)

    def draw(low, high, *shape):
        return torch.randint(low, high, shape, generator=random)

    model = model_with(models, name, implementation)
    own = PagedCache(model.config, num_pages=400, page_size=4, max_batch_size=24)
    family = [(own, transformers.DynamicCache(config=model.config))]
    forward(model, own, first := draw(3, 64, 2, 6))
    pages = own.pages
    model.set_attn_implementation("eager" if implementation == "kvcupy" else implementation)
    forward(model, family[0][1], first)
    for _ in range(30):
        place, action = int(draw(0, len(family))), int(draw(0, 8))
        own, peer = family[place]
        if action == 0 and len(family) < 4:
            family.append((copy.copy(own), copy.deepcopy(peer)))
        elif action == 1 and len(family) > 1:
            del family[place]
        elif action == 2 and own.batch_size > 0:
            rows = draw(0, own.batch_size, int(draw(1, 4)))
            own.reorder_cache(rows), peer.reorder_cache(rows)
        elif action == 3:
            own.reset()
            family[place] = own, transformers.DynamicCache(config=model.config)
        else:
            rows = 2 if own.batch_size < 0 else own.batch_size
            ids = draw(3, 64, rows, int(draw(1, 9)))
            model.set_attn_implementation("eager" if implementation == "kvcupy" else implementation)
            expected = forward(model, peer, ids)
            model.set_attn_implementation(implementation)
            logits = forward(model, own, ids)
            if implementation == "kvcupy":
                torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            else:
                assert torch.equal(logits, expected)
        del own, peer
    family.clear()
    assert pages.num_available_pages == min(pool.num_pages for pool in pages.pools)


def test_a_copy_of_an_unfinished_forward(models, monkeypatch):
    """The next call of any of the caches takes the forward back, also after its cache is gone."""
    model, ids = model_with(models, "jamba", "kvcupy"), prompts()["input_ids"]
    own = PagedCache(model.config, num_pages=99, page_size=4, max_batch_size=9)
    forward(model, own, ids[:, :10])
    for forgotten in (False, True):
        other = copy.copy(own)

        def fail(*args, **kwargs):
            raise RuntimeError("in the last layer")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="last layer"):
            patch.setattr(model.model.layers[2], "forward", fail)
            forward(model, other, ids[:, 10:])
        if forgotten:
            del other
        peer, third = transformers.DynamicCache(config=model.config), copy.copy(own)
        forward(model, peer, ids[:, :10])
        logits, expected = (forward(model, cache, ids[:, 10:]) for cache in (third, peer))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert own.get_seq_length() == 10
    del third, peer
    gc.collect()  # the frames of the errors
    assert own.pages.num_available_pages == own.pages.pool.num_pages - 9


def test_a_copy_without_room(models):
    model = model_with(models, "jamba", "kvcupy")
    cache = PagedCache(model.config, num_pages=99)
    forward(model, cache, prompts()["input_ids"])
    copies = []
    with pytest.raises(kv.CacheFull, match=r"^max_batch_size: no room for 3 more rows"):
        while True:
            copies.append(copy.deepcopy(cache))
    assert cache.get_seq_length() == 17 and len(cache.pages._sequences) == 3 + 3 * len(copies)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_compiled_model(models, name):
    """Decode steps are right, and nothing is compiled after the first two."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model, ids = model_with(models, name, "kvcupy"), prompts()["input_ids"]
    caches = [PagedCache(model.config, num_pages=99, page_size=4) for _ in range(2)]
    compiled, graphs = torch.compile(model, backend=counter), []
    for part in ids.split([5, *[1] * 12], 1):
        logits, expected = (
            forward(m, c, part) for m, c in zip((compiled, model), caches, strict=True)
        )
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        graphs.append(counter.frame_count)
    assert 0 < graphs[2] == graphs[-1]
    torch._dynamo.reset()


# --- Memory ---


def test_a_window_has_its_own_pages(models):
    """As many pages are in use as the window needs, while the row grows."""
    model = model_with(models, "gemma3", "kvcupy")
    cache = PagedCache(model.config, num_pages=100, page_size=4, max_batch_tokens=16)
    ids = torch.randint(3, 64, (1, 150), generator=torch.Generator().manual_seed(3))
    logits = [forward(model, cache, part) for part in ids.split(10, 1)]
    windowed, full = (
        cache.pages.pools if cache.pages.pools[0].num_layers == 2 else (cache.pages.pools[::-1])
    )
    used = [pool.num_pages - pool.allocator.num_available for pool in (windowed, full)]
    assert used == [used[0], 38] and used[0] <= 6  # a window of 8, and a page
    assert windowed.num_pages < 20 < 100 <= full.num_pages
    torch.testing.assert_close(
        torch.cat(logits, 1), forward(model, None, ids), rtol=1e-4, atol=1e-4
    )


def test_the_first_forward_may_be_longer_than_the_pages_of_a_window(models):
    """It is stored in steps, and of a window only the last tokens."""
    model = model_with(models, "gemma3", "kvcupy")
    for padding in ((0, 0, 0), (5, 0, 60)):
        cache = PagedCache(model.config, num_pages=100, page_size=4, max_batch_tokens=16)
        inputs = prompts(length=81, padding=padding)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        forward(model, cache, ids[:, :80], mask[:, :80])
        last = forward(model, cache, ids[:, 80:], mask)
        whole = forward(model, PagedCache(model.config, num_pages=100), ids, mask)
        torch.testing.assert_close(last[:, 0], whole[:, -1], rtol=1e-4, atol=1e-4)
        assert min(pool.num_pages for pool in cache.pages.pools) < 40


def test_the_first_forward_of_a_model_with_states(models):
    """It is stored in one step, although a row ends before the others."""
    model, inputs = model_with(models, "granite4", "kvcupy"), prompts(length=20)
    cache = PagedCache(model.config, num_pages=100, page_size=4, max_batch_tokens=6)
    peer = transformers.DynamicCache(config=model.config)
    ids, mask = inputs["input_ids"], inputs["attention_mask"].flip(1)
    for part, seen in ((ids[:, :19], mask[:, :19]), (ids[:, 19:], mask)):
        own, expected = (forward(model, c, part, seen) for c in (cache, peer))
    rows = mask[:, 19].bool()
    torch.testing.assert_close(own[rows], expected[rows], rtol=1e-4, atol=1e-4)


def test_states_are_of_the_models_format(models):
    model = model_of("jamba").bfloat16()
    model.set_attn_implementation("kvcupy")
    own = PagedCache(model.config, num_pages=99)
    peer = transformers.DynamicCache(config=model.config)
    ids = prompts()["input_ids"]
    forward(model, own, ids), forward(model, peer, ids)
    states = peer.layers[0].conv_states[0], peer.layers[0].recurrent_states[0]
    assert own.get_conv_state(0).dtype == states[0].dtype == torch.bfloat16
    assert own.get_recurrent_state(0).dtype == states[1].dtype
    assert torch.equal(own.get_conv_state(0), states[0])


# --- Errors ---


@pytest.mark.parametrize("name", ["jamba", "zamba2", "lfm2"])
def test_a_forward_that_fails_changes_no_state(models, name, monkeypatch):
    """It fails in the last layer, when the others have updated their states."""
    model, ids = model_with(models, name, "kvcupy"), prompts()["input_ids"]
    own = PagedCache(model.config, num_pages=99, page_size=4)
    peer = transformers.DynamicCache(config=model.config)

    def fail(*args, **kwargs):
        raise RuntimeError("in the last layer")

    for part in ids.split([10, 1, 6], 1):
        before = own.get_seq_length()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="last layer"):
            patch.setattr(model.model.layers[2], "forward", fail)
            forward(model, own, part)
        assert own.get_seq_length() == before
        logits, expected = forward(model, own, part), forward(model, peer, part)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_states_cannot_be_taken_back(models):
    model = model_with(models, "jamba", "kvcupy")
    cache = PagedCache(model.config, num_pages=99)
    assert not all(layer.is_croppable for layer in cache.layers), "nor before a forward"
    forward(model, cache, prompts()["input_ids"])
    assert not all(layer.is_croppable for layer in cache.layers)
    cache.crop(0)
    with pytest.raises(NotImplementedError, match="recurrent"):
        cache.crop(-1)
    assert cache.get_seq_length() == 17


def test_convolutions_that_have_moved_on(models):
    """A row continues as if the removed tokens had never been, as far as inputs are recorded."""
    model, inputs = model_with(models, "lfm2", "kvcupy"), prompts(padding=(5, 0, 16))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = PagedCache(model.config, num_pages=99, page_size=4)
    forward(model, cache, ids[:, :12], mask[:, :12])
    with pytest.raises(kv.KvcupyError, match="convolutions have left behind"):
        cache.crop(-1)
    cache.activate_past_recording()
    forward(model, cache, ids[:, 12:16], mask[:, :16])
    with pytest.raises(kv.KvcupyError, match="convolutions have left behind"):
        cache.crop(-5)
    assert cache.get_seq_length() == 16
    fork = copy.copy(cache)
    fork.reorder_cache(torch.tensor([1, 0, 2, 1]))
    for own, rows, count in ((cache, [0, 1, 2], 2), (fork, [1, 0, 2, 1], 4)):
        own.crop(-count)
        whole = PagedCache(model.config, num_pages=99, page_size=4)
        part, seen = ids[rows][:, 16 - count :], mask[rows]
        forward(model, whole, ids[rows][:, : 16 - count], seen[:, : 16 - count])
        for own_part, own_mask in (
            (part[:, :1], seen[:, : 17 - count]), (part[:, 1:], seen)
        ):  # fmt: skip
            logits, expected = (forward(model, c, own_part, own_mask) for c in (own, whole))
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_windows_that_have_moved_on(models):
    model = model_with(models, "gemma3", "kvcupy")
    cache = PagedCache(model.config, num_pages=99, page_size=4)
    ids = torch.randint(3, 64, (1, 60), generator=torch.Generator().manual_seed(3))
    for part in ids.split(10, 1):
        forward(model, cache, part)
    with pytest.raises(kv.KvcupyError, match="activate_past_recording"):
        cache.crop(-30)
    assert cache.get_seq_length() == 60


def test_too_few_pages_in_the_first_forward(models):
    model = model_with(models, "gemma3", "kvcupy")
    cache, ids = PagedCache(model.config, num_pages=10, page_size=4), prompts()["input_ids"]
    with pytest.raises(kv.CacheFull):
        forward(model, cache, ids)
    assert cache.pages is None and cache.get_seq_length() == 0
    forward(model, cache, ids[:2])
    assert cache.get_seq_length() == 17


@pytest.mark.parametrize("name", ["max_batch_size", "max_batch_tokens"])
def test_refused_arguments(models, name):
    with pytest.raises(ValueError, match=name):
        PagedCache(models("gemma3").config, num_pages=4, **{name: 0})


def test_a_model_with_its_own_cache():
    """The model says so itself."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    config = transformers.MiniMaxConfig(**sizes, **heads)
    model = transformers.MiniMaxForCausalLM(config).eval()
    with pytest.raises(ValueError, match="cache of its own"):
        forward(model, PagedCache(config, num_pages=4), torch.ones(1, 3, dtype=torch.long))
