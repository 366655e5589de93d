"""Where an emitted program first differs from the model: the operator, in the user's lines.

Both run one forward of the whole batch. Of the emitted program every named value is watched on every rank
(`verify_watch`); lowering the plan again says which value of the model each name stands for, and how ranks share it.
Where all of the forward agrees, the fault is in backward: then the last operator that reads a parameter with a wrong
gradient is named.
"""

import difflib
import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.cluster import Cluster
from autoshard.passes.emit import made_tensors
from autoshard.passes.emit_classes import Made
from autoshard.passes.local import LocalNode, LocalProgram, LocalStage, LocalTensor
from autoshard.passes.lower import Lower
from autoshard.passes.segment import segment
from autoshard.placement import shard_sizes
from autoshard.plan import Plan
from autoshard.program import Program, is_tensor, operand_values, operator_name, place
from autoshard.ranks import run_ranks
from autoshard.verify import TOLERANCE, lift_float32_casts, relative_error
from autoshard.verify_folder import TIMEOUT_S, Folder, named_for, use_modules
from autoshard.verify_watch import Watched, Watcher

Values = Mapping[str, tuple[Tensor | None, ...]]
"""Node -> its results."""


def first_divergence(
    program: Program,
    plan: Plan,
    cluster: Cluster,
    folder: Folder,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    wrong_gradients: Sequence[str],
) -> str | None:
    """The first operator whose result differs, with its place in the user's code. None where nothing is found.

    state, inputs: of the model, in float64. wrong_gradients: names of parameters whose gradients differ.
    """
    local = Lower(cluster)(program, segment(program), plan)
    watched = run_ranks(_watch, folder.world_size, folder, state, inputs, timeout_s=TIMEOUT_S, preload=folder.preload)
    reference = _reference(program, state, inputs)
    tensors = made_tensors(program, local)
    found: dict[tuple[int, str], dict[int, Tensor]] = {}
    for rank, calls in enumerate(watched):
        stage = _stage_of(rank, plan)
        for call in calls:
            for name, value in _named(call, tensors[stage].get((call.path, call.number), ())):
                found.setdefault((stage, name), {})[rank] = value
    return _first_in_forward(program, local, plan, found, reference) or _last_in_backward(program, wrong_gradients)


# The two runs ---------------------------------------------------------------------------------------------------------


