"""Compile one specialisation with NVRTC, for any architecture, on a machine with or without a GPU.

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

from ..errors import CompileError
from ..extras import install
from . import cache, compiling

if TYPE_CHECKING:
    from ..kernels import Specialisation

OPTIONS = ("-std=c++17", "-default-device")
VERBOSE = "--ptxas-options=-v"
_INVALID_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION
_PTX_LADDER = (120, 100, 90, 80, 75)
_RENAMED = (101,)  # 110 since CUDA 13, so that newer drivers do not know the number


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    Parameters
    ----------
    image : a cubin, or PTX where NVRTC is older than the architecture; the driver loads either
    lowered_name : the mangled name of the kernel in it
    log : what the compiler said; empty when the image came from the disk cache
    target : what NVRTC compiled for, `sm_90` or `compute_90`
    """

    image: bytes
    lowered_name: str
    log: str
    target: str

    @property
    def cubin(self) -> bytes:
        return self.image


def compile_cubin(
    specialisation: Specialisation,
    arch: str,
    *,
    digest: str | None = None,
    kernels_dir: Path | None = None,
    include_dirs: Sequence[Path] | None = None,
    options: Sequence[str] = (),
    verbose: bool = False,
) -> Compiled:
    """Compile `specialisation` for `arch`, or find it compiled.

    Parameters
    ----------
    specialisation : a kernel with its template arguments
    arch : `sm_90`, `sm_90a`
    digest : of all files in `kernels_dir`; by default that of the package's own. With another
        `kernels_dir` and no digest, nothing is cached.
    kernels_dir, include_dirs : where the source, and CUDA's headers, are
    options : further NVRTC options
    verbose : compile even what is cached, for `log` to hold registers, stack and spills

    Raises
    ------
    CompileError
        With the compiler's log, the expression and the architecture.
    """
    from .. import sources

    version = nvrtc_version()
    if digest is None and kernels_dir is None:
        digest = sources.digest()
    folder = sources.kernels_dir() if kernels_dir is None else kernels_dir
    headers = sources.cuda_include_dirs(version[0]) if include_dirs is None else include_dirs
    flags = (*OPTIONS, *options)

    def compile_now() -> Compiled:
        extra = (*flags, VERBOSE) if verbose else flags
        with compiling.announced(specialisation, arch):
            return _compile(specialisation, arch, extra, folder, headers)

    if digest is None:
        return compile_now()
    kernel = specialisation.kernel
    key = cache.key(
        "cubin", digest, _program_text(kernel.source), specialisation.expression, arch,
        "\0".join(flags), f"{version[0]}.{version[1]}", _headers_digest(tuple(headers)),
    )  # fmt: skip
    if verbose:
        fresh = compile_now()
        cache.store(key, _encode(fresh))
        return fresh
    made: list[Compiled] = []

    def make() -> bytes:
        made.append(compile_now())
        return _encode(made[0])

    content = cache.get_or_make(key, make)
    return made[0] if made else _decode(content)


def nvrtc_version() -> tuple[int, int]:
    """Return the version of NVRTC; CompileError if it is not installed."""
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


@lru_cache
def supported_archs() -> tuple[int, ...]:
    """Return the architectures that NVRTC knows, ascending; empty if CuPy cannot tell."""
    query = getattr(_nvrtc(), "getSupportedArchs", None)
    return () if query is None else tuple(sorted(int(a) for a in query()))


def targets(arch: str, supported: Sequence[int]) -> list[str]:
    """Return what to compile for, best first: `arch` itself, else the newest PTX that runs on it.

    >>> targets("sm_90", (80, 90)), targets("sm_130", (80, 90))
    (['sm_90'], ['compute_90'])
    """
    number = arch_number(arch)
    if number in supported:
        return [arch]
    if supported:
        older = [a for a in supported if a <= number and a not in _RENAMED]
        if not older:
            raise CompileError(f"{arch}: this NVRTC compiles for sm_{supported[0]} and newer")
        return [f"compute_{older[-1]}"]
    return [arch, *(f"compute_{a}" for a in _PTX_LADDER if a <= number)]


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
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        remedy = f"{install('cuda12')}, or cuda13 for a driver of CUDA 13"
        raise CompileError(f"NVRTC needs CuPy: {error} ({remedy})") from error
    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy raises several kinds when the library is not found
        raise CompileError(f"NVRTC cannot be loaded: {error}") from error
    return nvrtc


def _compile(
    specialisation: Specialisation,
    arch: str,
    flags: tuple[str, ...],
    folder: Path,
    headers: Sequence[Path],
) -> Compiled:
    nvrtc = _nvrtc()
    includes = tuple(f"-I{place}" for place in (folder, *headers))
    candidates = targets(arch, supported_archs())
    for target in candidates:
        with _program(nvrtc, specialisation) as program:
            try:
                nvrtc.addNameExpression(program, specialisation.expression)
                nvrtc.compileProgram(program, (*flags, f"-arch={target}", *includes))
                log = nvrtc.getProgramLog(program)
                name = nvrtc.getLoweredName(program, specialisation.expression)
                image = nvrtc.getCUBIN if target.startswith("sm_") else nvrtc.getPTX
                # CuPy cuts off the last byte, taken for a terminator. A cubin's is its own.
                return Compiled(image(program) + b"\0", name, log, target)
            except nvrtc.NVRTCError as error:
                status = getattr(error, "status", None)
                if status == _INVALID_OPTION and target is not candidates[-1]:
                    continue
                raise _failure(nvrtc, program, specialisation, arch, headers, error) from error
    raise CompileError(f"{specialisation}: no target for {arch}")


def _program_text(source: str) -> str:
    """Return a program that is one file of the kernels.

    In angle brackets, for quotes would look in the working directory first: whatever file of that
    name lies there would be compiled instead, and cached as the package's own. What the file itself
    includes in quotes is looked for beside it, then along the include path.
    """
    return f"#include <{source}>\n"


@contextmanager
def _program(nvrtc: Any, specialisation: Specialisation) -> Iterator[int]:
    source = specialisation.kernel.source
    program = nvrtc.createProgram(_program_text(source), f"{source}.program", (), ())
    try:
        yield program
    finally:
        nvrtc.destroyProgram(program)


def _failure(
    nvrtc: Any,
    program: int,
    specialisation: Specialisation,
    arch: str,
    headers: Sequence[Path],
    error: Exception,
) -> CompileError:
    log = nvrtc.getProgramLog(program)
    message = f"{specialisation} does not compile for {arch}: {error}"
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


def _encode(compiled: Compiled) -> bytes:
    name, target = compiled.lowered_name.encode(), compiled.target.encode()
    return struct.pack("<II", len(name), len(target)) + name + target + compiled.image


def _decode(content: bytes) -> Compiled:
    name_bytes, target_bytes = struct.unpack_from("<II", content)
    name, rest = content[8 : 8 + name_bytes], content[8 + name_bytes :]
    target, image = rest[:target_bytes], rest[target_bytes:]
    return Compiled(image, name.decode(), "", target.decode())
