"""A paged KV cache and an attention function for models of Hugging Face transformers.

Importing this registers the attention implementation `"kvcupy"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..cache.paged.cache import PagedKVCache
from ..cache.pool import positive_int
from ..errors import KvcupyError
from ..ops.attention import paged_attention
from ..ops.store import gather_kv, store_kv

NAME = "kvcupy"

_LAYER_TYPES = ("full_attention", "sliding_attention")


class PagedCache(Cache):  # type: ignore[misc]  # transformers has no types
    """A cache of transformers whose keys and values lie in the pages of a `PagedKVCache`.

    With the attention implementation "kvcupy", a forward of the model writes the new tokens of a
    layer into pages and attends over the pages in one call; padding is not stored. With any other
    ("sdpa", "eager"), and for models that cache latents (DeepSeek), the layer's keys and values are
    gathered into tensors for the model's own attention.

    Parameters
    ----------
    config : the model's; of a composite model, its text model's part is used
    num_pages : pages for the whole batch. A row of n tokens takes ceil(n / page_size) of them, and
        rows that beam search has forked share theirs
    page_size : tokens per page
    dtype : format of the cache, by name or as a dtype; "fp8_e4m3", "fp8_e5m2" and "int8" have a
        scale per token and head. None: the format of the model's keys
    device : a Device or its name; None: where the model's keys are

    Attributes
    ----------
    pages : the PagedKVCache, from the first forward on; None before

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    NotImplementedError : the model has layers without their own keys and values, or with chunks

    Notes
    -----
    Memory is allocated at the first forward, whose keys have the widths. Sliding windows mask; they
    do not free pages. `crop`, `reorder_cache`, `batch_repeat_interleave` and
    `batch_select_indices` move no keys except in the last, partial page of a row that is forked.
    A forward that raises leaves the cache unchanged; so does one that finds too few pages, with
    `CacheFull`.
    Stream: the current one of torch. Capture: illegal.
    Source: the interface of `transformers.DynamicCache`, release 5.

    Examples
    --------
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2, attn_implementation="kvcupy",
    ... )
    >>> model = LlamaForCausalLM(config).eval()
    >>> cache = PagedCache(model.config, num_pages=8, page_size=4)
    >>> tokens = model.generate(
    ...     torch.arange(6).view(2, 3), past_key_values=cache, max_new_tokens=4, do_sample=False,
    ...     pad_token_id=0,
    ... )
    >>> tokens.shape, cache.get_seq_length()
    (torch.Size([2, 7]), 6)
    """

    def __init__(
        self, config: Any, *,
        num_pages: int, page_size: int = 16, dtype: Any = None, device: Any = None,
    ) -> None:  # fmt: skip
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config: expected the config of a model, got {type(config).__name__}")
        self._config = config.get_text_config(decoder=True)
        self._num_layers = _num_layers(self._config)
        self._counts: dict[str, Any] = {
            "num_pages": positive_int(num_pages, "num_pages"),
            "page_size": positive_int(page_size, "page_size"),
        }
        self._dtype, self._device = dtype, device
        self.pages: PagedKVCache | None = None
        self._forget()
        super().__init__(layers=[_Layer(self, layer) for layer in range(self._num_layers)])

    def _forget(self) -> None:
        self._rows: list[int] = []  # the sequence of each row of the batch
        self._next = 0  # sequence to add
        self._length = 0  # tokens of a row, padding included
        self._mask: torch.Tensor | None = None  # bool (B, length), False: padding; None: no padding
        self._step: _Step | None = None

    def __repr__(self) -> str:
        rows = f"{len(self._rows)} rows of {self._length} tokens"
        return f"<{type(self).__name__} of {rows}, {self.pages!r}>"

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first forward."""
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether there has been a forward."""
        return self.pages is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens each row has, padding included."""
        return self._length

    # --- A forward ---

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take the new keys and values of a layer; called by the model's attention.

        Parameters
        ----------
        key_states, value_states : (B, H, new tokens, D) and (B, H, new tokens, Dv)
        layer_idx : layers come in order, from 0
        args, kwargs : ignored

        Returns
        -------
        with the attention implementation "kvcupy", the new ones, which its function writes; else
        all of the layer, (B, H, tokens, D) and (B, H, tokens, Dv)

        Raises
        ------
        ValueError : shapes differ from earlier layers or forwards
        CacheFull : there are too few pages; nothing has changed
        KvcupyError : a layer is missing, or comes twice
        """
        if layer_idx == 0:
            self._abort()
        try:
            pages = self._pages(key_states, value_states)
            if self._config._attn_implementation == NAME and not self._caches_latents(key_states):
                keys = key_states.view_as(key_states)  # a new object, for the attribute
                keys.kvcupy = self, layer_idx
                return keys, value_states
            return self._write_and_gather(pages, key_states, value_states, layer_idx)
        except BaseException as error:
            self._abort(error)
            raise

    def attend(
        self, layer_idx: int, query: Any, key: Any, value: Any, attention_mask: Any = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Write the new keys and values of a layer and attend; called by the attention function.

        Parameters
        ----------
        layer_idx : layers come in order, from 0
        query, key, value : (B, Hq, new tokens, D), (B, H, new tokens, D), (B, H, new tokens, Dv)
        attention_mask : bool (B, tokens), False: padding, which is not stored; None: no padding
        options : sm_scale, window, sink_tokens, sinks, logits_soft_cap, as in
            `PagedKVCache.attention`

        Returns
        -------
        (B, new tokens, Hq, Dv), zero for padding

        Raises
        ------
        ValueError : an argument does not fit
        CacheFull : there are too few pages; nothing has changed
        KvcupyError : a layer is missing, or comes twice
        """
        try:
            pages = self._pages(key, value)
            if layer_idx == 0:
                self._begin(pages, key.shape[0], key.shape[2], attention_mask)
            step = self._at(layer_idx)
            rows = [_tokens(x, step.index) for x in (query, key, value)]
            out = pages.attention(layer_idx, *rows, **options) if step.num_tokens else rows[0]
            self._advance(step)
        except BaseException as error:
            self._abort(error)
            raise
        shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        if step.index is None:
            return out.view(shape)
        spread = out.new_zeros(shape)
        spread.view(-1, *shape[2:])[step.index] = out[:, :, : shape[3]]
        return spread

    def _pages(self, key: Any, value: Any) -> PagedKVCache:
        """Return the pages, which the first keys and values shape."""
        widths = tuple(key.shape[1::2]), tuple(value.shape[1::2])
        if self.pages is None:
            if widths[0][0] != widths[1][0]:
                raise ValueError(f"value_states: expected {widths[0][0]} heads, got {widths[1][0]}")
            device = self._device
            if device is None:
                device = "host" if key.device.type == "cpu" else str(key.device)
            num_heads = widths[0][0]
            num_q_heads = 1 if self._caches_latents(key) else self._config.num_attention_heads
            self.pages = PagedKVCache(
                num_layers=self._num_layers, num_q_heads=num_q_heads, num_kv_heads=num_heads,
                head_dim=widths[0][1], v_head_dim=widths[1][1], device=device,
                dtype=key.dtype if self._dtype is None else self._dtype,
                max_batch_tokens=self._counts["num_pages"] * self._counts["page_size"],
                **self._counts,
            )  # fmt: skip
            self._widths = widths
        if widths != self._widths:
            raise ValueError(
                f"key_states, value_states: expected heads and widths {self._widths} as in the "
                f"first layer, got {widths}"
            )
        return self.pages

    def _caches_latents(self, key: Any) -> bool:
        """Whether keys are latents that the model expands after `update`."""
        rank = getattr(self._config, "kv_lora_rank", None)
        return rank is not None and tuple(key.shape[1::2]) == (1, rank)

    def _begin(self, pages: PagedKVCache, batch: int, count: int, mask: Any) -> _Step:
        """Begin a step of `count` tokens per row, without those that the mask says are padding."""
        if self._rows and len(self._rows) != batch:
            raise ValueError(f"key_states: expected a batch of {len(self._rows)}, got {batch}")
        mask = self._checked(mask, batch, count)
        index, lengths = None, [count] * batch
        if mask is not None:
            new = mask[:, self._length :]
            lengths = new.sum(1).tolist()
            if sum(lengths) < batch * count:
                index = new.reshape(-1).nonzero()[:, 0]
        added = list(range(self._next, self._next + batch)) if not self._rows else []
        seqs = self._rows or added
        try:
            for seq in added:
                pages.add_sequence(seq)
            seqs = [seq for seq, n in zip(seqs, lengths, strict=True) if n]
            forward = pages.forward(seqs, [n for n in lengths if n])
            if seqs:
                forward.__enter__()
        except BaseException:
            for seq in added:
                if seq in pages:
                    pages.remove_sequence(seq)
            raise
        self._step = _Step(forward, count, sum(lengths), index, mask, added)
        return self._step

    def _checked(self, mask: Any, batch: int, count: int) -> torch.Tensor | None:
        """Return a mask as bool (B, tokens) that agrees with what is stored; None: no padding."""
        length = self._length + count
        if mask is None:
            if self._mask is None:
                return None
            raise ValueError(
                "attention_mask: expected that of the earlier tokens, which has padding"
            )
        if mask.ndim != 2 or tuple(mask.shape) != (batch, length):
            raise ValueError(
                f"attention_mask: expected ({batch}, {length}), one for padding and all tokens so "
                f"far, got {tuple(mask.shape)}"
            )
        mask = mask.to(torch.bool)
        old = mask[:, : self._length]
        if not (old.all() if self._mask is None else torch.equal(old, self._mask)):
            raise ValueError("attention_mask: expected no change of earlier padding")
        return mask

    def _at(self, layer: int) -> _Step:
        """Return the step, whose next layer must be this one."""
        step = self._step
        if step is None or layer != step.layer:
            expected = "0" if step is None else f"{step.layer}"
            raise KvcupyError(f"layer_idx: expected layer {expected} next, got {layer}")
        return step

    def _advance(self, step: _Step) -> None:
        """Advance to the next layer; end the step after the last one."""
        step.layer += 1
        if step.layer < self._num_layers:
            return
        self._step = None
        if step.num_tokens:
            step.forward.__exit__(None, None, None)
        if step.added:
            self._rows, self._next = step.added, step.added[-1] + 1
        self._length += step.count
        self._mask = step.mask

    def _abort(self, error: BaseException | None = None) -> None:
        """Take back the step that a forward has left unfinished."""
        step, self._step = self._step, None
        if step is None or self.pages is None:
            return
        if step.num_tokens:
            error = error or KvcupyError("the forward was left unfinished")
            step.forward.__exit__(type(error), error, None)
        for seq in step.added:
            self.pages.remove_sequence(seq)

    def _write_and_gather(
        self, pages: PagedKVCache, key: Any, value: Any, layer: int
    ) -> tuple[Any, Any]:
        """Write the new tokens of a layer, and return all of it as tensors."""
        pool, page_size = pages.pool, self._counts["page_size"]
        batch, _, count, _ = key.shape
        length = self._length + count
        if layer == 0:
            if self._mask is not None:
                raise ValueError(
                    f"past_key_values: expected rows without padding, or with it as {NAME!r} "
                    "leaves it out; continue with that attention implementation"
                )
            step = self._begin(pages, batch, count, None)
            table = torch.from_dlpack(pages.block_table()).long()
            starts = table * page_size
            slots = starts[:, :, None] + torch.arange(page_size, device=starts.device)
            step.slots = slots.view(batch, -1)[:, :length].reshape(-1)
        step = self._at(layer)
        scales = {}
        if pool.scale_parts:
            scales = {"k_scale_cache": pool.k_scale(layer), "v_scale_cache": pool.v_scale(layer)}
        caches = pool.k(layer), pool.v(layer)
        rows = _tokens(key, None), _tokens(value, None)
        store_kv(*rows, *caches, pages.slot_mapping(), **scales)
        outs = [x.new_empty(batch * length, *x.shape[1:]) for x in rows]
        gather_kv(*caches, step.slots, k_out=outs[0], v_out=outs[1], **scales)
        self._advance(step)
        k, v = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in outs)
        return k, v

    # --- Rows of the batch ---

    def reset(self) -> None:
        """Drop all tokens; the memory stays."""
        self._abort()
        if self.pages is not None:
            self.pages.clear()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of each row.

        Parameters
        ----------
        tokens_to_remove : minus their number, as in transformers; 0: none

        Raises
        ------
        ValueError : it is positive, or there are fewer tokens
        """
        count = -tokens_to_remove
        if not 0 <= count <= self._length:
            raise ValueError(
                f"tokens_to_remove: expected -{self._length} to 0, got {tokens_to_remove}"
            )
        self._abort()
        if count == 0 or self.pages is None:
            return
        length = self._length - count
        lengths = [count] * len(self._rows)
        if self._mask is not None:
            lengths = self._mask[:, length:].sum(1).tolist()
            self._mask = self._mask[:, :length]
        for seq, n in zip(self._rows, lengths, strict=True):
            self.pages.pop_tokens(seq, n)
        self._length = length

    def reorder_cache(self, beam_idx: Any) -> None:
        """Continue each row from the row that `beam_idx` names, as beam search does.

        Parameters
        ----------
        beam_idx : int (B',), rows of the batch so far; one may come several times, or not at all

        Raises
        ------
        ValueError : there is no such row
        CacheFull : a row is forked whose last page is partial, and none is free; nothing has
            changed
        """
        rows = torch.as_tensor(beam_idx).tolist()
        self._select(rows, "beam_idx")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; raises as `reorder_cache` does."""
        positive_int(repeats, "repeats")
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)], "repeats")

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows of `indices`, int (B',) or bool (B,); raises as `reorder_cache` does."""
        rows = torch.arange(len(self._rows))[torch.as_tensor(indices).cpu()].tolist()
        self._select(rows, "indices")

    def _select(self, parents: Sequence[int], name: str) -> None:
        self._abort()
        if self.pages is None:
            return
        for row in parents:
            if not 0 <= row < len(self._rows):
                raise ValueError(f"{name}: expected rows 0 to {len(self._rows) - 1}, got {row}")
        rows: list[int] = []
        forked: list[int] = []
        try:
            for row in parents:
                seq = self._rows[row]
                if seq in rows:  # its first child takes its place
                    seq = self._next + len(forked)
                    self.pages.fork_sequence(self._rows[row], seq)
                    forked.append(seq)
                rows.append(seq)
        except BaseException:
            for seq in forked:
                self.pages.remove_sequence(seq)
            raise
        for seq in set(self._rows).difference(rows):
            self.pages.remove_sequence(seq)
        self._rows = rows
        self._next += len(forked)
        if self._mask is not None:
            self._mask = self._mask[list(parents)]


@dataclass
class _Step:
    """A forward of the model, from its first layer to its last.

    Attributes
    ----------
    forward : the step of the paged cache, which is entered unless all tokens are padding
    count : new tokens per row, padding included
    num_tokens : new tokens that are stored
    index : int64 (num_tokens,), which of the B * count tokens are stored; None: all
    mask : of all tokens so far, or None
    added : sequences that the step has added
    layer : the next
    slots : of all tokens, where keys and values are gathered
    """

    forward: AbstractContextManager[None]
    count: int
    num_tokens: int
    index: torch.Tensor | None
    mask: torch.Tensor | None
    added: list[int]
    layer: int = 0
    slots: Any = None


class _Layer(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """What transformers asks of one layer; all of them are one cache."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: PagedCache, layer: int) -> None:
        super().__init__()
        self._cache, self._index = cache, layer

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Do nothing: the first `update` allocates."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self._cache.update(key_states, value_states, self._index, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.get_seq_length()

    def get_max_length(self) -> int:
        return -1  # all rows share the pages


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
    kwargs : ignored

    Returns
    -------
    (B, new tokens, Hq, Dv), zero for padding; and None, for weights are not kept

    Raises
    ------
    ValueError : there is dropout, or the mask is not one of padding
    TypeError, CacheFull, KvcupyError : as of `PagedKVCache.attention`
    """
    if dropout:
        raise ValueError(f"dropout: expected 0, got {dropout}: call model.eval()")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            "attention_mask: expected (B, tokens) that marks padding, got "
            f'{tuple(attention_mask.shape)}; for other masks use attn_implementation="sdpa"'
        )
    options = {
        "sm_scale": scaling, "window": sliding_window, "logits_soft_cap": softcap,
        "sinks": None if s_aux is None else s_aux.float(),
    }  # fmt: skip
    cache, layer = getattr(key, "kvcupy", (None, 0))
    if cache is not None:
        return cache.attend(layer, query, key, value, attention_mask, **options), None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return _attend(query, key, value, attention_mask, causal=is_causal, **options), None


def _attend(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Attend over tensors: each row is one page or, where there is padding, each token is."""
    (batch, num_heads, count, _), length = query.shape, key.shape[2]
    k, v = (x.transpose(1, 2) for x in (key, value))
    rows, integers = _tokens(query, None), {"dtype": torch.int32, "device": key.device}
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


def _tokens(x: Any, index: Any) -> Any:
    """Return (B, H, n, D) as (B * n, H, D), or its rows at `index`."""
    batch, num_heads, count, width = x.shape
    rows = x.transpose(1, 2).reshape(batch * count, num_heads, width)
    return rows if index is None else rows[index]


def padding_mask(
    *, q_length: int, kv_length: int, attention_mask: Any = None, use_vmap: bool = False,
    allow_is_causal_skip: bool = True, config: Any = None, **kwargs: Any,
) -> Any:  # fmt: skip
    """Return which tokens are padding, or None if none is: the mask that "kvcupy" needs.

    Raises
    ------
    NotImplementedError : the model's mask is more than causal, a window and padding
    """
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


def _num_layers(config: Any) -> int:
    """Return how many layers a model has; raise if some do not keep their own keys and values."""
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            raise NotImplementedError(f"config: layer {layer} is {kind}, not {_LAYER_TYPES}")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise NotImplementedError("config: attention in chunks (attention_chunk_size)")
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_sharing_modes", None):
        raise NotImplementedError("config: layers that share the keys of others")
    return int(config.num_hidden_layers)


ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, padding_mask)
