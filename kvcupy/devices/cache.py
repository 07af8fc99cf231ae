"""The disk cache of compiled kernels: cubins as bytes, host kernels as shared libraries.

It is in `$KVCUPY_CACHE_DIR`, else where this system keeps caches: `$XDG_CACHE_HOME/kvcupy` or
`~/.cache/kvcupy` on Linux. An entry is its content followed by a
checksum, so that an entry of any kind is one file, put in place by one rename: a loader of shared
libraries never looks past the end of the ones it knows. An entry that fails its checksum is removed
and counts as missing. Nothing that another user could have written is read (`files`). Where the
directory cannot be used, nothing is kept and nothing fails; a warning says why, once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from platformdirs import user_cache_path

from ..config import compile_logger
from ..errors import finalize, in_child, naming, process_lock
from ..files import make_folder, require_private

_MAGIC = b"kvcupy01"
_TRAILER_BYTES = hashlib.sha256().digest_size + len(_MAGIC)

_locks: dict[str, threading.Lock] = {}
_locks_guard = process_lock()
_lock_files: weakref.WeakSet[IO[bytes]] = weakref.WeakSet()
_own_files: dict[Path, Path] = {}  # where an entry could not be kept, and the file instead
_warned: set[Path] = set()  # directories


def directory() -> Path:
    """Return the folder of the cache without links; it need not exist.

    Read from the environment at every call: a test, or a job, may point it elsewhere.
    """
    named = os.environ.get("KVCUPY_CACHE_DIR")
    if named:
        return Path(os.path.realpath(named))
    nowhere = Path(os.devnull) / "kvcupy"  # which can never be written
    if not os.environ.get("XDG_CACHE_HOME"):
        try:
            Path.home()
        except RuntimeError:
            return nowhere
    folder = user_cache_path("kvcupy", appauthor=False)
    return Path(os.path.realpath(folder)) if folder.is_absolute() else nowhere


def complaint() -> str:
    """Return why nothing can be kept in the directory, or "": a file is made to find out."""
    folder = directory()
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with naming(existing):
            trial = tempfile.NamedTemporaryFile(dir=existing, prefix=".new-")  # noqa: SIM115
        with trial:
            require_private(folder if existing == folder else Path(trial.name))
    except OSError as error:
        return _cause(error)
    return ""


def _cause(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}"


def _warn(error: OSError) -> None:
    folder = directory()
    with _locks_guard:
        if folder in _warned:
            return
        _warned.add(folder)
    compile_logger.warning(
        "cannot use the kernel cache %s: %s. Kernels are compiled again in every process; "
        "KVCUPY_CACHE_DIR names another folder", folder, _cause(error),
    )  # fmt: skip


def key(kind: str, *parts: str) -> str:
    """Return the key of an entry: a digest of its kind and of everything it was made from.

    >>> key("cubin", "a", "bc") != key("cubin", "ab", "c")
    True
    """
    total = hashlib.sha256()
    for part in (kind, *parts):
        data = part.encode()
        total.update(len(data).to_bytes(8, "little"))
        total.update(data)
    return f"{kind}-{total.hexdigest()}"


def path(key: str, suffix: str = "") -> Path:
    """Return the file of an entry, which need not exist."""
    return directory() / f"{key}{suffix}"


def load(key: str, suffix: str = "") -> bytes | None:
    """Return the content of an entry, or None if it is missing or damaged (then it is removed)."""
    place = path(key, suffix)
    try:
        data = read(place)
    except OSError:
        return None
    content, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    if trailer == _trailer(content):
        return content
    with contextlib.suppress(OSError):
        place.unlink()
    return None


def read(place: Path) -> bytes:
    """Return the content of a file; raise OSError, also if another user could have written it."""
    try:
        require_private(place.parent)
        require_private(place)
        return place.read_bytes()
    except PermissionError as error:
        _warn(error)
        raise


def store(
    key: str, content: bytes, suffix: str = "", *, aliases: Sequence[str] = ()
) -> Path | None:
    """Keep `content` under `key`; return its file, or None where nothing can be written.

    `aliases` are further keys of the same content, which is on disk once if files can be linked.
    """
    place = path(key, suffix)
    try:
        write_file(place, content, _trailer(content))
    except OSError as error:
        _warn(error)
        return None
    for alias in aliases:
        if not _link(place, path(alias, suffix)):
            store(alias, content, suffix)
    return place


def _prepare(folder: Path) -> None:
    """Create a folder in the directory; raise OSError if another user could write to either."""
    for each in (directory(), folder):
        make_folder(each)
        require_private(each)


def write_file(place: Path, *parts: bytes) -> None:
    """Put a file in place at once, in a folder that need not exist; raise OSError."""
    _prepare(place.parent)
    with (
        naming(place.parent),
        tempfile.NamedTemporaryFile(dir=place.parent, prefix=".new-", delete=False) as file,
    ):
        temporary = Path(file.name)
        try:
            file.writelines(parts)
            file.flush()
            temporary.replace(place)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _link(place: Path, alias: Path) -> bool:
    """Put another name of the file `place` at `alias`; return whether that could be done."""
    temporary = alias.with_name(f".new-{alias.name}-{os.getpid()}")
    try:
        temporary.hardlink_to(place)
        temporary.replace(alias)
        temporary.unlink(missing_ok=True)  # a rename of a file to its own other name does nothing
    except OSError:
        return False
    return True


@contextlib.contextmanager
def locked(key: str) -> Iterator[None]:
    """Hold the lock of `key` against other threads and, where files can be locked, processes."""
    with _locks_guard:
        mine = _locks.setdefault(key, threading.Lock())
    with mine, _lock_file(key) as file:
        if file is not None:
            _flock(file)
        yield


def get_or_make(key: str, make: Callable[[], bytes], suffix: str = "") -> bytes:
    """Return the content of an entry, made by `make` if it is missing, once for all who ask."""
    content = load(key, suffix)
    if content is not None:
        return content
    with locked(key):
        content = load(key, suffix)
        if content is None:
            content = make()
            store(key, content, suffix)
    return content


def file(key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """Return the file of an entry, which `make` writes if it is missing.

    A `suffix` that begins with a slash is a file name in a folder of the entry.

    Where the cache cannot be used, the file is in a folder that goes when the process ends.
    """
    known = _find(key, suffix)
    if known is not None:
        return known
    with locked(key):
        known = _find(key, suffix)
        if known is not None:
            return known
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / f"made{suffix}"
            make_folder(made.parent)
            make(made)
            content = made.read_bytes()
        kept = store(key, content, suffix)
        if kept is None:
            kept = _own_folder() / f"{key}{suffix}"
            make_folder(kept.parent)
            unfinished = kept.with_name(f".new-{kept.name}")
            unfinished.write_bytes(content)
            unfinished.replace(kept)
            _own_files[path(key, suffix)] = kept
        return kept


def _find(key: str, suffix: str) -> Path | None:
    """Return the file of an entry, or the one of this process that stands in for it.

    The latter is never written twice: a library in it may be in use.
    """
    place = path(key, suffix)
    return place if load(key, suffix) is not None else _own_files.get(place)


@functools.cache
def _own_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="kvcupy-")
    finalize(_own_folder, shutil.rmtree, folder, True, at_exit=True)
    return Path(folder)


@in_child
def _disown() -> None:
    """Leave locks and temporary files to the parent, whose other threads may be compiling."""
    for file in list(_lock_files):
        file.close()
    _locks.clear()
    _own_files.clear()
    _own_folder.cache_clear()


def _trailer(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + _MAGIC


def _lock_file(key: str) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    folder = directory() / "locks"
    try:
        _prepare(folder)
        file = os.fdopen(os.open(folder / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")
    except OSError:
        return contextlib.nullcontext()
    _lock_files.add(file)
    return file


def _flock(file: IO[bytes]) -> None:
    """Wait for the file's lock, which closing the file releases."""
    try:
        import fcntl
    except ImportError:  # not on this system: two processes may then compile the same thing
        return
    with contextlib.suppress(OSError):  # or a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)


@contextlib.contextmanager
def announced(kernel: object, target: str) -> Iterator[None]:
    """Log that a kernel is compiled in a with block, and how long it took: it may be seconds."""
    compile_logger.info("compiling %s for %s", kernel, target)
    start = time.perf_counter()
    yield
    compile_logger.info("compiled %s for %s in %.1f s", kernel, target, time.perf_counter() - start)
