"""The states of recurrent layers: one live per sequence, and states kept from before.

    slot      0             1             2             3
              live of "a"   kept at 512   live of "b"   kept at 1024
    layer 0   conv | ssm    conv | ssm    ...
    layer 1   conv | ssm    ...

The bytes of a slot are contiguous, a page of a pool. The model updates the live rows in place. A
state is kept by a copy to another slot, which forks share; a new live state is a copy of a kept
one, or zero. Kept states use the slots that no live state needs, and the oldest are evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from ... import checks
from ...arrays import ArrayView, reshaped, view
from ...arrays.dlpack import exporting
from ...devices.protocol import Device
from ...errors import ORDERLY_ERRORS, CacheFull, TransferError
from ...formats import FORMATS, num_bytes, numpy_dtype
from ...ops.pages import copy_pages
from ...ops.transfer_kernels import upload
from ..hazards import Completion, CopiedPages, PageAccess
from ..pool import MLAPool, array_of
from .groups import Recurrent, part_bytes
from .page_group import add_load
from .sequences import CachedSequence, OffloadedPages

_NO_SLOT = -1


@dataclass(eq=False)
class KeptState:
    """A state of some sequences after their first tokens.

    copied : the copy or load to its slot
    users : how many sequences and exports refer to it
    num_exports : how many exports
    is_pulled : whether `copied` is a pull, for which later copies do not wait
    """

    slot: int
    copied: Completion
    users: int = 1
    num_exports: int = 0
    is_pulled: bool = False

    def is_usable(self, *, wait: bool = True) -> bool:
        """Return whether later copies find the state in its slot.

        wait : for a pull in progress, which may fail; False: it does not count
        """
        if self.is_pulled and self.copied.failure is None:
            with suppress(TransferError):
                if not wait:
                    return self.copied.done()
                self.copied.synchronize()
        return self.copied.failure is None


@dataclass(eq=False)
class SequenceState:
    """The states of a sequence.

    live : slot of the state after all its tokens; none while it is empty
    before_tree : slot of the state before its uncommitted tree
    kept : states by the number of tokens before them, in order
    offloaded : in host memory, the live state and then those that were kept, if it is offloaded
    offloaded_kept : the numbers of tokens before the latter
    """

    live: int = _NO_SLOT
    before_tree: int = _NO_SLOT
    kept: dict[int, KeptState] = field(default_factory=dict)
    offloaded: OffloadedPages | None = None
    offloaded_kept: Sequence[int] = ()


class States:
    """The states of the recurrent groups of a cache. They share the numbers of their slots.

    label : names the groups in errors
    layers : their numbers in the model
    pool : has a page for each slot
    reclaim : called before slots are allocated: some that were held may have become free
    """

    def __init__(self, groups: Sequence[Recurrent], num_slots: int, device: Device) -> None:
        self.num_slots = num_slots
        self.checkpoint_tokens = groups[0].checkpoint_tokens
        self._device = device
        self.label = " and ".join(map(str, groups))
        widths = [group.state_bytes() // len(group.layers) for group in groups]
        total = sum(w * len(g.layers) for w, g in zip(widths, groups, strict=True))
        num_layers = total // widths[0] if len(set(widths)) == 1 else 1
        self.pool = MLAPool(
            num_slots, 1, num_layers, latent_dim=total // num_layers, rope_dim=0, dtype="int8",
            layout="page_first_direct", device=device,
        )  # fmt: skip
        self._allocator = self.pool.allocator
        self._bytes = reshaped(self.pool.parts[0], (num_slots, total), (total, 1))
        self.layers = tuple(layer for group in groups for layer in group.layers)
        self._zero = view(device.zeros((total,), "int8"))
        self._arrays: dict[tuple[int, str], Any] = {}
        self._parts: list[str] = []  # the number of the group, and the name
        self._rows: list[ArrayView] = []  # of each part (slots, layers, ...)
        start = 0
        for number, (group, width) in enumerate(zip(groups, widths, strict=True)):
            offset = start
            for name, (shape, dtype) in group.state.items():
                rows = self._part(offset, len(group.layers), width, shape, dtype)
                for i, layer in enumerate(group.layers):
                    array = array_of(device, rows[:, i])
                    self._arrays[layer, name] = exporting(array) if dtype in FORMATS else array
                self._parts.append(f"state {number} {name}")
                self._rows.append(rows)
                offset += part_bytes(shape, dtype)
            start += width * len(group.layers)
        self.reclaim: Callable[[], object] | None = None
        self._of: dict[Hashable, SequenceState] = {}
        self._kept: dict[int, KeptState] = {}  # by slot, the oldest first

    def _part(
        self, offset: int, num_layers: int, width: int, shape: Sequence[int], dtype: Any
    ) -> ArrayView:
        """View a part of the states of a group, (slots, layers, *shape); a layer has `width`."""
        whole = self._bytes
        strides = [num_bytes(tuple(shape[i + 1 :]), dtype) for i in range(len(shape))]
        return ArrayView(
            whole.pointer + offset, (self.num_slots, num_layers, *shape),
            (whole.strides[0], width, *strides), dtype, whole.device,
            library=whole.library, owner=whole.owner,
        )  # fmt: skip

    def array(self, layer: int, name: str) -> Any:
        """Return a part of the state of a layer, (slots, ...)."""
        checks.require_int(layer, "layer")
        if not isinstance(name, str):
            raise TypeError(f"name: expected a string, got {name!r}")
        array = self._arrays.get((layer, name))
        if array is None:
            known = ", ".join(f"{layer} {name}" for layer, name in self._arrays)
            raise ValueError(f"layer, name: expected one of {known}, got {layer} {name!r}")
        return array

    def slots(self, seqs: Iterable[Hashable]) -> list[int]:
        """Return the slots of the live states of sequences."""
        return [self._of[seq].live for seq in seqs]

    @property
    def num_available(self) -> int:
        """Slots that are free, or that only kept states use."""
        return self._allocator.num_available + sum(map(_is_evictable, self._kept.values()))

    # --- Sequences ---

    def add(self, seq: Hashable) -> None:
        """Add an empty sequence."""
        self._of[seq] = SequenceState()

    def remove(self, seq: Hashable) -> None:
        """Drop the states of a sequence."""
        state = self._of.pop(seq)
        self._drop_kept(state, 0)
        self._free(state.live, state.before_tree)
        if state.offloaded is not None:
            state.offloaded.free()

    def clear(self) -> None:
        """Drop all sequences."""
        for seq in list(self._of):
            self.remove(seq)

    def restorable(self, seq: Hashable, length: int, current: int) -> int:
        """Return the most tokens, up to `length`, after which a state of a sequence is kept.

        `current` is its length.
        """
        if length == current:
            return length
        kept = self._of[seq].kept
        return next((n for n in reversed(kept) if n <= length and kept[n].is_usable()), 0)

    def fork(
        self, access: PageAccess, parent: Hashable, child: Hashable, length: int, current: int,
        sequence: CachedSequence, load: Callable[[int], Completion] | None = None,
    ) -> Completion | None:  # fmt: skip
        """Add a sequence of the first `length` tokens of another, after which a state is kept.

        load : begins to bring the state to a slot, and is returned; None: the other sequence has it
        """
        source = self._of[parent]
        forked = SequenceState()
        loaded = None
        if load is not None:
            loaded = self.receive(child, load)
            forked = self._of[child]
        elif length:
            start = source.live if length == current else source.kept[length].slot
            forked.live = self._allocate(1, keep=start)[0]
            self._copy_or_free(access, [(start, forked.live)], [forked.live], sequence)
        for n, kept in source.kept.items():
            if n <= length:
                kept.users += 1
                forked.kept[n] = kept
        self._of[child] = forked
        return loaded

    def has_kept(self, seq: Hashable, length: int) -> bool:
        """Return whether the state after the first tokens of a sequence is kept."""
        kept = self._of[seq].kept.get(length)
        return kept is not None and kept.is_usable()

    def restore(
        self, access: PageAccess, seq: Hashable, length: int, sequence: CachedSequence,
        load: Callable[[int], Completion] | None = None,
    ) -> Completion | None:  # fmt: skip
        """Return to the state after the first `length` tokens, one that is kept; 0: to none.

        load : as in `fork`
        """
        state = self._of[seq]
        if load is not None:
            loaded = StateLoad(load(state.live))
            self._drop_kept(state, length)
            return loaded
        self.forget(seq, length)
        if length:
            self._copy(access, [(state.kept[length].slot, state.live)], sequence)
        return None

    def forget(self, seq: Hashable, length: int) -> None:
        """Drop the states of a sequence after `length` tokens, but for 0 not the live one."""
        state = self._of[seq]
        self._drop_kept(state, length)
        if length == 0:
            self._free(state.live)
            state.live = _NO_SLOT

    def receive(self, seq: Hashable, load: Callable[[int], Completion]) -> Completion:
        """Add a sequence whose state `load`, called with a slot, begins to bring there."""
        slot = self._allocate(1)[0]
        try:
            loaded = StateLoad(load(slot))
        except ORDERLY_ERRORS:
            self._free(slot)
            raise
        self.adopt(seq, slot)
        return loaded

    # --- Host memory, and other caches ---

    def find(self, seq: Hashable) -> SequenceState:
        """Return the states of a sequence."""
        return self._of[seq]

    def sound_kept(self, seq: Hashable) -> dict[int, int]:
        """Return the slots of kept states by the number of tokens before them, the newest first."""
        return {n: kept.slot for n, kept in self._sound_kept(seq)}

    def _sound_kept(self, seq: Hashable) -> list[tuple[int, KeptState]]:
        kept = reversed(self._of[seq].kept.items())
        return [(n, state) for n, state in kept if state.is_usable(wait=False)]

    def offload(self, seq: Hashable, offloaded: OffloadedPages, kept: Iterable[int]) -> None:
        """Replace the live state and the kept ones with states in host memory."""
        state = self._of[seq]
        self._drop_kept(state, 0)
        self._free(state.live)
        state.live, state.offloaded, state.offloaded_kept = _NO_SLOT, offloaded, tuple(kept)

    def take_slots(self, num_kept: int) -> list[int]:
        """Allocate a slot for a live state, and up to the free ones for kept states."""
        return self._allocate(1 + min(num_kept, max(0, self._allocator.num_free - 1)))

    def onboard(self, seq: Hashable, slots: Sequence[int], load: Completion) -> None:
        """Give a sequence slots again, which a transfer fills: live, and kept, the newest first."""
        state = self._of[seq]
        state.live, *kept = slots
        slots_kept = dict(zip(state.offloaded_kept, kept, strict=False))
        for n, slot in reversed(slots_kept.items()):
            state.kept[n] = self._kept[slot] = KeptState(slot, load)
        state.offloaded, state.offloaded_kept = None, ()

    def hold(self, access: PageAccess, seq: Hashable) -> tuple[int, Callable[[], object]]:
        """Allocate a slot, and return it with a function that copies the live state there."""
        slot = self._allocate(1)[0]
        return slot, lambda: self._copy(access, [(self._of[seq].live, slot)])

    def hold_kept(self, seq: Hashable, most: int) -> dict[int, KeptState]:
        """Hold the newest kept states until `release_kept`.

        Returns them by the number of tokens before them, the newest first. The loads of the
        sequence include the loads of them.
        """
        held = dict(islice(self._sound_kept(seq), most))
        for kept in held.values():
            kept.users += 1
            kept.num_exports += 1
        return held

    def release_kept(self, held: Iterable[KeptState]) -> None:
        """End a hold."""
        for kept in held:
            kept.num_exports -= 1
            self._drop(kept)

    def take_kept_slots(self, count: int) -> list[int]:
        """Allocate slots for kept states, for which older ones are evicted; none if too few."""
        return self._allocator.alloc(count).tolist() if self._make_room(count) else []

    def adopt(
        self, seq: Hashable, slot: int, kept: Mapping[int, int] | None = None,
        pull: Completion | None = None,
    ) -> None:  # fmt: skip
        """Add a sequence whose live state is in an allocated slot.

        kept : slots of states that `pull` brings, as `hold_kept` returns them
        """
        state = self._of[seq] = SequenceState(live=slot)
        for n, kept_slot in reversed([*(kept or {}).items()]):
            assert pull is not None
            state.kept[n] = self._kept[kept_slot] = KeptState(kept_slot, pull, is_pulled=True)

    def free(self, slots: Iterable[int]) -> None:
        """Free allocated slots that belong to no sequence."""
        self._free(*slots)

    # --- Files ---

    def tensors(self, access: PageAccess, seq: Hashable) -> dict[str, np.ndarray[Any, Any]]:
        """Return the live state of a sequence with tokens: of each part, the bytes by layer."""
        slot = self._of[seq].live
        with access.on(access.copy_stream):
            pass  # after all work on the states
        access.copy_stream.synchronize()
        return {
            name: _as_bytes(self._device.to_numpy(rows[slot]))
            for name, rows in zip(self._parts, self._rows, strict=True)
        }

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return format and shape of the results of `tensors`."""
        return {
            name: ("int8", (rows.shape[1], rows.num_bytes // (rows.shape[0] * rows.shape[1])))
            for name, rows in zip(self._parts, self._rows, strict=True)
        }

    def load(
        self, access: PageAccess, seq: Hashable, tensors: Mapping[str, np.ndarray[Any, Any]],
        sequence: CachedSequence,
    ) -> None:  # fmt: skip
        """Add a sequence with the live state of `tensors`."""
        state = SequenceState()
        if sequence.length:
            state.live = self._allocate(1)[0]
            try:
                self._write(access, state.live, tensors)
            except ORDERLY_ERRORS:
                self._free(state.live)
                raise
        self._of[seq] = state

    def _write(
        self, access: PageAccess, slot: int, tensors: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        stream = self._device.as_stream(None, self._rows[0].library)
        with access.on(stream):
            for name, rows in zip(self._parts, self._rows, strict=True):
                target = rows[slot]
                bits = np.ascontiguousarray(tensors[name]).view(numpy_dtype(target.format))
                source = self._device.asarray(bits.reshape(target.shape))
                self._device.copy(target, source, stream=stream)
        stream.synchronize()

    # --- Steps ---

    def check_trees(
        self, names: Sequence[Hashable], nodes: Sequence[list[int] | None],
        pending: Sequence[Sequence[int]],
    ) -> None:  # fmt: skip
        """Raise for trees whose states cannot be computed in place, one node after another."""
        for name, new, earlier in zip(names, nodes, pending, strict=True):
            if new is None:
                continue
            if earlier:
                raise NotImplementedError(
                    f"token_tree: the tree of {name!r} is not committed, and a cache with "
                    "recurrent groups takes one step of a tree"
                )
            if new != list(range(-1, len(new) - 1)):
                raise NotImplementedError(
                    f"token_tree: expected a chain for {name!r} in a cache with recurrent groups, "
                    f"which have one state per sequence, got {new}"
                )

    def begin(
        self, access: PageAccess, names: Sequence[Hashable], sequences: Sequence[CachedSequence],
        in_tree: Sequence[bool],
    ) -> None:  # fmt: skip
        """Give new sequences states of zeros, and keep the states before trees; all or nothing."""
        states = [self._of[name] for name in names]
        fresh = [state for state in states if state.live == _NO_SLOT]
        trees = [state for state, tree in zip(states, in_tree, strict=True) if tree]
        if not fresh and not trees:
            return
        slots = self._allocate(len(fresh) + len(trees))
        live, before = slots[: len(fresh)], slots[len(fresh) :]
        zeroed = dict(zip(map(id, fresh), live, strict=True))
        copied = [
            (state.live, slot) for state, slot in zip(trees, before, strict=True)
            if state.live != _NO_SLOT
        ]  # fmt: skip
        zeros = [*live, *(s for t, s in zip(trees, before, strict=True) if t.live == _NO_SLOT)]
        touched = [
            sequence for state, sequence, tree in zip(states, sequences, in_tree, strict=True)
            if tree or id(state) in zeroed
        ]  # fmt: skip
        self._copy_or_free(access, copied, slots, *touched, zeros=zeros)
        for state, slot in zip(fresh, live, strict=True):
            state.live = slot
        for state, slot in zip(trees, before, strict=True):
            state.before_tree = slot

    def end(
        self, access: PageAccess, names: Sequence[Hashable], sequences: Sequence[CachedSequence],
        is_unreachable: Callable[[Hashable, int], bool],
    ) -> list[tuple[Hashable, int, int]]:  # fmt: skip
        """Keep the states of a step's sequences, as `keep` does, except after uncommitted trees.

        is_unreachable : whether the tokens of a sequence before a state can no longer be restored:
            then the state is dropped
        """
        for name in names:
            kept = self._of[name].kept
            while kept and is_unreachable(name, first := next(iter(kept))):
                self._drop(kept.pop(first))
        ended = zip(names, sequences, strict=True)
        return self.keep(
            access, [(name, sequence) for name, sequence in ended if not sequence.parents]
        )

    def at_checkpoint(self, length: int) -> bool:
        """Return whether the state after `length` tokens is to be kept."""
        return length % self.checkpoint_tokens == 0

    def keep(
        self, access: PageAccess, sequences: Sequence[tuple[Hashable, CachedSequence]]
    ) -> list[tuple[Hashable, int, int]]:
        """Keep the states of sequences whose lengths are multiples of `checkpoint_tokens`.

        Returns sequence, length and slot of each.
        """
        due: list[tuple[Hashable, int, int]] = []
        for name, sequence in sequences:
            state, length = self._of[name], sequence.length
            if self.at_checkpoint(length) and length not in state.kept and self._make_room(1):
                slot = int(self._allocator.alloc(1)[0])
                due.append((name, length, slot))
        if due:
            slots = [slot for *_, slot in due]
            pairs = [(self._of[name].live, slot) for name, _, slot in due]
            loads = state_loads([sequence for _, sequence in sequences])
            copied = self._copy_or_free(access, pairs, slots, after=loads)
            for name, length, slot in due:
                self._of[name].kept[length] = self._kept[slot] = KeptState(slot, copied)
        return due

    def commit(self, seq: Hashable, accepted: bool) -> None:
        """End a tree: keep the state after all its nodes, or return to the one before it."""
        state = self._of[seq]
        dropped = state.before_tree
        if not accepted:
            dropped, state.live = state.live, state.before_tree
        state.before_tree = _NO_SLOT
        self._free(dropped)

    # --- Slots ---

    def _allocate(self, count: int, keep: int = _NO_SLOT) -> list[int]:
        """Allocate slots, all or none; kept states are evicted for them, except one."""
        if self.reclaim is not None:
            self.reclaim()
        if not self._make_room(count, keep):
            raise CacheFull(
                f"{self.label}: expected at most {self.num_available} states that are free of "
                f"{self.num_slots}, got {count}",
                "n",
            )
        slots: list[int] = self._allocator.alloc(count).tolist()
        return slots

    def _make_room(self, count: int, keep: int = _NO_SLOT) -> bool:
        """Evict the oldest kept states until `count` slots are free; False if that is too few."""
        missing = count - self._allocator.num_available
        if missing <= 0:
            return True
        oldest = [
            kept for slot, kept in self._kept.items() if slot != keep and _is_evictable(kept)
        ][:missing]  # fmt: skip
        if len(oldest) < missing:
            return False
        for kept in oldest:
            for state in self._of.values():
                for length in [n for n, each in state.kept.items() if each is kept]:
                    self._drop(state.kept.pop(length))
        return True

    def _drop_kept(self, state: SequenceState, length: int) -> None:
        """Drop the kept states of a sequence after `length` tokens, and all of them for 0."""
        for n in [n for n in state.kept if n > length]:
            self._drop(state.kept.pop(n))

    def _drop(self, kept: KeptState) -> None:
        kept.users -= 1
        if not kept.users:
            del self._kept[kept.slot]
            self._free(kept.slot)

    def _free(self, *slots: int) -> None:
        self._allocator.free([slot for slot in slots if slot != _NO_SLOT])

    # --- Copies ---

    def _copy_or_free(
        self, access: PageAccess, pairs: Sequence[tuple[int, int]], slots: Sequence[int],
        *sequences: CachedSequence, zeros: Sequence[int] = (), after: Sequence[StateLoad] = (),
    ) -> CopiedPages:  # fmt: skip
        """Copy states; after an error the slots are free."""
        try:
            return self._copy(access, pairs, *sequences, zeros=zeros, after=after)
        except ORDERLY_ERRORS:
            self._free(*slots)
            raise

    def _copy(
        self, access: PageAccess, pairs: Sequence[tuple[int, int]], *sequences: CachedSequence,
        zeros: Sequence[int] = (), after: Sequence[StateLoad] = (),
    ) -> CopiedPages:  # fmt: skip
        """Copy states between slots, and zero some, for sequences whose attention waits for it.

        after : more loads to wait for; the loads of the sequences are waited for anyway
        """
        stream = access.copy_stream
        with access.on(stream):
            for load in (*after, *state_loads(sequences)):
                load.wait(stream)
            for slot in zeros:
                self._device.copy(self._bytes[slot], self._zero, stream=stream)
            if pairs:
                numbers = np.array(pairs, np.int64).T
                uploaded = upload([numbers[0], numbers[1]], self._device, stream)
                copy_pages(self.pool, uploaded[0], uploaded[1], stream=stream)
            copied = CopiedPages(stream)
        for sequence in sequences:
            add_load(sequence, copied)
        return copied


class StateLoad(Completion):
    """The load of a state, which has one part for all layers."""

    def __init__(self, load: Completion) -> None:
        self._load = load

    @property
    def load(self) -> Completion:
        """The transfer or pull itself."""
        return self._load

    @property
    def failure(self) -> BaseException | None:
        return self._load.failure

    def done(self) -> bool:
        return self._load.done()

    def synchronize(self) -> None:
        self._load.synchronize()

    def wait(self, stream: Any = None) -> None:
        self._load.wait(stream)


def state_loads(sequences: Iterable[CachedSequence]) -> list[StateLoad]:
    """Return the loads of states of sequences."""
    return [load for s in sequences for load in s.loads if isinstance(load, StateLoad)]


def _is_evictable(kept: KeptState) -> bool:
    return not kept.num_exports


def _as_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the bytes of each layer of (layers, ...), int8 (layers, bytes)."""
    flat: np.ndarray[Any, Any] = np.ascontiguousarray(array).reshape(len(array), -1)
    return flat.view(np.int8)
