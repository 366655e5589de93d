"""The choice graph: what the intra-operator model is built from, free of torch graphs and of prices' origin.

Nodes choose one of their strategies. Wires carry a value from the node that makes it to the operands that use it, and
convert it on the way where the two layouts differ. Groups are segments solved together: `count` equal segments are
one group whose nodes stand for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.placement import Layout
from autoshard.program import TensorType, Value

Kind = Literal["operator", "parameter", "input", "receive", "send", "output"]


@dataclass(frozen=True)
class Strategy:
    """One legal way to run a node on the whole mesh, with its price on the fullest device.

    operands, results: layouts in schema order. implementations: per axis, as in `AxisStrategy`.
    forward_s, backward_s: one microbatch; communication_s is the part of the two spent inside named implementations.
    optimizer_s: once a step. parameter, gradient, optimizer bytes: held for the whole step (parameters only).
    kept_bytes: autograd's own tensors of one microbatch that are neither operand nor result.
    transient_bytes: what the operator holds while it runs beside what is saved.
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    implementations: tuple[str | None, ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0
    communication_s: float = 0.0
    optimizer_s: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    kept_bytes: int = 0
    transient_bytes: int = 0


@dataclass(frozen=True)
class Node:
    """A thing that chooses. count: how many equal things it stands for (equal blocks, or one).

    saved_operands, saved_results: slots whose tensors autograd keeps for backward, in the layouts chosen.
    """

    name: str
    kind: Kind
    group: int
    strategies: tuple[Strategy, ...]
    count: int = 1
    saved_operands: tuple[int, ...] = ()
    saved_results: tuple[int, ...] = ()


@dataclass(frozen=True)
class Use:
    """Operand `slot` of node `node` reads a value.

    count: how often a step's microbatch converts it (equal blocks each do). share: uses of one wire with the same key
    share a conversion to the same layout. carried: the use wants the layout of *result* `slot` of `node`, because the
    value enters a loop over equal blocks in the layout in which they hand it on.
    """

    node: int
    slot: int
    count: int = 1
    share: str = ""
    carried: bool = False


@dataclass(frozen=True)
class Wire:
    """A value on its way from result `result` of node `producer` to its uses.

    type: shape of the whole tensor of one microbatch. stored: the producer is a parameter, so that I -> R sums the
    gradient once a step and gathers are run again in backward. counted: saving it takes memory of its own
    (False for parameters, buffers and constants, which are held anyway).
    """

    value: Value
    type: TensorType
    producer: int
    result: int
    uses: tuple[Use, ...]
    stored: bool = False
    counted: bool = True


@dataclass(frozen=True)
class Group:
    """`count` equal consecutive segments, the first of them `first`.

    path: module path of the first, "" where the segment is no module of its own. boundary: (wire number, copies) of the
    values that enter the group: all that remat keeps.
    """

    first: int
    count: int = 1
    path: str = ""
    boundary: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ChoiceGraph:
    """Nodes, wires and groups of one solve; axis sizes of the mesh."""

    nodes: tuple[Node, ...]
    wires: tuple[Wire, ...]
    groups: tuple[Group, ...]
    axis_sizes: tuple[int, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.nodes)} nodes, {len(self.wires)} wires, {len(self.groups)} groups"]
        for number, group in enumerate(self.groups):
            names = [f"{node.name}/{len(node.strategies)}" for node in self.nodes if node.group == number]
            lines.append(f"  {group.count} x segment {group.first} {group.path}: {' '.join(names)}")
        return "\n".join(lines)


def wanted(graph: ChoiceGraph, use: Use) -> list[Layout]:
    """The layout that each strategy of the use's node wants there, in strategy order."""
    strategies: Sequence[Strategy] = graph.nodes[use.node].strategies
    return [(strategy.results if use.carried else strategy.operands)[use.slot] for strategy in strategies]


def yielded(graph: ChoiceGraph, wire: Wire) -> list[Layout]:
    """The layout in which each strategy of the wire's producer yields it, in strategy order."""
    return [strategy.results[wire.result] for strategy in graph.nodes[wire.producer].strategies]
