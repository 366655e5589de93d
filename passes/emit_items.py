"""Items of a body as text and as reads: what both the writer of a forward and the records of its classes ask."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.passes import emit_helpers, emit_ops, emit_views
from autoshard.passes.emit_expression import ATOM, Expression
from autoshard.passes.emit_scope import symbols_of
from autoshard.passes.emit_tree import Item, Plain
from autoshard.passes.local import LocalTensor, refs

WRITERS = {**emit_ops.WRITERS, **emit_views.WRITERS, **emit_helpers.WRITERS}


def write(item: Plain, scope: Any) -> Expression:
    """A node's expression."""
    node = item.node
    if node.target == "update":
        buffer = (
            scope.paths.attribute(scope.body.path, _below(node.arguments["buffer"], scope.body.path))
            if hasattr(scope, "paths")
            else "b"
        )
        return Expression(f"{buffer}.copy_({scope.ref(node.arguments['x'].name).within(ATOM)}.detach())")
    if node.converts:
        return emit_helpers.conversion(node, scope)
    writer = WRITERS.get(node.target)
    return writer(node, scope) if writer is not None else emit_ops.fallback(node, scope)


def _below(name: str, path: str) -> str:
    return name[len(path) + 1 :] if path else name


def reads(item: Item) -> Iterator[str]:
    """Tensors an item reads, each as often as it stands in the text."""
    if isinstance(item, Plain):
        yield from refs(tuple(item.node.arguments.values()))
    else:
        yield from item.operands


def is_list(item: Item) -> bool:
    """Whether an item gives a list of pieces, also where it is of one."""
    return isinstance(item, Plain) and ".split" in item.node.target


def plain_name(tensor: LocalTensor) -> str:
    """A name for a tensor that no line of the user's names."""
    return tensor.attribute.replace(".", "_") if tensor.attribute and tensor.kind != "computed" else "x"


def shape_text(tensor: LocalTensor, letters: Mapping[Any, str], axes: Sequence[str]) -> str:
    """ "b/dp s 64/tp", and the axes on which it is a partial sum."""
    dims = " ".join("/".join((_size_text(extent.size, letters), *extent.axes)) for extent in tensor.dims)
    partial = [axis for axis, placement in zip(axes, tensor.layout, strict=False) if placement.kind == "P"]
    return (dims or "scalar") + (f", partial over {' and '.join(partial)}" if partial else "")


def _size_text(size: Any, letters: Mapping[Any, str]) -> str:
    if isinstance(size, int):
        return str(size)
    text = str(size)
    for symbol in sorted(symbols_of(size), key=lambda s: -len(str(s))):
        text = text.replace(str(symbol), letters.get(symbol, str(symbol)))
    text = text.replace(" ", "")
    return text if set("+-()") & set(text) else "*".join(sorted(text.split("*")))
