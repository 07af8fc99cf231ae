"""The steps of a paged cache, its forks and pops: each takes effect as a whole or not at all."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from ... import checks
from ...config import cache_logger, config
from ...devices.protocol import Stream
from ...errors import ORDERLY_ERRORS, CacheFull, CaptureError, DeviceError, KvcupyError
from ..hazards import AccessOrder, CopyStream, PageAccess
from ..tiered.group_prefixes import GroupedLease
from .exchange import Export
from .page_group import PageGroup, add_load
from .sequences import CachedSequence, Reservation, check_tree_nodes, tree_depths, tree_path
from .states import States
from .step import GroupStep, Step
from .tables import StepTables, TableRing, Tables
from .tiers import Tiers, losing

Nodes = list[int] | None
"""The parents of a sequence's new nodes; None for plain tokens."""


class Steps:
    """The steps of a cache.

    groups : the groups of attention layers, whose sequences have equal names and lengths
    states : of the recurrent groups, or None
    running : the step between its begin and its end, or None
    tables : of the running step
    access : access to the pages outside of attention
    tiers : once the cache is attached to a TieredCache
    """

    def __init__(
        self, groups: Sequence[PageGroup], states: States | None = None, *,
        copy_stream: Any, slots_in_flight: int, max_batch_tokens: int, max_pages: int,
    ) -> None:  # fmt: skip
        self._groups, self._states = groups, states
        self._pool, self._sequences = groups[0].pool, groups[0].sequences
        self._max_positions = groups[0].layers.rope.max_positions
        self._max_batch_tokens, self._max_pages = max_batch_tokens, max_pages
        self._order = AccessOrder()
        copies = CopyStream(self._pool.device, copy_stream)
        self._ring, self._lists_ring = (
            TableRing(copies, slots_in_flight, self._order.begin) for _ in range(2)
        )
        self.access = PageAccess(copies, self._order, self._ring.streams_in_step)
        self._lists: StepTables | None = None
        self._missed: set[tuple[int, ...]] = set()  # layers that a warning has named
        self.running: Step | None = None
        self.tables: StepTables | None = None
        self.tiers: Tiers | None = None

    def is_running(self, seq: Hashable) -> bool:
        """Return whether a sequence belongs to the running step."""
        return self.running is not None and seq in self.running.names

    @property
    def parts(self) -> Sequence[GroupStep]:
        """The running step in each group; () if none is running."""
        return () if self.running is None else self.running.parts

    def start_of(self, seq: Hashable) -> int | None:
        """Return the length of a sequence before the running step; None if it is not in it."""
        step = self.running
        if step is None or seq not in step.names:
            return None
        number = step.names.index(seq)
        return step.sequences[number].length - step.counts[number]

    def on_device(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence; raise if it is offloaded."""
        sequence = self._sequences.find(seq, name)
        _require_on_device(sequence, seq, name)
        return sequence

    def settled(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence; raise if it is in the running step or its tree is not committed."""
        sequence = self.on_device(seq, name)
        self.require_outside(seq, name)
        if sequence.parents:
            raise ValueError(f"{name}: {seq!r} has a token tree: call commit_token_tree first")
        return sequence

    def require_outside(self, seq: Hashable, name: str = "seq") -> None:
        """Raise if a sequence belongs to the running step."""
        if self.is_running(seq):
            raise KvcupyError(
                f"{name}: {seq!r} belongs to the running step; call end_forward first"
            )

    # --- Steps ---

    def begin(self, seqs: Any, append_lens: Any, token_tree: Any) -> None:
        """Append tokens to sequences; all or nothing."""
        if self.running is not None:
            raise KvcupyError("a step is running: call end_forward or abort_forward first")
        names, counts, entries = _check_batch(seqs, append_lens, token_tree)
        groups, states = self._groups, self._states
        found = [group.sequences.find_all(names, "seqs") for group in groups]
        nodes = self._check(names, found[0], counts, entries)
        in_tree = [new is not None for new in nodes]
        if states is not None:
            states.check_trees(names, nodes, [sequence.parents for sequence in found[0]])
        reserved: list[Reservation] = []
        try:
            for group, sequences in zip(groups, found, strict=True):
                reserved.append(group.sequences.reserve(sequences, counts))
            copied = [
                group.copy_shared(self.access, pages.copies) if pages.copies else None
                for group, pages in zip(groups, reserved, strict=True)
            ]
            if states is not None:
                states.begin(self.access, names, found[0], in_tree)
        except ORDERLY_ERRORS as error:
            if isinstance(error, CacheFull):
                error.argument = "append_lens"
            for group, pages in zip(groups, reserved, strict=False):
                group.pool.allocator.free(pages.pages)
            raise
        parts = []
        for group, sequences, pages, copies in zip(groups, found, reserved, copied, strict=True):
            if copies is not None:
                for copy in pages.copies:
                    add_load(copy.sequence, copies)
            group.sequences.grow(sequences, counts, pages)
            for sequence, new in zip(sequences, nodes, strict=True):
                if new is not None:
                    sequence.parents.extend(new)
            parts.append(GroupStep(group, sequences, counts, in_tree, pages.copies, copies))
        slots = [] if states is None else states.slots(names)
        self.running = step = Step(names, counts, in_tree, parts, self._max_pages, slots)
        self.tables = self._ring.open(step)
        try:
            for part in parts:
                part.free_unseen()
        except ORDERLY_ERRORS:
            self.abort()
            raise

    def end(self, keep_step: bool = False) -> None:
        """Close the running step; windows slide, and states are kept."""
        step = self.running
        if step is None:
            raise KvcupyError("no step is running: call begin_forward before end_forward")
        tables = self.tables
        assert tables is not None
        try:
            try:
                self._close()
            finally:
                self._finish_exports(step)
        finally:
            for part in step.parts:
                part.group.sequences.release_replaced(part.copies)
            for part in step.parts:
                part.end(keep_step)
        for part in step.parts:
            part.group.demote(self.access, part.sequences)
        # While a stream is captured, nothing has updated the states.
        if self._states is not None and not any(s.capturing for s in tables.streams):
            kept = self._states.end(self.access, step.names, step.sequences, self._is_unreachable)
            if self.tiers is not None and kept:
                self.tiers.publish_states(kept)
        if config.strict:
            self._warn_of_layers(step.parts)

    def _warn_of_layers(self, parts: Sequence[GroupStep]) -> None:
        """Name the layers of a step that have not attended, once, if others have.

        A step without any is for tokens from elsewhere. It is no error: other kernels may have
        written them, or `set_kv` is to follow.
        """
        missing = tuple(sorted(
            number for part in parts for layer, number in enumerate(part.group.model_layers)
            if layer not in part.attended
        ))  # fmt: skip
        if missing and missing not in self._missed and any(part.attended for part in parts):
            self._missed.add(missing)
            cache_logger.warning(
                "%s %s did not attend in a step in which others did: %s keys and values of its "
                "tokens are undefined, unless your kernels have written them or set_kv does",
                "layers" if len(missing) > 1 else "layer",
                ", ".join(map(str, missing)),
                "their" if len(missing) > 1 else "its",
            )

    def _finish_exports(self, step: Step) -> None:
        """Let the layers of exported sequences go out whose attention did not run in the step."""
        exports = [export for part in step.parts for export in part.exports]
        if not exports:
            return
        stream = self.access.copy_stream
        try:
            with self.access.on(stream, *(s for part in step.parts for s in part.sequences)):
                pass  # waits for the loads of their pages too
            for export in exports:
                export.finish(stream)
        except BaseException:
            with ExitStack() as undo:
                self._withdraw(exports, undo)
            raise

    def _withdraw(self, exports: Sequence[Export], undo: ExitStack) -> None:
        """Let `undo` take offers back, after all work so far if no error prevents that."""
        for export in exports:
            undo.callback(export.withdraw, self.access.copy_stream)
        if exports:
            undo.callback(self.access.copy_stream_after_all)

    def abort(self) -> None:
        """Close the running step, if there is one, and take its tokens back."""
        step = self.running
        if step is None:
            return
        states_used = self.tables is not None and self.tables.states_used
        with ExitStack() as undo:  # from the last to the first; all of them, after an error too
            if self._states is not None:
                for row in zip(step.names, step.sequences, step.in_tree, strict=True):
                    undo.callback(self._abort_state, *row, states_used)
            self._withdraw([export for part in step.parts for export in part.exports], undo)
            for part in step.parts:
                undo.callback(part.abort)
            undo.callback(self._close)

    def _abort_state(
        self, seq: Hashable, sequence: CachedSequence, in_tree: bool, states_used: bool
    ) -> None:
        """Return to a state that the model has not updated in the step."""
        assert self._states is not None
        if in_tree:
            self._states.commit(seq, accepted=not states_used)
        elif states_used or sequence.length == 0:
            self._return_to(seq, self._restorable(seq, sequence.length, is_live=False))

    def lists(self, stream: Stream) -> Tables:
        """Return the page lists of the running step; the first call uploads them."""
        if stream.capturing:
            raise CaptureError("page_table_csr: its lengths differ each step; use block_table")
        if self._lists is None:
            assert self.running is not None
            self._lists = self._lists_ring.open(self.running, self.running.page_lists)
        return self._lists.on(stream)

    def _close(self) -> None:
        open_tables = [tables for tables in (self.tables, self._lists) if tables is not None]
        self.running = self.tables = self._lists = None
        for group in self._groups:
            group.layers.end_step()
        try:
            for tables in open_tables:
                tables.close()
        finally:
            for stream in dict.fromkeys(s for tables in open_tables for s in tables.streams):
                self._order.end(stream)

    # --- Trees ---

    def commit(self, seqs: Any, leaves: Any) -> list[int]:
        """Keep one path of each tree; all or nothing.

        Returns how many tokens of each path are dropped too, because no state after them was kept.
        """
        names, chosen, _ = _check_batch(seqs, leaves, None, "leaves")
        sequences = self._sequences.find_all(names, "seqs")
        paths = []
        for name, sequence, leaf in zip(names, sequences, chosen, strict=True):
            self.require_outside(name, "seqs")
            if not sequence.parents:
                raise ValueError(f"seqs: expected sequences with a token tree, got {name!r}")
            checks.require_int(leaf, "leaves")
            if not -1 <= leaf < len(sequence.parents):
                raise ValueError(
                    f"leaves: expected -1 to {len(sequence.parents) - 1} for {name!r}, got {leaf}"
                )
            paths.append(tree_path(sequence.parents, leaf))

        missing = [0] * len(names)
        if self._states is not None:
            accepted = [len(p) == len(s.parents) for p, s in zip(paths, sequences, strict=True)]
            missing = [0 if a else len(p) for a, p in zip(accepted, paths, strict=True)]
            paths = [path if a else [] for a, path in zip(accepted, paths, strict=True)]
        found = [group.sequences.find_all(names, "seqs") for group in self._groups]
        at_checkpoint = self._ending_at_checkpoint(names, sequences, paths)
        try:
            for group, members in zip(self._groups, found, strict=True):
                group.move_paths(self.access, members, paths)
            if at_checkpoint:  # an earlier failure surfaces while the trees can be dropped
                with suppress(CaptureError):
                    self.access.copy_stream_after_all()
        except DeviceError:  # some arrays may have been moved, and must not be moved again
            self._commit(names, found, [0] * len(names))
            raise
        self._commit(names, found, list(map(len, paths)))
        if at_checkpoint and self._states is not None:
            with losing("states at checkpoints"):
                kept = self._states.keep(self.access, at_checkpoint)
                if self.tiers is not None and kept:
                    self.tiers.publish_states(kept)
        return missing

    def _ending_at_checkpoint(
        self, names: Sequence[Hashable], sequences: Sequence[CachedSequence],
        paths: Sequence[Sequence[int]],
    ) -> list[tuple[Hashable, CachedSequence]]:  # fmt: skip
        """Return the sequences whose states are to be kept once these paths are committed."""
        if (states := self._states) is None:
            return []
        return [
            (name, sequence)
            for name, sequence, path in zip(names, sequences, paths, strict=True)
            if path and states.at_checkpoint(sequence.length)
        ]

    def _commit(
        self, names: Sequence[Hashable], found: Sequence[Sequence[CachedSequence]],
        counts: Sequence[int],
    ) -> None:  # fmt: skip
        """Keep the first nodes of each tree, `counts` of them."""
        if self._states is not None:
            for name, sequence, count in zip(names, found[0], counts, strict=True):
                self._states.commit(name, accepted=count == len(sequence.parents))
        for group, sequences in zip(self._groups, found, strict=True):
            for sequence, count in zip(sequences, counts, strict=True):
                group.commit(sequence, count)

    # --- Sequences ---

    def fork(self, parent: Hashable, child: Hashable, at: Any) -> int:
        """Add a sequence that shares the first tokens of another.

        Returns how many of the first `at` it lacks, because they cannot be restored.
        """
        source = self.settled(parent, "parent")
        count = self._sequences.require_fork(source, child, at)
        kept = self._restorable(parent, count)
        lease = self._acquire_after(parent, kept, count)
        load = loaded = None
        forked = []
        try:
            if lease is not None and self.tiers is not None:
                kept, load = lease.num_blocks * self._pool.page_size, self.tiers.load_state(lease)
            for group in self._groups:
                shared = group.sequences.find(parent)
                group.fork(self.access, shared, child, kept)
                forked.append(group)
            if self._states is not None:
                sequence = self._sequences.find(child)
                loaded = self._states.fork(
                    self.access, parent, child, kept, source.length, sequence, load
                )
        except ORDERLY_ERRORS:
            for group in forked:
                group.sequences.remove(child)
            if lease is not None:
                lease.release()
            raise
        if self.tiers is not None:
            self.tiers.fork(parent, child)
            if lease is not None:
                self.tiers.fill(child, lease, loaded)
        return count - kept

    def _acquire_after(self, seq: Hashable, length: int, most: int) -> GroupedLease | None:
        """Acquire from tiers what restores more than `length` tokens; None if that is nothing."""
        if self.tiers is None or length == most:
            return None
        return self.tiers.acquire_more(seq, length, most)

    def pop(self, seq: Hashable, n: Any) -> int:
        """Drop the last tokens of a sequence.

        Returns how many more are dropped, because some group cannot restore the rest.
        """
        sequence = self.settled(seq)
        checks.require_int(n, "n")
        if not 0 <= n <= sequence.length:
            raise ValueError(f"n: expected 0 to {sequence.length}, got {n}")
        left = sequence.length - int(n)
        kept = self._restorable(seq, left)
        lease = self._acquire_after(seq, kept, left)
        if lease is not None and self.tiers is not None:
            kept = lease.num_blocks * self._pool.page_size
            self._shorten(seq, kept, lease, self.tiers)
        elif self._states is not None and kept < sequence.length:
            self._return_to(seq, kept)
        else:
            self._truncate(seq, kept)
        return left - kept

    def _shorten(self, seq: Hashable, length: int, lease: GroupedLease, tiers: Tiers) -> None:
        """Shorten a sequence to a length, what it lacks there being in a lease."""
        loaded = None
        try:
            load = tiers.load_state(lease)
            if load is not None and self._states is not None:
                sequence = self._sequences.find(seq)
                loaded = self._states.restore(self.access, seq, length, sequence, load)
                self._truncate(seq, length)
            elif self._states is not None:
                self._return_to(seq, length)
            else:
                self._truncate(seq, length)
        except ORDERLY_ERRORS:
            lease.release()
            raise
        tiers.fill(seq, lease, loaded)

    def state_slots_of(self, seqs: Any, stream: Stream) -> list[int]:
        """Return the slots of states, which work on a stream may read after their copies."""
        assert self._states is not None
        names = checks.as_list(seqs, "seqs", "sequences")
        sequences = self._sequences.find_all(names, "seqs")
        for name, sequence in zip(names, sequences, strict=True):
            _require_on_device(sequence, name, "seqs")
        with self.access.on(stream, *sequences):
            return self._states.slots(names)

    @contextmanager
    def rewinding(
        self, seqs: Sequence[Hashable], counts: Sequence[int], stream: Stream
    ) -> Iterator[list[int]]:
        """Drop the last tokens of sequences, whose live states the caller overwrites."""
        sequences = [self.settled(seq) for seq in seqs]
        with self.access.on(stream, *sequences):
            yield [] if self._states is None else self._states.slots(seqs)
        for seq, sequence, count in zip(seqs, sequences, counts, strict=True):
            self._truncate(seq, sequence.length - count)
            if self._states is not None:
                self._states.forget(seq, sequence.length)

    def restorable_length(self, seq: Hashable, at: Any, *, with_states: bool = True) -> int:
        """Return how many of the first `at` tokens of a sequence can be restored.

        with_states : also the states after them
        """
        sequence = self.settled(seq)
        checks.require_int(at, "at")
        if not 0 <= at <= sequence.length:
            raise ValueError(f"at: expected 0 to {sequence.length}, got {at}")
        return self._restorable(seq, int(at), with_states=with_states)

    def _truncate(self, seq: Hashable, length: int) -> None:
        for group in self._groups:
            sequence = group.sequences.find(seq)
            group.sequences.truncate(sequence, length)
            del sequence.hashes[length // self._pool.page_size :]

    def _return_to(self, seq: Hashable, length: int) -> None:
        """Shorten a sequence to a length after which a state is kept, or to 0."""
        assert self._states is not None
        self._truncate(seq, length)
        try:
            self._states.restore(self.access, seq, length, self._sequences.find(seq))
        except ORDERLY_ERRORS:  # the live state may be half of the one and half of the other
            self._truncate(seq, 0)
            self._states.restore(self.access, seq, 0, self._sequences.find(seq))
            raise

    def _restorable(
        self, seq: Hashable, length: int, *, is_live: bool = True, with_states: bool = True
    ) -> int:
        """Return the most tokens, up to `length`, that all groups can restore.

        is_live : whether the state after all tokens is one of those that can be restored
        """
        while True:
            longest = length
            for group in self._groups:
                sequence = group.sequences.find(seq)
                longest = group.sequences.restorable(sequence, longest)
            if self._states is not None and with_states:
                current = sequence.length if is_live else -1
                longest = self._states.restorable(seq, longest, current)
            if longest == length:
                return length
            length = longest

    def _is_unreachable(self, seq: Hashable, length: int) -> bool:
        """Return whether the windows of a sequence have moved on from `length` tokens."""
        return any(
            group.sequences.restorable(group.sequences.find(seq), length) < length
            for group in self._groups
        )

    # --- Checks ---

    def _check(
        self, names: list[Any], sequences: list[CachedSequence], counts: list[Any],
        entries: list[Any],
    ) -> list[Nodes]:  # fmt: skip
        """Raise unless each sequence can get its tokens; return the parents of new nodes."""
        if set(map(type, counts)) != {int} or min(counts) < 1:
            for i, (name, n) in enumerate(zip(names, counts, strict=True)):
                checks.require_int(n, "append_lens")
                if n < 1:
                    raise ValueError(
                        f"append_lens: expected at least 1 for {name!r}, got {n}; num_tokens of "
                        "add_sequence leaves the last token of a cached prompt to compute"
                    )
                counts[i] = int(n)
        if sum(counts) > self._max_batch_tokens:
            num_slots = self._pool.num_pages * self._pool.page_size
            if num_slots <= self._max_batch_tokens:
                raise CacheFull(
                    f"{sum(counts)} tokens, and all {self._pool.num_pages} pages (num_pages) hold "
                    f"{num_slots}",
                    "append_lens",
                )
            raise ValueError(
                f"append_lens: expected at most {self._max_batch_tokens} tokens per step "
                f"(max_batch_tokens), got {sum(counts)}"
            )
        max_positions = self._max_positions
        nodes: list[Nodes] = list(entries)
        for i, (name, sequence, n) in enumerate(zip(names, sequences, counts, strict=True)):
            if sequence.offloaded is not None:
                _require_on_device(sequence, name, "seqs")
            end = sequence.length + n
            if entries[i] is not None:
                nodes[i] = new = check_tree_nodes(entries[i], len(sequence.parents), n)
                end = sequence.committed + max(tree_depths([*sequence.parents, *new])) + 1
            elif sequence.parents:
                raise ValueError(
                    f"token_tree: expected parents for {name!r}, whose tree is not committed"
                )
            if max_positions is not None and end > max_positions:
                raise ValueError(
                    f"append_lens: expected {name!r} to stay within the {max_positions} "
                    f"positions of rope, got {end}"
                )
        return nodes


# --- Arguments ---


def _require_on_device(sequence: CachedSequence, seq: Hashable, name: str) -> None:
    """Raise if a sequence is offloaded."""
    if sequence.offloaded is not None:
        raise ValueError(f"{name}: {seq!r} is offloaded: call onboard first")


def _check_batch(
    seqs: Any, append_lens: Any, token_tree: Any, name: str = "append_lens"
) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the arguments of a step as lists of equal length; `name` is the second argument."""
    names, counts = (
        checks.as_list(seqs, "seqs", "sequences"),
        checks.as_list(append_lens, name, "ints"),
    )
    if not names:
        raise ValueError("seqs: expected at least one sequence, got none")
    if len(counts) != len(names):
        raise ValueError(f"{name}: expected {len(names)} like seqs, got {len(counts)}")
    if token_tree is None:
        return names, counts, [None] * len(names)
    trees = checks.as_list(token_tree, "token_tree", "lists")
    if len(trees) != len(names):
        raise ValueError(f"token_tree: expected {len(names)} lists like seqs, got {len(trees)}")
    return names, counts, trees
