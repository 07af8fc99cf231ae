"""Read the machine code of a kernel: basic blocks, loops, and what a warp issues on a pass.

nvdisasm prints one instruction a line. Everything here follows from that text and from the kernel's
Params. Moves, integer arithmetic and comparisons of what the launch fixes are executed, and a
branch that they decide is followed one way only, so that a call without a window is not charged for
one. What is left of the branches depends on data; of the ways through them, `Code.path` takes the
one that does all of the work most cheaply.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from heapq import heappop, heappush
from typing import cast

from ..errors import CompileError

# --- Instructions ---------------------------------------------------------------------------------

_LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"^(\S+):\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
_REGISTER = re.compile(r"\b(U?R)(\d+|Z)\b")
_PREDICATE = re.compile(r"^!?U?P(?:\d+|T)$")
_FLOAT = re.compile(r"INF|\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)
_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+|RZ)\]")
_WIDTH = re.compile(r"\.(?:U|S)?(8|16|32|64|128|256)(?=\.|$)")

_LOADS = ("LDG", "LD", "LDGSTS", "UBLKCP")
_STORES = ("STG", "ST", "RED", "REDG")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a listing.

    Attributes
    ----------
    opcode : with its modifiers, `LDG.E.128`
    guard : the predicate that it is executed under, `!P0`; empty: none
    operands : as printed, without those that nvdisasm adds in comments
    targets : labels that it names
    """

    address: int
    opcode: str
    guard: str
    operands: tuple[str, ...]
    targets: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @cached_property
    def modifiers(self) -> frozenset[str]:
        return frozenset(self.opcode.split(".")[1:])

    @cached_property
    def access_bytes(self) -> int:
        """Bytes that a lane accesses, where this is an access to memory."""
        if self.name == "LDSM":
            return 4 * max([int(m) for m in self.modifiers if m in ("2", "4")], default=1)
        width = _WIDTH.search(self.opcode)
        return int(width[1]) // 8 if width else 4

    @property
    def calls(self) -> bool:
        """Whether it calls a function. A call to a label of the kernel itself is a far branch."""
        return self.name == "CALL" and bool(self.targets) and not self.targets[0].startswith(".")

    @property
    def loads_global(self) -> bool:
        return self.name in _LOADS

    @property
    def stores_global(self) -> bool:
        return self.name in _STORES

    @cached_property
    def writes(self) -> frozenset[str]:
        """The registers and predicates that it writes."""
        return frozenset(_writes(self))

    @cached_property
    def parts(self) -> tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
        """The register that it writes first, all that follows, and of that the values that it reads
        and the predicates; those that carries are written to stand before both."""
        at = next((i for i, o in enumerate(self.operands) if _REGISTER.fullmatch(o)), None)
        if at is None:
            return "", (), (), ()
        sources = self.operands[at + 1 :]
        plain = tuple([o for o in sources if not _PREDICATE.match(o)])
        read = sources[sources.index(plain[0]) :] if plain else ()
        predicates = tuple([o for o in read if _PREDICATE.match(o)])
        return self.operands[at], sources, plain, predicates

    @cached_property
    def is_modelled(self) -> bool:
        """Whether its result may be known where its operands are."""
        return self.name in _MODELLED or self.name.removeprefix("U") in _MODELLED

    @cached_property
    def reads(self) -> frozenset[str]:
        """The registers that it reads. Predicates are left out, but for the guard."""
        registers = set(_reads(self))
        if self.guard:
            registers.add(self.guard.lstrip("!"))
        return frozenset(registers)


