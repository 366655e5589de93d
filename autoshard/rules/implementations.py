"""Named implementations: local programs that are not the operator itself, with their own layouts.

A rule names one as `letter@name`: when that letter is split, the named program runs in place of the operator.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autoshard.placement import I, P, Placement, R


@dataclass(frozen=True)
class Implementation:
    """One local program.

    name: its name in `AxisStrategy.implementation`. doc: one sentence saying what it does.
    helper: the function in `autoshard/runtime/operators.py`, or None where an expression around the operator is enough.
    communicates: whether it runs collectives inside. even: whether every shard must have the same size.
    reduced: placement of the results that lack the split letter.
    whole: placement of the operands that lack the split letter.
    """

    name: str
    doc: str
    helper: str | None
    communicates: bool
    even: bool = False
    reduced: Placement = P
    whole: Placement = R


IMPLEMENTATIONS: Mapping[str, Implementation] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Implementation(
                "vocab_embedding",
                "looks up the ids of this rank's rows of the table and yields zero for all others",
                helper="vocab_embedding",
                communicates=False,
            ),
            Implementation(
                "vocab_cross_entropy",
                "cross entropy of logits split over classes: reduces maximum, sum of exponentials and target's logit",
                helper="vocab_cross_entropy",
                communicates=True,
                reduced=I,
                whole=I,
            ),
            Implementation(
                "average",
                "divides the mean over this rank's equal share by the number of ranks: the shares sum to the mean",
                helper=None,
                communicates=False,
                even=True,
            ),
            Implementation(
                "batch_norm_synced",
                "batch norm whose statistics are summed over the ranks, so that they are those of the whole batch",
                helper="batch_norm",
                communicates=True,
                reduced=I,
            ),
        )
    }
)
