"""Program + Plan -> one local (SPMD) program a stage, every change of placement explicit.

A value is converted once for all its readers that want one layout; the steps are those that the search priced. The sum
of a parameter's gradient over an axis on which every rank has it whole (I -> R at each use) is left to the end of the
step: `StoredTensor.summed`. Only what the loss needs is kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.cluster import Cluster
from autoshard.cost.prices import Prices
from autoshard.errors import BadPlan
from autoshard.passes.local import (
    LocalCrossing,
    LocalNode,
    LocalProgram,
    LocalStage,
    LocalTensor,
    LocalTied,
    StoredTensor,
)
from autoshard.passes.lower_stage import StageLowering
from autoshard.passes.microbatch import CoupledSamples, sample_placements
from autoshard.passes.segment import Chain
from autoshard.passes.user_names import user_names
from autoshard.placement import Layout
from autoshard.plan import Plan
from autoshard.program import Program, Value, operand_values
from autoshard.rules import AxisStrategy


@dataclass(frozen=True)
class Lower:
    """The pass. cluster: gives the prices by which conversions were chosen."""

    cluster: Cluster

    def __call__(self, program: Program, chain: Chain, plan: Plan) -> LocalProgram:
        """Raises BadPlan where the plan does not go with the program."""
        samples = _samples(program, plan.microbatches)
        ranges = [stage.segments for stage in plan.stages]
        names = [[name for segment in chain.segments[a:b] for name in segment.nodes] for a, b in ranges]
        missing = sorted({name for stage in names for name in stage} - {n for s in plan.stages for n in s.operators})
        if missing:
            raise BadPlan(f"the plan says nothing about '{missing[0]}'", help="plan this model again")
        stages = [
            StageLowering(
                program,
                stage,
                names[number],
                Prices(self.cluster, stage.mesh, plan.optimizer),
                samples,
                plan.microbatches,
                {value: stage.sends[str(value)] for value in _sent(program, names, number)},
                makes_loss=number == len(plan.stages) - 1,
            )
            for number, stage in enumerate(plan.stages)
        ]
        nodes = [stage.run() for stage in stages]
        holders = _holders(program, stages)
        crossings = _crossings(program, stages)
        locals_ = [
            _stage(number, stage, made, holders[number], crossings, plan.stages[number].remat)
            for number, (stage, made) in enumerate(zip(stages, nodes, strict=True))
        ]
        return LocalProgram(tuple(locals_), tuple(c.crossing for c in crossings), _tied(program, locals_))


@dataclass(frozen=True)
class _Crossing:
    crossing: LocalCrossing
    value: Value

    @property
    def name(self) -> str:
        return self.crossing.name

    @property
    def source(self) -> int:
        return self.crossing.source


def _samples(program: Program, microbatches: int) -> Mapping[str, AxisStrategy] | None:
    try:
        return sample_placements(program)
    except CoupledSamples:
        if microbatches > 1:
            raise
        return None


def _sent(program: Program, names: Sequence[Sequence[str]], number: int) -> list[Value]:
    """Values that stage `number` makes and a later stage reads."""
    nodes = {node.name: node for node in program.graph.nodes}
    mine = set(names[number])
    read = (value for stage in names[number + 1 :] for name in stage for value in operand_values(nodes[name]))
    return list(dict.fromkeys(value for value in read if value.node in mine))


# Who holds what -------------------------------------------------------------------------------------------------------


def _holders(program: Program, stages: Sequence[StageLowering]) -> list[dict[str, tuple[str, ...]]]:
    """Of each stage: placeholder of a parameter or buffer -> its names there. What nobody reads is in the first."""
    held: list[dict[str, tuple[str, ...]]] = [{} for _ in stages]
    names_of = {node: (stored.name, *stored.aliases) for node, stored in program.parameters.items()}
    names_of |= {node: (stored.name,) for node, stored in program.buffers.items()}
    for node, all_names in names_of.items():
        users = [
            number
            for number, stage in enumerate(stages)
            if any(t.kind in ("parameter", "buffer") and t.value == Value(node) for t in stage.tensors.values())
        ]
        names = {number: _names_in(stages[number], all_names) for number in users}
        unclaimed = set(all_names).difference(*names.values())  # of modules that no stage calls: in the first
        for number in users:
            own = {*names[number], *(unclaimed if number == users[0] else ())}
            held[number][node] = tuple(name for name in all_names if name in own)
        if not users:
            held[_neighbour(all_names[0], held)][node] = all_names
    for node in program.constants:
        for number, stage in enumerate(stages):
            if node in stage.tensors:
                held[number][node] = (node,)
    return held


def _names_in(stage: StageLowering, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a shared parameter that belong to modules which this stage calls."""
    called = {frame.path for operator in stage.operators for frame in operator.meta.get("frames", ())}
    own = tuple(name for name in names if name.rpartition(".")[0] in called)
    return own or names[:1]


