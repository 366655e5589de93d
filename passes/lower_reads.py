"""What one stage holds and who reads it: its operators, the layout of every value, and the uses of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autoshard.cost.prices import Prices
from autoshard.errors import BadPlan
from autoshard.passes.local import Extent, StoredTensor
from autoshard.passes.lower_place import Placer
from autoshard.placement import I, Layout, R, S
from autoshard.plan import StagePlan
from autoshard.program import (
    Program,
    TensorType,
    Value,
    is_tensor,
    operand_values,
    result_types,
    tensor_type,
    value_of,
)
from autoshard.rules import AxisStrategy

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
class StageReader:
    """The operators `names` of a program, and the plan for them. samples: strategies on the axis of microbatches."""

    program: Program
    plan: StagePlan
    names: Sequence[str]
    prices: Prices
    samples: Mapping[str, AxisStrategy] | None
    microbatches: int
    sends: Mapping[Value, Layout]
    makes_loss: bool

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
                wanted_by = plain_operator(str(node.target))
                yield Use(value, layout, index, wanted_by, self.is_total(node, slot, value))
        for buffer in self.program.buffers.values():
            if buffer.updated_by is not None:
                value = value_of(self.nodes[buffer.updated_by])
                if value.node in self.number:
                    yield Use(value, whole, self.number[value.node], f"the buffer {buffer.name}")
        for value, layout in self.sends.items():
            yield Use(value, layout, end, "the next stage")
        if self.makes_loss:
            yield Use(value_of(self.nodes[self.program.loss]), whole, end, "the loss")

    def is_total(self, node: fx.Node, slot: int, value: Value) -> bool:
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


def plain_operator(target: str) -> str:
    """An operator's name as people say it."""
    name = target.split(".")[1].strip("_")
    plain = {"to_copy": "the cast", "scaled_dot_product_attention": "attention", "cross_entropy_loss": "cross_entropy"}
    return "batch_norm" if name.startswith("native_batch_norm") else plain.get(name, name)


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
