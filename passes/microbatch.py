"""Whether and how a batch can be cut into microbatches: where the samples lie in every value.

Microbatches are ranks of a virtual axis on which inputs arrive S(batch dim) and nothing may be exchanged: every
operator must have a strategy that takes its operands as they come. Free are I -> R of parameters, buffers and
constants, the choice between I and R for values that do not depend on the batch, and P -> I, P -> R of values without
gradient that no parameter reaches (counts of valid targets): they can be computed ahead for the whole batch. Values
that are P, the loss among them, are added up over the microbatches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoshard.errors import BadInput
from autoshard.placement import I, P, Placement, R, S
from autoshard.program import Operator, Program, Value, hint, is_tensor, operand_values, operator_of, place
from autoshard.rules import AxisStrategy, axis_strategies
from autoshard.rules.implementations import IMPLEMENTATIONS
from autoshard.rules.local import LOCAL_ARGUMENTS


class CoupledSamples(BadInput):
    """An operator needs samples of several microbatches at once."""


def sample_placements(program: Program) -> Mapping[str, AxisStrategy]:
    """The strategy of every operator, and of placeholders ((), (placement,)), on the axis of microbatches.

    Raises CoupledSamples naming the first operator that mixes samples, and the user's line.
    """
    return _Propagation(program).run()


@dataclass
class _State:
    """What is known of a value: where its samples are, and whether a parameter reaches it."""

    placement: Placement
    from_parameter: bool


class _Propagation:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.states: dict[Value, _State] = {}
        self.found: dict[str, AxisStrategy] = {}
        self.nodes = {node.name: node for node in program.graph.nodes}
        batched = [given for given in program.inputs.values() if given.batch_dim is not None]
        self.batch = batched[0].type.shape[batched[0].batch_dim or 0] if batched else 1
        self.ranks = _smallest_factor(self.batch)
        self.symbols = self._batch_symbols()

    def run(self) -> Mapping[str, AxisStrategy]:
        self._refuse_updates()
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.name in self.found:
                continue
            elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _makes_tensors(node):
                self._operator(node)
        return self.found

    def _refuse_updates(self) -> None:
        for buffer in self.program.buffers.values():
            if buffer.updated_by is not None:
                raise CoupledSamples(
                    f"the forward changes the buffer {buffer.name}, once a microbatch instead of once a batch",
                    where=place(self.nodes[buffer.updated_by]),
                    help="use one microbatch (--microbatches 1), or a norm without running statistics",
                )

    def _batch_symbols(self) -> frozenset[Any]:
        found: set[Any] = set()
        for name, given in self.program.inputs.items():
            if given.batch_dim is not None:
                size = self.nodes[name].meta["val"].shape[given.batch_dim]
                if isinstance(size, torch.SymInt):
                    found |= size.node.expr.free_symbols
        return frozenset(found)

    def _placeholder(self, node: fx.Node) -> None:
        given = self.program.inputs.get(node.name)
        batched = given is not None and given.batch_dim is not None
        placement = S(given.batch_dim) if batched and given is not None and given.batch_dim is not None else I
        self.found[node.name] = AxisStrategy((), (placement,))
        self.states[Value(node.name)] = _State(placement, node.name in self.program.parameters)

    # ------------------------------------------------------------------ one operator

    def _operator(self, node: fx.Node) -> None:
        op, values = operator_of(node), operand_values(node)
        self._refuse_counts(node)
        strategy = self._choose(node, op, values)
        if strategy is None:
            self._refuse(node, op, values)
        assert strategy is not None
        self._keep(node, strategy, values)

    def _refuse_counts(self, node: fx.Node) -> None:
        """The number of samples, used as a number and not as a size, would be a microbatch's."""
        if str(node.target) in LOCAL_ARGUMENTS or str(node.target).startswith("aten.arange"):
            return
        numbers = [item for item in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(item, fx.Node)]
        if any(_depends(item.meta.get("val"), self.symbols) for item in numbers):
            raise CoupledSamples(
                f"{node.target} counts with the number of samples, which in a microbatch is another",
                where=place(node),
                help="use one microbatch (--microbatches 1), or a mean (of F.cross_entropy, say) for the division",
            )

    def _keep(self, node: fx.Node, strategy: AxisStrategy, values: tuple[Value, ...]) -> None:
        self.found[node.name] = strategy
        reached = any(self.states[value].from_parameter for value in values)
        for index, placement in enumerate(strategy.results):
            self.states[Value(node.name, index)] = _State(placement, reached)

    def _choose(self, node: fx.Node, op: Operator, values: tuple[Value, ...]) -> AxisStrategy | None:
        """The best strategy that takes the operands as they are: results S, then P, then whole."""
        legal = [
            strategy
            for strategy in axis_strategies(op, self.ranks)
            if not _communicates(strategy) and self._fits_sizes(node, strategy)
        ]
        depends = any(self.states[value].placement.kind in "SP" for value in values)
        legal.sort(key=lambda strategy: self._rank(op, strategy, depends))
        for strategy in legal:
            if all(
                self._takes(value, want, op, i)
                for i, (value, want) in enumerate(zip(values, strategy.operands, strict=True))
            ):
                return strategy
        for strategy in legal:  # then with what does not depend on the batch computed for a microbatch only
            if all(
                self._takes(value, want, op, i) or self._can_split(value, want)
                for i, (value, want) in enumerate(zip(values, strategy.operands, strict=True))
            ):
                for value, want in zip(values, strategy.operands, strict=True):
                    if want.is_sharded and self.states[value].placement != want:
                        self._split(value, want)
                return strategy
        return None

    def _rank(self, op: Operator, strategy: AxisStrategy, depends: bool) -> tuple[int, int]:
        """Whole results first where nothing depends on the batch: R where a gradient flows, else I."""
        kinds = [placement.kind for placement in strategy.results]
        if depends:
            return max(("SPRI".index(kind) for kind in kinds), default=0), int(strategy.implementation is not None)
        order = "RISP" if any(result.needs_grad for result in op.results) else "IRSP"
        return max((order.index(kind) for kind in kinds), default=0), int(strategy.implementation is not None)

    def _takes(self, value: Value, want: Placement, op: Operator, index: int) -> bool:
        """Whether a value may be used as `want` without an exchange."""
        state = self.states[value]
        if state.placement == want:
            return True
        if state.placement.kind in "IR":
            whole_use = want.kind in "IR"
            # A gradient that is whole on every microbatch would be added up once each.
            return whole_use and (want == R or not op.operands[index].needs_grad)
        return (
            state.placement == P
            and want.kind in "IR"
            and not state.from_parameter
            and not op.operands[index].needs_grad
        )

    def _fits_sizes(self, node: fx.Node, strategy: AxisStrategy) -> bool:
        """Whether results whose size follows the batch are cut there, and no others."""
        if not self.symbols:
            return True
        value = node.meta["val"]
        values = [item for item in (value if isinstance(value, (tuple, list)) else (value,)) if is_tensor(item)]
        for item, placement in zip(values, strategy.results, strict=True):
            dims = {dim for dim, size in enumerate(item.shape) if _follows(size, self.symbols)}
            if dims and placement.dim not in dims:
                return False
            if not dims and placement.is_sharded:
                return False
        return True

    # ------------------------------------------------------------------ values that do not depend on the batch

    def _can_split(self, value: Value, want: Placement) -> bool:
        """Whether a whole value without gradient can be computed as its slice instead."""
        return self._split_strategy(value, want) is not None

    def _split_strategy(self, value: Value, want: Placement) -> AxisStrategy | None:
        node, state = self.nodes[value.node], self.states[value]
        if not want.is_sharded or state.placement.kind not in "IR" or node.op == "placeholder" or state.from_parameter:
            return None
        values, op = operand_values(node), operator_of(node)
        if hint(op.results[value.index].shape[want.dim or 0]) != self.batch:
            return None
        for strategy in axis_strategies(op, self.ranks):
            if strategy.results[value.index] == want and all(
                self._takes(source, wish, op, i) or self._can_split(source, wish)
                for i, (source, wish) in enumerate(zip(values, strategy.operands, strict=True))
            ):
                return strategy
        return None

    def _split(self, value: Value, want: Placement) -> None:
        strategy, node = self._split_strategy(value, want), self.nodes[value.node]
        assert strategy is not None
        values = operand_values(node)
        for source, wish in zip(values, strategy.operands, strict=True):
            if wish.is_sharded and self.states[source].placement != wish:
                self._split(source, wish)
        self._keep(node, strategy, values)

    def _refuse(self, node: fx.Node, op: Operator, values: tuple[Value, ...]) -> None:
        arriving = ", ".join(
            f"{value} {list(type_.shape)} {self.states[value].placement}"
            for value, type_ in zip(values, op.operands, strict=True)
        )
        shapes = ", ".join(str(list(type_.shape)) for type_ in op.results)
        what = (
            f"couples the samples of a batch ({arriving})"
            if arriving
            else f"makes a tensor of {shapes} that tells the samples of a batch apart by their place in it"
        )
        raise CoupledSamples(
            f"{op.name} {what}",
            where=place(node),
            help="use one microbatch (--microbatches 1), or compute this for each sample by itself",
        )


def _makes_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return is_tensor(value) or (isinstance(value, (tuple, list)) and any(is_tensor(item) for item in value))


def _communicates(strategy: AxisStrategy) -> bool:
    return strategy.implementation is not None and IMPLEMENTATIONS[strategy.implementation].communicates


def _follows(size: Any, symbols: frozenset[Any]) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr.free_symbols & symbols)


def _depends(value: Any, symbols: frozenset[Any]) -> bool:
    """Whether a number (not a tensor) is made of one of these symbols."""
    is_number = isinstance(value, (torch.SymInt, torch.SymFloat))
    return is_number and bool(value.node.expr.free_symbols & symbols)


def _smallest_factor(number: int) -> int:
    """The smallest prime factor: a count of microbatches that cuts the batch evenly. 2 for a batch of one."""
    return next((factor for factor in range(2, number + 1) if number % factor == 0), 2)
