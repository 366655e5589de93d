"""A plan that a user hands in, saved or edited: whether it can be carried out for this program on this cluster.

Checked are, in order: fingerprints of the model and of its inputs; devices; segments, every one in one stage;
microbatches; the layouts in which parameters are stored; the values that cross between stages; and of every operator
that its layouts are one of its strategies, axis by axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from autoshard.cluster import Cluster
from autoshard.errors import BadPlan
from autoshard.passes.inter_setting import Setting, batch_size, fingerprints
from autoshard.passes.inter_sites import Sites
from autoshard.passes.microbatch import CoupledSamples, sample_placements
from autoshard.passes.segment import Chain
from autoshard.placement import I, Layout, Placement, R, format_layout
from autoshard.plan import OperatorPlan, Plan, StagePlan
from autoshard.program import Operator, Program, TensorType, operand_values, operator_of, place
from autoshard.rules import AxisStrategy, axis_strategies, local_operator


def check_fingerprints(plan: Plan, program: Program, where: str = "the plan") -> None:
    """Raise BadPlan unless the plan was made for this program, with inputs of these shapes."""
    found = fingerprints(program, Cluster(()))
    for key, what in (("model", "the model"), ("workload", "the shapes of the inputs")):
        if plan.fingerprints.get(key) != found[key]:
            other = plan.fingerprints.get("torch")
            since = f" (by torch {other}; this is {found['torch']})" if other != found["torch"] else ""
            raise BadPlan(
                f"{what} of {program.source or 'the workload'} changed since the plan was made{since}",
                where=where,
                help="plan it again",
            )


@dataclass(frozen=True)
class PlanCheck:
    """Checks one plan. Each method raises BadPlan that names the place in the plan and the user's line."""

    plan: Plan
    program: Program
    chain: Chain
    cluster: Cluster

    def run(self) -> None:
        """All checks."""
        check_fingerprints(self.plan, self.program)
        self.devices()
        self.segments()
        self.microbatches()
        for number, stage in enumerate(self.plan.stages):
            where = f"stages[{number}]"
            self.parameters(stage, where)
            self.crossings(stage, where)
            self.operators(stage, where)

    @cached_property
    def setting(self) -> Setting:
        """The program as the inter-operator pass sees it."""
        try:
            samples = sample_placements(self.program)
        except CoupledSamples as error:
            if self.plan.microbatches > 1:
                raise BadPlan(
                    f"the plan has {self.plan.microbatches} microbatches, but {error.what}",
                    where=error.where,
                    help=error.help,
                ) from error
            samples = None
        counts = (self.plan.microbatches,)
        sites = Sites(self.cluster, None)
        return Setting(
            self.program, self.chain, sites, samples, batch_size(self.program), counts, frozenset(), (), float("inf")
        )

    @cached_property
    def nodes(self) -> Mapping[str, fx.Node]:
        """Nodes of the program by name."""
        return {node.name: node for node in self.program.graph.nodes}

    def names(self, stage: StagePlan) -> tuple[str, ...]:
        """The operators of a stage, in order."""
        return tuple(name for segment in self.chain.segments[slice(*stage.segments)] for name in segment.nodes)

    def devices(self) -> None:
        """Every device is the cluster's, and in one stage."""
        taken: set[int] = set()
        for number, stage in enumerate(self.plan.stages):
            for device in stage.mesh.devices:
                where = f"stages[{number}].devices"
                if device >= self.cluster.size:
                    raise BadPlan(
                        f"the plan uses device {device}; the cluster {self.cluster} has {self.cluster.size}",
                        where=where,
                    )
                if device in taken:
                    raise BadPlan(f"device {device} is in an earlier stage too", where=where)
                taken.add(device)

    def segments(self) -> None:
        """The stages take all segments in order."""
        end, count = 0, len(self.chain.segments)
        for number, stage in enumerate(self.plan.stages):
            if stage.segments[0] != end:
                raise BadPlan(
                    f"the stage begins with segment {stage.segments[0]}, after {end} segments in earlier stages",
                    where=f"stages[{number}].segments",
                )
            end = stage.segments[1]
        if end != count:
            raise BadPlan(f"the stages have {end} segments, the model {count}", where="stages[-1].segments")

    def microbatches(self) -> None:
        """They divide the batch, with every stage's dp."""
        batch, count = self.setting.batch, self.plan.microbatches
        for number, stage in enumerate(self.plan.stages):
            dp = dict(zip(stage.mesh.axes, stage.mesh.sizes, strict=True)).get("dp", 1)
            if batch % (count * dp):
                raise BadPlan(
                    f"a batch of {batch} cannot be divided by {count} microbatches x dp={dp}",
                    where=f"microbatches, stages[{number}].mesh",
                )
        if (self.plan.schedule == "none") != (count == 1 and len(self.plan.stages) == 1):
            raise BadPlan(
                f"schedule is {self.plan.schedule} for {len(self.plan.stages)} stages and {count} microbatches",
                where="schedule",
                help='write "none" for one stage and one microbatch, else "1f1b" or "gpipe"',
            )

    def parameters(self, stage: StagePlan, where: str) -> None:
        """Each parameter that the stage reads is stored, I or S(dim)."""
        known = {given.name: given for given in self.program.parameters.values()}
        read = {value.node for name in self.names(stage) for value in operand_values(self.nodes[name])}
        needed = {given.name for node, given in self.program.parameters.items() if node in read}
        for name in sorted(needed - stage.parameters.keys()):
            raise BadPlan(f"the stage reads parameter {name}, and no layout says how", where=f"{where}.layouts")
        for name, layout in stage.parameters.items():
            if name not in known:
                raise BadPlan(f"the model has no parameter {name}", where=f"{where}.layouts")
            _check_stored(known[name].type, layout, stage, f"{where}.layouts.{name}")

    def crossings(self, stage: StagePlan, where: str) -> None:
        """Each value that enters or leaves has a layout of I and S."""
        for field, given, values in (
            ("receives", stage.receives, self.setting.entering(*stage.segments)),
            ("sends", stage.sends, self.setting.leaving(*stage.segments)),
        ):
            for value in values:
                if str(value) not in given:
                    raise BadPlan(f"{value} crosses here, and no layout says how", where=f"{where}.{field}")
                type_ = self.setting.part_type(value, self.plan.microbatches)
                _check_stored(type_, given[str(value)], stage, f"{where}.{field}.{value}")

    def operators(self, stage: StagePlan, where: str) -> None:
        """Each operator's layouts are among its strategies."""
        for name in self.names(stage):
            if name not in stage.operators:
                raise BadPlan(f"the stage runs {name}, and no layouts say how", where=f"{where}.operators")
            self.local(name, stage, f"{where}.operators.{name}")

    def local(self, name: str, stage: StagePlan, where: str) -> Operator:
        """The operator of one microbatch as one rank runs it."""
        planned, local = stage.operators[name], self.microbatch_operator(name)
        counts = (len(planned.operands), len(planned.results))
        if counts != (len(local.operands), len(local.results)):
            raise BadPlan(
                f"{local.name} has {len(local.operands)} operands and {len(local.results)} results; the plan gives "
                f"layouts for {counts[0]} and {counts[1]}",
                where=where,
            )
        for axis, ranks in enumerate(stage.mesh.sizes):
            wanted = axis_strategy(planned, axis)
            if ranks == 1:
                continue
            ways = axis_strategies(local, ranks)
            if _alike(wanted, local) not in {_alike(way, local) for way in ways}:
                raise BadPlan(
                    f"{local.name} cannot run as {_shown(wanted)} on {stage.mesh.axes[axis]}={ranks}",
                    where=f"{where}; {place(self.nodes[name])}",
                    help=f"it can run as {', or '.join(dict.fromkeys(_shown(way) for way in ways))}",
                )
            local = local_operator(local, *_columns(wanted), (ranks,))
        return local

    def microbatch_operator(self, name: str) -> Operator:
        """The operator of one microbatch, whole."""
        op, strategy = operator_of(self.nodes[name]), (self.setting.samples or {}).get(name)
        if strategy is None or self.plan.microbatches == 1:
            return op
        return local_operator(op, *_columns(strategy), (self.plan.microbatches,))


