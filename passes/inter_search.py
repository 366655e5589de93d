"""The search over microbatch counts, schedules and pipelines of `inter_ways`' ways, by the DP of `inter_dp`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.passes.inter_dp import (
    Floats,
    Option,
    Pipeline,
    PlacedStage,
    StageProblem,
    TransferPrice,
    best_pipeline,
    lower_bound_s,
)
from autoshard.passes.inter_options import MeshShape
from autoshard.passes.inter_sites import Site, Sites
from autoshard.passes.inter_ways import Ranges, Totals, Variant, Way
from autoshard.schedule import in_flight

WaySource = Callable[[Site, int, int], Sequence[Way]]
"""(site, first device of a stage there, microbatches) -> the ways of all its mesh shapes."""


def way_of(stage: PlacedStage) -> Way:
    """The way in which a stage of a candidate runs."""
    assert isinstance(stage.option.key, Way)
    return stage.option.key


@dataclass(frozen=True)
class Candidate:
    """A pipeline whose options' keys are `Way`s, the number of microbatches and the schedule it runs."""

    pipeline: Pipeline
    microbatches: int
    schedule: str

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of a whole step."""
        return self.pipeline.step_time_s

    def __str__(self) -> str:
        stages = "; ".join(
            f"segments {stage.start}-{stage.stop - 1} on {stage.size} devices from {stage.first_device}:"
            f" {way_of(stage).name}"
            for stage in self.pipeline.stages
        )
        return f"{self.step_time_s:.6g} s, {self.microbatches} microbatches, {self.schedule}: {stages}"


@dataclass(frozen=True)
class Wanted:
    """What a pipeline must be; None is free. stages: count. shape, sharded, remat: of every stage's way."""

    stages: int | None = None
    shape: MeshShape | None = None
    sharded: bool | None = None
    remat: bool | None = None
    ignore_memory: bool = False

    def admits(self, way: Way) -> bool:
        """Whether a way is among those wanted."""
        return (
            self.shape in (None, way.shape) and self.sharded in (None, way.sharded) and self.remat in (None, way.remat)
        )


@dataclass(frozen=True)
class Search:
    """All that the search reads.

    segments: count. microbatches: counts to try. schedules: names to try. ways: prices (see `WaySource`).
    memory_bytes(first, size): what each device of a stage has. cuts: segments that must begin a stage. is_late: whether
    to stop as soon as there is an answer.
    """

    sites: Sites
    segments: int
    microbatches: tuple[int, ...]
    schedules: tuple[str, ...]
    ways: WaySource
    memory_bytes: Callable[[int, int], int]
    transfer_s: TransferPrice
    cuts: frozenset[int] = frozenset()
    is_late: Callable[[], bool] = lambda: False
    _tables: dict[int, "Table"] = field(default_factory=dict, repr=False, compare=False)

    def best(self, wanted: Wanted, upper_bound_s: float = float("inf")) -> Candidate | None:
        """The fastest pipeline that is as wanted, fits in memory, and takes less than the bound."""
        best: Candidate | None = None
        floors = [
            (self._floor_s(wanted, microbatches, schedule), number, microbatches, schedule)
            for number, microbatches in enumerate(self.microbatches)
            for schedule in self.schedules
        ]
        # Most promising first, so that most others end at their floors; ties as given.
        for floor_s, _, microbatches, schedule in sorted(floors, key=lambda floor: floor[:2]):
            bound_s = best.step_time_s if best else upper_bound_s
            if floor_s >= bound_s or (best is not None and self.is_late()):
                continue
            pipeline = self._best_of(wanted, microbatches, schedule, bound_s)
            if pipeline is not None:
                best = Candidate(pipeline, microbatches, schedule)
        return best

    def _floor_s(self, wanted: Wanted, microbatches: int, schedule: str) -> float:
        """No pipeline with this many microbatches is faster; infinity once the time for searching is over."""
        if self.is_late() and microbatches not in self._tables:
            return float("inf")
        return lower_bound_s(self._problem(self._table(microbatches), wanted, schedule, None))

    def peak_bytes(self, candidate: Candidate) -> tuple[int, ...]:
        """Bytes at the peak of each stage, on its fullest device."""
        peaks, stages = [], candidate.pipeline.stages
        for number, stage in enumerate(stages):
            totals = Ranges(way_of(stage)).totals(stage.start, stage.stop)
            holding = in_flight(candidate.schedule, len(stages), candidate.microbatches, number)
            peaks.append(int(totals.peak_bytes(holding)))
        return tuple(peaks)

    def _best_of(self, wanted: Wanted, microbatches: int, schedule: str, bound_s: float) -> Pipeline | None:
        """One microbatch count and schedule.

        A parameter that segments of two stages use must lie there in the same way. Without that rule the search is a
        relaxation: where its answer keeps the rule it is the optimum, else each kind of way is tried as theirs.
        """
        table = self._table(microbatches)
        pipeline = best_pipeline(self._problem(table, wanted, schedule, None), bound_s)
        if pipeline is None or len(set(_shared_kinds(pipeline))) <= 1:
            return pipeline
        best: Pipeline | None = None
        for kind in table.kinds(wanted):
            found = best_pipeline(self._problem(table, wanted, schedule, kind), best.step_time_s if best else bound_s)
            best = found or best
        return best

    def _table(self, microbatches: int) -> "Table":
        if microbatches not in self._tables:
            self._tables[microbatches] = Table(self, microbatches)
        return self._tables[microbatches]

    def _problem(self, table: "Table", wanted: Wanted, schedule: str, kind: "Kind | None") -> StageProblem:
        sizes = self.sites.sizes
        if wanted.shape is not None:
            sizes = tuple(size for size in sizes if wanted.shape in self.sites.shapes(size))
        cache: dict[tuple[int, int, Site, int], tuple[Option, ...]] = {}

        def options(start: int, stop: int, size: int, first: int, holding: int) -> tuple[Option, ...]:
            key = (start, stop, self.sites.site(first, size), holding)
            if key not in cache:
                cache[key] = tuple(table.options(wanted, kind, start, stop, size, first, holding))
            return cache[key]

        return StageProblem(
            segments=self.segments,
            devices=self.sites.cluster.size,
            microbatches=table.microbatches,
            schedule=schedule,
            sizes=sizes,
            places=self.sites.places,
            options=options,
            transfer_s=self.transfer_s,
            fastest_s=lambda size, holding: table.fastest_s(wanted, size, holding),
            stages=wanted.stages,
            cuts=self.cuts,
        )


