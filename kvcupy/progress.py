"""How far long work is, on stderr: a bar on a terminal, else nothing, or a line now and then."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

_LINES = 10  # at most, where they are wanted


class Progress:
    """A bar for the length of a with block.

    Parameters
    ----------
    what : is done
    total : of the steps
    unit : what the steps are
    lines : where stderr is no terminal, whether to print a line for each tenth
    """

    def __init__(self, what: str, total: int, unit: str, *, lines: bool = False) -> None:
        self._what, self.total, self._unit = what, total, unit
        self._lines = lines and not sys.stderr.isatty()
        self.done, self._start = 0, time.perf_counter()
        self._bar = tqdm(
            total=total, desc=what, unit=f" {unit}", file=sys.stderr, dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )  # fmt: skip

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def to(self, done: int, now: str = "") -> None:
        """Show that so many steps are done in all; `now` is what comes next."""
        if now:
            self._bar.set_postfix_str(now, refresh=False)
        self._bar.update(done - self.done)
        before, self.done = self.done, done
        if self._lines and _LINES * before // self.total < _LINES * done // self.total:
            seconds = time.perf_counter() - self._start
            text = f"{self._what}: {done} of {self.total} {self._unit}, {seconds:.0f} s"
            print(text, file=sys.stderr, flush=True)
