"""What each operation is, declared once: its arguments, which of them it writes, what it returns.

A family's module declares an operation and decorates the public function with it:

    _STORE_KV = Operation("store_kv", Argument("key", "T H D"), ...)

    @_STORE_KV.public
    def store_kv(key, ...): ...

The declaration and the function's signature are what the rest is made from: the operators
for torch with their schemas and fakes, and in tests one valid call of each
operation (`tests/valid_calls.py`) with what it may write.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Argument:
    """An array argument of an operation."""

    name: str  # as in the public function, and in errors
    shape: str = ""  # dimensions, for an example, by names that `tests/valid_calls.py` gives sizes
    example: tuple[Any, ...] | None = None  # values where not any will do: indices, say
    in_example: bool = True
    cache: bool = False  # it holds K and V in any cache format; bytes may be tagged with theirs
    output: bool = False
    fresh: bool = False  # an output whose contents before the call do not matter
    words: bool = False  # accessed in whole words: its alignment is part of the signature
    number: bool = False  # it may be a number instead
    whole: bool = False  # such a number is an int
    optional: bool = False  # it may be None although it has no default
    several: bool = False  # it may be a sequence of arrays
    replaces: tuple[str, ...] = ()  # inputs that it may be written over, element for element
    written_if: str = ""  # the option without which the input that it replaces is only read
    returned: bool = False  # returned by `Operation.run`, and allocated by the plan if it is None
    returned_if: str = ""  # the option with which the function returns it too


Outputs = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, tuple[tuple[int, ...], str]]]
"""From arguments, which have `shape` and `format`, and options of a valid call to shape and format
of each output that it would allocate."""


class Declaration:
    """The name of an operation and its array arguments.

    `outputs_of` has shapes and formats of what a call allocates; a call `waits` where it must see
    values of its arguments to allocate. In `names`, `outputs`, `words` and `in_place` arguments go
    by their position in the declaration, wherever addresses and arrays are tuples.
    """

    function: Callable[..., Any]

    def __init__(
        self, name: str, *arguments: Argument, outputs_of: Outputs | None = None,
        waits: bool = False, num_returned: int | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.arguments = arguments
        self.outputs_of, self.waits = outputs_of, waits
        self.names = tuple([a.name for a in arguments])
        self.outputs = tuple([i for i, a in enumerate(arguments) if a.output])
        self.in_place = tuple(
            [(i, self.names.index(name)) for i, a in enumerate(arguments) for name in a.replaces]
        )
        self.words = tuple([i for i, a in enumerate(arguments) if a.words])
        returned = [i for i, a in enumerate(arguments) if a.returned]
        self.returned = operator.itemgetter(*returned) if returned else None
        self.num_returned = len(returned) if num_returned is None else num_returned

    def __str__(self) -> str:
        return self.name

    def public(self, function: _F) -> _F:
        """Make a function the public one of this operation, which `OPERATIONS` then has."""
        self.function = function
        OPERATIONS[self.name] = self
        return function

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the public function by name."""
        return inspect.signature(self.function).parameters

    @cached_property
    def public_arguments(self) -> Mapping[str, Argument]:
        """The array arguments of the public function by name, in its order."""
        by_name = {a.name: a for a in self.arguments}
        return {name: by_name[name] for name in self.parameters if name in by_name}

    def is_required(self, name: str) -> bool:
        """Return whether each call needs an argument, and not None."""
        no_default = self.parameters[name].default is inspect.Parameter.empty
        return no_default and not self.public_arguments[name].optional

    @cached_property
    def caller_outputs(self) -> tuple[Argument, ...]:
        """The outputs that a call allocates or leaves out where the caller passes none."""
        instead = self.replaced.values()
        return tuple([a for a in self.public_arguments.values() if a.fresh and a not in instead])

    @cached_property
    def several(self) -> tuple[str, ...]:
        """The arguments of the public function that may be sequences of arrays."""
        return tuple([name for name, a in self.public_arguments.items() if a.several])

    @cached_property
    def returns_several(self) -> bool:
        """Whether what the function returns is a sequence where its arguments are."""
        return any(a.several and a.returned for a in self.public_arguments.values())

    @cached_property
    def replaced(self) -> Mapping[str, Argument]:
        """By input, the output that the operation writes instead of it, or to its memory."""
        return {name: a for a in self.arguments if not a.returned for name in a.replaces}

    @cached_property
    def output_parameters(self) -> frozenset[str]:
        """The parameters of the public function that say where outputs are written, or whether."""
        instead = self.replaced.values()
        names = {a.name for a in (*self.caller_outputs, *instead)}
        return frozenset(names | {a.written_if for a in instead})

    @cached_property
    def has_caches(self) -> bool:
        """Whether an argument may be bytes of another format."""
        return any(a.cache for a in self.public_arguments.values())

    def written(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Return the names of the arguments that a call writes."""
        for argument in self.arguments:
            if not argument.output:
                continue
            if argument.returned or not argument.replaces or values.get(argument.name) is not None:
                yield argument.name
            elif values.get(argument.written_if, True) is not False:
                yield from argument.replaces

    @cached_property
    def documentation(self) -> str:
        """The docstring of the public function without its examples."""
        text = inspect.getdoc(self.function) or ""
        return text.partition("\nExamples\n--------\n")[0].rstrip()


OPERATIONS: dict[str, Declaration] = {}
"""The operations on arrays by name."""

DType: TypeAlias = Any
"""Annotates a parameter that names a number format, or is a dtype of any library."""

STREAMS = ("stream", "alt_stream")
"""Parameters that are streams."""
