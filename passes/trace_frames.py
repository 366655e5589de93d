"""From torch's node metadata to `Frame`s: which module calls, and which of the user's lines, made a node.

`nn_module_stack` names the module calls; `stack_trace` holds one "File ..., line ..." entry per Python frame of a
forward. Each module call gets the innermost entry that lies inside a method of that module's class.
"""

import inspect
import os
import re
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torch import fx, nn

from autoshard.program import Frame

_ENTRY = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n?([^\n]*)')
_CALL = re.compile(r"@(\d+)$")

Entry = tuple[str, int, str]
"""File, line, code."""


def class_name(module: nn.Module) -> str:
    """ "models.gpt.Block"."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def short_path(file: str) -> str:
    """`file`, relative to the working directory where it lies below it."""
    root = os.getcwd() + os.sep
    return file[len(root) :] if file.startswith(root) else file


def entries(stack_trace: str) -> tuple[Entry, ...]:
    """The frames of a printed stack trace, outermost first."""
    return tuple((file, int(line), code.strip()) for file, line, code in _ENTRY.findall(stack_trace))


class FrameReader:
    """Reads the frames of nodes of one model's export. `prefix` is the path of the model inside what was exported."""

    def __init__(self, model: nn.Module, prefix: str) -> None:
        self._prefix = prefix
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._root = class_name(model)
        self._ranges: dict[type, tuple[tuple[str, int, int], ...]] = {}
        self._cache: dict[tuple[str, tuple[Any, ...]], tuple[Frame, ...]] = {}

    def frames(self, node: fx.Node) -> tuple[Frame, ...]:
        """The module calls `node` was made in, outermost (the model itself) first."""
        stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
        calls = tuple(self._calls(stack))
        trace = node.meta.get("stack_trace") or ""
        key = (trace, calls)
        if key not in self._cache:
            self._cache[key] = self._match(calls, entries(trace))
        return self._cache[key]

    def _calls(self, stack: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
        """Path, call number and class name of every module call below the harness."""
        for key, (path, kind) in stack.items():
            if path != self._prefix and not path.startswith(self._prefix + "."):
                continue
            call = _CALL.search(key)
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            clean = _CALL.sub("", path)
            yield clean[len(self._prefix) + 1 :], int(call[1]) if call else 0, name

    def _match(self, calls: tuple[tuple[str, int, str], ...], lines: tuple[Entry, ...]) -> tuple[Frame, ...]:
        if not calls or calls[0][0] != "":
            calls = (("", 0, self._root), *calls)
        bound, found = len(lines), []
        # Innermost first, so that a class nested in itself gets one entry per call.
        for path, call, name in reversed(calls):
            position = self._find(path, lines, bound)
            if position is None:
                found.append(Frame(path, call, name))
            else:
                bound = position
                file, line, code = lines[position]
                found.append(Frame(path, call, name, short_path(file), line, code))
        frames = tuple(reversed(found))
        if len(frames) == 1 and not frames[0].line:
            # Made outside every module: in the workload's loss function.
            for file, line, code in reversed(lines):
                if not _is_ours(file):
                    return (Frame("", 0, frames[0].class_name, short_path(file), line, code),)
        return frames

    def _find(self, path: str, lines: tuple[Entry, ...], bound: int) -> int | None:
        module = self._modules.get(path)
        if module is None:
            return None
        ranges = self._class_ranges(type(module))
        for position in range(bound - 1, -1, -1):
            file, line, _ = lines[position]
            if any(file == owner and first <= line <= last for owner, first, last in ranges):
                return position
        return None

    def _class_ranges(self, kind: type) -> tuple[tuple[str, int, int], ...]:
        if kind not in self._ranges:
            found = []
            for owner in kind.__mro__:
                if owner is nn.Module:
                    break
                for member in vars(owner).values():
                    code = _code(member)
                    if code is not None:
                        found.append((code.co_filename, code.co_firstlineno, _last_line(code)))
            self._ranges[kind] = tuple(found)
        return self._ranges[kind]


def _code(member: Any) -> CodeType | None:
    member = (
        inspect.unwrap(getattr(member, "__func__", member))
        if callable(member) or hasattr(member, "__func__")
        else member
    )
    code = getattr(member, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _last_line(code: CodeType) -> int:
    last = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    return max([last, *(_last_line(item) for item in code.co_consts if isinstance(item, CodeType))])


def _is_ours(file: str) -> bool:
    """Whether a file is torch's or this package's own."""
    return file in _OWN or os.sep + "torch" + os.sep in file or os.path.dirname(file) == os.path.dirname(__file__)


_OWN = frozenset({"<string>", "<frozen runpy>"})
