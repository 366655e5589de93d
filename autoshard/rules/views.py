"""Views, reshapes, slices, joins: they follow from which dims they touch."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction
from autoshard.rules.letters import dims_of, line, mark, without, wrap, wrap_all


def dim_groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The smallest runs of dims of two shapes of one numel that hold the same elements; dims of size 1 are left out.

    (4, 6, 5) and (24, 5) give [((0, 1), (0,)), ((2,), (1,))].
    """
    left = [at for at, size in enumerate(source) if size != 1]
    right = [at for at, size in enumerate(target) if size != 1]
    groups = []
    i = j = 0
    while i < len(left):
        start_i, start_j = i, j
        have, want = source[left[i]], target[right[j]]
        while have != want:
            if have < want:
                i += 1
                have *= source[left[i]]
            else:
                j += 1
                want *= target[right[j]]
        i, j = i + 1, j + 1
        groups.append((tuple(left[start_i:i]), tuple(right[start_j:j])))
    return groups


def reshape(op: Operator) -> Rule | None:
    """Where a run of dims is regrouped, the outermost dims of both sides are cut in proportion: `a~ x! -> a~ y!`."""
    source, target = op.operands[0].shape, op.results[0].shape
    if 0 in source:
        return None
    before, after = ["1"] * len(source), ["1"] * len(target)
    for number, (left, right) in enumerate(dim_groups(source, target)):
        merged = len(left) > 1 or len(right) > 1
        for letters, dims, side in ((before, left, "x"), (after, right, "y")):
            for at in dims[1:]:
                letters[at] = f"{side}{at}!"
            letters[dims[0]] = f"g{number}" + "~" * merged
    return Rule(line((before,), (after,)), linear=True)


def _squeeze(op: Operator) -> Rule:
    """Squeezed dims of size above 1 stay, but a shard of size 1 would lose them: never split."""
    shape = op.operands[0].shape
    rank = len(shape)
    dims = wrap_all(op.arguments.get("dim"), rank)
    own = mark(dims_of(rank), dims)
    gone = [at for at in dims if shape[at] == 1]
    return Rule(line((own,), (without(own, gone),)), linear=True)


def _permuted(order: Sequence[int]) -> Rule:
    own = dims_of(len(order))
    return Rule(line((own,), ([own[at] for at in order],)), linear=True)


