"""Watches an emitted forward run: what every statement gave a name to, read from Python's own line events.

So nothing has to be put into the emitted code, and code that a user edited is seen as it stands.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn


@dataclass
class Watched:
    """One call of one module's forward. made: targets of each assignment -> values, in order. returned: its tensors."""

    path: str
    number: int
    made: list[tuple[tuple[str, ...], tuple[Tensor | None, ...]]] = field(default_factory=list)
    returned: tuple[Tensor | None, ...] = ()


class Watcher:
    """Context in which the forwards of `module` are watched. files: the emitted modules' files."""

    def __init__(self, module: nn.Module, files: Sequence[Path]) -> None:
        self.paths = {id(child): path for path, child in module.named_modules()}
        self.statements: Mapping[str, Mapping[int, ast.stmt]] = {str(file): _statements(file) for file in files}
        self.calls: list[Watched] = []
        self._before: Any = None

    def __enter__(self) -> "Watcher":
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, _argument: Any) -> Any:
        statements = self.statements.get(frame.f_code.co_filename)
        path = self.paths.get(id(frame.f_locals.get("self")))
        if event != "call" or statements is None or path is None or not frame.f_code.co_name.startswith("forward"):
            return None
        call = Watched(path, sum(1 for known in self.calls if known.path == path))
        self.calls.append(call)
        current: list[ast.stmt | None] = [None]

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            following = statements.get(frame.f_lineno) if event == "line" else None
            if event in ("line", "return") and current[0] is not None and following is not current[0]:
                _note(call, current[0], frame.f_locals)
            if event == "line":
                current[0] = following
            if event == "return":
                returned = argument if isinstance(argument, tuple) else (argument,)
                call.returned = tuple(_kept(value) for value in returned)
            return on_line

        return on_line


def _note(call: Watched, statement: ast.stmt, names: Mapping[str, Any]) -> None:
    if not isinstance(statement, ast.Assign) or isinstance(
        statement.value, ast.Name
    ):  # a name for what has one already
        return
    target = statement.targets[0]
    items = target.elts if isinstance(target, ast.Tuple) else [target]
    targets = tuple(item.id for item in items if isinstance(item, ast.Name))
    if len(targets) == len(items):
        call.made.append((targets, tuple(_kept(names.get(name)) for name in targets)))


def _kept(value: Any) -> Tensor | None:
    return value.detach().clone() if isinstance(value, Tensor) else None


def _statements(file: Path) -> dict[int, ast.stmt]:
    """Line -> the innermost statement that covers it."""
    found: dict[int, ast.stmt] = {}
    for statement in _all(ast.parse(file.read_text()).body):
        found.update(dict.fromkeys(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1), statement))
    return found


def _all(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, outer ones before those inside."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            yield from _all(getattr(statement, name, []))
