"""The disk cache keeps what is whole, drops what is damaged and never stands in the way."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvcupy.devices import cache
from kvcupy.files import make_folder
from kvcupy.ops import transfer
from kvcupy.testing.report import write_json

PROGRAM = """
import sys, time
from pathlib import Path
from kvcupy.devices import cache

def make():
    with Path(sys.argv[1]).open("a") as log:
        log.write("made\\n")
    time.sleep(0.3)
    return b"content"

assert cache.get_or_make("kind-shared", make) == b"content"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """A cache directory that cannot be created, not even by root."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "file" / "cache"))


@pytest.mark.parametrize("content", [b"", b"\0", bytes(range(256)) * 100])
def test_what_is_stored_is_loaded(content):
    assert cache.load("k") is None
    assert cache.store("k", content) == cache.path("k")
    assert cache.load("k") == content


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "lengthen"])
def test_a_damaged_entry_is_missing_and_removed(damage):
    cache.store("k", b"some content")
    place = cache.path("k")
    data = place.read_bytes()
    place.write_bytes(
        {
            "flip": data[:3] + bytes([data[3] ^ 1]) + data[4:],
            "cut": data[:-1],
            "empty": b"",
            "lengthen": data + b"\0",
        }[damage]
    )
    assert cache.load("k") is None
    assert not place.exists()
    assert cache.get_or_make("k", lambda: b"new") == b"new"
    assert cache.load("k") == b"new"


def test_no_unfinished_file_is_left(folder, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    assert cache.store("k", b"content") is None
    assert list(folder.iterdir()) == []


def test_it_lies_where_the_system_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("KVCUPY_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if sys.platform == "linux":
        assert cache.directory() == tmp_path / "home" / ".cache" / "kvcupy"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
        assert cache.directory() == tmp_path / "caches" / "kvcupy"
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "own"))
    assert cache.directory() == tmp_path / "own"


def test_threads_make_a_thing_once():
    calls = []

    def make():
        calls.append(None)
        time.sleep(0.05)
        return b"content"

    got = []
    threads = [
        threading.Thread(target=lambda: got.append(cache.get_or_make("k", make))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [b"content"] * 8
    assert len(calls) == 1


def test_processes_make_a_thing_once(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", PROGRAM, str(log)]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert log.read_text() == "made\n"


# Other users -------------------------------------------------------------------------------------


@pytest.fixture
def give_away(monkeypatch):
    """Let another user own a path, which takes root, or a stand-in of `Path.lstat`."""
    given, lstat = set(), Path.lstat

    def status(path):
        info = lstat(path)
        return os.stat_result((*info[:4], 12345, *info[5:])) if path in given else info

    def give(path):
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            given.add(path)
            monkeypatch.setattr(Path, "lstat", status)

    return give


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def write_library(path):
    path.write_bytes(b"library of this process")


@pytest.mark.parametrize("suffix", [".so", "/host/all.gch"])
@pytest.mark.parametrize(("where", "fault"), [
    ("entry", "owner"), ("folder", "owner"), ("above", "owner"), ("folder", 0o1777),
    *((where, mode) for where in ("entry", "folder", "above") for mode in (0o777, 0o775)),
])  # fmt: skip
def test_what_another_user_could_have_written_is_not_loaded(
    folder, tmp_path, monkeypatch, caplog, give_away, suffix, where, fault
):
    folder = folder / "in" / "kvcupy"
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(folder))
    cache.store("k", b"hostile", suffix)
    cache.store("data", b"hostile", aliases=["alias"])
    place = {"entry": cache.path("k", suffix), "folder": cache.path("k", suffix).parent,
             "above": folder.parent}[where]  # fmt: skip
    if fault == "owner":
        give_away(place)
    else:
        place.chmod(fault)

    for _ in range(2):
        file = cache.file("k", suffix, write_library)
        assert b"hostile" not in file.read_bytes()
        assert cache.load("k", suffix) != b"hostile"
        if place in (folder, folder.parent):
            assert cache.load("data") is None and cache.load("alias") is None
            assert cache.get_or_make("data", lambda: b"new") == b"new"
    if where != "entry":
        assert not file.is_relative_to(folder)
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    else:
        assert file == place, "an entry in a folder of this user is made anew"
    (warning,) = warnings(caplog)
    cause = "user 12345" if fault == "owner" else f"mode {fault:04o}"
    assert str(place) in warning and cause in warning and "KVCUPY_CACHE_DIR" in warning


def test_a_folder_that_another_user_makes_first_is_not_filled(folder, caplog, give_away):
    folder.mkdir(mode=0o700)
    give_away(folder)
    assert cache.store("k", b"content") is None
    with cache.locked("k"):  # whose file another user could keep locked
        assert list(folder.iterdir()) == []
    with pytest.raises(PermissionError, match="12345"):
        cache.write_file(folder / "calibration-x.json", b"{}")
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_all_that_is_made_is_for_this_user_alone(tmp_path, monkeypatch, mask):
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(tmp_path / "a" / "b"))
    before = os.umask(mask)
    try:
        cache.get_or_make("k", lambda: b"content")
        cache.file("headers", "/host/all.gch", write_library)
        write_json(tmp_path / "e" / "f" / "report.json", {})
        make_folder(tmp_path / "c" / "d")
    finally:
        os.umask(before)
    made = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    folders = {path.relative_to(tmp_path).parts[0] for path in made if path.is_dir()}
    assert folders == {"a", "c", "e"} and len(made) > 10
    assert {mode for path, mode in made.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in made.items() if path.is_file() and path.suffix != ".json"} == {
        0o600
    }


# Folders that cannot be written ------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_named_once(nowhere, tmp_path, caplog):
    for key in "ab":
        assert cache.store(key, b"content") is None
        cache.file(key, ".so", write_library)
    (warning,) = warnings(caplog)
    assert str(tmp_path / "file") in warning and "KVCUPY_CACHE_DIR" in warning
    assert "Not a directory" in warning or "File exists" in warning


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"),
                                   OSError(30, "Read-only file system")])  # fmt: skip
def test_a_folder_that_can_only_be_read_serves_what_it_has(folder, monkeypatch, caplog, error):
    cache.file("k", ".so", write_library)

    def refuse(*_, **__):
        raise type(error)(error.errno, error.strerror, str(folder / ".new-abcd"))

    monkeypatch.setattr(cache.tempfile, "NamedTemporaryFile", refuse)
    for _ in range(2):
        assert cache.file("k", ".so", lambda path: pytest.fail("made again")) == folder / "k.so"
        other = cache.file("other", ".so", write_library)
        assert other.read_bytes() == b"library of this process"
    (warning,) = warnings(caplog)
    assert error.strerror in warning and str(folder) in warning and ".new-" not in warning
    assert cache.complaint() == f"{folder}: {error.strerror}"


def test_what_would_prevent_keeping_kernels(folder, nowhere, tmp_path, monkeypatch, give_away):
    assert cache.complaint() == f"{tmp_path / 'file'}: Not a directory"
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(folder / "new"))
    assert cache.complaint() == "" and not folder.exists()
    for place in ("/proc/x", "/sys/x", "/dev/null/x"):
        monkeypatch.setenv("KVCUPY_CACHE_DIR", place)
        assert cache.complaint().startswith(str(Path(place).parent))
    monkeypatch.setenv("KVCUPY_CACHE_DIR", str(folder))
    folder.mkdir()
    folder.chmod(0o770)
    assert cache.complaint() == f"{folder}: others can write to it (mode 0770)"
    folder.chmod(0o700)
    assert cache.complaint() == "" and list(folder.iterdir()) == []
    give_away(folder)
    assert cache.complaint() == f"{folder}: it belongs to user 12345"


def test_a_link_is_followed_to_the_folder_that_is_checked(folder, tmp_path, monkeypatch, caplog):
    real = tmp_path / "open" / "real"
    real.mkdir(mode=0o700, parents=True)
    real.parent.chmod(0o777)
    folder.symlink_to(real)
    assert cache.store("k", b"content") is None
    (warning,) = warnings(caplog)
    assert str(real.parent) in warning


def test_a_calibration_of_another_user_is_not_read(folder, give_away):
    file = transfer.calibration_file("a GPU")
    cache.write_file(file, b'{"device": "a GPU"}')
    assert transfer.read_calibration("a GPU") == {"device": "a GPU"}
    give_away(file)
    assert transfer.read_calibration("a GPU") == {}
