"""Where device code is found: `kernels_src/`, its digest, and the CUDA headers that NVRTC needs."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from .errors import KvcupyError, process_lock

_PACKAGE = Path(__file__).resolve().parent
_TOOLKIT = Path("/usr/local/cuda/include")
_FORMAT_HEADERS = ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h")

_Stamp = tuple[tuple[str, int, int], ...]
_lock = process_lock()
_digests: dict[Path, tuple[_Stamp, str]] = {}


def kernels_dir() -> Path:
    """Return the folder of the kernels: a checkout's own, else the one inside the installed wheel.

    An editable install leaves a copy of the kernels in site-packages that is never updated. A
    package with `pyproject.toml` next to it is a checkout, and uses the folder beside it.
    """
    beside, inside = _PACKAGE.parent / "kernels_src", _PACKAGE / "kernels_src"
    in_checkout = (_PACKAGE.parent / "pyproject.toml").is_file()
    for folder in (beside, inside) if in_checkout else (inside,):
        if folder.is_dir():
            return folder
    raise KvcupyError(f"kernels_src: expected at {beside if in_checkout else inside}, found none")


def digest(part: str = "") -> str:
    """Return the SHA-256 of the names and contents of all files in `kernels_dir()`.

    With `part`, the name of a folder in it, only the files of that folder count. Files are read
    again only if a name, a size or a modification time differs from the last call.
    """
    files = sorted(_files(folder := kernels_dir() / part))
    stamp: _Stamp = tuple((str(path), s.st_size, s.st_mtime_ns) for path, s in files)
    with _lock:
        known = _digests.get(folder)
        if known is None or known[0] != stamp:
            known = _digests[folder] = (stamp, _hash(folder, [path for path, _ in files]))
        return known[1]


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for entry in os.scandir(folder):
        if entry.name.startswith(".") or entry.name.endswith("~"):
            continue  # an editor's
        if entry.is_dir():
            yield from _files(Path(entry.path))
        else:
            yield Path(entry.path), entry.stat()


def _hash(folder: Path, files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        total.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return total.hexdigest()


@dataclass(frozen=True)
class HeaderPlace:
    """A folder where CUDA's headers may be.

    `major` is the CUDA version of the headers in it, None where it holds none; `target` is the
    folder, if there is one, from which those headers can include `nv/target`.
    """

    path: Path
    origin: str
    major: int | None = None
    target: Path | None = None


def header_places() -> list[HeaderPlace]:
    """Return every folder that is searched for CUDA's headers, in order, also those without."""
    places: list[tuple[Path, str]] = []
    for entry in dict.fromkeys(sys.path):
        nvidia = Path(entry or ".") / "nvidia"
        if nvidia.is_dir():
            versioned = sorted(nvidia.glob("cu[0-9]*/include"), reverse=True)
            folders = (nvidia / "cuda_runtime" / "include", *versioned)
            places += [(folder, "wheel") for folder in folders if folder.is_dir()]
    for variable in ("CUDA_PATH", "CUDA_HOME"):
        if value := os.environ.get(variable):
            places.append((Path(value) / "include", f"${variable}"))
    for folder in ("targets/x86_64-linux/include", "targets/sbsa-linux/include", "include"):
        if (path := Path(sys.prefix) / folder / _FORMAT_HEADERS[0]).is_file():
            places.append((path.parent, "conda"))
    places.append((_TOOLKIT, "toolkit"))
    unique: dict[Path, str] = {}
    for path, origin in places:
        unique.setdefault(path.absolute(), origin)
    return [_inspect(path, origin) for path, origin in unique.items()]


def _inspect(path: Path, origin: str) -> HeaderPlace:
    if not all((path / name).is_file() for name in _FORMAT_HEADERS):
        return HeaderPlace(path, origin)
    # CUDA 13 toolkits keep nv/ in a separate folder; the wheels have it in another package.
    targets = (path, path / "cccl", path.parent.parent / "cuda_cccl" / "include", _cupy_target())
    target = next((t for t in targets if t and (t / "nv/target").is_file()), None)
    return HeaderPlace(path, origin, _cuda_major(path), target)


@lru_cache
def _cuda_major(include: Path) -> int:
    for name in ("cuda_runtime_api.h", "cuda.h"):
        if (header := include / name).is_file():
            text = header.read_text(encoding="utf-8", errors="replace")
            if found := re.search(r"#define\s+CUD\w+_VERSION\s+(\d+)\d{3}\b", text):
                return int(found[1])
    return 0


def _cupy_target() -> Path | None:
    """Return the folder of `nv/target` inside CuPy, without importing CuPy."""
    try:
        spec = find_spec("cupy")
    except (ImportError, ValueError):  # found, but broken
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "_core" / "include" / "cupy" / "_cccl" / "libcudacxx"


def cuda_include_dirs(major: int | None = None) -> list[Path]:
    """Return the include folders for `cuda_fp16.h`, `cuda_fp8.h` and `nv/target`, best first.

    All headers come from one place, since versions must not be mixed: one of CUDA `major` if there
    is any, else the first; the folder of `nv/target`, if it is another, comes second. The list is
    empty where the headers are missing; the extras `cuda12` and `cuda13` install them.
    """
    places = [place for place in header_places() if place.major is not None]
    if not places:
        return []
    best = next((place for place in places if place.major == major), places[0])
    return list(dict.fromkeys(p for p in (best.path, best.target) if p is not None))
