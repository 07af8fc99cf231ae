"""FlashInfer's index functions, and its rotations by position.

Other calls are in `test_peer_calls.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peers import close, ints, rotated, rows  # noqa: E402

from kvcupy.interop import flashinfer  # noqa: E402

# --- Indices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("append_indptr", "seq_lens", "nnz", "batch", "positions"),
    [  # the first is FlashInfer's own example
        ([0, 1, 3, 6, 10], [5, 5, 5, 5], 10, [0, 1, 1, 2, 2, 2, 3, 3, 3, 3],
         [4, 3, 4, 2, 3, 4, 1, 2, 3, 4]),
        ([0, 0, 2], [3, 2], 4, [1, 1, -1, -1], [0, 1, -1, -1]),
        ([0], [], 2, [-1, -1], [-1, -1]),
    ],
)  # fmt: skip
def test_positions_of_appended_tokens(place, append_indptr, seq_lens, nnz, batch, positions):
    """Allocated, and in place, as under a captured graph; tokens past the last are padding."""
    arguments = ints(append_indptr, place), ints(seq_lens, place), nnz
    results = flashinfer.get_batch_indices_positions(*arguments)
    assert [x.tolist() for x in results] == [batch, positions]
    outs = [torch.full_like(x, 9) for x in results]
    written = flashinfer.get_batch_indices_positions(*arguments, *outs)
    assert written[0] is outs[0] and written[1] is outs[1]
    assert [x.tolist() for x in outs] == [batch, positions] and outs[0].dtype == torch.int32
    only = flashinfer.get_batch_indices_positions(*arguments, positions=outs[1].zero_())
    assert only[1] is outs[1] and outs[1].tolist() == positions
    outs[0].zero_()
    with pytest.raises(ValueError, match=rf"^positions: expected \({nnz},\)"):
        flashinfer.get_batch_indices_positions(*arguments, outs[0], outs[1][1:])
    with pytest.raises(TypeError, match=r"^batch_indices: expected int32"):
        flashinfer.get_batch_indices_positions(*arguments, outs[0].long())
    assert not outs[0].any()


def test_lengths_are_full_pages_and_the_last(place):
    lengths = flashinfer.get_seq_lens(ints([0, 3, 3, 4], place), ints([13, 0, 8], place), 16)
    assert lengths.tolist() == [45, 0, 8]


# --- Rotations by position ------------------------------------------------------------------------


ROTATIONS = [
    # The options, and the frequencies.
    ({"rope_scale": 2}, 1e4 ** (-np.arange(0, 64, 2) / 64) / 2),
    ({"rotary_dim": 4, "interleave": True}, 1e4 ** (-np.arange(0, 4, 2) / 4)),
    ({"rope_theta": 5e4, "interleave": True}, 5e4 ** (-np.arange(0, 64, 2) / 64)),
    ({"rotary_dim": 8}, 1e4 ** (-np.arange(0, 8, 2) / 8)),
]


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("options", "by"), ROTATIONS, ids=str)
def test_rope_by_position(place, options, by, index_dtype, copies):
    """In place, and of copies; positions are past the first table."""
    q, k = rows(5, 2, 64, place=place), rows(5, 1, 64, place=place, seed=1)
    positions = [1500, 1501, 0, 1, 2]
    angles = np.array(positions)[:, None] * by
    is_neox = not options.get("interleave", False)
    expected = [rotated(x, np.cos(angles), np.sin(angles), is_neox) for x in (q, k)]
    kept = q.clone(), k.clone()
    pos_ids = ints(positions, place, index_dtype)
    if copies:
        results = flashinfer.apply_rope_pos_ids(q, k=k, pos_ids=pos_ids, **options)
        assert torch.equal(q, kept[0]) and torch.equal(k, kept[1])
    else:
        flashinfer.apply_rope_pos_ids_inplace(q, k, pos_ids, **options)
        results = q, k
    assert all(close(x, y) for x, y in zip(results, expected, strict=True))