def parse(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    r"""Return the instructions of a listing, and which of them each label stands before.

    Examples
    --------
    >>> code, labels = parse(".L_x_1:\n  /*0010*/  @!P0 LDG.E.128 R4, [R2.64] ;")
    >>> code[0].opcode, code[0].guard, code[0].access_bytes, labels
    ('LDG.E.128', '!P0', 16, {'.L_x_1': 0})
    """
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _LINE.match(line):
            text = found["operands"]
            listed = _TARGETS.search(text)
            targets = [t.strip() for t in listed[1].split(",")] if listed else []
            targets += _TARGET.findall(text)
            operands = tuple([o.strip() for o in text.partition("(*")[0].split(",") if o.strip()])
            code.append(Instruction(
                int(found["address"], 16), found["opcode"], found["guard"] or "", operands,
                tuple(targets),
            ))  # fmt: skip
    return code, labels


def _span(register: str, count: int) -> Iterator[str]:
    """Yield `count` neighbouring registers."""
    kind, number = _REGISTER.match(register).groups()  # type: ignore[union-attr]
    if number != "Z":
        yield from (f"{kind}{int(number) + i}" for i in range(count))


def _result_registers(one: Instruction) -> int:
    """Return how many registers a result takes."""
    if one.name in ("HMMA", "IMMA", "QMMA", "OMMA"):
        return 2 if one.name == "HMMA" and "F16" in one.modifiers else 4
    if one.name in ("LDG", "LD", "LDS", "LDC", "LDCU", "ULDC", "LDL", "ATOM", "ATOMG", "LDSM"):
        return max(1, one.access_bytes // 4)
    if one.name in ("DADD", "DMUL", "DFMA", "FFMA2", "FADD2", "FMUL2", "CS2R"):
        return 1 if one.name == "CS2R" and "32" in one.modifiers else 2
    if one.name in ("IMNMX", "VIMNMX") and one.modifiers & {"S64", "U64"}:
        return 2
    return 2 if one.modifiers & {"WIDE", "64", "F64"} else 1


_MODELLED = frozenset(("MOV", "R2UR", "MOV32I", "SHF", "LEA", "LOP3", "IABS", "SEL",
                       "IMAD", "IADD3", "VIADD", "IADD", "ISETP", "FSETP", "PLOP3", "LDC", "LDCU",
                       "CS2R", "S2R", "S2UR", "HFMA2", "I2F", "MUFU", "F2I", "IMNMX",
                       "VIMNMX", "VIADDMNMX", "LDG", "LD", "SHFL"))  # fmt: skip
_NO_RESULT = frozenset((
    *_STORES, "LDGSTS", "STS", "STSM", "STL", "UBLKCP", "BRA", "BRX", "EXIT", "BAR", "BSSY",
    "BSYNC", "DEPBAR", "LDGDEPBAR", "NOP", "RET", "MEMBAR",
))  # fmt: skip


_ONLY_PREDICATES = frozenset(("ISETP", "UISETP", "FSETP", "DSETP", "HSETP2", "PSETP", "UPSETP",
                              "PLOP3", "UPLOP3", "FCHK", "R2P"))  # fmt: skip


def _writes(one: Instruction) -> Iterator[str]:
    if one.name in _NO_RESULT:
        return
    if one.name == "R2P":
        yield from (f"P{i}" for i in range(7))
        return
    if one.name in _ONLY_PREDICATES:
        yield from (o for o in one.operands[:2] if _PREDICATE.match(o))
        return
    for operand in one.operands:
        if _PREDICATE.match(operand):
            yield operand.lstrip("!")
            continue
        if _REGISTER.fullmatch(operand):
            yield from _span(operand, _result_registers(one))
            rest = one.operands[one.operands.index(operand) + 1 :]
            if one.name in ("IADD3", "UIADD3", "IMAD", "LEA", "VIADD"):  # carries out
                for other in rest:
                    if not _PREDICATE.match(other):
                        break
                    if other not in ("PT", "UPT"):
                        yield other
        return


def _reads(one: Instruction) -> Iterator[str]:
    sources: Sequence[str] = one.operands
    if one.name not in _NO_RESULT and one.name not in _ONLY_PREDICATES:
        first = next((i for i, o in enumerate(sources) if not _PREDICATE.match(o)), len(sources))
        is_register = first < len(sources) and _REGISTER.fullmatch(sources[first])
        sources = sources[first + bool(is_register) :]
    for i, operand in enumerate(sources):
        for register in _REGISTER.finditer(operand):
            yield from _span(register[0], _source_registers(one, operand, i))


def _source_registers(one: Instruction, operand: str, position: int) -> int:
    if "[" in operand:
        return 2 if ".64" in operand or "desc" in operand or "R" in operand else 1
    if one.name in ("HMMA", "IMMA", "QMMA"):
        return (4, 2, 4)[min(position, 2)]
    if one.stores_global or one.name in ("STS", "STL"):
        return max(1, one.access_bytes // 4)
    return 2 if one.modifiers & {"WIDE", "64", "F64"} else 1


# --- Pipes ----------------------------------------------------------------------------------------

PIPES: dict[str, tuple[str, ...]] = {
    "fma": ("FFMA", "FMUL", "FADD", "FFMA32I", "FMUL32I", "FADD32I", "FSWZADD"),
    "fma2": ("FFMA2", "FMUL2", "FADD2"),
    "imad": ("IMAD", "IMUL", "IDP", "XMAD"),
    "half": ("HFMA2", "HADD2", "HMUL2", "HSET2", "HSETP2", "HMNMX2", "HADD2_32I", "HFMA2_32I"),
    "add": ("IADD3", "IADD", "VIADD", "IMNMX", "VIMNMX", "VIADDMNMX", "IADD32I", "VIMNMX3"),
    "alu": ("LOP3", "LOP", "SHF", "SHL", "SHR", "ISETP", "SEL", "LEA", "PRMT", "FMNMX", "FMNMX3",
            "FSETP", "FSEL", "FSET", "FCHK", "MOV", "PLOP3", "IABS", "ISCADD", "BMSK", "SGXT",
            "F2FP", "I2FP", "I2IP", "CS2R", "P2R", "R2P", "MOV32I", "BFE", "BFI", "LOP32I", "PSETP",
            "VOTE", "VABSDIFF", "FCMP", "ICMP"),
    "xu": ("MUFU", "F2F", "F2I", "I2F", "I2I", "FRND", "POPC", "FLO", "BREV"),
    "fp64": ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX"),
    "tensor": ("HMMA", "IMMA", "QMMA", "OMMA", "BMMA", "DMMA"),
    "global": (*_LOADS, *_STORES, "ATOM", "ATOMG"),
    "shared": ("LDS", "STS", "LDSM", "STSM", "ATOMS", "LDL", "STL"),
    "shuffle": ("SHFL", "MOVM"),
    "uniform": (),
    "control": (),
}  # fmt: skip
"""Opcodes by the unit that executes them. Uniform ones start with U, or are known by a prefix, and
what stands nowhere is control, which takes an issue slot and nothing else."""

_PIPE_OF = {name: pipe for pipe, names in PIPES.items() for name in names}

PRODUCTS = re.compile(r"\.(16|8)(8|16)(4|8|16|32|64|128)(?=\.|$)")
"""Shape of a tensor core's product in its opcode: `HMMA.16816.F32` is m16n8k16."""


def pipe_of(one: Instruction) -> str:
    """Return the pipe that executes an instruction.

    >>> [pipe_of(parse(f"  /*0000*/ {text} ;")[0][0]) for text in ("FFMA R1, R2, R3, R4", "BRA 0")]
    ['fma', 'control']
    """
    pipe = _PIPE_OF.get(one.name)
    if pipe is not None:
        return pipe
    return "uniform" if one.name.startswith("U") or one.name in ("R2UR", "S2UR") else "control"


def products_of(one: Instruction) -> int:
    """Return the multiply-adds of a tensor core's instruction."""
    shape = PRODUCTS.search(one.opcode)
    if pipe_of(one) != "tensor" or shape is None:
        return 0
    m, n, k = map(int, shape.groups())
    return m * n * k


# --- Constants that the launch fixes --------------------------------------------------------------

_MASK, _WIDE_MASK = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
Values = dict[str, int]  # registers and predicates whose value is known


def _offset(text: str) -> int:
    return 0 if text == "RZ" else int(text, 16)


def constant_bank(
    params: bytes, start: int, block: Sequence[int], grid: Sequence[int]
) -> dict[int, int]:
    """Return the words of constant bank 0 that a launch decides, by offset.

    Parameters
    ----------
    params, start : the kernel's argument, and where the cubin says that it lies
    block, grid : of the launch; their place in the bank is nowhere documented, but read in SASS
    """
    words = {start + i: int.from_bytes(params[i : i + 4], "little")
             for i in range(0, len(params) - 3, 4)}  # fmt: skip
    block_at, grid_at = (0x360, 0x370) if start >= 0x380 else (0x0, 0xC)
    for i in range(3):
        words[block_at + 4 * i], words[grid_at + 4 * i] = block[i], grid[i]
    return words


def _signed(value: int) -> int:
    return value - (1 << 32) if value & 0x80000000 else value


def _half(text: str) -> int | None:
    """Return the bits of an fp16 immediate."""
    if not _FLOAT.fullmatch(text.lstrip("-+")):
        return None
    return int.from_bytes(struct.pack("<e", float(text.lower())), "little")


def _float(value: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", value & _MASK))[0])


@dataclass(frozen=True)
class FirstThread:
    """The first thread of a block, for which all indices that it loads are 0.

    Other lanes are taken to hold what it holds, so that a shuffle hands back its own value.

    Attributes
    ----------
    block : its number on the first axis
    word_bytes : narrower loads are of indices, and of scales, masks and logarithms, which are 0 too
    """

    block: int
    word_bytes: int


@lru_cache(maxsize=1 << 14)
def _read_operand(operand: str, is_float: bool) -> tuple[str, str, int, bool, bool]:
    """Return kind, register, number, and whether it is negated or inverted."""
    text = operand.replace(".reuse", "")
    negative, inverted = text.startswith("-"), text.startswith("~")
    text = text.lstrip("-+~")
    if constant := _CONSTANT.fullmatch(text):
        return "constant", "", _offset(constant[1]), negative, inverted
    if register := _REGISTER.fullmatch(text):
        kind = "number" if register[2] == "Z" else "register"
        return kind, text, 0, negative, inverted
    if is_float and _FLOAT.fullmatch(text):
        bits = int.from_bytes(struct.pack("<f", float(text.lower())), "little")
        return "number", "", bits, negative, inverted
    if re.fullmatch(r"0x[0-9a-f]+|\d+", text):
        return "number", "", int(text, 0), negative, inverted
    return "", "", 0, negative, inverted


class _Machine:
    """Executes what is known: moves, integer arithmetic, comparisons.

    Parameters
    ----------
    constants : words of bank 0, by offset
    thread : whose registers these are; None: any
    """

    def __init__(self, constants: Mapping[int, int], thread: FirstThread | None = None) -> None:
        self._constants, self._thread = constants, thread
        self._specials: dict[str, int] = {}
        if thread is not None:
            self._specials = dict.fromkeys(("SR_TID.X", "SR_TID.Y", "SR_TID.Z", "SR_LANEID"), 0)
            self._specials |= {"SR_CTAID.X": thread.block, "SR_CTAID.Y": 0, "SR_CTAID.Z": 0}

    def run(self, block: Iterable[Instruction], values: Values) -> Values:
        """Return what is known behind a block, given what is known before it."""
        values = dict(values)
        for one in block:
            self.step(one, values)
        return values

    def step(self, one: Instruction, values: Values) -> None:
        """Execute an instruction, as far as its operands are known."""
        if not one.writes:
            return
        guard = self.truth(one.guard, values) if one.guard else True
        if guard is False:
            return
        results = self._results(one, values) if one.is_modelled else {}
        for name in one.writes:
            value = results.get(name)
            if value is None or not (guard or values.get(name) == value):
                values.pop(name, None)
            else:
                values[name] = value

    def truth(self, predicate: str, values: Values) -> bool | None:
        """Return what a predicate is, None if that is not known."""
        negated, name = predicate.startswith("!"), predicate.lstrip("!")
        value = 1 if name in ("PT", "UPT") else values.get(name)
        return None if value is None else bool(value) != negated

    def _word(self, operand: str, values: Values, *, is_float: bool = False) -> int | None:
        kind, name, number, negative, inverted = _read_operand(operand, is_float)
        if kind == "register":
            value = values.get(name)
        elif kind == "constant":
            value = self._constants.get(number)
        else:
            value = number if kind else None
        if value is None:
            return None
        if is_float:
            return value ^ (1 << 31 if negative else 0)
        return (-value if negative else ~value if inverted else value) & _MASK

    def _results(self, one: Instruction, values: Values) -> Values:
        """Return what an instruction writes, as far as that is known."""
        if one.name in ("ISETP", "UISETP", "FSETP"):
            return self._compare(one, values)
        if one.name in ("PLOP3", "UPLOP3"):
            return self._combine(one, values)
        target, sources, plain, predicates = one.parts
        if not target:
            return {}
        if one.name in ("LDC", "LDCU", "ULDC"):
            found = _CONSTANT.fullmatch(sources[0]) if sources else None
            if found is None or one.modifiers & {"U8", "S8", "U16", "S16"}:
                return {}
            loaded = {}
            for i, register in enumerate(_span(target, _result_registers(one))):
                word = self._constants.get(_offset(found[1]) + 4 * i)
                if word is not None:
                    loaded[register] = word
            return loaded
        if one.name in ("S2R", "S2UR"):
            special = self._specials.get(sources[0]) if sources else None
            return {} if special is None else {target: special}
        if one.name in ("LDG", "LD"):
            is_index = self._thread is not None and one.access_bytes < self._thread.word_bytes
            return dict.fromkeys(one.writes, 0) if is_index else {}
        if one.name == "SHFL":
            word = None if self._thread is None else self._word(plain[0], values)
            return {} if word is None else {target: word}
        if one.name == "CS2R":
            zero = sources == ("SRZ",)
            return dict.fromkeys(_span(target, _result_registers(one)), 0) if zero else {}
        if one.name == "HFMA2" and len(sources) == 4 and sources[1] == "RZ":
            # Two halves that are added to nothing: how a constant is loaded by this pipe.
            halves = [_half(text) for text in sources[2:]]
            if None in halves:
                return {}
            return {target: cast(int, halves[0]) << 16 | cast(int, halves[1])}
        truths = [self.truth(o, values) for o in predicates]
        name = one.name.removeprefix("U")
        is_minimum = name in ("IMNMX", "VIMNMX", "VIADDMNMX")
        if "64" in one.modifiers or (is_minimum and one.modifiers & {"S64", "U64"}):
            return self._pair_results(name, target, [self._pair(o, values) for o in plain], truths)
        words = [self._word(o, values) for o in plain]
        if name == "VIADDMNMX" and len(words) == 3 and None not in words[:2]:
            words = [sum(cast(list[int], words[:2])) & _MASK, words[2]]
        if is_minimum:
            value = _extreme(words, truths, None if "U32" in one.modifiers else 31)
            return {} if value is None else {target: value}
        if name == "SEL" and len(words) == 2 and truths:
            chosen = None if truths[-1] is None else words[0 if truths[-1] else 1]
            return {} if chosen is None else {target: chosen}
        if name == "IMAD" and len(words) >= 3:
            return self._multiply_add(one, target, plain, words, truths, values)
        if None in words:
            return {}
        known = [word for word in words if word is not None]
        total = _value(name, one.modifiers, known)
        if total is None:
            return {}
        if "X" in one.modifiers:
            return {} if None in truths else {target: (total + sum(map(bool, truths))) & _MASK}
        results = {target: total & _MASK}
        if name == "LOP3" and _PREDICATE.match(one.operands[0]) and truths == [False]:
            results[one.operands[0]] = int(total != 0)
        if name in ("IADD3", "LEA"):
            # The negative of a number is its complement and one, so that of 0 carries.
            above = total + sum(
                1 << 32 for o in plain if o[0] == "-" and self._word(o, values) == 0
            )
            # Two carries are only ever added up.
            for i, predicate in enumerate(_carries(sources)):
                results[predicate] = int(above >> 32 > i)
        return results

    def _pair(self, operand: str, values: Values) -> int | None:
        """Return the 64 bits of an operand: of neighbouring registers or constants."""
        kind, name, number, negative, inverted = _read_operand(operand, False)
        if kind == "register":
            low, high = (values.get(register) for register in _span(name, 2))
        elif kind == "constant":
            low, high = (self._constants.get(number + i) for i in (0, 4))
        elif kind:
            low, high = number & _MASK, number >> 32
        else:
            return None
        if low is None or high is None:
            return None
        value = high << 32 | low
        return (-value if negative else ~value if inverted else value) & _WIDE_MASK

    def _pair_results(
        self, name: str, target: str, words: list[int | None], truths: Sequence[bool | None]
    ) -> Values:
        """Return what an instruction of 64 bits writes: a move, a choice or a sum."""
        value: int | None = None
        if name == "SEL" and len(words) == 2 and truths:
            value = None if truths[-1] is None else words[0 if truths[-1] else 1]
        elif name in ("IMNMX", "VIMNMX"):
            value = _extreme(words, truths, 63)
        elif name in ("MOV", "IADD", "IADD3"):
            value = None if None in words else sum(cast(list[int], words))
        if value is None:
            return {}
        return dict(zip(_span(target, 2), (value & _MASK, value >> 32 & _MASK), strict=True))

    def _multiply_add(
        self, one: Instruction, target: str, plain: Sequence[str], words: list[int | None],
        truths: Sequence[bool | None], values: Values,
    ) -> Values:  # fmt: skip
        a, b, c = words[:3]
        if c is None or None in truths:
            return {}
        if a == 0 or b == 0:
            product = 0
        elif a is None or b is None:
            return {}
        else:
            product = a * b if "U32" in one.modifiers else _signed(a) * _signed(b)
        carry = sum(map(bool, truths)) if "X" in one.modifiers else 0
        if not one.modifiers & {"WIDE", "HI"}:
            return {target: (product + c + carry) & _MASK}
        high: int | None = 0
        addend = plain[2].removesuffix(".reuse")
        if constant := _CONSTANT.fullmatch(addend):
            high = self._constants.get(_offset(constant[1]) + 4)
        elif addend not in ("RZ", "URZ"):
            pair = list(_span(addend, 2)) if _REGISTER.fullmatch(addend) else []
            high = values.get(pair[1]) if pair else None
        if high is None:
            return {}
        total = product + c + (high << 32)
        if "HI" in one.modifiers:
            return {target: total >> 32 & _MASK}
        return dict(zip(_span(target, 2), (total & _MASK, total >> 32 & _MASK), strict=True))

    def _compare(self, one: Instruction, values: Values) -> Values:
        operands = one.operands
        if len(operands) < 5:
            return {}
        first, second, a, b, other = operands[:5]
        truth = self._compared(one, a, b, operands[5] if len(operands) > 5 else "PT", values)
        with_other = self.truth(other, values)
        results: Values = {}
        for target, outcome in ((first, truth), (second, None if truth is None else not truth)):
            if target in ("PT", "UPT"):
                continue
            joined = _join(outcome, with_other, "OR" in one.modifiers)
            if joined is not None and "XOR" not in one.modifiers:
                results[target] = int(joined)
        return results

    def _compared(self, one: Instruction, a: str, b: str, low: str, values: Values) -> bool | None:
        is_float = one.name == "FSETP"
        comparison = next((m for m in one.opcode.split(".") if m[:2] in _COMPARISONS), "")
        is_wide = bool(one.modifiers & {"S64", "U64"})
        if is_wide:
            x, y = self._pair(a, values), self._pair(b, values)
        else:
            x, y = (self._word(o, values, is_float=is_float) for o in (a, b))
        if x is None or y is None or not comparison or "|" in a + b:
            return None
        if is_float:
            u, v = _float(x), _float(y)
            if u != u or v != v:
                return comparison in ("NE", "NEU") or comparison.endswith("U")
            return _COMPARISONS[comparison[:2]](u, v)
        if not one.modifiers & {"U32", "U64"}:
            sign = 1 << 63 if is_wide else 1 << 31
            x, y = (x ^ sign) - sign, (y ^ sign) - sign
        if "EX" in one.modifiers and x == y:
            return self.truth(low, values)
        return _COMPARISONS[comparison](x, y)

    def _combine(self, one: Instruction, values: Values) -> Values:
        operands = one.operands
        if len(operands) < 7:
            return {}
        inputs = [self.truth(o, values) for o in operands[2:5]]
        results: Values = {}
        for target, table in ((operands[0], operands[5]), (operands[1], operands[6])):
            if target in ("PT", "UPT") or not re.fullmatch(r"0x[0-9a-f]+", table):
                continue
            cases = [[x] if x is not None else [False, True] for x in inputs]
            outcomes = {
                int(table, 16) >> (4 * a + 2 * b + c) & 1
                for a in cases[0] for b in cases[1] for c in cases[2]
            }  # fmt: skip
            if len(outcomes) == 1:
                results[target] = outcomes.pop()
        return results


def _lookup(a: int, b: int, c: int, table: int) -> int:
    """Return LOP3: bit by bit, what stands in the table at (a, b, c)."""
    result = 0
    for i in range(8):
        if table >> i & 1:
            part = a if i & 4 else ~a
            part &= b if i & 2 else ~b
            result |= part & (c if i & 1 else ~c)
    return result & _MASK


def _extreme(
    words: Sequence[int | None], truths: Sequence[bool | None], sign: int | None
) -> int | None:
    """Return the smaller of two numbers, the larger if the last predicate is false.

    Parameters
    ----------
    sign : the number of the sign bit, None for numbers without one
    """
    if len(words) != 2 or words[0] is None or words[1] is None or not truths or truths[-1] is None:
        return None
    flip = 0 if sign is None else 1 << sign
    return (min if truths[-1] else max)(words[0] ^ flip, words[1] ^ flip) ^ flip


def _carries(sources: Sequence[str]) -> Iterator[str]:
    """Yield the predicates that take the carries of an addition: those before its operands."""
    for operand in sources:
        if not _PREDICATE.match(operand):
            return
        if operand not in ("PT", "UPT"):
            yield operand


def _value(name: str, modifiers: frozenset[str], words: list[int]) -> int | None:
    """Return the result of an instruction whose operands are known; None: not modelled.

    Carries are above the lower 32 bits. What divisions estimate is rounded to nearest, not as the
    hardware does: they correct it.
    """
    if name in ("MOV", "R2UR", "MOV32I"):
        return words[0] if words else None
    if name in ("IADD3", "VIADD", "IADD"):
        return sum(words)
    if name == "SHF" and len(words) == 3 and "W" not in modifiers:
        return _shifted(modifiers, *words)
    if name == "LEA" and "SX32" not in modifiers:
        if "HI" in modifiers and len(words) == 4:
            low, addend, high, shift = words
            return ((high << 32 | low) << shift >> 32 & _MASK) + addend
        if "HI" not in modifiers and len(words) == 3:
            return (words[0] << words[2] & _MASK) + words[1]
    if name == "LOP3" and len(words) == 4:
        return _lookup(*words)
    if name == "IABS" and words:
        return abs(_signed(words[0]))
    if name == "I2F" and words and not modifiers & {"F64", "F16"}:
        return _bits(float(words[0] if "U32" in modifiers else _signed(words[0])))
    if name == "MUFU" and "RCP" in modifiers and _float(words[0]):
        return _bits(1.0 / _float(words[0]))
    if name == "F2I" and "TRUNC" in modifiers and not modifiers & {"F64", "F16"}:
        number = _float(words[0])
        return int(number) if abs(number) < 1 << 32 else None
    return None


def _shifted(modifiers: frozenset[str], low: int, shift: int, high: int) -> int | None:
    """Return what a funnel shift takes of `high:low`."""
    whole = high << 32 | low
    if "L" in modifiers:
        if shift >= 32 and modifiers & {"U32", "S32"}:
            return 0 if high == 0 and "HI" not in modifiers else None
        return whole << shift >> 32 if "HI" in modifiers else low << shift
    if modifiers & {"U64", "S64"}:
        return whole >> shift
    if "HI" in modifiers and low == 0:
        return (_signed(high) if "S32" in modifiers else high) >> min(shift, 32)
    return None


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack("<f", number), "little")


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt,
    "GE": operator.ge,
}  # fmt: skip


def _join(a: bool | None, b: bool | None, either: bool) -> bool | None:
    if either:
        return True if a or b else None if a is None or b is None else False
    return False if a is False or b is False else None if a is None or b is None else True


def _common(a: Values, b: Values) -> Values:
    return {name: value for name, value in a.items() if b.get(name) == value}


# --- Control flow ---------------------------------------------------------------------------------

_MAX_TRIPS = 64


@dataclass(frozen=True)
class Loop:
    """A natural loop.

    Attributes
    ----------
    header : the block that every pass begins with
    latches : blocks that go back to it
    blocks : all of them
    trips : passes that the Params decide, None where they do not
    """

    header: int
    latches: frozenset[int]
    blocks: frozenset[int]
    trips: int | None = None


@dataclass(frozen=True)
class Path:
    """What a warp issues on one way through a loop or a kernel.

    Attributes
    ----------
    code : instructions in order; an inner loop's as often as it is passed
    inactive : addresses of those whose guard is known to be false: they are issued, and no more
    uncounted : inner loops whose number of passes is not known, counted once
    """

    code: tuple[Instruction, ...]
    inactive: frozenset[int] = frozenset()
    uncounted: int = 0

    def active(self) -> Iterator[Instruction]:
        return (one for one in self.code if one.address not in self.inactive)

    def bytes_loaded(self, word_bytes: int) -> int:
        """Bytes that a lane loads from global memory in words of at least `word_bytes`."""
        return sum([i.access_bytes for i in self.active()
                    if i.loads_global and i.access_bytes >= word_bytes])  # fmt: skip

    def bytes_stored(self, word_bytes: int) -> int:
        """Bytes that a lane stores to global memory in words of at least `word_bytes`."""
        return sum([i.access_bytes for i in self.active()
                    if i.stores_global and i.access_bytes >= word_bytes])  # fmt: skip


_Work = tuple[int, ...]


@dataclass(frozen=True)
class _Node:
    """A block of a region, or an inner loop of it as one node.

    Attributes
    ----------
    header : its number
    inner : the loop, None for a block
    path : what is issued on a visit
    work : of a visit, to be maximal; `cost` among equal ways, to be minimal
    before : nodes that it may follow
    ends : whether a pass may end behind it
    """

    header: int
    inner: Loop | None
    path: Path
    work: _Work
    cost: int
    before: tuple[int, ...]
    ends: bool


class Code:
    """The control flow of one kernel.

    Parameters
    ----------
    listing : of nvdisasm, of this kernel alone
    constants : words of constant bank 0, as `constant_bank` returns them; without them no branch
        is decided
    thread : follow this one, else any thread of any block

    Attributes
    ----------
    code, labels : as `parse` returns them
    starts : the first instruction of each block, in order
    edges : successors by block, those that the constants exclude left out

    Raises
    ------
    CompileError : the listing has no instructions
    """

    def __init__(
        self, listing: str, constants: Mapping[int, int] | None = None,
        thread: FirstThread | None = None,
    ) -> None:  # fmt: skip
        self.code, self.labels = parse(listing)
        if not self.code:
            raise CompileError("no instructions in the listing", listing[:1000])
        starts = {0, *(i for i in self.labels.values() if i < len(self.code))}
        starts |= {i + 1 for i, one in enumerate(self.code[:-1]) if one.name in _ENDS}
        self.starts = sorted(starts)
        self._block_at = {start: number for number, start in enumerate(self.starts)}
        ends = [*self.starts[1:], len(self.code)]
        self._blocks = [self.code[i:j] for i, j in zip(self.starts, ends, strict=True)]
        self.edges: dict[int, tuple[int, ...]] = {}
        self._machine = _Machine(constants or {}, thread)
        self._known: dict[int, Values] = {0: {}}  # at the beginning of each block
        self._inactive: set[int] = set()
        self._trips: dict[int, int] = {}
        self._resolve()

    def block(self, number: int) -> list[Instruction]:
        return self._blocks[number]

    def _successors(self, number: int, values: Values, machine: _Machine) -> tuple[int, ...]:
        last = self.block(number)[-1]
        following = (number + 1,) if number + 1 < len(self.starts) else ()
        if last.name not in _ENDS or last.calls:
            return following
        taken = machine.truth(last.guard, values) if last.guard else True
        for operand in last.operands:
            if _PREDICATE.match(operand):
                taken = _join(taken, machine.truth(operand, values), either=False)
        if "DIV" in last.modifiers:  # warps are taken to be converged
            taken = False
        away: tuple[int, ...] = ()
        if last.name in ("BRA", "BRX", "JMP", "CALL"):
            away = tuple([self._block_at[self.labels[t]] for t in last.targets if t in self.labels])
        if taken is None:
            return tuple(dict.fromkeys((*away, *following)))
        return away if taken else following

    def _resolve(self) -> None:
        """Find the blocks that can be reached, with what is known at their beginning."""
        machine, known = self._machine, self._known
        leaving: dict[tuple[int, int], Values] = {}
        waiting = [0]
        while waiting:
            number = heappop(waiting)  # roughly in the order of the code
            values = machine.run(self.block(number), known[number])
            self.edges[number] = self._successors(number, values, machine)
            for target in self.edges[number]:
                leaving[number, target] = values
                merged = values if target not in known else _common(known[target], values)
                if target not in known or merged != known[target]:
                    known[target] = merged
                    if target not in waiting:
                        heappush(waiting, target)
        for number in self.edges:
            values = dict(known[number])
            for one in self.block(number):
                if one.guard and machine.truth(one.guard, values) is False:
                    self._inactive.add(one.address)
                machine.step(one, values)
        for loop in self.loops():
            entering = [
                values for (source, target), values in leaving.items()
                if target == loop.header and source not in loop.blocks
            ]  # fmt: skip
            trips = self._count_trips(loop, reduce(_common, entering)) if entering else None
            if trips is not None:
                self._trips[loop.header] = trips
        self.__dict__.pop("_loops", None)  # which did not have the trips

    def _count_trips(self, loop: Loop, values: Values) -> int | None:
        """Return how often a loop is passed where that is decided, else None."""
        inner: dict[int, Loop] = {}  # by block, the largest loop around it within this one
        for one in self.loops():
            if one.blocks < loop.blocks:
                inner.update(dict.fromkeys(one.blocks, one))
        order = [
            n for n in self.order
            if n in loop.blocks and (n not in inner or inner[n].header == n)
        ]  # fmt: skip
        for trips in range(1, _MAX_TRIPS + 1):
            entering = {loop.header: values}
            again: list[Values] = []
            leaves = False
            for number in order:
                if number not in entering:
                    continue
                behind, targets = self._behind(number, inner.get(number), entering[number])
                leaves = leaves or not targets
                for target in targets:
                    if target == loop.header:
                        again.append(behind)
                    elif target not in loop.blocks:
                        leaves = True
                    else:
                        before = entering.get(target)
                        entering[target] = behind if before is None else _common(before, behind)
            if leaves:
                return None if again else trips
            values = reduce(_common, again)
        return None

    def _behind(
        self, number: int, inner: Loop | None, values: Values
    ) -> tuple[Values, tuple[int, ...]]:
        """Return what is known behind a block, or a loop that it begins, and what follows."""
        if inner is None:
            values = self._machine.run(self.block(number), values)
            return values, self._successors(number, values, self._machine)
        exits = {t for b in inner.blocks for t in self.edges[b] if t not in inner.blocks}
        written = {name for b in inner.blocks for one in self.block(b) for name in one.writes}
        kept = {name: value for name, value in values.items() if name not in written}
        return kept, tuple(exits)

    # Loops

    @cached_property
    def predecessors(self) -> dict[int, set[int]]:
        before: dict[int, set[int]] = {number: set() for number in self.edges}
        for number, targets in self.edges.items():
            for target in targets:
                before[target].add(number)
        return before

    @cached_property
    def order(self) -> list[int]:
        """The reachable blocks, each before those that follow it but for back edges."""
        order: list[int] = []
        seen = {0}
        stack = [(0, iter(self.edges[0]))]
        while stack:
            number, targets = stack[-1]
            target = next((t for t in targets if t not in seen), None)
            if target is None:
                order.append(number)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(self.edges[target])))
        return order[::-1]

    @cached_property
    def dominators(self) -> dict[int, set[int]]:
        """By block, those that every way to it passes, itself included."""
        every = set(self.order)
        dominators = {number: set(every) for number in self.order}
        dominators[0] = {0}
        changed = True
        while changed:
            changed = False
            for number in self.order[1:]:
                sets = [dominators[p] for p in self.predecessors[number] if p in every]
                now = set.intersection(*sets) | {number} if sets else {number}
                if now != dominators[number]:
                    dominators[number], changed = now, True
        return dominators

    def loops(self) -> list[Loop]:
        """Return the natural loops, inner ones before those around them."""
        return self._loops

    @cached_property
    def _loops(self) -> list[Loop]:
        latches: dict[int, set[int]] = {}
        for number in self.order:
            for target in self.edges[number]:
                if target in self.dominators[number]:
                    latches.setdefault(target, set()).add(number)
        loops = []
        for header, sources in latches.items():
            blocks, waiting = {header}, list(sources)
            while waiting:
                number = waiting.pop()
                if number not in blocks:
                    blocks.add(number)
                    waiting += self.predecessors[number]
            loops.append(Loop(header, frozenset(sources), frozenset(blocks),
                              self._trips.get(header)))  # fmt: skip
        return sorted(loops, key=lambda loop: len(loop.blocks))

    # Paths

    def path(self, loop: Loop | None, word_bytes: int, *, dearest: bool = False) -> Path | None:
        """Return the way through a loop, or the whole kernel for None, that does all of the work.

        Of all ways, those count that move most bytes in words of at least `word_bytes`; of those,
        the ones with most products and multiply-adds; and of those, the one with the fewest
        instructions, or for `dearest` the most. Ways that call a function (for the slow cases of a
        division) or update memory atomically (to report a fault) count only where there are no
        others. An inner loop is passed as often as the Params say, once where they do not.

        Each branch that the constants do not decide goes either way, whatever the others do, so
        that the cheapest and the dearest way may be ones that no input takes.
        """
        nodes = self._nodes(loop, word_bytes, dearest)
        for number in [n for n, node in nodes.items() if any(map(_is_rare, node.path.code))]:
            others = {n: node for n, node in nodes.items() if n != number}
            if _best_way(others) is not None:
                nodes = others
        way = _best_way(nodes)
        if way is None:
            return None
        paths = [nodes[n].path for n in way]
        return Path(
            tuple([one for path in paths for one in path.code]), frozenset(self._inactive),
            sum(path.uncounted for path in paths),
        )  # fmt: skip

    def _nodes(self, loop: Loop | None, word_bytes: int, dearest: bool) -> dict[int, _Node]:
        """Return the blocks of a loop or of the kernel, inner loops as one node, in order."""
        inside = frozenset(self.order) if loop is None else loop.blocks
        whole: dict[int, Loop] = {}  # by block, the largest inner loop around it
        for one in self.loops():
            if loop is None or one.blocks < loop.blocks:
                whole.update(dict.fromkeys(one.blocks, one))
        nodes: dict[int, _Node] = {}
        for number in self.order:
            inner = whole.get(number)
            if number not in inside or (inner is not None and number != inner.header):
                continue
            before = {
                whole[p].header if p in whole else p
                for p in self.predecessors[number]
                if p in inside and (inner is None or p not in inner.blocks)
            }  # fmt: skip
            if inner is None:
                path: Path | None = Path(
                    tuple(self._with_callee(number)), frozenset(self._inactive)
                )
                ends = self.block(number)[-1].name == "EXIT"
            else:
                path = self._passes(inner, word_bytes, dearest)
                ends = any(self.block(b)[-1].name == "EXIT" for b in inner.blocks)
            if path is None or self._reads_null(number):
                continue
            if loop is not None:
                ends = bool(loop.latches & (inner.blocks if inner else {number}))
                before = set() if number == loop.header else before
            active = list(path.active())
            work = (
                path.bytes_loaded(word_bytes) + path.bytes_stored(word_bytes),
                sum(map(products_of, active)),
                sum(one.name in _MULTIPLY_ADDS for one in active),
            )
            cost = -len(path.code) if dearest else len(path.code)
            nodes[number] = _Node(number, inner, path, work, cost, tuple(before), ends)
        return nodes

    def _reads_null(self, number: int) -> bool:
        """Return whether a block reads an array that the launch does not have."""
        values = dict(self._known[number])
        for one in self.block(number):
            if one.name in ("LDG", "LD"):
                address = one.operands[-1].rpartition("[")[2]
                register = _REGISTER.match(address)
                if register and not one.guard and register[2] != "Z":
                    words = [values.get(r) for r in _span(register[0], 2)]
                    if None not in words and words[1] == 0:
                        return True
            self._machine.step(one, values)
        return False

    def _passes(self, loop: Loop, word_bytes: int, dearest: bool) -> Path | None:
        """Return what is issued in all passes of an inner loop."""
        once = self.path(loop, word_bytes, dearest=dearest)
        if once is None:
            return None
        unknown = once.uncounted + (loop.trips is None)
        return replace(once, code=once.code * (loop.trips or 1), uncounted=unknown)

    def _with_callee(self, number: int) -> Iterator[Instruction]:
        """Yield a block's instructions, and the fewest of a function that it calls."""
        block = self.block(number)
        yield from block
        if block[-1].calls and block[-1].targets[0] in self.labels:
            yield from self._shortest_call(self._block_at[self.labels[block[-1].targets[0]]])

    def _shortest_call(self, entry: int) -> list[Instruction]:
        """Return the fewest instructions from a function's entry to its return."""
        free = _Machine({})
        best: dict[int, list[Instruction]] = {entry: self.block(entry)}
        waiting = [entry]
        returned: list[Instruction] = []
        while waiting:
            number = waiting.pop()
            way = best[number]
            if self.block(number)[-1].name == "RET":
                if not returned or len(way) < len(returned):
                    returned = way
                continue
            for target in self._successors(number, {}, free):
                longer = way + self.block(target)
                if target not in best or len(longer) < len(best[target]):
                    best[target] = longer
                    waiting.append(target)
        return returned


