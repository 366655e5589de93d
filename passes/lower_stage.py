"""One stage: its operators with local arguments, and every change of placement as a node of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autoshard.errors import BadPlan
from autoshard.passes import lower_convert
from autoshard.passes.local import LocalNode, LocalTensor, Ref
from autoshard.passes.lower_place import Place
from autoshard.passes.lower_reads import StageReader, Use, size_argument
from autoshard.placement import I, Layout, R, splits_evenly
from autoshard.program import (
    Frame,
    TensorType,
    Value,
    bound_arguments,
    is_tensor,
    operand_values,
    value_of,
)
from autoshard.rules.implementations import IMPLEMENTATIONS

AVERAGE = "average"


@dataclass
class Drafted:
    """Nodes before they have their final order: place, then order of making."""

    place: Place
    node: LocalNode


@dataclass
class StageLowering(StageReader):
    """Lowers what it reads. `run` fills the fields that have defaults."""

    tensors: dict[str, LocalTensor] = field(default_factory=dict)
    drafted: list[Drafted] = field(default_factory=list)
    made: dict[tuple[Value, Layout], str] = field(default_factory=dict)
    totals: dict[str, str] = field(default_factory=dict)
    updates: dict[str, str] = field(default_factory=dict)
    outputs: dict[Value, str] = field(default_factory=dict)
    loss: str = ""

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
            name,
            self.extents(value, layout),
            type_.dtype,
            layout,
            type_.needs_grad,
            kind,
            value,
            attribute,
            type_.shape,
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
            earlier = maker if source_name == start else positions[source_name] - 1
            place = self.placer.place(readers[result], earlier, None if stored else maker)
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
                    return Ref(read[value, layout, self.is_total(node, slot, value)])
                return size_argument(argument.meta.get("val"))
            if isinstance(argument, (tuple, list)):
                return tuple(local(item) for item in argument)
            return size_argument(argument)

        arguments = {name: local(argument) for name, argument in bound_arguments(node).items()}
        frames: tuple[Frame, ...] = node.meta.get("frames", ())
        target = str(node.target)
        groups: tuple[str, ...] = ()
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
