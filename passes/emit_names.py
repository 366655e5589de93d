"""What the user calls the values of one body, and which of its items one line of the user's made.

Every round of a loop is a line of its own: an item that calls another block begins a new one.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.passes.emit_tree import Body, Leaf, Plain
from autoshard.passes.local import LocalStage
from autoshard.passes.source_lines import SourceLine, source_line


@dataclass(frozen=True)
class Signature:
    """Names that a forward gives its arguments and what it returns ("" for what has none), in order."""

    parameters: tuple[str, ...]
    returned: tuple[str, ...]


@dataclass(frozen=True)
class LineNames:
    """readers: tensor -> items of the body that read it; the number of items stands for the end.

    written: signatures of the calls below, by path and number. elsewhere: tensor -> what the user calls it
    somewhere.
    """

    body: Body
    stage: LocalStage
    readers: Mapping[str, Sequence[int]]
    written: Mapping[tuple[str, int], Signature]
    elsewhere: Mapping[str, str]

    def line(self, index: int) -> SourceLine:
        """The user's line that made an item."""
        return source_line(self.body.items[index].line)

    @cached_property
    def groups(self) -> list[int]:
        """Item -> number of the user's line it belongs to; each round of a loop counts as a line of its own."""
        numbers: list[int] = []
        called: set[str] = set()
        for index, item in enumerate(self.body.items):
            path = re.sub(r"\b\d+\b", "*", item.path) if isinstance(item, (Body, Leaf)) else ""
            again = bool(path) and path in called
            same = index > 0 and self._is_line(index - 1, index)
            if same and not again:
                numbers.append(numbers[-1])
            else:
                numbers.append(index)
                called = set()
                for before in range(index - 1, -1, -1):  # changes of what this round reads belong to it
                    earlier = self.body.items[before]
                    if not (again and isinstance(earlier, Plain) and earlier.node.converts):
                        break
                    numbers[before] = index
            called |= {path} - {""}
        return numbers

    def _is_line(self, left: int, right: int) -> bool:
        a, b = self.body.items[left].line, self.body.items[right].line
        return (
            bool(a.line)
            and a.file == b.file
            and (a.line == b.line or (self.line(left).first_line == self.line(right).first_line != 0))
        )

    def same_line(self, left: int, right: int) -> bool:
        """Whether one line made both items."""
        return right < len(self.body.items) and self.groups[left] == self.groups[right] and self._is_line(left, right)

    def hints(self) -> dict[str, str]:
        """Tensor -> what the user calls it."""
        found: dict[str, str] = {}
        start = 0
        while start < len(self.body.items):
            stop = start + 1
            while stop < len(self.body.items) and self.groups[start] == self.groups[stop]:
                stop += 1
            self._line_hints(start, stop, found)
            start = stop
        for item in self.body.items:
            if isinstance(item, Body) and len(item.outputs) > 1:
                returned = self.written[item.path, item.call].returned
                for output, held in zip(item.outputs, returned, strict=True):
                    if held:
                        found.setdefault(output, held)
            if isinstance(item, Plain):
                for name, hint in zip(item.results, self._inner_hints(item), strict=False):
                    if name and hint:
                        found.setdefault(name, hint)
        return found

    def _line_hints(self, start: int, stop: int, found: dict[str, str]) -> None:
        targets = self.line(start).targets
        if not targets:
            return
        made = [
            name
            for item in self.body.items[start:stop]
            for name in item.results
            if name and any(reader >= stop for reader in self.readers.get(name, []))
        ]
        if len(made) == len(targets):
            found.update({name: target for name, target in zip(made, targets, strict=True) if target})
        elif len(targets) == 1 and made:
            last = next(item for item in reversed(self.body.items[start:stop]) if made[-1] in item.results)
            returned = self.written[last.path, last.call].returned if isinstance(last, Body) else ()
            if isinstance(last, Body) and len(last.outputs) > 1:  # a tuple under one name: by what it holds
                found.update({name: held for name, held in zip(last.outputs, returned, strict=True) if held})
            elif self.elsewhere.get(made[-1], targets[0]) == targets[0]:
                found[made[-1]] = targets[0]

    def _inner_hints(self, item: Plain) -> Sequence[str]:
        if item.node.converts:
            converted = self.stage.tensors[item.node.arguments["x"].name]
            if converted.kind != "parameter":
                return ()
            return ("_".join(part for part in converted.attribute.split(".")[-2:] if not part.isdigit()),)
        pieces = item.node.target.startswith(("aten.split", "aten.chunk", "aten.unbind"))
        return ("first", "second", "third", "fourth")[: len(item.results)] if pieces and len(item.results) <= 4 else ()

    def parameter(self, name: str) -> str | None:
        """What an argument of the body is called: by its first reader's line, or by the module that this passes it to.

        None where neither tells.
        """
        first = next((reader for reader in self.readers.get(name, []) if reader < len(self.body.items)), None)
        if first is None:
            return None
        line, item = self.line(first), self.body.items[first]
        candidates = [load for load in dict.fromkeys(line.loads) if load in line.parameters]
        if len(candidates) == 1 and len([n for n in item.operands if n in self.body.inputs]) == 1:
            return candidates[0]
        if isinstance(item, Body):
            passed = dict(zip(item.inputs, self.written[item.path, item.call].parameters, strict=True))
            return passed.get(name)
        own = [operand for operand in item.operands if operand in self.body.inputs]
        if self.elsewhere.get(name) in candidates:
            return self.elsewhere[name]
        return candidates[own.index(name)] if len(own) == len(candidates) else None

    def is_named(self, index: int) -> bool:
        """Whether the user gives what an item makes a name."""
        item = self.body.items[index]
        return bool(self.line(index).targets) or (isinstance(item, Plain) and bool(self._inner_hints(item)))
