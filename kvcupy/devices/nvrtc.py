"""Compile specialisations with NVRTC, for any architecture, on a machine with or without a GPU.

CuPy's binding of NVRTC is used, but not its `RawModule`, which adds `-ftz=true` to every program
(the scales of quantised caches would lose their subnormals) and leaves included files out of its
cache key. Results are kept on disk (`devices.cache`) under a digest of everything they depend on.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import cuda_api, sources
from ..errors import CompileError
from ..extras import install
from . import cache

if TYPE_CHECKING:
    from ..kernels import Kernel, Specialisation

OPTIONS = ("-std=c++17", "-default-device")
VERBOSE = "--ptxas-options=-v"
_ENTRY_FORMAT = "2"  # of the disk cache: `_encode`
_RENAMED = (101,)  # 110 since CUDA 13, so that newer drivers do not know the number


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel."""

    image: bytes  # a cubin, or PTX where NVRTC is older than the architecture
    lowered_name: str  # of the kernel in it
    log: str  # what the compiler said; empty when the image came from the disk cache
    target: str  # what NVRTC compiled for, `sm_90` or `compute_90`


def compile_cubin(specialisation: Specialisation, arch: str) -> Compiled:
    """Compile a kernel for an architecture ("sm_90"), or find it compiled."""
    build = _Build.of(arch)
    key = build.key(specialisation)
    compiled: list[Compiled] = []

    def make() -> bytes:
        compiled.extend(build.compile([specialisation], verbose=False))
        return _encode([specialisation], compiled)

    content = cache.get_or_make(key, make)
    return compiled[0] if compiled else _decode(content, specialisation)


def compile_program(
    specialisations: Sequence[Specialisation], arch: str, *,
    kernels_dir: Path | None = None, options: Sequence[str] = (), verbose: bool = False,
) -> list[Compiled]:  # fmt: skip
    """Compile kernels of one source file together, so that it is parsed once for all of them.

    Those compiled here share an image and a log, and an error may be about any of them. Nothing is
    cached with another `kernels_dir`. With `verbose` what is cached is compiled, too,
    for the log to hold registers, stack and spills.
    """
    build = _Build.of(arch, kernels_dir, options)
    if kernels_dir is not None:
        return build.compile(specialisations, verbose)
    known: dict[Specialisation, Compiled] = {}
    for one in specialisations if not verbose else ():
        if (content := cache.load(build.key(one))) is not None:
            known[one] = _decode(content, one)
    missing = [one for one in specialisations if one not in known]
    if missing:
        compiled = build.compile(missing, verbose)
        keys = [build.key(one) for one in missing]
        cache.store(keys[0], _encode(missing, compiled), aliases=keys[1:])
        known.update(zip(missing, compiled, strict=True))
    return [known[one] for one in specialisations]


@dataclass(frozen=True)
class _Build:
    """All that a compiled kernel depends on, but for which kernel it is."""

    arch: str
    folder: Path
    headers: tuple[Path, ...]
    flags: tuple[str, ...]

    @staticmethod
    def of(arch: str, kernels_dir: Path | None = None, options: Sequence[str] = ()) -> _Build:
        headers = tuple(sources.cuda_include_dirs(nvrtc_version()[0]))
        return _Build(arch, kernels_dir or sources.kernels_dir(), headers, (*OPTIONS, *options))

    def key(self, specialisation: Specialisation) -> str:
        """Return the key of a kernel's entry in the disk cache."""
        major, minor = nvrtc_version()
        return cache.key(
            "cubin", _ENTRY_FORMAT, sources.digest(), _program_text(specialisation.kernel),
            specialisation.expression, self.arch, "\0".join(self.flags), f"{major}.{minor}",
            _headers_digest(self.headers),
        )  # fmt: skip

    def compile(self, specialisations: Sequence[Specialisation], verbose: bool) -> list[Compiled]:
        flags = (*self.flags, VERBOSE) if verbose else self.flags
        with cache.announced(", ".join(map(str, specialisations)), self.arch):
            return _compile(specialisations, self.arch, flags, self.folder, self.headers)


def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC; CompileError if it is not installed."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


@lru_cache
def compiler() -> str:
    """Return what decides the machine code apart from the source: NVRTC's build, CUDA's headers.

    CompileError if NVRTC is not installed.
    """
    major, minor = nvrtc_version()
    nvrtc = _nvrtc()
    program = nvrtc.createProgram("", "nothing", (), ())
    try:
        nvrtc.compileProgram(program, ())
        build = re.search(rb"\bV(\d+\.\d+\.\d+)", nvrtc.getPTX(program))
    finally:
        nvrtc.destroyProgram(program)
    version = build[1].decode() if build else f"{major}.{minor}"
    headers = _headers_digest(tuple(sources.cuda_include_dirs(major)))
    return f"NVRTC {version}, headers {headers[:12]}"


@lru_cache
def supported_archs() -> tuple[int, ...]:
    """Return the architectures that NVRTC knows, ascending."""
    return tuple(sorted(int(a) for a in _nvrtc().getSupportedArchs()))


