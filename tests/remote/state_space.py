"""An explicit-state checker: enumerates every reachable state of a model, breadth-first.

A model has `initial()`, a hashable state; `steps(state)`, which yields (`Step`, next state) and
raises `Violation` through the step that is wrong; and optionally `canonical(state)`, equal for
states that differ only in the numbers of interchangeable parts. Counterexamples are shortest paths.
"""

from __future__ import annotations

import itertools
from array import array
from typing import NamedTuple


class Step(NamedTuple):
    """A step of a model: its text, and the kind of its cause, which `liveness` checks select."""

    text: str
    cause: str


class Violation(NamedTuple):
    """What a model returns in place of a next state if a step violates a property."""

    kind: str
    text: str


class Counterexample(NamedTuple):
    """A shortest path to a violation."""

    kind: str
    text: str
    path: tuple[str, ...]

    def __str__(self):
        lines = [f"{self.kind}: {self.text}"]
        lines += [f"{number:4d}. {text}" for number, text in enumerate(self.path, 1)]
        return "\n".join(lines)


class StateSpace:
    """The reachable states of a model, breadth-first.

    Parameters
    ----------
    until : kind of violation at which the exploration ends; None: at any. Steps to other violations
        are not followed

    Attributes
    ----------
    states : one state of each class of canonically equal ones, in the order of their discovery
    counterexample : Counterexample of the violation that ended the exploration, or None
    """

    def __init__(self, model, *, until=None, max_states=5_000_000):
        self.model = model
        self.counterexample = None
        self._canonical = getattr(model, "canonical", lambda state: state)
        start = model.initial()
        self.states = [start]
        self._numbers = {start: 0, self._canonical(start): 0}
        self._parents = array("l", [-1])
        self._causes = {}  # numbers of causes
        self._sources, self._targets = array("l"), array("l")  # of edges
        self._edge_causes = array("b")
        source = 0
        while source < len(self.states) and self.counterexample is None:
            self._follow(source, until)
            if len(self.states) > max_states:
                raise MemoryError(f"more than {max_states} states")
            source += 1

    def _follow(self, source, until):
        """Add the states after a state."""
        edges = set()
        for step, state in self.model.steps(self.states[source]):
            if type(state) is Violation:
                if until in (None, state.kind):
                    path = (*self._path(source), step.text)
                    self.counterexample = Counterexample(*state, path)
                    return
                continue
            target = self._number_of(state)
            if target is None:
                target = len(self.states)
                self._numbers[state] = self._numbers[self._canonical(state)] = target
                self.states.append(state)
                self._parents.append(source)
            edges.add((target, self._causes.setdefault(step.cause, len(self._causes))))
        for target, cause in edges:
            self._sources.append(source)
            self._targets.append(target)
            self._edge_causes.append(cause)

    def _number_of(self, state):
        number = self._numbers.get(state)
        if number is None:
            number = self._numbers.get(self._canonical(state))
            if number is not None:
                self._numbers[state] = number
        return number

    def __len__(self):
        return len(self.states)

    @property
    def num_edges(self):
        return len(self._sources)

    def unable(self, causes, is_goal):
        """Return the shortest path to a state from which no goal is reachable by steps of `causes`.

        Returns
        -------
        tuple of str, or None if a goal is reachable from every state
        """
        chosen = {self._causes[cause] for cause in causes if cause in self._causes}
        before = [[] for _ in self.states]
        for source, target, cause in zip(
            self._sources, self._targets, self._edge_causes, strict=True
        ):
            if cause in chosen:
                before[target].append(source)
        able = [is_goal(state) for state in self.states]
        stack = [number for number, is_able in enumerate(able) if is_able]
        while stack:
            for source in before[stack.pop()]:
                if not able[source]:
                    able[source] = True
                    stack.append(source)
        first = next((number for number, is_able in enumerate(able) if not is_able), None)
        return None if first is None else self._path(first)

    def _path(self, number):
        """Return the texts of the steps to a state."""
        numbers = [number]
        while self._parents[numbers[-1]] >= 0:
            numbers.append(self._parents[numbers[-1]])
        numbers.reverse()
        return tuple(
            next(
                step.text for step, state in self.model.steps(self.states[source])
                if type(state) is not Violation and self._number_of(state) == target
            )
            for source, target in itertools.pairwise(numbers)
        )  # fmt: skip
