"""Anonymise a report, and pack it."""

from __future__ import annotations

import getpass
import gzip
import os
import platform
import re
import socket
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = {".md", ".json", ".txt", ".log", ".csv"}
# Names that identify nobody, and that logs are full of.
COMMON = {"root", "user", "ubuntu", "debian", "docker", "runner", "admin", "test", "localhost"}
_GPU = re.compile(r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_HOMES = re.compile(r"/(home|Users)/(?!USER\b)[^/\s:;,\"'<>()\[\]&]+")


class Anonymiser:
    """Replaces paths, user and host names of this machine in text.

    Parameters
    ----------
    paths : replacements of folders by path; longer paths come first
    names : replacements of names, where they are whole words
    """

    def __init__(self, paths: dict[str, str], names: dict[str, str]) -> None:
        ordered = sorted(paths.items(), key=lambda item: -len(item[0]))
        self._rules: list[tuple[re.Pattern[str], str]] = [
            (re.compile(rf"(?<![\w.-]){re.escape(path)}(?![\w-])"), stands)
            for path, stands in ordered
        ]
        self._rules += [(_HOMES, r"/\1/USER"), (_GPU, "GPU-UUID")]
        for name, stands in sorted(names.items(), key=lambda item: -len(item[0])):
            if len(name) > 1 and name.lower() not in COMMON:
                word = rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])"
                self._rules.append((re.compile(word, re.IGNORECASE), stands))

    @classmethod
    def of_this_machine(cls, out: Path) -> Anonymiser:
        """Return an anonymiser of this user, machine, checkout, environment, and report folder."""
        paths = {
            str(Path.home()): "~",
            str(ROOT): "<checkout>",
            sys.prefix: "<environment>",
            str(Path(tempfile.gettempdir()).resolve()): "<tmp>",
            str(out): "<report>",
        }
        for variable, stands in (
            ("HOME", "~"), ("CONDA_PREFIX", "<environment>"), ("VIRTUAL_ENV", "<environment>"),
            ("KVCUPY_CACHE_DIR", "<cache>"), ("XDG_CACHE_HOME", "<cache>"),
        ):  # fmt: skip
            if os.environ.get(variable):
                paths.setdefault(os.environ[variable].rstrip("/"), stands)
        for path, stands in tuple(paths.items()):
            paths.setdefault(os.path.realpath(path), stands)
        names: dict[str, str] = {}
        for host in (socket.gethostname(), platform.node()):
            names |= dict.fromkeys((host, host.partition(".")[0]), "HOST")
        for user in (_user(), os.environ.get("SUDO_USER", ""), Path.home().name):
            names[user] = "USER"
        return cls({path: stands for path, stands in paths.items() if len(path) > 1}, names)

    def text(self, text: str) -> str:
        """Return a text with all of them replaced."""
        for pattern, stands in self._rules:
            text = pattern.sub(stands, text)
        return text

    def clean(self, folder: Path) -> None:
        """Rewrite the text files of a folder."""
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix in TEXT:
                self.clean_file(path)

    def clean_file(self, path: Path) -> None:
        """Rewrite a text file."""
        before = path.read_text(encoding="utf-8", errors="replace")
        after = self.text(before)
        if after != before:
            path.write_text(after, encoding="utf-8", errors="replace")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an id without a name
        return ""


def pack(folder: Path) -> Path:
    """Pack a folder beside itself, without owner names; return the archive.

    An older archive is replaced atomically.
    """
    archive = folder.with_name(f"{folder.name}.tar.gz")
    unfinished = archive.with_name(f"{archive.name}.part")

    def nobody(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    # Opened here, as gzip would note the name of its file.
    with (
        unfinished.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        tar.add(folder, folder.name, filter=nobody)
    return unfinished.replace(archive)
