"""Constant propagation through machine code: what the Params and the shape of a launch decide.

Moves, integer arithmetic and comparisons of known values give known values, so that a branch which
they decide is followed one way only: a call without a window is not charged for one.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from .sass import PREDICATE, REGISTER, Instruction, result_registers, span

_FLOAT = re.compile(r"INF|\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)
_CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+|RZ)\]")
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
    params, start : the kernel's argument, and its place according to the cubin
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

    Other lanes are assumed to hold the same values, so that a shuffle hands back its own value.

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
    if register := REGISTER.fullmatch(text):
        kind = "number" if register[2] == "Z" else "register"
        return kind, text, 0, negative, inverted
    if is_float and _FLOAT.fullmatch(text):
        bits = int.from_bytes(struct.pack("<f", float(text.lower())), "little")
        return "number", "", bits, negative, inverted
    if re.fullmatch(r"0x[0-9a-f]+|\d+", text):
        return "number", "", int(text, 0), negative, inverted
    return "", "", 0, negative, inverted


class ConstantPropagation:
    """Knows what moves, integer arithmetic and comparisons of known values give.

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
        for instruction in block:
            self.step(instruction, values)
        return values

    def step(self, instruction: Instruction, values: Values) -> None:
        """Add what an instruction writes, as far as its operands are known."""
        if not instruction.writes:
            return
        guard = self.truth(instruction.guard, values) if instruction.guard else True
        if guard is False:
            return
        results = self._results(instruction, values) if instruction.is_modelled else {}
        for name in instruction.writes:
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

    def _results(self, instruction: Instruction, values: Values) -> Values:
        """Return what an instruction writes, as far as that is known."""
        if instruction.name in ("ISETP", "UISETP", "FSETP"):
            return self._compare(instruction, values)
        if instruction.name in ("PLOP3", "UPLOP3"):
            return self._combine(instruction, values)
        target, sources, plain, predicates = instruction.parts
        if not target:
            return {}
        if instruction.name in ("LDC", "LDCU", "ULDC"):
            constant = _CONSTANT.fullmatch(sources[0]) if sources else None
            if constant is None or instruction.modifiers & {"U8", "S8", "U16", "S16"}:
                return {}
            loaded = {}
            for i, register in enumerate(span(target, result_registers(instruction))):
                word = self._constants.get(_offset(constant[1]) + 4 * i)
                if word is not None:
                    loaded[register] = word
            return loaded
        if instruction.name in ("S2R", "S2UR"):
            special = self._specials.get(sources[0]) if sources else None
            return {} if special is None else {target: special}
        if instruction.name in ("LDG", "LD"):
            is_index = (
                self._thread is not None and instruction.access_bytes < self._thread.word_bytes
            )
            return dict.fromkeys(instruction.writes, 0) if is_index else {}
        if instruction.name == "P2R":
            return self._pack_predicates(instruction, values)
        if instruction.name == "SHFL":
            word = None if self._thread is None else self._word(plain[0], values)
            return {} if word is None else {target: word}
        if instruction.name == "CS2R":
            zero = sources == ("SRZ",)
            return dict.fromkeys(span(target, result_registers(instruction)), 0) if zero else {}
        if instruction.name == "HFMA2" and len(sources) == 4 and sources[1] == "RZ":
            # Two halves that are added to nothing: how a constant is loaded by this pipe.
            halves = [_half(text) for text in sources[2:]]
            if None in halves:
                return {}
            return {target: cast(int, halves[0]) << 16 | cast(int, halves[1])}
        truths = [self.truth(o, values) for o in predicates]
        name = instruction.name.removeprefix("U")
        is_minimum = name in ("IMNMX", "VIMNMX", "VIADDMNMX")
        if "64" in instruction.modifiers or (is_minimum and instruction.modifiers & {"S64", "U64"}):
            return self._pair_results(name, target, [self._pair(o, values) for o in plain], truths)
        words = [self._word(o, values) for o in plain]
        if name == "VIADDMNMX" and len(words) == 3 and None not in words[:2]:
            words = [sum(cast(list[int], words[:2])) & _MASK, words[2]]
        if is_minimum:
            value = _extreme(words, truths, None if "U32" in instruction.modifiers else 31)
            return {} if value is None else {target: value}
        if name == "SEL" and len(words) == 2 and truths:
            chosen = None if truths[-1] is None else words[0 if truths[-1] else 1]
            return {} if chosen is None else {target: chosen}
        if name == "IMAD" and len(words) >= 3:
            return self._multiply_add(instruction, target, plain, words, truths, values)
        if None in words:
            return {}
        known = [word for word in words if word is not None]
        total = _value(name, instruction.modifiers, known)
        if total is None:
            return {}
        if "X" in instruction.modifiers:
            return {} if None in truths else {target: (total + sum(map(bool, truths))) & _MASK}
        results = {target: total & _MASK}
        if name == "LOP3" and PREDICATE.match(instruction.operands[0]) and truths == [False]:
            results[instruction.operands[0]] = int(total != 0)
        if name in ("IADD3", "LEA"):
            # The negative of a number is its complement plus one, which carries for 0.
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
            low, high = (values.get(register) for register in span(name, 2))
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
        return dict(zip(span(target, 2), (value & _MASK, value >> 32 & _MASK), strict=True))

    def _pack_predicates(self, instruction: Instruction, values: Values) -> Values:
        """Return P2R: predicates that a mask names, as bits of a word, whose others are given."""
        target, source, word, mask = instruction.operands
        bits, others = self._word(mask, values), self._word(word, values)
        if source != "PR" or instruction.modifiers or bits is None or others is None:
            return {}
        result = others & ~bits & _MASK
        for i in range(7):
            if bits >> i & 1:
                truth = self.truth(f"P{i}", values)
                if truth is None:
                    return {}
                result |= truth << i
        return {target: result}

    def _multiply_add(
        self, instruction: Instruction, target: str, plain: Sequence[str], words: list[int | None],
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
            product = a * b if "U32" in instruction.modifiers else _signed(a) * _signed(b)
        carry = sum(map(bool, truths)) if "X" in instruction.modifiers else 0
        if not instruction.modifiers & {"WIDE", "HI"}:
            return {target: (product + c + carry) & _MASK}
        high: int | None = 0
        addend = plain[2].removesuffix(".reuse")
        if constant := _CONSTANT.fullmatch(addend):
            high = self._constants.get(_offset(constant[1]) + 4)
        elif addend not in ("RZ", "URZ"):
            pair = list(span(addend, 2)) if REGISTER.fullmatch(addend) else []
            high = values.get(pair[1]) if pair else None
        if high is None:
            return {}
        total = product + c + (high << 32)
        if "HI" in instruction.modifiers:
            return {target: total >> 32 & _MASK}
        return dict(zip(span(target, 2), (total & _MASK, total >> 32 & _MASK), strict=True))

    def _compare(self, instruction: Instruction, values: Values) -> Values:
        operands = instruction.operands
        if len(operands) < 5:
            return {}
        first, second, a, b, other = operands[:5]
        truth = self._compared(
            instruction, a, b, operands[5] if len(operands) > 5 else "PT", values
        )
        with_other = self.truth(other, values)
        results: Values = {}
        for target, outcome in ((first, truth), (second, None if truth is None else not truth)):
            if target in ("PT", "UPT"):
                continue
            joined = join_truths(outcome, with_other, "OR" in instruction.modifiers)
            if joined is not None and "XOR" not in instruction.modifiers:
                results[target] = int(joined)
        return results

    def _compared(
        self, instruction: Instruction, a: str, b: str, low: str, values: Values
    ) -> bool | None:
        is_float = instruction.name == "FSETP"
        comparison = next((m for m in instruction.opcode.split(".") if m[:2] in _COMPARISONS), "")
        is_wide = bool(instruction.modifiers & {"S64", "U64"})
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
        if not instruction.modifiers & {"U32", "U64"}:
            sign = 1 << 63 if is_wide else 1 << 31
            x, y = (x ^ sign) - sign, (y ^ sign) - sign
        if "EX" in instruction.modifiers and x == y:
            return self.truth(low, values)
        return _COMPARISONS[comparison](x, y)

    def _combine(self, instruction: Instruction, values: Values) -> Values:
        operands = instruction.operands
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
        if not PREDICATE.match(operand):
            return
        if operand not in ("PT", "UPT"):
            yield operand


def _value(name: str, modifiers: frozenset[str], words: list[int]) -> int | None:
    """Return the result of an instruction whose operands are known; None: not modelled.

    Carries are above the lower 32 bits. Estimates of divisions are rounded to nearest, not as the
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
    if name == "PRMT" and len(words) == 3 and not modifiers:
        return _permuted(*words)
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


def _permuted(low: int, selector: int, high: int) -> int:
    """Return PRMT: those bytes of `high:low` that four digits name, or copies of their signs."""
    result = 0
    for i in range(4):
        digit = selector >> 4 * i & 15
        byte = (high << 32 | low) >> 8 * (digit & 7) & 255
        result |= (byte if digit < 8 else 255 * (byte >> 7)) << 8 * i
    return result


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


def join_truths(a: bool | None, b: bool | None, either: bool) -> bool | None:
    """Return whether either, or both, of two predicates hold; None if that is not known."""
    if either:
        return True if a or b else None if a is None or b is None else False
    return False if a is False or b is False else None if a is None or b is None else True


def in_common(a: Values, b: Values) -> Values:
    """Return the values that are known, and equal, on both ways to a block."""
    return {name: value for name, value in a.items() if b.get(name) == value}
