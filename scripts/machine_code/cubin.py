"""A kernel in a cubin: registers, shared memory, the place of the Params, control codes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvcupy.errors import CompileError

from .sass import Control

_PARAM_CBANK, _REGISTER_COUNT = 0x0A, 0x2F  # attributes of .nv.info sections


@dataclass(frozen=True)
class Resources:
    """The resources of a multiprocessor that a kernel takes.

    Attributes
    ----------
    registers : per thread
    static_bytes : of shared memory per block, that the launch does not ask for
    params_start : where its argument lies in constant bank 0
    """

    registers: int
    static_bytes: int
    params_start: int


def resources(cubin: bytes, name: str) -> Resources:
    """Return what the cubin says of a kernel; CompileError if it does not have it."""
    sections = dict(_sections(cubin))
    names = _symbols(sections)
    registers, params_start = 0, 0
    if f".text.{name}" not in sections:
        raise CompileError(f"the cubin has no kernel {name}", "")
    for code, payload in _attributes(sections.get(".nv.info", b"")):
        if code == _REGISTER_COUNT:
            symbol, count = struct.unpack_from("<II", payload)
            if names.get(symbol) == name:
                registers = count
    for code, payload in _attributes(sections.get(f".nv.info.{name}", b"")):
        if code == _PARAM_CBANK:
            params_start = struct.unpack_from("<IHH", payload)[1]
    static = _section_sizes(cubin).get(f".nv.shared.{name}", 0)
    return Resources(registers, static, params_start)


def controls(cubin: bytes, name: str) -> dict[int, Control]:
    """Return what the compiler encoded beside the operands of a kernel's instructions, by address.

    An instruction has 16 bytes. Source: Jia et al., arXiv:1804.06826, of Volta; the encoding is the
    same up to sm_120.
    """
    text = dict(_sections(cubin))[f".text.{name}"]
    words = struct.iter_unpack("<QQ", text)
    return {16 * i: Control.of(high) for i, (_, high) in enumerate(words)}


def _headers(cubin: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, type, offset and size of the sections of a 64-bit little-endian ELF file."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise CompileError("not a cubin", repr(cubin[:16]))
    (start,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    names = headers[names_at][4]
    for name, kind, _, _, offset, length in headers:
        end = cubin.index(b"\0", names + name)
        yield cubin[names + name : end].decode(), kind, offset, length


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    nothing = 8  # SHT_NOBITS
    for name, kind, offset, length in _headers(cubin):
        yield name, b"" if kind == nothing else cubin[offset : offset + length]


def _section_sizes(cubin: bytes) -> dict[str, int]:
    return {name: length for name, _, _, length in _headers(cubin)}


def _symbols(sections: Mapping[str, bytes]) -> dict[int, str]:
    table, strings = sections.get(".symtab", b""), sections.get(".strtab", b"")
    names = {}
    for i in range(len(table) // 24):
        (at,) = struct.unpack_from("<I", table, i * 24)
        names[i] = strings[at : strings.index(b"\0", at)].decode()
    return names


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield code and payload of the attributes in a .nv.info section."""
    has_payload = 4
    at = 0
    while at + 4 <= len(info):
        form, code, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == has_payload:
            yield code, info[at : at + size]
            at += size
