"""Nodes of a stage as a tree of module calls, the user's own.

A `Body` is one call of one module: its items are nodes, calls of child modules, and uses of torch.nn's own modules
(`Leaf`). Containers are looked through. A torch.nn module that is not used exactly as it is, say with a weight that is
gathered first, is written out in the body around it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoshard.passes.emit_leaves import LEAVES, is_torch, matches
from autoshard.passes.local import LocalNode, LocalStage, LocalTensor, Ref
from autoshard.passes.lower_place import CONTAINERS, has_children
from autoshard.program import Frame

Call = tuple[str, int]


@dataclass(frozen=True)
class Leaf:
    """A torch.nn module called as it is on one tensor."""

    path: str
    node: LocalNode
    operands: tuple[str, ...]
    results: tuple[str | None, ...]
    line: Frame
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plain:
    """A node of its own."""

    node: LocalNode
    line: Frame

    @property
    def operands(self) -> tuple[str, ...]:
        return self.node.operands()

    @property
    def results(self) -> tuple[str | None, ...]:
        return self.node.results[:1] if self.node.target in _ONE_RESULT else self.node.results


_ONE_RESULT = frozenset({"aten.native_dropout.default"})
"""Operators whose further results (dropout's mask) nobody reads and the emitted call does not give."""


@dataclass
class Body:
    """One call of one module. frame: of the module itself; line: the caller's, at the call.

    inputs, outputs: names of tensors, in the order of first use and of making; filled by `connect`.
    """

    path: str
    call: int
    class_name: str
    line: Frame
    items: list["Item"] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    @property
    def operands(self) -> tuple[str, ...]:
        return tuple(self.inputs)

    @property
    def results(self) -> tuple[str | None, ...]:
        return tuple(self.outputs)


Item = Plain | Leaf | Body


def build(stage: LocalStage, classes: Mapping[str, str]) -> Body:
    """The tree of a stage's calls."""
    root = Body("", 0, classes.get("", "Model"), Frame("", 0, classes.get("", "Model")))
    nodes = [_looked_through(node) for node in _with_updates(stage)]
    root.items = list(_items(nodes, 1, stage, classes))
    connect(root, stage)
    return root


def _looked_through(node: LocalNode) -> LocalNode:
    frames = tuple(frame for i, frame in enumerate(node.frames) if i == 0 or frame.class_name not in CONTAINERS)
    return node if frames == node.frames else replace(node, frames=frames)


def _with_updates(stage: LocalStage) -> list[LocalNode]:
    """The nodes, and after the call that makes a buffer's new value, the node that stores it."""
    nodes = list(stage.nodes)
    for buffer, tensor in stage.updates.items():
        at = next(index for index, node in enumerate(nodes) if tensor in node.results)
        frames = nodes[at].frames
        while len(frames) > 1 and not buffer.startswith(f"{frames[-1].path}."):
            frames = frames[:-1]
        key = _keys(frames)
        while at + 1 < len(nodes) and _keys(nodes[at + 1].frames)[: len(key)] == key:
            at += 1
        nodes.insert(at + 1, LocalNode("update", {"x": Ref(tensor), "buffer": buffer}, (), frames))
    return nodes


def _keys(frames: Sequence[Frame]) -> list[Call]:
    return [(frame.path, frame.call) for frame in frames]


def _items(nodes: Sequence[LocalNode], depth: int, stage: LocalStage, classes: Mapping[str, str]) -> Iterator[Item]:
    """Items of the body whose frames have this depth."""
    runs = _runs(nodes, depth)
    longest: dict[Call, int] = {}
    for number, (key, run) in enumerate(runs):
        if key is not None and (key not in longest or len(run) > len(runs[longest[key]][1])):
            longest[key] = number
    for number, (key, run) in enumerate(runs):
        line = run[0].frames[depth - 1] if len(run[0].frames) >= depth else Frame("", 0, "")
        if key is None:
            for node in run:
                yield Plain(node, node.frames[depth - 1] if len(node.frames) >= depth else line)
            continue
        frame = run[0].frames[depth]
        if longest[key] != number or _is_leaf(frame, classes):
            leaf = _leaf(run, frame, stage, line) if longest[key] == number else None
            if leaf is not None:
                yield leaf
            else:
                yield from (Plain(node, node.frames[depth - 1]) for node in run)
            continue
        if len(run) == 1 and not _stores(frame.path, stage):
            yield Plain(replace(run[0], frames=run[0].frames[:depth]), line)
            continue
        body = Body(frame.path, frame.call, frame.class_name, line)
        body.items = list(_items(run, depth + 1, stage, classes))
        yield body


def _runs(nodes: Sequence[LocalNode], depth: int) -> list[tuple[Call | None, list[LocalNode]]]:
    runs: list[tuple[Call | None, list[LocalNode]]] = []
    for node in nodes:
        key = (node.frames[depth].path, node.frames[depth].call) if len(node.frames) > depth else None
        if runs and runs[-1][0] == key:
            runs[-1][1].append(node)
        else:
            runs.append((key, [node]))
    return runs


def _is_leaf(frame: Frame, classes: Mapping[str, str]) -> bool:
    return is_torch(frame.class_name) and not has_children(frame.path, classes)


def _stores(path: str, stage: LocalStage) -> bool:
    """Whether a module holds parameters or buffers: one that does not, and does one thing, needs no class."""
    names = (name for stored in stage.stored for name in (stored.name, *stored.aliases))
    return any(name.startswith(f"{path}.") for name in names)


def _leaf(run: Sequence[LocalNode], frame: Frame, stage: LocalStage, line: Frame) -> Leaf | None:
    """The run as a plain call of the module, where it is one."""
    kind = LEAVES.get(frame.class_name)
    if kind is None:
        return None
    found = matches(kind, run, frame.path, stage)
    if found is None:
        return None
    return Leaf(frame.path, found.node, found.operands, found.results, line, found.groups)


# What goes in and out -------------------------------------------------------------------------------------------------


def owned(tensor: LocalTensor, path: str, names: Mapping[str, tuple[str, ...]]) -> str | None:
    """The name of a parameter or buffer seen from the module at `path`, if it is below it."""
    if tensor.kind not in ("parameter", "buffer"):
        return None
    prefix = f"{path}." if path else ""
    return next((name[len(prefix) :] for name in names[tensor.attribute] if name.startswith(prefix)), None)


def stored_names(stage: LocalStage) -> dict[str, tuple[str, ...]]:
    """Any name of a parameter or buffer -> all its names in this stage."""
    found: dict[str, tuple[str, ...]] = {}
    for stored in stage.stored:
        names = (stored.name, *stored.aliases)
        found |= dict.fromkeys(names, names)
    for tensor in stage.tensors.values():
        if tensor.kind in ("parameter", "buffer") and tensor.attribute not in found:
            found[tensor.attribute] = (tensor.attribute,)
    return found


def connect(root: Body, stage: LocalStage) -> None:
    """Fill inputs and outputs of every body below `root`, `extra` inputs included."""
    names = stored_names(stage)
    root.inputs, root.outputs = list(stage.inputs), list(stage.outputs)
    root.inputs += [name for name in root.extra if name not in root.inputs]
    _connect(root, stage, names, set(stage.outputs))


def _connect(body: Body, stage: LocalStage, names: Mapping[str, tuple[str, ...]], wanted: set[str]) -> None:
    later: list[set[str]] = []
    after = set(wanted)
    for item in reversed(body.items):
        later.append(set(after))
        after |= set(_all_reads(item))
    for item, needed in zip(body.items, reversed(later), strict=True):
        if isinstance(item, Body):
            made = _all_results(item)
            made_set = set(made)
            reads = dict.fromkeys(_all_reads(item))
            item.inputs = [
                name for name in reads if name not in made_set and owned(stage.tensors[name], item.path, names) is None
            ]
            item.outputs = [name for name in made if name in needed]
            _connect(item, stage, names, set(item.outputs))


def _all_reads(item: Item) -> Iterator[str]:
    if isinstance(item, Body):
        for inner in item.items:
            yield from _all_reads(inner)
        yield from item.extra
    else:
        yield from item.operands


def _all_results(item: Item) -> list[str]:
    if isinstance(item, Body):
        return [name for inner in item.items for name in _all_results(inner)]
    return [name for name in item.results if name is not None]


def bodies(body: Body) -> Iterator[Body]:
    """A body and all below it."""
    yield body
    for item in body.items:
        if isinstance(item, Body):
            yield from bodies(item)
