"""The stage search on tables of numbers: which segments run together, on how many devices, in which way.

A pipeline is a sequence of stages; a stage is a run of consecutive segments on consecutive devices. With M
microbatches, stage s (0 first) takes f_s seconds forward and b_s backward for one microbatch, and sends what crosses to
stage s+1 in c_s seconds, as long again for the gradients on the way back. One whole training step takes

    1F1B    sum_s (f_s + b_s + 2 c_s)  +  (M - 1) * max_s (f_s + b_s + 2 c_s)                         +  exposed
    GPipe   sum_s (f_s + b_s + 2 c_s)  +  (M - 1) * (max_s max(f_s, c_s) + max_s max(b_s, c_s))       +  exposed
    exposed = max_s (tail_s - sum_{r < s} (b_r + c_r))

where tail_s is work done once a step after the last backward of the stage (gradient sums, the optimizer): a later stage
ends earlier by the backward passes that still run before it, and hides that much of its tail. In 1F1B a transfer lies
on the round trip between two stages whose microbatches in flight are limited, so it counts in the steady state; in
GPipe transfers run beside compute and only the slowest of them can hold the steady state.

The search goes from the last stage to the first: stage number k from the end holds min(M, k) microbatches under 1F1B
and M under GPipe, so memory is decided when a stage is added; and `exposed` needs no sum over earlier stages:
exposed(s.. end) = max(tail_s, exposed(s+1.. end) - b_s - c_s). Per (first segment, first device, size of the first
stage, stages so far) it keeps the Pareto set of (sum, slowest, exposed, bytes arriving at the first stage): all that
the rest of the pipeline can see. This is exact, without a loop over bounds of the slowest stage.

A label is dropped only when a proved lower bound of every completion exceeds the best time known. With T_n(h, i) the
fastest way to run segments [h, i) on n devices that fits with the microbatches held there, the segments [0, i) before
it, on the d devices before it, take at least

    slowest(i, d) = min over h, n of max(slowest(h, d - n), T_n(h, i))
    sum(i, d)     = min over h, n of sum(h, d - n) + T_n(h, i)

each found by a small program of its own (min-max and min-plus products, on arrays).
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoshard.schedule import in_flight

Floats = NDArray[np.float64]
TransferPrice = Callable[[int, int, int, int, float], float]


@dataclass(frozen=True)
class Option:
    """One way to run a stage.

    forward_s, backward_s: one microbatch. tail_s: once a step, after the last backward.
    arriving_bytes: bytes that the fullest device receives for one microbatch from the stage before; as many gradient
    bytes leave. key: what it is, for the caller.
    """

    forward_s: float
    backward_s: float
    tail_s: float
    arriving_bytes: float
    key: Hashable


@dataclass(frozen=True)
class PlacedStage:
    """Segments [start, stop) on `size` devices from `first_device`, run as `option` says."""

    start: int
    stop: int
    first_device: int
    size: int
    option: Option


@dataclass(frozen=True)
class Pipeline:
    """Stages, first to last, and the predicted seconds of a whole step."""

    stages: tuple[PlacedStage, ...]
    step_time_s: float


@dataclass(frozen=True)
class StageProblem:
    """Everything the search reads.

    segments, devices, microbatches: counts. schedule: "1f1b" or "gpipe". stages: a fixed number of stages, or None.
    sizes: numbers of devices that a stage may have.
    places(end, size): first devices at which a stage of `size` devices that ends at or before device `end` may start;
        a device between is left idle.
    options(start, stop, size, first_device, in_flight): the ways to run that stage which fit in memory.
    transfer_s(left first, left size, right first, right size, bytes): seconds until each device of the right stage has
        its bytes of one microbatch; it grows with the bytes.
    cuts: segment numbers that must begin a stage.
    fastest_s(size, in_flight): at [start, stop], no more than forward_s + backward_s of any option of that stage, of
        any first device; infinity where there is none.
    """

    segments: int
    devices: int
    microbatches: int
    schedule: str
    sizes: tuple[int, ...]
    places: Callable[[int, int], Sequence[int]]
    options: Callable[[int, int, int, int, int], Sequence[Option]]
    transfer_s: TransferPrice
    fastest_s: Callable[[int, int], Floats]
    stages: int | None = None
    cuts: frozenset[int] = frozenset()


class _Label(NamedTuple):
    """A suffix of the pipeline: what its completion can see of it, and how to rebuild it."""

    sum_s: float
    slow_forward_s: float
    slow_backward_s: float
    exposed_s: float
    arriving_bytes: float
    stage: PlacedStage | None
    rest: "_Label | None"


_State = tuple[int, int, int]  # first segment, first device, devices of the first stage
_EMPTY = _Label(0.0, 0.0, 0.0, 0.0, 0.0, None, None)


def step_time_s(stages: Sequence[PlacedStage], microbatches: int, schedule: str, transfer_s: TransferPrice) -> float:
    """The formulas of this module's head, for a whole pipeline."""
    label = _EMPTY
    for stage in reversed(stages):
        label = _extended(label, stage, microbatches, schedule, transfer_s)
    return _time_s(label, microbatches)