_ENDS = frozenset(("BRA", "BRX", "JMP", "JMX", "EXIT", "RET", "CALL", "KILL"))


_MULTIPLY_ADDS = ("FFMA", "FFMA2", "HFMA2")


def _is_rare(one: Instruction) -> bool:
    return one.calls or one.name in ("ATOM", "ATOMG", "RED", "REDG")


def _best_way(nodes: Mapping[int, _Node]) -> list[int] | None:
    """Return the way with most work, and least cost among those; None: there is none.

    Parameters
    ----------
    nodes : of a loop or a kernel, in an order in which each follows all that it may come after
    """
    best: dict[int, tuple[_Work, int, int | None]] = {}
    end: int | None = None
    for number, node in nodes.items():
        work, cost, previous = node.work, -node.cost, None
        if node.before:
            ways = [(best[p][:2], p) for p in node.before if p in best]
            if not ways:
                continue
            (before, gone), previous = max(ways)
            work = tuple([a + b for a, b in zip(before, work, strict=True)])
            cost += gone
        best[number] = work, cost, previous
        if node.ends and (end is None or best[number][:2] > best[end][:2]):
            end = number
    if end is None:
        return None
    way = []
    step: int | None = end
    while step is not None:
        way.append(step)
        step = best[step][2]
    return way[::-1]


# --- What the cubin says beside its code ----------------------------------------------------------

_PARAM_CBANK, _REGISTER_COUNT = 0x0A, 0x2F  # attributes of .nv.info sections


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor.

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
