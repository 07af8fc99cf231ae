"""scripts/quantisation_study.py: that it measures what caches hold, and attention over it."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvcupy as kv
from kvcupy import reference

pytestmark = pytest.mark.usefixtures("scripts_on_path")

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def scheme_of(fmt, **fields):
    from quantisation_study import Scheme

    return Scheme(fmt, **fields)


def rows_of(scheme, tokens=24, heads=2, width=32):
    """Queries of twice the heads, and rows as a scheme stores them."""
    from quantisation_study import cached

    table = reference.rope_table(tokens, width)
    keys, values = normal(tokens, heads, width), normal(tokens, heads, width)
    return normal(tokens, 2 * heads, width), cached(scheme, keys, values, table)


@pytest.mark.usefixtures("lenient_host")
@pytest.mark.parametrize(("fmt", "fields", "suffix"), [
    ("int8", {}, ""), ("nvfp4", {}, ""), ("int4", {"hadamard": True}, "+hadamard"),
    ("nvfp4", {"hadamard": True, "four_over_six": True}, "+hadamard+four_over_six"),
])  # fmt: skip
def test_rows_are_what_a_cache_holds(fmt, fields, suffix):
    rows, slots, device = normal(8, 2, 64), np.arange(8), kv.device("host")
    cache = [device.zeros((8, 2, 64), fmt + suffix) for _ in "kv"]
    scales = {f"{x}_scale_cache": np.zeros((8, 2), np.float32) for x in "kv" if fmt == "int8"}
    kv.store_kv(rows, rows, *cache, slots, **scales)
    held, _ = kv.gather_kv(*cache, slots, dtype="fp32", **scales)
    np.testing.assert_array_equal(scheme_of(fmt, **fields).stored(rows), held)


@pytest.mark.parametrize("recent, sinks", [(0, 0), (5, 0), (0, 3), (5, 3), (1, 1)])
def test_attention_by_one_query_at_a_time(recent, sinks):
    from quantisation_study import attend

    scheme = scheme_of("int4", recent=recent, sinks=sinks)
    query, rows = rows_of(scheme)
    got = attend(scheme, query, rows, 0.3)
    for i in range(len(query)):
        in_16_bits = [i - j < recent or j < sinks for j in range(i + 1)]
        for head in range(4):
            keys, values = (
                np.where(np.array(in_16_bits)[:, None], exact[: i + 1, head // 2],
                         past[: i + 1, head // 2]).astype(np.float64)
                for exact, past in ((rows.recent_keys, rows.keys),
                                    (rows.recent_values, rows.values))
            )  # fmt: skip
            logits = keys @ query[i, head] * 0.3
            weight = np.exp(logits - logits.max())
            want = weight @ values / weight.sum()
            np.testing.assert_allclose(got[i, head], want, rtol=0, atol=1e-5)


def test_projections_of_a_gguf_file_pair_the_halves_of_heads():
    from quantisation_study import rope
    from serving.gguf import halves_paired

    weight, x, table = normal(2 * 8, 5), normal(6, 5), reference.rope_table(6, 8)
    halves = rope((x @ halves_paired(weight, 2).T).reshape(6, 2, 8), table)
    cosine, sine = (np.asarray(half, np.float64) for half in np.split(table, 2, axis=1))
    neighbours = reference.rotate((x @ weight.T).reshape(6, 2, 8), cosine, sine, interleaved=True)
    products = [np.einsum("ihd,jhd->hij", rows, rows) for rows in (halves, neighbours)]
    np.testing.assert_allclose(*products, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_the_model_is_the_one_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from quantisation_study import log_probabilities
    from serving.gguf import NAMES, GgufFile
    from serving.llama import Llama

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
        initializer_range=0.3,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).float().eval()
    file = GgufFile.__new__(GgufFile)
    file.layers, file.heads, file.kv_heads, file.width = 2, 4, 2, 16
    file.rope_base, file.eps, file.weights = 10000.0, np.float32(config.rms_norm_eps), {}
    for name, value in theirs.named_parameters():
        words = name.removesuffix(".weight").split(".")
        layer = words[1] == "layers"
        own = NAMES[".".join(words[3:] if layer else words)]
        at = f"blk.{words[2]}." if layer else ""
        file.weights[f"{at}{own}.weight"] = value.detach().numpy()
    device = kv.device("host")
    model = Llama(device, *file.load(device), context=20)
    tokens = RNG.integers(0, 61, 20)
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)[None]).logits[0]
    want = torch.log_softmax(logits, -1).numpy()[5:20]
    got, coarse = (
        log_probabilities(model, tokens, scheme_of(fmt))[5:20] for fmt in ("bf16", "nvfp4")
    )
    error, coarse_error = (np.abs(np.exp(x) - np.exp(want)).max() for x in (got, coarse))
    assert error < 0.02 < coarse_error  # theirs keeps keys and values in fp32


def test_report_of_drawn_rows(tmp_path):
    import quantisation_study

    path = tmp_path / "study.json"
    arguments = ["--tokens", "8", "--seeds", "1", "--no-model", "--json", str(path)]
    assert quantisation_study.main(arguments) == 0
    report = json.loads(path.read_text())
    rows = {(row["rows"], row["scheme"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 3 * len(quantisation_study.ROW_SCHEMES)
    assert rows["llama", "bf16"]["output_error"] == 0
    assert rows["llama", "nvfp4"]["bits"] == 4.5
    assert 0 < rows["llama", "nvfp4"]["output_error"] < rows["llama", "int4"]["output_error"]
