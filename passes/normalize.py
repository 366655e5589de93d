"""One spelling for everything: the traced graph becomes functional ATen, without views, idle copies and checks.

After it every reshaping is `aten.reshape.default`, every cast `aten._to_copy.default(x, dtype=...)`; factories state
their dtype, and neither a device nor a tensor to be like; mean-reduced cross entropies are a sum divided by a count of
the targets, so that a rank or microbatch with fewer valid targets weighs less; no lookup counts a whole dim, so that
samples need no numbers; nothing is left that no output needs.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autoshard.errors import UntraceableModel
from autoshard.passes.normalize_build import same_shape, same_size
from autoshard.passes.normalize_index import drop_counting_indices
from autoshard.passes.normalize_loss import shape_losses, sum_losses
from autoshard.program import is_operator, is_tensor, place

aten = torch.ops.aten

_RESHAPES = frozenset({aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default})
_COPIES = frozenset(
    {
        aten.alias.default,
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.lift.default,
        aten.clone.default,
        aten.contiguous.default,
    }
)
_CHECKS = ("aten._assert", "aten.sym_constrain", "aten._functional_assert", "aten._async_error")
_NEUTRAL: Mapping[Any, float] = {
    aten.add.Tensor: 0,
    aten.sub.Tensor: 0,
    aten.mul.Tensor: 1,
    aten.div.Tensor: 1,
    aten.add.Scalar: 0,
    aten.sub.Scalar: 0,
    aten.mul.Scalar: 1,
    aten.div.Scalar: 1,
}
_WITHOUT_GRADIENT = frozenset(
    {aten.detach.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
)
_NEW: Mapping[Any, Any] = {
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
    aten.new_empty.default: aten.empty.memory_format,
}
"""What fills a size with the dtype of a tensor: that tensor, whose values do not matter, is no operand of it."""
_DROPPED_KWARGS = ("device", "pin_memory", "layout", "non_blocking", "memory_format")


def normalize(graph: fx.Graph) -> None:
    """Rewrite `graph` in place. Placeholders carry "val" and "needs_grad"; the output node holds all that must live."""
    _drop_checks(graph)
    inline_regions(graph)
    propagate_needs_grad(graph)
    _spell(graph)
    shape_losses(graph)
    sum_losses(graph)
    drop_counting_indices(graph)
    _share_sizes(graph)
    drop_dead(graph)
    propagate_needs_grad(graph)
    _refuse_unknown_sizes(graph)


def propagate_needs_grad(graph: fx.Graph) -> None:
    """Set "needs_grad": a gradient flows to a floating value made from one that needs it."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        floating = any(is_tensor(item) and (item.dtype.is_floating_point or item.dtype.is_complex) for item in values)
        node.meta["needs_grad"] = (
            floating
            and node.target not in _WITHOUT_GRADIENT
            and not str(node.target).startswith("aten.new_")
            and any(source.meta.get("needs_grad", False) for source in node.all_input_nodes)
        )


def drop_dead(graph: fx.Graph) -> None:
    """Erase what nothing uses; placeholders stay."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)


def _drop_checks(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and str(node.target).startswith(_CHECKS):
            graph.erase_node(node)


def inline_regions(graph: fx.Graph) -> None:
    """Put the body of autocast, grad-mode and checkpoint regions in place of the call, where decomposing left one.

    Casts that autocast makes are explicit in the body by then; a region without gradient detaches its results.
    """
    owner = graph.owning_module
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        body_at = next(
            (i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.op == "get_attr"), None
        )
        name = node.target.name()
        if body_at is None or owner is None or not name.startswith(("wrap", "tag_activation_checkpoint")):
            raise UntraceableModel(
                f"the region operator {name} cannot be sharded",
                where=place(node),
                help="write it with plain tensor operations, for example torch.where instead of torch.cond",
            )
        body: Any = owner.get_submodule(str(node.args[body_at].target))
        arguments = iter(node.args[body_at + 1 :])
        mapping: dict[fx.Node, Any] = {}
        with graph.inserting_before(node):
            for inner in body.graph.nodes:
                if inner.op == "placeholder":
                    mapping[inner] = next(arguments)
                elif inner.op != "output":
                    mapping[inner] = graph.node_copy(inner, mapping.__getitem__)
                    mapping[inner].meta.setdefault("frames", node.meta.get("frames", ()))
            output = next(iter(reversed(body.graph.nodes)))
            results = fx.map_arg(output.args[0], mapping.__getitem__)
            if "set_grad_enabled" in name and node.args[0] is False:
                results = fx.map_arg(results, lambda result: _call(graph, aten.detach.default, (result,), {}, result))
        if not isinstance(results, (tuple, list)):
            node.replace_all_uses_with(results)
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], like: fx.Node, val: Any = None
) -> fx.Node:
    """A new call made where `like` was made."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = like.meta.get("val") if val is None else val
    node.meta["frames"] = like.meta.get("frames", ())
    return node


