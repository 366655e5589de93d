"""The table of rules, and the ways it gives one operator to run on one axis."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from autoshard.errors import BadInput, UnsupportedOperator
from autoshard.program import Operator, TensorType
from autoshard.rules import (
    attention,
    constructors,
    convolutions,
    elementwise,
    indexing,
    losses,
    matmul,
    norms,
    random,
    reductions,
    views,
)
from autoshard.rules.language import Rule, RuleFunction, parse, redundant
from autoshard.rules.schema import runs_redundantly
from autoshard.rules.strategy import AxisStrategy

_FAMILIES = (
    elementwise,
    matmul,
    views,
    reductions,
    norms,
    losses,
    attention,
    convolutions,
    indexing,
    constructors,
    random,
)


@dataclass(frozen=True, eq=False)
class RuleTable:
    """Operator name ("aten.linear.default") -> its rule, or the function that writes its rule for one call."""

    rules: Mapping[str, Rule | RuleFunction]

    def with_rule(self, name: str, rule: Rule | RuleFunction | str) -> "RuleTable":
        """A new table that has `rule` for the operator `name`. A string is a line of the rule language.

        Raises BadInput where the line or the name cannot be read. `rules.oracle.check` proves a rule by running it.
        """
        if name.count(".") != 2:
            raise BadInput(
                f"'{name}' is not an operator's name",
                help="write namespace.operator.overload, for example mylib.scan.default",
            )
        rule = Rule(rule) if isinstance(rule, str) else rule
        if isinstance(rule, Rule):
            parse(rule.pattern)
        return RuleTable(MappingProxyType({**self.rules, name: rule}))

    def rule(self, op: Operator) -> Rule | None:
        """The rule of one call; None without an entry, or where only redundant running is legal."""
        entry = self.rules.get(op.name)
        return entry if entry is None or isinstance(entry, Rule) else entry(op)


DEFAULT_RULES = RuleTable(MappingProxyType({name: rule for family in _FAMILIES for name, rule in family.RULES.items()}))


def has_rule(name: str, rules: RuleTable = DEFAULT_RULES) -> bool:
    """Whether the operator has a rule; one without runs redundantly, or not at all."""
    return name in rules.rules


def axis_strategies(op: Operator, ranks: int, rules: RuleTable = DEFAULT_RULES) -> tuple[AxisStrategy, ...]:
    """All legal ways to run `op` on one axis of `ranks` (above 1) ranks.

    First all I, then all R, one for each dim that may be split, and one for each way P passes through. Shards may be
    uneven, or empty, unless the rule needs them even. For a further axis, call with the operator as the earlier axes
    leave it (`rules.local.local_operator`): whether heads divide depends on how many are left.
    Raises UnsupportedOperator where the operator has no rule and cannot run redundantly either.
    """
    try:
        return _cached(op.name, op.operands, op.results, tuple(op.arguments.items()), ranks, rules)
    except TypeError:  # an argument that has no hash
        return _strategies(op, ranks, rules)


@lru_cache(maxsize=65536)
def _cached(
    name: str,
    operands: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    arguments: tuple[tuple[str, Any], ...],
    ranks: int,
    rules: RuleTable,
) -> tuple[AxisStrategy, ...]:
    return _strategies(Operator(name, operands, results, dict(arguments)), ranks, rules)


def _strategies(op: Operator, ranks: int, rules: RuleTable) -> tuple[AxisStrategy, ...]:
    rule = rules.rule(op)
    if rule is not None:
        return rule.expand(op, ranks)
    if not has_rule(op.name, rules) and not runs_redundantly(op.name):
        raise UnsupportedOperator(
            f"there is no sharding rule for {op.name}, and it cannot run redundantly",
            help=f'add one: DEFAULT_RULES.with_rule("{op.name}", "b... -> b...")',
        )
    return redundant(op)
