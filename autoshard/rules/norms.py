"""Normalisation: the normalised dims stay whole, batches and channels are split."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction
from autoshard.rules.letters import dims_of, line, mark


def _layer_norm(op: Operator) -> Rule:
    rank, normalized = len(op.operands[0].shape), len(op.arguments["normalized_shape"])
    own = mark(dims_of(rank), range(rank - normalized, rank))
    inner = own[rank - normalized :]
    statistics = (*own[: rank - normalized], *["1"] * normalized)
    return Rule(line((own, inner, inner), (own, statistics, statistics)[: len(op.results)]))


def _rms_norm(op: Operator) -> Rule:
    rank, normalized = len(op.operands[0].shape), len(op.arguments["normalized_shape"])
    own = mark(dims_of(rank), range(rank - normalized, rank))
    return Rule(
        line(
            (own, own[rank - normalized :]), (own, (*own[: rank - normalized], *["1"] * normalized))[: len(op.results)]
        )
    )


def _group_norm(op: Operator) -> Rule:
    """Whole groups of channels may be split off."""
    return Rule("b c~ x!..., c~, c~ -> b c~ x!...", divides=(("c", op.arguments["num_groups"]),))


def _batch_norm(op: Operator) -> Rule:
    """Statistics are of the whole batch in training: channels split, or the batch with summed statistics."""
    if op.arguments["training"]:
        return Rule("b@batch_norm_synced c x!..., c, c, c, c -> b c x!..., c, c, c, c", nonempty=True)
    return Rule("b! c x!..., c, c, c, c -> b! c x!..., z!, z!, c, c", nonempty=True)


def _batch_norm_frozen(op: Operator) -> Rule:
    """With the running statistics batch norm is an affine map of each channel."""
    # torch's backward of an empty batch divides by zero and ends the process, hence `nonempty`.
    results = ("b c x...", "z!", "z!")[: len(op.results)]
    return Rule(f"b c x..., c, c, c, c -> {', '.join(results)}", nonempty=True)


def _instance_norm(op: Operator) -> Rule | None:
    """Each sample and channel alone; running statistics would be means over the batch."""
    if len(op.operands) > 3 or not op.arguments["use_input_stats"]:
        return None
    return Rule("b c x!..., c, c -> b c x!...", nonempty=True)


RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(
    {
        "aten.layer_norm.default": _layer_norm,
        "aten.native_layer_norm.default": _layer_norm,
        "aten.rms_norm.default": _rms_norm,
        "aten._fused_rms_norm.default": _rms_norm,
        "aten.group_norm.default": _group_norm,
        "aten._native_batch_norm_legit_functional.default": _batch_norm,
        "aten._native_batch_norm_legit_no_training.default": _batch_norm_frozen,
        "aten.instance_norm.default": _instance_norm,
    }
)
