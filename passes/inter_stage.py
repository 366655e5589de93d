"""One stage of the chosen pipeline, solved for good: its layouts and its prediction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.cost.memory import parameter_memory
from autoshard.cost.prices import Prices
from autoshard.errors import InfeasiblePlan
from autoshard.passes.inter_prices import DATA_AXIS, Pricer, inner_mesh
from autoshard.passes.inter_ways import Ranges, Way
from autoshard.passes.intra_op import ChainProblem, ChainSolution, Pin
from autoshard.placement import I, Layout, Placement
from autoshard.plan import Mesh, OperatorPlan, StagePlan, StagePrediction
from autoshard.program import Value, operand_values


@dataclass(frozen=True)
class StageTask:
    """A stage to solve. way: how the search priced it. in_flight: microbatches held at the peak.

    receives: layouts in which values arrive; sends: layouts in which they must leave (what is not named is free).
    pins: beside the user's, those that give shared parameters the layouts of an earlier stage.
    """

    mesh: Mesh
    segments: tuple[int, int]
    way: Way
    microbatches: int
    in_flight: int
    memory_bytes: int
    receives: Mapping[Value, Layout] = field(default_factory=dict)
    sends: Mapping[Value, Layout] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True)
class SolvedStage:
    """A stage's plan, and how good the integer program's answer is."""

    plan: StagePlan
    gap: float
    status: str

    @property
    def time_s(self) -> float:
        """What the stage adds to a step: microbatches one after the other, and once-a-step work."""
        predicted = self.plan.predicted
        return predicted.forward_s + predicted.backward_s

    def holding(self, in_flight: int) -> "SolvedStage":
        """The same stage under a schedule that holds `in_flight` microbatches there."""
        old = self.plan.predicted
        change = (in_flight - old.in_flight) * old.saved_bytes_per_microbatch
        new = replace(old, in_flight=in_flight, peak_memory_bytes=old.peak_memory_bytes + change)
        return replace(self, plan=replace(self.plan, predicted=new))

    def cost_s(self, microbatches: int) -> float:
        """Seconds of all microbatches one after the other, and of the work done once a step."""
        return microbatches * self.time_s + self.plan.predicted.once_s + self.plan.predicted.optimizer_s


@dataclass(frozen=True)
class StageSolver:
    """Solves stages over all axes at once, and as the search priced them, and keeps the faster that fits."""

    pricer: Pricer
    time_limit_s: float
    _known: dict[tuple[object, ...], tuple[StageTask, ChainSolution]] = field(default_factory=dict, repr=False)

    def solve(self, task: StageTask) -> SolvedStage:
        """The best stage. Raises InfeasiblePlan where nothing fits."""
        lifted = self._lifted(task)
        try:
            whole = self._whole(task)
        except InfeasiblePlan:
            if lifted is None:
                raise
            return lifted
        if lifted is not None and lifted.cost_s(task.microbatches) < whole.cost_s(task.microbatches) * (1 - 1e-9):
            return lifted
        return whole

    # ---------------------------------------------------------------- over all axes at once

    def _whole(self, task: StageTask) -> SolvedStage:
        problem = replace(
            self.pricer.problem(task.mesh, task.microbatches, task.segments),
            memory_limit_bytes=task.memory_bytes,
            in_flight=task.in_flight,
            pins=self.pricer.pins + task.pins,
            receives=task.receives,
            sends=task.sends,
            time_limit_s=self.time_limit_s,
        )
        solution = self._solution(task, problem)
        costs = solution.costs
        parameter = sum(cost.parameter_bytes for cost in costs)
        gradient = sum(cost.gradient_bytes for cost in costs)
        optimizer = sum(cost.optimizer_bytes for cost in costs)
        saved = sum(cost.saved_bytes for cost in costs)
        predicted = StagePrediction(
            forward_s=sum(cost.forward_s for cost in costs),
            backward_s=sum(cost.backward_s for cost in costs),
            compute_s=sum(cost.compute_s for cost in costs),
            collectives_s=sum(cost.collectives_s for cost in costs),
            once_s=sum(cost.once_s for cost in costs),
            optimizer_s=sum(cost.optimizer_s for cost in costs),
            parameter_bytes=parameter,
            gradient_bytes=gradient,
            optimizer_bytes=optimizer,
            saved_bytes_per_microbatch=saved,
            in_flight=task.in_flight,
            transient_bytes=max(0, solution.memory_bytes - parameter - gradient - optimizer - task.in_flight * saved),
            peak_memory_bytes=solution.memory_bytes,
        )
        plan = StagePlan(
            task.mesh, task.segments, solution.operators, solution.parameters, _named(solution.receives),
            _named(solution.sends), solution.remat, predicted,
        )  # fmt: skip
        return SolvedStage(plan, solution.gap, solution.status)

    def _solution(self, task: StageTask, problem: ChainProblem) -> ChainSolution:
        """The answer, taken from an equal stage that was solved before where there is one and it fits."""
        pattern = self._pattern(task)
        if pattern in self._known:
            other, solution = self._known[pattern]
            spare = task.memory_bytes - solution.memory_bytes
            held = task.in_flight - other.in_flight
            moved = translated(self.pricer, solution, other, task)
            if moved is not None and held <= 0 <= spare:
                saved = sum(cost.saved_bytes for cost in moved.costs)
                return replace(moved, memory_bytes=solution.memory_bytes + held * saved)
        solution = self.pricer.solve(problem)
        self._known.setdefault(pattern, (task, solution))
        return solution

    def _pattern(self, task: StageTask) -> tuple[object, ...]:
        keys = tuple(segment.key for segment in self.pricer.chain.segments[slice(*task.segments)])
        site = self.pricer.sites.relative(task.mesh.devices)
        arriving = tuple(task.receives.values())
        return keys, task.mesh.axes, task.mesh.sizes, site, task.microbatches, arriving, task.pins, bool(task.sends)

    # ---------------------------------------------------------------- as the search priced it

    def _lifted(self, task: StageTask) -> SolvedStage | None:
        """The inner axes' plan with samples split over dp; None where dp cannot be taken apart or it does not fit."""
        pricer, place = self.pricer, _data_place(task.mesh)
        if not pricer.is_separable or place is None:
            return None
        inner = pricer.inner_problem(task.mesh, task.microbatches, task.segments)
        varied = pricer.varied(inner, task.way.variant)
        if varied is None:
            return None
        problem = replace(
            varied,
            remat=task.way.remat,
            pins=inner.pins + tuple(pin for pin in task.pins if pin.axis != DATA_AXIS),
            receives={value: _without(layout, place) for value, layout in task.receives.items()},
            sends={value: _without(layout, place) for value, layout in task.sends.items()},
            time_limit_s=self.time_limit_s,
        )
        try:
            solution = pricer.solve(problem)
        except InfeasiblePlan:
            return None
        lift = Lift(pricer, task, place, task.mesh.sizes[place])
        parameters = lift.parameters(solution.parameters)
        predicted = lift.prediction(solution, parameters)
        if predicted.peak_memory_bytes > task.memory_bytes:
            return None
        plan = StagePlan(
            task.mesh, task.segments, lift.operators(solution.operators), parameters,
            _named(lift.values(solution.receives)), _named(lift.values(solution.sends)), solution.remat, predicted,
        )  # fmt: skip
        return SolvedStage(plan, solution.gap, solution.status)


