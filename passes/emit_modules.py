"""The modules of one stage: their tree, their names in Python, and the constructors that make them with local sizes."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from autoshard.passes.emit_leaves import LEAVES, is_torch
from autoshard.passes.emit_scope import size_text
from autoshard.passes.emit_tree import Body, Leaf, Plain, bodies
from autoshard.passes.local import Extent, LocalStage, StoredTensor
from autoshard.passes.lower_place import CONTAINERS
from autoshard.program import Program


@dataclass
class Modules:
    """class_of: path -> name of its class and the axes that its constructor takes. imports: what constructors need."""

    program: Program
    stage: LocalStage
    root: Body
    dtype: torch.dtype
    class_of: Callable[[str], tuple[str, tuple[str, ...]]]
    imports: set[tuple[str, str]] = field(default_factory=set)

    # ---------------------------------------------------------------- the module tree

    @cached_property
    def calls(self) -> dict[str, list[Body]]:
        """Path -> its calls."""
        found: dict[str, list[Body]] = {}
        for body in bodies(self.root):
            found.setdefault(body.path, []).append(body)
        return found

    @cached_property
    def stored(self) -> dict[str, StoredTensor]:
        """Every name of a parameter or buffer -> it."""
        return {name: stored for stored in self.stage.stored for name in (stored.name, *stored.aliases)}

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """Path -> names of the modules right below it, in the model's order."""
        paths = {name.rpartition(".")[0] for name in self.stored} | set(self.calls)
        every = {path[: match.start()] for path in paths for match in re.finditer(r"\.|$", path)} - {""}
        order = {path: number for number, path in enumerate(self.program.classes)}
        found: dict[str, list[str]] = {}
        for path in sorted(every, key=lambda path: (order.get(path, len(order)), path)):
            parent, _, name = path.rpartition(".")
            found.setdefault(parent, []).append(name)
        return found

    def class_name(self, path: str) -> str:
        """The user's class at a path."""
        if path in self.calls:
            return self.calls[path][0].class_name
        return self.program.classes.get(path, "")

    def is_container(self, path: str) -> bool:
        return self.class_name(path) in CONTAINERS and path not in self.calls

    def is_list(self, path: str) -> bool:
        names = self.children.get(path, [])
        return self.is_container(path) and names == [str(number) for number in range(len(names))]

    def is_leaf(self, path: str) -> bool:
        return is_torch(self.class_name(path)) and path not in self.calls and self.class_name(path) in LEAVES

    # ---------------------------------------------------------------- text of attributes and calls

    def attribute(self, path: str, rest: str) -> str:
        """`rest`, a name below `path`, as Python seen from the module at `path`."""
        text, at = "self", path
        for name in rest.split("."):
            if (self.is_container(at) and at != path) or self.is_container(at):
                text += f"[{name}]" if self.is_list(at) else f'["{name}"]'
            elif name.isidentifier():
                text += f".{name}"
            else:
                text = f'getattr({text}, "{name}")'
            at = f"{at}.{name}" if at else name
        return text

    def module(self, path: str, child: str) -> str:
        """A child module seen from the module at `path`."""
        if not child.startswith(f"{path}." if path else ""):
            raise KeyError(child)
        return self.attribute(path, child[len(path) + 1 :] if path else child)

    def owner(self, name: str) -> str:
        """The module with a class of its own that lists a parameter."""
        return self.nearest(name)

    def nearest(self, path: str) -> str:
        """The module with a class of its own that holds what is at `path`."""
        path = path.rpartition(".")[0]
        while path and (self.is_container(path) or self.is_leaf(path)):
            path = path.rpartition(".")[0]
        return path

    # ---------------------------------------------------------------- constructor

    def init(self, path: str) -> tuple[list[str], set[str]]:
        """Lines that make parameters, buffers and children; the axes that they need."""
        axes: set[str] = set()
        lines: list[str] = []
        prefix = f"{path}." if path else ""
        own = [name for name in self.stored if name.startswith(prefix) and "." not in name[len(prefix) :]]
        for name in own:
            if name == self.stored[name].name:
                lines += self._tensor(name[len(prefix) :], self.stored[name], axes)
        for child in self.children.get(path, []):
            expression = self._child(f"{prefix}{child}", axes)
            lines.append(
                f"self.{child} = {expression}" if child.isidentifier() else f'self.add_module("{child}", {expression})'
            )
        for leaf in self._leaves_below(path):
            lines += self._uneven_leaf(path, leaf, axes)
        for stored in self.stage.stored:
            lines += self._ties(path, stored)
            below = stored.name[len(prefix) :] if stored.name.startswith(prefix) else ""
            if not stored.trainable and not stored.is_buffer and below and self.owner(stored.name) == path:
                lines.append(f"{self.attribute(path, below)}.requires_grad_(False)")
        return lines, axes

    def _tensor(self, name: str, stored: StoredTensor, axes: set[str]) -> list[str]:
        sizes = ", ".join(self._size(extent, axes) for extent in stored.dims)
        shape = sizes if stored.dims else "()"
        dtype = "" if stored.dtype == self.dtype else f", dtype={stored.dtype}"
        self.imports.add(("torch", ""))
        if not stored.is_buffer:
            return [f"self.{name} = nn.Parameter(torch.empty({shape}{dtype}))"]
        kept = "" if stored.persistent else ", persistent=False"
        return [f'self.register_buffer("{name}", torch.empty({shape}{dtype}){kept})']

    def _size(self, extent: Extent, axes: set[str]) -> str:
        def ranks(axis: str) -> str:
            axes.add(axis)
            return f"{axis}.size()"

        def uses(module: str, name: str) -> str:
            self.imports.add((module, name))
            return name

        def no_symbols(size: Any, cut: tuple[str, ...]) -> Any:
            raise AssertionError("a stored tensor has a size that depends on the inputs")

        return size_text(extent, no_symbols, ranks, uses).text

    def _child(self, path: str, axes: set[str]) -> str:
        if self.is_container(path):
            return self._container(path, axes)
        if self.is_leaf(path):
            return self._leaf(path, axes)
        name, given = self.class_of(path)
        axes |= set(given)
        return f"{name}({', '.join(given)})"

    def _container(self, path: str, axes: set[str]) -> str:
        names = self.children[path]
        made = [self._child(f"{path}.{name}", axes) for name in names]
        numbers = [int(name) for name in names] if all(name.isdigit() for name in names) else []
        if self.is_list(path):
            runs = _runs(made)
            if len(runs) == 1 and runs[0][1] > 1:
                return f"nn.ModuleList({runs[0][0]} for _ in range({runs[0][1]}))"
            items = [text if count == 1 else f"*({text} for _ in range({count}))" for text, count in runs]
            return f"nn.ModuleList([{', '.join(items)}])"
        if len(set(made)) == 1 and len(made) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
            return f"nn.ModuleDict({{str(i): {made[0]} for i in range({numbers[0]}, {numbers[-1] + 1})}})"
        entries = ", ".join(f'"{name}": {text}' for name, text in zip(names, made, strict=True))
        return f"nn.ModuleDict({{{entries}}})"

    def _leaf(self, path: str, axes: set[str]) -> str:
        kind = LEAVES[self.class_name(path)]
        stored = {name.rpartition(".")[2]: one for name, one in self.stored.items() if name.rpartition(".")[0] == path}
        if self._is_made_whole(path):
            stored = {name: _uncut(one) for name, one in stored.items()}
        given = kind.make(stored, self._arguments(path, kind.target), lambda extent: self._size(extent, axes))
        dtypes = {one.dtype for one in stored.values() if one.dtype.is_floating_point}
        if len(dtypes) == 1 and self.dtype not in dtypes:
            given.append(f"dtype={dtypes.pop()}")
        return f"nn.{kind.name}({', '.join(given)})"

    def _leaves_below(self, path: str) -> list[str]:
        """Paths of torch.nn's modules that the class at `path` makes."""
        every = {name.rpartition(".")[0] for name in self.stored}
        return sorted(p for p in every if p and self.is_leaf(p) and self.nearest(p) == path)

    def _uneven_leaf(self, path: str, leaf: str, axes: set[str]) -> list[str]:
        """Lines that replace what is not cut as the module's weight is, by which its constructor goes."""
        own = {name.rpartition(".")[2]: one for name, one in self.stored.items() if name.rpartition(".")[0] == leaf}
        weight = own.get("weight")
        if weight is not None and self._is_made_whole(leaf):
            weight = _uncut(weight)
        lines = []
        for name, one in own.items():
            if weight is None or not one.dims or one.dims == weight.dims[: len(one.dims)]:
                continue
            sizes = ", ".join(self._size(extent, axes) for extent in one.dims)
            module = self.module(path, leaf)
            if one.is_buffer:
                lines.append(f'{module}.register_buffer("{name}", torch.empty({sizes}))')
            else:
                lines.append(f"{module}.{name} = nn.Parameter(torch.empty({sizes}))")
        return lines

    def _is_made_whole(self, path: str) -> bool:
        """Whether a module with groups of channels only holds its parameters: cut, they may not fit its groups."""
        arguments = self._leaf_nodes.get(path, {})
        return arguments.get("groups", 1) != 1 and path not in self._called_leaves

    @cached_property
    def _called_leaves(self) -> frozenset[str]:
        return frozenset(item.path for body in bodies(self.root) for item in body.items if isinstance(item, Leaf))

    def _arguments(self, path: str, target: str) -> Mapping[str, Any]:
        """Arguments of the operator that a torch.nn module calls in this stage."""
        wanted = self._leaf_nodes
        return wanted.get(path, {})

    @cached_property
    def _leaf_nodes(self) -> dict[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for body in bodies(self.root):
            for item in body.items:
                if isinstance(item, Leaf):
                    found.setdefault(item.path, item.node.arguments)
                elif isinstance(item, Plain) and item.node.frames and not item.node.converts:
                    kind = LEAVES.get(item.node.frames[-1].class_name)
                    if kind is not None and item.node.target == kind.target:
                        found.setdefault(item.node.frames[-1].path, item.node.arguments)
        return found

    def _ties(self, path: str, stored: StoredTensor) -> list[str]:
        """Lines that make the names of a tied parameter one, in the module that holds them all."""
        if not stored.aliases:
            return []
        names = [stored.name, *stored.aliases]
        shared = _common([name.rpartition(".")[0] for name in names])
        while shared and (self.is_container(shared) or self.is_leaf(shared)):
            shared = shared.rpartition(".")[0]
        if shared != path:
            return []
        prefix = len(path) + 1 if path else 0
        first, *others = (self.attribute(path, name[prefix:]) for name in names)
        return [f"{other} = {first}" for other in others]


def _uncut(stored: StoredTensor) -> StoredTensor:
    return replace(stored, dims=tuple(Extent(extent.size) for extent in stored.dims))


def _runs(items: Sequence[str]) -> list[tuple[str, int]]:
    runs: list[tuple[str, int]] = []
    for item in items:
        if runs and runs[-1][0] == item:
            runs[-1] = (item, runs[-1][1] + 1)
        else:
            runs.append((item, 1))
    return runs


def _common(paths: Sequence[str]) -> str:
    parts = [path.split(".") if path else [] for path in paths]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