def _permute(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    return _permuted([wrap(dim, rank) for dim in op.arguments["dims"]])


def _transpose(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    order = list(range(rank))
    if rank > 1:
        names = ("axis0", "axis1") if "axis0" in op.arguments else ("dim0", "dim1")
        first, second = (wrap(op.arguments[name], rank) for name in names)
        order[first], order[second] = second, first
    return _permuted(order)


def _reversed(op: Operator) -> Rule:
    return _permuted(range(len(op.operands[0].shape))[::-1])


def _matrix_transpose(op: Operator) -> Rule:
    order = list(range(len(op.operands[0].shape)))
    return _permuted([*order[:-2], order[-1], order[-2]])


def _movedim(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    source, target = wrap_all(op.arguments["source"], rank), wrap_all(op.arguments["destination"], rank)
    rest = iter(at for at in range(rank) if at not in source)
    return _permuted([source[target.index(at)] if at in target else next(rest) for at in range(rank)])


def _select(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    dim = wrap(op.arguments["dim"], rank)
    own = mark(dims_of(rank), [dim])
    return Rule(line((own,), (without(own, [dim]),)), linear=True)


def _same_size_or_fixed(op: Operator) -> Rule:
    """Slices, pads and the like: a dim whose size changes is never split, nor is one that is moved (`dims`)."""
    source, target = op.operands[0].shape, op.results[0].shape
    own = dims_of(len(source))
    changed = [at for at in range(len(source)) if source[at] != target[at]]
    result = ["y" + letter + "!" if at in changed else letter for at, letter in enumerate(own)]
    return Rule(line((mark(own, changed),), (result,)), linear=True)


def _pad(op: Operator) -> Rule:
    """Pads touch the last dims; negative and positive ones may cancel, so the amounts decide, not the sizes."""
    source = op.operands[0].shape
    rank, pad = len(source), op.arguments["pad"]
    own = dims_of(rank)
    touched = [rank - 1 - at // 2 for at, amount in enumerate(pad) if amount]
    result = ["y" + letter + "!" if at in touched else letter for at, letter in enumerate(own)]
    constant = op.arguments.get("mode", "constant") == "constant"
    linear = not constant or not op.arguments.get("value")
    return Rule(line((mark(own, touched),), (result,)), linear=linear, nonempty=not constant)


def _moved(op: Operator) -> Rule:
    """roll and flip: dims along which elements move are never split; roll without dims moves all."""
    rank = len(op.operands[0].shape)
    own = mark(
        dims_of(rank),
        wrap_all(op.arguments.get("dims"), rank) if op.arguments.get("dims") or "shifts" in op.arguments else (),
    )
    return Rule(line((own,), (own,)), linear=True)


def _triangle(op: Operator) -> Rule:
    return Rule("b... m! n! -> b... m! n!", linear=True)


def _diagonal(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    dims = [wrap(op.arguments["dim1"], rank), wrap(op.arguments["dim2"], rank)]
    own = mark(dims_of(rank), dims)
    return Rule(line((own,), ((*without(own, dims), "n!"),)), linear=True)


def _unfold(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    dim = wrap(op.arguments["dimension"], rank)
    own = mark(dims_of(rank), [dim])
    return Rule(line((own,), ([*("y!" if at == dim else letter for at, letter in enumerate(own)), "w!"],)), linear=True)


def _repeat(op: Operator) -> Rule:
    """Dims repeated once stay; dims of size 1 and new leading dims are made on each rank; others are never split."""
    source, target = op.operands[0].shape, op.results[0].shape
    new = len(target) - len(source)
    own = [f"x{at}!" if size not in (1, target[at + new]) else f"d{at + new}" for at, size in enumerate(source)]
    result = [*dims_of(new), *(f"y{at}!" if letter.startswith("x") else letter for at, letter in enumerate(own))]
    return Rule(line((own,), (result,)), linear=True)


def _repeat_interleave(op: Operator) -> Rule | None:
    """repeat_interleave(x, n, dim): the repeated dim is cut in proportion."""
    rank, dim = len(op.operands[0].shape), op.arguments.get("dim")
    if dim is None:
        return None
    own = mark(dims_of(rank), [wrap(dim, rank)], "~")
    return Rule(line((own,), (own,)), linear=True)


def _cat(op: Operator) -> Rule | None:
    """The joined dim is never split."""
    ranks = {len(operand.shape) for operand in op.operands}
    if len(ranks) != 1:
        return None  # old torch lets 1-dim empty tensors pass
    rank = ranks.pop()
    dim = wrap(op.arguments.get("dim", 0), rank)
    own = dims_of(rank)
    parts = [
        [f"x{number}!" if at == dim else letter for at, letter in enumerate(own)] for number in range(len(op.operands))
    ]
    return Rule(line(parts, (mark(own, [dim]),)), linear=True)


def _stack(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    dim = wrap(op.arguments.get("dim", 0), rank + 1)
    own = dims_of(rank)
    return Rule(line([own] * len(op.operands), ((*own[:dim], "n!", *own[dim:]),)), linear=True)


def _split(op: Operator) -> Rule:
    """split, split_with_sizes, chunk: the cut dim is never split."""
    rank = len(op.operands[0].shape)
    dim = wrap(op.arguments.get("dim", 0), rank)
    own = dims_of(rank)
    parts = [
        [f"x{number}!" if at == dim else letter for at, letter in enumerate(own)] for number in range(len(op.results))
    ]
    return Rule(line((mark(own, [dim]),), parts), linear=True)


def _unbind(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    dim = wrap(op.arguments.get("dim", 0), rank)
    own = mark(dims_of(rank), [dim])
    return Rule(line((own,), [without(own, [dim])] * len(op.results)), linear=True)


def _scatter_part(op: Operator) -> Rule:
    """select_scatter, slice_scatter: a part of the first operand is replaced by the second."""
    whole, part = op.operands[0].shape, op.operands[1].shape
    dim = wrap(op.arguments.get("dim", 0), len(whole))
    own = dims_of(len(whole))
    src = [letter for at, letter in enumerate(own) if at != dim]
    if len(part) == len(whole):
        src.insert(dim, "x!")
    return Rule(line((mark(own, [dim]), src), (mark(own, [dim]),)), linear=True)


def _diff(op: Operator) -> Rule:
    """Differences along a dim, of the values with `prepend` and `append` around them."""
    rank = len(op.results[0].shape)
    dim = wrap(op.arguments.get("dim", -1), rank)
    own = dims_of(rank)
    parts = [[f"x{number}!" if at == dim else letter for at, letter in enumerate(own)] for number in range(4)]
    return Rule(line(parts[:3], (parts[3],)), linear=True)


def _broadcast_tensors(op: Operator) -> Rule:
    """All operands expanded to one shape; each is linear on its own result only, so P passes where all carry it."""
    everywhere = ["b..."] * len(op.operands)
    return Rule(f"{', '.join(everywhere)} -> {', '.join(everywhere)}", linear=True)


def _pixel_shuffle(op: Operator) -> Rule:
    return Rule("b... c~ h! w! -> b... c~ y! x!", linear=True, nonempty=True)


_RESHAPES = (
    "reshape.default view.default _unsafe_view.default view_copy.default flatten.using_ints unflatten.int "
    "unsqueeze.default ravel.default"
)
RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(
    {f"aten.{name}": reshape for name in _RESHAPES.split()}
    | {
        "aten.squeeze.default": _squeeze,
        "aten.squeeze.dim": _squeeze,
        "aten.squeeze.dims": _squeeze,
        "aten.expand.default": Rule("b... -> b...", linear=True),
        "aten.expand_as.default": Rule("b..., b... -> b...", linear=((0,),)),
        "aten.broadcast_to.default": Rule("b... -> b...", linear=True),
        "aten.permute.default": _permute,
        "aten.transpose.int": _transpose,
        "aten.swapaxes.default": _transpose,
        "aten.t.default": _reversed,
        "aten.numpy_T.default": _reversed,
        "aten.mT.default": _matrix_transpose,
        "aten.movedim.int": _movedim,
        "aten.movedim.intlist": _movedim,
        "aten.select.int": _select,
        "aten.slice.Tensor": _same_size_or_fixed,
        "aten.narrow.default": _same_size_or_fixed,
        "aten.pad.default": _pad,
        "aten.constant_pad_nd.default": _pad,
        "aten.roll.default": _moved,
        "aten.flip.default": _moved,
        "aten.tril.default": _triangle,
        "aten.triu.default": _triangle,
        "aten.diagonal.default": _diagonal,
        "aten.unfold.default": _unfold,
        "aten.repeat.default": _repeat,
        "aten.repeat_interleave.self_int": _repeat_interleave,
        "aten.cat.default": _cat,
        "aten.concat.default": _cat,
        "aten.stack.default": _stack,
        "aten.split.Tensor": _split,
        "aten.split_with_sizes.default": _split,
        "aten.chunk.default": _split,
        "aten.unbind.int": _unbind,
        "aten.select_scatter.default": _scatter_part,
        "aten.slice_scatter.default": _scatter_part,
        "aten.diff.default": _diff,
        "aten.broadcast_tensors.default": _broadcast_tensors,
        "aten.pixel_shuffle.default": _pixel_shuffle,
        "aten.pixel_unshuffle.default": _pixel_shuffle,
    }
)
