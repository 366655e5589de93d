"""One way to run an operator on one mesh axis."""

from dataclasses import dataclass

from autoshard.placement import Placement


@dataclass(frozen=True)
class AxisStrategy:
    """Placements of an operator's tensor operands (lists flattened) and results on one axis.

    implementation: None when the operator itself, run on the local shards, yields the local results; else the name of
    the local program that does, one of `rules.implementations.IMPLEMENTATIONS`.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    implementation: str | None = None
