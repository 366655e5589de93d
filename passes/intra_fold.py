"""Equal consecutive segments folded into one: which runs of segments are repetitions of their first.

Segments s and s + 1 repeat each other when their nodes call the same operators and every operand of s + 1 is, at the
place where s has its own, the same inner value, a parameter or buffer of its own, a value that both read (a mask), or
a value that s made (carried from block to block). Nothing that a block makes may be read beyond the next block, except
of the last one.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch import fx

from autoshard.program import Program, Value, operand_values, value_of

Place = tuple[int, int]
"""(position of a node in its segment, tensor operand) of a use."""


class SegmentLike(Protocol):
    """What is read of a segment."""

    @property
    def nodes(self) -> tuple[str, ...]: ...
    @property
    def key(self) -> Hashable: ...
    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class Run:
    """Segments first, ..., first + count - 1 are equal.

    carried: use -> the value of the first segment that takes its place from the second segment on. own: parameters and
    buffers of the first segment of which every other has its own.
    """

    first: int
    count: int
    carried: Mapping[Place, Value]
    own: frozenset[str]


@dataclass(frozen=True)
class Folder:
    """Finds runs. mark: anything that must be equal for nodes to be equal beside their segments' key (pins)."""

    program: Program
    segments: Sequence[SegmentLike]
    mark: Callable[[str], Hashable]

    def runs(self, start: int, stop: int) -> tuple[Run, ...]:
        """The longest runs of segments [start, stop), first to last."""
        found: list[Run] = []
        here = start
        while here < stop:
            run = self._longest(here, stop)
            found.append(run)
            here += run.count
        return tuple(found)

    def _longest(self, first: int, stop: int) -> Run:
        alone = Run(first, 1, {}, frozenset())
        if first + 1 >= stop or self.segments[first].key != self.segments[first + 1].key:
            return alone
        found = self._pair(first)
        if found is None:
            return alone
        carried, own = found
        count = 2
        while first + count < stop and self.segments[first + count].key == self.segments[first].key:
            pair = self._pair(first + count - 1)
            if pair is None or pair[0] != carried:
                break
            count += 1
        while count > 1 and not all(
            self._inner(number, first, first + count) for number in range(first, first + count)
        ):
            count -= 1
        if count == 1:
            return alone
        made = {
            place: Value(self.segments[first].nodes[position], index) for place, (position, index) in carried.items()
        }
        return Run(first, count, made, own)

    def _pair(self, number: int) -> tuple[dict[Place, Place], frozenset[str]] | None:
        """Uses carried from segment `number` to the next, as (position, result), and its own placeholders."""
        here, there = self.segments[number].nodes, self.segments[number + 1].nodes
        if len(here) != len(there) or any(self.mark(a) != self.mark(b) for a, b in zip(here, there, strict=True)):
            return None
        places, next_places = {name: p for p, name in enumerate(here)}, {name: p for p, name in enumerate(there)}
        nodes = self._nodes
        carried: dict[Place, Place] = {}
        own: set[str] = set()
        for position, (a, b) in enumerate(zip(here, there, strict=True)):
            ours, theirs = operand_values(nodes[a]), operand_values(nodes[b])
            if len(ours) != len(theirs):
                return None
            for slot, (x, y) in enumerate(zip(ours, theirs, strict=True)):
                if (
                    x.node in places
                    and y.node in next_places
                    and places[x.node] == next_places[y.node]
                    and x.index == y.index
                ):
                    continue
                if x == y and x.node not in places:
                    continue
                if y.node in places and x.node not in places:
                    carried[position, slot] = (places[y.node], y.index)
                elif self._held(x.node) and self._held(y.node) and self.mark(x.node) == self.mark(y.node):
                    own.add(x.node)
                else:
                    return None
        return carried, frozenset(own)

    def _inner(self, number: int, first: int, stop: int) -> bool:
        """What the segment makes is read by itself and the next only, unless it is the last; its own parameters too."""
        mine = set(self.segments[number].nodes)
        following = set(self.segments[number + 1].nodes) if number + 1 < stop else set()
        allowed = mine | following
        nodes = self._nodes
        if number + 1 < stop:
            for name in self.segments[number].nodes:
                if any(reader not in allowed for reader in self._readers.get(name, ())):
                    return False
        own = {value.node for name in mine for value in operand_values(nodes[name]) if self._held(value.node)}
        for name in sorted(own):
            readers = self._readers[name]
            in_all = all(
                any(reader in self.segments[other].nodes for reader in readers) for other in range(first, stop)
            )
            if not in_all and any(reader not in mine for reader in readers):
                return False
        return True

    def _held(self, name: str) -> bool:
        program = self.program
        return name in program.parameters or name in program.buffers or name in program.constants

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.graph.nodes}

    @cached_property
    def _readers(self) -> dict[str, list[str]]:
        """Names of the operators that read a node's results, and "output" for the model's outputs."""
        readers: dict[str, list[str]] = {}
        for node in self.program.operators():
            for value in operand_values(node):
                readers.setdefault(value.node, []).append(node.name)
        for leaf in self.program.outputs:
            if isinstance(leaf, str):
                readers.setdefault(value_of(self._nodes[leaf]).node, []).append("output")
        return readers
