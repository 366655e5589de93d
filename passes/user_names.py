"""What the user calls the values of a program: the targets of the assignments that made them.

An assignment stands at a line of some call; the values that the line makes and that are read elsewhere are its targets,
in order. Each round of a loop, told by the numbers in the path of the module that it calls, is a line of its own. Of
several calls, one inside the other, the innermost that gives a name decides.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import fx

from autoshard.passes.source_lines import source_line
from autoshard.program import Frame, Program, Value, is_operator, result_types, value_of


def user_names(program: Program) -> Mapping[Value, str]:
    """Value -> its name, for those that have one."""
    lines: dict[Any, list[fx.Node]] = {}
    for node in program.graph.nodes:
        frames: tuple[Frame, ...] = node.meta.get("frames", ())
        for depth in range(len(frames)):
            lines.setdefault(_line(frames, depth), []).append(node)
    names: dict[Value, tuple[int, str]] = {}
    for (depth, *_), nodes in lines.items():
        targets = source_line(nodes[0].meta["frames"][depth]).targets
        made = _read_elsewhere(nodes) if targets else []
        if len(targets) == 1 and made:
            made = made[-1:]
        if len(made) == len(targets):
            for value, target in zip(made, targets, strict=True):
                if target and depth >= names.get(value, (-1, ""))[0]:
                    names[value] = depth, target
    return {value: name for value, (_, name) in names.items()}


def _line(frames: tuple[Frame, ...], depth: int) -> tuple[Any, ...]:
    frame = frames[depth]
    inside = frames[depth + 1].path if depth + 1 < len(frames) else ""
    round_ = tuple(re.findall(r"\b\d+\b", inside.removeprefix(frame.path)))
    statement = source_line(frame).first_line or frame.line
    return depth, *((f.path, f.call) for f in frames[: depth + 1]), frame.file, statement, round_


def _read_elsewhere(nodes: list[fx.Node]) -> list[Value]:
    """Values of these nodes that other nodes read, in order."""
    own = set(nodes)
    found: dict[Value, None] = {}
    for node in nodes:
        if not is_operator(node):
            continue
        results = [node] if len(result_types(node)) == 1 else sorted(node.users, key=lambda user: value_of(user).index)
        for result in results:
            if any(user not in own for user in result.users):
                found[value_of(result)] = None
    return list(found)
