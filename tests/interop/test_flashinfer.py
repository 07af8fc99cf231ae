"""FlashInfer's rotations by position.

Other calls are in `test_peer_calls.py`.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from peers import close, ints, rotated, rows  # noqa: E402

from kvcupy.interop import flashinfer  # noqa: E402

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
