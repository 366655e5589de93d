"""Trace three blocks, not thirty-two: shorten lists of equal blocks for the export, then repeat the traced block.

A list of N equal modules is cut to its first three for the export. Of the three traced blocks the first may differ (it
may make what the others share, a position bias say); the second and third must agree node by node:

    prologue | block 0 | block 1 + what follows up to block 2 | block 2 | epilogue

The middle part is copied N - 3 times before block 2, which becomes block N - 1. Every operand of a copy is a value of
the copy itself, of the copy before it (where block 2 uses block 1), the block's own parameter, or a value that blocks 1
and 2 share. Where anything else shows, `CannotSplice` says what, and the model is traced whole.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _WrappedHook

from autoshard.passes.trace_draft import Draft
from autoshard.program import Frame

KEPT = 3


@dataclass(frozen=True)
class Stack:
    """A list of blocks of which all but the first are equal. path: of the list; count: of its blocks."""

    path: str
    module: nn.Module
    count: int


class CannotSplice(Exception):
    """The traced blocks of the list at `path` are not repetitions of one another."""

    def __init__(self, path: str, why: str) -> None:
        self.path = path
        super().__init__(f"the blocks of {path} are traced one by one: {why}")


# ------------------------------------------------------------------ before the export: which lists, and cutting them


def find_stacks(model: nn.Module, canonical: Mapping[str, str]) -> tuple[Stack, ...]:
    """Lists of four or more equal blocks, outermost first; none inside another's blocks, none with tied parameters."""
    tied = {name for name, first in canonical.items() if name != first} | {
        first for name, first in canonical.items() if name != first
    }
    found: list[Stack] = []
    seen: set[int] = set()

    def visit(module: nn.Module, path: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if (
            type(module) in (nn.ModuleList, nn.Sequential)
            and len(module._modules) > KEPT
            and _is_stack(module, path, tied)
        ):
            found.append(Stack(path, module, len(module._modules)))
            return
        for name, child in module.named_children():
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    return tuple(found)


def _is_stack(module: nn.Module, path: str, tied: set[str]) -> bool:
    names = list(module._modules)
    blocks = list(module._modules.values())
    if names != [str(index) for index in range(len(names))] or any(block is None for block in blocks):
        return False
    if len({id(block) for block in blocks}) != len(blocks) or any(name.startswith(path + ".") for name in tied):
        return False
    return all(_equal_modules(blocks[1], block, index) for index, block in enumerate(blocks[2:], start=1))  # type: ignore[arg-type]


def _equal_modules(left: nn.Module, right: nn.Module, distance: int) -> bool:
    """Whether two blocks compute the same with their own parameters. Integers may differ by the blocks' distance."""
    one, other = dict(left.named_modules()), dict(right.named_modules())
    if list(one) != list(other):
        return False
    return all(_equal_module(module, other[path], distance) for path, module in one.items())


_TABLES = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NOT_PLAIN = frozenset({*_TABLES, *_HOOKS, "_modules", "_non_persistent_buffers_set", "_is_full_backward_hook"})


def _equal_module(left: nn.Module, right: nn.Module, distance: int) -> bool:
    if type(left) is not type(right) or any(getattr(left, name) or getattr(right, name) for name in _HOOKS):
        return False
    for table in _TABLES:
        one, other = getattr(left, table), getattr(right, table)
        if list(one) != list(other):
            return False
        for a, b in zip(one.values(), other.values(), strict=True):
            if (a is None) != (b is None):
                return False
            if a is not None and (a.shape, a.dtype, a.requires_grad, a.device) != (
                b.shape,
                b.dtype,
                b.requires_grad,
                b.device,
            ):
                return False
    one = {name: value for name, value in vars(left).items() if name not in _NOT_PLAIN}
    other = {name: value for name, value in vars(right).items() if name not in _NOT_PLAIN}
    return list(one) == list(other) and all(_equal(one[name], other[name], distance, 0) for name in one)


def _equal(left: Any, right: Any, distance: int, depth: int) -> bool:
    """Whether two plain attributes mean the same; objects of unknown kinds are compared by their own attributes."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return False  # a tensor outside parameters and buffers becomes a constant
    if isinstance(left, int) and not isinstance(left, bool):
        return left == right or right - left == distance
    if isinstance(left, (bool, float, complex, str, bytes, torch.dtype, torch.device, type)):
        return bool(left == right)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(
            _equal(a, b, distance, depth + 1) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, (set, frozenset)):
        return bool(left == right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(_equal(left[key], right[key], distance, depth + 1) for key in left)
    if isinstance(left, MethodType):
        return left.__func__ is right.__func__
    if isinstance(left, FunctionType):
        cells = [tuple(cell.cell_contents for cell in item.__closure__ or ()) for item in (left, right)]
        return left.__code__ is right.__code__ and _equal(cells[0], cells[1], distance, depth + 1)
    if isinstance(left, (nn.Module, _WrappedHook)) or depth > 3 or not hasattr(left, "__dict__"):
        return False
    return _equal(vars(left), vars(right), distance, depth + 1)


@contextlib.contextmanager
def shortened(stacks: Sequence[Stack]) -> Iterator[None]:
    """Cut every list to its first three blocks; whole again after, also on errors."""
    whole = [(stack.module, stack.module._modules) for stack in stacks]
    try:
        for module, modules in whole:
            module.__dict__["_modules"] = dict(list(modules.items())[:KEPT])
        yield
    finally:
        for module, modules in whole:
            module.__dict__["_modules"] = modules


# ------------------------------------------------------------------ after it: agreement, and copying


def splice(draft: Draft, stack: Stack) -> None:
    """Repeat the middle block of a shortened list in place, and give every placeholder of its blocks a "val"."""
    _Splice(draft, stack).run()


class _Splice:
    def __init__(self, draft: Draft, stack: Stack) -> None:
        self.draft, self.stack = draft, stack
        self.calls = list(draft.calls())
        self.position = {node: index for index, node in enumerate(self.calls)}
        self.name_of = {node: name for name, node in draft.state.items()}
        self.carried: dict[fx.Node, fx.Node] = {}
        """What block 1 takes from before it -> what block 2 takes, at the same place, from block 1."""

    def run(self) -> None:
        first, second, third = (self._range(block) for block in range(KEPT))
        if not first[1] <= second[0] or not second[1] <= third[0]:
            self._fail("they interleave")
        period = self.calls[second[0] : third[0]]
        between = len(period) - (second[1] - second[0])
        last = self.calls[third[0] : third[1] + between]
        if between and not self._agrees(period, last):
            # What is between blocks comes before each, not behind it, or another thing follows the last.
            last = self.calls[slice(*third)]
        if not between or len(last) != len(period):
            self._match(self.calls[slice(*second)], last, set(period))
        self._check_between(self.calls[first[1] : second[0]], self.calls[second[1] : third[0]], set(period))
        self._check_uses(set(period), set(last))
        self._fill_placeholders()
        self._copy(period, last)

    def _fail(self, why: str) -> None:
        raise CannotSplice(self.stack.path, why)

    def _range(self, block: int) -> tuple[int, int]:
        """Half-open range of the calls made in a block; they must be consecutive."""
        path = f"{self.stack.path}.{block}"
        inside = [
            i for i, node in enumerate(self.calls) if any(frame.path == path for frame in node.meta.get("frames", ()))
        ]
        if not inside:
            self._fail(f"block {block} makes no operator of its own")
        if any(frame.call for i in inside for frame in self.calls[i].meta["frames"] if frame.path == path):
            self._fail("they are called more than once")
        if inside[-1] - inside[0] + 1 != len(inside):
            self._fail(f"operators of other modules stand inside block {block}")
        return inside[0], inside[-1] + 1

    # -- agreement

    def _agrees(self, period: Sequence[fx.Node], last: Sequence[fx.Node]) -> bool:
        """Whether block 2 agrees with block 1 along with what follows either; keeps what is carried only then."""
        try:
            self._match(period, last, set(period))
        except CannotSplice:
            self.carried.clear()
            return False
        return True

    def _match(self, block: Sequence[fx.Node], last: Sequence[fx.Node], period: set[fx.Node]) -> None:
        """Blocks 1 and 2 are equal node by node, operand by operand."""
        if len(block) != len(last):
            self._fail(f"block 1 has {len(block)} operators, block 2 has {len(last)}")
        twin = dict(zip(block, last, strict=True))
        back: dict[fx.Node, fx.Node] = {}
        for left, right in zip(block, last, strict=True):
            if left.target is not right.target or not _same_frames(left, right, self.stack.path):
                self._fail(f"{left.target} in block 1 is {right.target} in block 2")
            if not _same_value(left, right):
                self._fail(f"the results of {left.target} differ in shape, type or gradient")
            ours, theirs = _flat(left), _flat(right)
            if len(ours) != len(theirs):
                self._fail(f"the arguments of {left.target} differ")
            for a, b in zip(ours, theirs, strict=True):
                if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
                    if type(a) is not type(b) or a != b:
                        self._fail(f"an argument of {left.target} is {a} in block 1 and {b} in block 2")
                elif a in twin:
                    if twin[a] is not b:
                        self._fail(f"{left.target} has another operand in block 2")
                elif a is not b and not self._same_state(a, b):
                    if (
                        b not in period
                        or a in period
                        or self.carried.setdefault(a, b) is not b
                        or back.setdefault(b, a) is not a
                    ):
                        self._fail(f"{left.target} has another outside operand in block 2")
                    if not _same_value(a, b):
                        self._fail(f"what {left.target} takes from the block before differs in shape, type or gradient")

    def _same_state(self, left: fx.Node, right: fx.Node) -> bool:
        """Whether two placeholders are the same parameter or buffer of blocks 1 and 2."""
        name = self.name_of.get(left)
        return name is not None and self.name_of.get(right) == self._in_block(name, 2) != name

    def _in_block(self, name: str, block: int, source: int = 1) -> str:
        start = f"{self.stack.path}.{source}."
        return f"{self.stack.path}.{block}.{name[len(start) :]}" if name.startswith(start) else name

    def _check_between(self, before: Sequence[fx.Node], after: Sequence[fx.Node], period: set[fx.Node]) -> None:
        """What the list's owner does between blocks is the same after blocks 0 and 1, and knows no block's number."""
        if len(before) != len(after):
            self._fail("what happens between them differs")
        for left, right in zip(before, after, strict=True):
            ours, theirs = _flat(left), _flat(right)
            if left.target is not right.target or len(ours) != len(theirs) or not _same_value(left, right):
                self._fail("what happens between them differs")
            for a, b in zip(ours, theirs, strict=True):
                if isinstance(a, fx.Node) and isinstance(b, fx.Node):
                    outside = a is b and b not in period
                    if not outside and b not in period and b not in self.carried:
                        self._fail("what happens between them depends on the block's number")
                elif type(a) is not type(b) or a != b:
                    self._fail("what happens between them differs")

    def _check_uses(self, period: set[fx.Node], last: set[fx.Node]) -> None:
        """Nothing after the list uses an inner block's values, other than the new values of its buffers."""
        for node in period:
            for user in node.users:
                if user in period or user in last:
                    continue
                if user is not self.draft.output or node in _flat_of(user.args[0][0]):  # type: ignore[index]
                    self._fail(f"{node.target} of block 1 is used after the blocks")
        inner = f"{self.stack.path}.1."
        for name, value in zip(self.draft.updates, self.draft.output.args[0][1], strict=True):  # type: ignore[index, arg-type]
            if value in period and not name.startswith(inner):
                self._fail(f"block 1 changes the buffer {name} of another module")

    # -- copying

    def _fill_placeholders(self) -> None:
        start = self.stack.path + "."
        for name, node in self.draft.state.items():
            if "val" not in node.meta and name.startswith(start):
                index, _, rest = name[len(start) :].partition(".")
                twin = self.draft.state[f"{self.stack.path}.{1 if int(index) else 0}.{rest}"]
                node.meta["val"] = twin.meta["val"]

    def _copy(self, period: Sequence[fx.Node], last: Sequence[fx.Node]) -> None:
        draft, path, count = self.draft, self.stack.path, self.stack.count
        before = {node: node for node in period}
        """The period's nodes -> those of the copy made last."""
        results: Any = draft.output.args[0]
        values, updated = results
        changes = dict(zip(draft.updates, updated, strict=True))
        ours = [(name, node) for name, node in changes.items() if name.startswith(f"{path}.1.")]
        with draft.graph.inserting_before(last[0]):
            for block in range(2, count - 1):
                copies: dict[fx.Node, fx.Node] = {}

                def operand(
                    node: fx.Node,
                    block: int = block,
                    copies: dict[fx.Node, fx.Node] = copies,
                    before: dict[fx.Node, fx.Node] = before,
                ) -> fx.Node:
                    if node in copies:
                        return copies[node]
                    if node in self.carried:
                        return before[self.carried[node]]
                    name = self.name_of.get(node)
                    return node if name is None else draft.state[self._in_block(name, block)]

                for node in period:
                    copy = draft.graph.node_copy(node, operand)
                    copy.meta = {**node.meta, "frames": _moved(node.meta.get("frames", ()), path, 1, block)}
                    copies[node] = copy
                changes.update({self._in_block(name, block): copies[node] for name, node in ours})
                before = copies

        def at_end(node: fx.Node) -> fx.Node:
            name = self.name_of.get(node)
            return before.get(node, node) if name is None else draft.state[self._in_block(name, count - 1, 2)]

        for node in last:
            node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), at_end)
            node.meta["frames"] = _moved(node.meta.get("frames", ()), path, 2, count - 1)
        moved = {
            self._in_block(name, count - 1, 2): node
            for name, node in changes.items()
            if name.startswith(f"{path}.2.") and name in draft.updates
        }
        # Block 2's own new values move to the last block; the copy that became block 2 has its own.
        if count - 1 > 2:
            fresh = {f"{path}.2.{name[len(path) + 3 :]}" for name, _ in ours}
            originals = dict(zip(draft.updates, updated, strict=True))
            moved = {self._in_block(name, count - 1, 2): originals[name] for name in fresh}
        changes.update(moved)
        ordered = [name for name in draft.state if name in changes]
        draft.updates[:] = ordered
        draft.output.args = ((values, [changes[name] for name in ordered]),)


