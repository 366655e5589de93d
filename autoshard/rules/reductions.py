"""Reductions, scans and sorts: sums over a split dim are partial, means are averaged, all else needs the whole dim."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction
from autoshard.rules.letters import dims_of, line, mark, without, wrap, wrap_all


def _reduced(op: Operator, suffix: str, linear: bool = False) -> Rule:
    rank = len(op.operands[0].shape)
    dims = wrap_all(op.arguments.get("dim"), rank)
    own = mark(dims_of(rank), dims, suffix)
    kept = ["1" if at in dims else letter for at, letter in enumerate(own)]
    after = kept if op.arguments.get("keepdim") else without(own, dims)
    return Rule(line((own,), [after] * len(op.results)), linear=linear)


def _sum(op: Operator) -> Rule:
    return _reduced(op, "", linear=True)


def _mean(op: Operator) -> Rule:
    return _reduced(op, "@average", linear=True)


def _whole(op: Operator) -> Rule:
    """max, var, norms, logical reductions: the parts do not add up."""
    return _reduced(op, "!")


def _count(op: Operator) -> Rule:
    """Counts add up, though counting is not linear."""
    return _reduced(op, "")


def _scan(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    own = mark(dims_of(rank), [wrap(op.arguments["dim"], rank)])
    linear = op.name == "aten.cumsum.default"
    return Rule(line((own,), [own] * len(op.results)), linear=linear)


def _along(op: Operator) -> Rule:
    """softmax, sort, topk: the whole dim is needed; its size may change."""
    rank = len(op.operands[0].shape)
    dim = wrap(op.arguments.get("dim", -1), rank)
    own = mark(dims_of(rank), [dim])
    after = ["y!" if at == dim else letter for at, letter in enumerate(own)]
    return Rule(line((own,), [after] * len(op.results)))


_WHOLE = (
    "amax.default amin.default max.default min.default max.dim min.dim argmax.default argmin.default any.default "
    "any.dim any.dims all.default all.dim all.dims prod.default prod.dim_int var.default var.dim var.correction "
    "std.default std.dim std.correction var_mean.dim var_mean.correction std_mean.correction logsumexp.default "
    "linalg_vector_norm.default norm.Scalar norm.ScalarOpt_dim median.dim nansum.default kthvalue.default"
)
_ALONG = (
    "softmax.int _softmax.default log_softmax.int _log_softmax.default sort.default sort.stable argsort.default "
    "topk.default glu.default"
)
RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(
    {f"aten.{name}": _whole for name in _WHOLE.split()}
    | {f"aten.{name}": _along for name in _ALONG.split()}
    | {
        "aten.sum.default": _sum,
        "aten.sum.dim_IntList": _sum,
        "aten.count_nonzero.dim_IntList": _count,
        "aten.count_nonzero.default": _count,
        "aten.mean.default": _mean,
        "aten.mean.dim": _mean,
        "aten.cumsum.default": _scan,
        "aten.cumprod.default": _scan,
        "aten.logcumsumexp.default": _scan,
        "aten.cummax.default": _scan,
        "aten.cummin.default": _scan,
    }
)
