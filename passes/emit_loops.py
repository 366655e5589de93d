"""Repeated statements as loops: by their text alone, so that a loop is the statements that it stands for.

Statements that call `self.layers[0]`, then the same with 1, 2, ... become `for layer in self.layers`. The first round
may read a value under another name (the embedding's output, say): one line renames it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.passes.emit_body import Statement

LONGEST_PERIOD = 16
_INDEXED = re.compile(r'self((?:\.\w+|\[\d+\]|\["\w+"\])*?)\.(\w+)\[("?)(\d+)\3\]')
_TOKEN = re.compile(r"[A-Za-z_]\w*|\S")


@dataclass(frozen=True)
class Loop:
    """Rounds of the same statements. header: "for layer in self.layers:"."""

    header: str
    body: tuple[Statement, ...]


@dataclass(frozen=True)
class _Found:
    container: str
    first: int
    rounds: int
    period: int
    quote: str
    renamed: tuple[str, str] | None


def fold(statements: Sequence[Statement], sizes: Mapping[str, int]) -> list[Statement | Loop]:
    """Statements with their repetitions folded. sizes: container's text ("self.layers") -> how many it holds."""
    out: list[Statement | Loop] = []
    at = 0
    while at < len(statements):
        found = _find(statements, at)
        if found is None:
            out.append(statements[at])
            at += 1
            continue
        count = found.rounds * found.period
        body = statements[at + count - found.period : at + count]
        if found.renamed is not None:
            new, old = found.renamed
            out.append(Statement(f"{new} = {old}"))
        out.append(_loop(found, body, sizes))
        at += count
    return out


def _find(statements: Sequence[Statement], at: int) -> _Found | None:
    """The longest repetition that begins at `at`, of the shortest period."""
    for period in range(1, LONGEST_PERIOD + 1):
        group = statements[at : at + period]
        for container, quote, index in _indices(group):
            if (
                not _mentions(group[0], container, index, quote)
                and period > 1
                and not _mentions_any(group, container, index, quote)
            ):
                continue
            rounds = 1
            while True:
                following = statements[at + rounds * period : at + (rounds + 1) * period]
                before = (
                    statements[at + max(rounds - 1, 1) * period : at + max(rounds, 2) * period] if rounds > 1 else None
                )
                if len(following) < period or not _mentions_any(following, container, index + rounds, quote):
                    break
                if before is not None and not _same(
                    before, following, container, index + rounds - 1, index + rounds, quote
                ):
                    break
                rounds += 1
            if rounds < 2:
                continue
            second = statements[at + period : at + 2 * period]
            if _same(group, second, container, index, index + 1, quote):
                return _Found(container, index, rounds, period, quote, None)
            renamed = _renamed(group, second, container, index, quote)
            if renamed is not None:
                return _Found(container, index, rounds, period, quote, renamed)
    return None


def _indices(group: Sequence[Statement]) -> list[tuple[str, str, int]]:
    found = dict.fromkeys(
        (f"self{match[1]}.{match[2]}", match[3], int(match[4]))
        for statement in group
        for match in _INDEXED.finditer(statement.text)
    )
    return list(found)


def _item(container: str, index: int, quote: str) -> str:
    return f"{container}[{quote}{index}{quote}]"


def _mentions(statement: Statement, container: str, index: int, quote: str) -> bool:
    return _item(container, index, quote) in statement.text


def _mentions_any(group: Sequence[Statement], container: str, index: int, quote: str) -> bool:
    return any(_mentions(statement, container, index, quote) for statement in group)


def _normal(statement: Statement, container: str, index: int, quote: str) -> Statement:
    text = statement.text.replace(_item(container, index, quote), "<item>")
    return Statement(text, statement.comments, note=statement.note)


def _same(left: Sequence[Statement], right: Sequence[Statement], container: str, i: int, j: int, quote: str) -> bool:
    return all(
        _normal(a, container, i, quote) == _normal(b, container, j, quote) for a, b in zip(left, right, strict=True)
    )


def _renamed(
    first: Sequence[Statement], second: Sequence[Statement], container: str, index: int, quote: str
) -> tuple[str, str] | None:
    """(name in later rounds, name in the first) where the first round differs only in reading another name."""
    pair: tuple[str, str] | None = None
    assigned: set[str] = set()
    for a, b in zip(first, second, strict=True):
        left, right = _normal(a, container, index, quote), _normal(b, container, index + 1, quote)
        if left.comments != right.comments or left.note != right.note:
            return None
        left_tokens, right_tokens = _TOKEN.findall(left.text), _TOKEN.findall(right.text)
        if len(left_tokens) != len(right_tokens):
            return None
        equals = left_tokens.index("=") if "=" in left_tokens else 0
        for position, (x, y) in enumerate(zip(left_tokens, right_tokens, strict=True)):
            if x == y:
                if pair is not None and x == pair[0] and position > equals and x not in assigned:
                    return None
                continue
            named = x.isidentifier() and y.isidentifier() and not {x, y} & assigned and position > equals
            if not named or pair not in (None, (y, x)):
                return None
            pair = (y, x)
        assigned |= set(b.targets)
    if pair is None:
        return None
    # A round must hand the new name on to the next one, and the first may not read something else under it before.
    for statement in first:
        read = statement.text.partition(" = ")[2] if statement.targets else statement.text
        if re.search(rf"\b{pair[0]}\b", read):
            return None
        if pair[0] in statement.targets:
            return pair
    return None


def _loop(found: _Found, body: Sequence[Statement], sizes: Mapping[str, int]) -> Loop:
    last = found.first + found.rounds - 1
    taken = {name for statement in body for name in _TOKEN.findall(statement.text)}
    name = _singular(found.container.rpartition(".")[2], taken)
    whole = sizes.get(found.container)
    item = _item(found.container, last, found.quote)
    if found.quote and found.rounds != whole:  # a part of a stage's blocks: by their names
        number = "i" if "i" not in taken else "number"
        header, name = f"for {number} in range({found.first}, {last + 1}):", f"{found.container}[str({number})]"
    elif found.quote:
        header = f"for {name} in {found.container}.values():"
    elif found.rounds == whole:
        header = f"for {name} in {found.container}:"
    else:
        stop = "" if whole == last + 1 else str(last + 1)
        header = f"for {name} in {found.container}[{found.first or ''}:{stop}]:"
    return Loop(header, tuple(replace(s, text=s.text.replace(item, name)) for s in body))


def _singular(name: str, taken: set[str]) -> str:
    single = name[:-1] if name.endswith("s") and len(name) > 2 else "block"
    while single in taken:
        single += "_"
    return single
