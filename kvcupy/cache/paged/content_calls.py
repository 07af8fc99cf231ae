"""Tokens of a paged cache as arrays and as files."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from ...errors import CaptureError
from ...ops import checks
from ..pool import Pool
from . import sequence_files
from .contents import Contents
from .sequence import CachedSequence
from .sequence_calls import PagedSequences
from .sequences import Sequences
from .steps import Steps


class PagedContents(PagedSequences):
    """Sequences whose K and V can be read, overwritten, saved and loaded."""

    def __init__(
        self,
        pool: Pool,
        sequences: Sequences,
        steps: Steps,
        rope_mode: str,
        contents: Contents,
    ) -> None:
        super().__init__(pool, sequences, steps, rope_mode)
        self._contents = contents

    def get_kv(
        self, seq: Hashable, start: int, stop: int, *, dtype: Any = None, stream: Any = None
    ) -> tuple[Any, Any]:
        """Return K and V of the tokens at positions `start` to `stop` - 1, all layers.

        Parameters
        ----------
        start, stop : 0 <= start <= stop <= length
        dtype : format of the result; None: the cache's, or bf16 if that is quantised
        stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

        Returns
        -------
        K, V : (L, n, H, D) and (L, n, H, Dv); of MLA latent (L, n, R) and rope key (L, n, P)

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit

        Notes
        -----
        Keys as they are cached: rotated in rope_mode "normal". Stream: one kernel a layer, behind
        all steps so far.
        """
        sequence = self._here(seq)
        for name, number in (("start", start), ("stop", stop)):
            checks.require_int(number, name)
        if not 0 <= start <= sequence.length:
            raise ValueError(f"start: expected 0 to {sequence.length}, got {start}")
        if not start <= stop <= sequence.length:
            raise ValueError(f"stop: expected {start} to {sequence.length}, got {stop}")
        on = self.device.as_stream(stream, self._library)
        with self._steps.turn(on, sequence):
            return self._contents.read(self._slots(sequence, start, stop), dtype, stream, on)

    def set_kv(self, seq: Hashable, start: int, K: Any, V: Any, *, stream: Any = None) -> None:
        """Overwrite K and V of tokens that a sequence has; others that share them keep theirs.

        Parameters
        ----------
        start : position of the first; n of them must be cached
        K, V : (L, n, H, D) and (L, n, H, Dv), or of MLA as `get_kv` gives them, in any format;
            quantised if the cache is
        stream : to run on; None: the current one of the arrays' library, see `kvcupy.ops`

        Raises
        ------
        UnknownSequence, TypeError, ValueError : an argument does not fit
        CacheFull : a shared page is to be copied and none is free
        KvcupyError : the sequence belongs to the running step
        CaptureError : the stream is being captured

        After an error nothing has changed.

        Notes
        -----
        To bring in tokens that were computed elsewhere: begin_forward, end_forward, set_kv.
        """
        sequence = self._here(seq)
        self._steps.require_outside(seq)
        checks.require_int(start, "start")
        key, value = self._contents.check(K, V)
        stop = start + key.shape[1]
        if not 0 <= start <= stop <= sequence.length:
            raise ValueError(
                f"start: expected {key.shape[1]} tokens from there within {sequence.length}, "
                f"got {start}"
            )
        if start == stop:
            return
        on = self.device.as_stream(stream, key.library)
        if on.capturing:
            raise CaptureError(f"stream: {on.name} is being captured; set_kv cannot be")
        self._steps.own(sequence, sequence.places(start, stop))
        del sequence.hashes[start // self.pool.page_size :]  # it is no longer what they say
        with self._steps.turn(on, sequence):
            self._contents.write(self._slots(sequence, start, stop), key, value, on)

    def save_sequence(self, seq: Hashable, path: str | Path) -> None:
        """Write the tokens of a sequence to a safetensors file, bit for bit, with its window.

        Raises
        ------
        UnknownSequence : there is no such sequence
        ValueError : its tree is not committed
        KvcupyError : it belongs to the running step
        ImportError : the package safetensors is missing
        OSError : the file cannot be written; one that was there is left as it was

        Notes
        -----
        Stream: waits for all steps so far. Capture: illegal.
        """
        sequence = self._settled(seq)
        on = self.device.as_stream(None, self._library)
        with self._steps.turn(on, sequence):
            tensors = self._contents.save(self._slots(sequence, 0, sequence.length), on)
        sequence_files.write(path, sequence, tensors, self._fields())

    def load_sequence(self, seq: Hashable, path: str | Path) -> None:
        """Add a sequence from a file of `save_sequence`.

        Raises
        ------
        ValueError : the sequence exists, or the file does not fit this cache
        CacheFull : there are too few pages
        ImportError : the package safetensors is missing
        OSError : the file cannot be read

        After an error nothing has changed.
        """
        self._sequences.require_new(seq, "seq")
        found = sequence_files.read(path, self._fields(), self._contents.expected)
        reserved = self._sequences.reserve([made := CachedSequence()], [found.length])
        self._sequences.adopt(seq, made, reserved, found.length)
        made.window, made.sinks = found.window, found.sinks
        try:
            on = self.device.as_stream(None, self._library)
            with self._steps.turn(on):
                self._contents.load(self._slots(made, 0, found.length), found.tensors, on)
        except BaseException:
            self._sequences.remove(seq)
            raise

    # --- Parts ---

    @property
    def _library(self) -> str:
        return self.pool.parts[0].library

    def _slots(self, sequence: CachedSequence, start: int, stop: int) -> Any:
        return sequence.slots(sequence.places(start, stop), self.pool.page_size)

    def _fields(self) -> dict[str, str]:
        """Return what a saved sequence must have in common with this cache."""
        return {**self._contents.fields(), "rope_mode": self._rope_mode}