def _watch(
    _rank: int, _world_size: int, folder: Folder, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> list[Watched]:
    use_modules(folder)
    model, parameters = importlib.import_module("model"), importlib.import_module("parameters")
    module, mesh, step = model.build(device="cpu", dtype=torch.float64)
    parameters.load_full(module, mesh, state)
    share = mesh.share(named_for(model, inputs, folder), model.BATCH_DIMS)
    module.microbatches = step.microbatches = 1  # the whole batch at once
    if hasattr(step, "instructions"):
        step.instructions = [("F", 0)]
    with lift_float32_casts(), Watcher(module, sorted(folder.path.glob("*.py"))) as watcher:
        step.evaluate(share)
    return watcher.calls


class _Keeper(fx.Interpreter):
    """Runs a program and keeps every value. Tensors are made on the CPU, wherever the program was traced."""

    def __init__(self, program: Program) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), program.graph))
        self.values: dict[str, tuple[Tensor | None, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        results = result if isinstance(result, (tuple, list)) else (result,)
        self.values[n.name] = tuple(item if isinstance(item, Tensor) else None for item in results)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {name: "cpu" if name == "device" and value is not None else value for name, value in kwargs.items()}
        return super().call_function(target, args, kwargs)


@torch.no_grad()
def _reference(program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Values:
    given: list[Any] = []
    for node in program.graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in program.parameters:
            given.append(state[program.parameters[node.name].name])
        elif node.name in program.buffers:
            given.append(state.get(program.buffers[node.name].name))
        elif node.name in program.constants:
            value = program.constants[node.name]
            given.append(value.double() if value.is_floating_point() else value)
        else:
            given.append(inputs[program.inputs[node.name].name])
    keeper = _Keeper(program)
    with lift_float32_casts():
        keeper.run(*given)
    return keeper.values


def _stage_of(rank: int, plan: Plan) -> int:
    places = enumerate(plan.stages)
    return next(number for number, stage in places if rank in {plan.ranks[device] for device in stage.mesh.devices})


def _named(call: Watched, expected: Sequence[Made]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the plan with what this call had for them. Statements are matched by the names that they assign."""
    assigned = [made for made in expected if made.targets]
    mine, theirs = [made.targets for made in assigned], [targets for targets, _ in call.made]
    pairs: list[tuple[Sequence[str | None], Sequence[Tensor | None]]] = []
    for block in difflib.SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks():
        for i in range(block.size):
            pairs.append((assigned[block.a + i].tensors, call.made[block.b + i][1]))
    for made in expected:
        if not made.targets and len(made.tensors) == len(call.returned):
            pairs.append((made.tensors, call.returned))
    for names, values in pairs:
        for name, value in zip(names, values, strict=False):
            if name is not None and value is not None:
                yield name, value


# Comparing ------------------------------------------------------------------------------------------------------------


def _first_in_forward(
    program: Program,
    local: LocalProgram,
    plan: Plan,
    found: Mapping[tuple[int, str], Mapping[int, Tensor]],
    reference: Values,
) -> str | None:
    ranks = plan.ranks
    nodes = {node.name: node for node in program.graph.nodes}
    for stage in local.stages:
        for node in stage.nodes:
            for name in node.results:
                values = found.get((stage.number, name or ""))
                tensor = stage.tensors[name] if name else None
                if values is None or tensor is None or tensor.value is None:
                    continue
                whole = reference[tensor.value.node][tensor.value.index]
                error = 0.0 if whole is None else _error(tensor, stage, whole, values, ranks)
                if error > TOLERANCE:
                    return _sentence(node, nodes[tensor.value.node], error, stage)
    return None


def _error(
    tensor: LocalTensor, stage: LocalStage, whole: Tensor, values: Mapping[int, Tensor], ranks: Mapping[int, int]
) -> float:
    """The largest relative error over the ranks; partial sums are added up first."""
    mesh = stage.mesh
    places = itertools.product(*(range(size) for size in mesh.sizes))
    sums: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
    for place_, device in zip(places, mesh.devices, strict=True):
        value = values.get(ranks[device])
        if value is None:
            continue
        piece = whole
        for at, size, placement in zip(place_, mesh.sizes, tensor.layout, strict=True):
            if placement.dim is not None:
                lengths = shard_sizes(piece.shape[placement.dim], size)
                piece = piece.narrow(placement.dim, sum(lengths[:at]), lengths[at])
        key = tuple(0 if p.kind == "P" else at for at, p in zip(place_, tensor.layout, strict=True))
        if key in sums and sums[key][0].shape == value.shape:
            value = sums[key][0] + value if value.dtype != torch.bool else sums[key][0] | value
        sums[key] = (value, piece)
    scale = float(whole.double().abs().max()) if whole.numel() and whole.dtype != torch.bool else 0.0
    return max((relative_error(piece, value, scale) for value, piece in sums.values()), default=0.0)


def _sentence(node: LocalNode, original: fx.Node, error: float, stage: LocalStage) -> str:
    what = operator_name(original)
    if node.converts:
        what = f"{node.target} over {', '.join(node.groups)} of what {what} makes"
    where = f"stage {stage.number}, " if stage.number else ""
    return f"{what} differs by {error:.1e}: {where}{place(original)}"


def _last_in_backward(program: Program, wrong: Sequence[str]) -> str | None:
    names = {node: {p.name, *p.aliases} for node, p in program.parameters.items()}
    found = None
    for node in program.operators():
        for value in operand_values(node):
            hit = names.get(value.node, set()) & set(wrong)
            if hit and is_tensor(node.meta["val"]):
                found = (
                    f"forward agrees; the gradient of {min(hit)} differs, read by {operator_name(node)}: {place(node)}"
                )
    return found