@dataclass(frozen=True)
class Lift:
    """Puts dp back at position `place` of every layout: samples split, parameters as the way says."""

    pricer: Pricer
    task: StageTask
    place: int
    dp: int

    def operators(self, plans: Mapping[str, OperatorPlan]) -> dict[str, OperatorPlan]:
        """Each operator's strategy on the inner axes times its strategy on samples."""
        lifted, samples = {}, self.pricer.samples or {}
        for name, plan in plans.items():
            strategy = samples[name]
            lifted[name] = OperatorPlan(
                tuple(self._with(*pair) for pair in zip(plan.operands, strategy.operands, strict=True)),
                tuple(self._with(*pair) for pair in zip(plan.results, strategy.results, strict=True)),
                (*plan.implementations[: self.place], strategy.implementation, *plan.implementations[self.place :]),
            )
        return lifted

    def parameters(self, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
        """Stored layouts: whole on dp, or cut there."""
        nodes = {parameter.name: node for node, parameter in self.pricer.program.parameters.items()}
        inner, lifted = inner_mesh(self.task.mesh), {}
        for name, layout in layouts.items():
            cut = self.pricer.data_cut(nodes[name], layout, inner, self.dp) if self.task.way.sharded else None
            lifted[name] = self._with(layout, I if cut is None else Placement("S", cut))
        return lifted

    def values(self, layouts: Mapping[Value, Layout]) -> dict[Value, Layout]:
        """Values that cross stages: split where they hold samples, else whole."""
        samples, lifted = self.pricer.samples or {}, {}
        for value, layout in layouts.items():
            placement = samples[value.node].results[value.index]
            lifted[value] = self._with(layout, placement if placement.is_sharded else I)
        return lifted

    def prediction(self, solution: ChainSolution, parameters: Mapping[str, Layout]) -> StagePrediction:
        """Seconds as in `inter_ways`, bytes of parameters from their layouts."""
        task, pricer = self.task, self.pricer
        prices = Prices(pricer.sites.cluster, task.mesh, pricer.options.optimizer)
        way = next(
            way
            for way in pricer.ways_of_solution(
                task.way.shape, task.mesh, task.microbatches, solution, task.segments, task.way.variant
            )
            if way.sharded == task.way.sharded and not way.remat
        )
        totals = Ranges(way).totals(0, len(way.segments))
        known = {parameter.name: parameter for parameter in pricer.program.parameters.values()}
        held = [
            parameter_memory(
                known[name].type, layout, task.mesh.sizes, pricer.options.optimizer, trainable=known[name].trainable
            )
            for name, layout in parameters.items()
        ]
        own = sum(memory.parameter_bytes for memory in held if memory.gradient_bytes)
        optimizer_s = prices.optimizer_s(float(own))
        compute_s = sum(cost.compute_s for cost in solution.costs)
        parameter, gradient, optimizer = (sum(getattr(memory, name) for memory in held) for name in _HELD)
        saved, working = int(totals.saved_bytes), int(totals.working_bytes)
        return StagePrediction(
            forward_s=totals.forward_s,
            backward_s=totals.backward_s,
            compute_s=compute_s,
            collectives_s=totals.forward_s + totals.backward_s - compute_s,
            once_s=max(0.0, totals.tail_s - optimizer_s),
            optimizer_s=optimizer_s,
            parameter_bytes=parameter,
            gradient_bytes=gradient,
            optimizer_bytes=optimizer,
            saved_bytes_per_microbatch=saved,
            in_flight=task.in_flight,
            transient_bytes=working,
            peak_memory_bytes=parameter + gradient + optimizer + task.in_flight * saved + working,
        )

    def _with(self, layout: Layout, placement: Placement) -> Layout:
        return (*layout[: self.place], placement, *layout[self.place :])


_HELD = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")


def _data_place(mesh: Mesh) -> int | None:
    return mesh.axes.index(DATA_AXIS) if DATA_AXIS in mesh.axes else None


def _without(layout: Layout, place: int) -> Layout:
    return (*layout[:place], *layout[place + 1 :])


def _named(layouts: Mapping[Value, Layout]) -> dict[str, Layout]:
    return {str(value): layout for value, layout in layouts.items()}


def translated(pricer: Pricer, solution: ChainSolution, source: StageTask, target: StageTask) -> ChainSolution | None:
    """The solution of an equal run of segments in the names of another; None where their graphs are not alike."""
    names = _names(pricer, source.segments, target.segments)
    if names is None:
        return None

    def moved(layouts: Mapping[Value, Layout]) -> dict[Value, Layout]:
        return {Value(names[value.node], value.index): layout for value, layout in layouts.items()}

    nodes = {parameter.name: node for node, parameter in pricer.program.parameters.items()}
    known = pricer.program.parameters
    shift = target.segments[0] - source.segments[0]
    remat = tuple(number + shift for number in solution.remat_segments)
    return replace(
        solution,
        operators={names[name]: plan for name, plan in solution.operators.items()},
        parameters={known[names[nodes[name]]].name: layout for name, layout in solution.parameters.items()},
        receives=moved(solution.receives),
        sends=moved(solution.sends),
        remat=tuple(pricer.chain.segments[number].path for number in remat),
        remat_segments=remat,
    )


def _names(pricer: Pricer, source: Sequence[int], target: Sequence[int]) -> dict[str, str] | None:
    """Node of the source's segments, and what they read -> the node in its place in the target's."""
    names: dict[str, str] = {}
    for mine, theirs in zip(range(*source), range(*target), strict=True):
        one, two = pricer.chain.segments[mine], pricer.chain.segments[theirs]
        for name, other in zip(one.nodes, two.nodes, strict=True):
            if names.setdefault(name, other) != other:
                return None
            pairs = zip(operand_values(pricer.nodes[name]), operand_values(pricer.nodes[other]), strict=True)
            if any(names.setdefault(a.node, b.node) != b.node for a, b in pairs):
                return None
    return names
