"""What the tests of the adapters to FlashInfer, SGLang and vLLM share: tensors and formulas."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

LIMITS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rows(*shape, place, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(shape, generator=generator)).to(place, dtype)


def ints(values, place, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=place)


def quantised(x, scale, dtype):
    """Return x / scale, divided in float32, saturating, rounded once to nearest even."""
    scale = torch.as_tensor(1.0 if scale is None else scale, device=x.device)
    limit = LIMITS[dtype]
    return (x.float() / (scale[:, None] if scale.ndim else scale)).clamp(-limit, limit).to(dtype)


def same_bits(x, y):
    """Compare bytes, except the sign and payload of NaN."""
    x, y = (t.contiguous().cpu() for t in (x, y))
    nans = [t.isnan() if t.element_size() > 1 else t.float().isnan() for t in (x, y)]
    bits = [t.view(torch.uint8).view(*t.shape, t.element_size()) for t in (x, y)]
    return torch.equal(*nans) and torch.equal(bits[0][~nans[0]], bits[1][~nans[1]])


def rope_table(width, place, positions=16):
    frequencies = 1e4 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(positions)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(place)


def rotated(x, cos, sin, is_neox, start=0):
    """Rotate (tokens, heads, width) from an element on, in float64; cos and sin (tokens, pairs)."""
    cos, sin = (torch.as_tensor(part).double()[:, None] for part in (cos, sin))
    out, n = x.double().cpu(), 2 * cos.shape[-1]
    first, second = slice(start, start + n, 2), slice(start + 1, start + n, 2)
    if is_neox:
        first, second = slice(start, start + n // 2), slice(start + n // 2, start + n)
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
    return out


def close(x, expected, tolerance=1e-5):
    return torch.allclose(x.double().cpu(), expected.double().cpu(), tolerance, tolerance)
