"""From the solver's choice back to the program's words: operator plans, stored layouts, costs of every segment."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.errors import InfeasiblePlan
from autoshard.passes.intra_assembly import Assembly
from autoshard.passes.intra_bill import Terms
from autoshard.passes.intra_graph import ChoiceGraph, Strategy, yielded
from autoshard.passes.intra_solve import OutOfMemory, Solved
from autoshard.passes.intra_tables import local_bytes
from autoshard.placement import Layout
from autoshard.plan import OperatorPlan
from autoshard.program import Value, operand_values


@dataclass(frozen=True)
class SegmentCost:
    """One segment of the range. Seconds of one microbatch unless said; bytes on the fullest device.

    forward_s, backward_s: everything, remat and gathers included. compute_s: operators of both; collectives_s: the
    rest of both. once_s: gradient sums once a step. optimizer_s: once a step. saved_bytes: kept from forward to
    backward of one microbatch. transient_bytes: beside all that is kept, while the segment runs.
    """

    forward_s: float
    backward_s: float
    compute_s: float
    collectives_s: float
    once_s: float
    optimizer_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes: int
    transient_bytes: int


@dataclass(frozen=True)
class ChainSolution:
    """The cheapest way found.

    operators: every operator of the range. parameters: the user's name -> stored layout. receives, sends: values that
    enter from earlier segments or leave for later ones. crossing: for each segment, layouts of the values that enter it
    (for equal blocks: the layout in which they hand them on; an earlier value is converted to it before the first).
    costs: for each segment. remat: module paths whose forward runs again. memory_bytes: at the peak.
    objective: seconds of a step, microbatches one after the other, and the price of bytes. bound: nothing is cheaper.
    gap: (objective - bound) / objective. columns, rows: size of the program.
    """

    operators: Mapping[str, OperatorPlan]
    parameters: Mapping[str, Layout]
    receives: Mapping[Value, Layout]
    sends: Mapping[Value, Layout]
    crossing: tuple[Mapping[Value, Layout], ...]
    costs: tuple[SegmentCost, ...]
    remat: tuple[str, ...]
    remat_segments: tuple[int, ...]
    memory_bytes: int
    objective: float
    bound: float
    gap: float
    time_s: float
    columns: int
    rows: int
    status: str

    def __str__(self) -> str:
        lines = [
            f"step {self.objective:.6g} s, gap {self.gap:.1e} ({self.status}),"
            f" {self.columns} columns, {self.rows} rows, {self.time_s:.2f} s; {self.memory_bytes / 2**30:.2f} GiB"
        ]
        lines += [f"  {name}: {' '.join(map(str, layout))}" for name, layout in self.parameters.items()]
        for name, plan in self.operators.items():
            show = [" ".join(map(str, layout)) for layout in (*plan.operands, *plan.results)]
            lines.append(
                f"  {name}({', '.join(show[: len(plan.operands)])}) -> {', '.join(show[len(plan.operands) :])}"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Reading:
    """Reads one solved graph back."""

    assembly: Assembly
    graph: ChoiceGraph
    solved: Solved

    @cached_property
    def _chosen(self) -> dict[str, Strategy]:
        pairs = zip(self.graph.nodes, self.solved.choice, strict=True)
        return {node.name: node.strategies[choice] for node, choice in pairs}

    def solution(self) -> ChainSolution:
        """Everything, for every segment of every run."""
        remat_segments = tuple(
            number
            for run, again in zip(self.assembly.runs, self.solved.remat, strict=True)
            if again
            for number in range(run.first, run.first + run.count)
        )
        solved = self.solved
        return ChainSolution(
            self._operators(), self._parameters(), self._of_kind("receive"), self._of_kind("send"), self._crossings(),
            self._costs(), tuple(self.assembly.segments[number].path for number in remat_segments), remat_segments,
            int(solved.bill.memory_bytes(solved.remat, solved.in_flight)), solved.objective, solved.bound, solved.gap,
            solved.time_s, solved.columns, solved.lines, solved.status,
        )  # fmt: skip

    def _blocks(self) -> list[tuple[str, str]]:
        """(operator of any block, operator of the first block that stands for it)."""
        segments = self.assembly.segments
        return [
            (name, standing)
            for run in self.assembly.runs
            for block in range(run.count)
            for name, standing in zip(segments[run.first + block].nodes, segments[run.first].nodes, strict=True)
        ]

    def _operators(self) -> dict[str, OperatorPlan]:
        plans = {}
        for name, standing in self._blocks():
            strategy = self._chosen[standing]
            plans[name] = OperatorPlan(strategy.operands, strategy.results, strategy.implementations)
        return plans

    def _parameters(self) -> dict[str, Layout]:
        """Parameters of the first blocks, and of the others at the same places."""
        program, nodes = self.assembly.program, self.assembly.fx_nodes
        layouts: dict[str, Layout] = {}
        for name, standing in self._blocks():
            pairs = zip(operand_values(nodes[name]), operand_values(nodes[standing]), strict=True)
            for mine, theirs in pairs:
                if mine.node in program.parameters:
                    layouts.setdefault(program.parameters[mine.node].name, self._chosen[str(theirs)].results[0])
        return layouts

    def _of_kind(self, kind: str) -> dict[Value, Layout]:
        found: dict[Value, Layout] = {}
        for wire in self.graph.wires:
            if kind == "receive" and self.graph.nodes[wire.producer].kind == "receive":
                found[wire.value] = self._made(wire.value)
            for use in wire.uses:
                node = self.graph.nodes[use.node]
                if kind == "send" and node.kind == "send":
                    found[self.assembly.last(wire.value)] = self._chosen[node.name].operands[0]
        return found

    @cached_property
    def _wire_of(self) -> dict[Value, int]:
        return {wire.value: number for number, wire in enumerate(self.graph.wires)}

    def _made(self, value: Value) -> Layout:
        wire = self.graph.wires[self._wire_of[value]]
        return yielded(self.graph, wire)[self.solved.choice[wire.producer]]

    def _crossings(self) -> tuple[dict[Value, Layout], ...]:
        """Of each segment: values that earlier segments made and it reads, in the layout in which they enter."""
        found = []
        for run in self.assembly.runs:
            for block in range(run.count):
                entering: dict[Value, Layout] = {}
                segment = self.assembly.segments[run.first + block]
                inside = set(segment.nodes)
                for position, name in enumerate(segment.nodes):
                    for slot, value in enumerate(operand_values(self.assembly.fx_nodes[name])):
                        if value.node not in inside and not self.assembly.is_placeholder(value):
                            standing = run.carried.get((position, slot), self.assembly.standing(value))
                            entering.setdefault(value, self._made(standing))
                found.append(entering)
        return tuple(found)

    def _costs(self) -> tuple[SegmentCost, ...]:
        bill = self.solved.bill
        costs = []
        for group, run in enumerate(self.assembly.runs):
            again = self.solved.remat[group]
            compute = bill.operators_forward_s[group] + bill.operators_backward_s[group] - bill.inside_s[group]
            forward = bill.operators_forward_s[group] + bill.convert_forward_s[group] + bill.gather_forward_s[group]
            backward = bill.operators_backward_s[group] + bill.convert_backward_s[group] + bill.gather_backward_s[group]
            if again:
                backward += bill.recompute_s[group]
                compute += bill.operators_forward_s[group]
            kept = bill.boundary_bytes[group] if again else bill.saved_bytes[group]
            transient = bill.transient_bytes[group] + (bill.saved_bytes[group] / run.count if again else 0.0)
            cost = SegmentCost(
                forward_s=float(forward) / run.count,
                backward_s=float(backward) / run.count,
                compute_s=float(compute) / run.count,
                collectives_s=float(forward + backward - compute) / run.count,
                once_s=float(bill.once_s[group]) / run.count,
                optimizer_s=float(bill.optimizer_s[group]) / run.count,
                parameter_bytes=int(bill.parameter_bytes[group] / run.count),
                gradient_bytes=int(bill.gradient_bytes[group] / run.count),
                optimizer_bytes=int(bill.optimizer_bytes[group] / run.count),
                saved_bytes=int(kept / run.count),
                transient_bytes=int(transient),
            )
            costs += [cost] * run.count
        return tuple(costs)


def explain(assembly: Assembly, graph: ChoiceGraph, terms: Terms, short: OutOfMemory) -> InfeasiblePlan:
    """The refusal of a memory limit: bytes short, what they are, the largest tensors, what would help."""
    bill, limit = short.bill, terms.limit_bytes or 0
    kept = bill.kept_bytes(short.remat).sum()
    parts = {
        "parameters": bill.parameter_bytes.sum(),
        "gradients": bill.gradient_bytes.sum(),
        "optimizer state": bill.optimizer_bytes.sum(),
        f"activations of {terms.in_flight} microbatches": terms.in_flight * kept,
        "at work": bill.working_bytes(short.remat),
    }
    needed, segments = short.needed_bytes, f"segments {assembly.start} to {assembly.stop - 1}"
    verdict = "no plan fits" if short.proved else "no plan that fits was found"
    listed = ", ".join(f"{name} {_size(value)}" for name, value in parts.items())
    largest = ", ".join(f"{name} {_size(value)}" for name, value in _largest(graph, short.choice))
    return InfeasiblePlan(
        f"memory: {verdict}: the smallest needs {_size(needed)} per device, {_size(limit)} are there:"
        f" {_size(needed - limit)} short",
        where=f"{segments} on {format_axes(assembly)}: {listed}; largest tensors: {largest}",
        help="more devices, more microbatches, more stages, remat or an optimizer with less state would help",
    )


def format_axes(assembly: Assembly) -> str:
    """ "dp=2,tp=4"."""
    pairs = zip(assembly.around.axes, assembly.maker.axis_sizes, strict=True)
    return ",".join(f"{axis}={size}" for axis, size in pairs) or "one device"


def _largest(graph: ChoiceGraph, choice: tuple[int, ...], count: int = 3) -> list[tuple[str, float]]:
    sizes = []
    for wire in graph.wires:
        layout = yielded(graph, wire)[choice[wire.producer]]
        strategy = graph.nodes[wire.producer].strategies[choice[wire.producer]]
        held = strategy.parameter_bytes + strategy.gradient_bytes + strategy.optimizer_bytes
        sizes.append((str(wire.value), float(held or local_bytes(wire.type, layout, graph.axis_sizes))))
    return sorted(sizes, key=lambda item: (-item[1], item[0]))[:count]


def _size(value: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"
