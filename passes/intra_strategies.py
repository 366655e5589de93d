"""The strategies of an operator, a parameter or a boundary value on a whole mesh: products of choices on its axes."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard.cost.memory import parameter_memory, saved_values
from autoshard.cost.prices import Prices
from autoshard.passes.intra_graph import Strategy
from autoshard.placement import I, Layout, R, S
from autoshard.program import Operator, TensorType
from autoshard.rules import AxisStrategy, axis_strategies, local_operator
from autoshard.rules.implementations import IMPLEMENTATIONS

Uneven = Literal["never", "weights", "always"]
AxisRule = Callable[[Operator, int], tuple[AxisStrategy, ...]]

WASTE = 0.2
"""Most that the largest shard of an uneven split may exceed the average."""


@dataclass(frozen=True)
class EvenRule:
    """Which dims may be cut unevenly. weight_sizes: sizes of the dims of the program's parameters."""

    uneven: Uneven
    weight_sizes: frozenset[int]

    def allows(self, size: int, ranks: int, whole: int, fixed: bool) -> bool:
        """Whether a piece of `size` (of a dim of `whole`) may be cut over `ranks`. fixed: the size is no symbol."""
        if size % ranks == 0:
            return size > 0
        if self.uneven == "never" or not fixed or size < ranks:
            return False
        largest = -(-size // ranks)
        if (ranks - 1) * largest >= size:  # the last rank would be empty
            return False
        return self.uneven == "always" or (whole in self.weight_sizes and largest * ranks <= (1 + WASTE) * size)


@dataclass(frozen=True)
class _Partial:
    """An operator that the axes so far have cut."""

    local: Operator
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    implementations: tuple[str | None, ...]


@dataclass(frozen=True)
class StrategyMaker:
    """Makes strategies for one mesh.

    axis_sizes: ranks of each axis. prices: None makes free strategies. rule: the ways on one axis. remembered: what
    was made, by operator.
    """

    axis_sizes: tuple[int, ...]
    prices: Prices
    even: EvenRule
    optimizer: str
    rule: AxisRule = axis_strategies
    remembered: dict[Any, tuple[Strategy, ...]] = field(default_factory=dict)

    def operator(self, op: Operator, symbolic: Sequence[frozenset[int]]) -> tuple[Strategy, ...]:
        """All strategies of an operator of one microbatch. symbolic: for operands then results, dims that are symbols.

        Axes cut one after the other: each sees the operator as the axes before leave it, since how many heads are
        left decides whether they divide. Of strategies that differ only in I or R of values without gradient the
        first is kept: they compute, keep and send the same.
        """
        key = (op.name, op.operands, op.results, str(op.arguments), tuple(symbolic))
        if key not in self.remembered:
            self.remembered[key] = self._price_all(op, self._products(op, symbolic))
        return self.remembered[key]

    def _products(self, op: Operator, symbolic: Sequence[frozenset[int]]) -> list[_Partial]:
        empty = _Partial(op, ((),) * len(op.operands), ((),) * len(op.results), ())
        found = [empty]
        for ranks in self.axis_sizes:
            found = [longer for partial in found for longer in self._extended(op, partial, ranks, symbolic)]
        kept: dict[tuple[Layout, ...], _Partial] = {}
        for partial in found:
            layouts = zip((*op.operands, *op.results), (*partial.operands, *partial.results), strict=True)
            kept.setdefault(
                tuple(layout if type.needs_grad else _without_r(layout) for type, layout in layouts), partial
            )
        return list(kept.values())

    def _extended(
        self, op: Operator, partial: _Partial, ranks: int, symbolic: Sequence[frozenset[int]]
    ) -> list[_Partial]:
        if ranks == 1:
            return [self._with(partial, AxisStrategy((I,) * len(op.operands), (I,) * len(op.results)), partial.local)]
        found = []
        for strategy in self.rule(partial.local, ranks):
            if self._cuts_well(op, partial, strategy, ranks, symbolic):
                operands, results = [(p,) for p in strategy.operands], [(p,) for p in strategy.results]
                found.append(self._with(partial, strategy, local_operator(partial.local, operands, results, (ranks,))))
        return found

    def _with(self, partial: _Partial, strategy: AxisStrategy, local: Operator) -> _Partial:
        operands = tuple(
            (*layout, placement) for layout, placement in zip(partial.operands, strategy.operands, strict=True)
        )
        results = tuple(
            (*layout, placement) for layout, placement in zip(partial.results, strategy.results, strict=True)
        )
        return _Partial(local, operands, results, (*partial.implementations, strategy.implementation))

    def _cuts_well(
        self, op: Operator, partial: _Partial, strategy: AxisStrategy, ranks: int, symbolic: Sequence[frozenset[int]]
    ) -> bool:
        """No empty or wasteful shards, and no helper that communicates on two axes at once."""
        implementation = strategy.implementation
        if (
            implementation is not None
            and implementation in partial.implementations
            and IMPLEMENTATIONS[implementation].helper
        ):
            return False
        wholes, locals_ = (*op.operands, *op.results), (*partial.local.operands, *partial.local.results)
        placements = (*strategy.operands, *strategy.results)
        return all(
            placement.dim is None
            or self.even.allows(
                local.shape[placement.dim], ranks, whole.shape[placement.dim], placement.dim not in symbols
            )
            for placement, local, whole, symbols in zip(placements, locals_, wholes, symbolic, strict=True)
        )

    def _price_all(self, op: Operator, partials: Sequence[_Partial]) -> tuple[Strategy, ...]:
        keeps_more = saved_values(op).extra_bytes > 0
        made: dict[Any, tuple[float, float, float, int, int]] = {}
        strategies = []
        for partial in partials:
            shapes = tuple(type.shape for type in (*partial.local.operands, *partial.local.results))
            key = (shapes, partial.implementations)
            if key not in made:
                price = self.prices.operator(partial.local, partial.implementations)
                inside_backward = price.communication_backward_s
                forward_s = price.forward_s + price.communication_s - inside_backward
                gradients = sum(
                    type.nbytes for type in (*partial.local.operands, *partial.local.results) if type.needs_grad
                )
                kept = saved_values(partial.local).extra_bytes if keeps_more else 0
                made[key] = forward_s, price.backward_s + inside_backward, price.communication_s, kept, gradients
            forward_s, backward_s, inside_s, kept, transient = made[key]
            strategies.append(
                Strategy(
                    partial.operands,
                    partial.results,
                    partial.implementations,
                    forward_s,
                    backward_s,
                    inside_s,
                    kept_bytes=kept,
                    transient_bytes=transient,
                )
            )
        return tuple(strategies)

    def layouts(self, type: TensorType, symbolic: frozenset[int]) -> tuple[Layout, ...]:
        """All layouts of I and S(dim) that a tensor may have."""
        whole = (I, *(S(dim) for dim in range(len(type.shape))))
        choices = [(I,) if ranks == 1 else whole for ranks in self.axis_sizes]
        return tuple(layout for layout in itertools.product(*choices) if self._layout_cuts_well(type, layout, symbolic))

    def _layout_cuts_well(self, type: TensorType, layout: Layout, symbolic: frozenset[int]) -> bool:
        sizes = list(type.shape)
        for placement, ranks in zip(layout, self.axis_sizes, strict=True):
            if placement.dim is not None and ranks > 1:
                dim = placement.dim
                if not self.even.allows(sizes[dim], ranks, type.shape[dim], dim not in symbolic):
                    return False
                sizes[dim] = -(-sizes[dim] // ranks)
        return True

    def parameter(self, type: TensorType, trainable: bool) -> tuple[Strategy, ...]:
        """The ways to store a parameter, its gradient and its optimizer state."""
        return tuple(self._stored(type, layout, trainable) for layout in self.layouts(type, frozenset()))

    def _stored(self, type: TensorType, layout: Layout, trainable: bool) -> Strategy:
        memory = parameter_memory(type, layout, self.axis_sizes, self.optimizer, trainable)
        optimizer_s = self.prices.optimizer_s(memory.parameter_bytes) if trainable else 0.0
        return Strategy(
            (),
            (layout,),
            (None,) * len(layout),
            optimizer_s=optimizer_s,
            parameter_bytes=memory.parameter_bytes,
            gradient_bytes=memory.gradient_bytes,
            optimizer_bytes=memory.optimizer_bytes,
        )


def held(layout: Layout) -> Strategy:
    """A value that is there in one layout, at no cost."""
    return Strategy((), (layout,), (None,) * len(layout))


def asked(layout: Layout) -> Strategy:
    """A use that wants one layout."""
    return Strategy((layout,), (), (None,) * len(layout))


def _without_r(layout: Layout) -> Layout:
    return tuple(I if placement == R else placement for placement in layout)
