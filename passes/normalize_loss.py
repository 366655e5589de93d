"""Mean-reduced cross entropies as a sum over the targets divided by what the targets count for.

A mean over valid targets is not a mean of means. Written `sum / count`, both parts are plain sums over samples, and
every split of the batch, over ranks or microbatches, adds up exactly.

    no weights:     count = (target != ignore_index).sum()
    weights w:      count = sum of w[target] over the valid targets
    probabilities:  count = number of samples
"""

from typing import Any

import torch
from torch import Tensor, fx

from autoshard.passes.normalize_build import Builder
from autoshard.program import is_operator

aten = torch.ops.aten

_CROSS_ENTROPY = aten.cross_entropy_loss.default
_NLL = frozenset({aten.nll_loss.default, aten.nll_loss_nd.default, aten.nll_loss2d.default})
_NONE, _MEAN, _SUM = 0, 1, 2


def shape_losses(graph: fx.Graph) -> None:
    """Give losses that are not reduced the shape of their targets: torch 2.13 records a scalar's on the meta device."""
    for node in graph.nodes:
        if not is_operator(node) or (node.target is not _CROSS_ENTROPY and node.target not in _NLL):
            continue
        if _argument(node, 3, "reduction", _MEAN) == _NONE and node.meta["val"].dim() == 0:
            scores, target = node.args[0].meta["val"], node.args[1].meta["val"]
            if target.dtype.is_floating_point:  # probabilities of each class
                target = scores.select(1 if scores.dim() > 1 else 0, 0)
            node.meta["val"] = scores.new_empty(target.shape)


def sum_losses(graph: fx.Graph) -> None:
    """Rewrite every mean-reduced cross entropy and negative log likelihood."""
    for node in list(graph.nodes):
        if is_operator(node) and (node.target is _CROSS_ENTROPY or node.target in _NLL):
            _sum_loss(graph, node)


def _sum_loss(graph: fx.Graph, node: fx.Node) -> None:
    scores, target = node.args[0], node.args[1]
    weight = _argument(node, 2, "weight", None)
    reduction = _argument(node, 3, "reduction", _MEAN)
    ignore = _argument(node, 4, "ignore_index", -100)
    if reduction != _MEAN:
        return
    assert isinstance(scores, fx.Node) and isinstance(target, fx.Node)
    rest = (_argument(node, 5, "label_smoothing", 0.0),) if node.target is _CROSS_ENTROPY else ()
    with graph.inserting_before(node):
        build = Builder(graph, node)
        total = build.call(node.target, scores, target, weight, _SUM, ignore, *rest)
        total.meta["needs_grad"] = node.meta.get("needs_grad", False)
        count = _count(build, scores.meta["val"], target, weight, ignore)
        mean = build.call(aten.div.Tensor, total, count)
        mean.meta["needs_grad"] = node.meta.get("needs_grad", False)
    node.replace_all_uses_with(mean)
    graph.erase_node(node)


def _count(build: Builder, scores: Tensor, target: fx.Node, weight: fx.Node | None, ignore: int) -> fx.Node:
    if target.meta["val"].dtype.is_floating_point:
        one_class = build.call(aten.select.int, target, 1 if scores.dim() > 1 else 0, 0)
        return build.call(aten.sum.default, build.call(aten.ones_like.default, one_class))
    valid = build.call(aten.ne.Scalar, target, ignore)
    if weight is None:
        return build.call(aten.sum.default, valid)
    classes = build.call(aten.mul.Tensor, target, valid)  # an ignored target counts as class 0, with weight 0
    weights = build.call(aten.index.Tensor, weight, [classes])
    return build.call(aten.sum.default, build.call(aten.mul.Tensor, weights, valid))


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)
