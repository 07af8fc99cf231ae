"""FlashInfer's attention over latents: where they lie, and its plans."""

from __future__ import annotations

import math

import numpy as np
import pytest

import kvcupy as kv

torch = pytest.importorskip("torch")

from peers import attended, close, ints, rows  # noqa: E402

from kvcupy.interop import flashinfer  # noqa: E402

HEADS, LATENT, ROPE, PAGE, SCALE = 4, 64, 16, 4, 0.1
QUERY_LENS, LENGTHS = (3, 1, 0, 2), (6, 1, 0, 9)
INDPTR, INDICES = [0, 2, 3, 3, 6], [5, 0, 3, 1, 2, 4]
LATER = (1, 1, 2, 2), (3, 8, 2, 5), [0, 1, 3, 4, 6], [2, 0, 1, 5, 3, 4]


def starts_of(lengths, place):
    return ints(np.cumsum([0, *lengths]).tolist(), place, torch.int32)


def plan(wrapper, place, plans=(QUERY_LENS, LENGTHS, INDPTR, INDICES), causal=True,
         dtype=torch.float32, **changes):  # fmt: skip
    query_lens, lengths, indptr, indices = plans
    tables = {
        "qo_indptr": starts_of(query_lens, place), "kv_indptr": ints(indptr, place, torch.int32),
        "kv_indices": ints(indices, place, torch.int32),
        "kv_len_arr": ints(lengths, place, torch.int32),
    }  # fmt: skip
    options = {"causal": causal, "sm_scale": SCALE, "q_data_type": dtype, "kv_data_type": dtype}
    wrapper.plan(
        **{**tables, "num_heads": HEADS, "head_dim_ckv": LATENT, "head_dim_kpe": ROPE,
           "page_size": PAGE, **options, **changes}
    )  # fmt: skip
    return wrapper


def wrapper_of(place, **options):
    workspace = torch.empty(0, dtype=torch.uint8, device=place)
    return flashinfer.BatchMLAPagedAttentionWrapper(workspace, **options)


def inputs(place, dtype=torch.float32, seed=0, pages=6):
    q = rows(sum(QUERY_LENS) + 1, HEADS, LATENT + ROPE, place=place, seed=seed, dtype=dtype) / 4
    return q, rows(pages, PAGE, LATENT + ROPE, place=place, seed=seed + 1, dtype=dtype)


def expected_of(q, cache, plans=(QUERY_LENS, LENGTHS, INDPTR, INDICES), causal=True):
    results, start = [], 0
    for i, (count, length) in enumerate(zip(*plans[:2], strict=True)):
        pages = plans[3][plans[2][i] : plans[2][i + 1]]
        keys = cache[pages].flatten(0, 1)[:length, None]
        new, start = q[start : start + count], start + count
        results.append(attended(new, keys, keys[..., :LATENT], causal=causal, scale=SCALE))
    return [torch.cat(x) for x in zip(*results, strict=True)]


def parts_of(x, apart):
    parts = x.split([LATENT, ROPE], dim=-1)
    return [part.clone() for part in parts] if apart else parts


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pages", [6, 40])  # more than the plan has, or fewer
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_latents(place, apart, causal, dtype, tolerance, pages):
    """Side by side, where they are not copied, and apart; rows past the last token are 0."""
    q, cache = inputs(place, dtype, pages=pages)
    wrapper = plan(wrapper_of(place), place, causal=causal, dtype=dtype)
    arguments = *parts_of(q, apart), *parts_of(cache, apart)
    out, lse = wrapper.run(*arguments, return_lse=True)
    expected, expected_lse = expected_of(q, cache, causal=causal)
    assert close(out[:-1], expected.nan_to_num(), tolerance) and not out[-1].any()
    assert close(lse[:-1], expected_lse, tolerance)
    natural = wrapper.run(*arguments, return_lse=True, return_lse_base_on_e=True)[1]
    assert close(natural[:-1], expected_lse * math.log(2), tolerance)
    into = torch.ones_like(out), torch.ones_like(lse)
    assert wrapper.run(*arguments, *into, return_lse=True)[0] is into[0]
    assert torch.equal(into[0][:-1], out[:-1]) and torch.equal(into[1][:-1], lse[:-1])
    into[1].zero_()  # written without return_lse too
    assert torch.equal(wrapper.run(*arguments, lse=into[1]), out)
    assert torch.equal(into[1][:-1], lse[:-1])
    plan(wrapper, place, causal=causal, dtype=dtype, lse_mode="basee")
    assert torch.equal(wrapper.run(*arguments, return_lse=True)[1], natural)


def test_latents_without_a_rotated_key(place):
    q, cache = (x[..., :LATENT].contiguous() for x in inputs(place))
    wrapper = plan(wrapper_of(place), place, head_dim_kpe=0)
    empty = q.new_empty((*q.shape[:2], 0)), cache.new_empty((*cache.shape[:2], 0))
    out = wrapper.run(q, empty[0], cache, empty[1])
    assert close(out[:-1], expected_of(q, cache)[0].nan_to_num())


