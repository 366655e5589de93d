"""The stage search against every pipeline there is, on small random instances."""

import itertools
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from autoshard.passes.inter_dp import (
    Floats,
    Option,
    PlacedStage,
    StageProblem,
    best_pipeline,
    step_time_s,
)
from autoshard.schedule import in_flight

Options = Callable[[int, int, int, int, int], tuple[Option, ...]]


def random_problem(seed: int, **fixed: object) -> StageProblem:
    """Up to 5 segments on 4 to 6 devices; ways differ in time, memory (how many microbatches fit) and traffic."""
    rng = random.Random(seed)
    segments, devices = rng.randint(1, 5), rng.randint(4, 6)
    sizes = rng.choice([(1, 2, 4), (1, 2, 3), (2, 4), (1,)])
    work = [rng.uniform(1, 5) for _ in range(segments)]
    ways = rng.randint(1, 3)
    traits = {
        (size, way): (
            rng.uniform(1.0, 1.6),
            rng.uniform(0.2, 0.5),
            rng.uniform(0, 4),
            rng.randint(1, 4),
            rng.uniform(0, 3),
        )
        for size in sizes
        for way in range(ways)
    }

    def options(start: int, stop: int, size: int, first_device: int, holding: int) -> tuple[Option, ...]:
        found = []
        for way in range(ways):
            loss, forward, tail, fits, bytes_each = traits[size, way]
            time_s = loss * sum(work[start:stop]) / size
            if holding * (stop - start) <= fits * segments:
                arriving = bytes_each * (start + 1)
                found.append(Option(time_s * forward, time_s * (1 - forward), tail, arriving, (size, way)))
        return tuple(found)

    latency_s, bandwidth = rng.uniform(0, 0.2), rng.uniform(2, 20)
    return StageProblem(
        segments=segments,
        devices=devices,
        microbatches=rng.choice([1, 2, 4, 8]),
        schedule=rng.choice(["1f1b", "gpipe"]),
        sizes=sizes,
        places=lambda end, size: (end - size,) if end >= size else (),
        options=options,
        transfer_s=lambda left, left_size, right, right_size, size: (
            latency_s * right + max(size, size * right_size / left_size) / bandwidth
        ),
        fastest_s=fastest_of(options, segments, devices),
        **fixed,  # type: ignore[arg-type]
    )


def fastest_of(options: Options, segments: int, devices: int) -> Callable[[int, int], Floats]:
    """The least time of a stage's options, over all first devices."""

    def fastest_s(size: int, holding: int) -> Floats:
        found = np.full((segments + 1, segments + 1), np.inf)
        for start, stop in itertools.combinations(range(segments + 1), 2):
            for first in range(devices - size + 1):
                times = [option.forward_s + option.backward_s for option in options(start, stop, size, first, holding)]
                found[start, stop] = min([found[start, stop], *times])
        return found

    return fastest_s


def every_pipeline(problem: StageProblem) -> Iterator[tuple[PlacedStage, ...]]:
    """All cuts, sizes and ways whose stages fit in memory, placed at the end of the devices."""
    for count in range(1, problem.segments + 1):
        if problem.stages not in (None, count):
            continue
        for cuts in itertools.combinations(range(1, problem.segments), count - 1):
            if not problem.cuts <= {0, *cuts}:
                continue
            bounds = [0, *cuts, problem.segments]
            for sizes in itertools.product(problem.sizes, repeat=count):
                if sum(sizes) > problem.devices:
                    continue
                first = [problem.devices - sum(sizes[index:]) for index in range(count)]
                ways = [
                    problem.options(
                        bounds[index],
                        bounds[index + 1],
                        sizes[index],
                        first[index],
                        in_flight(problem.schedule, count, problem.microbatches, index),
                    )
                    for index in range(count)
                ]
                for chosen in itertools.product(*ways):
                    yield tuple(
                        PlacedStage(bounds[index], bounds[index + 1], first[index], sizes[index], option)
                        for index, option in enumerate(chosen)
                    )


def whole_step_s(problem: StageProblem, stages: tuple[PlacedStage, ...]) -> float:
    """The step time written as in the documentation, first stage to last, for use as the oracle."""
    count, microbatches = len(stages), problem.microbatches
    transfer = [0.0] * count
    for index in range(count - 1):
        right = stages[index + 1]
        left, size = stages[index], right.option.arriving_bytes
        if size:
            transfer[index] = problem.transfer_s(left.first_device, left.size, right.first_device, right.size, size)
    forward = [stage.option.forward_s for stage in stages]
    backward = [stage.option.backward_s for stage in stages]
    whole = [f + b + 2 * c for f, b, c in zip(forward, backward, transfer, strict=True)]
    if problem.schedule == "1f1b":
        slowest = max(whole)
    else:
        slowest = max(map(max, forward, transfer)) + max(map(max, backward, transfer))
    exposed = max(
        stage.option.tail_s - sum(backward[:index]) - sum(transfer[:index]) for index, stage in enumerate(stages)
    )
    return sum(whole) + (microbatches - 1) * slowest + max(exposed, 0.0)


@pytest.mark.parametrize("seed", range(150))
def test_equals_brute_force(seed: int) -> None:
    problem = random_problem(seed)
    expected = min((whole_step_s(problem, stages) for stages in every_pipeline(problem)), default=None)
    found = best_pipeline(problem)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.step_time_s == pytest.approx(expected, rel=1e-12)
        assert whole_step_s(problem, found.stages) == pytest.approx(found.step_time_s, rel=1e-12)
        assert (
            step_time_s(found.stages, problem.microbatches, problem.schedule, problem.transfer_s) == found.step_time_s
        )


@pytest.mark.parametrize("seed", range(40))
def test_fixed_stages_and_cuts_equal_brute_force(seed: int) -> None:
    problem = random_problem(seed, stages=2, cuts=frozenset({1}) if seed % 2 else frozenset())
    expected = min((whole_step_s(problem, stages) for stages in every_pipeline(problem)), default=None)
    found = best_pipeline(problem)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.step_time_s == pytest.approx(expected, rel=1e-12)
        assert len(found.stages) == 2


@pytest.mark.parametrize("seed", range(30))
def test_a_bound_never_loses_a_better_pipeline(seed: int) -> None:
    problem = random_problem(seed)
    free = best_pipeline(problem)
    if free is not None:
        assert best_pipeline(problem, free.step_time_s * 1.0001) == free
        assert best_pipeline(problem, free.step_time_s) is None


def test_memory_of_microbatches_in_flight_is_honoured() -> None:
    """Two equal segments, 8 microbatches: a first stage that can hold only one microbatch cannot stand under 1F1B."""

    def options(start: int, stop: int, size: int, first_device: int, holding: int) -> tuple[Option, ...]:
        return (
            (Option(1.0 * (stop - start) / size, 2.0 * (stop - start) / size, 0.0, 0.0, holding),)
            if holding <= 1
            else ()
        )

    problem = StageProblem(
        2,
        2,
        8,
        "1f1b",
        (1, 2),
        lambda end, size: (end - size,) if end >= size else (),
        options,
        lambda *_: 0.0,
        fastest_of(options, 2, 2),
    )
    found = best_pipeline(problem)
    assert found is not None
    assert len(found.stages) == 1 and found.stages[0].size == 2
