"""The traced model: one functional graph of ATen operators with the user's names on everything.

`Program.graph` is a torch.fx graph: placeholders for parameters, buffers, constants and inputs, then `call_function`
nodes of functional ATen overloads (and `operator.getitem` for operators of several results), then `output`. Shapes may
hold symbols (batch, sequence); nodes that compute such sizes (`aten.sym_size.int`, integer arithmetic) stay in it.

Every tensor node carries in `node.meta`:
    "val"           fake tensor (or tuple of them), shapes possibly symbolic
    "needs_grad"    bool, whether a gradient flows to this value
    "frames"        tuple[Frame, ...], the module calls it was made in, outermost (the model itself) first
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Frame:
    """One module call on the way to an operator.

    path: module path, "" for the model. call: 0 for the first call of that module in a forward, 1 for the second...
    class_name: qualified class, "models.gpt.Block". file, line, code: the line of that module's forward being run
    (empty and 0 when unknown).
    """

    path: str
    call: int
    class_name: str
    file: str = ""
    line: int = 0
    code: str = ""


@dataclass(frozen=True)
class TensorType:
    """Shape (symbols replaced by their example sizes), dtype, and whether a gradient flows to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Operand:
    """Stands in `Operator.arguments` for the tensor operand of this index."""

    index: int


@dataclass(frozen=True)
class Operator:
    """One call as the rules and the cost model see it: no graph, no symbols.

    name: the overload, "aten.linear.default". operands: tensor inputs in schema order, lists flattened.
    arguments: all schema arguments by name, defaults filled in; tensors replaced by `Operand`, lists by tuples,
    symbolic sizes by their example values. results: tensor outputs in order.
    """

    name: str
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Parameter:
    """A trainable or frozen parameter. aliases: further names of the same (tied) storage."""

    name: str
    aliases: tuple[str, ...]
    type: TensorType
    trainable: bool


@dataclass(frozen=True)
class Buffer:
    """A buffer. updated_by: the graph node whose value replaces it after a forward, or None."""

    name: str
    type: TensorType
    persistent: bool
    updated_by: str | None = None


@dataclass(frozen=True)
class Input:
    """One tensor input of the model's forward. name: the user's argument name (with a suffix inside nested arguments).

    batch_dim: the dim that counts samples, None when the input has none (a shared mask, say).
    high: exclusive upper bound of an integer input's values where the graph implies one (a vocabulary), else None.
    """

    name: str
    type: TensorType
    batch_dim: int | None
    high: int | None = None


@dataclass(frozen=True)
class Program:
    """A traced model. Node names are the keys of everything else that speaks about the graph.

    parameters, buffers, constants, inputs: placeholder node name -> what it is.
    signature: (args, kwargs) of forward as a pytree spec whose leaves are, in order, `leaves`: an input node name or
        ("value", v) for a Python value fixed at trace time.
    outputs: names of the nodes (or None for None, or ("value", v)) that are the leaves of `out_spec`.
    loss: the name of the scalar node that is the loss.
    symbols: symbol name -> (input node name, dim) it is read from; its example size is that input's.
    classes: module path -> qualified class name, for every module of the model, called or not.
    source: "models/gpt.py:gpt_tiny", the workload's name.
    """

    graph: fx.Graph
    parameters: Mapping[str, Parameter]
    buffers: Mapping[str, Buffer]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, Input]
    signature: pytree.TreeSpec
    leaves: tuple[Any, ...]
    outputs: tuple[Any, ...]
    out_spec: pytree.TreeSpec
    loss: str
    symbols: Mapping[str, tuple[str, int]]
    classes: Mapping[str, str]
    source: str
    notes: tuple[str, ...] = ()

    def operators(self) -> Iterator[fx.Node]:
        """The tensor operators in execution order, without `getitem` and size arithmetic."""
        for node in self.graph.nodes:
            if is_operator(node):
                yield node

    def __str__(self) -> str:
        lines = [
            f"program {self.source}: {sum(1 for _ in self.operators())} operators, {len(self.parameters)} parameters"
        ]
        for node in self.operators():
            types = ", ".join(f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in result_types(node))
            args = ", ".join(str(value) for value in operand_values(node))
            lines.append(f"  {node.name} = {operator_name(node)}({args})  # {types}; {place(node)}")
        return "\n".join(lines)


