"""Program, segments and options -> choice graph: which nodes choose, which wires join them, how often each counts.

A folded run of k equal segments contributes the nodes of its first segment, each standing for k. Uses of one wire are
told apart by how often they happen: inside a block k times ("in"), from block to block k times ("carry"), else once
("out"). What enters a run of blocks is first brought, once, to the layout in which the blocks hand it on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import SymInt, Tensor, fx

from autoshard.cost.memory import saved_values
from autoshard.errors import InfeasiblePlan
from autoshard.passes.intra_fold import Run, SegmentLike
from autoshard.passes.intra_graph import ChoiceGraph, Group, Kind, Node, Strategy, Use, Wire
from autoshard.passes.intra_pins import Pinned
from autoshard.passes.intra_split import SplitRule
from autoshard.passes.intra_strategies import StrategyMaker, asked, held
from autoshard.placement import I, Layout, Placement, S, local_shape
from autoshard.program import (
    Operator,
    Program,
    TensorType,
    Value,
    operand_values,
    operator_of,
    place,
    result_types,
    value_of,
)
from autoshard.rules import AxisStrategy, local_operator

DATA_AXIS = "dp"
"""The axis on which every rank brings its own samples."""


@dataclass(frozen=True)
class Surroundings:
    """What an assembly reads beside program and segments.

    axes: names of the mesh's axes. samples: node name -> its strategy on the axis of microbatches (empty for one).
    receives, sends: layouts already decided of values that enter or leave, by value. used: axes of `intra_split`.
    """

    axes: tuple[str, ...]
    microbatches: int
    samples: Mapping[str, AxisStrategy]
    pinned: Pinned
    receives: Mapping[Value, Layout]
    sends: Mapping[Value, Layout]
    used: tuple[str, ...] = ()


@dataclass
class _Draft:
    """Nodes and uses so far. numbers: node name (or "send x", ...) -> number."""

    nodes: list[Node] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    uses: dict[Value, list[Use]] = field(default_factory=dict)
    boundary: list[dict[Value, int]] = field(default_factory=list)

    def add(self, key: str, node: Node) -> int:
        self.nodes.append(node)
        self.numbers[key] = len(self.nodes) - 1
        return len(self.nodes) - 1


@dataclass(frozen=True)
class Assembly:
    """Builds the choice graph of segments [start, stop) folded into `runs`."""

    program: Program
    segments: Sequence[SegmentLike]
    start: int
    stop: int
    runs: tuple[Run, ...]
    maker: StrategyMaker
    around: Surroundings

    def build(self) -> ChoiceGraph:
        """Operators in order, each after the placeholders and received values it is first to use; then what leaves."""
        draft = _Draft()
        for group, run in enumerate(self.runs):
            draft.boundary.append({})
            names = self.segments[run.first].nodes
            for position, name in enumerate(names):
                self._operator(draft, group, run, position, name)
            self._entries(draft, run)
        self._leavers(draft)
        wires = self._wires(draft)
        number = {wire.value: place_ for place_, wire in enumerate(wires)}
        groups = tuple(
            Group(
                run.first, run.count, self.segments[run.first].path, tuple((number[v], c) for v, c in entering.items())
            )
            for run, entering in zip(self.runs, draft.boundary, strict=True)
        )
        return ChoiceGraph(tuple(draft.nodes), wires, groups, self.maker.axis_sizes)

    # ---------------------------------------------------------------- what a name stands for

    @cached_property
    def fx_nodes(self) -> dict[str, fx.Node]:
        """Nodes of the program by name."""
        return {node.name: node for node in self.program.graph.nodes}

    @cached_property
    def _seat(self) -> dict[str, tuple[int, int, int]]:
        """Operator -> (group, block of the run, position in the block)."""
        return {
            name: (group, block, position)
            for group, run in enumerate(self.runs)
            for block in range(run.count)
            for position, name in enumerate(self.segments[run.first + block].nodes)
        }

    def standing(self, value: Value) -> Value:
        """The value of the first block that stands for a value of any block."""
        seat = self._seat.get(value.node)
        if seat is None:
            return value
        return Value(self.segments[self.runs[seat[0]].first].nodes[seat[2]], value.index)

    def last(self, value: Value) -> Value:
        """The value of the last block for which a value of the first block stands."""
        group, _, position = self._seat[value.node]
        run = self.runs[group]
        return Value(self.segments[run.first + run.count - 1].nodes[position], value.index)

    def is_placeholder(self, value: Value) -> bool:
        """Whether a value is a parameter, buffer, constant or input."""
        return self.fx_nodes[value.node].op == "placeholder"

    def sample_type(self, value: Value) -> TensorType:
        """Type of a value in one microbatch."""
        node = self.fx_nodes[value.node]
        type_ = result_types(node)[value.index]
        strategy = self.around.samples.get(value.node)
        if strategy is None or self.around.microbatches == 1:
            return type_
        shape = local_shape(type_.shape, (strategy.results[value.index],), (self.around.microbatches,))
        return replace(type_, shape=shape)

    def symbolic(self, value: Value) -> frozenset[int]:
        """Dims of a value whose sizes are symbols, or that count samples."""
        meta = self.fx_nodes[value.node].meta["val"]
        tensor = meta if isinstance(meta, Tensor) else [item for item in meta if isinstance(item, Tensor)][value.index]
        dims = {dim for dim, size in enumerate(tensor.shape) if isinstance(size, SymInt)}
        return frozenset(dims | {dim for dim in [self._sample_dim(value)] if dim is not None})

    def _sample_dim(self, value: Value) -> int | None:
        strategy = self.around.samples.get(value.node)
        return None if strategy is None else strategy.results[value.index].dim

    # ---------------------------------------------------------------- operators and what they read

    def _operator(self, draft: _Draft, group: int, run: Run, position: int, name: str) -> None:
        fx_node = self.fx_nodes[name]
        op = self._sample_operator(name, operator_of(fx_node))
        operands = operand_values(fx_node)
        symbolic = [self.symbolic(value) for value in operands] + [
            self.symbolic(Value(name, i)) for i in range(len(op.results))
        ]
        strategies = self._split_operator(name, op, operands, self.maker.operator(op, symbolic))
        strategies = self._pinned_operator(name, operands, strategies)
        saved = saved_values(op)
        places = [self._place(draft, group, run, position, slot, value) for slot, value in enumerate(operands)]
        number = draft.add(name, Node(name, "operator", group, strategies, run.count, saved.operands, saved.results))
        for slot, (value, count, share) in enumerate(places):
            draft.uses.setdefault(value, []).append(Use(number, slot, count, share))

    def _split_operator(
        self, name: str, op: Operator, operands: Sequence[Value], strategies: tuple[Strategy, ...]
    ) -> tuple[Strategy, ...]:
        rule = SplitRule(self.around.axes, self.maker.axis_sizes, self.around.used)
        known = self.program.parameters
        weights = [
            slot for slot, value in enumerate(operands) if value.node in known and len(known[value.node].type.shape) > 1
        ]
        return rule.kept(op, weights, self.around.samples.get(name), strategies)

    def _sample_operator(self, name: str, op: Operator) -> Operator:
        strategy = self.around.samples.get(name)
        if strategy is None or self.around.microbatches == 1:
            return op
        operands, results = [(p,) for p in strategy.operands], [(p,) for p in strategy.results]
        return local_operator(op, operands, results, (self.around.microbatches,))

    def _place(
        self, draft: _Draft, group: int, run: Run, position: int, slot: int, value: Value
    ) -> tuple[Value, int, str]:
        """(wire, count, share) of one operand, its source made sure of."""
        seat = self._seat.get(value.node)
        if seat is not None and seat[0] == group:
            return value, run.count, "in" if run.count > 1 else "out"
        if (position, slot) in run.carried:
            carried = run.carried[position, slot]
            draft.boundary[group][carried] = run.count
            return carried, run.count, "carry"
        own = value.node in run.own
        self._source(draft, group, value, run.count if own else 1)
        source = self.standing(value)
        if not self._is_held(value.node):
            draft.boundary[group][source] = 1
        return source, run.count if own else 1, "in" if own and run.count > 1 else "out"

    def _entries(self, draft: _Draft, run: Run) -> None:
        """What enters a run of blocks is brought to the layout in which they carry it."""
        nodes = self.segments[run.first].nodes
        seen: set[tuple[Value, Value]] = set()
        for (position, slot), carried in run.carried.items():
            entering = operand_values(self.fx_nodes[nodes[position]])[slot]
            if (entering, carried) in seen:
                continue
            seen.add((entering, carried))
            self._source(draft, self._seat[carried.node][0], entering, 1)
            use = Use(draft.numbers[carried.node], carried.index, 1, "out", carried=True)
            draft.uses.setdefault(self.standing(entering), []).append(use)

    def _is_held(self, name: str) -> bool:
        return name in self.program.parameters or name in self.program.buffers or name in self.program.constants

    # ---------------------------------------------------------------- sources: placeholders and received values

    def _source(self, draft: _Draft, group: int, value: Value, count: int) -> None:
        """Make sure that a value from outside the segments has a node."""
        if value.node in self._seat or self._key(value) in draft.numbers:
            return
        kind, strategies = self._given(value)
        draft.add(self._key(value), Node(str(value), kind, group, strategies, count))

    def _key(self, value: Value) -> str:
        """Placeholders by name; results received from other segments each by themselves."""
        return value.node if self.is_placeholder(value) else f"receive {value}"

    def _given(self, value: Value) -> tuple[Kind, tuple[Strategy, ...]]:
        program, axes = self.program, self.around.axes
        if value.node in program.parameters:
            parameter = program.parameters[value.node]
            return "parameter", self._pinned_results(
                value.node, self.maker.parameter(parameter.type, parameter.trainable)
            )
        if value.node in program.inputs:
            given = program.inputs[value.node]
            dim = given.batch_dim
            layout = tuple(
                S(dim) if axis == DATA_AXIS and dim is not None and ranks > 1 else I for axis, ranks in self._axes()
            )
            self._check_share(given.name, self.sample_type(value), layout)
            return "input", (held(layout),)
        if self._is_held(value.node):
            return "input", (held((I,) * len(axes)),)
        decided = self.around.receives.get(value)
        layouts = (decided,) if decided is not None else self._crossing(value)
        return "receive", tuple(held(layout) for layout in layouts)

    def _axes(self) -> list[tuple[str, int]]:
        return list(zip(self.around.axes, self.maker.axis_sizes, strict=True))

    def _check_share(self, name: str, type: TensorType, layout: Layout) -> None:
        for placement, (axis, ranks) in zip(layout, self._axes(), strict=True):
            if placement.dim is not None and type.shape[placement.dim] % ranks:
                size = type.shape[placement.dim]
                raise InfeasiblePlan(
                    f"{size} samples of input '{name}' in a microbatch do not divide over {axis}={ranks}",
                    help="give a batch that is a multiple of dp times the microbatches, or fewer of either",
                )

    def _crossing(self, value: Value) -> tuple[Layout, ...]:
        """Layouts in which a value may come from or go to another stage: samples stay split, all else is free."""
        dim = self._sample_dim(value)
        layouts = self.maker.layouts(self.sample_type(value), self.symbolic(value))
        fixed: dict[int, Placement] = {}
        if dim is not None:
            fixed = {
                number: S(dim) for number, (axis, ranks) in enumerate(self._axes()) if axis == DATA_AXIS and ranks > 1
            }
        kept = tuple(
            layout for layout in layouts if all(layout[axis] == placement for axis, placement in fixed.items())
        )
        return kept or layouts

    # ---------------------------------------------------------------- what leaves

    def _leavers(self, draft: _Draft) -> None:
        """The model's outputs, buffers' new values, and what later segments read."""
        for leaf in dict.fromkeys(leaf for leaf in self.program.outputs if isinstance(leaf, str)):
            self._leave(draft, "output", value_of(self.fx_nodes[leaf]), self._output_layouts(leaf))
        for buffer in self.program.buffers.values():
            if buffer.updated_by is not None:
                updated = value_of(self.fx_nodes[buffer.updated_by])
                self._leave(draft, "output", updated, ((I,) * len(self.around.axes),))
        for value in self._read_later():
            decided = self.around.sends.get(value)
            self._leave(draft, "send", value, (decided,) if decided is not None else self._crossing(value))

    def _leave(self, draft: _Draft, kind: Kind, value: Value, layouts: Sequence[Layout]) -> None:
        seat, source = self._seat.get(value.node), self.standing(value)
        key = f"{kind} {source}"
        if seat is None or key in draft.numbers:
            return
        number = draft.add(key, Node(key, kind, seat[0], tuple(asked(layout) for layout in layouts)))
        draft.uses.setdefault(source, []).append(Use(number, 0, 1, "out"))

    def _output_layouts(self, leaf: str) -> tuple[Layout, ...]:
        """The loss whole; other outputs whole, or split by their first dim on dp."""
        whole: Layout = (I,) * len(self.around.axes)
        value = value_of(self.fx_nodes[leaf])
        if leaf == self.program.loss or not result_types(self.fx_nodes[value.node])[value.index].shape:
            return (whole,)
        split = tuple(S(0) if axis == DATA_AXIS and ranks > 1 else I for axis, ranks in self._axes())
        allowed = self.maker.layouts(self.sample_type(value), self.symbolic(value))
        return tuple(layout for layout in dict.fromkeys((whole, split)) if layout in allowed)

    def _read_later(self) -> list[Value]:
        later = [name for segment in self.segments[self.stop :] for name in segment.nodes]
        found = (value for name in later for value in operand_values(self.fx_nodes[name]))
        return list(dict.fromkeys(value for value in found if value.node in self._seat))

    # ---------------------------------------------------------------- pins

    def _pinned_results(self, name: str, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        for axis, pin in self.around.pinned.of(name):
            kept = tuple(
                s for s in strategies if s.results[0][axis] == pin.placement or self.maker.axis_sizes[axis] == 1
            )
            if not kept:
                seen = ", ".join(dict.fromkeys(str(s.results[0][axis]) for s in strategies))
                raise InfeasiblePlan(
                    f"pin {pin} leaves no way to run {name}",
                    where=place(self.fx_nodes[name]),
                    help=f"on {pin.axis} it can be {seen}",
                )
            strategies = kept
        return strategies

    def _pinned_operator(
        self, name: str, operands: Sequence[Value], strategies: tuple[Strategy, ...]
    ) -> tuple[Strategy, ...]:
        """Pins of an operator's result, and of the inputs it reads (a slice of which it must want)."""
        strategies = self._pinned_results(name, strategies)
        for slot, value in enumerate(operands):
            if value.node not in self.program.inputs:
                continue
            for axis, pin in self.around.pinned.of(value.node):
                kept = tuple(
                    s for s in strategies if s.operands[slot][axis] == pin.placement or self.maker.axis_sizes[axis] == 1
                )
                if not kept:
                    raise InfeasiblePlan(f"pin {pin} leaves no way to run {name}", where=place(self.fx_nodes[name]))
                strategies = kept
        return strategies

    # ---------------------------------------------------------------- wires

    def _wires(self, draft: _Draft) -> tuple[Wire, ...]:
        wires = []
        for value, uses in draft.uses.items():
            number = draft.numbers.get(value.node, draft.numbers.get(f"receive {value}"))
            assert number is not None, f"{value} has no source"
            node = draft.nodes[number]
            stored = node.kind == "parameter"
            type_ = self.program.parameters[value.node].type if stored else self.sample_type(value)
            if stored:
                type_ = replace(type_, needs_grad=self.program.parameters[value.node].trainable)
            result = value.index if node.kind == "operator" else 0
            wires.append(Wire(value, type_, number, result, tuple(uses), stored, not self._is_held(value.node)))
        return tuple(wires)
