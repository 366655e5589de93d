"""A discrete-event simulation of a pipeline schedule: when every instruction of every stage starts and ends.

A stage runs its row in order. A forward waits for the forward of the stage before and its transfer, a backward for the
backward of the stage after and its transfer (the last stage's for its own forward). Transfers take time but no compute:
they run beside the instructions, one after the other over each boundary and direction, as one link carries them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.schedule import Instruction


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one microbatch on a stage, and of its once-a-step work (gradient reduction, optimizer) at the end."""

    forward_s: float
    backward_s: float
    once_s: float = 0.0


@dataclass(frozen=True)
class Event:
    """One instruction on one stage, from start_s to end_s."""

    stage: int
    instruction: Instruction
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """What a schedule does.

    step_time_s: until the last stage has finished, once-a-step work included. busy_s: per stage, seconds it works.
    bubble_s: per stage, the rest of the step. in_flight: per stage, most microbatches begun and not yet given back.
    timeline: by start, then stage.
    """

    step_time_s: float
    busy_s: tuple[float, ...]
    bubble_s: tuple[float, ...]
    in_flight: tuple[int, ...]
    timeline: tuple[Event, ...]

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait."""
        whole = self.step_time_s * len(self.busy_s)
        return sum(self.bubble_s) / whole if whole else 0.0


Key = tuple[Literal["F", "B"], int, int]


def simulate(
    rows: Sequence[Sequence[Instruction]],
    stages: Sequence[StageTimes],
    forward_transfers_s: Sequence[float] = (),
    backward_transfers_s: Sequence[float] | None = None,
) -> Simulation:
    """Run one step.

    rows: `schedule.build`'s. stages: one a row. forward_transfers_s[i]: seconds from stage i to i + 1 for one
    microbatch (nothing given: none); backward_transfers_s[i]: back again (nothing given: as forward).
    Raises ValueError for rows that wait for each other for ever.
    """
    forwards = tuple(forward_transfers_s) or (0.0,) * (len(stages) - 1)
    backwards = forwards if backward_transfers_s is None else tuple(backward_transfers_s)
    free = [0.0] * len(stages)  # when each stage can start its next instruction
    links: dict[tuple[str, int], float] = {}  # and each boundary, in each direction, its next transfer
    arrived: dict[Key, float] = {("F", 0, number): 0.0 for number in range(_microbatches(rows))}
    done = [0] * len(rows)
    timeline: list[Event] = []

    def run(stage: int, instruction: Instruction, ready_s: float) -> None:
        forward = instruction.kind == "F"
        start = max(free[stage], ready_s)
        end = free[stage] = start + (stages[stage].forward_s if forward else stages[stage].backward_s)
        timeline.append(Event(stage, instruction, start, end))
        key = _successor(instruction, stage, len(rows))
        if key is not None and key[1] != stage:
            link = (instruction.kind, min(stage, key[1]))
            took = forwards[stage] if forward else backwards[stage - 1]
            end = links[link] = max(end, links.get(link, 0.0)) + took
        if key is not None:
            arrived[key] = end

    progress = True
    while progress:
        progress = False
        for stage, row in enumerate(rows):
            while done[stage] < len(row):
                ready_s = arrived.get((row[done[stage]].kind, stage, row[done[stage]].microbatch))
                if ready_s is None:
                    break
                run(stage, row[done[stage]], ready_s)
                done[stage], progress = done[stage] + 1, True
    if any(count < len(row) for count, row in zip(done, rows, strict=True)):
        raise ValueError("the schedule's instructions wait for each other for ever")
    return _summary(rows, stages, free, timeline)


def _microbatches(rows: Sequence[Sequence[Instruction]]) -> int:
    return 1 + max((instruction.microbatch for row in rows for instruction in row), default=-1)


def _successor(instruction: Instruction, stage: int, stages: int) -> Key | None:
    """The instruction, and its stage, that waits for this one."""
    if instruction.kind == "F":
        last = stage == stages - 1
        return ("B", stage, instruction.microbatch) if last else ("F", stage + 1, instruction.microbatch)
    return ("B", stage - 1, instruction.microbatch) if stage else None


def _summary(
    rows: Sequence[Sequence[Instruction]], stages: Sequence[StageTimes], free: Sequence[float], timeline: list[Event]
) -> Simulation:
    step = max((end + times.once_s for end, times in zip(free, stages, strict=True)), default=0.0)
    busy = tuple(
        sum(times.forward_s if instruction.kind == "F" else times.backward_s for instruction in row) + times.once_s
        for row, times in zip(rows, stages, strict=True)
    )
    held = tuple(_most_held(row) for row in rows)
    ordered = tuple(sorted(timeline, key=lambda event: (event.start_s, event.stage, event.end_s)))
    return Simulation(step, busy, tuple(step - seconds for seconds in busy), held, ordered)


def _most_held(row: Sequence[Instruction]) -> int:
    held = most = 0
    for instruction in row:
        held += 1 if instruction.kind == "F" else -1
        most = max(most, held)
    return most
