"""The graph under construction between torch.export and `Program`: placeholders known by what they stand for."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from autoshard.passes.trace_export import PREFIX, Exported, Signature
from autoshard.passes.trace_frames import FrameReader


@dataclass(frozen=True)
class Names:
    """Every name of the whole (not shortened) model's state.

    parameters, buffers: name -> tensor, tied names apart. canonical: name -> the first name of the same storage.
    """

    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    persistent: frozenset[str]
    canonical: Mapping[str, str]


def read_names(model: nn.Module) -> Names:
    """Names and ties of a model's parameters and buffers. Tied: the same object, or the same bytes of one storage."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    first: dict[Any, str] = {}
    canonical: dict[str, str] = {}
    for name, tensor in (*parameters.items(), *buffers.items()):
        canonical[name] = first.setdefault(_storage(tensor), name)
    persistent = frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    )
    return Names(parameters, buffers, persistent, canonical)


def _storage(tensor: Tensor) -> Any:
    if not tensor.numel() or tensor.layout is not torch.strided:
        return id(tensor)
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
    )


@dataclass
class Draft:
    """A graph whose output node holds ([loss, *results], [new buffer values]).

    state: name of a parameter or buffer (its first name) -> placeholder. updates: buffer names, in the output's order.
    """

    graph: fx.Graph
    state: dict[str, fx.Node] = field(default_factory=dict)
    constants: dict[fx.Node, Tensor] = field(default_factory=dict)
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    updates: list[str] = field(default_factory=list)

    @property
    def output(self) -> fx.Node:
        return self.graph.output_node()

    def calls(self) -> Iterator[fx.Node]:
        """All nodes but placeholders and output, in order."""
        return (node for node in self.graph.nodes if node.op not in ("placeholder", "output"))


def identifier(name: str) -> str:
    """A dotted name as a Python identifier."""
    return re.sub(r"\W", "_", name)


def draft(exported: Exported, signature: Signature, names: Names, reader: FrameReader) -> Draft:
    """Copy an exported graph: one placeholder a storage, the user's names, frames on every node.

    State that the (shortened) export lacks gets its placeholder without "val"; the splice fills it in.
    """
    program = exported.program
    old = program.graph_module.graph
    result = Draft(fx.Graph(owning_module=program.graph_module))
    sources: dict[str, fx.Node] = {node.name: node for node in old.nodes if node.op == "placeholder"}
    by_target: dict[str, fx.Node] = {}
    lifted: list[tuple[fx.Node, Tensor]] = []
    mapping: dict[fx.Node, Any] = {}
    user_inputs: list[fx.Node] = []
    for spec in program.graph_signature.input_specs:
        node = sources[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            user_inputs.append(node)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            by_target[_strip(str(spec.target))] = node
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            lifted.append((node, program.constants[str(spec.target)]))
    for name, tensor in (*names.parameters.items(), *names.buffers.items()):
        first = names.canonical[name]
        if first not in result.state:
            kind = "p" if name in names.parameters else "b"
            made = result.graph.create_node(
                "placeholder", f"{kind}_{identifier(first)}", name=f"{kind}_{identifier(first)}"
            )
            made.meta["needs_grad"] = tensor.requires_grad and kind == "p"
            made.meta["frames"] = ()
            result.state[first] = made
        if name in by_target:
            mapping[by_target[name]] = result.state[first]
            result.state[first].meta.setdefault("val", by_target[name].meta["val"])
    for node, tensor in lifted:
        mapping[node] = _constant(result, node, tensor)
    for name, node in zip(signature.names, user_inputs, strict=True):
        made = result.graph.create_node("placeholder", name, name=identifier(name))
        made.meta.update(val=node.meta["val"], needs_grad=False, frames=())
        result.inputs[name] = mapping[node] = made
    for node in old.nodes:
        if node.op in ("call_function", "get_attr"):
            copy = result.graph.node_copy(node, mapping.__getitem__)
            copy.meta = {"val": node.meta.get("val"), "frames": reader.frames(node)}
            mapping[node] = copy
    values: list[Any] = []
    updated: list[Any] = []
    flat = old.output_node().args[0]
    for spec, value in zip(program.graph_signature.output_specs, flat, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            values.append(fx.map_arg(value, mapping.__getitem__))
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            result.updates.append(names.canonical[_strip(str(spec.target))])
            updated.append(fx.map_arg(value, mapping.__getitem__))
    result.graph.output((values, updated))
    return result


def _strip(name: str) -> str:
    return name.removeprefix(PREFIX + ".")


def _constant(result: Draft, node: fx.Node, tensor: Tensor) -> fx.Node:
    """A lifted constant; equal ones share one placeholder, so that repeated blocks use the same."""
    for known, value in result.constants.items():
        if value is tensor or (
            value.dtype == tensor.dtype
            and value.shape == tensor.shape
            and not value.is_meta
            and not tensor.is_meta
            and torch.equal(value, tensor)
        ):
            return known
    made = result.graph.create_node("placeholder", "constant", name=f"constant_{len(result.constants)}")
    made.meta.update(val=node.meta["val"], needs_grad=False, frames=())
    result.constants[made] = tensor.detach()
    return made


def renamed(source: Draft, order: Sequence[fx.Node] | None = None) -> Draft:
    """The same graph with every operator named after its operation, numbered in order, and dead nodes gone."""
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in order or source.graph.nodes:
        if node.op == "placeholder":
            copy = graph.create_node("placeholder", node.name, name=node.name)
        elif node.op == "output":
            copy = graph.output(fx.map_arg(node.args[0], mapping.__getitem__))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
            copy = graph.create_node("call_function", node.target, args, kwargs, name=_operation(node))
        copy.meta = {key: node.meta[key] for key in ("val", "needs_grad", "frames") if key in node.meta}
        mapping[node] = copy
    return Draft(
        graph,
        {name: mapping[node] for name, node in source.state.items()},
        {mapping[node]: value for node, value in source.constants.items()},
        {name: mapping[node] for name, node in source.inputs.items()},
        list(source.updates),
    )


def _operation(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1].strip("_")
    return str(getattr(node.target, "__name__", "call"))
