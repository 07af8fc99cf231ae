"""The disk cache keeps what is whole, drops what is damaged and never stands in the way."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvcupy.devices import cache

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


def test_keys_differ_wherever_their_parts_do():
    keys = {
        cache.key("cubin", "a", "b"), cache.key("cubin", "ab"), cache.key("cubin", "a", "b", ""),
        cache.key("host", "a", "b"), cache.key("cubin", "b", "a"),
    }  # fmt: skip
    assert len(keys) == 5
    assert cache.key("cubin", "a") == cache.key("cubin", "a")


@pytest.mark.parametrize("content", [b"", b"\0", bytes(range(256)) * 100])
def test_what_is_stored_is_loaded(content):
    assert cache.load("k") is None
    assert cache.store("k", content) == cache.path("k")
    assert cache.load("k") == content


@pytest.mark.parametrize("suffix", ["", ".so"])
def test_a_suffix_is_part_of_the_name(suffix):
    cache.store("k", b"content", suffix)
    assert cache.path("k", suffix).name == f"k{suffix}"
    assert cache.load("k", ".other") is None


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


def test_no_unfinished_file_stays_behind(folder, monkeypatch):
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    assert cache.store("k", b"content") is None
    assert list(folder.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_no_error(nowhere):
    assert cache.store("k", b"content") is None
    assert cache.load("k") is None
    assert cache.get_or_make("k", lambda: b"content") == b"content"
    entry = cache.file("k", ".so", lambda path: path.write_bytes(b"library"))
    assert entry.read_bytes() == b"library"


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


def test_a_relative_cache_home_does_not_count(monkeypatch, tmp_path):
    """It would be another folder wherever a process starts."""
    monkeypatch.delenv("KVCUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert cache.directory().is_absolute()


def test_without_a_home_there_is_no_cache(monkeypatch):
    monkeypatch.delenv("KVCUPY_CACHE_DIR")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache.store("k", b"content") is None
    assert cache.load("k") is None


def test_a_file_is_made_once_and_made_again_when_damaged(folder):
    paths = []

    def make(path):
        paths.append(path)
        path.write_bytes(b"library")

    for _ in range(2):
        place = cache.file("k", ".so", make)
        assert place == folder / "k.so"
        assert place.read_bytes().startswith(b"library")
    assert len(paths) == 1
    place.write_bytes(b"libr")
    assert cache.file("k", ".so", make).read_bytes().startswith(b"library")
    assert len(paths) == 2


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


def test_a_failure_to_make_leaves_the_lock_free():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.get_or_make("k", fail)
    assert cache.get_or_make("k", lambda: b"content") == b"content"


def test_different_keys_do_not_wait_for_one_another():
    with cache.locked("a"), cache.locked("b"):
        pass
