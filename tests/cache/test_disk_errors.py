"""The file of a disk tier: errors of the system, and invalid arguments."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import stat

import pytest
from disk_cases import IDENTITY, PAGE_BYTES, contents, failing, filled, open_tier, reads, run, write

from kvcupy.cache.tiered.disk import DiskTier
from kvcupy.cache.tiered.disk_format import Layout


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tier"


@pytest.fixture
def tier(path):
    with open_tier(path) as tier:
        yield tier


# --- The file -------------------------------------------------------------------------------------


def test_as_many_slots_as_fit():
    for page_bytes in (1, 4096, 5000, 3 * 2**20):
        for num_slots in (1, 2, 63, 64, 65, 1000):
            layout = Layout(num_slots, page_bytes)
            assert Layout.fit(layout.num_bytes, page_bytes) == layout
            assert (
                Layout.fit(layout.num_bytes + 4096, page_bytes).num_bytes <= layout.num_bytes + 4096
            )
            larger = Layout(num_slots + 1, page_bytes)
            assert Layout.fit(larger.num_bytes - 1, page_bytes) == layout
            assert layout.payload_at(0) >= layout.record_at(num_slots)
            assert layout.payload_at(num_slots - 1) % 4096 == 0
            assert layout.payload_at(num_slots - 1) + page_bytes <= layout.num_bytes


def test_the_file_is_allocated_at_once_and_only_its_owner_can_read_it(path):
    with DiskTier(path, 10**6, PAGE_BYTES, IDENTITY) as tier:
        info = path.stat()
        assert 10**6 - 8192 - 64 < info.st_size <= 10**6
        assert info.st_blocks * 512 >= info.st_size
        assert stat.S_IMODE(info.st_mode) == 0o600
        tier.flush()


def test_flush_waits_for_the_disk_and_says_if_it_fails(path, monkeypatch):
    calls, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(real(descriptor)))
    with open_tier(path) as tier:
        assert len(calls) == 1  # the header
        write(tier, 0, 1)
        tier.flush()
        assert len(calls) == 2

        def fail(descriptor):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
            tier.flush()
        assert reads(tier, 0, 1)


def test_an_empty_file_becomes_one_of_a_tier(path):
    path.touch()
    with open_tier(path) as tier:
        write(tier, 0, 1)
        assert reads(tier, 0, 1)


@pytest.mark.parametrize("answer", [errno.EOPNOTSUPP, errno.EINVAL, None])
def test_file_systems_that_cannot_preallocate(path, monkeypatch, answer):
    def refuse(*_):
        raise OSError(answer, os.strerror(answer))

    if answer is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
    with open_tier(path) as tier:
        assert path.stat().st_size == Layout(6, PAGE_BYTES).num_bytes
        write(tier, 5, 1)
        assert reads(tier, 5, 1)


def test_a_full_disk_raises_early_and_leaves_no_file(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match=f"No space.*{path}"):
        patch.setattr(os, "posix_fallocate", refuse)
        open_tier(path)
    assert not path.exists()
    with limited_to(2**20), pytest.raises(OSError, match=f"{path}"):  # by the system itself
        open_tier(path, 1000)
    assert not path.exists()


@pytest.mark.parametrize("call", ["pwritev", "fsync", "link"])
def test_an_interrupted_creation_leaves_no_name(path, monkeypatch, call):
    """A power failure could otherwise leave a file with half a header, which nobody can open."""
    steps = []

    def noted(name, function):
        def wrapped(*arguments, **options):
            steps.append((name, path.exists()))
            if name == call:
                raise KeyboardInterrupt
            return function(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patch:
        for name in ("pwritev", "fsync", "link"):
            patch.setattr(os, name, noted(name, getattr(os, name)))
        with pytest.raises(KeyboardInterrupt):
            open_tier(path)
    assert steps[-1] == (call, False)
    assert not list(path.parent.iterdir())
    with open_tier(path) as tier:
        write(tier, 0, 1)
    with open_tier(path) as tier:
        assert reads(tier, 0, 1)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_system_without_hard_links(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with open_tier(path) as tier:
        write(tier, 0, 1)
    with open_tier(path) as tier:
        assert reads(tier, 0, 1)
    assert list(path.parent.iterdir()) == [path]


def test_a_file_has_one_opener(path):
    with open_tier(path) as tier:
        write(tier, 0, 1)
        with pytest.raises(BlockingIOError, match=f"disk: expected a file that no other.*{path}"):
            open_tier(path)
        program = (
            "from disk_cases import *\n"
            f"try: open_tier({str(path)!r})\n"
            "except BlockingIOError as error: print(error)"
        )
        assert "disk: expected a file that no other tier has open" in run(program)
        assert reads(tier, 0, 1)
    with open_tier(path) as tier:
        assert reads(tier, 0, 1)


def test_links_are_not_followed(path, tmp_path):
    """In a folder for all users another user may have made them."""
    empty, missing = tmp_path / "empty", tmp_path / "missing"
    empty.touch()
    for target in (empty, missing):
        path.symlink_to(target)
        with pytest.raises(ValueError, match=f"disk: expected the name of a file.*link: {path}"):
            open_tier(path)
        path.unlink()
    assert empty.read_bytes() == b"" and not missing.exists()


def test_a_missing_folder_is_named(tmp_path):
    """And not the temporary file that was to be created in it."""
    with pytest.raises(FileNotFoundError, match=f": '{tmp_path / 'no' / 'folder'}'$"):
        open_tier(tmp_path / "no" / "folder" / "tier")


def test_files_of_other_users_are_refused(path, monkeypatch):
    path.touch()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match=f"disk: expected a file of this user: '{path}'"):
        open_tier(path)
    assert path.read_bytes() == b""


def test_only_the_owner_can_read_a_file_that_was_there(path):
    path.touch(0o644)
    open_tier(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o666)
    open_tier(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_bytes(b"not a tier's")
    path.chmod(0o644)
    with pytest.raises(ValueError, match="disk: expected a file of a disk tier"):
        open_tier(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_forked_child_has_neither_the_file_nor_its_lock(path):
    """It lives on when the parent closes the file, as when the parent dies."""
    program = (
        "import os, sys\n"
        "from disk_cases import *\n"
        "from kvcupy import KvcupyError\n"
        f"tier = open_tier({str(path)!r})\n"
        "write(tier, 0, 1)\n"
        "tier._lock.acquire()  # as by another thread\n"
        "(ready, tell), (ended, end) = os.pipe(), os.pipe()\n"
        "if (child := os.fork()) == 0:\n"
        "    os.close(end)\n"
        "    try: reads(tier, 0, 1)\n"
        "    except KvcupyError as error: print(error, flush=True)\n"
        "    os.write(tell, b'x')\n"
        "    os.read(ended, 1)\n"
        "    os._exit(0)\n"
        "tier._lock.release()\n"
        "os.read(ready, 1)\n"
        "assert reads(tier, 0, 1)\n"
        "tier.close()\n"
        f"with open_tier({str(path)!r}) as tier: print(reads(tier, 0, 1))\n"
        "os.close(end)\n"
        "os.waitpid(child, 0)\n"
    )
    said = run(program)
    assert "True" in said and "DiskTier: expected the process that made it" in said


def test_a_file_removed_while_it_was_opened_is_not_used(path, monkeypatch):
    """A process that fails to make a file removes it, while another opens it."""
    import fcntl

    real, calls = fcntl.flock, []

    def flock(*arguments):
        if not calls:
            path.unlink()
        calls.append(arguments)
        real(*arguments)

    monkeypatch.setattr(fcntl, "flock", flock)
    filled(path, {0: 1})
    assert len(calls) == 2
    with open_tier(path) as tier:
        assert reads(tier, 0, 1)


def test_systems_without_locks_can_import_but_not_open(path):
    program = (
        "import sys; sys.modules['fcntl'] = None\n"
        "from disk_cases import *\n"
        f"try: open_tier({str(path)!r})\n"
        "except OSError as error: print(error)"
    )
    assert "disk: expected a system with flock" in run(program)
    assert not path.exists()


# --- Writes and reads that fail -------------------------------------------------------------------


@pytest.mark.parametrize("bytes_first", [0, 63])
@pytest.mark.parametrize("stage", ["invalidate", "payload", "record"])
def test_a_failed_write_empties_its_slot_alone(path, monkeypatch, stage, bytes_first):
    filled(path, {0: 10, 1: 11, 2: 12})
    after = ["invalidate", "payload", "record"].index(stage)
    with open_tier(path) as tier:
        error = OSError(errno.ENOSPC, "No space left on device")
        with monkeypatch.context() as patch:
            failing(patch, "pwritev", error, after=after, bytes_first=bytes_first)
            with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
                write(tier, 1, 99)
        assert tier.entries() == [(10, 0), (12, 2)]
        assert not reads(tier, 1, 11) and not reads(tier, 1, 99)
        assert reads(tier, 0, 10) and reads(tier, 2, 12)
    with open_tier(path) as tier:
        old = [(11, 1)] if stage == "invalidate" and not bytes_first else []  # it is whole
        assert tier.entries() == [(10, 0), *old, (12, 2)]
        assert all(reads(tier, slot, h) for h, slot in tier.entries())


def test_a_limit_of_the_system_on_the_length_of_files(path):
    with open_tier(path) as tier:
        write(tier, 0, 10)
        with limited_to(Layout(6, PAGE_BYTES).payload_at(3) + 4096):  # in the middle of a payload
            for slot in (3, 4):
                with pytest.raises(OSError, match=re.escape(str(path))):
                    write(tier, slot, 13)
            write(tier, 1, 11)
        assert tier.entries() == [(10, 0), (11, 1)]
        assert reads(tier, 0, 10) and reads(tier, 1, 11)


@pytest.mark.parametrize("many", [False, True])
def test_a_block_that_the_disk_fails_to_read_stays(path, monkeypatch, many):
    tier = open_tier(path, num_threads=1)
    write(tier, 0, 10)
    write(tier, 1, 11)
    into = memoryview(bytearray(PAGE_BYTES))
    with monkeypatch.context() as patch:
        failing(patch, "preadv", OSError(errno.EIO, "Input/output error"), bytes_first=99)
        if many:
            error, second = tier.read_many([(0, 10, into), (1, 11, memoryview(bytearray(into)))])
            assert second is True
        else:
            with pytest.raises(OSError) as caught:
                tier.read(0, 10, into)
            error = caught.value
    assert str(error) == f"[Errno {errno.EIO}] Input/output error: '{path}'"
    assert tier.entries() == [(10, 0), (11, 1)]
    assert reads(tier, 0, 10) and reads(tier, 1, 11)


def test_damage_that_cannot_be_recorded_is_still_a_miss(tier, path, monkeypatch, caplog):
    write(tier, 0, 10)
    write(tier, 1, 11)
    with path.open("r+b") as file:
        file.seek(Layout(6, PAGE_BYTES).payload_at(0))
        file.write(b"\xa5")
    failing(monkeypatch, "pwritev", OSError(errno.EIO, "Input/output error"))
    with caplog.at_level(logging.WARNING, "kvcupy"):
        assert not reads(tier, 0, 10)
    assert "slot 0" in caplog.text and "cannot be emptied" in caplog.text
    assert tier.entries() == [(11, 1)]
    assert reads(tier, 1, 11)


# --- Arguments ------------------------------------------------------------------------------------


# fmt: off
TIERS = [
    ({"num_bytes": 12287}, ValueError, "num_bytes: expected at least 12288, .* got 12287"),
    ({"num_bytes": 1e9}, TypeError, "num_bytes: expected an int"),
    ({"page_bytes": 0}, ValueError, "page_bytes: expected 1 to 4294967295, got 0"),
    ({"page_bytes": 2**32}, ValueError, "page_bytes: expected 1 to 4294967295"),
    ({"page_bytes": True}, TypeError, "page_bytes: expected an int"),
    ({"num_threads": 0}, ValueError, "num_threads: expected at least 1, got 0"),
    ({"identity": {"heads": 8}}, TypeError, "identity: expected names and values that are str"),
    ({"identity": "heads"}, TypeError, "identity: expected names"),
    ({"identity": {"a": "b" * 4096}}, ValueError, "identity: expected at most 40.. bytes"),
]

PATHS = [
    ("/dev/null", ValueError, "disk: expected the name of a file, got /dev/null"),
    ("/", IsADirectoryError, "'/'"),
    ("/nowhere/tier", FileNotFoundError, "/nowhere"),
]

PAGE = memoryview(bytearray(PAGE_BYTES))
SHORT, GAPS = PAGE[1:], memoryview(bytearray(2 * PAGE_BYTES))[::2]
GOOD = (1, 1, PAGE)

ITEMS = [  # (slot, hash, memory)
    ((6, 1, PAGE), ValueError, "slot: expected 0 to 5, got 6"),
    ((-1, 1, PAGE), ValueError, "slot: expected 0 to 5, got -1"),
    ((1.0, 1, PAGE), TypeError, "slot: expected an int"),
    ((0, "1", PAGE), TypeError, "hash: expected an int"),
    ((0, 2**128, PAGE), ValueError, "hash: expected an int of 0 to 2"),
    ((0, -1, PAGE), ValueError, "hash: expected an int of 0 to 2"),
    ((0, 1, SHORT), ValueError, "NAME: expected 5000 bytes, got 4999"),
    ((0, 1, b"abc"), TypeError, "NAME: expected memoryviews, got int"),
    ((0, 1, GAPS), ValueError, "NAME: expected contiguous"),
]

CALLS = [
    *((call, error, message.replace("NAME", name))
      for item, error, message in ITEMS for name, call in [
        ("data", lambda tier, item=item: tier.write(*item)),
        ("data", lambda tier, item=item: tier.write_many([GOOD, item])),
        ("into", lambda tier, item=item: tier.read(*item)),
        ("into", lambda tier, item=item: tier.read_many([GOOD, item])),
    ]),
    (lambda tier: tier.read(0, 1, memoryview(bytes(PAGE_BYTES))), ValueError,
     "into: expected writable memory"),
    (lambda tier: tier.write_many([(1, 5, contents(5)), (2, 6, contents(6)), (1, 7, contents(7))]),
     ValueError, "items: expected no slot twice"),
    (lambda tier: tier.drop(6), ValueError, "slot: expected 0 to 5, got 6"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "error", "message"), TIERS)
def test_arguments_of_a_tier(path, changes, error, message):
    arguments = {"num_bytes": 10**6, "page_bytes": 4096, "identity": {}, **changes}
    with pytest.raises(error, match=message):
        DiskTier(path, **arguments)
    assert not path.exists()


@pytest.mark.parametrize(("path", "error", "message"), PATHS)
def test_paths_that_are_no_files(path, error, message):
    with pytest.raises(error, match=message):
        open_tier(path)


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_arguments_of_reads_and_writes(tier, call, error, message):
    write(tier, 0, 1)
    with pytest.raises(error, match=message):
        call(tier)
    assert tier.entries() == [(1, 0)]
    assert reads(tier, 0, 1)


# --- Helpers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited_to(num_bytes):
    """Let no file of this process grow past so many bytes, nor be written there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
