"""What rewriting needs: calls added to a graph with their fake values, and sizes compared without a guard."""

from typing import Any

import torch
from torch import Tensor, fx


class Builder:
    """Adds calls before a node, with its frames and fake values. `propagate_needs_grad` has to follow."""

    def __init__(self, graph: fx.Graph, like: fx.Node) -> None:
        self.graph, self.like = graph, like

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A new node; its value is what `target` makes of the fake values of the arguments."""
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        with fake_mode(self.like.meta["val"]):
            node.meta["val"] = target(*values[0], **values[1])
        node.meta["frames"] = self.like.meta.get("frames", ())
        node.meta["needs_grad"] = False
        return node


def fake_mode(value: Any) -> Any:
    """The mode that a traced value belongs to."""
    return value.fake_mode


def same_size(left: Any, right: Any) -> bool:
    """Whether two sizes are equal for every input, without adding a guard."""
    if isinstance(left, torch.SymInt) and isinstance(right, torch.SymInt):
        return bool(left.node.expr == right.node.expr)
    return not isinstance(left, torch.SymInt) and not isinstance(right, torch.SymInt) and int(left) == int(right)


def same_shape(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have equal shapes for every input."""
    return left.dim() == right.dim() and all(same_size(a, b) for a, b in zip(left.shape, right.shape, strict=True))
