"""Long work: tasks in worker processes, and their progress.

Tasks get processes because compilers hold locks that threads of one process share. Ctrl-C ends them
at once, even while a compiler runs: each worker leads a process group, which is killed with the
compilers that it has started. Kernels that were finished are in the disk cache.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from tqdm import tqdm

INTERRUPTED = 130  # the exit status that shells report after Ctrl-C
_LINES = 10  # at most, where they are wanted

Task = TypeVar("Task")
Result = TypeVar("Result")


class Progress:
    """A bar for the length of a with block; with `lines`, a line for each tenth if no terminal."""

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


def tracked(items: Sequence[Task], what: str, unit: str, *, lines: bool = False) -> Iterator[Task]:
    """Yield items, and show how many are done, as `Progress` does."""
    with Progress(what, len(items), unit, lines=lines) as bar:
        for done, item in enumerate(items, 1):
            yield item
            bar.to(done)


def available_cpus() -> int:
    """Return how many CPUs this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def run(
    function: Callable[[Task], Result], tasks: Sequence[Task], jobs: int,
    notify: Callable[[int], object] = lambda done: None,
    steps: Callable[[Task], int] = lambda task: 1,
) -> list[Result]:  # fmt: skip
    """Apply a picklable function to tasks, `jobs` at a time, and return the results in order.

    `notify` gets the number of steps that are done, after each; after Ctrl-C no worker is left.
    """
    others = multiprocessing.active_children()
    # The folder takes the temporary files of workers that are killed.
    with tempfile.TemporaryDirectory(prefix="kvcupy-") as folder:
        context = multiprocessing.get_context("spawn")
        count = max(1, min(jobs, len(tasks)))
        pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(folder,))
        try:
            futures = {pool.submit(function, task): task for task in tasks}
            done = 0
            for future in as_completed(futures):
                future.result()
                for _ in range(steps(futures[future])):
                    done += 1
                    notify(done)
            return [future.result() for future in futures]
        except BaseException:
            for child in multiprocessing.active_children():
                if child not in others:
                    if child.pid is not None:
                        _kill_group(child.pid)
                    child.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(folder: str) -> None:
    """Set a worker up."""
    tempfile.tempdir = folder
    os.environ["TMPDIR"] = folder  # for compilers
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker, and what it has started, when its parent is gone without a word."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        _kill_group(os.getpid())
        os._exit(1)


def _kill_group(leader: int) -> None:
    # A system may have no groups; a worker may not lead its own yet, or be gone.
    with contextlib.suppress(AttributeError, OSError):
        os.killpg(leader, signal.SIGKILL)


def count(text: str) -> int:
    """Read an argument of a command line that is at least one."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text}")
    return int(text)