def best_pipeline(problem: StageProblem, upper_bound_s: float = float("inf")) -> Pipeline | None:
    """The fastest pipeline whose step takes less than `upper_bound_s`, or None when there is none."""
    best: _Label | None = None
    best_s = upper_bound_s
    most = min(problem.segments, problem.devices, problem.stages or problem.segments)
    floors: dict[int, Floors] = {}
    frontier: dict[_State, list[_Label]] = {(problem.segments, problem.devices, 0): [_EMPTY]}
    for count in range(1, most + 1):
        held_before = in_flight(problem.schedule, count + 1, problem.microbatches, 0)
        if held_before not in floors:
            floors[held_before] = floors_of(problem, held_before)
        before = floors[held_before]
        grown: dict[_State, list[_Label]] = {}
        for state in sorted(frontier, reverse=True):
            labels = frontier[state]
            for stage in _first_stages(problem, state, count, labels, before, best_s):
                for label in labels:
                    new = _extended(label, stage, problem.microbatches, problem.schedule, problem.transfer_s)
                    if stage.start > 0:
                        if _floor_s(problem, new, stage, before) < best_s:
                            grown.setdefault((stage.start, stage.first_device, stage.size), []).append(new)
                    elif _time_s(new, problem.microbatches) < best_s:
                        best, best_s = new, _time_s(new, problem.microbatches)
        frontier = {state: _pareto(labels) for state, labels in grown.items()}
    return None if best is None else Pipeline(tuple(_stages(best)), best_s)


@dataclass(frozen=True)
class Floors:
    """Lower bounds, at [i, d], of running segments [0, i) on d devices: the sum of stages' times, and the slowest."""

    sum_s: Floats
    slow_s: Floats

    def completed_s(
        self, start: int, devices: int, sum_s: float, slow_s: float, exposed_s: float, rounds: int
    ) -> float:
        """Lower bound of a step whose stages from segment `start` on have these numbers; `rounds` is M - 1.

        What backward passes of the stages before hide of `exposed_s` they add to the sum.
        """
        before_s = float(self.sum_s[start, devices])
        slowest_s = max(slow_s, float(self.slow_s[start, devices])) if rounds else 0.0
        return sum_s + max(before_s, exposed_s) + rounds * slowest_s


def floors_of(problem: StageProblem, holding: int) -> Floors:
    """The floors of stages that hold at least `holding` microbatches."""
    shape = (problem.segments + 1, problem.devices + 1)
    sums, slow = np.full(shape, np.inf), np.full(shape, np.inf)
    sums[0], slow[0] = 0.0, 0.0
    fastest = {size: problem.fastest_s(size, holding) for size in problem.sizes}
    for devices in range(1, problem.devices + 1):
        for size, stage_s in fastest.items():
            if size <= devices:
                earlier = devices - size
                summed = (sums[:, earlier, None] + stage_s).min(axis=0)
                slowest = np.maximum(slow[:, earlier, None], stage_s).min(axis=0)
                sums[:, devices] = np.minimum(sums[:, devices], summed)
                slow[:, devices] = np.minimum(slow[:, devices], slowest)
    return Floors(sums, slow)