@dataclass(frozen=True, order=True)
class Value:
    """A tensor of the graph: result `index` of the node called `node` (placeholders have index 0)."""

    node: str
    index: int = 0

    def __str__(self) -> str:
        return self.node if self.index == 0 else f"{self.node}[{self.index}]"


def is_tensor(value: Any) -> TypeGuard[Tensor]:
    """Whether an fx meta value is one tensor."""
    return isinstance(value, Tensor)


def is_operator(node: fx.Node) -> bool:
    """Whether `node` computes tensors by an ATen (or custom) operator."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    value = node.meta.get("val")
    return is_tensor(value) or (isinstance(value, (tuple, list)) and any(is_tensor(item) for item in value))


def operator_name(node: fx.Node) -> str:
    """ "aten.linear.default"."""
    return str(node.target)


def value_of(node: fx.Node) -> Value:
    """The value that a node stands for: `getitem` nodes stand for their source's result."""
    if (
        node.op == "call_function"
        and getattr(node.target, "__name__", "") == "getitem"
        and isinstance(node.args[0], fx.Node)
    ):
        index: Any = node.args[1]
        return Value(node.args[0].name, int(index))
    return Value(node.name)


def tensor_operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """The tensor inputs of an operator in schema order, lists flattened; `getitem` nodes as they stand."""
    found: list[fx.Node] = []

    def visit(argument: Any) -> None:
        if isinstance(argument, fx.Node):
            if is_tensor(argument.meta.get("val")):
                found.append(argument)
        elif isinstance(argument, (tuple, list)):
            for item in argument:
                visit(item)

    for argument in bound_arguments(node).values():
        visit(argument)
    return tuple(found)


def operand_values(node: fx.Node) -> tuple[Value, ...]:
    """`tensor_operands` as values."""
    return tuple(value_of(operand) for operand in tensor_operands(node))


def bound_arguments(node: fx.Node) -> dict[str, Any]:
    """All schema arguments of an operator by name, defaults filled in."""
    schema = node.target._schema  # type: ignore[union-attr]
    bound: dict[str, Any] = {}
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            bound[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            bound[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def hint(size: Any) -> int:
    """The example size of a possibly symbolic size."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint)
    return int(size)


def tensor_type(value: Tensor, needs_grad: bool = False) -> TensorType:
    """TensorType of a (fake) tensor, symbols replaced by their example sizes."""
    return TensorType(tuple(hint(size) for size in value.shape), value.dtype, needs_grad)


def result_types(node: fx.Node) -> tuple[TensorType, ...]:
    """Types of the tensors a node yields."""
    value, needs_grad = node.meta["val"], bool(node.meta.get("needs_grad", False))
    values = (value,) if is_tensor(value) else tuple(value)
    return tuple(tensor_type(item, needs_grad and item.dtype.is_floating_point) for item in values if is_tensor(item))


def operator_of(node: fx.Node) -> Operator:
    """The `Operator` a node calls."""
    operands: list[TensorType] = []

    def plain(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            if is_tensor(value):
                operands.append(tensor_type(value, bool(argument.meta.get("needs_grad", False))))
                return Operand(len(operands) - 1)
            return plain(value)
        if isinstance(argument, (tuple, list)):
            return tuple(plain(item) for item in argument)
        if isinstance(argument, torch.SymInt):
            return hint(argument)
        if isinstance(argument, (torch.SymFloat, torch.SymBool)):
            return argument.node.hint
        return argument

    arguments = {name: plain(argument) for name, argument in bound_arguments(node).items()}
    return Operator(operator_name(node), tuple(operands), result_types(node), arguments)


def place(node: fx.Node) -> str:
    """The user's place of a node: "blocks.0.attn, models/gpt.py:41: `q = self.q(x)`"."""
    frames: tuple[Frame, ...] = node.meta.get("frames", ())
    for frame in reversed(frames):
        if frame.line and "/torch/nn/" not in frame.file.replace("\\", "/"):
            where = f"{frame.file}:{frame.line}"
            return f"{frame.path or 'the model'}, {where}: `{frame.code}`"
    return frames[-1].path or "the model" if frames else node.name
