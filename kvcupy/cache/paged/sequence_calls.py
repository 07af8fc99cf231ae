"""The sequences of a paged cache, and the steps that let them grow."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from ...config import logger
from ...ops import checks
from ...pickling import ProcessLocal
from ..pool import Pool, count
from .sequence import CachedSequence
from .sequences import Sequences
from .steps import Steps, require_here


class PagedSequences(ProcessLocal):
    """Sequences of tokens in the pages of a pool: who has which, from step to step.

    Attributes
    ----------
    pool : the pages
    device : the Device
    """

    def __init__(self, pool: Pool, sequences: Sequences, steps: Steps, rope_mode: str) -> None:
        self.pool = pool
        self.device = pool.device
        self._sequences = sequences
        self._steps = steps
        self._rope_mode = rope_mode
        self._warned = False

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} of {len(self._sequences)} sequences, {self.total_length} "
            f"tokens, {self.num_available_pages} of {self.pool.num_pages} pages free, "
            f"{self.pool!r}>"
        )

    def __contains__(self, seq: object) -> bool:
        return seq in self._sequences

    @property
    def num_available_pages(self) -> int:
        """Pages that no sequence refers to."""
        return self.pool.num_pages - self.pool.allocator.num_allocated

    @property
    def total_length(self) -> int:
        """Tokens of all sequences; a shared prefix counts for each."""
        return self._sequences.total_length

    # --- Sequences ---

    def add_sequence(self, seq: Hashable) -> None:
        """Add an empty sequence.

        Raises
        ------
        ValueError : it is there already
        """
        self._sequences.add(seq)

    def remove_sequence(self, seq: Hashable) -> None:
        """Remove a sequence, in any order; pages that no other shares become free.

        Raises
        ------
        UnknownSequence : there is no such sequence
        KvcupyError : it belongs to the running step
        """
        self._sequences.find(seq)
        self._steps.require_outside(seq)
        self._sequences.remove(seq)

    def fork_sequence(self, parent: Hashable, child: Hashable, at: int | None = None) -> None:
        """Add a sequence that begins with the first tokens of another.

        Parameters
        ----------
        parent, child : a cached sequence, and a new one, which inherits its sliding window
        at : how many tokens, 0 to the parent's length; None: all

        Raises
        ------
        UnknownSequence : there is no such parent
        ValueError : the child exists, `at` is outside, or the parent's tree is not committed
        CacheFull : a partial page is to be copied and none is free; nothing has changed
        KvcupyError : the parent belongs to the running step

        Notes
        -----
        Full pages are shared. Stream: a partial one is copied on the copy stream, behind all steps
        so far. Bytes: at most one page, read and written.
        """
        source = self._settled(parent, "parent")
        self._sequences.require_new(child, "child")
        if at is None:
            at = source.length
        checks.require_int(at, "at")
        if not 0 <= at <= source.length:
            raise ValueError(f"at: expected 0 to {source.length}, got {at}")
        self._steps.fork(source, child, int(at))

    def pop_tokens(self, seq: Hashable, n: int) -> None:
        """Drop the last `n` tokens of a sequence, those of pages that others share too.

        Raises
        ------
        UnknownSequence : there is no such sequence
        ValueError : n is not 0 to its length, or its tree is not committed
        KvcupyError : it belongs to the running step
        """
        sequence = self._settled(seq)
        checks.require_int(n, "n")
        if not 0 <= n <= sequence.length:
            raise ValueError(f"n: expected 0 to {sequence.length}, got {n}")
        self._sequences.truncate(sequence, sequence.length - int(n))
        del sequence.hashes[sequence.length // self.pool.page_size :]

    def sequence_length(self, seq: Hashable) -> int:
        """Return how many tokens a sequence has, those of a tree to be committed included."""
        return self._sequences.find(seq).length

    def enable_sliding_window(self, seq: Hashable, window: int, sinks: int = 0) -> None:
        """Keep of a sequence, after each step, the first tokens and the last.

        Parameters
        ----------
        window : tokens that remain: the first `sinks`, and the last `window - sinks`
        sinks : 0 to window - 1

        Raises
        ------
        UnknownSequence : there is no such sequence
        ValueError : an argument does not fit, or tokens are gone behind other sinks
        KvcupyError : it belongs to the running step

        Notes
        -----
        Positions are those in the cache. A step is causal over what is cached and itself. With
        rope_mode "normal", keys keep the angle that they were written with; "inline" turns them by
        where they are now. Source: Xiao et al. 2023, StreamingLLM.
        """
        sequence = self._sequences.find(seq)
        self._steps.require_outside(seq)
        count(window, "window")
        checks.require_int(sinks, "sinks")
        if not 0 <= sinks < window:
            raise ValueError(f"sinks: expected 0 to {window - 1}, got {sinks}")
        if sequence.hole and sinks != sequence.sinks:
            raise ValueError(f"sinks: expected {sequence.sinks} as before, got {sinks}")
        sequence.window, sequence.sinks = int(window), int(sinks)
        if self._rope_mode == "normal" and not self._warned:
            self._warned = True
            logger.warning(
                'a window slides over keys that were cached rotated (rope_mode "normal"): they '
                'keep their angle; "inline" turns them by where they are'
            )

    def clear(self) -> None:
        """Drop all sequences, and the running step if there is one."""
        if self._steps.running is not None:
            self._steps.abort()
        self._sequences.clear()

    # --- Steps ---

    def begin_forward(self, seqs: Any, append_lengths: Any, *, token_tree: Any = None) -> None:
        """Begin a step that appends tokens to sequences: lengths grow, pages are taken.

        Parameters
        ----------
        seqs : sequences, each once; rows of the step come in this order
        append_lengths : new tokens of each, at least 1, together at most max_batch_tokens
        token_tree : for each sequence the parents of its new tokens, which are nodes of a tree,
            numbered on from those not yet committed; -1: a root, which follows the last committed
            token. None in place of a list: plain tokens, one after another

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit, or a sequence with an
            uncommitted tree is to get plain tokens
        CacheFull : there are too few pages
        KvcupyError : a step is running

        After an error everything is as it was.

        Notes
        -----
        Stream: host work, but for a partial page that is shared and now copied, on the copy stream.
        Bytes: host work goes with the batch, not with the sequences there are.
        """
        self._steps.begin(seqs, append_lengths, token_tree)

    def end_forward(self) -> None:
        """End the step; windows slide.

        Raises
        ------
        KvcupyError : no step is running
        """
        self._steps.end()

    @contextmanager
    def forward(self, seqs: Any, append_lengths: Any, *, token_tree: Any = None) -> Iterator[None]:
        """Begin a step and end it with the block; an exception takes its tokens back."""
        self.begin_forward(seqs, append_lengths, token_tree=token_tree)
        try:
            yield
        except BaseException:
            if self._steps.running is not None:
                self._steps.abort()
            raise
        self.end_forward()

    def commit_token_tree(self, seqs: Any, leaves: Any) -> None:
        """Keep of each tree the path from its root to a leaf, and drop its other nodes.

        Parameters
        ----------
        seqs : sequences with a tree, each once, in any order
        leaves : node of each; -1: no node is kept

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit; nothing has changed
        KvcupyError : one belongs to the running step

        Notes
        -----
        Stream: tokens are moved together on the copy stream, behind all steps so far, and before
        the next. Bytes: each kept token that is not in its place, once.
        """
        self._steps.commit(seqs, leaves)

    # --- Parts ---

    def _here(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence that is on the device."""
        found = self._sequences.find(seq, name)
        require_here(found, seq, name)
        return found

    def _settled(self, seq: Hashable, name: str = "seq") -> CachedSequence:
        """Return a sequence that is outside the running step and has no tree to be committed."""
        found = self._here(seq, name)
        self._steps.require_outside(seq, name)
        if found.parents:
            raise ValueError(f"{name}: {seq!r} has a token tree: call commit_token_tree first")
        return found