def _moved(frames: tuple[Frame, ...], path: str, source: int, target: int) -> tuple[Frame, ...]:
    """Frames of block `source` as frames of block `target`."""
    old, new = f"{path}.{source}", f"{path}.{target}"
    return tuple(
        replace(frame, path=new + frame.path[len(old) :])
        if frame.path == old or frame.path.startswith(old + ".")
        else frame
        for frame in frames
    )


def _same_frames(left: fx.Node, right: fx.Node, path: str) -> bool:
    return _moved(left.meta.get("frames", ()), path, 1, 2) == right.meta.get("frames", ())


def _flat_of(argument: Any) -> list[Any]:
    if isinstance(argument, (tuple, list)):
        return [leaf for item in argument for leaf in _flat_of(item)]
    if isinstance(argument, dict):
        return [leaf for key, item in argument.items() for leaf in (key, *_flat_of(item))]
    return [argument]


def _flat(node: fx.Node) -> list[Any]:
    return _flat_of((node.args, node.kwargs))


def _same_value(left: fx.Node, right: fx.Node) -> bool:
    return _describe(left.meta.get("val")) == _describe(right.meta.get("val")) and left.meta.get(
        "needs_grad"
    ) == right.meta.get("needs_grad")


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(_describe(size) for size in value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        return tuple(_describe(item) for item in value)
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
