"""Replace what names a person or a machine in a report."""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Names that identify nobody, and that logs are full of.
COMMON = {"root", "user", "ubuntu", "debian", "docker", "runner", "admin", "test", "localhost"}
_GPU = re.compile(r"\bGPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_HOMES = re.compile(r"/(home|Users)/(?!USER\b)[^/\s:;,\"'<>()\[\]&\\]+")


class Anonymizer:
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
    def of_this_machine(cls) -> Anonymizer:
        """Return one for this user, machine, checkout and environment."""
        paths = {
            str(Path.home()): "~",
            str(ROOT): "<checkout>",
            sys.prefix: "<environment>",
            str(Path(tempfile.gettempdir()).resolve()): "<tmp>",
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


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # an id without a name
        return ""
