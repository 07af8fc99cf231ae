"""Machine code as nvdisasm prints it: instructions, and the pipes that take them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

# --- Instructions ---------------------------------------------------------------------------------

_LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*);"
)
_LABEL = re.compile(r"^(\S+):\s*$")
_TARGET = re.compile(r"`\(([^)]+)\)")
_TARGETS = re.compile(r'BRANCH_TARGETS ([^"]*)"')
REGISTER = re.compile(r"\b(U?R)(\d+|Z)\b")
PREDICATE = re.compile(r"^!?U?P(?:\d+|T)$")
_WIDTH = re.compile(r"\.(?:U|S)?(8|16|32|64|128|256)(?=\.|$)")

_LOADS = ("LDG", "LD", "LDGSTS", "UBLKCP")
_STORES = ("STG", "ST", "RED", "REDG")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a listing.

    Attributes
    ----------
    opcode : with its modifiers, `LDG.E.128`
    guard : its predicate, such as `!P0`; empty: none
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
        at = next((i for i, o in enumerate(self.operands) if REGISTER.fullmatch(o)), None)
        if at is None:
            return "", (), (), ()
        sources = self.operands[at + 1 :]
        plain = tuple([o for o in sources if not PREDICATE.match(o)])
        read = sources[sources.index(plain[0]) :] if plain else ()
        predicates = tuple([o for o in read if PREDICATE.match(o)])
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


@dataclass(frozen=True)
class Control:
    """When a warp issues its next instruction, as the compiler encodes it in each one.

    Attributes
    ----------
    stall : clocks until the next instruction of the warp
    result, operands : scoreboard that is busy until the result is there, or the operands are read;
        -1: none
    waits : scoreboards that it waits for
    """

    stall: int
    result: int = -1
    operands: int = -1
    waits: tuple[int, ...] = ()

    @classmethod
    def of(cls, word: int) -> Control:
        """Read the upper half of an instruction.

        >>> Control.of(0b000100_111_010_1_0101 << 41)
        Control(stall=5, result=2, operands=-1, waits=(2,))
        """
        bits = word >> 41
        result, operands = bits >> 5 & 7, bits >> 8 & 7
        return cls(
            bits & 15, -1 if result == 7 else result, -1 if operands == 7 else operands,
            tuple([board for board in range(6) if bits >> 11 + board & 1]),
        )  # fmt: skip


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


def span(register: str, count: int) -> Iterator[str]:
    """Yield `count` neighbouring registers."""
    kind, number = REGISTER.match(register).groups()  # type: ignore[union-attr]
    if number != "Z":
        yield from (f"{kind}{int(number) + i}" for i in range(count))


def result_registers(instruction: Instruction) -> int:
    """Return how many registers a result takes."""
    if instruction.name in ("HMMA", "IMMA", "QMMA", "OMMA"):
        return 2 if instruction.name == "HMMA" and "F16" in instruction.modifiers else 4
    if instruction.name in (
        "LDG",
        "LD",
        "LDS",
        "LDC",
        "LDCU",
        "ULDC",
        "LDL",
        "ATOM",
        "ATOMG",
        "LDSM",
    ):
        return max(1, instruction.access_bytes // 4)
    if instruction.name in ("DADD", "DMUL", "DFMA", "FFMA2", "FADD2", "FMUL2", "CS2R"):
        return 1 if instruction.name == "CS2R" and "32" in instruction.modifiers else 2
    if instruction.name in ("IMNMX", "VIMNMX") and instruction.modifiers & {"S64", "U64"}:
        return 2
    return 2 if instruction.modifiers & {"WIDE", "64", "F64"} else 1


_MODELLED = frozenset(("MOV", "R2UR", "MOV32I", "SHF", "LEA", "LOP3", "IABS", "SEL",
                       "IMAD", "IADD3", "VIADD", "IADD", "ISETP", "FSETP", "PLOP3", "LDC", "LDCU",
                       "CS2R", "S2R", "S2UR", "HFMA2", "I2F", "MUFU", "F2I", "IMNMX",
                       "VIMNMX", "VIADDMNMX", "LDG", "LD", "SHFL", "P2R", "PRMT"))  # fmt: skip
_NO_RESULT = frozenset((
    *_STORES, "LDGSTS", "STS", "STSM", "STL", "UBLKCP", "BRA", "BRX", "EXIT", "BAR", "BSSY",
    "BSYNC", "DEPBAR", "LDGDEPBAR", "NOP", "RET", "MEMBAR",
))  # fmt: skip


_ONLY_PREDICATES = frozenset(("ISETP", "UISETP", "FSETP", "DSETP", "HSETP2", "PSETP", "UPSETP",
                              "PLOP3", "UPLOP3", "FCHK", "R2P"))  # fmt: skip


def _writes(instruction: Instruction) -> Iterator[str]:
    if instruction.name in _NO_RESULT:
        return
    if instruction.name == "R2P":
        yield from (f"P{i}" for i in range(7))
        return
    if instruction.name in _ONLY_PREDICATES:
        yield from (o for o in instruction.operands[:2] if PREDICATE.match(o))
        return
    for operand in instruction.operands:
        if PREDICATE.match(operand):
            yield operand.lstrip("!")
            continue
        if REGISTER.fullmatch(operand):
            yield from span(operand, result_registers(instruction))
            rest = instruction.operands[instruction.operands.index(operand) + 1 :]
            if instruction.name in ("IADD3", "UIADD3", "IMAD", "LEA", "VIADD"):  # carries out
                for other in rest:
                    if not PREDICATE.match(other):
                        break
                    if other not in ("PT", "UPT"):
                        yield other
        return


def _reads(instruction: Instruction) -> Iterator[str]:
    sources: Sequence[str] = instruction.operands
    if instruction.name not in _NO_RESULT and instruction.name not in _ONLY_PREDICATES:
        first = next((i for i, o in enumerate(sources) if not PREDICATE.match(o)), len(sources))
        is_register = first < len(sources) and REGISTER.fullmatch(sources[first])
        sources = sources[first + bool(is_register) :]
    for i, operand in enumerate(sources):
        for register in REGISTER.finditer(operand):
            yield from span(register[0], _source_registers(instruction, operand, i))


def _source_registers(instruction: Instruction, operand: str, position: int) -> int:
    if "[" in operand:
        return 2 if ".64" in operand or "desc" in operand or "R" in operand else 1
    if instruction.name in ("HMMA", "IMMA", "QMMA"):
        return (4, 2, 4)[min(position, 2)]
    if instruction.stores_global or instruction.name in ("STS", "STL"):
        return max(1, instruction.access_bytes // 4)
    return 2 if instruction.modifiers & {"WIDE", "64", "F64"} else 1


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


def pipe_of(instruction: Instruction) -> str:
    """Return the pipe that executes an instruction.

    >>> [pipe_of(parse(f"  /*0000*/ {text} ;")[0][0]) for text in ("FFMA R1, R2, R3, R4", "BRA 0")]
    ['fma', 'control']
    """
    pipe = _PIPE_OF.get(instruction.name)
    if pipe is not None:
        return pipe
    return (
        "uniform"
        if instruction.name.startswith("U") or instruction.name in ("R2UR", "S2UR")
        else "control"
    )


def products_of(instruction: Instruction) -> int:
    """Return the multiply-adds of a tensor core's instruction."""
    shape = PRODUCTS.search(instruction.opcode)
    if pipe_of(instruction) != "tensor" or shape is None:
        return 0
    m, n, k = map(int, shape.groups())
    return m * n * k