def test_latents_side_by_side_are_read_in_place(place, monkeypatch):
    q, cache = inputs(place)
    seen = []
    attend = flashinfer._kv.paged_attention
    monkeypatch.setattr(
        flashinfer._kv, "paged_attention",
        lambda *arguments, **options: (seen.append(arguments), attend(*arguments, **options)),
    )  # fmt: skip
    wrapper = plan(wrapper_of(place), place)
    wrapper.run(*parts_of(q, False), *parts_of(cache, False))
    query, keys, values = seen[0][:3]
    assert query.data_ptr() == q.data_ptr()
    assert keys.data_ptr() == values.data_ptr() == cache.data_ptr()


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("pages", [6, 40])
def test_a_page_past_the_cache_is_a_fault(device, place, apart, pages):
    """Keys of a negative page are skipped."""
    q, cache = inputs(place, pages=pages)
    for page in (pages, -1):
        indices = [page if x == 3 else x for x in INDICES]
        wrapper = plan(wrapper_of(place), place, (QUERY_LENS, LENGTHS, INDPTR, indices))
        out = wrapper.run(*parts_of(q, apart), *parts_of(cache, apart))
        if page == pages:
            with pytest.raises(kv.IndexFault, match="paged_attention"):
                kv.check_faults(device)
        else:
            kv.check_faults(device)
        expected = expected_of(q, cache)[0]
        assert close(out[:3], expected[:3]) and not out[3].any()
        assert close(out[4:6], expected[4:])


@pytest.mark.parametrize("apart", [False, True])
def test_tables_of_a_graph_stay_in_place(place, apart):
    buffers = {
        name: torch.zeros(n, dtype=torch.int32, device=place)
        for name, n in (("qo_indptr", 5), ("kv_indptr", 5), ("kv_indices", 8), ("kv_len_arr", 4))
    }
    wrapper = wrapper_of(place, use_cuda_graph=True, **buffers, max_pages_per_sequence=3)
    addresses = []
    for plans in ((QUERY_LENS, LENGTHS, INDPTR, INDICES), LATER):
        plan(wrapper, place, plans)
        addresses.append(
            [
                x.data_ptr()
                for x in (
                    wrapper._plan.block_table,
                    wrapper._plan.seq_lens,
                    wrapper._plan.query_lens,
                )
            ]
        )
        q, cache = inputs(place)
        out = wrapper.run(*parts_of(q, apart), *parts_of(cache, apart))
        assert close(out[: sum(plans[0])], expected_of(q, cache, plans)[0].nan_to_num())
        assert torch.equal(buffers["kv_len_arr"], ints(plans[1], place, torch.int32))
        assert torch.equal(buffers["qo_indptr"], starts_of(plans[0], place))
    assert addresses[0] == addresses[1]


def test_what_is_refused(place):
    q, cache = inputs(place)
    wrapper = wrapper_of(place)
    arguments = *parts_of(q, False), *parts_of(cache, False)
    with pytest.raises(RuntimeError, match="plan"):
        wrapper.run(*arguments)
    for error, name, changes in (
        (ValueError, "kv_len_arr", {"kv_len_arr": ints([9, 1, 0, 9], place)}),
        (ValueError, "kv_len_arr", {"kv_len_arr": ints([6, 1, 0], place)}),
        (ValueError, "kv_indices", {"kv_indices": ints(INDICES[1:], place)}),
        (ValueError, "qo_indptr", {"qo_indptr": ints([0, 1], place)}),
        (NotImplementedError, "use_profiler", {"use_profiler": True}),
        (ValueError, "lse_mode", {"lse_mode": "log2"}),
        (NotImplementedError, "q_data_type", {"q_data_type": torch.float8_e4m3fn}),
    ):
        with pytest.raises(error, match=f"^{name}: "):
            plan(wrapper, place, **changes)
    plan(wrapper, place)
    for position, name, value in (
        (0, "q_nope", q), (1, "q_pe", arguments[1][:1]), (1, "q_pe", arguments[1].half()),
        (2, "ckv_cache", cache), (3, "kpe_cache", arguments[3][:1]),
        (3, "kpe_cache", arguments[3].half()),
    ):  # fmt: skip
        changed = [value if i == position else x for i, x in enumerate(arguments)]
        with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
            wrapper.run(*changed)
    for name in ("profiler_buffer", "kv_len", "page_table"):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            wrapper.run(*arguments, **{name: q})
    with pytest.raises(ValueError, match=r"^qo_indptr: "):
        tables = {n: torch.zeros(4, dtype=torch.int32) for n in ("kv_indices", "kv_len_arr")}
        indptr = torch.zeros(5, dtype=torch.int32)
        wrapper_of(place, use_cuda_graph=True, qo_indptr=indptr[:2], kv_indptr=indptr, **tables)
