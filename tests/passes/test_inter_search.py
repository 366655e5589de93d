"""Ways in closed form, and the search over them against every pipeline there is."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from autoshard.cluster import parse_cluster
from autoshard.passes.inter_baselines import price_baselines, textbooks
from autoshard.passes.inter_dp import Option, PlacedStage, step_time_s
from autoshard.passes.inter_options import MeshShape
from autoshard.passes.inter_search import Candidate, Search, Wanted
from autoshard.passes.inter_sites import Site, Sites
from autoshard.passes.inter_ways import (
    DataParallelPrices,
    Numbers,
    Ranges,
    Shared,
    Stored,
    Way,
    ways_of_shape,
)
from autoshard.schedule import in_flight


def random_search(seed: int, shared: bool = False) -> Search:
    """3 or 4 segments on 4 devices, 2 microbatch counts; prices by shape, memory so small that it matters."""
    rng = random.Random(seed)
    sites, segments = Sites(parse_cluster("1x4@cpu")), rng.randint(3, 4)
    work = [rng.uniform(1, 4) for _ in range(segments)]
    weights = [rng.uniform(1, 4) for _ in range(segments)]
    traits: dict[MeshShape, tuple[float, float]] = {}

    def ways(site: Site, first: int, microbatches: int) -> tuple[Way, ...]:
        found: list[Way] = []
        for shape in sites.shapes(len(site)):
            slow, wide = traits.setdefault(shape, (rng.uniform(1.0, 1.5), rng.uniform(0.5, 1.5)))
            sizes = dict(shape)
            dp, tp = sizes.get("dp", 1), sizes.get("tp", 1)
            base = [
                Numbers(
                    slow * w / (dp * tp * microbatches), 2 * slow * w / (dp * tp * microbatches), 0.1, 3 * b / tp,
                    b * wide / (dp * microbatches), 0.2, 0.3 / dp,
                )
                for w, b in zip(work, weights, strict=True)
            ]  # fmt: skip
            stored = [Stored(f"w{number}", b / tp, 3.0, True, (number,), True) for number, b in enumerate(weights)]
            if shared:
                stored[0] = replace(stored[0], segments=(0, segments - 1))
            price = {p.bytes: 0.1 * p.bytes for p in stored}
            found += ways_of_shape(shape, base, stored, DataParallelPrices(dp, price, price, price, 0.01, 0.05))
        return tuple(found)

    limit = rng.choice([8, 14, 1000])
    return Search(
        sites=sites,
        segments=segments,
        microbatches=(1, 4),
        schedules=("1f1b", "gpipe"),
        ways=ways,
        memory_bytes=lambda first, size: limit,
        transfer_s=lambda left, left_size, right, right_size, size: 0.01 + 0.02 * size * right_size / left_size,
    )


def every_candidate(search: Search, wanted: Wanted) -> Iterator[tuple[float, Sequence[PlacedStage]]]:
    """All pipelines that fit and give shared parameters one kind of way, with their step times."""
    devices = search.sites.cluster.size
    for count in range(1, search.segments + 1):
        if wanted.stages not in (None, count):
            continue
        for cuts in itertools.combinations(range(1, search.segments), count - 1):
            bounds = [0, *cuts, search.segments]
            for sizes in itertools.product(search.sites.sizes, repeat=count):
                if sum(sizes) > devices:
                    continue
                first = [devices - sum(sizes[index:]) for index in range(count)]
                for microbatches, schedule in itertools.product(search.microbatches, search.schedules):
                    yield from _of_stages(search, wanted, bounds, sizes, first, microbatches, schedule)


def _of_stages(
    search: Search,
    wanted: Wanted,
    bounds: list[int],
    sizes: Sequence[int],
    first: list[int],
    microbatches: int,
    schedule: str,
) -> Iterator[tuple[float, Sequence[PlacedStage]]]:
    count = len(sizes)
    choices = []
    for index, size in enumerate(sizes):
        start, stop = bounds[index], bounds[index + 1]
        holding = in_flight(schedule, count, microbatches, index)
        fitting = []
        for way in search.ways(search.sites.site(first[index], size), first[index], microbatches):
            totals = Ranges(way).totals(start, stop)
            if wanted.admits(way) and totals.peak_bytes(holding) <= search.memory_bytes(first[index], size):
                option = Option(totals.forward_s, totals.backward_s, totals.tail_s, totals.arriving_bytes, way)
                fitting.append(PlacedStage(start, stop, first[index], size, option))
        choices.append(fitting)
    for stages in itertools.product(*choices):
        kinds = {
            stage.option.key.kind  # type: ignore[attr-defined]
            for stage in stages
            if any(s.split_by(stage.start, stage.stop) for s in stage.option.key.shared)  # type: ignore[attr-defined]
        }
        if len(kinds) <= 1:
            yield step_time_s(stages, microbatches, schedule, search.transfer_s), stages


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("shared", [False, True])
def test_equals_brute_force(seed: int, shared: bool) -> None:
    search = random_search(seed, shared)
    wanted = [Wanted(), Wanted(stages=2), Wanted(shape=(("dp", 2),))][seed % 3]
    found = search.best(wanted)
    expected = min((time_s for time_s, _ in every_candidate(search, wanted)), default=None)
    assert (found is None) == (expected is None)
    if found is not None:
        assert found.step_time_s == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_never_worse_than_a_baseline(seed: int) -> None:
    search = random_search(seed, shared=seed % 2 == 0)
    found = search.best(Wanted())
    priced = price_baselines(search, textbooks(search.sites, search.segments))
    names = [entry.baseline.name for entry in priced]
    assert names[:3] == ["single device", "dp=4", "zero3 dp=4"]
    assert {"dp=1,tp=4,pp=1", "dp=2,tp=2,pp=1", "dp=2,tp=1,pp=2", "dp=1,tp=2,pp=2"} <= set(names)
    assert len(names) == len(set(names))
    for entry in priced:
        assert entry.baseline.fits == (entry.candidate is not None)
        if entry.baseline.fits:
            assert found is not None and entry.baseline.step_time_s is not None
            assert found.step_time_s <= entry.baseline.step_time_s * (1 + 1e-12)
            assert max(search.peak_bytes(entry.candidate), default=0) <= search.memory_bytes(0, 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(6))
def test_same_answer_twice_and_memory_of_every_stage_honoured(seed: int) -> None:
    found, again = random_search(seed).best(Wanted()), random_search(seed).best(Wanted())
    assert str(found) == str(again)
    if isinstance(found, Candidate):
        assert max(random_search(seed).peak_bytes(found)) <= random_search(seed).memory_bytes(0, 1)


PRICES = DataParallelPrices(4, {8.0: 1.0}, {8.0: 0.5}, {8.0: 0.25}, 0.125)
ONE = Numbers(2.0, 4.0, 1.0, 32.0, 10.0, 3.0, 6.0)


def test_the_four_ways_of_a_shape() -> None:
    """L = 8 bytes, held with three more of its size: 32; dp=4."""
    weight = Stored("w", 8.0, 4.0, True, (0,), True)
    whole, whole_again, sharded, sharded_again = ways_of_shape((("dp", 4),), [ONE], [weight], PRICES)
    assert whole.segments == (replace(ONE, tail_s=2.0),)
    assert whole_again.segments == (replace(ONE, tail_s=2.0, backward_s=6.0, saved_bytes=6.0, working_bytes=13.0),)
    expected = Numbers(2.5, 4.75, 1.0 - 0.125 * 8 * 0.75, 8.0, 10.0, 16.0, 6.0)
    assert sharded.segments == (expected,)
    assert sharded_again.segments[0].backward_s == 4.75 + 2.5
    assert (sharded.name, sharded_again.name) == ("dp=4, sharded parameters", "dp=4, sharded parameters, remat")


def test_a_frozen_or_indivisible_parameter() -> None:
    frozen = Stored("w", 8.0, 1.0, False, (0,), True)
    whole, _, sharded, _ = ways_of_shape((("dp", 4),), [ONE], [frozen], PRICES)
    assert whole.segments == (ONE,)
    assert (sharded.segments[0].backward_s, sharded.segments[0].tail_s) == (4.5, 1.0)
    uncut = Stored("w", 8.0, 4.0, True, (0,), False)
    whole, _, sharded, _ = ways_of_shape((("dp", 4),), [ONE], [uncut], PRICES)
    assert whole.segments == sharded.segments


def test_a_shared_parameter_is_held_by_every_stage_that_uses_it() -> None:
    shared = Shared((0, 2), held_bytes=7.0, tail_s=0.5, sum_s=0.25)
    ranges = Ranges(Way((), False, False, (ONE, ONE, ONE), (shared,)))
    assert ranges.totals(0, 3).held_bytes == 96.0
    assert ranges.totals(0, 3).tail_s == 3.0
    assert ranges.totals(0, 1).tail_s == 1.25
    assert ranges.totals(1, 2).held_bytes == 32.0
    assert (ranges.totals(1, 3).held_bytes, ranges.totals(1, 3).tail_s) == (71.0, 2.75)
