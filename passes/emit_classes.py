"""Classes of emitted modules as records of ready text, one for each kind of module.

A class is built from its children up. Modules whose classes have the same text share it; where the user's one class
comes out in several texts, the later ones get a number.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoshard.passes.emit_body import MissingSize, Statement, Writer, Written, shape_text
from autoshard.passes.emit_leaves import LEAVES, is_torch
from autoshard.passes.emit_loops import Loop, fold
from autoshard.passes.emit_scope import size_text
from autoshard.passes.emit_tree import Body, Leaf, Plain, bodies, build, connect, stored_names
from autoshard.passes.local import Extent, LocalStage, StoredTensor
from autoshard.passes.lower_place import CONTAINERS
from autoshard.passes.source_lines import source_line
from autoshard.program import Frame, Program


@dataclass(frozen=True)
class Forward:
    """One method. lines: its body, indented from 0. checks: for each line of it, names and the tensors they hold."""

    name: str
    parameters: tuple[str, ...]
    returns: str
    doc: str
    lines: tuple[str, ...]
    decorator: str = ""


@dataclass(frozen=True)
class ClassText:
    """One class. placements, summed: lines of its tables. axes: process groups that its constructor takes."""

    name: str
    doc: str
    axes: tuple[str, ...]
    placements: tuple[str, ...]
    summed: tuple[str, ...]
    init: tuple[str, ...]
    forwards: tuple[Forward, ...]


@dataclass(frozen=True)
class StageText:
    """The classes of one stage, children first, and what they import: (module, name)."""

    classes: tuple[ClassText, ...]
    imports: frozenset[tuple[str, str]]

    @property
    def root(self) -> ClassText:
        """The class of the whole stage."""
        return self.classes[-1]


class StageWriter:
    """Writes the classes of one stage. dtype: of most parameters; default_summed: axes over which most are summed."""

    def __init__(
        self, program: Program, stage: LocalStage, letters: Mapping[Any, str], dtype: Any, default_summed: tuple[str, ...]
    ) -> None:
        self.program, self.stage, self.letters = program, stage, letters
        self.dtype, self.default_summed = dtype, default_summed
        self.names = stored_names(stage)
        self.root = build(stage, program.classes)
        self.imports: set[tuple[str, str]] = set()
        self.classes: dict[str, ClassText] = {}
        self.order: list[ClassText] = []
        self.users: dict[str, list[str]] = {}
        self.methods: dict[tuple[str, int], str] = {}

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

    def _is_container(self, path: str) -> bool:
        return self.class_name(path) in CONTAINERS and path not in self.calls

    def _is_list(self, path: str) -> bool:
        names = self.children.get(path, [])
        return self._is_container(path) and names == [str(number) for number in range(len(names))]

    def _is_leaf(self, path: str) -> bool:
        return is_torch(self.class_name(path)) and path not in self.calls and self.class_name(path) in LEAVES

    # ---------------------------------------------------------------- text of attributes and calls

    def attribute(self, path: str, rest: str) -> str:
        """`rest`, a name below `path`, as Python seen from the module at `path`."""
        text, at = "self", path
        for name in rest.split("."):
            if self._is_container(at) and at != path:
                text += f"[{name}]" if self._is_list(at) else f'["{name}"]'
            elif self._is_container(at):
                text += f"[{name}]" if self._is_list(at) else f'["{name}"]'
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

    def call(self, writer: Writer, body: Body, given: Sequence[str]) -> str:
        """The call of a child module."""
        self.class_text(body.path)
        module = self.module(writer.body.path, body.path)
        method = self.methods[body.path, body.call]
        called = module if method == "forward" else f"{module}.{method}"
        if body.path in self.stage.remat:
            writer.uses("torch.utils.checkpoint", "checkpoint")
            return f"checkpoint({', '.join([called, *given])}, use_reentrant=False)"
        return f"{called}({', '.join(given)})"

    @cached_property
    def hints(self) -> dict[str, str]:
        """Tensor -> what the user calls it, in the innermost call whose line gives it a name."""
        nodes = {node.name: node for node in self.program.graph.nodes}
        found: dict[str, str] = {}
        for name, tensor in self.stage.tensors.items():
            if tensor.kind in ("input", "received"):
                found[name] = tensor.attribute
            elif tensor.value is not None and tensor.value.node in nodes:
                for frame in reversed(nodes[tensor.value.node].meta.get("frames", ())):
                    targets = source_line(frame).targets
                    if targets:
                        if len(targets) == 1 and targets[0]:
                            found[name] = targets[0]
                        break
        return found

    # ---------------------------------------------------------------- one class

    def text(self) -> StageText:
        """All classes. A size that a body cannot read makes it take one more input, and everything is written again."""
        for _ in range(1000):
            try:
                self.class_text("")
                break
            except _Incomplete as found:
                found.body.extra.append(found.tensor)
                connect(self.root, self.stage)
                self.__dict__.pop("calls", None)
                self.classes, self.order, self.methods, self.imports, self.users = {}, [], {}, set(), {}
        documented = tuple(replace(text, doc=self._doc(text.name)) for text in self.order)
        return StageText(documented, frozenset(self.imports))

    def class_text(self, path: str) -> ClassText:
        """The class of the module at a path."""
        if path in self.classes:
            return self.classes[path]
        fixed = {}
        if path == "":
            tensors = self.stage.tensors
            fixed = {name: tensors[name].attribute for name in self.calls[""][0].inputs}
        written = [self._written(body, fixed) for body in self.calls.get(path, [])]
        init, axes = self._init(path)
        forwards: list[Forward] = []
        for body, one in zip(self.calls.get(path, []), written, strict=True):
            axes |= one.axes
            forward = self._forward(path, body, one)
            same = next((known for known in forwards if replace(known, name="") == replace(forward, name="")), None)
            if same is None:
                same = replace(forward, name="forward" if not forwards else f"forward_{len(forwards) + 1}")
                forwards.append(same)
            self.methods[path, body.call] = same.name
        kept = {axis for one in written for axis in one.axes}
        if path == "" and self.stage.totals:
            totals = self._denominators()
            axes |= totals[1]
            kept |= totals[1]
            forwards.append(totals[0])
        lines = [f"self.{axis} = {axis}" for axis in self.stage.axes if axis in kept] + init
        placements, summed = self._tables(path)
        text = ClassText(
            _plain_name(self.class_name(path)), "", tuple(a for a in self.stage.axes if a in axes), placements, summed,
            tuple(lines), tuple(forwards),
        )  # fmt: skip
        text = self._shared(text)
        self.users.setdefault(text.name, []).append(path)
        self.classes[path] = text
        return text

    def _shared(self, text: ClassText) -> ClassText:
        """The class that is already there with this text; else this one, under a name of its own."""
        alike = [known for known in self.order if re.sub(r"_\d+$", "", known.name) == text.name]
        for known in alike:
            if replace(known, name=text.name) == text:
                return known
        names = {known.name for known in self.order}
        name, number = text.name, 1
        while name in names:
            number += 1
            name = f"{text.name}_{number}"
        text = replace(text, name=name)
        self.order.append(text)
        return text

    def _doc(self, name: str) -> str:
        paths = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in self.users[name]))
        original = self.class_name(self.users[name][0])
        if paths == [""]:
            part = "" if len(self.program_stages) == 1 else f", stage {self.stage.number} of {len(self.program_stages)}"
            return f"{original}{part}: the part of one rank."
        listed = paths[0] + (f" and {len(paths) - 1} other places" if len(paths) > 1 else "")
        return f"{original} at {listed}: the part of one rank."

    program_stages: Sequence[LocalStage] = ()

    # ---------------------------------------------------------------- forward

    def _written(self, body: Body, fixed: Mapping[str, str]) -> Written:
        try:
            written = Writer(body, self.stage, self.names, self, self.letters, fixed).written()
        except MissingSize as missing:
            raise _Incomplete(body, self._provider(missing.size)) from None
        self.imports |= written.imports
        return written

    def _provider(self, size: Any) -> str:
        """An input of the model that has a dim of this size."""
        name, _ = self.program.symbols[str(size)]
        if name not in self.stage.tensors:
            raise KeyError(f"stage {self.stage.number} has no tensor to read {size} from")
        return name

    def _forward(self, path: str, body: Body, written: Written) -> Forward:
        lines = self._lines(path, written.statements)
        if written.returns:
            _return(lines, written.returns)
        tensors = self.stage.tensors
        takes = [
            f"{parameter}: {shape_text(tensors[name], self.letters)}"
            for parameter, name in zip(written.parameters, body.inputs, strict=True)
            if tensors[name].kind != "microbatches"
        ]
        gives = ", ".join(shape_text(tensors[name], self.letters) for name in body.outputs)
        returns = "Tensor" if len(body.outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(body.outputs))}]"
        parameters = tuple(
            f"{parameter}: {'int' if tensors[name].kind == 'microbatches' else 'Tensor'}"
            for parameter, name in zip(written.parameters, body.inputs, strict=True)
        )
        decorator = "@gather_again()" if path == "" and self.stage.gathers_again else ""
        if decorator:
            self.imports.add(("collectives", "gather_again"))
        return Forward("forward", parameters, returns, f"{'; '.join(takes)} -> {gives}", tuple(lines), decorator)

    def _lines(self, path: str, statements: Sequence[Statement]) -> list[str]:
        sizes = {
            self.module(path, container): len(names)
            for container, names in self.children.items()
            if container and container.startswith(f"{path}." if path else "") and self._is_container(container)
            and self._nearest(container) == path
        }  # fmt: skip
        lines: list[str] = []
        for item in fold(statements, sizes):
            if isinstance(item, Loop):
                lines.append(item.header)
                lines += [f"    {line}" for statement in item.body for line in statement.lines()]
            else:
                lines += item.lines()
        return lines

    def _nearest(self, path: str) -> str:
        """The module with a class of its own that holds what is at `path`."""
        path = path.rpartition(".")[0]
        while path and (self._is_container(path) or self._is_leaf(path)):
            path = path.rpartition(".")[0]
        return path

    def _denominators(self) -> tuple[Forward, set[str]]:
        stage, nothing = self.stage, Frame("", 0, "")
        body = Body("", -1, "", nothing, [Plain(node, nothing) for node in stage.total_nodes])
        made = {name for node in stage.total_nodes for name in node.results}
        reads = dict.fromkeys(name for node in stage.total_nodes for name in node.operands() if name not in made)
        body.inputs, body.outputs = list(reads), list(stage.totals.values())
        fixed = {name: stage.tensors[name].attribute for name in body.inputs}
        written = self._written(body, fixed)
        lines = self._lines("", written.statements)
        values = written.returns.split(", ") if len(stage.totals) > 1 else [written.returns]
        entries = ", ".join(f'"{name}": {value}' for name, value in zip(stage.totals, values, strict=True))
        lines.append(f"return {{{entries}}}")
        doc = "Counts of one microbatch; `self.totals` has their sums over the whole step."
        parameters = tuple(f"{name}: Tensor" for name in written.parameters)
        return Forward("denominators", parameters, "dict[str, Tensor]", doc, tuple(lines)), set(written.axes)

    # ---------------------------------------------------------------- constructor

    def _init(self, path: str) -> tuple[list[str], set[str]]:
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
            lines.append(f"self.{child} = {expression}" if child.isidentifier() else f'self.add_module("{child}", {expression})')
        for leaf in self._leaves_below(path):
            lines += self._uneven_leaf(path, leaf, axes)
        for stored in self.stage.stored:
            lines += self._ties(path, stored)
            below = stored.name[len(prefix) :] if stored.name.startswith(prefix) else ""
            if not stored.trainable and not stored.is_buffer and below and self._owner(stored.name) == path:
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
        if self._is_container(path):
            return self._container(path, axes)
        if self._is_leaf(path):
            return self._leaf(path, axes)
        text = self.class_text(path)
        axes |= set(text.axes)
        return f"{text.name}({', '.join(text.axes)})"

    def _container(self, path: str, axes: set[str]) -> str:
        names = self.children[path]
        made = [self._child(f"{path}.{name}", axes) for name in names]
        numbers = [int(name) for name in names] if all(name.isdigit() for name in names) else []
        if self._is_list(path):
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
        given = kind.make(stored, self._arguments(path, kind.target), lambda extent: self._size(extent, axes))
        dtypes = {one.dtype for one in stored.values() if one.dtype.is_floating_point}
        if len(dtypes) == 1 and self.dtype not in dtypes:
            given.append(f"dtype={dtypes.pop()}")
        return f"nn.{kind.name}({', '.join(given)})"

    def _leaves_below(self, path: str) -> list[str]:
        """Paths of torch.nn's modules that the class at `path` makes."""
        every = {name.rpartition(".")[0] for name in self.stored}
        return sorted(p for p in every if p and self._is_leaf(p) and self._nearest(p) == path)

    def _uneven_leaf(self, path: str, leaf: str, axes: set[str]) -> list[str]:
        """Lines that replace what is not cut as the module's weight is, by which its constructor goes."""
        own = {name.rpartition(".")[2]: one for name, one in self.stored.items() if name.rpartition(".")[0] == leaf}
        weight = own.get("weight")
        lines = []
        for name, one in own.items():
            if weight is None or name == "weight" or not one.dims or one.dims == weight.dims[: len(one.dims)]:
                continue
            sizes = ", ".join(self._size(extent, axes) for extent in one.dims)
            module = self.module(path, leaf)
            if one.is_buffer:
                lines.append(f'{module}.register_buffer("{name}", torch.empty({sizes}))')
            else:
                lines.append(f"{module}.{name} = nn.Parameter(torch.empty({sizes}))")
        return lines

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
        while shared and (self._is_container(shared) or self._is_leaf(shared)):
            shared = shared.rpartition(".")[0]
        if shared != path:
            return []
        prefix = len(path) + 1 if path else 0
        first, *others = (self.attribute(path, name[prefix:]) for name in names)
        return [f"{other} = {first}" for other in others]

    # ---------------------------------------------------------------- tables

    def _owner(self, name: str) -> str:
        """The module with a class of its own that a parameter is listed in."""
        path = name.rpartition(".")[0]
        while path and (self._is_container(path) or self._is_leaf(path)):
            path = path.rpartition(".")[0]
        return path

    def _tables(self, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        placements, summed = [], []
        prefix = len(path) + 1 if path else 0
        for stored in self.stage.stored:
            if self._owner(stored.name) != path:
                continue
            name = stored.name[prefix:]
            if stored.placement:
                axes = ", ".join(f'"{axis}": {dim}' for axis, dim in stored.placement.items())
                placements.append(f'"{name}": {{{axes}}}')
            if not stored.is_buffer and stored.trainable and stored.summed != self.default_summed:
                axes = ", ".join(f'"{axis}"' for axis in stored.summed)
                summed.append(f'"{name}": ({axes}{"," if len(stored.summed) == 1 else ""})')
        return tuple(placements), tuple(summed)


class _Incomplete(Exception):
    def __init__(self, body: Body, tensor: str) -> None:
        self.body, self.tensor = body, tensor


def _return(lines: list[str], returns: str) -> None:
    """Add the return; what was given its name just before is returned without it."""
    if lines and lines[-1].startswith(f"{returns} = ") and returns.isidentifier():
        lines[-1] = f"return {lines[-1].removeprefix(f'{returns} = ')}"
    else:
        lines.append(f"return {returns}")


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


def _plain_name(class_name: str) -> str:
    name = class_name.rpartition(".")[2] or "Model"
    return name if name.isidentifier() else "Model"


Make = Callable[..., str]