def target_for(arch: str, supported: Sequence[int]) -> str:
    """Return what to compile for: `arch` itself, else the newest PTX that runs on it.

    >>> target_for("sm_90", (80, 90)), target_for("sm_130", (80, 90))
    ('sm_90', 'compute_90')
    """
    number = arch_number(arch)
    if number in supported:
        return arch
    older = [a for a in supported if a <= number and a not in _RENAMED]
    if not older:
        raise CompileError(f"{arch}: this NVRTC compiles for sm_{supported[0]} and newer")
    return f"compute_{older[-1]}"


def arch_number(arch: str) -> int:
    """Return the number of an architecture.

    >>> arch_number("sm_90a")
    90
    """
    match = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if match is None:
        raise ValueError(f"arch: expected sm_NN, got {arch!r}")
    return int(match[1])


def _nvrtc() -> Any:
    cuda_api.load_matching_libraries()
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        remedy = install(cuda_api.cuda_extra())
        raise CompileError(f"NVRTC needs CuPy: {error} ({remedy})") from error
    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy raises several kinds when the library is not found
        cause = str(error).strip().partition("\n")[0]
        remedy = install(cuda_api.cuda_extra())
        raise CompileError(f"NVRTC cannot be loaded: {cause} ({remedy})") from error
    return nvrtc


def _compile(
    specialisations: Sequence[Specialisation], arch: str, flags: tuple[str, ...],
    folder: Path, headers: Sequence[Path],
) -> list[Compiled]:  # fmt: skip
    nvrtc = _nvrtc()
    includes = tuple(f"-I{place}" for place in (folder, *headers))
    target = target_for(arch, supported_archs())
    with _program(nvrtc, specialisations[0].kernel, folder) as program:
        try:
            for one in specialisations:
                nvrtc.addNameExpression(program, one.expression)
            nvrtc.compileProgram(program, (*flags, f"-arch={target}", *includes))
            log = nvrtc.getProgramLog(program)
            names = [nvrtc.getLoweredName(program, one.expression) for one in specialisations]
            image = nvrtc.getCUBIN if target.startswith("sm_") else nvrtc.getPTX
            # CuPy cuts off the last byte, taken for a terminator. A cubin has none.
            content = image(program) + b"\0"
            return [Compiled(content, name, log, target) for name in names]
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise _failure(log, specialisations, arch, headers, error) from error


def _program_text(kernel: Kernel) -> str:
    """Return a program that is one file of the kernels, or a kernel's own text.

    The file in angle brackets, for quotes would look in the working directory first: whatever file
    of that name lies there would be compiled instead, and cached as the package's own. What the
    file itself includes in quotes is looked for next to it, then along the include path.
    """
    return f"#include <{kernel.source}>\n" if kernel.text is None else kernel.text


@contextmanager
def _program(nvrtc: Any, kernel: Kernel, folder: Path) -> Iterator[int]:
    # A text is named as a file among the kernels: what it includes in quotes is looked for there.
    place = "" if kernel.text is None else f"{folder}/"
    name = f"{place}{kernel.source}.program"
    program = nvrtc.createProgram(_program_text(kernel), name, (), ())
    try:
        yield program
    finally:
        nvrtc.destroyProgram(program)


def _failure(
    log: str, specialisations: Sequence[Specialisation], arch: str, headers: Sequence[Path],
    error: Exception,
) -> CompileError:  # fmt: skip
    kernels = ", ".join(map(str, specialisations))
    message = f"{kernels} does not compile for {arch}: {error}"
    if not headers:
        major = nvrtc_version()[0]
        wheel = "nvidia-cuda-runtime-cu12" if major == 12 else f"nvidia-cuda-runtime=={major}.*"
        message += f" (CUDA's headers were not found: pip install {wheel})"
    return CompileError(message, log)


@lru_cache
def _headers_digest(headers: tuple[Path, ...]) -> str:
    """Return a digest of NVIDIA's number-format headers, which come and go with another wheel."""
    total = hashlib.sha256()
    for folder in headers:
        for file in sorted((*folder.glob("cuda_fp*.h*"), *folder.glob("cuda_bf16.h*"))):
            total.update(file.name.encode())
            total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def _encode(specialisations: Sequence[Specialisation], compiled: Sequence[Compiled]) -> bytes:
    """Return the entry of the disk cache that kernels of one program share."""
    pairs = zip(specialisations, compiled, strict=True)
    names = "\0".join(f"{one.expression}\0{c.lowered_name}" for one, c in pairs).encode()
    target = compiled[0].target.encode()
    return struct.pack("<II", len(names), len(target)) + names + target + compiled[0].image


def _decode(content: bytes, specialisation: Specialisation) -> Compiled:
    names_bytes, target_bytes = struct.unpack_from("<II", content)
    names = content[8 : 8 + names_bytes].decode().split("\0")
    rest = content[8 + names_bytes :]
    name = dict(zip(names[::2], names[1::2], strict=True))[specialisation.expression]
    return Compiled(rest[target_bytes:], name, "", rest[:target_bytes].decode())
