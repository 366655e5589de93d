"""A plan carried over to a smaller instance of its model: the same layouts, operator by operator, on smaller meshes.

The two chains must be alike but for how often a block is repeated. Each segment of the small chain takes the strategies
of one of the large chain: of the same kind and in the same stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from torch import fx

from autoshard.passes.inter_options import MeshShape
from autoshard.passes.segment import Chain, Segment
from autoshard.placement import Layout, product
from autoshard.plan import Mesh, OperatorPlan, Plan, StagePlan
from autoshard.program import Program, Value, operand_values, operator_name


@dataclass(frozen=True)
class Traced:
    """A program and its chain."""

    program: Program
    chain: Chain

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """The program's nodes by name."""
        return {node.name: node for node in self.program.graph.nodes}

    def values(self, segment: Segment) -> Iterator[tuple[Value, ...]]:
        """What each operator of a segment reads."""
        for name in segment.nodes:
            yield operand_values(self.nodes[name])

    def kinds(self, segment: Segment) -> tuple[str, ...]:
        """The operators of a segment."""
        return tuple(operator_name(self.nodes[name]) for name in segment.nodes)

    def crossing(self, start: int, stop: int, target: int) -> tuple[Value, ...]:
        """Values made in segments [start, stop) and read from `target` on, in the order of their first reading."""
        made = {name for segment in self.chain.segments[start:stop] for name in segment.nodes}
        read = (v for segment in self.chain.segments[target:] for values in self.values(segment) for v in values)
        return tuple(dict.fromkeys(value for value in read if value.node in made))


def carried_plan(plan: Plan, large: Traced, small: Traced, shape: MeshShape, microbatches: int) -> Plan | None:
    """The plan for the small instance, None where the two are not alike. It is neither checked nor priced.

    shape: axes of every stage's mesh, in the order of the plan's.
    """
    runs = _runs(large), _runs(small)
    if any(stage.mesh.axes != tuple(axis for axis, _ in shape) for stage in plan.stages) or not _alike(
        large, small, *runs
    ):
        return None
    cuts = _cuts([stage.segments for stage in plan.stages], *runs)
    if cuts is None:
        return None
    size = product([ranks for _, ranks in shape])
    stages = []
    for number, (stage, (start, stop)) in enumerate(zip(plan.stages, cuts, strict=True)):
        mesh = Mesh(
            stage.mesh.axes, tuple(ranks for _, ranks in shape), tuple(range(number * size, (number + 1) * size))
        )
        made = _stage(stage, mesh, large, small, (start, stop), runs)
        if made is None:
            return None
        stages.append(made)
    return replace(plan, stages=tuple(stages), microbatches=microbatches, idle_devices=(), baselines=())


def _runs(traced: Traced) -> tuple[tuple[int, int], ...]:
    """Neighbouring segments of the same operators."""
    found: list[tuple[int, int]] = []
    kinds = [traced.kinds(segment) for segment in traced.chain.segments]
    for number in range(len(kinds)):
        if found and kinds[found[-1][0]] == kinds[number]:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)


Runs = Sequence[tuple[int, int]]


def _alike(large: Traced, small: Traced, runs: Runs, small_runs: Runs) -> bool:
    return len(runs) == len(small_runs) and all(
        large.kinds(large.chain.segments[a]) == small.kinds(small.chain.segments[b])
        for (a, _), (b, _) in zip(runs, small_runs, strict=True)
    )


def _cuts(stages: Sequence[tuple[int, int]], runs: Runs, small_runs: Runs) -> list[tuple[int, int]] | None:
    """Segments of the small chain for each stage: every run is cut at the same fraction of its length."""
    ends = []
    for _, stop in stages[:-1]:
        number = next(i for i, (start, end) in enumerate(runs) if start < stop <= end)
        (start, end), (small_start, small_end) = runs[number], small_runs[number]
        ends.append(small_start + round((stop - start) / (end - start) * (small_end - small_start)))
    bounds = [0, *ends, small_runs[-1][1]]
    cuts = list(pairwise(bounds))
    return cuts if all(start < stop for start, stop in cuts) else None


def _stage(
    stage: StagePlan, mesh: Mesh, large: Traced, small: Traced, segments: tuple[int, int], runs: tuple[Runs, Runs]
) -> StagePlan | None:
    operators: dict[str, OperatorPlan] = {}
    parameters: dict[str, Layout] = {}
    remat = []
    for number in range(*segments):
        twin = _twin_of(number, stage.segments, segments, *runs)
        if twin is None:
            return None
        mine, theirs = small.chain.segments[number], large.chain.segments[twin]
        for name, other in zip(mine.nodes, theirs.nodes, strict=True):
            operators[name] = stage.operators[other]
        for values, others in zip(small.values(mine), large.values(theirs), strict=True):
            for value, known in zip(values, others, strict=True):
                if value.node in small.program.parameters and known.node in large.program.parameters:
                    stored = stage.parameters[large.program.parameters[known.node].name]
                    parameters.setdefault(small.program.parameters[value.node].name, stored)
        if theirs.path and theirs.path in stage.remat:
            remat.append(mine.path)
    received = small.crossing(0, segments[0], segments[0]), large.crossing(0, stage.segments[0], stage.segments[0])
    receives = _paired(
        _read_in(small, received[0], segments), _read_in(large, received[1], stage.segments), stage.receives
    )
    sent = small.crossing(*segments, segments[1]), large.crossing(*stage.segments, stage.segments[1])
    sends = _paired(*sent, stage.sends)
    if receives is None or sends is None:
        return None
    return replace(
        stage, mesh=mesh, segments=segments, operators=operators, parameters=parameters, receives=receives, sends=sends,
        remat=tuple(remat),
    )  # fmt: skip


def _read_in(traced: Traced, values: Sequence[Value], segments: tuple[int, int]) -> tuple[Value, ...]:
    read = {v for segment in traced.chain.segments[slice(*segments)] for found in traced.values(segment) for v in found}
    return tuple(value for value in values if value in read)


def _paired(mine: Sequence[Value], theirs: Sequence[Value], layouts: Mapping[str, Layout]) -> dict[str, Layout] | None:
    if len(mine) != len(theirs) or any(str(value) not in layouts for value in theirs):
        return None
    return {str(value): layouts[str(other)] for value, other in zip(mine, theirs, strict=True)}


def _twin_of(
    number: int, stage: tuple[int, int], segments: tuple[int, int], runs: Runs, small_runs: Runs
) -> int | None:
    """The segment of the large chain, inside its stage, that a small one stands for: the first for the first."""
    run = next(i for i, (start, end) in enumerate(small_runs) if start <= number < end)
    first, last = max(runs[run][0], stage[0]), min(runs[run][1], stage[1]) - 1
    if first > last:
        return None
    offset = number - max(small_runs[run][0], segments[0])
    is_last = number == min(small_runs[run][1], segments[1]) - 1
    return last if is_last and offset else min(first + offset, last)
