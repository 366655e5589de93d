"""A plan that a user hands in, priced again: what it decides leaves the intra-operator pass nothing to choose.

Every operator and parameter of a stage gets the one strategy that the plan names; conversions, bytes and times then
follow as for a plan that was searched.
"""

from dataclasses import dataclass, replace

from autoshard.cluster import Cluster
from autoshard.cost.memory import saved_values
from autoshard.cost.prices import Prices
from autoshard.errors import InfeasiblePlan
from autoshard.passes.inter_predict import boundary_transfers_s, predicted
from autoshard.passes.inter_setting import fingerprints
from autoshard.passes.inter_sites import Sites
from autoshard.passes.intra_bill import Terms
from autoshard.passes.intra_graph import ChoiceGraph, Node, Strategy
from autoshard.passes.intra_op import ChainProblem, ChainSolution, assemble
from autoshard.passes.intra_read import Reading, explain
from autoshard.passes.intra_solve import OutOfMemory, Solver
from autoshard.passes.intra_tables import TableMaker
from autoshard.passes.segment import Chain
from autoshard.plan import Plan, StagePlan, StagePrediction
from autoshard.plan import Solver as Quality
from autoshard.plan_check import PlanCheck
from autoshard.program import Program
from autoshard.schedule import in_flight

TIME_LIMIT_S = 60.0


def given_plan(plan: Plan, program: Program, chain: Chain, cluster: Cluster) -> Plan:
    """The plan, checked and priced for this program on this cluster.

    Raises BadPlan where it cannot be carried out, InfeasiblePlan where it does not fit in the cluster's memory.
    """
    check = PlanCheck(plan, program, chain, cluster)
    check.run()
    stages = tuple(_priced(check, number) for number in range(len(plan.stages)))
    types = {
        str(value): check.setting.part_type(value, plan.microbatches)
        for stage in stages
        for value in check.setting.leaving(*stage.segments)
    }
    transfers_s = boundary_transfers_s(stages, Sites(cluster, None), types, plan.optimizer)
    used = {device for stage in stages for device in stage.mesh.devices}
    return replace(
        plan,
        stages=stages,
        predicted=predicted(stages, plan.microbatches, plan.schedule, transfers_s),
        baselines=plan.baselines if plan.fingerprints.get("cluster") == cluster.fingerprint else (),
        solver=Quality(0.0, 0.0, "given"),
        idle_devices=tuple(device for device in range(cluster.size) if device not in used),
        fingerprints=fingerprints(program, cluster),
        cluster=str(cluster),
    )


def _priced(check: PlanCheck, number: int) -> StagePlan:
    plan, stage = check.plan, check.plan.stages[number]
    held = in_flight(plan.schedule, len(plan.stages), plan.microbatches, number)
    solution = _Fixed(check, stage, held).solution(f"stage {number} of {len(plan.stages)} on {stage.mesh}")
    costs = solution.costs
    kept = {
        "parameter_bytes": sum(cost.parameter_bytes for cost in costs),
        "gradient_bytes": sum(cost.gradient_bytes for cost in costs),
        "optimizer_bytes": sum(cost.optimizer_bytes for cost in costs),
    }
    saved = sum(cost.saved_bytes for cost in costs)
    prediction = StagePrediction(
        forward_s=sum(cost.forward_s for cost in costs),
        backward_s=sum(cost.backward_s for cost in costs),
        compute_s=sum(cost.compute_s for cost in costs),
        collectives_s=sum(cost.collectives_s for cost in costs),
        once_s=sum(cost.once_s for cost in costs),
        optimizer_s=sum(cost.optimizer_s for cost in costs),
        saved_bytes_per_microbatch=saved,
        in_flight=held,
        transient_bytes=max(0, solution.memory_bytes - sum(kept.values()) - held * saved),
        peak_memory_bytes=solution.memory_bytes,
        **kept,
    )
    return replace(stage, predicted=prediction)


@dataclass(frozen=True)
class _Fixed:
    """One stage as an intra-operator problem without choices. held: microbatches in flight."""

    check: PlanCheck
    stage: StagePlan
    held: int

    def solution(self, where: str) -> ChainSolution:
        check, stage = self.check, self.stage
        problem = self._problem()
        assembly = assemble(problem)
        graph = self._decided(assembly.build(), assembly.maker.prices)
        maker = TableMaker(assembly.maker.prices)
        terms = Terms(check.plan.microbatches, self.held, problem.memory_limit_bytes)
        remat = tuple(group.path in stage.remat for group in graph.groups)
        tables = [maker.table(graph, wire) for wire in graph.wires]
        try:
            solved = Solver(graph, tables, terms, remat, TIME_LIMIT_S).solve()
        except OutOfMemory as short:
            error = explain(assembly, graph, terms, short)
            raise InfeasiblePlan(error.what, where=f"{where}; {error.where}", help=error.help) from None
        return Reading(assembly, graph, solved).solution()

    def _problem(self) -> ChainProblem:
        check, stage = self.check, self.stage
        return ChainProblem(
            program=check.program,
            chain=check.chain,
            segments=stage.segments,
            cluster=check.cluster,
            mesh=stage.mesh,
            microbatches=check.plan.microbatches,
            optimizer=check.plan.optimizer,
            memory_limit_bytes=min(check.cluster.memory_bytes(device) for device in stage.mesh.devices),
            in_flight=self.held,
            receives={value: stage.receives[str(value)] for value in check.setting.entering(*stage.segments)},
            sends={value: stage.sends[str(value)] for value in check.setting.leaving(*stage.segments)},
            samples=check.setting.samples or {},
            fold=False,
        )

    def _decided(self, graph: ChoiceGraph, prices: Prices) -> ChoiceGraph:
        nodes = tuple(
            replace(node, strategies=(self._operator(node.name, prices),))
            if node.kind == "operator"
            else replace(node, strategies=self._stored(node))
            if node.kind == "parameter"
            else node
            for node in graph.nodes
        )
        return replace(graph, nodes=nodes)

    def _stored(self, node: Node) -> tuple[Strategy, ...]:
        """The strategy of a parameter in the plan's layout."""
        layout = self.stage.parameters[self.check.program.parameters[node.name].name]
        kept = tuple(strategy for strategy in node.strategies if strategy.results[0] == layout)
        if not kept:
            raise InfeasiblePlan(
                f"{self.check.program.parameters[node.name].name} cannot be stored as the plan says",
                help="a dim must be as large as the axes that cut it, and no rank may be left without a part",
            )
        return kept

    def _operator(self, name: str, prices: Prices) -> Strategy:
        planned = self.stage.operators[name]
        local = self.check.local(name, self.stage, name)
        price = prices.operator(local, planned.implementations)
        inside = price.communication_backward_s
        return Strategy(
            planned.operands,
            planned.results,
            planned.implementations,
            price.forward_s + price.communication_s - inside,
            price.backward_s + inside,
            price.communication_s,
            kept_bytes=saved_values(local).extra_bytes,
            transient_bytes=sum(type_.nbytes for type_ in (*local.operands, *local.results) if type_.needs_grad),
        )