Kind = tuple[MeshShape, bool, Variant]


def _shared_kinds(pipeline: Pipeline) -> Iterator[Kind]:
    """Kinds of the ways of stages that hold a parameter which other stages hold too."""
    for stage in pipeline.stages:
        way = way_of(stage)
        if any(shared.split_by(stage.start, stage.stop) for shared in way.shared):
            yield way.kind


@dataclass(frozen=True)
class Table:
    """Prices of every stage for one microbatch count."""

    search: Search
    microbatches: int
    _ranges: dict[Site, tuple[Ranges, ...]] = field(default_factory=dict, repr=False, compare=False)
    _fastest: dict[tuple[Wanted, int, int], Floats] = field(default_factory=dict, repr=False, compare=False)

    def ranges(self, first: int, size: int) -> tuple[Ranges, ...]:
        """The ways of stages at a site; none where the shape's dp does not divide a microbatch."""
        site = self.search.sites.site(first, size)
        if site not in self._ranges:
            self._ranges[site] = tuple(Ranges(way) for way in self.search.ways(site, first, self.microbatches))
        return self._ranges[site]

    def fastest_s(self, wanted: Wanted, size: int, holding: int) -> Floats:
        """At [start, stop], the least time of the ways of a stage of `size` devices that fit, wherever it stands."""
        key = (replace(wanted, stages=None), size, holding)
        if key not in self._fastest:
            sites, count = self.search.sites, self.search.segments + 1
            found = np.full((count, count), np.inf)
            for first in sites.places(sites.cluster.size, size):
                limit = np.inf if wanted.ignore_memory else self.search.memory_bytes(first, size)
                for ranges in self.ranges(first, size):
                    if wanted.admits(ranges.way):
                        fits = ranges.peaks_bytes(holding) <= limit
                        found = np.where(fits, np.minimum(found, ranges.times_s), found)
            self._fastest[key] = found
        return self._fastest[key]

    def kinds(self, wanted: Wanted) -> tuple[Kind, ...]:
        """The different kinds of all ways wanted, in a fixed order."""
        ways = (ranges.way for found in self._ranges.values() for ranges in found)
        return tuple(sorted({way.kind for way in ways if wanted.admits(way)}))

    def options(
        self, wanted: Wanted, kind: Kind | None, start: int, stop: int, size: int, first: int, holding: int
    ) -> Iterator[Option]:
        """The ways of one stage that fit, without those that another way beats in everything that can be seen of it."""
        limit = self.search.memory_bytes(first, size)
        kept: list[tuple[tuple[float, ...], Way, Totals]] = []
        for ranges in self.ranges(first, size):
            way = ranges.way
            is_split = any(shared.split_by(start, stop) for shared in way.shared)
            if not wanted.admits(way) or (is_split and kind not in (None, way.kind)):
                continue
            totals = ranges.totals(start, stop)
            if not wanted.ignore_memory and totals.peak_bytes(holding) > limit:
                continue
            seen = (totals.forward_s, totals.backward_s, totals.tail_s, totals.arriving_bytes)
            if not any(all(a <= b for a, b in zip(other, seen, strict=True)) for other, _, _ in kept):
                kept = [entry for entry in kept if not all(a <= b for a, b in zip(seen, entry[0], strict=True))]
                kept.append((seen, way, totals))
        for _, way, totals in kept:
            yield Option(totals.forward_s, totals.backward_s, totals.tail_s, totals.arriving_bytes, way)


def without_memory(wanted: Wanted) -> Wanted:
    """The same, as if memory had no end."""
    return replace(wanted, ignore_memory=True)
