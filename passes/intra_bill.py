"""What a choice of strategies costs: seconds and bytes of every group, computed from the choice alone.

Independent of the solver's transport variables: the integer program, its fallbacks and the plan read back from them
are all judged by this one sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.passes.intra_graph import ChoiceGraph, Use, Wire, wanted, yielded
from autoshard.passes.intra_tables import Floats, Table, local_bytes, storage_of
from autoshard.placement import Layout


@dataclass(frozen=True)
class Terms:
    """What weighs seconds and bytes against each other.

    microbatches: of one step. in_flight: microbatches whose saved activations are alive at the peak. limit_bytes:
    memory left for the plan, None for no limit. price_s_per_byte: seconds that a byte at the peak is worth.
    """

    microbatches: int = 1
    in_flight: int = 1
    limit_bytes: int | None = None
    price_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Bill:
    """Totals per group, over all its equal segments. forward, backward, inside: one microbatch, without remat.

    operators_*: running operators, inside_s of it in their own communication. convert_*: activations' conversions.
    gather_*: parameters' conversions of each microbatch. once_s, optimizer_s: once a step.
    saved_bytes: kept by autograd for one microbatch. boundary_bytes: what remat keeps of that.
    """

    operators_forward_s: Floats
    operators_backward_s: Floats
    inside_s: Floats
    convert_forward_s: Floats
    convert_backward_s: Floats
    gather_forward_s: Floats
    gather_backward_s: Floats
    once_s: Floats
    optimizer_s: Floats
    parameter_bytes: Floats
    gradient_bytes: Floats
    optimizer_bytes: Floats
    saved_bytes: Floats
    boundary_bytes: Floats
    transient_bytes: Floats
    counts: Floats = field(repr=False)

    @property
    def recompute_s(self) -> Floats:
        """Seconds that running a group's forward again adds to a microbatch; parameters are gathered again anyway."""
        return self.operators_forward_s + self.convert_forward_s

    def kept_bytes(self, remat: Sequence[bool]) -> Floats:
        """Bytes that a group keeps from forward to backward of one microbatch."""
        return np.where(np.array(remat, dtype=bool), self.boundary_bytes, self.saved_bytes)

    def working_bytes(self, remat: Sequence[bool]) -> float:
        """Bytes beside everything kept: the largest transient, and the largest segment that is being run again."""
        again = np.where(np.array(remat, dtype=bool), self.saved_bytes / self.counts, 0.0)
        return float(self.transient_bytes.max(initial=0.0) + again.max(initial=0.0))

    def memory_bytes(self, remat: Sequence[bool], in_flight: int) -> float:
        """Bytes at the peak."""
        held = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return float(held.sum() + in_flight * self.kept_bytes(remat).sum() + self.working_bytes(remat))

    def step_s(self, remat: Sequence[bool], microbatches: int) -> float:
        """Seconds of a step's microbatches one after the other, gradient sums and the optimizer."""
        each = (
            self.operators_forward_s
            + self.operators_backward_s
            + self.convert_forward_s
            + self.convert_backward_s
            + self.gather_forward_s
            + self.gather_backward_s
            + np.where(np.array(remat, dtype=bool), self.recompute_s, 0.0)
        )
        return float(microbatches * each.sum() + self.once_s.sum() + self.optimizer_s.sum())

    def objective(self, remat: Sequence[bool], terms: Terms) -> float:
        """What the integer program minimises."""
        memory = terms.price_s_per_byte * self.memory_bytes(remat, terms.in_flight) if terms.price_s_per_byte else 0.0
        return self.step_s(remat, terms.microbatches) + memory


def share_group(graph: ChoiceGraph, wire: Wire, use: Use) -> int:
    """The group that pays a conversion: its user's, or for a value that enters a loop of blocks, its maker's."""
    producer = graph.nodes[wire.producer]
    return producer.group if use.carried and producer.kind == "operator" else graph.nodes[use.node].group


def shares(wire: Wire) -> dict[str, list[int]]:
    """Numbers of the uses that share conversions, by share key, in order of first mention."""
    found: dict[str, list[int]] = {}
    for number, use in enumerate(wire.uses):
        found.setdefault(use.share, []).append(number)
    return found


