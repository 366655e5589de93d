"""Sharding rules: how an operator may run on one mesh axis (the language in `language`, one table a family)."""

from autoshard.rules.language import Rule
from autoshard.rules.local import local_arguments, local_operator
from autoshard.rules.strategy import AxisStrategy
from autoshard.rules.table import DEFAULT_RULES, RuleTable, axis_strategies, has_rule

__all__ = [
    "DEFAULT_RULES",
    "AxisStrategy",
    "Rule",
    "RuleTable",
    "axis_strategies",
    "has_rule",
    "local_arguments",
    "local_operator",
]
