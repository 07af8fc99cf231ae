"""Which kernels `paged_attention` launches, and into how many splits it cuts the keys."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from attention_cases import attend
from helpers import DTYPE, name_values

import kvcupy as kv
from kvcupy import devices, ops
from kvcupy.arrays import view
from kvcupy.config import SHARED_BYTES, shared_bytes
from kvcupy.devices.host import HostDevice
from kvcupy.formats import FOUR_BIT
from kvcupy.ops import attention_choice, attention_kernels, launch
from kvcupy.ops import call as op_call
from kvcupy.ops.attention import check_call, check_options
from kvcupy.ops.attention_call import AttentionArrays

ROOT = Path(__file__).resolve().parents[2]


class Watched(HostDevice):
    """A host device that reports the geometry of a GPU of 132 SMs, and records its launches."""

    def __init__(self, warp_lanes=32):
        super().__init__()
        self.sm_count, self.warp_lanes = 132, warp_lanes
        self.launches = []

    def launch(self, function, grid, block, smem_bytes, params, stream, keep=()):
        self.launches.append((function.specialisation.kernel.name, grid))
        super().launch(function, grid, block, smem_bytes, params, stream, keep)


@pytest.fixture
def watch(monkeypatch):
    def make(**options):
        device = Watched(**options)
        monkeypatch.setitem(devices._devices, "host", device)
        monkeypatch.setattr(op_call, "_plans", {})
        monkeypatch.setattr(kv.config, "fallback", "error")
        return device

    return make


def launched(device, *, sequences=1, new=None, heads=(4, 2), dtype=np.float16, width=64,
             cache_dtype=None, max_pages=64, **options):  # fmt: skip
    """Return names and grids of the launches of a call; most of the table is unused."""
    tokens = sequences * (new or 1)
    query = np.ones((tokens, heads[0], width), dtype)
    if cache_dtype in FOUR_BIT:
        cache = cache_of(cache_dtype, width, 4, 16, heads[1])
    else:
        cache = np.ones((4, 16, heads[1], width), cache_dtype or dtype)
    table = np.zeros((sequences, max_pages), np.int32)
    lens = np.full(sequences, max(20, new or 1))
    if new is not None:
        options["query_lens"] = np.full(sequences, new)
    attend(query, cache, cache, table, lens, **options)
    return device.launches


def names(launches):
    return [name for name, _ in launches]


def test_a_single_sequence_is_split_and_merged_by_its_last_block(watch):
    launches = launched(watch())
    assert names(launches) == ["attention_schedule", "attention_decode_mma"]
    assert launches[1][1] == (2, 1 + 64 * 16 // 256, 1)  # no piece of less than 256 keys


def test_a_kernel_merges_the_pieces_of_tiles_with_many_rows(watch):
    launches = launched(watch(), new=16)
    parts = ["attention_starts", "attention_schedule", "attention_prefill", "merge_many"]
    assert names(launches) == parts


def test_the_lengths_of_a_captured_step_may_change(watch):
    """Equal shapes take equal launches, whatever the lengths are."""
    device = watch()
    rng = np.random.default_rng(3)
    cache = rng.standard_normal((300, 16, 2, 64)).astype(np.float16)
    table = np.arange(300, dtype=np.int32).reshape(3, 100)
    query = rng.standard_normal((3, 8, 64)).astype(np.float16)
    seen = []
    for lens in ([1600, 1, 0], [1, 1, 1], [1600] * 3):
        device.launches.clear()
        attend(query, cache, cache, table, np.array(lens))
        seen.append(list(device.launches))
    assert names(seen[0]) == ["attention_schedule", "attention_decode_mma"]
    assert all(each == seen[0] for each in seen)


def test_sequences_of_few_keys_are_not_cut(watch):
    (decode,) = launched(watch(), sequences=300, max_pages=16)
    assert decode[1] == (2, 300, 1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_heads_run_fastest_in_decode(watch, dtype):
    """Blocks next to each other read rows next to each other, which share sectors of memory."""
    (decode,) = launched(watch(), sequences=300, max_pages=16, heads=(16, 8), dtype=dtype)
    assert decode[1] == (8, 300, 1)


def test_a_window_leaves_nothing_to_split(watch):
    assert names(launched(watch(), window=100, sink_tokens=4)) == ["attention_decode_mma"]


def test_pieces_follow_the_number_of_sms(watch):
    few = launched(watch(), sequences=64, max_pages=4096)
    assert few[1][1] == (2, 64 + 2 * 132 // 2 * 4, 1)


@pytest.mark.parametrize("width", [64, 80])
def test_ragged_queries_go_to_the_tensor_cores(watch, width):
    launches = launched(watch(), sequences=2, new=16, width=width, max_pages=2)
    assert names(launches) == ["attention_starts", "attention_prefill"]


def table_of(dim, *, start=0):
    """Return the arguments that rotate `dim` elements of each key."""
    return {"rope_table": np.ones((8, dim), np.float32), "rotary_start": start}


def test_sums_of_query_lens_that_are_there_already_are_not_launched_for(watch):
    sums = np.array([0, 2, 4], np.int32)
    launches = launched(watch(), sequences=2, new=2, max_pages=2, cu_query_lens=sums)
    assert names(launches) == ["attention_decode_mma"]


COUNTS = np.zeros(2, np.int32)
INTERLEAVED = {"interleaved": True}


@pytest.mark.parametrize(
    "more",
    [
        {"evicted_starts": COUNTS, "evicted_lens": COUNTS, "key_starts": COUNTS},
        {"tree_mask": np.ones((32, 20), bool), "tree_lens": COUNTS},
        {"out": np.zeros((32, 4, 64), np.float32)},
        table_of(64),
        table_of(16, start=48),
        table_of(24, start=8) | INTERLEAVED,
    ],
    ids=name_values,
)
def test_so_do_those_with_the_arguments_of_a_step(watch, more):
    launches = launched(watch(), sequences=2, new=16, max_pages=2, **more)
    assert names(launches) == ["attention_starts", "attention_prefill"]


@pytest.mark.parametrize(
    "more", [table_of(24), table_of(32, start=4), table_of(12) | INTERLEAVED], ids=name_values
)
def test_keys_that_are_rotated_in_part_of_a_word_do_not(watch, more):
    launches = launched(watch(), sequences=2, new=16, max_pages=2, **more)
    assert names(launches) == ["attention_starts", "attention_decode"]


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"heads": (2, 2)},  # one row alone
        {"heads": (40, 1)},  # three tiles
        {"new": 2},  # too few rows for prefill
        {"cache_dtype": np.int8},
        {"cache_dtype": np.int8, "new": 8},
        {"cache_dtype": np.int8, "width": 128, "new": 16},  # two tiles
        {"cache_dtype": "nvfp4", "new": 16},
        {"cache_dtype": np.int8, "k_scale": 0.5},
        {"width": 200},
        {"width": 64} | table_of(64),
        {"width": 64, "cache_dtype": np.int8} | table_of(32, start=16),
        {"width": 64, "cache_dtype": np.int8} | table_of(48, start=16) | INTERLEAVED,
    ],
    ids=name_values,
)
def test_few_rows_and_caches_of_8_bits_go_to_the_tensor_cores(watch, call):
    assert "attention_decode_mma" in names(launched(watch(), max_pages=2, **call))


@pytest.mark.parametrize("more", [{}, {"k_scale": 0.5, "v_scale": 0.25}], ids=name_values)
@pytest.mark.parametrize(
    "call",
    [
        {"cache_dtype": np.int8, "new": 9},  # narrow rows of 8 bits: more than one tile of decode
        {"cache_dtype": np.int8, "width": 128, "new": 17},  # more than two
        {"cache_dtype": "nvfp4", "new": 17},
    ],
    ids=name_values,
)
def test_many_rows_over_quantised_caches_go_to_prefill(watch, call, more):
    launches = launched(watch(), max_pages=2, **call, **more)
    assert names(launches) == ["attention_starts", "attention_prefill"]


@pytest.mark.parametrize(
    "more",
    [
        {"cache_dtype": np.int8} | table_of(64),  # keys are not rotated on their way
        {"cache_dtype": "mxfp4", "width": 128},  # not exact in fp16
        {"cache_dtype": "int4", "width": 128},
    ],
    ids=name_values,
)
def test_others_take_the_tiles_of_decode(watch, more):
    assert "attention_decode_mma" in names(launched(watch(), new=16, max_pages=2, **more))


@pytest.mark.parametrize(
    "more",
    [{}, {"cache_dtype": np.int8}, *({"cache_dtype": fmt} for fmt in FOUR_BIT), {"new": 8}],
    ids=name_values,
)
def test_wide_rows_go_to_the_kernel_for_latents(watch, more):
    assert "attention_decode_latent" in names(launched(watch(), width=512, max_pages=2, **more))


@pytest.mark.parametrize(
    "more",
    [
        {"heads": (128, 1)},
        {"heads": (17, 1)},
        {"heads": (34, 2), "cache_dtype": np.int8},
        {"heads": (16, 1), "new": 2},
    ],
    ids=name_values,
)
def test_many_heads_over_wide_rows_have_a_kernel_of_their_own(watch, more):
    launches = launched(watch(), width=512, max_pages=2, **more)
    heads, kv_heads = more["heads"]
    decode = dict(launches)["attention_decode_heads"]
    assert decode == (kv_heads, -(-heads // kv_heads * more.get("new", 1) // 64), 1)


@pytest.mark.parametrize("more", [{"heads": (16, 1)}, {"heads": (64, 4)}], ids=name_values)
def test_few_heads_over_wide_rows_do_not_take_it(watch, more):
    launches = launched(watch(), width=512, max_pages=2, **more)
    assert "attention_decode_latent" in names(launches)


def test_pieces_of_many_heads_are_of_more_keys(watch):
    launches = launched(watch(), heads=(128, 1), width=512, sequences=4, max_pages=4096)
    assert launches[1][1] == (1, 8 + 8 * 4096 * 16 // 2048, 1)


@pytest.mark.parametrize(
    "call",
    [
        {"width": 60},  # rows that are not whole words
        {"width": 72, "cache_dtype": np.int8},
        {"dtype": np.float32},
        {"dtype": np.float32, "cache_dtype": np.int8},
        {"cache_dtype": np.float32},
        {"width": 520},
        {"width": 64, "cache_dtype": np.int8} | table_of(48),  # halves that are not whole chunks
        {"width": 64, "cache_dtype": np.int8} | table_of(32, start=8),
    ],
    ids=name_values,
)
def test_all_else_takes_the_plain_path(watch, call):
    assert "attention_decode" in names(launched(watch(), max_pages=2, **call))
    assert "attention_decode" in names(launched(watch(), max_pages=2, new=16, **call))


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4"])
@pytest.mark.parametrize("more", [{}, {"new": 8}, table_of(128), table_of(64, start=32)], ids=str)
def test_caches_of_four_bits_go_to_the_tensor_cores(watch, fmt, more):
    assert "attention_decode_mma" in names(launched(watch(), width=128, cache_dtype=fmt, **more))


@pytest.mark.parametrize("new", [1, 8])
@pytest.mark.parametrize(
    ("fmt", "width"),
    [
        ("mxfp4", 64), ("nvfp4", 96), ("int4", 96),
        ("mxfp4", 96), ("mxfp4", 32),  # of 51 and 17 bytes
    ],
)  # fmt: skip
def test_rows_that_begin_within_words_go_to_the_tensor_cores(watch, fmt, width, new):
    assert "attention_decode_mma" in names(launched(watch(), width=width, cache_dtype=fmt, new=new))


@pytest.mark.parametrize(
    "more",
    [
        {"cache_dtype": "nvfp4", "width": 80},  # rows of 45 bytes, not of whole chunks
        {"cache_dtype": "mxfp4", "width": 192},  # of 102, of wide K and V
        {"cache_dtype": "mxfp4", "width": 288},  # of 153
        {"cache_dtype": "nvfp4", "dtype": np.float32},
        {"cache_dtype": "nvfp4"} | table_of(96),  # halves that are not whole chunks
        {"cache_dtype": "nvfp4"} | table_of(64, start=16),
    ],
    ids=str,
)
def test_other_rows_of_four_bits_take_the_plain_path(watch, more):
    assert "attention_decode" in names(launched(watch(), max_pages=2, **{"width": 128, **more}))


@pytest.mark.parametrize("alignment, before", [(1, 3), (2, 2)])
def test_scales_need_room_for_what_precedes_a_row_in_its_word(alignment, before):
    """Codes that come along in the first word of the scales, whose 4 bytes follow them."""
    operand = call_of(("bf16", "nvfp4"), (64, 64), 8).k
    assert attention_choice._code_reason(operand, alignment, 4 + before) == ""
    assert "(4 bytes of scales per row)" in attention_choice._code_reason(
        operand, alignment, 3 + before
    )


@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "int4"])
def test_values_that_decode_rounds_together_are_not_batch_invariant(
    watch, monkeypatch, fmt, width
):  # fmt: skip
    monkeypatch.setattr(kv.config, "_batch_invariant", True)
    (name,) = names(launched(watch(), cache_dtype=fmt, width=width))
    if width == 512:
        assert name == "attention_decode_latent"
    else:
        assert name == ("attention_decode_mma" if fmt == "nvfp4" else "attention_decode")


def test_where_threads_do_not_run_in_lockstep_there_are_no_tensor_cores(watch):
    assert "attention_decode" in names(launched(watch(warp_lanes=1), new=16, max_pages=2))


class GPU:
    """A GPU, as far as the choice of a kernel asks."""

    warp_lanes, sm_count = 32, 132

    def __init__(self, arch, most_bytes=None):
        self.arch, self.shared_bytes = arch, most_bytes or shared_bytes(arch)


def cache_of(fmt, width, pages=2, page_size=4, heads=1, encoding=""):
    if fmt in FOUR_BIT:
        return HostDevice().zeros((pages, page_size, heads, width), fmt + encoding)
    return np.zeros((pages, page_size, heads, width), DTYPE[fmt])


def chosen(device, formats, widths, heads, *, ragged, rotates, alignment):
    """Return the kernel of a call of as many tokens as heads, in one sequence."""
    call = call_of(formats, widths, heads, ragged=ragged, rotates=rotates)
    return attention_choice.choose_tiling(device, call, alignment).specialisation


def call_of(formats, widths, heads, *, ragged=False, rotates=False, encoding=""):
    arrays = {
        "query": np.zeros((heads, heads, widths[0]), DTYPE[formats[0]]),
        "out": np.zeros((heads, heads, widths[1]), DTYPE[formats[0]]),
        "k_cache": cache_of(formats[1], widths[0], encoding=encoding),
        "v_cache": cache_of(formats[-1], widths[1], encoding=encoding),
        "block_table": np.zeros((1 if ragged else heads, 2), np.int32),
        "seq_lens": np.zeros(1 if ragged else heads, np.int32),
    }
    if ragged:
        arrays["query_lens"] = np.full(1, heads, np.int32)
    if rotates:
        arrays["rope_table"] = np.zeros((8, widths[0]), np.float32)
    views = {name: view(array, name) for name, array in arrays.items()}
    for name, v in views.items():
        v.name = name
    return check_call(AttentionArrays(**views), check_options("NHD", None, True, None, None, None))


SERVED = {
    "attention_prefill": "prefill", "attention_decode_mma": "decode",
    "attention_decode_latent": "latent", "attention_decode_heads": "heads",
    "attention_decode": "plain",
}  # fmt: skip
SERVED_WIDTHS = (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512)


def table_of_kernels(arch):
    """Return the table of docs/operations.md: kernels of one and of eight new tokens."""
    columns = " | ".join(f"{k}, {v}" if k != v else str(k) for k, v in SERVED_WIDTHS)
    lines = [f"| cache | {columns} |", "|---" * (1 + len(SERVED_WIDTHS)) + "|"]
    for fmt in ("bf16", "fp8_e4m3", "fp8_e5m2", "int8", *FOUR_BIT, "fp16", "fp32"):
        cells = []
        for widths in SERVED_WIDTHS:
            if fmt in FOUR_BIT and any(n % FOUR_BIT[fmt].group for n in widths):
                cells.append("")
                continue
            kernels = [
                chosen(GPU(arch), ("bf16", fmt), widths, 8, ragged=ragged, rotates=False,
                       alignment=256).kernel.name
                for ragged in (False, True)
            ]  # fmt: skip
            cells.append(", ".join(dict.fromkeys(SERVED[name] for name in kernels)))
        lines.append(f"| {fmt} | {' | '.join(cells)} |")
    return "\n".join(lines)


@pytest.mark.parametrize("arch", [arch for arch in SHARED_BYTES if arch != "sm_75"])
def test_the_page_lists_the_kernel_of_each_call(arch):
    assert table_of_kernels(arch) in (ROOT / "docs/operations.md").read_text()


SLOW = {
    "query is fp32, expected fp16 or bf16": (("fp32", "int8"), (64, 64), {}),
    "query is bf16 but the caches are fp16": (("bf16", "fp16"), (64, 64), {}),
    "k_cache is fp16 but v_cache is bf16": (("fp16", "fp16", "bf16"), (64, 64), {}),
    "fp32 caches are not supported": (("bf16", "fp32"), (64, 64), {}),
    "caches that are stored rotated are not supported for head dims (512, 512)": (
        ("bf16", "nvfp4"), (512, 512), {"encoding": "+hadamard"},
    ),
    "codes of k_cache are not whole aligned 4-byte words": (("bf16", "nvfp4"), (528, 512), {}),
    "codes or scales of k_cache (5 bytes": (("bf16", "nvfp4"), (80, 80), {}),
    "codes or scales of k_cache (6 bytes": (("bf16", "mxfp4"), (192, 192), {}),
    "codes of k_cache are not whole aligned 2-byte words": (("bf16", "mxfp4"), (288, 256), {}),
    "head dims (584, 512) of K and V exceed": (("bf16", "bf16"), (584, 512), {}),
    "RoPE on read is not supported for head dims": (
        ("bf16", "bf16"), (576, 512), {"rotates": True},
    ),
    "whole aligned 16-byte words": (("bf16", "bf16"), (68, 64), {}),
    "whole aligned chunks of 16": (("bf16", "int8"), (48, 48), {"rotates": True}),
    "sm_75 tensor cores do not support bf16": (("bf16", "bf16"), (64, 64), {"arch": "sm_75"}),
    "sm_75 has too few registers": (("fp16", "fp16"), (256, 256), {"arch": "sm_75"}),
}  # fmt: skip


@pytest.mark.parametrize("reason", SLOW)
def test_a_call_without_tensor_cores_has_a_reason(reason):
    formats, widths, more = SLOW[reason]
    options = {"rotates": more.get("rotates", False), "encoding": more.get("encoding", "")}
    call = call_of(formats, widths, 8, **options)
    tiling = attention_choice.choose_tiling(GPU(more.get("arch", "sm_80")), call, 256)
    assert tiling.specialisation.kernel is attention_kernels.DECODE[32]
    assert reason in tiling.slow_path_reason


def test_only_plain_kernels_have_a_reason():
    for query, fmt, widths, ragged, arch in itertools.product(
        ("fp16", "fp32"), ("fp16", "fp32", "int8", *FOUR_BIT), SERVED_WIDTHS, (False, True),
        ("sm_75", "sm_90"),
    ):  # fmt: skip
        if fmt in FOUR_BIT and any(n % FOUR_BIT[fmt].group for n in widths):
            continue
        call = call_of((query, fmt), widths, 8, ragged=ragged)
        tiling = attention_choice.choose_tiling(GPU(arch), call, 256)
        plain = tiling.specialisation.kernel is attention_kernels.DECODE[32]
        assert bool(tiling.slow_path_reason) == plain


def test_a_slow_call_is_logged_once(watch, caplog, monkeypatch):
    monkeypatch.setattr(kv.config, "_warned", set())
    device = watch()
    for max_pages in (4, 8):  # each makes a new plan
        launched(device, dtype=np.float32, max_pages=max_pages)
    launched(device, dtype=np.float16, max_pages=4)
    (record,) = (r for r in caplog.records if r.name == "kvcupy")
    assert record.getMessage() == (
        "paged_attention runs without tensor cores: query is fp32, expected fp16 or bf16"
    )


def test_a_kernel_that_verification_replaced_is_not_blamed_on_alignment(watch, caplog, monkeypatch):
    monkeypatch.setattr(kv.config, "_warned", set())
    monkeypatch.setattr(kv.config, "verify", "first_use")
    monkeypatch.setattr(launch, "VERIFIED_KINDS", {"host"})
    monkeypatch.setattr(launch, "verifier", lambda device, specialisation: False)
    assert "attention_decode" in names(launched(watch()))
    assert not [r for r in caplog.records if "tensor cores" in r.getMessage()]


def test_verification_logs_no_slow_call(watch, caplog, monkeypatch):
    monkeypatch.setattr(kv.config, "_warned", set())
    device = watch()
    with launch.unverified():
        launched(device, dtype=np.float32, max_pages=4)
    assert not caplog.records
    launched(device, dtype=np.float32, max_pages=4)
    assert len(caplog.records) == 1


def test_on_a_processor_no_call_is_slow(watch, caplog, monkeypatch):
    monkeypatch.setattr(kv.config, "_warned", set())
    launched(watch(warp_lanes=1), dtype=np.float32)
    assert not caplog.records


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("fmt", FOUR_BIT)
@pytest.mark.parametrize("rows", attention_kernels.DECODE_MMA_ROW_COUNTS)
def test_rotated_caches_take_the_kernels_of_others(arch, fmt, rows):
    """But where shared memory has no room for what rounding leaves of queries."""
    for width in (64, 128, 192, 256, 512):
        if width % FOUR_BIT[fmt].group:
            continue
        v_width = 128 if width == 192 else min(width, 256)
        plain, rotated = (
            attention_choice.choose_tiling(
                GPU(arch), call_of(("bf16", fmt), (width, v_width), rows, encoding=encoding), 256
            )
            for encoding in ("", "+hadamard")
        )
        assert rotated.smem_bytes <= SHARED_BYTES[arch]
        is_large = (arch, width, rows) == ("sm_86", 256, 16) and fmt.startswith("int4")
        if width == 512 or is_large:
            assert rotated.specialisation.kernel is attention_kernels.DECODE[32]
        else:
            assert rotated.specialisation == plain.specialisation
            more = rows * width * 2 if rows == 8 or width > 128 else 0  # else in their place
            is_plain = plain.specialisation.kernel is attention_kernels.DECODE[32]
            assert rotated.smem_bytes == plain.smem_bytes + (0 if is_plain else more)


def test_a_gpu_is_asked_for_its_shared_memory():
    """Tiles are as large as it has room for, also on chips that are in no table."""
    for most_bytes, keys in ((227 << 10, "32"), (163 << 10, "32"), (99 << 10, "16")):
        call = call_of(("bf16", "bf16"), (576, 512), 128, ragged=True)
        tiling = attention_choice.choose_tiling(GPU("sm_199", most_bytes), call, 256)
        assert tiling.specialisation.arguments[1] == keys
        assert tiling.smem_bytes <= most_bytes


@pytest.mark.parametrize("fmt, keys", [("bf16", 114), ("fp8_e4m3", 228), ("nvfp4", 256)])
def test_pieces_have_128_kib_of_keys_or_256(fmt, keys):
    call = call_of(("bf16", fmt), (576, 512), 16)
    object.__setattr__(call, "max_pages", 1000)
    tiling = attention_choice.choose_tiling(GPU("sm_90"), call, 256)
    assert attention_choice.choose_schedule(GPU("sm_90"), call, tiling).min_keys == keys


def test_pieces_of_wide_rows_are_all_resident():
    """Where keys are few, another wave would write and read its states for nothing."""
    for arch, heads, per_sm in (("sm_90", 20, 1), ("sm_90", 8, 2), ("sm_86", 8, 1)):
        device, call = GPU(arch), call_of(("bf16", "bf16"), (576, 512), heads)
        tiling = attention_choice.choose_tiling(device, call, 256)
        object.__setattr__(call, "max_pages", 100_000)
        schedule = attention_choice.choose_schedule(device, call, tiling)
        assert schedule.num_running == device.sm_count * per_sm
        state_bytes = 8 * 512 * schedule.state_rows  # written and read
        assert schedule.least_keys == max(512, 16 * state_bytes // (2 * (576 + 512)))
        assert per_sm * tiling.smem_bytes <= device.shared_bytes


@pytest.mark.parametrize("fmt", FOUR_BIT)
def test_two_blocks_over_codes_of_wide_rows_fit_an_sm(fmt):
    """Of sm_80 by 128 bytes, where scales are aside."""
    call = call_of(("fp16", fmt), (512, 512), 8)
    for arch in ("sm_80", "sm_90"):
        assert attention_choice.choose_tiling(GPU(arch), call, 256).blocks_per_sm == 2


@pytest.mark.parametrize(
    "tokens, kv_heads, sequences, max_pages, rows",
    [
        (2048, 8, 1, 1000, 128),
        (64, 8, 4, 1000, 64),  # 64 rows of each sequence
        (68, 8, 4, 1000, 128),
        (512, 1, 1, 4, 64),  # neither tiles nor their keys fill the device
        (512, 1, 1, 5000, 128),
        (4300, 1, 1, 4, 128),
    ],
)
def test_tiles_of_prefill_have_64_or_128_rows(tokens, kv_heads, sequences, max_pages, rows):
    """A group of 4, and widths of 128."""
    arrays = {
        "query": np.zeros((tokens, 4 * kv_heads, 128), np.float16),
        "out": np.zeros((tokens, 4 * kv_heads, 128), np.float16),
        "k_cache": np.zeros((1, 16, kv_heads, 128), np.float16),
        "v_cache": np.zeros((1, 16, kv_heads, 128), np.float16),
        "block_table": np.zeros((sequences, max_pages), np.int32),
        "seq_lens": np.zeros(sequences, np.int32),
        "query_lens": np.zeros(sequences, np.int32),
    }
    views = {name: view(array, name) for name, array in arrays.items()}
    call = check_call(AttentionArrays(**views), check_options("NHD", None, True, None, None, None))
    assert attention_choice.choose_tiling(GPU("sm_90"), call, 256).rows == rows
    assert attention_choice.choose_tiling(GPU("sm_86"), call, 256).rows == 64


@pytest.mark.parametrize(
    ("fmt", "width", "heads", "arch", "rows"),
    [
        ("nvfp4", 128, 8, "sm_90", 8), ("nvfp4", 128, 9, "sm_90", 16),
        ("fp8_e4m3", 256, 1, "sm_90", 8), ("bf16", 64, 8, "sm_90", 8),
        ("bf16", 128, 8, "sm_90", 16), ("bf16", 128, 8, "sm_100", 8),
    ],
)  # fmt: skip
def test_few_rows_take_small_tiles_unless_they_are_batch_invariant(fmt, width, heads, arch, rows):
    call = call_of(("bf16", fmt), (width, width), heads)
    assert attention_choice.choose_tiling(GPU(arch), call, 256).rows == rows
    call = replace(call, options=call.options._replace(batch_invariant=True))
    assert attention_choice.choose_tiling(GPU(arch), call, 256).rows == 16


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"])
def test_calls_take_every_kernel_that_is_reachable_and_no_other(arch):
    """What no call takes need not be compiled; what a call takes must have been checked."""
    plain = ("fp32", "fp16", "bf16")
    quantised = ("fp8_e4m3", "fp8_e5m2", "int8", "nvfp4", "mxfp4", "int4")
    taken = {
        chosen(GPU(arch), formats, widths, heads, ragged=ragged, rotates=rotates, alignment=aligned)
        for formats in [
            *itertools.product(plain, plain),
            *itertools.product(("fp16", "bf16", "fp32"), quantised),
            ("fp32", "fp16", "bf16"),
        ]
        for widths in [
            (64, 64),
            (128, 128),
            (192, 128),
            (256, 256),
            (576, 512),
            (640, 640),
            (32, 64),
            (64, 128),
            (96, 128),
            (160, 128),  # rows that begin within words
        ]
        for heads, ragged in [
            (1, False),
            (2, False),
            (4, False),
            (8, False),
            (8, True),
            (20, False),
            (160, True),  # 25,600 rows: tiles of 128 fill the device
        ]
        for rotates, aligned in itertools.product((False, True), (256, 1))
    }
    kernels = (
        attention_kernels.DECODE[32], attention_kernels.DECODE_MMA, attention_kernels.DECODE_LATENT,
        attention_kernels.DECODE_HEADS, attention_kernels.PREFILL,
    )  # fmt: skip
    reachable = {
        one
        for one in ops.specialisations()
        if one.kernel in kernels and ops.is_reachable(one, arch)
    }
    assert taken == reachable
