"""The attention function "kvcupy" of transformers, and the mask that it needs."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...ops.attention import paged_attention
from .layers import NAME, window_of


def attention_forward(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *,
    scaling: float | None = None, dropout: float = 0.0, sliding_window: int | None = None,
    softcap: float | None = None, s_aux: Any = None, is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:  # fmt: skip
    """Attend over the pages of a `PagedCache`, or over the tensors of a call without one.

    The attention function "kvcupy" of transformers.

    Parameters
    ----------
    module : the model's attention layer
    query, key, value : (B, Hq, new tokens, D), (B, H, tokens, D), (B, H, tokens, Dv)
    attention_mask : bool (B, tokens), False: padding; None: no padding
    scaling : what scores are multiplied by; None: 1 / sqrt(D)
    dropout : 0
    sliding_window : keys that a query sees, its own included
    softcap : scores become softcap * tanh(score / softcap)
    s_aux : (Hq,), logits that join the softmax denominator
    is_causal : None: `module.is_causal` if it has that, else True
    kwargs : ignored, without tensors of floating point

    Returns
    -------
    (B, new tokens, Hq, Dv), zero for padding; and None, for weights are not kept

    Raises
    ------
    ValueError : there is dropout, or the mask is not one of padding
    NotImplementedError : the layer has a window that the model does not pass, or a bias of scores
    TypeError, CacheFull, KvcupyError : as of `PagedKVCache.attention`
    """
    if dropout:
        raise ValueError(f"dropout: expected 0, got {dropout}: call model.eval()")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            "attention_mask: expected (B, tokens) that marks padding, got "
            f'{tuple(attention_mask.shape)}; for other masks use attn_implementation="sdpa"'
        )
    for name, extra in kwargs.items():
        if isinstance(extra, torch.Tensor) and extra.is_floating_point():
            raise NotImplementedError(
                f"attention implementation {NAME!r}: expected no {name}, which this model passes; "
                'use "sdpa" or "eager"'
            )
    options = {
        "sm_scale": scaling, "window": sliding_window, "logits_soft_cap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
    }  # fmt: skip
    cache, layer = getattr(key, "kvcupy", (None, 0))
    if sliding_window is None and _has_window(module, cache, layer):
        raise NotImplementedError(
            f"attention implementation {NAME!r}: the config gives this layer a window, which the "
            'model does not pass to attention; use "sdpa"'
        )
    if cache is not None:
        return cache.attend(layer, query, key, value, attention_mask, **options), None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return attend_tensors(query, key, value, attention_mask, causal=is_causal, **options), None


def _has_window(module: Any, cache: Any, layer: int) -> bool:
    """Return whether a layer has a window, by its cache or, without one, by its config."""
    if cache is not None:
        return layer in cache._windows
    config: Any = getattr(module, "config", None)
    index: Any = getattr(module, "layer_idx", None)
    return None not in (config, index) and window_of(config, index) is not None


def attend_tensors(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Attend over tensors: each row is one page or, where there is padding, each token is."""
    (batch, num_heads, count, _), length = query.shape, key.shape[2]
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    k, v = (x.transpose(1, 2) for x in (k, v))
    rows, integers = tokens_of(query, None), {"dtype": torch.int32, "device": key.device}
    shape = batch, count, num_heads, value.shape[3]
    if mask is None or mask.all():
        table = torch.arange(batch, **integers)[:, None]
        lengths = torch.full((batch,), length, **integers), torch.full((batch,), count, **integers)
        out = paged_attention(rows, k, v, table, lengths[0], query_lens=lengths[1], **options)
        return out.view(shape)
    mask = mask.to(torch.bool)
    new = mask[:, length - count :]
    index = new.reshape(-1).nonzero()[:, 0]
    order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
    table = order + torch.arange(batch, device=key.device)[:, None] * length
    k, v = (x.reshape(-1, 1, *x.shape[2:]) for x in (k, v))
    out = paged_attention(rows[index], k, v, table, mask.sum(1), query_lens=new.sum(1), **options)
    spread = out.new_zeros(shape)
    spread.view(-1, *shape[2:])[index] = out
    return spread


def tokens_of(x: Any, index: Any) -> Any:
    """Return (B, H, n, D) as (B * n, H, D), or its rows at `index`."""
    batch, num_heads, count, width = x.shape
    rows = x.transpose(1, 2).reshape(batch * count, num_heads, width)
    return rows if index is None else rows[index]


def padding_mask(
    *, q_length: int, kv_length: int, attention_mask: Any = None, use_vmap: bool = False,
    allow_is_causal_skip: bool = True, config: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Return which tokens are padding, or None if none is: the mask that "kvcupy" needs."""
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if use_vmap or chunked or (q_length > 1 and not allow_is_causal_skip):
        raise NotImplementedError(
            'attention implementation "kvcupy": the mask of this call is more than causal, with a '
            'window and padding (packed sequences, chunks, images); use "sdpa"'
        )
    if attention_mask is None:
        return None
    attention_mask = attention_mask[:, -kv_length:]
    return None if attention_mask.all() else attention_mask


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, padding_mask)