def axis_strategy(planned: OperatorPlan, axis: int) -> AxisStrategy:
    """What a plan says of one axis."""
    return AxisStrategy(
        tuple(layout[axis] for layout in planned.operands),
        tuple(layout[axis] for layout in planned.results),
        planned.implementations[axis],
    )


def _columns(strategy: AxisStrategy) -> tuple[list[Layout], list[Layout]]:
    return [(p,) for p in strategy.operands], [(p,) for p in strategy.results]


def _alike(strategy: AxisStrategy, op: Operator) -> AxisStrategy:
    """The strategy with I for R where no gradient flows: there the two are one."""

    def same(placements: Sequence[Placement], types: Sequence[TensorType]) -> tuple[Placement, ...]:
        return tuple(I if p == R and not type_.needs_grad else p for p, type_ in zip(placements, types, strict=True))

    return AxisStrategy(
        same(strategy.operands, op.operands), same(strategy.results, op.results), strategy.implementation
    )


def _shown(strategy: AxisStrategy) -> str:
    operands, results = (", ".join(map(str, side)) for side in (strategy.operands, strategy.results))
    return f"({operands} -> {results})" + (f" by {strategy.implementation}" if strategy.implementation else "")


def _check_stored(type_: TensorType, layout: Layout, stage: StagePlan, where: str) -> None:
    for placement in layout:
        if placement.kind not in "IS" or (placement.dim is not None and placement.dim >= len(type_.shape)):
            raise BadPlan(
                f"a tensor of shape {list(type_.shape)} cannot be kept as {format_layout(layout, stage.mesh.axes)}",
                where=where,
                help="write I or S(dim) for each axis, dim below the number of dims",
            )
