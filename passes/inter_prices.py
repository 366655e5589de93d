"""Prices of a program's ways: the integer program on the inner axes, and the data-parallel axis in closed form."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property

import numpy as np
from torch import fx

from autoshard.cost.memory import parameter_memory
from autoshard.cost.prices import Prices
from autoshard.errors import InfeasiblePlan
from autoshard.passes.inter_options import MeshShape, PlanOptions
from autoshard.passes.inter_sites import Site, Sites
from autoshard.passes.inter_ways import DataParallelPrices, Numbers, Stored, Variant, Way, ways_of_shape
from autoshard.passes.intra_op import ChainProblem, ChainSolution, Pin, SegmentCost
from autoshard.passes.segment import Chain
from autoshard.placement import I, Layout, Placement, conversion
from autoshard.plan import Mesh
from autoshard.program import Program, Value, operand_values, result_types
from autoshard.rules import AxisStrategy

DATA_AXIS = "dp"
FREE_VARIANTS = (Variant(), Variant(used=True))
USED_VARIANTS = (Variant(used=True), Variant(used=True, factor=1.0))
Solve = Callable[[ChainProblem], ChainSolution]


def mesh_of(shape: MeshShape, first_device: int) -> Mesh:
    """A shape laid over consecutive devices."""
    sizes = tuple(size for _, size in shape)
    count = int(np.prod(sizes, dtype=np.int64))
    return Mesh(tuple(axis for axis, _ in shape), sizes, tuple(range(first_device, first_device + count)))


def inner_mesh(mesh: Mesh, coordinate: int = 0) -> Mesh:
    """The mesh of one data-parallel rank: all axes but dp, at a coordinate of dp."""
    if DATA_AXIS not in mesh.axes:
        return mesh
    place = mesh.axes.index(DATA_AXIS)
    devices = np.asarray(mesh.devices).reshape(mesh.sizes).take(coordinate, axis=place).ravel()
    axes, sizes = list(mesh.axes), list(mesh.sizes)
    del axes[place], sizes[place]
    return Mesh(tuple(axes), tuple(sizes), tuple(int(device) for device in devices))


_MOVING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True)
class SampleSum:
    """A value that splitting samples makes partial and that segment `segment` wants whole: collective and bytes.

    is_split: whether the bytes are those of all samples of the batch, of which a microbatch has its share.
    """

    segment: int
    collective: str
    bytes: float
    is_split: bool


@dataclass(frozen=True)
class Pricer:
    """Prices ways of the whole chain. It solves each (inner mesh's site, microbatches x dp) once.

    samples: where samples lie in every value, None where operators couple them: then the batch is one microbatch and
    every mesh is solved whole. pins: what the user fixed. solve: `solve_chain`. variants: which layouts on the inner
    axes to price. solutions: what `solve` has answered so far; refusals: problems that pins leave no answer.
    """

    program: Program
    chain: Chain
    sites: Sites
    options: PlanOptions
    samples: Mapping[str, AxisStrategy] | None
    pins: tuple[Pin, ...]
    batch: int
    solve: Solve
    variants: tuple[Variant, ...] = FREE_VARIANTS
    refusals: list[InfeasiblePlan] = field(default_factory=list, repr=False, compare=False)
    solutions: dict[tuple[object, ...], ChainSolution | None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def is_separable(self) -> bool:
        """Whether dp may be priced apart from the inner axes: pins there are of parameters, to dims that it divides."""
        parameters = {name for p in self.program.parameters.values() for name in (p.name, *p.aliases)}
        on_dp = [pin for pin in self.pins if pin.axis == DATA_AXIS]
        if self.samples is None or not all(_matches_only(pin, parameters) for pin in on_dp):
            return False
        ranks = dict(self.options.mesh or ()).get(DATA_AXIS, 1)
        cuts = ((self.program.parameters[node].type.shape, dim) for node, dim in self._pinned_on_dp.items())
        return all(dim is None or (dim < len(shape) and shape[dim] % ranks == 0) for shape, dim in cuts)

    def ways(self, site: Site, first_device: int, microbatches: int) -> tuple[Way, ...]:
        """The ways of all mesh shapes at a site; of those whose dp does not divide a microbatch there are none."""
        found: list[Way] = []
        for shape in self.sites.shapes(len(site)):
            dp = dict(shape).get(DATA_AXIS, 1)
            lacks_axis = any(pin.axis not in dict(shape) for pin in self.pins)
            if lacks_axis or (self.batch // microbatches) % dp:
                continue
            mesh = mesh_of(shape, first_device)
            if self.is_separable:
                found += self._separate(shape, mesh, microbatches)
            else:
                found += self._whole(shape, mesh, microbatches)
        return tuple(found)

    # ---------------------------------------------------------------- the integer program, once for each problem

    def _solved(self, problem: ChainProblem, variant: Variant) -> ChainSolution | None:
        """The answer for a variant of a problem; None where pins leave nothing."""
        asked = self.varied(problem, variant)
        if asked is None:
            return None
        site = self.sites.relative(asked.mesh.devices)
        key = (asked.mesh.axes, asked.mesh.sizes, site, asked.microbatches, asked.pins, asked.used, variant.factor)
        if key not in self.solutions:
            try:
                self.solutions[key] = self.solve(asked)
            except InfeasiblePlan as error:
                self.refusals.append(error)
                self.solutions[key] = None
        return self.solutions[key]

    def varied(self, problem: ChainProblem, variant: Variant) -> ChainProblem | None:
        """A problem without regard to memory, as a variant asks it."""
        used = tuple(axis for axis, size in zip(problem.mesh.axes, problem.mesh.sizes, strict=True) if size > 1)
        asked = replace(problem, used=used if variant.used else (), remat=False)
        if variant.factor == 0:
            return asked
        whole = replace(problem, segments=(0, len(self.chain.segments)))
        free = self._solved(whole, replace(variant, factor=0.0))
        if free is None:
            return None
        saved = sum(cost.saved_bytes for cost in free.costs)
        again_s = problem.microbatches * sum(cost.forward_s for cost in free.costs)
        return replace(asked, memory_price_s_per_byte=variant.factor * again_s / max(saved, 1))

    def inner_problem(self, mesh: Mesh, microbatches: int, segments: tuple[int, int]) -> ChainProblem:
        """A run of segments on the inner axes of `mesh`: the part of the slowest data-parallel rank."""
        dp = dict(zip(mesh.axes, mesh.sizes, strict=True)).get(DATA_AXIS, 1)
        inner = min((inner_mesh(mesh, rank) for rank in range(dp)), key=self._speed)
        pins = tuple(pin for pin in self.pins if pin.axis != DATA_AXIS)
        return replace(self.problem(inner, microbatches * dp, segments), pins=pins)

    def _speed(self, mesh: Mesh) -> float:
        """Operations a second of the slowest device."""
        devices = (self.sites.cluster.group(rank).device for rank in mesh.devices)
        return min(device.flops("bfloat16") * device.matmul_efficiency for device in devices)

    def problem(self, mesh: Mesh, microbatches: int, segments: tuple[int, int]) -> ChainProblem:
        """A run of segments on a mesh, under the user's pins and without a memory limit."""
        return ChainProblem(
            program=self.program,
            chain=self.chain,
            segments=segments,
            cluster=self.sites.cluster,
            mesh=mesh,
            microbatches=microbatches,
            optimizer=self.options.optimizer,
            pins=self.pins,
            samples=self.samples if self.samples is not None else {},
            used=mesh.axes if all(variant.used for variant in self.variants) else (),
        )

    # ---------------------------------------------------------------- ways from its answer

    def _separate(self, shape: MeshShape, mesh: Mesh, microbatches: int) -> Iterator[Way]:
        everything = (0, len(self.chain.segments))
        problem = self.inner_problem(mesh, microbatches, everything)
        for variant, solution in self._different(problem, self.variants):
            yield from self.ways_of_solution(shape, mesh, microbatches, solution, everything, variant)

    def _different(self, problem: ChainProblem, variants: Sequence[Variant]) -> Iterator[tuple[Variant, ChainSolution]]:
        """The variants' answers, without those that cost the same as an earlier one."""
        if all(size == 1 for size in problem.mesh.sizes):
            variants = variants[:1]
        seen = set()
        for variant in variants:
            solution = self._solved(problem, variant)
            if solution is not None and solution.costs not in seen:
                seen.add(solution.costs)
                yield variant, solution

    def ways_of_solution(
        self,
        shape: MeshShape,
        mesh: Mesh,
        microbatches: int,
        solution: ChainSolution,
        segments: tuple[int, int],
        variant: Variant,
    ) -> Iterator[Way]:
        """The ways of a shape for a run of segments, from its solution on the inner axes."""
        prices = Prices(self.sites.cluster, mesh, self.options.optimizer)
        dp = dict(shape).get(DATA_AXIS, 1)
        base = self._numbers(solution.costs, microbatches * dp, segments)
        if dp > 1:
            base = self._with_sample_sums(base, prices, mesh.axes.index(DATA_AXIS), microbatches, segments[0])
        parameters = self.stored(solution.parameters, inner_mesh(mesh), dp, segments)
        for way in ways_of_shape(shape, base, parameters, self._data_prices(mesh, prices, parameters)):
            if not self._pins_dp or way.sharded or dp == 1:
                yield replace(way, variant=variant)

    def _whole(self, shape: MeshShape, mesh: Mesh, microbatches: int) -> Iterator[Way]:
        everything = (0, len(self.chain.segments))
        prices = Prices(self.sites.cluster, mesh, self.options.optimizer)
        alone = DataParallelPrices(1, {}, {}, {}, 0.0, self._stages_sum(prices))
        for variant, solution in self._different(self.problem(mesh, microbatches, everything), self.variants):
            base = self._numbers(solution.costs, microbatches, everything)
            for way in ways_of_shape(shape, base, self.stored(solution.parameters, mesh, 1, everything), alone):
                yield replace(way, variant=variant)

    def _numbers(self, costs: Sequence[SegmentCost], parts: int, segments: tuple[int, int]) -> list[Numbers]:
        return [
            Numbers(
                cost.forward_s,
                cost.backward_s,
                cost.once_s + cost.optimizer_s,
                cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes,
                cost.saved_bytes,
                cost.transient_bytes,
                sum(self._part_bytes(value, parts) for value in segment.inputs),
            )
            for cost, segment in zip(costs, self.chain.segments[slice(*segments)], strict=True)
        ]

    def _part_bytes(self, value: Value, parts: int) -> float:
        """Bytes of a value's share where samples are cut into `parts`."""
        type_ = result_types(self.nodes[value.node])[value.index]
        strategy = (self.samples or {}).get(value.node)
        split = strategy is not None and strategy.results[value.index].is_sharded
        return type_.nbytes / parts if split else type_.nbytes

    def stored(
        self, layouts: Mapping[str, Layout], mesh: Mesh, dp: int, segments: tuple[int, int]
    ) -> tuple[Stored, ...]:
        """Every parameter of a run of segments as the inner axes store it; segments are counted from its first."""
        found = []
        for node, everywhere in self._users.items():
            users = tuple(number - segments[0] for number in everywhere if segments[0] <= number < segments[1])
            if not users:
                continue
            parameter = self.program.parameters[node]
            layout = layouts[parameter.name]
            held = parameter_memory(
                parameter.type, layout, mesh.sizes, self.options.optimizer, trainable=parameter.trainable
            )
            factor = held.total_bytes / held.parameter_bytes if held.parameter_bytes else 1.0
            cut = self.data_cut(node, layout, mesh, dp)
            found.append(
                Stored(parameter.name, held.parameter_bytes, factor, parameter.trainable, users, cut is not None)
            )
        return tuple(found)

    def data_cut(self, node: str, layout: Layout, mesh: Mesh, dp: int) -> int | None:
        """The dim that dp shards of a parameter: the pinned one, else the first that it divides and nothing cuts."""
        shape = self.program.parameters[node].type.shape
        if node in self._pinned_on_dp:
            return self._pinned_on_dp[node]
        taken = {placement.dim for placement in layout}
        free = (dim for dim, size in enumerate(shape) if dim not in taken and size % dp == 0 and size)
        return next(free, None) if not self._pins_dp else None

    @cached_property
    def _pins_dp(self) -> bool:
        return any(pin.axis == DATA_AXIS for pin in self.pins)

    @cached_property
    def _pinned_on_dp(self) -> dict[str, int | None]:
        """Dim of each parameter whose placement on dp is pinned; None: whole."""
        found: dict[str, int | None] = {}
        for pin in self.pins:
            if pin.axis == DATA_AXIS:
                for node, parameter in self.program.parameters.items():
                    if any(fnmatchcase(name, pin.pattern) for name in (parameter.name, *parameter.aliases)):
                        found[node] = pin.placement.dim
        return found

    @cached_property
    def _users(self) -> dict[str, tuple[int, ...]]:
        """Parameter -> numbers of the segments that use it."""
        users: dict[str, list[int]] = {}
        for number, segment in enumerate(self.chain.segments):
            for node in segment.parameters:
                if node in self.program.parameters:
                    users.setdefault(node, []).append(number)
        return {node: tuple(numbers) for node, numbers in users.items()}

    # ---------------------------------------------------------------- what dp costs

    def _data_prices(self, mesh: Mesh, prices: Prices, parameters: Sequence[Stored]) -> DataParallelPrices:
        ranks = dict(zip(mesh.axes, mesh.sizes, strict=True)).get(DATA_AXIS, 1)
        sizes = {parameter.bytes for parameter in parameters} if ranks > 1 else set()

        def table(name: str) -> dict[float, float]:
            place = mesh.axes.index(DATA_AXIS) if ranks > 1 else 0
            return {size: prices.collective_s(name, place, size) for size in sizes}

        return DataParallelPrices(
            ranks,
            table("all_reduce"),
            table("all_gather"),
            table("reduce_scatter"),
            prices.optimizer_s(1.0),
            self._stages_sum(prices),
        )

    def _stages_sum(self, prices: Prices) -> float:
        """Seconds a byte of adding up a gradient that two stages hold: there and back over the slowest link."""
        cluster = self.sites.cluster
        link = cluster.link(0, cluster.size - 1) if cluster.size > 1 else None
        return 2 / link.reached() if link is not None else 0.0

    def _with_sample_sums(
        self, base: list[Numbers], prices: Prices, axis: int, microbatches: int, first: int
    ) -> list[Numbers]:
        """Adds the conversions on dp that samples need whatever the layouts: token counts, the loss."""
        changed = list(base)
        for found in self._sample_sums:
            number = found.segment - first
            if 0 <= number < len(changed):
                size = found.bytes / microbatches if found.is_split else found.bytes
                took_s = prices.collective_s(found.collective, axis, size)
                changed[number] = replace(changed[number], forward_s=changed[number].forward_s + took_s)
        return changed

    @cached_property
    def _sample_sums(self) -> tuple[SampleSum, ...]:
        samples, found = self.samples or {}, {}
        for number, segment in enumerate(self.chain.segments):
            for name in segment.nodes:
                for slot, value in enumerate(operand_values(self.nodes[name])):
                    if value.node in self.program.parameters or value.node not in samples or name not in samples:
                        continue
                    made, wanted = samples[value.node].results[value.index], samples[name].operands[slot]
                    if made != wanted:
                        found[value, wanted] = self._sample_sum(number, value, made, wanted)
        loss, last = samples.get(self.program.loss), len(self.chain.segments) - 1
        if loss is not None and loss.results[0] != I:
            value = Value(self.program.loss)
            found[value, I] = self._sample_sum(last, value, loss.results[0], I)
        return tuple(sample for sample in found.values() if sample.collective in _MOVING)

    def _sample_sum(self, segment: int, value: Value, made: Placement, wanted: Placement) -> SampleSum:
        size = float(result_types(self.nodes[value.node])[value.index].nbytes)
        return SampleSum(segment, conversion(made, wanted).forward, size, made.is_sharded)

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """Nodes of the program by name."""
        return {node.name: node for node in self.program.graph.nodes}


def _matches_only(pin: Pin, parameters: set[str]) -> bool:
    return any(fnmatchcase(name, pin.pattern) for name in parameters)
