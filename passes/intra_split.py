"""What it means that the user fixed a mesh: every axis of it is used for what its name says.

Without this, the cheapest way to run a small model on a mesh of 4 devices is often to run it 4 times. The rules, for
an axis of more than one rank, each kept only where it leaves a strategy:
    dp        every operator splits the samples that it has; where operators couple samples, those that multiply
              matrices, convolve or look up embeddings split dim 0 of their first operand
    tp        those operators split a weight, or where they read none, something else than samples
    others    those operators split something
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoshard.cost.compute import operator_flops
from autoshard.passes.intra_graph import Strategy
from autoshard.placement import I, Placement, R, S
from autoshard.program import Operator
from autoshard.rules import AxisStrategy

DATA_AXIS, TENSOR_AXIS = "dp", "tp"
Test = Callable[[Strategy, int], bool]


@dataclass(frozen=True)
class SplitRule:
    """The rules for one mesh. axes, sizes: of the mesh. used: names of the axes that must be used."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    used: tuple[str, ...]

    def kept(
        self, op: Operator, weights: Sequence[int], samples: AxisStrategy | None, strategies: tuple[Strategy, ...]
    ) -> tuple[Strategy, ...]:
        """The strategies of an operator that obey. weights: operands that are parameters of two dims or more."""
        for axis, (name, size) in enumerate(zip(self.axes, self.sizes, strict=True)):
            if name in self.used and size > 1:
                for test in self._tests(name, op, weights, samples):
                    obeying = tuple(strategy for strategy in strategies if test(strategy, axis))
                    if obeying:
                        strategies = obeying
                        break
        return strategies

    def _tests(self, name: str, op: Operator, weights: Sequence[int], samples: AxisStrategy | None) -> list[Test]:
        """Tests of which the first that some strategy passes is applied."""
        if name == DATA_AXIS and samples is not None:
            return [lambda strategy, axis: _is(strategy, axis, samples, op)]
        if not operator_flops(op) and "embedding" not in op.name:
            return []
        if name == DATA_AXIS:
            return [lambda strategy, axis: strategy.operands[0][axis] == S(0), _splits]
        if name == TENSOR_AXIS and weights:
            return [lambda strategy, axis: any(strategy.operands[slot][axis].is_sharded for slot in weights), _splits]
        if name == TENSOR_AXIS and samples is not None:
            return [
                lambda strategy, axis: _splits(strategy, axis) and not _splits_samples(strategy, axis, samples),
                _splits,
            ]
        return [_splits]


def _splits(strategy: Strategy, axis: int) -> bool:
    return any(layout[axis].is_sharded for layout in (*strategy.operands, *strategy.results))


def _splits_samples(strategy: Strategy, axis: int, samples: AxisStrategy) -> bool:
    pairs = zip((*strategy.operands, *strategy.results), (*samples.operands, *samples.results), strict=True)
    return any(placement.is_sharded and layout[axis] == placement for layout, placement in pairs)


def _is(strategy: Strategy, axis: int, samples: AxisStrategy, op: Operator) -> bool:
    """Whether a strategy does on an axis what `samples` does; I and R are the same to values without gradient."""
    types = (*op.operands, *op.results)
    mine = [layout[axis] for layout in (*strategy.operands, *strategy.results)]
    theirs = (*samples.operands, *samples.results)
    return strategy.implementations[axis] == samples.implementation and all(
        _seen(here, type_.needs_grad) == _seen(there, type_.needs_grad)
        for here, there, type_ in zip(mine, theirs, types, strict=True)
    )


def _seen(placement: Placement, needs_grad: bool) -> Placement:
    return I if placement == R and not needs_grad else placement