@dataclass(frozen=True)
class Saver:
    """What keeps a wire's tensor: its producer (use None) or one of its uses; `count` copies in group `group`."""

    group: int
    count: int
    use: int | None


def savers(graph: ChoiceGraph, wire: Wire) -> dict[int, list[Saver]]:
    """Who keeps a wire's tensor for backward, by group."""
    found: dict[int, list[Saver]] = {}
    if not wire.counted:
        return found
    producer = graph.nodes[wire.producer]
    if wire.result in producer.saved_results:
        found.setdefault(producer.group, []).append(Saver(producer.group, producer.count, None))
    for number, use in enumerate(wire.uses):
        node = graph.nodes[use.node]
        if not use.carried and use.slot in node.saved_operands:
            found.setdefault(node.group, []).append(Saver(node.group, use.count, number))
    return found


def bill(graph: ChoiceGraph, tables: Sequence[Table], choice: Sequence[int]) -> Bill:
    """The bill of choosing strategy `choice[n]` for every node n."""
    zeros = {name: np.zeros(len(graph.groups)) for name in Bill.__dataclass_fields__ if name != "counts"}
    for node, chosen in zip(graph.nodes, choice, strict=True):
        strategy, group, count = node.strategies[chosen], node.group, node.count
        zeros["operators_forward_s"][group] += count * strategy.forward_s
        zeros["operators_backward_s"][group] += count * strategy.backward_s
        zeros["inside_s"][group] += count * strategy.communication_s
        zeros["optimizer_s"][group] += count * strategy.optimizer_s
        zeros["parameter_bytes"][group] += count * strategy.parameter_bytes
        zeros["gradient_bytes"][group] += count * strategy.gradient_bytes
        zeros["optimizer_bytes"][group] += count * strategy.optimizer_bytes
        zeros["saved_bytes"][group] += count * strategy.kept_bytes
        zeros["transient_bytes"][group] = max(zeros["transient_bytes"][group], strategy.transient_bytes)
    for wire, table in zip(graph.wires, tables, strict=True):
        made = yielded(graph, wire)[choice[wire.producer]]
        asked = [wanted(graph, use)[choice[use.node]] for use in wire.uses]
        _add_conversions(zeros, graph, wire, table, made, asked)
        _add_saved(zeros, graph, wire, made, asked)
    for number, entered in enumerate(graph.groups):
        for wire_number, copies in entered.boundary:
            wire = graph.wires[wire_number]
            layout = yielded(graph, wire)[choice[wire.producer]]
            zeros["boundary_bytes"][number] += copies * local_bytes(wire.type, layout, graph.axis_sizes)
    return Bill(**zeros, counts=np.array([group.count for group in graph.groups], dtype=np.float64))


def _add_conversions(
    zeros: dict[str, Floats], graph: ChoiceGraph, wire: Wire, table: Table, made: Layout, asked: Sequence[Layout]
) -> None:
    q, kind = table.sources.index(made), "gather" if wire.stored else "convert"
    for uses in shares(wire).values():
        first = wire.uses[uses[0]]
        group = share_group(graph, wire, first)
        summed: set[int] = set()
        for layout in dict.fromkeys(asked[use] for use in uses):
            p = table.targets.index(layout)
            zeros[f"{kind}_forward_s"][group] += first.count * table.forward_s[q, p]
            zeros[f"{kind}_backward_s"][group] += first.count * table.backward_s[q, p]
            zeros["transient_bytes"][group] = max(zeros["transient_bytes"][group], table.transient_bytes[q, p])
            if table.once_class[q, p] not in summed:
                summed.add(int(table.once_class[q, p]))
                zeros["once_s"][group] += first.count * table.once_s[q, p]


def _add_saved(zeros: dict[str, Floats], graph: ChoiceGraph, wire: Wire, made: Layout, asked: Sequence[Layout]) -> None:
    for group, keepers in savers(graph, wire).items():
        copies = max(keeper.count for keeper in keepers)
        kept = dict.fromkeys(storage_of(made if keeper.use is None else asked[keeper.use]) for keeper in keepers)
        for layout in kept:
            zeros["saved_bytes"][group] += copies * local_bytes(wire.type, layout, graph.axis_sizes)
