"""The program of one stage as every rank of its mesh runs it: what `lower` makes and `emit` writes down.

Tensors are known by unique names. Each has its whole shape, and how the mesh's axes cut it; the local shape follows.
Placements appear in no argument any more: what changes one is a node of its own, named after the function of
`autoshard/runtime/collectives.py` that does it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from autoshard.placement import Layout, format_layout
from autoshard.plan import Mesh
from autoshard.program import Frame, Value

Kind = Literal["computed", "parameter", "buffer", "input", "received", "total", "microbatches"]


@dataclass(frozen=True)
class Extent:
    """The size of one dim. size: the whole one, an int or an expression of the program's symbols.

    axes: mesh axes that cut it, outermost first. even: whether every rank's piece is as large.
    """

    size: Any
    axes: tuple[str, ...] = ()
    even: bool = True

    def __str__(self) -> str:
        return "/".join((str(self.size), *self.axes))


@dataclass(frozen=True)
class LocalTensor:
    """One rank's part of a tensor.

    layout: on the axes of the stage's mesh. value: what it is in the program, None for counts of microbatches.
    attribute: the user's name of a parameter, buffer (a constant is one) or input; of a total, its name. example: the
    whole shape, example sizes for symbols.
    """

    name: str
    dims: tuple[Extent, ...]
    dtype: torch.dtype
    layout: Layout
    needs_grad: bool = False
    kind: Kind = "computed"
    value: Value | None = None
    attribute: str = ""
    example: tuple[int, ...] = ()

    @property
    def shape(self) -> str:
        """ "(b/dp, s, 64/tp)", symbols as they are."""
        return f"({', '.join(map(str, self.dims))}{',' if len(self.dims) == 1 else ''})"


@dataclass(frozen=True)
class Ref:
    """Stands in arguments for the tensor of this name."""

    name: str


@dataclass(frozen=True)
class LocalNode:
    """One call. target: an ATen overload ("aten.linear.default"), a conversion or the helper of an implementation.

    arguments: by name, tensors as `Ref`, sizes that follow the inputs as `Extent`. groups: the axes whose process
    groups it is given, in order. frames: the module calls it belongs to. results: names of its tensors, None where
    nothing reads one. converts: whether it only changes a placement. why: the reason and the price of that, one line of
    a comment each.
    """

    target: str
    arguments: Mapping[str, Any]
    results: tuple[str | None, ...]
    frames: tuple[Frame, ...]
    groups: tuple[str, ...] = ()
    converts: bool = False
    why: tuple[str, ...] = ()

    def operands(self) -> tuple[str, ...]:
        """Names of the tensors it reads, each once, in order."""
        return tuple(dict.fromkeys(refs(tuple(self.arguments.values()))))


def refs(argument: Any) -> Iterator[str]:
    """Names of the tensors that stand in an argument, each as often as it does."""
    if isinstance(argument, Ref):
        yield argument.name
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from refs(item)


@dataclass(frozen=True)
class StoredTensor:
    """A parameter or buffer as a rank stores it.

    name: the user's. aliases: further names in this stage. placement: axis -> dim that it splits. summed: axes over
    which its gradient is a partial sum until it is reduced, once a step.
    """

    name: str
    aliases: tuple[str, ...]
    dims: tuple[Extent, ...]
    dtype: torch.dtype
    placement: Mapping[str, int]
    summed: tuple[str, ...] = ()
    trainable: bool = True
    persistent: bool = True
    is_buffer: bool = False


@dataclass(frozen=True)
class LocalStage:
    """Everything one stage runs.

    inputs: names of its tensors that are inputs of the model or arrive from earlier stages, in the order of forward.
    outputs: names of the tensors it returns, the loss last in the last stage. updates: buffer -> tensor that replaces
    it. totals: nodes that count what the whole batch holds (run ahead of the microbatches), and total's name -> tensor.
    """

    number: int
    mesh: Mesh
    nodes: tuple[LocalNode, ...]
    tensors: Mapping[str, LocalTensor]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stored: tuple[StoredTensor, ...]
    updates: Mapping[str, str]
    total_nodes: tuple[LocalNode, ...] = ()
    totals: Mapping[str, str] = field(default_factory=dict)
    remat: tuple[str, ...] = ()
    gathers_again: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of more than one rank."""
        return tuple(axis for axis, size in zip(self.mesh.axes, self.mesh.sizes, strict=True) if size > 1)

    def __str__(self) -> str:
        lines = [f"stage {self.number} on {self.mesh}"]
        for node in (*self.total_nodes, *self.nodes):
            names = [name or "_" for name in node.results]
            shapes = [
                f"{self.tensors[name].shape} {format_layout(self.tensors[name].layout, self.mesh.axes)}"
                for name in node.results
                if name
            ]
            lines.append(f"  {', '.join(names)} = {node.target}({', '.join(node.operands())})  # {'; '.join(shapes)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class LocalCrossing:
    """A value that stage `source` sends to stage `target`, with its dims and placements at both ends."""

    name: str
    source: int
    target: int
    given: Mapping[str, int]
    taken: Mapping[str, int]
    dims: tuple[Extent, ...]
    dtype: torch.dtype
    needs_grad: bool


@dataclass(frozen=True)
class LocalTied:
    """One parameter that several stages hold. copies: stage -> (its name there, its placement there)."""

    shape: tuple[int, ...]
    copies: Mapping[int, tuple[str, Mapping[str, int]]]


@dataclass(frozen=True)
class LocalProgram:
    """All stages, and what passes between them."""

    stages: tuple[LocalStage, ...]
    crossings: tuple[LocalCrossing, ...]
    tied: tuple[LocalTied, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.stages))
