"""One stage: its operators with local arguments, and every change of placement as a node of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoshard.cost.prices import Prices
from autoshard.errors import BadPlan
from autoshard.passes import lower_convert
from autoshard.passes.local import Extent, LocalNode, LocalTensor, Ref, StoredTensor
from autoshard.passes.lower_place import Place, Placer
from autoshard.placement import I, Layout, R, S, splits_evenly
from autoshard.plan import StagePlan
from autoshard.program import (
    Frame,
    Program,
    TensorType,
    Value,
    bound_arguments,
    is_tensor,
    operand_values,
    result_types,
    tensor_type,
    value_of,
)
from autoshard.rules import AxisStrategy
from autoshard.rules.implementations import IMPLEMENTATIONS

AVERAGE = "average"
DATA_AXIS = "dp"


@dataclass(frozen=True)
class Use:
    """A reader of a value. reader: number of the operator, or the count of operators for the stage's end."""

    value: Value
    layout: Layout
    reader: int
    wanted_by: str
    is_total: bool = False


@dataclass
class Drafted:
    """Nodes before they have their final order: place, then order of making."""

    place: Place
    node: LocalNode


@dataclass
class StageLowering:
    """Lowers the operators `names` of a program as `plan` says. samples: strategies on the axis of microbatches."""

    program: Program
    plan: StagePlan
    names: Sequence[str]
    prices: Prices
    samples: Mapping[str, AxisStrategy] | None
    microbatches: int
    sends: Mapping[Value, Layout]
    makes_loss: bool
    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    drafted: list[Drafted] = field(default_factory=list)
    made: dict[tuple[Value, Layout], str] = field(default_factory=dict)
    totals: dict[str, str] = field(default_factory=dict)
    updates: dict[str, str] = field(default_factory=dict)
    outputs: dict[Value, str] = field(default_factory=dict)
    loss: str = ""

    # ---------------------------------------------------------------- reading the program

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        """The program's nodes by name."""
        return {node.name: node for node in self.program.graph.nodes}

    @cached_property
    def operators(self) -> list[fx.Node]:
        """The stage's operators in execution order."""
        wanted = set(self.names)
        return [node for node in self.program.graph.nodes if node.name in wanted]

    @cached_property
    def number(self) -> dict[str, int]:
        """Operator -> its place in `operators`."""
        return {node.name: index for index, node in enumerate(self.operators)}

    @cached_property
    def placer(self) -> Placer:
        """Finds places for conversions."""
        return Placer([node.meta.get("frames", ()) for node in self.operators], self.program.classes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis -> ranks, of the axes of more than one."""
        pairs = zip(self.plan.mesh.axes, self.plan.mesh.sizes, strict=True)
        return {axis: size for axis, size in pairs if size > 1}

    def type_of(self, value: Value) -> TensorType:
        """Type of a value, of the whole batch."""
        node = self.nodes[value.node]
        if node.name in self.program.parameters:
            return self.program.parameters[node.name].type
        if node.op == "placeholder":
            return tensor_type(node.meta["val"], bool(node.meta.get("needs_grad", False)))
        return result_types(node)[value.index]

    def stored_layout(self, value: Value) -> Layout:
        """How a value is where it comes from: made here, stored, given, or received."""
        node, mesh = self.nodes[value.node], self.plan.mesh
        if node.name in self.number:
            return self.plan.operators[node.name].results[value.index]
        if node.name in self.program.parameters:
            name = self.program.parameters[node.name].name
            return self.plan.parameters.get(name, (I,) * len(mesh.axes))
        if node.name in self.program.inputs:
            dim = self.program.inputs[node.name].batch_dim
            return tuple(S(dim) if axis == DATA_AXIS and dim is not None else I for axis in mesh.axes)
        if node.op == "placeholder":
            return (I,) * len(mesh.axes)
        if str(value) not in self.plan.receives:
            raise BadPlan(f"the plan does not say how '{value}' arrives in the stage on {mesh}")
        return self.plan.receives[str(value)]

    def seen(self, value: Value, layout: Layout) -> Layout:
        """A layout with what makes no difference taken out: axes of one rank, and R where no gradient flows."""
        needs_grad = self.type_of(value).needs_grad
        return tuple(
            I if axis not in self.sizes or (placement == R and not needs_grad) else placement
            for axis, placement in zip(self.plan.mesh.axes, layout, strict=True)
        )

    def extents(self, value: Value, layout: Layout) -> tuple[Extent, ...]:
        """The dims of a value in a layout."""
        fake = self.nodes[value.node].meta["val"]
        fake = fake if is_tensor(fake) else fake[value.index]
        shape = self.type_of(value).shape
        return extents(fake.shape, shape, layout, self.plan.mesh.axes, self.sizes)

    # ---------------------------------------------------------------- the uses of every value

    def uses(self) -> Iterator[Use]:
        """All readers: operators in order, then buffers' updates, values sent, and the loss."""
        end = len(self.operators)
        whole = (I,) * len(self.plan.mesh.axes)
        for index, node in enumerate(self.operators):
            for slot, (value, layout) in enumerate(
                zip(operand_values(node), self.plan.operators[node.name].operands, strict=True)
            ):
                yield Use(value, layout, index, node.target.__name__.split(".")[0], self._totals(node, slot, value))  # type: ignore[union-attr]
        for buffer in self.program.buffers.values():
            if buffer.updated_by is not None:
                value = value_of(self.nodes[buffer.updated_by])
                if value.node in self.number:
                    yield Use(value, whole, self.number[value.node], f"the buffer {buffer.name}")
        for value, layout in self.sends.items():
            yield Use(value, layout, end, "the next stage")
        if self.makes_loss:
            yield Use(value_of(self.nodes[self.program.loss]), whole, end, "the loss")

    def _totals(self, node: fx.Node, slot: int, value: Value) -> bool:
        """Whether an operator reads the sum over all microbatches of a value that each has a part of."""
        if self.microbatches == 1 or self.samples is None:
            return False
        strategy = self.samples[value.node]
        return strategy.results[value.index].kind == "P" and self.samples[node.name].operands[slot].kind in "IR"

    # ---------------------------------------------------------------- parameters

    def summed_axes(self, uses: Sequence[Use]) -> dict[str, tuple[str, ...]]:
        """Parameter -> axes over which its gradients are summed once a step: stored I there, and R at each use."""
        wanted: dict[str, list[Layout]] = {}
        for use in uses:
            if use.value.node in self.program.parameters:
                wanted.setdefault(use.value.node, []).append(self.seen(use.value, use.layout))
        found = {}
        for node, layouts in wanted.items():
            if not self.program.parameters[node].trainable:
                continue
            stored = self.stored_layout(Value(node))
            found[node] = tuple(
                axis
                for number, axis in enumerate(self.plan.mesh.axes)
                if axis in self.sizes and stored[number] == I and all(layout[number] == R for layout in layouts)
            )
        return found

    def stored(self, node: str, names: Sequence[str], summed: tuple[str, ...]) -> StoredTensor:
        """A parameter or buffer of this stage. names: its names here, the main one first."""
        value = Value(node)
        layout = self.stored_layout(value)
        parameter, buffer = self.program.parameters.get(node), self.program.buffers.get(node)
        placement = {
            axis: placement.dim
            for axis, placement in zip(self.plan.mesh.axes, layout, strict=True)
            if axis in self.sizes and placement.dim is not None
        }
        return StoredTensor(
            names[0],
            tuple(names[1:]),
            self.extents(value, layout),
            self.type_of(value).dtype,
            placement,
            summed,
            trainable=parameter is not None and parameter.trainable,
            persistent=parameter is not None or (buffer is not None and buffer.persistent),
            is_buffer=parameter is None,
        )

    # ---------------------------------------------------------------- running it

    def run(self) -> tuple[LocalNode, ...]:
        """All nodes of the stage, in order. Fills `tensors`, `totals`, `updates`, `outputs` and `loss`."""
        uses = list(self.uses())
        self._given(uses)
        self._results()
        read = self._converted(uses)
        for index, node in enumerate(self.operators):
            self._operator(index, node, read)
        self._ends(uses, read)
        order = sorted(range(len(self.drafted)), key=lambda i: (self.drafted[i].place.position, self._rank(i), i))
        return tuple(self.drafted[i].node for i in order)

    def _rank(self, i: int) -> tuple[int, int]:
        """Before an operator stand its conversions, those of outer calls first; what follows it comes after it."""
        drafted = self.drafted[i]
        return (0, len(drafted.place.frames)) if drafted.node.converts else (1, 0)

    def _given(self, uses: Sequence[Use]) -> None:
        """Tensors that are there from the start."""
        program = self.program
        summed = self.summed_axes(uses)
        for use in uses:
            value, node = use.value, use.value.node
            if node in self.number:
                continue
            layout = self.seen(value, self.stored_layout(value))
            if (value, layout) in self.made and node not in summed:
                continue
            if node in program.parameters:
                kind, attribute = "parameter", program.parameters[node].name
                layout = tuple(
                    R if axis in summed.get(node, ()) else placement
                    for axis, placement in zip(self.plan.mesh.axes, layout, strict=True)
                )
            elif node in program.buffers:
                kind, attribute = "buffer", program.buffers[node].name
            elif node in program.inputs:
                kind, attribute = "input", program.inputs[node].name
            else:
                kind, attribute = ("buffer", node) if node in program.constants else ("received", "")
            name = node if value.index == 0 else f"{node}.{value.index}"
            self._tensor(name, value, layout, kind, attribute)

    def _results(self) -> None:
        for node in self.operators:
            for index, layout in enumerate(self.plan.operators[node.name].results):
                value = Value(node.name, index)
                self._tensor(f"{node.name}.{index}" if index else node.name, value, self.seen(value, layout))

    def _tensor(self, name: str, value: Value, layout: Layout, kind: Any = "computed", attribute: str = "") -> str:
        type_ = self.type_of(value)
        self.tensors[name] = LocalTensor(
            name, self.extents(value, layout), type_.dtype, layout, type_.needs_grad, kind, value, attribute, type_.shape
        )
        self.made[value, layout] = name
        return name

    # ---------------------------------------------------------------- conversions

    def _start(self, value: Value) -> str:
        """The tensor that a value is at first."""
        name = value.node if value.index == 0 else f"{value.node}.{value.index}"
        return name

    def _converted(self, uses: Sequence[Use]) -> dict[tuple[Value, Layout, bool], str]:
        """Make every conversion that the uses need, shared where they can; what each use reads."""
        read: dict[tuple[Value, Layout, bool], str] = {}
        readers: dict[str, list[int]] = {}
        wanted_by: dict[str, str] = {}
        made: list[tuple[str, str, Any, Value]] = []  # result, source, step, value
        for use in uses:
            value, target = use.value, self.seen(use.value, use.layout)
            name = self._start(value)
            source = self.tensors[name].layout
            price = self.prices.conversion(self._part_type(value), source, target)
            known = [(name, source)]
            for step in price.steps:
                after = self.seen(value, step.after)
                if after == known[-1][1]:
                    continue  # I -> R of a value without gradient
                if (value, after) not in self.made:
                    result = f"{self._start(value)}@{len(made)}"
                    self._tensor(result, value, after)
                    made.append((result, known[-1][0], replace(step, before=known[-1][1], after=after), value))
                    wanted_by[result] = use.wanted_by
                known.append((self.made[value, after], after))
            for passed, _ in known[1:]:
                readers.setdefault(passed, []).append(use.reader)
            read[value, target, use.is_total] = known[-1][0]
        positions: dict[str, int] = {}
        for result, source_name, step, value in made:
            start = self._start(value)
            maker = self.number.get(value.node, -1)
            stored = self.tensors[start].kind in ("parameter", "buffer")
            after = maker if source_name == start else positions[source_name] - 1
            place = self.placer.place(readers[result], after, None if stored else maker)
            positions[result] = place.position
            self._draft_step(place, result, source_name, step, value, wanted_by[result])
        return self._with_totals(read)

    def _part_type(self, value: Value) -> TensorType:
        """The type of a value in one microbatch, as the search priced it."""
        type_ = self.type_of(value)
        strategy = (self.samples or {}).get(value.node)
        if strategy is None or self.microbatches == 1:
            return type_
        placement = strategy.results[value.index]
        if placement.dim is None:
            return type_
        shape = list(type_.shape)
        shape[placement.dim] = -(-shape[placement.dim] // self.microbatches)
        return replace(type_, shape=tuple(shape))

    def _draft_step(self, place: Place, result: str, source: str, step: Any, value: Value, wanted_by: str) -> None:
        axis = self.plan.mesh.axes[step.axis]
        type_ = self._part_type(value)
        is_parameter = self.tensors[self._start(value)].kind == "parameter"
        whole = None
        if step.source.is_sharded:
            uncut = tuple(I if number == step.axis else p for number, p in enumerate(step.before))
            if not self._is_even(value, step.before):
                whole = self.extents(value, uncut)[step.source.dim]
        call = lower_convert.call(step, source, is_parameter, whole)
        price = self.prices.conversion(type_, step.before, step.after)
        graph = self.prices.graph(type_)
        size = max(graph.local_bytes[graph._number(layout)] for layout in (step.before, step.after))
        why = (
            lower_convert.reason(step.source, step.target, axis, wanted_by, is_parameter),
            lower_convert.price_words(float(size), price.forward_s, price.backward_s),
        )
        self.drafted.append(
            Drafted(
                place,
                LocalNode(call.function, call.arguments, (result,), place.frames, (axis,), converts=True, why=why),
            )
        )

    def _is_even(self, value: Value, layout: Layout) -> bool:
        return splits_evenly(self.type_of(value).shape, layout, self.plan.mesh.sizes)

    def _with_totals(self, read: dict[tuple[Value, Layout, bool], str]) -> dict[tuple[Value, Layout, bool], str]:
        """Counts of the whole batch are not what this microbatch computes, but stand ready as totals."""
        for (value, layout, is_total), name in list(read.items()):
            if is_total:
                if value.node not in self.number:
                    raise BadPlan(f"'{value}' counts samples in an earlier stage than its reader's")
                total = f"{name}#total"
                if total not in self.tensors:
                    attribute = "count" if not self.totals else f"count_{len(self.totals) + 1}"
                    self.tensors[total] = replace(self.tensors[name], name=total, kind="total", attribute=attribute)
                    self.totals[attribute] = name
                read[value, layout, is_total] = total
        return read

    # ---------------------------------------------------------------- operators

    def _operator(self, index: int, node: fx.Node, read: Mapping[tuple[Value, Layout, bool], str]) -> None:
        plan = self.plan.operators[node.name]
        operands = list(operand_values(node))
        slots = iter(range(len(operands)))

        def local(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                if is_tensor(argument.meta.get("val")):
                    slot = next(slots)
                    value = operands[slot]
                    layout = self.seen(value, plan.operands[slot])
                    return Ref(read[value, layout, self._totals(node, slot, value)])
                return size_argument(argument.meta.get("val"))
            if isinstance(argument, (tuple, list)):
                return tuple(local(item) for item in argument)
            return size_argument(argument)

        arguments = {name: local(argument) for name, argument in bound_arguments(node).items()}
        frames: tuple[Frame, ...] = node.meta.get("frames", ())
        target, groups = str(node.target), ()
        named = {
            name
            for axis, name in zip(self.plan.mesh.axes, plan.implementations, strict=True)
            if name is not None and axis in self.sizes
        }
        helpers = sorted(named - {AVERAGE})
        if helpers:
            target = IMPLEMENTATIONS[helpers[0]].helper or target
            groups = self._groups(plan.implementations, helpers[0])
        count = len(plan.results)
        names = [f"{node.name}.{i}" if i else node.name for i in range(count)]
        if helpers and helpers[0] == "vocab_embedding":
            arguments["rows"] = size_argument(self._global_size(operands[0], 0))
        if helpers and helpers[0] == "vocab_cross_entropy":
            dim = min(1, len(self.type_of(operands[0]).shape) - 1)
            arguments["classes"] = size_argument(self._global_size(operands[0], dim))
        averages = self._averages(node, plan.implementations)
        place = Place(index, frames)
        if not averages:
            self.drafted.append(Drafted(place, LocalNode(target, arguments, tuple(names), frames, groups)))
            return
        whole = f"{names[0]}~"
        self.tensors[whole] = replace(self.tensors[names[0]], name=whole)
        self.drafted.append(Drafted(place, LocalNode(target, arguments, (whole, *names[1:]), frames, groups)))
        shared: dict[str, Any] = {"x": Ref(whole)}
        if AVERAGE in averages:
            microbatches = LocalTensor("microbatches", (), torch.int64, (), kind="microbatches")
            self.tensors[microbatches.name] = microbatches
            shared["microbatches"] = Ref(microbatches.name)
        axes = tuple(axis for axis in averages if axis != AVERAGE)
        self.drafted.append(Drafted(place, LocalNode(AVERAGE, shared, (names[0],), frames, axes)))

    def _groups(self, implementations: Sequence[str | None], name: str) -> tuple[str, ...]:
        pairs = zip(self.plan.mesh.axes, implementations, strict=True)
        return tuple(axis for axis, found in pairs if found == name and axis in self.sizes)

    def _averages(self, node: fx.Node, implementations: Sequence[str | None]) -> tuple[str, ...]:
        """Axes whose ranks' means are averaged; "average" itself for the microbatches."""
        axes = self._groups(implementations, AVERAGE)
        strategy = (self.samples or {}).get(node.name)
        by_microbatch = self.microbatches > 1 and strategy is not None and strategy.implementation == AVERAGE
        return (*axes, AVERAGE) if by_microbatch else axes

    def _global_size(self, value: Value, dim: int) -> Any:
        fake = self.nodes[value.node].meta["val"]
        return (fake if is_tensor(fake) else fake[value.index]).shape[dim]

    # ---------------------------------------------------------------- what leaves

    def _ends(self, uses: Sequence[Use], read: Mapping[tuple[Value, Layout, bool], str]) -> None:
        whole = (I,) * len(self.plan.mesh.axes)
        for buffer in self.program.buffers.values():
            if buffer.updated_by is not None:
                value = value_of(self.nodes[buffer.updated_by])
                if value.node in self.number:
                    self.updates[buffer.name] = read[value, self.seen(value, whole), False]
        for value, layout in self.sends.items():
            self.outputs[value] = read[value, self.seen(value, layout), False]
        if self.makes_loss:
            value = value_of(self.nodes[self.program.loss])
            self.loss = read[value, self.seen(value, whole), False]


def size_argument(value: Any) -> Any:
    """Symbolic sizes as extents of the whole; everything else as it is."""
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression) if expression.is_number else Extent(expression)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return Extent(value.node.expr)
    return value


def extents(
    shape: Sequence[Any], hints: Sequence[int], layout: Layout, axes: Sequence[str], sizes: Mapping[str, int]
) -> tuple[Extent, ...]:
    """The dims of a tensor in a layout. hints: the shape with example sizes for symbols."""
    found = []
    for dim, (size, known) in enumerate(zip(shape, hints, strict=True)):
        cut = tuple(axis for axis, p in zip(axes, layout, strict=True) if p.dim == dim and axis in sizes)
        ranks = 1
        for axis in cut:
            ranks *= sizes[axis]
        size = size_argument(size)
        found.append(Extent(size.size if isinstance(size, Extent) else size, cut, known % ranks == 0))
    return tuple(found)
