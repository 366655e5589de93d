"""The inter-operator pass: stages, submeshes, mesh shapes, microbatches and schedule, for the least time of a step.

In order:
    inter_options    what the user fixed, refused where it cannot be
    inter_sites      where a stage can stand and which mesh shapes it can have there
    inter_prices     the integer program on the inner axes prices every segment, once for each of a few problems
    inter_ways       dp in closed form, parameters whole or sharded over it, with and without remat
    inter_baselines  single device, data parallel, ZeRO-3 and every grid, as points of the search
    inter_search     for every microbatch count and schedule, the DP of inter_dp over all of the above
    inter_stage      the stages chosen, solved over all axes at once with their memory limit
    inter_predict    the step simulated

The search's answer is at most the best baseline, since those are among its points; a stage solved again replaces what
the search priced only where it is faster. What is not proved: that no mesh shape other than the chosen one would gain
more from being solved over all axes at once than the chosen one did.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from autoshard.cluster import Cluster
from autoshard.cost.prices import Prices
from autoshard.errors import InfeasiblePlan
from autoshard.passes.inter_baselines import PricedBaseline, price_baselines, textbooks
from autoshard.passes.inter_options import PlanOptions, check_options, cut_segments
from autoshard.passes.inter_predict import boundary_transfers_s, predicted
from autoshard.passes.inter_prices import DATA_AXIS, FREE_VARIANTS, USED_VARIANTS, Pricer, Solve, mesh_of
from autoshard.passes.inter_search import Candidate, Search, Wanted, way_of, without_memory
from autoshard.passes.inter_setting import (
    Setting,
    batch_size,
    beginnings,
    check_pinned_axes,
    fingerprints,
    parse_pins,
)
from autoshard.passes.inter_sites import Sites, settled
from autoshard.passes.inter_stage import SolvedStage, StageSolver, StageTask
from autoshard.passes.inter_ways import Variant
from autoshard.passes.intra_op import Pin, solve_chain
from autoshard.passes.microbatch import CoupledSamples, sample_placements
from autoshard.passes.segment import Chain
from autoshard.placement import Layout
from autoshard.plan import Mesh, Plan, Predicted, Solver
from autoshard.program import Program, TensorType, Value
from autoshard.schedule import in_flight

REFINED = 3
"""Candidates that are solved over all axes at once."""

SEARCH_SHARE = 0.7

SOLVE_LIMIT_S = 60.0
"""Seconds that one integer program may take where the user sets no limit."""


@dataclass(frozen=True)
class InterOp:
    """Maps (program, chain) to the plan. solve: the intra-operator pass. baselines: whether to price them."""

    cluster: Cluster
    options: PlanOptions = field(default_factory=PlanOptions)
    baselines: bool = True
    solve: Solve = solve_chain

    def __call__(self, program: Program, chain: Chain) -> Plan:
        """The plan. Raises BadInput for options that cannot be, InfeasiblePlan where nothing fits."""
        started = time.monotonic()
        # The larger part of a limit is for the search, the rest for solving what it finds.
        setting = self._setting(program, chain, started + SEARCH_SHARE * (self.options.time_limit_s or float("inf")))
        baselines = self._baselines(setting)
        best = self._best(setting, self._candidates(setting, baselines))
        used = {device for stage in best.stages for device in stage.plan.mesh.devices}
        return Plan(
            stages=tuple(stage.plan for stage in best.stages),
            microbatches=best.microbatches,
            schedule=best.schedule,
            predicted=best.predicted,
            baselines=tuple(priced.baseline for priced in baselines),
            solver=Solver(
                max(stage.gap for stage in best.stages), time.monotonic() - started, _status(best.stages, setting)
            ),
            optimizer=self.options.optimizer,
            idle_devices=tuple(device for device in range(self.cluster.size) if device not in used),
            fingerprints=fingerprints(program, self.cluster),
            workload=program.source,
            cluster=str(self.cluster),
            timing={"plan_s": time.monotonic() - started},
            notes=program.notes + setting.notes,
        )

    # ---------------------------------------------------------------- what is to be searched

    def _setting(self, program: Program, chain: Chain, deadline: float) -> Setting:
        options, batch = self.options, batch_size(program)
        notes: list[str] = []
        check_pinned_axes(options)
        check_options(options, self.cluster.size, len(chain.segments), batch)
        cluster = self.cluster
        if options.memory_limit_bytes is not None:
            cluster = cluster.with_memory_limit(options.memory_limit_bytes)
        try:
            samples = sample_placements(program)
        except CoupledSamples as error:
            if (options.microbatches or 1) > 1:
                raise
            samples = None
            notes.append(f"one microbatch: {error.what}")
        if samples is None:
            counts: tuple[int, ...] = (1,)
        elif options.microbatches is not None:
            counts = (options.microbatches,)
        else:
            dp = dict(options.mesh or ()).get(DATA_AXIS, 1)
            counts = tuple(count for count in range(1, batch + 1) if batch % (count * dp) == 0)
        cuts = cut_segments(options, beginnings(program, chain))
        return Setting(
            program, chain, Sites(cluster, options.mesh), samples, batch, counts, cuts, tuple(notes), deadline
        )

    def _search(self, setting: Setting, options: PlanOptions, variants: tuple[Variant, ...]) -> tuple[Search, Pricer]:
        sites = replace(setting.sites, mesh=options.mesh)
        pricer = Pricer(
            program=setting.program,
            chain=setting.chain,
            sites=sites,
            options=options,
            samples=setting.samples,
            pins=parse_pins(options.pins),
            batch=setting.batch,
            solve=self.solve,
            variants=variants,
            solutions=setting.solutions,
        )
        prices = Prices(sites.cluster, Mesh((), (), (0,)), options.optimizer)

        @cache
        def transfer_s(left: int, left_size: int, right: int, right_size: int, size: float) -> float:
            source, target = mesh_of((("all", left_size),), left), mesh_of((("all", right_size),), right)
            return prices.transfer_s(size, source, target)

        def memory_bytes(first: int, size: int) -> int:
            return min(sites.cluster.memory_bytes(rank) for rank in range(first, first + size))

        schedules = ("1f1b", "gpipe") if options.schedule == "auto" else (options.schedule,)
        return Search(
            sites=sites,
            segments=len(setting.chain.segments),
            microbatches=setting.counts,
            schedules=schedules,
            ways=pricer.ways,
            memory_bytes=memory_bytes,
            transfer_s=transfer_s,
            cuts=setting.cuts,
            is_late=setting.is_late,
        ), pricer

    # ---------------------------------------------------------------- the search

    def _baselines(self, setting: Setting) -> tuple[PricedBaseline, ...]:
        if not self.baselines:
            return ()
        free = PlanOptions(optimizer=self.options.optimizer)
        search, _ = self._search(replace(setting, cuts=frozenset()), free, USED_VARIANTS[:1])
        return price_baselines(replace(search, schedules=("1f1b",)), textbooks(search.sites, search.segments))

    def _candidates(self, setting: Setting, baselines: Sequence[PricedBaseline]) -> list[Candidate]:
        """Pipelines to solve for good, best first: the search's, and where nothing is fixed the best baselines."""
        search, pricer = self._main_search(setting)
        known: list[Candidate] = []
        if self._is_free:
            fitting = [priced.candidate for priced in baselines if priced.candidate is not None]
            known = sorted(fitting, key=lambda candidate: candidate.step_time_s)[:REFINED]
        found = search.best(Wanted(self.options.stages), known[0].step_time_s if known else float("inf"))
        candidates = [candidate for candidate in (found, *known) if candidate is not None]
        different = {_kind(candidate): candidate for candidate in reversed(candidates)}
        return sorted(different.values(), key=lambda candidate: candidate.step_time_s)[:REFINED] or [
            self._leanest(search, pricer)
        ]

    def _main_search(self, setting: Setting) -> tuple[Search, Pricer]:
        return self._search(setting, self.options, FREE_VARIANTS if self.options.mesh is None else USED_VARIANTS)

    @property
    def _is_free(self) -> bool:
        options = self.options
        return (options.mesh, options.stages, options.cut_before, dict(options.pins)) == (None, None, (), {})

    def _leanest(self, search: Search, pricer: Pricer) -> Candidate:
        """Where no way of the search fits: the one that needs the least, for the integer program to try or explain."""
        last = replace(search, microbatches=search.microbatches[-1:])
        found = [
            last.best(without_memory(Wanted(self.options.stages, sharded=sharded, remat=remat)))
            for sharded in (True, False)
            for remat in (True, False)
        ]
        leanest = min(
            (candidate for candidate in found if candidate is not None),
            key=lambda candidate: max(search.peak_bytes(candidate)),
            default=None,
        )
        if leanest is None and pricer.refusals:
            raise pricer.refusals[0]
        if leanest is None:
            raise InfeasiblePlan(
                "no mesh shape, number of stages and microbatches satisfies everything that is fixed",
                help="loosen mesh, stages, microbatches or pins",
            )
        return leanest

    # ---------------------------------------------------------------- the stages, for good

    def _best(self, setting: Setting, candidates: Sequence[Candidate]) -> "Solved":
        """The fastest of the candidates once their stages are solved. Raises InfeasiblePlan where none fits."""
        solved: list[Solved] = []
        refusal: InfeasiblePlan | None = None
        for candidate in candidates:
            if solved and setting.is_late():
                break
            try:
                solved.append(self._solved(setting, candidate))
            except InfeasiblePlan as error:
                refusal = refusal or error
        if not solved:
            assert refusal is not None
            raise refusal
        return min(solved, key=lambda one: one.predicted.step_time_s)

    def _solved(self, setting: Setting, candidate: Candidate) -> "Solved":
        stages, count = self._stages(setting, candidate), candidate.microbatches
        types = self._crossing(setting, candidate)
        plans = [stage.plan for stage in stages]
        transfers_s = boundary_transfers_s(plans, setting.sites, types, self.options.optimizer)
        if len(stages) == 1 and count == 1:
            return Solved(tuple(stages), 1, "none", predicted(plans, 1, "none", transfers_s))
        given = Solved(
            tuple(stages), count, candidate.schedule, predicted(plans, count, candidate.schedule, transfers_s)
        )
        if self.options.schedule != "auto" or candidate.schedule == "1f1b":
            return given
        # 1F1B holds no more than GPipe, and where transfers hide behind compute it is as fast.
        leaner = [stage.holding(in_flight("1f1b", len(stages), count, number)) for number, stage in enumerate(stages)]
        other = predicted([stage.plan for stage in leaner], count, "1f1b", transfers_s)
        if other.step_time_s > given.predicted.step_time_s * (1 + 1e-9):
            return given
        return Solved(tuple(leaner), count, "1f1b", other)

    def _stages(self, setting: Setting, candidate: Candidate) -> list[SolvedStage]:
        _, pricer = self._main_search(setting)
        chosen, count = candidate.pipeline.stages, candidate.microbatches
        firsts = settled([(stage.first_device, stage.size) for stage in chosen], setting.sites)
        shapes = [way_of(stage).shape for stage in chosen]
        solver = StageSolver(pricer, self.options.time_limit_s or SOLVE_LIMIT_S)
        sent: dict[Value, Layout] = {}
        stored: dict[str, tuple[Pin, ...]] = {}
        solved: list[SolvedStage] = []
        for number, stage in enumerate(chosen):
            mesh = mesh_of(shapes[number], firsts[number])
            alike = len(set(shapes)) == 1
            task = StageTask(
                mesh,
                (stage.start, stage.stop),
                way_of(stage),
                count,
                in_flight(candidate.schedule, len(chosen), count, number),
                min(setting.sites.cluster.memory_bytes(device) for device in mesh.devices),
                receives={
                    value: sent[value] if alike else setting.whole(value, mesh)
                    for value in setting.entering(stage.start, stage.stop)
                },
                sends={} if alike else {v: setting.whole(v, mesh) for v in setting.leaving(stage.start, stage.stop)},
                pins=tuple(pin for name in setting.shared(stage.start, stage.stop) for pin in stored.get(name, ())),
            )
            try:
                done = solver.solve(task)
            except InfeasiblePlan as error:
                where = f"stage {number} of {len(chosen)} on {mesh}" + (f"; {error.where}" if error.where else "")
                raise InfeasiblePlan(error.what, where=where, help=error.help) from error
            solved.append(done)
            values = {str(value): value for value in setting.leaving(stage.start, stage.stop)}
            sent |= {values[name]: layout for name, layout in done.plan.sends.items()}
            for name, layout in done.plan.parameters.items():
                pairs = zip(layout, mesh.axes, mesh.sizes, strict=True)
                stored.setdefault(
                    name, tuple(Pin(name, placement, axis) for placement, axis, size in pairs if size > 1)
                )
        return solved

    def _crossing(self, setting: Setting, candidate: Candidate) -> dict[str, TensorType]:
        """Types of all values that cross a boundary, in one microbatch."""
        return {
            str(value): setting.part_type(value, candidate.microbatches)
            for stage in candidate.pipeline.stages
            for value in setting.leaving(stage.start, stage.stop)
        }


@dataclass(frozen=True)
class Solved:
    """A candidate with its stages solved and its step simulated."""

    stages: tuple[SolvedStage, ...]
    microbatches: int
    schedule: str
    predicted: Predicted


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """Candidates of one kind are one pipeline priced twice."""
    stages = tuple((stage.start, stage.stop, stage.size, way_of(stage).shape) for stage in candidate.pipeline.stages)
    return candidate.microbatches, stages


def _status(stages: Sequence[SolvedStage], setting: Setting) -> str:
    """The worst of the stages' statuses."""
    if setting.is_late():
        return "time limit"
    return next((stage.status for stage in stages if stage.status != "optimal"), "optimal")
