"""The first pass: `nn.Module` and a batch -> `Program`, by torch.export (or torch.fx.symbolic_trace before it).

The user's model is not changed: repeated blocks are taken out of their lists for the export only (`trace_blocks`), and
the training mode is put back. A model on the meta device is traced there, without a weight in memory.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from autoshard.errors import BadInput
from autoshard.passes.normalize import normalize
from autoshard.passes.trace_blocks import CannotSplice, find_stacks, shortened, splice
from autoshard.passes.trace_draft import Draft, Names, draft, read_names, renamed
from autoshard.passes.trace_export import PREFIX, Exported, Signature, batch_of, check_workload, export, read_signature
from autoshard.passes.trace_frames import FrameReader, class_name
from autoshard.passes.trace_fx import symbolic
from autoshard.program import Buffer, Input, Parameter, Program, TensorType, tensor_type
from autoshard.workload import Workload

FrontEnd = Literal["export", "fx"]


def trace(workload: Workload, *, dynamic: bool = True, shorten: bool = True, frontend: FrontEnd = "export") -> Program:
    """Trace a workload's forward (in training mode) and its loss; normalised.

    dynamic: leave the batch (and the sequence, dim 1 of integer inputs) open where the model allows; `notes` says what
        had to be fixed. shorten: trace three of many equal blocks and repeat them; the result is the same.
    Raises UntraceableModel naming the user's line, BadInput for a workload that is none or yields no scalar loss.
    """
    check_workload(workload)
    if frontend not in ("export", "fx"):
        raise BadInput(f"'{frontend}' is not a front end", help="use 'export' or 'fx'")
    with training(workload.model):
        if frontend == "fx":
            workload = symbolic(workload)
        signature = read_signature(workload)
        names = read_names(workload.model)
        reader = FrameReader(workload.model, PREFIX)
        stacks = find_stacks(workload.model, names.canonical) if shorten else ()
        notes: list[str] = []
        while True:
            try:
                with shortened(stacks):
                    exported = export(workload, signature, dynamic=dynamic)
                made = draft(exported, signature, names, reader)
                normalize(made.graph)
                for stack in stacks:
                    splice(made, stack)
                break
            except CannotSplice as error:
                notes.append(str(error))
                stacks = tuple(stack for stack in stacks if stack.path != error.path)
            except Exception:
                if not stacks:
                    raise
                stacks = ()  # forward counts its blocks, perhaps: the whole model decides
    return _program(workload, renamed(made), exported, signature, names, (*notes, *exported.notes))


@contextlib.contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Training mode, unless the model is in it already (then parts that the user froze stay so); put back after."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _program(
    workload: Workload, made: Draft, exported: Exported, signature: Signature, names: Names, notes: tuple[str, ...]
) -> Program:
    results = exported.results
    assert results.spec is not None
    results_of_graph: Any = made.output.args[0]
    values, updated = results_of_graph
    new_values = {name: node.name for name, node in zip(made.updates, updated, strict=True)}
    parameters: dict[str, Parameter] = {}
    buffers: dict[str, Buffer] = {}
    aliases: dict[str, list[str]] = {}
    for name, first in names.canonical.items():
        if name != first:
            aliases.setdefault(first, []).append(name)
    for name, node in made.state.items():
        tensor = names.parameters.get(name, names.buffers.get(name))
        assert tensor is not None
        kind = TensorType(tuple(tensor.shape), tensor.dtype, bool(node.meta["needs_grad"]))
        if name in names.parameters:
            parameters[node.name] = Parameter(name, tuple(aliases.get(name, ())), kind, tensor.requires_grad)
        else:
            buffers[node.name] = Buffer(name, kind, name in names.persistent, new_values.get(name))
    batch = batch_of(signature.tensors)
    inputs = {
        node.name: Input(
            name,
            tensor_type(node.meta["val"]),
            0 if tensor.dim() and tensor.shape[0] == batch else None,
            None if tensor.dtype.is_floating_point or tensor.dtype is torch.bool else index_bound(node),
        )
        for (name, node), tensor in zip(made.inputs.items(), signature.tensors, strict=True)
    }
    leaves = tuple(made.inputs[leaf].name if isinstance(leaf, str) else leaf for leaf in signature.leaves)
    return Program(
        graph=made.graph,
        parameters=parameters,
        buffers=buffers,
        constants={node.name: value for node, value in made.constants.items()},
        inputs=inputs,
        signature=signature.spec,
        leaves=leaves,
        outputs=tuple(values[item].name if isinstance(item, int) else item for item in results.outputs),
        out_spec=results.spec,
        loss=values[0].name,
        symbols=_symbols(made.inputs.values()),
        classes={path: class_name(module) for path, module in workload.model.named_modules(remove_duplicate=False)},
        source=workload.name,
        notes=notes + _fixed_notes(made.inputs, signature, exported, inputs),
    )


def _symbols(inputs: Any) -> Mapping[str, tuple[str, int]]:
    found: dict[str, tuple[str, int]] = {}
    for node in inputs:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                found.setdefault(str(size), (node.name, dim))
    return found


def _fixed_notes(
    placeholders: Mapping[str, fx.Node], signature: Signature, exported: Exported, inputs: Mapping[str, Input]
) -> tuple[str, ...]:
    """Sizes that export fixed or bounded without a word."""
    notes = []
    bounds = exported.program.range_constraints
    for (name, node), tensor in zip(placeholders.items(), signature.tensors, strict=True):
        kind = inputs[node.name]
        wanted = 1 if tensor.dtype.is_floating_point else 2
        for dim, size in enumerate(node.meta["val"].shape[:wanted]):
            role = "batch" if dim == kind.batch_dim else f"dim {dim}"
            if isinstance(size, torch.SymInt):
                upper = getattr(bounds.get(size.node.expr), "upper", None)
                if upper is not None and upper.is_finite and upper < 2**31:
                    notes.append(f"{role} of input {name} can be at most {upper}")
            elif exported.dynamic:
                notes.append(f"{role} of input {name} is fixed at {int(size)}")
    return tuple(notes)


_KEEPS_INDICES = frozenset(
    [
        "reshape",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "expand",
        "transpose",
        "permute",
        "pad",
        "constant_pad_nd",
        "cat",
        "masked_fill",
        "where",
        "clone",
        "to_copy",
        "slice_scatter",
        "select_scatter",
        "split",
        "flip",
        "roll",
    ]
)


def index_bound(node: fx.Node) -> int | None:
    """Exclusive upper bound of an integer input's values: rows of tables it indexes, classes it is a target among."""
    bounds: list[int] = []
    seen: set[fx.Node] = {node}
    queue = [node]
    while queue:
        current = queue.pop()
        for user in current.users:
            name = getattr(user.target, "_schema", None)
            operation = (
                name.name.split("::")[-1].strip("_") if name is not None else getattr(user.target, "__name__", "")
            )
            args: Any = user.args
            if operation == "embedding" and args[1] is current:
                bounds.append(int(_value(args[0]).shape[0]))
            elif operation in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d") and args[1] is current:
                scores = _value(args[0])
                bounds.append(int(scores.shape[1 if scores.dim() > 1 else 0]))
            elif operation == "index" and current in args[1]:
                size = _value(args[0]).shape[args[1].index(current)]
                if not isinstance(size, torch.SymInt):
                    bounds.append(int(size))
            elif operation == "gather" and args[2] is current:
                size = _value(args[0]).shape[args[1]]
                if not isinstance(size, torch.SymInt):
                    bounds.append(int(size))
            elif (operation in _KEEPS_INDICES or operation == "getitem") and user not in seen:
                value = user.meta.get("val")
                if isinstance(value, (tuple, list)) or (
                    isinstance(value, Tensor) and value.dtype is _value(node).dtype
                ):
                    seen.add(user)
                    queue.append(user)
    return min(bounds) if bounds else None


def _value(node: Any) -> Tensor:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value
