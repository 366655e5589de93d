"""Cut a program into a chain of segments: repeated blocks, and runs of other operators between narrow cuts.

Operators are grouped by the module they were made in: each member of a list of blocks (`blocks.3`), each child of what
holds such lists. A list's members stay whole where they repeat; unequal members are divided further. Between two groups
with heavy operators (products, convolutions, attention) the cut falls where the fewest tensors with a gradient are
alive; light operators (norms, sums, embeddings) join a neighbour. What depends on neither parameters nor blocks (masks,
positions, token counts) stays where it was made, or moves to the only segment that uses it.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.passes.segment_units import Unit, Units
from autoshard.program import Program, Value, hint, operand_values, operator_name, result_types, tensor_operands

WIDEST_CUT = 4
"""Most tensors with a gradient that may cross a cut which is not between repeated blocks."""

_HEAVY = frozenset(
    f"aten.{name}"
    for name in [
        "linear.default",
        "matmul.default",
        "mm.default",
        "bmm.default",
        "addmm.default",
        "baddbmm.default",
        "einsum.default",
        "mv.default",
        "dot.default",
        "convolution.default",
        "conv1d.default",
        "conv2d.default",
        "conv3d.default",
        "conv_transpose2d.input",
        "conv2d.padding",
        "conv1d.padding",
        "scaled_dot_product_attention.default",
    ]
)


@dataclass(frozen=True)
class Segment:
    """Consecutive operators between two cuts.

    nodes: operator node names in order. key: equal for segments of equal structure, whose nodes agree place by place.
    inputs: values that earlier segments make and this or later ones use; outputs: the same behind it.
    parameters: placeholders of the parameters it uses. path: module path of the repeated block, or "".
    """

    nodes: tuple[str, ...]
    key: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[str, ...]
    path: str = ""


@dataclass(frozen=True)
class Chain:
    """The segments of a program, in order."""

    segments: tuple[Segment, ...]

    def runs(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of neighbouring segments of equal key."""
        found, start = [], 0
        for _, group in groupby(self.segments, key=lambda segment: segment.key):
            count = len(list(group))
            found.append((start, start + count))
            start += count
        return tuple(found)

    def __str__(self) -> str:
        lines = [f"chain of {len(self.segments)} segments"]
        for start, stop in self.runs():
            first = self.segments[start]
            number = str(start) if stop - start == 1 else f"{start}-{stop - 1}"
            name = first.path or "-"
            if stop - start > 1:
                name += f" ... {self.segments[stop - 1].path or '-'}"
            live = ", ".join(map(str, first.inputs)) or "nothing"
            lines.append(
                f"  {number:>8}  {name}: {len(first.nodes)} operators, {len(first.parameters)} parameters, "
                f"takes {live}  [{first.key}]"
            )
        return "\n".join(lines)


def segment(program: Program, *, inside_blocks: bool = False) -> Chain:
    """Cut a program. inside_blocks: also cut repeated blocks between their children, where the cut is narrow."""
    return _Cutter(program, inside_blocks).chain()


@dataclass
class _Group:
    """Operators of one segment under construction: their numbers, and the block they are of."""

    numbers: list[int]
    unit: Unit