def _neighbour(name: str, held: Sequence[Mapping[str, tuple[str, ...]]]) -> int:
    """The stage that holds what stands nearest in the module tree."""
    path = name.rpartition(".")[0]
    while path:
        for number, mine in enumerate(held):
            if any(other.startswith(f"{path}.") for names in mine.values() for other in names):
                return number
        path = path.rpartition(".")[0]
    return 0


def _tied(program: Program, stages: Sequence[LocalStage]) -> tuple[LocalTied, ...]:
    """Trainable parameters that several stages hold."""
    found = []
    for parameter in program.parameters.values():
        names = {parameter.name, *parameter.aliases}
        copies = {
            stage.number: (stored.name, stored.placement)
            for stage in stages
            for stored in stage.stored
            if stored.name in names and not stored.is_buffer
        }
        if len(copies) > 1 and parameter.trainable:
            found.append(LocalTied(parameter.type.shape, copies))
    return tuple(found)


# What passes between stages -------------------------------------------------------------------------------------------


def _crossings(program: Program, stages: Sequence[StageLowering]) -> list[_Crossing]:
    found: list[_Crossing] = []
    names: dict[Value, str] = {}
    taken, called = {given.name for given in program.inputs.values()}, user_names(program)
    for source, stage in enumerate(stages):
        for value in stage.sends:
            if value not in names:
                names[value] = _free(called.get(value, "x"), taken)
                taken.add(names[value])
            for target, reader in enumerate(stages):
                receives = any(t.kind == "received" and t.value == value for t in reader.tensors.values())
                if target > source and receives:
                    type_ = stage.type_of(value)
                    given, arriving = stage.sends[value], reader.stored_layout(value)
                    whole = stage.extents(value, tuple(p if p.kind != "S" else type(p)("I") for p in given))
                    found.append(
                        _Crossing(
                            LocalCrossing(
                                names[value],
                                source,
                                target,
                                _placement(given, stage),
                                _placement(arriving, reader),
                                whole,
                                type_.dtype,
                                type_.needs_grad,
                            ),
                            value,
                        )
                    )
    return found


def _placement(layout: Layout, stage: StageLowering) -> dict[str, int]:
    pairs = zip(stage.plan.mesh.axes, layout, strict=True)
    return {axis: placement.dim for axis, placement in pairs if axis in stage.sizes and placement.dim is not None}


def _free(name: str, taken: Iterable[str]) -> str:
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


# One stage, put together ----------------------------------------------------------------------------------------------


def _stage(
    number: int,
    stage: StageLowering,
    nodes: tuple[LocalNode, ...],
    held: Mapping[str, tuple[str, ...]],
    crossings: Sequence[_Crossing],
    remat: tuple[str, ...],
) -> LocalStage:
    sent = {c.name: stage.outputs[c.value] for c in crossings if c.source == number}
    outputs = tuple(sent.values()) + ((stage.loss,) if stage.loss else ())
    kept = _needed(nodes, {*outputs, *stage.updates.values()})
    total_nodes = _needed(nodes, set(stage.totals.values()))
    received = {c.value: c.name for c in crossings if c.crossing.target == number}
    tensors = {name: _called(tensor, received, held) for name, tensor in stage.tensors.items()}
    read = {ref for node in (*kept, *total_nodes) for ref in node.operands()} | set(outputs)
    inputs = [name for name, tensor in tensors.items() if tensor.kind == "input" and name in read]
    order = list(stage.program.inputs)
    inputs.sort(key=lambda name: order.index(name))
    inputs += [name for name, tensor in tensors.items() if tensor.kind == "received" and name in read]
    summed = stage.summed_axes(list(stage.uses()))
    stored: list[StoredTensor] = [stage.stored(node, names, summed.get(node, ())) for node, names in held.items()]
    return LocalStage(
        number, stage.plan.mesh, kept, tensors, tuple(inputs), outputs, tuple(stored), stage.updates, total_nodes,
        stage.totals, remat, any(node.target == "gather_parameter" for node in kept),
    )  # fmt: skip


def _called(tensor: LocalTensor, received: Mapping[Value, str], held: Mapping[str, tuple[str, ...]]) -> LocalTensor:
    """A tensor under the name that it has in this stage."""
    if tensor.value is None:
        return tensor
    if tensor.kind == "received":
        return replace(tensor, attribute=received[tensor.value])
    if tensor.kind in ("parameter", "buffer"):
        return replace(tensor, attribute=held[tensor.value.node][0])
    return tensor


def _needed(nodes: Sequence[LocalNode], wanted: set[str]) -> tuple[LocalNode, ...]:
    """The nodes that these tensors come from; results that nobody reads are None."""
    wanted, kept = set(wanted), []
    for node in reversed(nodes):
        if any(name in wanted for name in node.results):
            results = tuple(name if name in wanted else None for name in node.results)
            kept.append(replace(node, results=results))
            wanted |= set(node.operands())
    return tuple(reversed(kept))
