"""Small random layout graphs and made-up prices for the tests of the intra-operator program."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from autoshard.cost.convert import ConversionTables
from autoshard.passes.intra_bill import Terms, bill
from autoshard.passes.intra_graph import ChoiceGraph, Group, Node, Strategy, Use, Wire
from autoshard.passes.intra_tables import Table, TableMaker
from autoshard.placement import I, Layout, P, R, S, conversion, local_shape
from autoshard.program import TensorType, Value

PLACEMENTS = (I, R, P, S(0), S(1))
SECONDS = {
    "none": 0.0,
    "slice": 0.0,
    "pad": 0.0,
    "mask": 0.0,
    "all_to_all": 1.0,
    "all_gather": 2.0,
    "reduce_scatter": 2.1,
    "all_reduce": 4.1,
}


@dataclass(frozen=True)
class AxisPrices:
    """Each axis is converted by itself, inner axes first, at a latency and a price a byte."""

    axis_sizes: tuple[int, ...]
    latency_s: float = 0.01
    per_byte_s: float = 1e-3

    def conversion_tables(
        self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> ConversionTables:
        rows = np.zeros((3, len(sources), len(targets)))
        for q, source in enumerate(sources):
            for p, target in enumerate(targets):
                rows[:, q, p] = self._pair(type, source, target)
        return ConversionTables(rows[0], rows[1], rows[2])

    def _pair(self, type: TensorType, source: Layout, target: Layout) -> tuple[float, float, float]:
        forward = backward = transient = 0.0
        for axis, (here, there) in enumerate(zip(source, target, strict=True)):
            does = conversion(here, there)
            shape: tuple[int, ...] = local_shape(
                type.shape, tuple(I if a == axis else source[a] for a in range(len(source))), self.axis_sizes
            )
            size = float(np.prod(shape)) * 4
            forward += SECONDS[does.forward] * (self.per_byte_s * size + self.latency_s)
            backward += SECONDS[does.backward] * (self.per_byte_s * size + self.latency_s) * type.needs_grad
            transient = max(transient, size if here != there else 0.0)
        return forward, backward, transient


def tables_of(graph: ChoiceGraph) -> list[Table]:
    maker = TableMaker(AxisPrices(graph.axis_sizes))
    return [maker.table(graph, wire) for wire in graph.wires]


def brute_force(graph: ChoiceGraph, tables: Sequence[Table], terms: Terms, remat: Sequence[bool | None]) -> float:
    """The least objective of all choices that fit; infinity where none does."""
    best = float("inf")
    flags = list(itertools.product(*[(False, True) if flag is None else (flag,) for flag in remat]))
    for choice in itertools.product(*[range(len(node.strategies)) for node in graph.nodes]):
        cost = bill(graph, tables, choice)
        for flag in flags:
            if terms.limit_bytes is None or cost.memory_bytes(flag, terms.in_flight) <= terms.limit_bytes:
                best = min(best, cost.objective(flag, terms))
    return best


def random_graph(seed: int, axis_sizes: tuple[int, ...], operators: int = 4, choices: int = 3) -> ChoiceGraph:
    """A parameter and an input, then operators that read one or two earlier values; two groups, the second repeated."""
    random_ = random.Random(seed)
    layouts = list(itertools.product(PLACEMENTS, repeat=len(axis_sizes)))
    kept = [layout for layout in layouts if all(placement in (I, S(0), S(1)) for placement in layout)]

    def strategy(operands: int, stored: bool) -> Strategy:
        result = random_.choice(kept if stored else layouts)
        made = Strategy(tuple(random_.choice(layouts) for _ in range(operands)), (result,), (None,) * len(axis_sizes))
        if stored:
            size = int(np.prod(local_shape((12, 12), result, axis_sizes))) * 4
            return replace(
                made, parameter_bytes=size, gradient_bytes=size, optimizer_bytes=2 * size, optimizer_s=size * 1e-4
            )
        return replace(
            made, forward_s=random_.random(), backward_s=2 * random_.random(), transient_bytes=random_.randrange(500)
        )

    type_ = TensorType((12, 12), torch.float32, True)
    nodes = [
        Node("weight", "parameter", 0, tuple(strategy(0, True) for _ in range(choices))),
        Node("input", "input", 0, tuple(strategy(0, False) for _ in range(2))),
    ]
    uses: dict[int, list[Use]] = {0: [], 1: []}
    for number in range(2, operators + 2):
        group = int(number >= 2 + operators // 2)
        count = 3 if group else 1
        reads = random_.sample(range(number), min(number, random_.choice((1, 2, 2))))
        for slot, source in enumerate(reads):
            inner = nodes[source].group == group
            uses[source].append(Use(number, slot, count if inner else 1, "inner" if inner else "outer"))
        saved = tuple(slot for slot in range(len(reads)) if random_.random() < 0.5)
        options = tuple(strategy(len(reads), False) for _ in range(choices))
        nodes.append(
            Node(f"op{number}", "operator", group, options, count, saved, (0,) if random_.random() < 0.3 else ())
        )
        uses[number] = []
    wires = tuple(
        Wire(Value(nodes[number].name), type_, number, 0, tuple(readers), stored=number == 0, counted=number != 0)
        for number, readers in uses.items()
        if readers
    )
    boundary = tuple(
        (w, 1)
        for w, wire in enumerate(wires)
        if wire.counted and any(use.share == "outer" for use in wire.uses) and nodes[wire.producer].group == 0
    )
    return ChoiceGraph(tuple(nodes), wires, (Group(0, 1, "a"), Group(1, 3, "b", boundary)), axis_sizes)