class _Cutter:
    def __init__(self, program: Program, inside_blocks: bool) -> None:
        self.program = program
        self.nodes = list(program.operators())
        self.number = {node.name: n for n, node in enumerate(self.nodes)}
        self.operands = [operand_values(node) for node in self.nodes]
        self.types = {node.name: result_types(node) for node in self.nodes}
        self.inside_blocks = inside_blocks
        self.live = self._live_counts()
        self.units = Units(program, self.nodes, self._range_key, self._any_heavy, self.live)

    def chain(self) -> Chain:
        groups = self._groups()
        of = self._sink(groups)
        return Chain(self._segments(groups, of))

    # ------------------------------------------------------------------ where tensors live

    def _last_uses(self) -> dict[Value, int]:
        last: dict[Value, int] = {}
        for n, values in enumerate(self.operands):
            for value in values:
                if value.node in self.number:
                    last[value] = n
        return last

    def _live_counts(self) -> list[int]:
        """For each place before operator n: values with a gradient that are made before and used at or after."""
        change = [0] * (len(self.nodes) + 1)
        for value, last in self._last_uses().items():
            if self.types[value.node][value.index].needs_grad:
                change[self.number[value.node] + 1] += 1
                if last + 1 <= len(self.nodes):
                    change[last + 1] -= 1
        counts, current = [], 0
        for step in change:
            current += step
            counts.append(current)
        return counts

    # ------------------------------------------------------------------ groups of operators

    def _groups(self) -> list[_Group]:
        """Blocks, and what stands between them merged and cut where it is narrow."""
        by_unit = groupby(range(len(self.nodes)), key=self.units.of.__getitem__)
        runs = [_Group(list(numbers), unit) for unit, numbers in by_unit]
        groups: list[_Group] = []
        waiting: list[int] = []  # operators since the last block
        for run in runs:
            if run.unit.is_block and self._any_heavy(run.numbers):
                self._settle(groups, waiting, run)
                waiting = []
                groups.append(run)
            else:
                waiting += run.numbers
        self._settle(groups, waiting, None)
        return [part for group in groups for part in self._parts(group)]

    def _any_heavy(self, numbers: Sequence[int]) -> bool:
        return any(operator_name(self.nodes[n]) in _HEAVY for n in numbers)

    def _settle(self, groups: list[_Group], waiting: list[int], following: _Group | None) -> None:
        """Make segments of what stands between two blocks."""
        if groups and groups[-1].unit.is_block and waiting:
            taken = self._taken_by_block(waiting, following)
            groups[-1].numbers.extend(waiting[:taken])
            waiting = waiting[taken:]
        if waiting:
            groups.extend(_Group(numbers, Unit("")) for numbers in self._pieces(waiting))

    def _taken_by_block(self, waiting: Sequence[int], following: _Group | None) -> int:
        """How many operators behind a block belong to it: what a list's owner does with each block's result."""
        behind = 0
        while behind < len(waiting) and not self._has_parameters(waiting[behind]):
            behind += 1
        if behind == len(waiting) and following is not None:
            return behind
        counts = [self.live[n] for n in waiting[: behind + 1]]
        return counts.index(min(counts)) if counts and min(counts) > 0 else 0

    def _pieces(self, numbers: Sequence[int]) -> list[list[int]]:
        """Consecutive operators, cut once between every two modules with heavy operators."""
        places = {n: at for at, n in enumerate(numbers)}
        runs = groupby(numbers, key=self.units.child.__getitem__)
        heavy = [items for _, group in runs if self._any_heavy(items := list(group))]
        starts = [0]
        for left, right in pairwise(heavy):
            cut = self._narrowest(left[-1] + 1, right[0])
            if self.live[cut] <= WIDEST_CUT:
                starts.append(places[cut])
        ends = [*starts[1:], len(numbers)]
        return [list(numbers[start:end]) for start, end in zip(starts, ends, strict=True)]

    def _parts(self, group: _Group) -> list[_Group]:
        """A block, cut between its children if that is wanted."""
        if not group.unit.is_block or not self.inside_blocks:
            return [group]
        return [_Group(numbers, group.unit) for numbers in self._pieces(group.numbers)]

    def _has_parameters(self, number: int) -> bool:
        return any(value.node in self.program.parameters for value in self.operands[number])

    def _narrowest(self, first: int, last: int) -> int:
        """The best place to cut at first..last: fewest live tensors, then behind light operators without weights."""
        behind = first
        while behind < last and not self._has_parameters(behind):
            behind += 1
        fewest = min(self.live[first : last + 1])
        places = [n for n in range(first, last + 1) if self.live[n] == fewest]
        return max((n for n in places if n <= behind), default=places[0])

    def _sink(self, groups: Sequence[_Group]) -> list[int]:
        """Number of the group of every operator. What no parameter reaches joins the only group that uses it."""
        of = [0] * len(self.nodes)
        for g, group in enumerate(groups):
            for n in group.numbers:
                of[n] = g
        users: dict[str, set[int]] = {}
        reached = self._reached_by_parameters()
        returned = {name for name in self.program.outputs if isinstance(name, str)} | {self.program.loss}
        for n in reversed(range(len(self.nodes))):
            name = self.nodes[n].name
            using = users.get(name, set())
            if n not in reached and not groups[of[n]].unit.is_block and len(using) == 1 and name not in returned:
                target = next(iter(using))
                if target > of[n] and not groups[target].unit.is_block:
                    of[n] = target
            for value in self.operands[n]:
                users.setdefault(value.node, set()).add(of[n])
        return of

    def _reached_by_parameters(self) -> set[int]:
        found: set[int] = set()
        for n, values in enumerate(self.operands):
            if any(v.node in self.program.parameters or self.number.get(v.node) in found for v in values):
                found.add(n)
        return found

    # ------------------------------------------------------------------ segments

    def _segments(self, groups: Sequence[_Group], of: Sequence[int]) -> tuple[Segment, ...]:
        members: list[list[int]] = [[] for _ in groups]
        for n, g in enumerate(of):
            members[g].append(n)
        kept = [(numbers, groups[g].unit) for g, numbers in enumerate(members) if numbers]
        place = {n: s for s, (numbers, _) in enumerate(kept) for n in numbers}
        last: dict[Value, int] = {}
        for n, values in enumerate(self.operands):
            for value in values:
                if value.node in self.number:
                    last[value] = max(last.get(value, 0), place[n])
        crossing: list[list[Value]] = [[] for _ in range(len(kept) + 1)]
        for value in sorted(last, key=lambda value: (self.number[value.node], value.index)):
            for s in range(place[self.number[value.node]] + 1, last[value] + 1):
                crossing[s].append(value)
        segments = []
        for s, (numbers, unit) in enumerate(kept):
            parameters = dict.fromkeys(
                value.node for n in numbers for value in self.operands[n] if value.node in self.program.parameters
            )
            segments.append(
                Segment(
                    tuple(self.nodes[n].name for n in numbers),
                    self._key(numbers, frozenset(value for value in crossing[s + 1])),
                    tuple(crossing[s]),
                    tuple(crossing[s + 1]),
                    tuple(parameters),
                    unit.path if unit.is_block else "",
                )
            )
        return tuple(segments)

    # ------------------------------------------------------------------ keys

    def _range_key(self, numbers: Sequence[int]) -> str:
        """Key of a run of operators as far as its own structure goes."""
        return self._key(numbers, frozenset())

    def _key(self, numbers: Sequence[int], leaving: frozenset[Value]) -> str:
        """Hash of operators, arguments, types and wiring: own values by place, others by order of first appearance."""
        own = {self.nodes[n].name: place for place, n in enumerate(numbers)}
        outside: dict[Value, int] = {}
        lines = []
        for n in numbers:
            node, wires = self.nodes[n], []
            for value, operand in zip(self.operands[n], tensor_operands(node), strict=True):
                if value.node in own:
                    wires.append(f"{own[value.node]}.{value.index}")
                else:
                    known = outside.setdefault(value, len(outside))
                    wires.append(f"from {known} {self._kind(value)} {result_types(operand)[0]}")
            sent = [i for i in range(len(self.types[node.name])) if Value(node.name, i) in leaving]
            lines.append(
                f"{operator_name(node)} {wires} {_plain((node.args, node.kwargs))} {self.types[node.name]} {sent}"
            )
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]

    def _kind(self, value: Value) -> str:
        program = self.program
        if value.node in program.parameters:
            return f"parameter {program.parameters[value.node].trainable}"
        if value.node in program.buffers:
            return f"buffer {program.buffers[value.node].updated_by is not None}"
        return "constant" if value.node in program.constants else "input" if value.node in program.inputs else "value"


def _plain(argument: Any) -> Any:
    """Arguments without tensors, sizes as example numbers."""
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, Tensor):
            return "tensor"
        return hint(value) if isinstance(value, torch.SymInt) else str(value)
    if isinstance(argument, (tuple, list)):
        return [_plain(item) for item in argument]
    if isinstance(argument, Mapping):
        return {key: _plain(item) for key, item in argument.items()}
    return argument


def operators_of(segments: Iterable[Segment]) -> tuple[str, ...]:
    """All operator node names, in the chain's order."""
    return tuple(name for item in segments for name in item.nodes)
