"""What a line of the user's source says: the names it assigns, the names it reads, the parameters of its function.

Emitted code takes its variable names from there. A line that cannot be read (no file, generated code) says nothing.
"""

import ast
import linecache
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from autoshard.program import Frame

_COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try)


@dataclass(frozen=True)
class SourceLine:
    """One statement. targets: plain names it assigns. loads: names it reads. parameters: of its function, less self."""

    targets: tuple[str, ...] = ()
    loads: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    returns: bool = False
    first_line: int = 0


@dataclass(frozen=True)
class _File:
    lines: Mapping[int, SourceLine] = field(default_factory=dict)


def source_line(frame: Frame) -> SourceLine:
    """The statement that `frame` was running."""
    return line_at(frame.file, frame.line) if frame.line else SourceLine()


def line_at(file: str, line: int) -> SourceLine:
    """The statement of a file that covers a line."""
    return _read(file).lines.get(line, SourceLine()) if file else SourceLine()


@cache
def _read(file: str) -> _File:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return _File()
    lines: dict[int, SourceLine] = {}
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = function.args
            everything = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            parameters = tuple(argument.arg for argument in everything if argument.arg not in ("self", "cls"))
            for statement in _statements(function.body):
                lines.update(_lines(statement, parameters))  # an inner function comes later and wins
    return _File(lines)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []) if isinstance(statement, _COMPOUND) else [])


def _lines(statement: ast.stmt, parameters: tuple[str, ...]) -> dict[int, SourceLine]:
    last = statement.end_lineno or statement.lineno
    if isinstance(statement, _COMPOUND):
        last = statement.body[0].lineno - 1 if not isinstance(statement, ast.Try) else statement.lineno
    found = SourceLine(
        _targets(statement),
        tuple(_loads(statement)),
        parameters,
        isinstance(statement, ast.Return),
        statement.lineno,
    )
    return dict.fromkeys(range(statement.lineno, max(last, statement.lineno) + 1), found)


def _targets(statement: ast.stmt) -> tuple[str, ...]:
    if isinstance(statement, ast.Assign):
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)):
        target = statement.target
    else:
        return ()
    items = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
    names = [item.id if isinstance(item, ast.Name) else "" for item in items]
    return tuple(names) if any(names) else ()


def _loads(statement: ast.stmt) -> Iterator[str]:
    """Names in the order in which they stand."""
    nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        yield node.id
