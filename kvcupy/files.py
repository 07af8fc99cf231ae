"""Folders that kvcupy makes, and which files no other user could have written."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from itertools import takewhile
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Create a folder that need not exist, and those above it, with mode 0700 for any umask."""
    for path in reversed([*takewhile(lambda path: not path.is_dir(), (folder, *folder.parents))]):
        try:
            path.mkdir(0o700)
        except FileExistsError:
            if not path.is_dir():  # else another process was first
                raise
        else:
            with suppress(OSError):  # a file system without modes
                path.chmod(0o700)


def require_private(path: Path) -> None:
    """Raise OSError unless only this user and root can change a file, or the names in a folder.

    A user who can write to a folder above can replace the path, unless it has the sticky bit.
    `path` must be absolute and without links.
    """
    if not hasattr(os, "geteuid"):
        return
    for part in (path, *path.parents):
        status = part.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in (0, os.geteuid()):
            cause = f"it belongs to user {status.st_uid}"
        elif mode & 0o022 and (part == path or not mode & stat.S_ISVTX):
            cause = f"others can write to it (mode {mode:04o})"
        else:
            continue
        raise PermissionError(errno.EPERM, cause, str(part))
