"""Classes of emitted modules as records of ready text, one for each kind of module.

A class is built from its children up. Modules whose classes have the same text share it; where the user's one class
comes out in several texts, the later ones get a number.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from autoshard.passes.emit_body import MissingSize, Statement, Writer, Written
from autoshard.passes.emit_items import shape_text
from autoshard.passes.emit_loops import Loop, fold
from autoshard.passes.emit_modules import Modules
from autoshard.passes.emit_names import Signature
from autoshard.passes.emit_reserved import IMPORTED, check_names
from autoshard.passes.emit_tree import Body, Plain, build, connect, owned, stored_names
from autoshard.passes.local import LocalStage
from autoshard.passes.user_names import user_names
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
class Made:
    """What one statement of a forward gives names to: targets -> tensors. No targets: what it returns."""

    targets: tuple[str, ...]
    tensors: tuple[str | None, ...]


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
        self,
        program: Program,
        stage: LocalStage,
        letters: Mapping[Any, str],
        dtype: Any,
        default_summed: tuple[str, ...],
        stages: int,
    ) -> None:
        self.program, self.stage, self.letters, self.stages = program, stage, letters, stages
        self.dtype, self.default_summed = dtype, default_summed
        self.names = stored_names(stage)
        self.root = build(stage, program.classes)
        check_names((given.name for given in program.inputs.values()), (*program.classes, *self.names))
        self.modules = Modules(program, stage, self.root, dtype, self._class_of)
        self.attribute, self.module = self.modules.attribute, self.modules.module
        self.imports = self.modules.imports
        self.classes: dict[str, ClassText] = {}
        self.order: list[ClassText] = []
        self.users: dict[str, list[str]] = {}
        self.methods: dict[tuple[str, int], str] = {}
        self.signatures: dict[tuple[str, int], Signature] = {}
        self.made: dict[tuple[str, int], tuple[Made, ...]] = {}

    # ---------------------------------------------------------------- calls

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
        """Tensor -> what the user calls it."""
        names = user_names(self.program)
        given = {name: t.attribute for name, t in self.stage.tensors.items() if t.kind in ("input", "received")}
        called = {
            name: names[t.value] for name, t in self.stage.tensors.items() if t.value is not None and t.value in names
        }
        return {**called, **given}

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
                self.classes, self.order, self.methods, self.users = {}, [], {}, {}
                self.imports.clear()
        documented = tuple(replace(text, doc=self._doc(text.name)) for text in self.order)
        return StageText(documented, frozenset(self.imports))

    def group_attribute(self, axis: str) -> str:
        """What modules call the process group of an axis: as the axis, unless the model has something of that name."""
        return f"{axis}_group" if axis in self._attributes else axis

    @cached_property
    def _attributes(self) -> frozenset[str]:
        """Names of all modules and parameters of the stage."""
        return frozenset(part for name in (*self.names, *self.modules.calls) for part in name.split("."))

    def _class_of(self, path: str) -> tuple[str, tuple[str, ...]]:
        text = self.class_text(path)
        return text.name, text.axes

    def class_text(self, path: str) -> ClassText:
        """The class of the module at a path."""
        if path in self.classes:
            return self.classes[path]
        for body in self.modules.calls.get(path, []):
            for item in body.items:
                if isinstance(item, Body):
                    self.class_text(item.path)
        fixed = {}
        if path == "":
            tensors = self.stage.tensors
            fixed = {name: tensors[name].attribute for name in self.modules.calls[""][0].inputs}
        written = [self._written(body, fixed) for body in self.modules.calls.get(path, [])]
        init, axes = self.modules.init(path)
        forwards: list[Forward] = []
        for body, one in zip(self.modules.calls.get(path, []), written, strict=True):
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
        lines = [f"self.{self.group_attribute(axis)} = {axis}" for axis in self.stage.axes if axis in kept] + init
        placements, summed = self._tables(path)
        text = ClassText(
            _plain_name(self.modules.class_name(path)),
            "",
            tuple(axis for axis in self.stage.axes if axis in axes),
            placements,
            summed,
            tuple(lines),
            tuple(forwards),
        )
        text = self._shared(text)
        self.users.setdefault(text.name, []).append(path)
        self.classes[path] = text
        return text

    def _shared(self, text: ClassText) -> ClassText:
        """The class that is already there with this text; else this one, under a name of its own."""
        alike = [known for known in self.order if re.sub(r"_\d+$", "", known.name) == text.name]
        for known in alike:
            if _plain(known, text.name) == _plain(text, text.name):
                return known
        names = {known.name for known in self.order} | IMPORTED
        name, number = text.name, 1
        while name in names:
            number += 1
            name = f"{text.name}_{number}"
        text = replace(text, name=name)
        self.order.append(text)
        return text

    def _doc(self, name: str) -> str:
        paths = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", path) for path in self.users[name]))
        if paths == [""]:
            whole = f"stage {self.stage.number} of {self.stages}" if self.stages > 1 else "the model"
            return f"One rank's part of {whole}."
        others = {0: "", 1: " and one more"}.get(len(paths) - 1, f" and {len(paths) - 1} more")
        return f"One rank's part of `{paths[0]}`{others}."

    # ---------------------------------------------------------------- forward

    def _written(self, body: Body, fixed: Mapping[str, str]) -> Written:
        try:
            written = Writer(body, self.stage, self.names, self, self.letters, fixed).written()
        except MissingSize as missing:
            raise _Incomplete(body, self._provider(missing.size)) from None
        self.imports |= written.imports
        self.signatures[body.path, body.call] = Signature(written.parameters, written.outputs)
        made = [Made(statement.targets, statement.values) for statement in written.statements if statement.targets]
        self.made[body.path, body.call] = (*made, Made((), tuple(body.outputs)))
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
            f"{parameter}: {shape_text(tensors[name], self.letters, self.stage.mesh.axes)}"
            for parameter, name in zip(written.parameters, body.inputs, strict=True)
            if tensors[name].kind != "microbatches"
        ]
        gives = ", ".join(shape_text(tensors[name], self.letters, self.stage.mesh.axes) for name in body.outputs)
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
            for container, names in self.modules.children.items()
            if container and container.startswith(f"{path}." if path else "") and self.modules.is_container(container)
            and self.modules.nearest(container) == path
        }  # fmt: skip
        lines: list[str] = []
        for item in fold(statements, sizes):
            if isinstance(item, Loop):
                lines.append(item.header)
                lines += [f"    {line}" for statement in item.body for line in statement.lines()]
            else:
                lines += item.lines()
        return lines

    def _denominators(self) -> tuple[Forward, set[str]]:
        stage, nothing = self.stage, Frame("", 0, "")
        body = Body("", -1, "", nothing, [Plain(node, nothing) for node in stage.total_nodes])
        made = {name for node in stage.total_nodes for name in node.results}
        reads = dict.fromkeys(name for node in stage.total_nodes for name in node.operands() if name not in made)
        body.inputs = [name for name in reads if owned(stage.tensors[name], "", self.names) is None]
        body.outputs = list(stage.totals.values())
        fixed = {name: stage.tensors[name].attribute for name in body.inputs}
        written = self._written(body, fixed)
        lines = self._lines("", written.statements)
        values = written.returns.split(", ") if len(stage.totals) > 1 else [written.returns]
        entries = ", ".join(f'"{name}": {value}' for name, value in zip(stage.totals, values, strict=True))
        lines.append(f"return {{{entries}}}")
        doc = "Counts of one microbatch; `self.totals` has their sums over the whole step."
        parameters = tuple(f"{name}: Tensor" for name in written.parameters)
        return Forward("denominators", parameters, "dict[str, Tensor]", doc, tuple(lines)), set(written.axes)

    # ---------------------------------------------------------------- tables

    def _tables(self, path: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        placements, summed = [], []
        prefix = len(path) + 1 if path else 0
        for stored in self.stage.stored:
            if self.modules.owner(stored.name) != path:
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


def _plain(text: ClassText, name: str) -> ClassText:
    """A class without its shapes and prices, which are those of where it was met first."""
    forwards = tuple(replace(forward, doc="", lines=tuple(map(_bare, forward.lines))) for forward in text.forwards)
    return replace(text, name=name, forwards=forwards)


def _bare(line: str) -> str:
    """A line without the shape behind it, a comment without its price."""
    return re.sub(r" \([^()]*\)$", "", line) if line.lstrip().startswith("#") else re.sub(r"  # .*", "", line)


def _return(lines: list[str], returns: str) -> None:
    """Add the return; what was given its name just before is returned without it."""
    if lines and lines[-1].startswith(f"{returns} = ") and returns.isidentifier():
        lines[-1] = f"return {lines[-1].removeprefix(f'{returns} = ')}"
    else:
        lines.append(f"return {returns}")


def _plain_name(class_name: str) -> str:
    name = class_name.rpartition(".")[2] or "Model"
    return name if name.isidentifier() else "Model"
