"""Operators that draw random numbers: the runtime's generators make masks agree on copies and differ on shards."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.rules.language import Rule, RuleFunction

RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(
    {
        "aten.native_dropout.default": Rule("b... -> b..., b..."),
        "aten.dropout.default": Rule("b... -> b..."),
        "aten.bernoulli.default": Rule("b... -> b..."),
        "aten.bernoulli.p": Rule("b... -> b..."),
        "aten.rand_like.default": Rule("b... -> b..."),
        "aten.randn_like.default": Rule("b... -> b..."),
    }
)
