"""A paged KV cache for models of Hugging Face transformers."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ... import checks, devices
from ...cache.paged.cache import PagedKVCache
from ...cache.paged.groups import FullAttention, LayerGroup, Recurrent, SlidingWindow
from ...checks import positive_int
from ...errors import CacheFull, KvcupyError, ProcessLocal
from ...formats import Encoding
from ...ops.states import gather_state
from ...ops.store import gather_kv, store_kv
from .attention import attend_tensors, tokens_of
from .layers import (
    NAME,
    EmptyLayer,
    HybridLayer,
    PagedLayer,
    StateLayer,
    kinds_of,
    untraced,
    window_of,
)

_MAX_BATCH_TOKENS = 8192
_NO_CHECKPOINTS = 2**31 - 1  # transformers cannot recompute tokens behind a kept state

_LEFT_BEHIND = (
    "have left behind what the tokens that remain see; call activate_past_recording() before the "
    "forward whose tokens are to be removed"
)


class PagedCache(ProcessLocal, Cache):  # type: ignore[misc]  # transformers has no types
    """A cache of transformers whose keys and values lie in the pages of a `PagedKVCache`.

    With the attention implementation "kvcupy", a forward of the model writes the new tokens of a
    layer into pages and attends over the pages in one call; padding is not stored. With any other
    ("sdpa", "eager"), and for models that cache latents (DeepSeek), the layer's keys and values are
    gathered into tensors for the model's own attention.

    Heterogeneous layers are groups of the PagedKVCache: layers with a sliding window free the
    pages that no query sees again, and layers with a convolution or a recurrence (Mamba, linear
    attention) have one state per row.

    Parameters
    ----------
    config : the model's; of a composite model, its text model's part is used
    num_pages : pages for the whole batch. A row of n tokens takes ceil(n / page_size) of them, and
        rows that beam search has forked share theirs. With groups, of each layer that attends to
        all tokens
    page_size : tokens per page
    max_batch_size : with groups, rows for which there are windows and states, of all copies; None:
        as many as in the first forward
    max_batch_tokens : with windows, tokens of a forward for which there are pages beside full
        windows. The first forward may have more. None: 8192, or as many as in the first forward
    dtype : format of the cache, by name or as a dtype; "fp8_e4m3", "fp8_e5m2" and "int8" have a
        scale per token and head. None: the format of the model's keys
    device : a Device or its name; None: where the model's keys are

    Attributes
    ----------
    pages : the PagedKVCache, from the first forward on; None before

    Raises
    ------
    TypeError, ValueError : an argument does not fit
    NotImplementedError : the model has layers that cache something else, share the keys of others,
        or differ in query heads. At the first forward: layers keep a state that no cache sees

    Notes
    -----
    Memory is allocated at the first forward, whose keys and states have the shapes. With groups,
    that forward attends to its tensors, and they are stored when it is over.
    `crop`, `reorder_cache`, `batch_repeat_interleave` and
    `batch_select_indices` move no keys except in the last, partial page of a row that is forked;
    the state of a forked row is copied. `crop` takes tokens back as far as the windows go; as in
    transformers, `activate_past_recording` makes them keep the last forward, and convolutions
    (LFM2) their inputs since the last `crop`. A recurrent state cannot be taken back.
    `copy.copy` and `copy.deepcopy` fork the rows: a copy continues independently in the same
    pages, and frees its rows when it is collected or `reset`. With groups, `max_batch_size` counts
    the rows of all copies. Copies are used by one thread.
    A forward that raises leaves the cache unchanged; so does one that finds too few pages, with
    `CacheFull`. The model updates recurrent states in copies, which are stored when the forward is
    over; if its last layer is recurrent, at the next call.
    Stream: the current one of torch. Capture: illegal.
    Models and `generate` name their argument `past_key_values` before transformers 5.24.
    Source: the interface of `transformers.DynamicCache`, releases 5.16 to 5.24.

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
    ...     torch.arange(6).view(2, 3), cache=cache, max_new_tokens=4, do_sample=False,
    ...     pad_token_id=0,
    ... )
    >>> tokens.shape, cache.get_seq_length()
    (torch.Size([2, 7]), 6)
    """

    _instead = "make one in each process; in this one copy.copy and copy.deepcopy fork its rows"

    def __init__(
        self, config: Any, *,
        num_pages: int, page_size: int = 16, dtype: Any = None, device: Any = None,
        max_batch_size: int | None = None, max_batch_tokens: int | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config: expected the config of a model, got {type(config).__name__}")
        self._config = config.get_text_config(decoder=True)
        kinds = kinds_of(self._config)
        self._attention = [layer for layer, kind in enumerate(kinds) if kind.attention]
        self._recurrent = {layer for layer, kind in enumerate(kinds) if kind.recurrent}
        if not self._attention:
            raise NotImplementedError("config: expected at least one layer with attention")
        windows = {layer: window_of(self._config, layer) for layer in self._attention}
        self._windows = {layer: window for layer, window in windows.items() if window is not None}
        configs = [self._config.per_layer_config[layer] for layer in self._attention]
        heads: list[Any] = [getattr(config, "num_attention_heads", None) for config in configs]
        if None in heads or len(set(heads)) > 1:
            raise NotImplementedError(
                f"config: expected one num_attention_heads for all layers, got {heads}"
            )
        self._num_query_heads = int(heads[0])
        self._num_states = int(getattr(self._config, "number_of_conv_states", 1))
        self._has_groups = bool(self._windows or self._recurrent)
        self._counts: dict[str, Any] = {
            "num_pages": positive_int(num_pages, "num_pages"),
            "page_size": positive_int(page_size, "page_size"),
        }
        self._max_batch_size = self._max_batch_tokens = None
        if max_batch_size is not None:
            self._max_batch_size = positive_int(max_batch_size, "max_batch_size")
        if max_batch_tokens is not None:
            self._max_batch_tokens = positive_int(max_batch_tokens, "max_batch_tokens")
        self._dtype = None if dtype is None else Encoding.of(dtype)
        self._device = None if device is None else devices.get(device)
        self._memory = _Memory()
        self._forget()
        super().__init__(layers=self._make_layers())

    def _make_layers(self) -> list[Any]:
        classes = {
            (False, False): EmptyLayer, (True, False): PagedLayer, (False, True): StateLayer,
            (True, True): HybridLayer,
        }  # fmt: skip
        return [
            classes[kind.attention, kind.recurrent](cache=weakref.proxy(self), layer=layer)
            for layer, kind in enumerate(kinds_of(self._config))
        ]

    def _forget(self) -> None:
        self._rows: list[int] = []  # the sequence of each row of the batch
        self._length = 0  # tokens of a row, padding included
        self._mask: torch.Tensor | None = None  # bool (B, length), False: padding; None: no padding
        self._step: _Step | None = None
        self._unattended: int | None = None  # the layer whose keys wait for attention
        self._keeps_step = False
        # What the convolutions have read since the last crop, if recorded: (B, ..., width + tokens)
        self._inputs: dict[tuple[int, str], torch.Tensor] = {}

    def __copy__(self) -> PagedCache:
        """Return a cache of the same rows, which share their pages until either appends to them."""
        self._end()
        forked: PagedCache = type(self).__new__(type(self))
        forked.__dict__.update(self.__dict__, _rows=[])
        forked.layers = forked._make_layers()
        if self._pages is not None:
            forked._rows = self._fork(self._rows)
        return forked

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.__copy__()

    def __del__(self) -> None:
        if "_rows" in self.__dict__:  # else __init__ has raised
            self._abort()
            if self._pages is not None:
                self._pages._remove_later(self._rows)

    @property
    def _pages(self) -> PagedKVCache | None:
        return self._memory.pages

    @property
    def pages(self) -> PagedKVCache | None:
        """The PagedKVCache, from the first forward on; None before."""
        self._settle()
        return self._pages

    def __repr__(self) -> str:
        self._settle()
        rows = f"{len(self._rows)} rows of {self._length} tokens"
        return f"<{type(self).__name__} of {rows}, {self.pages!r}>"

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first forward."""
        self._settle()
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether there has been a forward."""
        return self.pages is not None

    @untraced
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens each row has, padding included."""
        self._settle()
        return self._length

    @untraced
    def has_previous_state(self, layer_idx: Any = None, state_idx: Any = None) -> bool:
        """Return whether there are tokens, and so states of recurrent layers."""
        return self.get_seq_length() > 0

    def activate_past_recording(self) -> None:
        """Keep what `crop` needs: what the last forward sees of windows, inputs of convolutions."""
        self._keeps_step = True

    @untraced
    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether `activate_past_recording` has been called."""
        return self._keeps_step

    @property
    def is_croppable(self) -> bool:
        """Whether no layer has a recurrence; False before the first forward of layers with states.

        States of convolutions can be taken back.
        """
        self._settle()
        has_run = not self._recurrent or bool(self._memory.states)
        return has_run and not self._memory.has_recurrence

    # --- A forward ---

    @untraced
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
        if layer_idx == self._attention[0] and self._step is not None and self._step.attended:
            self._end()
        try:
            self._check_widths(key_states, value_states, layer_idx)
            if self._is_paged(key_states):
                if self._unattended is not None and self._unattended < layer_idx:
                    raise NotImplementedError(
                        f"attention implementation {NAME!r}: the model changes the keys of layer "
                        f'{self._unattended} between the cache and attention; use "sdpa"'
                    )
                self._unattended = layer_idx
                keys = key_states.view_as(key_states)  # a new object, for the attribute
                keys.kvcupy = self, layer_idx
                return keys, value_states
            return self._write_and_gather(key_states, value_states, layer_idx)
        except BaseException as error:
            self._abort(error)
            raise

    @untraced
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
            self._unattended = None
            step = self._at(layer_idx, key, value, attention_mask)
            if step.first is not None:
                self._hold(step, layer_idx, key, value)
                out = attend_tensors(query, key, value, attention_mask, causal=True, **options)
                self._advance(step)
                return out
            rows = [tokens_of(x, step.index) for x in (query, key, value)]
            out = rows[0]
            if step.num_tokens:
                assert self._pages is not None
                out = self._pages.attention(layer_idx, *rows, **options)
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

    @untraced
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return a convolution's last inputs, (B, ...), to be updated in place; None if empty."""
        return self._old_state(layer_idx, f"conv {state_idx}")

    @untraced
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return a state, (B, ...), to be updated in place; None if the cache is empty."""
        return self._old_state(layer_idx, f"recurrent {state_idx}")

    @untraced
    def update_conv_state(
        self, conv_states: Any, layer_idx: int, state_idx: int = 0,
        conv_kernel_size: int | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Take the new inputs of a convolution, (B, C, new tokens).

        Returns
        -------
        (B, C, tokens) : those before, as many as the convolution is wide, and the new ones
        """
        key = layer_idx, f"conv {state_idx}"
        step = self._updated(*key)
        old = step.states.get(key)
        width = conv_kernel_size or (conv_states if old is None else old).shape[-1]
        whole = conv_states if old is None else torch.cat([old, conv_states], -1)
        if whole.shape[-1] < width:
            whole = torch.nn.functional.pad(whole, (width - whole.shape[-1], 0))
        step.states[key] = whole[..., -width:].clone()
        if self._keeps_step:
            before = self._inputs.get(key, old)
            if before is None:
                before = conv_states.new_zeros(*conv_states.shape[:-1], width)
            step.inputs[key] = torch.cat([before, conv_states], -1)
        return whole

    @untraced
    def update_recurrent_state(
        self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Any:
        """Take the new state of a layer, (B, ...), and return it."""
        key = layer_idx, f"recurrent {state_idx}"
        self._updated(*key).states[key] = recurrent_states
        self._memory.has_recurrence = True
        return recurrent_states

    def _opened(self) -> _Step:
        """Return the step, or begin a new one."""
        if self._step is None:
            self._end()
            self._memory.last, self._step = weakref.ref(self), _Step()
        return self._step

    def _old_state(self, layer: int, name: str) -> Any:
        """Return the rows of a state before the step, in a copy that the model may update."""
        if layer not in self._recurrent:
            raise ValueError(f"layer_idx: expected a recurrent layer, got {layer}")
        key = layer, name
        if self._step is not None and key in self._step.visited:
            self._end()
        step = self._opened()
        step.visited.add(key)
        if not self._length or key not in self._memory.states:
            return None
        states = self._memory.states[key]
        if step.state_slots is None:
            assert self._pages is not None
            stream = self._pages.device.as_stream(None, "torch")
            slots = self._pages.state_slots_of(self._rows, stream=stream)
            step.state_slots = torch.tensor(slots, device=states.device)
        rows = gather_state(states, step.state_slots)  # zeros for a row that had only padding
        step.states[key] = rows
        return rows

    def _updated(self, layer: int, name: str) -> _Step:
        """Return the step, to update a state once; a model may not have asked for the old one."""
        key = layer, name
        if self._step is None or key not in self._step.visited or key in self._step.updated:
            self._old_state(layer, name)
        step = self._opened()
        step.updated.add(key)
        return step

    def _is_paged(self, key: Any) -> bool:
        """Whether the attention function of this module attends, over pages."""
        return self._config._attn_implementation == NAME and not self._caches_latents(key)

    def _caches_latents(self, key: Any) -> bool:
        """Whether keys are latents that the model expands after `update`."""
        rank = getattr(self._config, "kv_lora_rank", None)
        return rank is not None and tuple(key.shape[1::2]) == (1, rank)

    def _check_widths(self, key: Any, value: Any, layer: int) -> None:
        """Raise if keys and values have other shapes than those that are cached."""
        if not key.shape[2]:
            raise ValueError(f"key_states: expected new tokens, got none in {tuple(key.shape)}")
        if key.shape[1] != value.shape[1]:
            raise ValueError(f"value_states: expected {key.shape[1]} heads, got {value.shape[1]}")
        if self._pages is None or layer not in self._memory.places:
            return
        pool = self._pages.pools[self._memory.places[layer][0]]
        expected = pool.num_kv_heads, pool.head_dim, pool.v_head_dim
        widths = *key.shape[1::2], value.shape[3]
        if widths != expected:
            raise ValueError(
                "key_states, value_states: expected heads and widths (num_heads, K, V) "
                f"{expected} as in the first forward, got {widths}"
            )

    def _begin(self, step: _Step, key: Any, value: Any, mask: Any) -> None:
        """Begin a step of new tokens for each row, without those that a mask says are padding."""
        batch, count = key.shape[0], key.shape[2]
        if self._rows and len(self._rows) != batch:
            raise ValueError(f"key_states: expected a batch of {len(self._rows)}, got {batch}")
        mask = self._checked(mask, batch, count)
        step.lengths = [count] * batch
        if mask is not None:
            new = mask[:, self._length :]
            step.lengths = new.sum(1).tolist()
            if sum(step.lengths) < batch * count:
                step.index = new.reshape(-1).nonzero()[:, 0]
        step.count, step.num_tokens, step.mask = count, sum(step.lengths), mask
        step.added = [] if self._rows else [*islice(self._memory.names, batch)]
        if self._pages is None:
            if self._has_groups:
                step.first = {}
                return
            self._allocate_uniform(key, value)
        assert self._pages is not None
        try:
            for seq in step.added:
                self._pages.add_sequence(seq)
            forward = self._forward(self._rows or step.added, step.lengths)
            if forward is not None:
                forward.__enter__()
        except BaseException:
            for seq in step.added:
                if seq in self._pages:
                    self._pages.remove_sequence(seq)
            step.added = []
            raise
        step.forward = forward

    def _forward(
        self, seqs: Sequence[int], lengths: Sequence[int]
    ) -> AbstractContextManager[None] | None:
        """Return a step of the pages; None if there are no tokens."""
        assert self._pages is not None
        appended = {seq: n for seq, n in zip(seqs, lengths, strict=True) if n}
        if not appended:
            return None
        return self._pages.forward([*appended], [*appended.values()], keep_step=self._keeps_step)

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

    def _at(self, layer: int, key: Any, value: Any, mask: Any) -> _Step:
        """Return the step, whose next layer with attention is this one; the first begins it."""
        step = self._step
        if layer == self._attention[0] and (step is None or not step.attended):
            step = self._opened()
            self._require_states(step, layer)
            self._begin(step, key, value, mask)
            return step
        attended = 0 if step is None else step.attended
        if step is None or layer != self._attention[attended]:
            raise KvcupyError(
                f"layer_idx: expected layer {self._attention[attended]} next, got {layer}; if each "
                'layer attends more than once, use attn_implementation="sdpa"'
            )
        self._require_states(step, layer)
        return step

    def _require_states(self, step: _Step, layer: int) -> None:
        """Raise if the step has passed a recurrent layer that has not asked for its state."""
        if not self._recurrent:
            return
        visited = {layer for layer, _ in step.visited}
        unseen = [n for n in self._recurrent if n < layer and n not in visited]
        if unseen:
            raise NotImplementedError(
                f"config: layer {min(unseen)} keeps its state in the model, not in the cache"
            )

    def _advance(self, step: _Step) -> None:
        """Advance to the next layer with attention; store the step if it is complete."""
        step.attended += 1
        self._settle()

    def _is_complete(self, step: _Step) -> bool:
        """Whether all layers have been there, with all their states."""
        if step.attended < len(self._attention):
            return False
        visited = Counter(layer for layer, _ in step.visited)
        return all(visited[layer] >= self._num_states for layer in self._recurrent)

    def _settle(self) -> None:
        """End the step if all layers have been there."""
        step = self._step
        if step is None or not self._is_complete(step):
            return
        if step.first is not None:
            self._store_first(step)
        else:
            self._store_states(step)
        self._step = None
        if step.forward is not None:
            step.forward.__exit__(None, None, None)
        if step.added:
            self._rows = step.added
        self._length += step.count
        self._mask, self._inputs = step.mask, step.inputs

    def _end(self) -> None:
        """End the step, also of a copy, or take it back if it is not complete."""
        for cache in (self._memory.last(), self):
            if cache is not None:
                try:
                    cache._settle()
                finally:
                    cache._abort()

    def _abort(self, error: BaseException | None = None) -> None:
        """Take back the step that a forward has left unfinished."""
        if isinstance(error, CacheFull):
            error.argument = "key_states"
        step, self._step = self._step, None
        if step is None or self._pages is None:
            return
        if step.forward is not None:
            error = error or KvcupyError("the forward was left unfinished")
            step.forward.__exit__(type(error), error, None)
        for seq in step.added:
            if seq in self._pages:
                self._pages.remove_sequence(seq)

    def _write_and_gather(self, key: Any, value: Any, layer: int) -> tuple[Any, Any]:
        """Write the new tokens of a layer, and return the tokens that it sees as tensors."""
        if self._mask is not None:
            raise ValueError(
                f"attn_implementation: expected {NAME!r} for rows with padding that it has left "
                f"out, got {self._config._attn_implementation!r}"
            )
        step = self._at(layer, key, value, None)
        if step.first is not None:
            self._hold(step, layer, key, value)
            self._advance(step)
            return key, value
        rows = tokens_of(key, None), tokens_of(value, None)
        k_cache, v_cache, scales = self._write(layer, *rows)
        slots = self._seen_slots(layer, key.shape[2])
        outs = [x.new_empty(slots.numel(), *x.shape[1:]) for x in rows]
        gather_kv(k_cache, v_cache, slots.reshape(-1), k_out=outs[0], v_out=outs[1], **scales)
        self._advance(step)
        k, v = (x.view(*slots.shape, *x.shape[1:]).transpose(1, 2).contiguous() for x in outs)
        return k, v

    def _write(
        self, layer: int, key: Any, value: Any, unseen: Any = None
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Write rows of the step's tokens, except `unseen` ones; return the caches and scales."""
        pages = self._pages
        assert pages is not None
        number, place = self._memory.places[layer]
        pool, scales = pages.pools[number], {}
        if pool.scale_parts:
            scales = {"k_scale_cache": pool.k_scale(place), "v_scale_cache": pool.v_scale(place)}
        k_cache, v_cache = pool.k(place), pool.v(place)
        slots = pages.slot_mapping(layer=layer, stream=pages.device.as_stream(None, "torch"))
        if unseen is not None:
            slots = torch.from_dlpack(slots).masked_fill(unseen, -1)
        store_kv(key, value, k_cache, v_cache, slots, **scales)
        return k_cache, v_cache, scales

    def _seen_slots(self, layer: int, count: int) -> torch.Tensor:
        """Return where the tokens lie that `count` new ones see, int64 (B, tokens)."""
        pages, page_size = self._pages, self._counts["page_size"]
        assert pages is not None
        stream = pages.device.as_stream(None, "torch")
        table = torch.from_dlpack(pages.block_table(layer=layer, stream=stream)).long()
        first = self._first_seen(layer)
        places = torch.arange(first, self._length + count, device=table.device)
        return table[:, places // page_size] * page_size + places % page_size

    def _first_seen(self, layer: int) -> int:
        """Return the first token that the next one sees in a layer."""
        window = self._windows.get(layer)
        return 0 if window is None else max(0, self._length - window + 1)

    # --- Memory ---

    def _allocate_uniform(self, key: Any, value: Any) -> None:
        """Allocate the pages of uniform layers."""
        num_layers, (num_heads, width) = len(self._attention), key.shape[1::2]
        self._memory.pages = PagedKVCache(
            num_layers=num_layers, num_q_heads=self._num_q_heads(key), num_kv_heads=num_heads,
            head_dim=width, v_head_dim=value.shape[3], device=self._device_of(key),
            dtype=key.dtype if self._dtype is None else self._dtype,
            max_batch_tokens=self._counts["num_pages"] * self._counts["page_size"],
            **self._counts,
        )  # fmt: skip
        self._memory.places = {layer: (0, layer) for layer in self._attention}

    def _allocate_groups(self, step: _Step) -> None:
        """Allocate the pages and states of heterogeneous layers, which the step has shaped."""
        assert step.first is not None
        key = next(iter(step.first.values())).key
        groups = [*self._attention_groups(step.first), *_state_groups(step.states)]
        batch, page_size = key.shape[0], self._counts["page_size"]
        num_tokens = self._counts["num_pages"] * page_size
        max_batch_tokens = self._max_batch_tokens or max(_MAX_BATCH_TOKENS, batch * step.count)
        if self._keeps_step or self._recurrent:
            max_batch_tokens = max(max_batch_tokens, batch * step.count)
        if not self._windows:
            max_batch_tokens = num_tokens
        self._memory.pages = pages = PagedKVCache(
            num_q_heads=self._num_q_heads(key), groups=groups, device=self._device_of(key),
            page_size=page_size, num_tokens=num_tokens,
            max_seq_len=-(-num_tokens // (self._max_batch_size or batch)),
            max_batch_tokens=min(num_tokens, max_batch_tokens),
        )  # fmt: skip
        attention = [group for group in groups if not isinstance(group, Recurrent)]
        self._memory.places = {
            layer: (number, place)
            for number, group in enumerate(attention)
            for place, layer in enumerate(group.layers)
        }
        for layer, name in step.states:
            self._memory.states[layer, name] = torch.from_dlpack(pages.state(layer, name))

    def _attention_groups(self, first: dict[int, _Held]) -> Iterator[LayerGroup]:
        """Yield groups of the layers with equal keys and windows."""
        alike: dict[tuple[int | None, int, int, int], list[int]] = {}
        for layer, held in first.items():
            widths = *held.key.shape[1::2], held.value.shape[3]
            alike.setdefault((self._windows.get(layer), *widths), []).append(layer)
        for (window, num_heads, width, v_width), layers in alike.items():
            options: dict[str, Any] = {
                "layers": layers, "num_kv_heads": num_heads, "head_dim": width,
                "v_head_dim": v_width,
                "dtype": first[layers[0]].key.dtype if self._dtype is None else self._dtype,
            }  # fmt: skip
            if window is None:
                yield FullAttention(**options)
            else:
                yield SlidingWindow(**options, window=window)

    def _num_q_heads(self, key: Any) -> int:
        return 1 if self._caches_latents(key) else self._num_query_heads

    def _device_of(self, key: Any) -> Any:
        if self._device is not None:
            return self._device
        return "host" if key.device.type == "cpu" else str(key.device)

    # --- The first forward with groups, and states ---

    def _hold(self, step: _Step, layer: int, key: Any, value: Any) -> None:
        """Hold the keys and values of a layer, of which a window needs the last ones."""
        assert step.first is not None
        start, window = 0, self._windows.get(layer)
        if window is not None and step.index is None and not self._keeps_step:
            # What can be popped from pages, and the rest of the first page.
            start = max(0, step.count - window - 2 * self._counts["page_size"])
        if start:
            key, value = key[:, :, start:].clone(), value[:, :, start:].clone()
        step.first[layer] = _Held(key, value, start)

    def _store_first(self, step: _Step) -> None:
        """Allocate, and store the results of the first forward, in steps that fit.

        After an error there are no pages.
        """
        assert step.first is not None and not self._length
        batch = len(step.lengths)
        try:
            self._allocate_groups(step)
            assert self._pages is not None
            for seq in step.added:
                self._pages.add_sequence(seq)
            size = step.count
            if not (self._recurrent or self._keeps_step):  # then one step has room
                size = max(1, self._pages.plan().step_tokens // batch)
            for start in range(0, step.count, size):
                stop = min(step.count, start + size)
                self._store_columns(step, start, stop)
        except BaseException:
            self._memory.pages, self._memory.places, self._memory.states = None, {}, {}
            self._step = None
            raise

    def _store_columns(self, step: _Step, start: int, stop: int) -> None:
        """Store the tokens of some columns of the batch, with the last ones the states."""
        assert step.first is not None
        index, lengths = None, [stop - start] * len(step.lengths)
        if step.mask is not None:
            new = step.mask[:, start:stop]
            lengths = new.sum(1).tolist()
            index = new.reshape(-1).nonzero()[:, 0]
        forward = self._forward(step.added, lengths)
        if forward is None:
            return
        with forward:
            for layer, held in step.first.items():
                if held.start >= stop:
                    continue
                key, value = (
                    tokens_of(_columns(x, start - held.start, stop - held.start), index)
                    for x in (held.key, held.value)
                )
                unseen = None
                if held.start > start:
                    columns = torch.arange(start, stop, device=key.device) < held.start
                    unseen = columns.repeat(len(lengths))
                self._write(layer, key, value, unseen)
            if stop == step.count:
                self._store_states(step)

    def _store_states(self, step: _Step) -> None:
        """Write the states of the rows that have new tokens, at the end of a step."""
        if not step.states or not step.num_tokens:
            return
        pages = self._pages
        assert pages is not None
        for (layer, name), rows in step.states.items():
            expected, shape = self._memory.states[layer, name].shape[1:], rows.shape[1:]
            if shape != expected:
                raise ValueError(
                    f"states: expected {tuple(expected)} for {name} of layer {layer} as in the "
                    f"first forward, got {tuple(shape)}"
                )
        slots = pages.state_slots(stream=pages.device.as_stream(None, "torch"))
        slots = torch.from_dlpack(slots).long()
        stored = [row for row, n in enumerate(step.lengths) if n]
        for key, rows in step.states.items():
            states = self._memory.states[key]
            states[slots] = (rows if len(stored) == len(rows) else rows[stored]).to(states.dtype)

    # --- Rows of the batch ---

    def reset(self) -> None:
        """Drop all tokens; the memory stays."""
        self._abort()
        for seq in self._rows:
            assert self._pages is not None
            self._pages.remove_sequence(seq)
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of each row.

        Parameters
        ----------
        tokens_to_remove : minus their number, as in transformers; 0: none

        Raises
        ------
        ValueError : it is positive, or there are fewer tokens
        NotImplementedError : a layer has a recurrent state, which cannot be taken back
        KvcupyError : the windows or the convolutions have left behind what the tokens that remain
            see
        """
        self._end()
        if isinstance(tokens_to_remove, torch.Tensor):  # before transformers 5.17
            tokens_to_remove = tokens_to_remove.item()
        checks.require_int(tokens_to_remove, "tokens_to_remove")
        count = -tokens_to_remove
        if not 0 <= count <= self._length:
            raise ValueError(
                f"tokens_to_remove: expected -{self._length} to 0, got {tokens_to_remove}"
            )
        pages = self._pages
        if pages is None:
            return
        if count and not self.is_croppable:
            raise NotImplementedError(
                "tokens_to_remove: expected 0 for a model with recurrent layers, whose states "
                f"cannot be taken back, got {tokens_to_remove}"
            )
        inputs: dict[tuple[int, str], torch.Tensor] = {}
        for key, states in self._memory.states.items():
            width, recorded = states.shape[-1], self._inputs.get(key)
            if recorded is not None and recorded.shape[-1] >= width + count:
                inputs[key] = recorded[..., : recorded.shape[-1] - count][..., -width:]
            elif count:
                raise KvcupyError(f"tokens_to_remove: the convolutions {_LEFT_BEHIND}")
        if not count:
            self._inputs = inputs
            return
        length = self._length - count
        lengths = [count] * len(self._rows)
        if self._mask is not None:
            lengths = self._mask[:, length:].sum(1).tolist()
        for seq, n in zip(self._rows, lengths, strict=True):
            left = pages.sequence_length(seq) - n
            if not pages._can_rewind(seq, left):
                raise KvcupyError(f"tokens_to_remove: the windows {_LEFT_BEHIND}")
        stream = pages.device.as_stream(None, "torch")
        with pages._rewinding(self._rows, lengths, stream) as slots:
            for key, rows in inputs.items():
                states = self._memory.states[key]
                for slot, row in zip(slots, rows.to(states.dtype), strict=True):
                    if slot >= 0:
                        states[slot] = row
        if self._mask is not None:
            self._mask = self._mask[:, :length]
        self._inputs, self._length = inputs, length

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
        self._end()
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)], "repeats")

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows of `indices`, int (B',) or bool (B,); raises as `reorder_cache` does."""
        self._end()
        rows = torch.arange(len(self._rows))[torch.as_tensor(indices).cpu()].tolist()
        self._select(rows, "indices")

    def _select(self, parents: Sequence[int], name: str) -> None:
        self._end()
        if self._pages is None:
            return
        for row in parents:
            if not 0 <= row < len(self._rows):
                raise ValueError(f"{name}: expected rows 0 to {len(self._rows) - 1}, got {row}")
        rows = [self._rows[row] for row in parents]
        again = [i for i, row in enumerate(parents) if row in parents[:i]]
        for i, seq in zip(again, self._fork([rows[i] for i in again], name), strict=True):
            rows[i] = seq  # the first child of a row takes its place
        for seq in set(self._rows).difference(rows):
            self._pages.remove_sequence(seq)
        self._rows = rows
        if self._mask is not None:
            self._mask = self._mask[list(parents)]
        self._inputs = {key: rows[list(parents)] for key, rows in self._inputs.items()}

    def _fork(self, parents: Sequence[int], name: str = "") -> list[int]:
        """Fork sequences, all or none; `name` is the argument that needs the room, if one does."""
        pages, forked = self._pages, list[int]()
        assert pages is not None
        try:
            for parent, seq in zip(parents, self._memory.names, strict=False):
                pages.fork_sequence(parent, seq)
                forked.append(seq)
        except BaseException as error:
            if not name:  # windows and states have room for rows, other layers for pages
                counted = (g.pool.allocator for g in pages._groups if not g.window)
                is_full = any(allocator.num_available == 0 for allocator in counted)
                name = "num_pages" if is_full else "max_batch_size"
            for seq in forked:
                pages.remove_sequence(seq)
            if isinstance(error, CacheFull):
                message = f"no room for {len(parents)} more rows: {error.args[0]}"
                raise CacheFull(message, name) from error
            raise
        return forked


@dataclass
class _Memory:
    """What a cache and its copies share."""

    pages: PagedKVCache | None = None
    # of a layer: its pool, its number there
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    # (slots, ...), by layer and name
    states: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    names: Iterator[int] = field(default_factory=count)  # of sequences to add
    has_recurrence: bool = False  # whether a layer has a state that is no convolution's
    # the cache that has begun the last step, which may be open
    last: Callable[[], PagedCache | None] = lambda: None


@dataclass
class _Held:
    """Keys and values of a layer, from a column of the batch on."""

    key: torch.Tensor
    value: torch.Tensor
    start: int


@dataclass
class _Step:
    """A forward of the model, from its first layer to its last."""

    attended: int = 0  # how many layers with attention have been there
    # the states that have been asked for, by layer and name
    visited: set[tuple[int, str]] = field(default_factory=set)
    # those whose new states the model has passed
    updated: set[tuple[int, str]] = field(default_factory=set)
    # new ones, (B, ...), by layer and name
    states: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    # of convolutions since the last crop, if they are recorded
    inputs: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    state_slots: torch.Tensor | None = None  # where the old ones are; None: not yet asked for
    # the step of the paged cache; None if all tokens are padding
    forward: AbstractContextManager[None] | None = None
    # keys and values of the first forward by layer, before there are pages; else None
    first: dict[int, _Held] | None = None
    count: int = 0  # new tokens per row, padding included
    num_tokens: int = 0
    # new tokens of each row that are stored; num_tokens is their sum
    lengths: list[int] = field(default_factory=list)
    # int64 (num_tokens,), which of the B * count tokens are stored; None: all
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # of all tokens so far, or None
    added: list[int] = field(default_factory=list)  # sequences that the step has added


def _columns(x: Any, start: int, stop: int) -> Any:
    """Return columns of (B, H, n, D); those before 0 are zero."""
    part = x[:, :, max(start, 0) : stop]
    return part if start >= 0 else torch.nn.functional.pad(part, (0, 0, -start, 0))


def _state_groups(states: dict[tuple[int, str], torch.Tensor]) -> Iterator[Recurrent]:
    """Yield groups of the layers with equal states."""
    shapes: dict[int, dict[str, tuple[tuple[int, ...], Any]]] = {}
    for (layer, name), rows in states.items():
        shapes.setdefault(layer, {})[name] = tuple(rows.shape[1:]), rows.dtype
    alike: list[tuple[dict[str, Any], list[int]]] = []
    for layer, state in shapes.items():
        layers = next((known for other, known in alike if other == state), None)
        if layers is None:
            alike.append((state, layers := []))
        layers.append(layer)
    for state, layers in alike:
        yield Recurrent(layers=layers, state=state, checkpoint_tokens=_NO_CHECKPOINTS)