def lower_bound_s(problem: StageProblem) -> float:
    """No pipeline takes less; infinity where memory leaves none."""
    floors = floors_of(problem, in_flight(problem.schedule, 1, problem.microbatches, 0))
    return floors.completed_s(problem.segments, problem.devices, 0.0, 0.0, 0.0, problem.microbatches - 1)


def _first_stages(
    problem: StageProblem, state: _State, count: int, labels: list[_Label], before: Floors, best_s: float
) -> Iterator[PlacedStage]:
    """Every stage that may stand before the suffixes `labels` at `state`, as stage number `count` from the end.

    Left out are those after which even the best numbers of all labels together cannot lead below `best_s`.
    """
    stop, end, _ = state
    holding, rounds = in_flight(problem.schedule, count, problem.microbatches, 0), problem.microbatches - 1
    sum_s = min(label.sum_s for label in labels)
    slow_s = min(label.slow_forward_s + label.slow_backward_s for label in labels)
    for size in problem.sizes:
        times = problem.fastest_s(size, holding)[:, stop].tolist()
        for first_device in problem.places(end, size):
            for start in _starts(problem, stop, count):
                stage_s = times[start]
                slowest_s = max(slow_s, stage_s)
                if before.completed_s(start, first_device, sum_s + stage_s, slowest_s, 0.0, rounds) < best_s:
                    for option in problem.options(start, stop, size, first_device, holding):
                        yield PlacedStage(start, stop, first_device, size, option)


def _starts(problem: StageProblem, stop: int, count: int) -> Iterator[int]:
    """First segments of a stage that ends at `stop`, nearest first; no forced cut lies inside the stage."""
    for start in range(stop - 1, -1, -1):
        last_stage = count == problem.stages
        if (start == 0) == last_stage or problem.stages is None:
            yield start
        if start in problem.cuts:
            return


def _extended(label: _Label, stage: PlacedStage, microbatches: int, schedule: str, price: TransferPrice) -> _Label:
    """`label` with one more stage before it."""
    option, right, transfer_s = stage.option, label.stage, 0.0
    if right is not None and label.arriving_bytes:
        transfer_s = price(stage.first_device, stage.size, right.first_device, right.size, label.arriving_bytes)
    whole_s = option.forward_s + option.backward_s + 2 * transfer_s
    if microbatches == 1:
        slow_forward_s = slow_backward_s = 0.0
    elif schedule == "gpipe":
        slow_forward_s = max(label.slow_forward_s, option.forward_s, transfer_s)
        slow_backward_s = max(label.slow_backward_s, option.backward_s, transfer_s)
    else:
        slow_forward_s, slow_backward_s = max(label.slow_forward_s, whole_s), 0.0
    exposed_s = max(option.tail_s, label.exposed_s - option.backward_s - transfer_s)
    return _Label(
        label.sum_s + whole_s,
        slow_forward_s,
        slow_backward_s,
        exposed_s,
        option.arriving_bytes if stage.start else 0.0,
        stage,
        label,
    )


def _time_s(label: _Label, microbatches: int) -> float:
    return label.sum_s + (microbatches - 1) * (label.slow_forward_s + label.slow_backward_s) + label.exposed_s


def _floor_s(problem: StageProblem, label: _Label, stage: PlacedStage, before: Floors) -> float:
    """Lower bound of every completion of `label`, whose first stage is `stage`."""
    slow_s = label.slow_forward_s + label.slow_backward_s
    return before.completed_s(
        stage.start, stage.first_device, label.sum_s, slow_s, label.exposed_s, problem.microbatches - 1
    )


def _pareto(labels: list[_Label]) -> list[_Label]:
    """Labels that no other label equals or beats in all five numbers; the first of equals stays."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda label: label[:5]):
        if not any(all(a <= b for a, b in zip(other[:5], label[:5], strict=True)) for other in kept):
            kept.append(label)
    return kept


def _stages(label: _Label) -> Iterator[PlacedStage]:
    current: _Label | None = label
    while current is not None and current.stage is not None:
        yield current.stage
        current = current.rest
