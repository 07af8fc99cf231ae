"""Forked children, for tests."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import traceback

import pytest
from engine_cases import PATIENCE_S

import kvcupy as kv

WATCHDOG_S = int(PATIENCE_S)


def in_child(work, *, parent=lambda: None):
    """Run `work` in a forked child until that ends, with `parent` running beside it."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            faulthandler.disable()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(WATCHDOG_S)  # it ends a child that hangs
            os.dup2(write, 2)
            sys.unraisablehook = sys.__unraisablehook__  # not pytest's, which keeps what it gets
            sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
            work()
            gc.collect()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    parent()
    with os.fdopen(read, "rb") as pipe:
        errors = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (status, errors) == (0, ""), f"{status}: {errors}"


def refused(call, *names):
    """Check that a call raises, naming an object of the parent."""
    with pytest.raises(kv.KvcupyError, match=f"^({'|'.join(names) or '[A-Za-z]+'}): expected the "
                       r"process that made it \(\d+\), got \d+, .*; \w+"):  # fmt: skip
        call()
