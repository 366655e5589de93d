"""Losses: sums over split samples are partial sums; means of all elements are averaged."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction
from autoshard.rules.letters import dims_of, line
from autoshard.rules.schema import operand_index

NONE, MEAN, SUM = 0, 1, 2  # torch's reduction codes


def _elementwise(op: Operator) -> Rule:
    """mse_loss and kin: one term an element, operands broadcast."""
    reduction = op.arguments.get("reduction", MEAN)
    operand = "b...@average" if reduction == MEAN else "b..."
    return Rule(f"{', '.join([operand] * 4)} -> {'b...' if reduction == NONE else ''}")


def _class_loss(op: Operator, classes: str) -> Rule | None:
    """Logits b c x..., targets b x... (or c and a scalar): one term a target, weighted by c."""
    reduction = op.arguments.get("reduction", MEAN)
    if reduction == MEAN:
        return None  # divided by the targets counted, which a shard cannot know
    rank = len(op.operands[0].shape)
    batch = ("b",) if rank > 1 else ()
    inner = dims_of(max(rank - 2, 0))
    logits, target = (*batch, f"c{classes}", *inner), (*batch, *inner)
    given_probabilities = op.operands[1].shape == op.operands[0].shape
    result = target if reduction == NONE else ()
    return Rule(line((logits, logits if given_probabilities else target, (f"c{classes}",)), (result,)))


def _cross_entropy(op: Operator) -> Rule | None:
    """Classes are split by an own implementation, where targets are indices and classes have no weights."""
    indices = not op.operands[1].dtype.is_floating_point
    by_class = indices and operand_index(op, "weight") is None
    return _class_loss(op, "@vocab_cross_entropy" if by_class else "!")


def _nll(op: Operator) -> Rule | None:
    return _class_loss(op, "!")


_ELEMENTWISE = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits "
    "soft_margin_loss kl_div"
)
RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(
    {f"aten.{name}.default": _elementwise for name in _ELEMENTWISE.split()}
    | {
        "aten.cross_entropy_loss.default": _cross_entropy,
        "aten.nll_loss.default": _nll,
        "aten.nll_loss_nd.default": _nll,
        "aten.nll_loss2d.default": _nll,
    }
)