def _spell(graph: fx.Graph) -> None:
    """Respell node by node, in order, so that each sees its operands already respelt."""
    for node in list(graph.nodes):
        if not is_operator(node):
            continue
        if node.target in _RESHAPES:
            node.target = aten.reshape.default
        if node.target in _NEW:
            node.target, node.args = _NEW[node.target], node.args[1:]
        if node.target is aten.type_as.default:
            node.target, node.args = aten._to_copy.default, node.args[:1]
        if node.target in _MULTIPLE:
            _MULTIPLE[node.target](graph, node)
            continue
        source = _equal_operand(node)
        if source is not None:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            continue
        _state_dtype(node)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name not in _DROPPED_KWARGS}


def _equal_operand(node: fx.Node) -> fx.Node | None:
    """The operand that `node` merely repeats, or None."""
    source = node.args[1 if node.target is aten.slice_scatter.default else 0] if node.args else None
    value = node.meta["val"]
    if not isinstance(source, fx.Node) or not is_tensor(value) or not is_tensor(source.meta.get("val")):
        return None
    origin = source.meta["val"]
    if value.dtype != origin.dtype or not same_shape(value, origin):
        return None
    target = node.target
    if target in _COPIES or target in (aten._to_copy.default, aten.reshape.default, aten.expand.default):
        return source
    if target is aten.detach.default:
        return None if source.meta.get("needs_grad", False) else source
    if target is aten.slice.Tensor:
        step = node.args[4] if len(node.args) > 4 else 1
        return source if step == 1 else None
    if target is aten.slice_scatter.default:  # the whole dim is written over
        return source
    if target is aten.dropout.default:
        return source if not node.args[2] or node.args[1] == 0.0 else None
    if target in _NEUTRAL:
        other = node.args[1]
        return (
            source
            if isinstance(other, (int, float)) and other == _NEUTRAL[target] and "rounding_mode" not in node.kwargs
            else None
        )
    return None


def _state_dtype(node: fx.Node) -> None:
    """Factories follow torch's default dtype at run time unless they state one."""
    names = {argument.name for argument in node.target._schema.arguments}  # type: ignore[union-attr]
    is_factory = "dtype" in names and not any(is_tensor(source.meta.get("val")) for source in node.all_input_nodes)
    if (is_factory or node.target is aten._to_copy.default) and is_tensor(node.meta["val"]):
        node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}


def _expand_each(graph: fx.Graph, node: fx.Node) -> None:
    """`broadcast_tensors` is an expand of each operand that is not of the full shape already."""
    operands: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    for user in list(node.users):
        source, value = operands[user.args[1]], user.meta["val"]  # type: ignore[index]
        if not same_shape(source.meta["val"], value):
            with graph.inserting_before(user):
                sizes = [
                    _size_argument(graph, size, operands, position - value.dim(), user)
                    for position, size in enumerate(value.shape)
                ]
                source = _call(graph, aten.expand.default, (source, sizes), {}, user)
                source.meta["needs_grad"] = user.meta.get("needs_grad", False)
        user.replace_all_uses_with(source)
        graph.erase_node(user)
    graph.erase_node(node)


def _size_argument(graph: fx.Graph, size: Any, operands: Iterable[fx.Node], from_end: int, like: fx.Node) -> Any:
    """A size as an argument: a number, or the `sym_size` of the operand that has it at this place from the end."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    for operand in operands:
        value = operand.meta["val"]
        if value.dim() >= -from_end and same_size(value.shape[from_end], size):
            return _call(graph, aten.sym_size.int, (operand, value.dim() + from_end), {}, like, size)
    raise AssertionError(f"no operand of {like} has size {size}")


_MULTIPLE: Mapping[Any, Callable[[fx.Graph, fx.Node], None]] = {aten.broadcast_tensors.default: _expand_each}


def _share_sizes(graph: fx.Graph) -> None:
    """One `sym_size` a size: the first input dim that has the symbol, read once, before everything else."""
    first: dict[Any, fx.Node] = {}
    anchor = next((node for node in graph.nodes if node.op != "placeholder"), None)
    assert anchor is not None
    with graph.inserting_before(anchor):
        for node in list(graph.nodes):
            if node.op != "placeholder":
                continue
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if is_tensor(value) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr not in first:
                    first[size.node.expr] = graph.call_function(aten.sym_size.int, (node, dim))
                    first[size.node.expr].meta.update(val=size, frames=())
    made = set(first.values())
    for node in list(graph.nodes):
        if node.op != "call_function" or node in made or not isinstance(node.meta.get("val"), torch.SymInt):
            continue
        known = first.get(node.meta["val"].node.expr)
        if known is not None:
            node.replace_all_uses_with(known)
            graph.erase_node(node)


def _refuse_unknown_sizes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (tuple, list)) else (value,)
        for item in values:
            sizes = item.shape if is_tensor(item) else (item,)
            if any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes):
                raise UntraceableModel(
                    f"{node.target} has a result whose size depends on the values of a tensor",
                    where=place(node),
                    help="keep the size fixed: use a mask with torch.where instead of selecting, "
                    "or one operator by torch.library.custom_op",
                )


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one result of a multi-result operator."""
    return node.op == "call_function" and node.target is operator.getitem
