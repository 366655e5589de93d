"""One body as statements: which values get names, which, what is written inside what.

Names are those of the user's own line (`source_lines`); a value that one line makes and uses is written inside the
expression that uses it, as the user wrote it. A name is used again once its value is dead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.passes.emit_expression import ATOM, PRODUCT, Expression
from autoshard.passes.emit_helpers import BATCH_NORM_RESULTS
from autoshard.passes.emit_items import is_list, plain_name, reads, shape_text, write
from autoshard.passes.emit_names import LineNames
from autoshard.passes.emit_reserved import VARIABLES
from autoshard.passes.emit_scope import Needs, Source, expression_text, find_source, size_text, symbols_of
from autoshard.passes.emit_tree import Body, Item, Leaf, Plain, owned
from autoshard.passes.local import Extent, LocalStage, LocalTensor

LONGEST = 90  # of an expression that is written inside another


@dataclass(frozen=True)
class Statement:
    """One statement. comments: lines above it. values: what the names stand for, for checks at run time."""

    text: str
    comments: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    values: tuple[str | None, ...] = ()
    note: str = ""

    def lines(self) -> list[str]:
        """The comments and the statement."""
        tail = f"  # {self.note}" if self.note else ""
        return [*(f"# {comment}" for comment in self.comments), self.text + tail]


@dataclass(frozen=True)
class Written:
    """A forward. parameters: argument names, in the order of the body's inputs."""

    parameters: tuple[str, ...]
    statements: tuple[Statement, ...]
    returns: str
    imports: frozenset[tuple[str, str]]
    axes: frozenset[str]
    outputs: tuple[str, ...]


@dataclass
class Plan_:
    """What planning found of one item: where sizes and the device are read."""

    sources: dict[tuple[Any, tuple[str, ...]], Source] = field(default_factory=dict)
    device: str | None = None

    def tensors(self) -> Iterator[str]:
        yield from (name for name, _ in self.sources.values())
        if self.device is not None:
            yield self.device


class Writer:
    """Writes one body. call_text: how a child is called (set by the class writer)."""

    def __init__(
        self,
        body: Body,
        stage: LocalStage,
        names: Mapping[str, tuple[str, ...]],
        paths: Any,
        letters: Mapping[Any, str],
        parameters: Mapping[str, str],
    ) -> None:
        self.body, self.stage, self.names, self.paths, self.letters = body, stage, names, paths, letters
        self.fixed = parameters
        self.imports: set[tuple[str, str]] = set()
        self.axes: set[str] = set()
        self.bound: dict[str, str] = {}  # tensor -> name
        self.inlined: dict[str, Expression] = {}
        self.plans = [self._plan(index) for index in range(len(body.items))]
        self.readers = self._readers()
        self.lines = LineNames(body, stage, self.readers, paths.signatures, paths.hints)
        self.position = 0

    # ---------------------------------------------------------------- what an item needs

    def _plan(self, index: int) -> Plan_:
        item, found = self.body.items[index], Plan_()
        if not isinstance(item, Plain):
            return found
        needs = Needs(self.stage.tensors)
        write(item, needs)
        around = self._around(index)
        for extent, near in needs.extents:
            self._add_source(found, extent, near, around)
        if needs.device_wanted:
            found.device = next(iter(around), None)
        return found

    def _around(self, index: int) -> list[str]:
        earlier = [name for item in self.body.items[:index] for name in item.results if name]
        return [name for name in (*self.body.inputs, *earlier) if self.stage.tensors[name].kind != "microbatches"]

    def _add_source(self, found: Plan_, extent: Extent, near: Sequence[str], around: Sequence[str]) -> None:
        wanted = [(extent.size, extent.axes)]
        tensors = self.stage.tensors
        near = [name for name in near if owned(tensors[name], self.body.path, self.names) is None]
        if find_source(extent.size, extent.axes, near, around, tensors) is None:
            wanted = [(symbol, ()) for symbol in symbols_of(extent.size)]
        for size, axes in wanted:
            source = find_source(size, axes, near, around, tensors)
            if source is None:
                raise MissingSize(size)
            found.sources[size, axes] = source

    def _readers(self) -> dict[str, list[int]]:
        """Tensor -> items that read it, with repetition; len(items) is the end."""
        readers: dict[str, list[int]] = {}
        for index, item in enumerate(self.body.items):
            for name in reads(item):
                readers.setdefault(name, []).append(index)
            for name in self.plans[index].tensors():
                readers.setdefault(name, []).extend([index, index])  # twice: it must have a name
        for name in self.body.outputs:
            readers.setdefault(name, []).append(len(self.body.items))
        return readers

    # ---------------------------------------------------------------- names

    def _free(self, hint: str, live: set[str]) -> str:
        base = hint if hint.isidentifier() and hint not in VARIABLES else "x"
        name, number = base, 1
        while name in live:
            number += 1
            name = f"{base}_{number}"
        return name

    # ---------------------------------------------------------------- scope

    def ref(self, name: str) -> Expression:
        tensor = self.stage.tensors[name]
        if name in self.inlined:
            return self.inlined[name]
        if name in self.bound:
            return Expression(self.bound[name])
        attribute = owned(tensor, self.body.path, self.names)
        if attribute is not None:
            return Expression(self.paths.attribute(self.body.path, attribute))
        if tensor.kind == "total":
            return Expression(f'self.totals["{tensor.attribute}"]')
        if tensor.kind == "microbatches":
            return Expression("self.microbatches")
        raise KeyError(f"{name} has no name in {self.body.path or 'the model'}")

    def tensor(self, name: str) -> LocalTensor:
        return self.stage.tensors[name]

    def size(self, extent: Extent | int, near: Sequence[str] = ()) -> Expression:
        if isinstance(extent, int):
            return Expression(str(extent))
        return size_text(extent, self._read_size, lambda axis: f"{self.group(axis)}.size()", self.uses)

    def _read_size(self, size: Any, axes: tuple[str, ...]) -> tuple[Expression, Extent]:
        sources = self.plans[self.position].sources
        if (size, axes) in sources:
            name, dim = sources[size, axes]
            return Expression(f"{self.ref(name).within(ATOM)}.shape[{dim}]"), self.stage.tensors[name].dims[dim]

        def atom(symbol: Any) -> Expression:
            name, dim = sources[symbol, ()]
            read = self.stage.tensors[name].dims[dim]
            text = f"{self.ref(name).within(ATOM)}.shape[{dim}]"
            for axis in read.axes:
                text = f"{text} * {self.group(axis)}.size()"
            return Expression(text, PRODUCT if read.axes else ATOM)

        return expression_text(size, atom), Extent(size)

    def group(self, axis: str) -> str:
        self.axes.add(axis)
        return f"self.{self.paths.group_attribute(axis)}"

    def device(self, near: Sequence[str] = ()) -> str:
        name = self.plans[self.position].device
        if name is not None:
            return f"{self.ref(name).within(ATOM)}.device"
        own = next((n for n in self.names if n.startswith(f"{self.body.path}." if self.body.path else "")), None)
        if own is None:
            return "None"
        prefix = len(self.body.path) + 1 if self.body.path else 0
        return f"{self.paths.attribute(self.body.path, own[prefix:])}.device"

    def uses(self, module: str, name: str) -> str:
        self.imports.add((module, name))
        return name

    # ---------------------------------------------------------------- writing

    def written(self) -> Written:
        """The whole forward."""
        parameters = self._parameters()
        self.bound.update(zip(self.body.inputs, parameters, strict=True))
        hints = self.lines.hints()
        statements: list[Statement] = []
        last = self._last_reads()
        for index, item in enumerate(self.body.items):
            self.position = index
            statement = self._statement(index, item, hints, last)
            if statement is not None:
                statements.append(statement)
        outputs = [self.ref(name).text for name in self.body.outputs]
        returns = ", ".join(outputs)
        names = tuple(self.bound.get(name, "") for name in self.body.outputs)
        return Written(parameters, tuple(statements), returns, frozenset(self.imports), frozenset(self.axes), names)

    def _parameters(self) -> tuple[str, ...]:
        """Names of the arguments: the user's own where the first line that reads one tells them apart."""
        found: dict[str, str] = {}
        for name in self.body.inputs:
            if name in self.fixed:
                found[name] = self.fixed[name]
        for name in self.body.inputs:
            if name not in found:
                taken = set(found.values())
                hint = self.lines.parameter(name) or self.paths.hints.get(name) or plain_name(self.stage.tensors[name])
                found[name] = self._free(hint, taken)
        return tuple(found[name] for name in self.body.inputs)

    def _last_reads(self) -> dict[str, int]:
        """Tensor -> the item after which nothing reads it, through what is written inside other items."""
        last = {name: max(readers) for name, readers in self.readers.items()}
        into: dict[int, int] = {}
        for index in reversed(range(len(self.body.items))):
            target = self._inline_into(index)
            if target is not None:
                into[index] = into.get(target, target)
        self.into = into
        for name, readers in self.readers.items():
            last[name] = max(into.get(reader, reader) for reader in readers)
        return last

    def _inline_into(self, index: int) -> int | None:
        """The item that this one is written inside of, None where it gets a statement of its own."""
        item = self.body.items[index]
        results = [name for name in item.results if name]
        if len(results) != 1 or (isinstance(item, Plain) and item.node.converts):
            return None
        if isinstance(item, Plain) and item.node.target == "update":
            return None
        name = results[0]
        readers = self.readers.get(name, [])
        if len(readers) != 1:
            return None
        reader = readers[0]
        end = len(self.body.items)
        if reader == end:
            return end if len(self.body.outputs) == 1 else None
        if self.lines.same_line(index, reader):
            return reader
        converter = self.body.items[reader]
        if isinstance(converter, Plain) and converter.node.converts and not self.lines.is_named(index):
            return reader
        if not self.lines.is_named(index) and reader - index <= 12:
            return reader
        return None

    def _statement(self, index: int, item: Item, hints: Mapping[str, str], last: Mapping[str, int]) -> Statement | None:
        expression = self._expression(item)
        results = list(item.results)
        if isinstance(item, Plain) and item.node.target in ("batch_norm", *_FUNCTIONAL_NORMS):
            results = [results[i] for i in BATCH_NORM_RESULTS]
        if isinstance(item, Plain) and item.node.target == "update":
            return Statement(expression.text)
        into = self.into.get(index)
        made = [name for name in results if name]
        if into is not None and len(expression.text) <= LONGEST:
            self.inlined[made[0]] = expression
            return None
        live = {name for tensor, name in self.bound.items() if last.get(tensor, -1) > index}
        live |= {self.bound[t] for t in self._held(index) if t in self.bound}
        targets = []
        for name in results:
            if name is None:
                targets.append("_")
                continue
            target = self._free(hints.get(name) or self._passed_on(item) or "y", live | set(targets))
            targets.append(target)
        for tensor in [t for t, name in self.bound.items() if name in targets]:
            del self.bound[tensor]
        for name, target in zip(results, targets, strict=True):
            if name:
                self.bound[name] = target
        if len(results) > 1 and len(made) == 1 and not isinstance(item, Body):
            at = results.index(made[0])
            text = f"{targets[at]} = {expression.within(ATOM)}[{at}]"
            return Statement(text, self._comments(item), (targets[at],), (made[0],), self._note(item, made))
        comma = "," if len(targets) == 1 and len(results) == 1 and is_list(item) else ""
        text = f"{', '.join(targets)}{comma} = {expression.text}"
        return Statement(text, self._comments(item), tuple(targets), tuple(results), self._note(item, made))

    def _held(self, index: int) -> Iterator[str]:
        """Tensors that expressions written inside later items still read."""
        for earlier, target in self.into.items():
            if earlier <= index and target > index:
                yield from reads(self.body.items[earlier])
                yield from self.plans[earlier].tensors()

    def _passed_on(self, item: Item) -> str | None:
        """What a conversion goes by: the name of what it converts."""
        if isinstance(item, Plain) and item.node.converts:
            return self.bound.get(item.node.arguments["x"].name)
        return None

    def _expression(self, item: Item) -> Expression:
        if isinstance(item, Body):
            given = [self.ref(name).text for name in item.inputs]
            return Expression(self.paths.call(self, item, given))
        if isinstance(item, Leaf):
            module = self.paths.module(self.body.path, item.path)
            given = [self.ref(item.operands[0]).text]
            if item.groups:
                groups = [self.group(axis) for axis in item.groups]
                helper = self.uses("operators", "sync_batch_norm")
                return Expression(f"{helper}({', '.join([*given, module, *groups])})")
            return Expression(f"{module}({given[0]})")
        return write(item, self)

    def _comments(self, item: Item) -> tuple[str, ...]:
        if not isinstance(item, Plain) or not item.node.converts:
            return ()
        reason, price = item.node.why
        return (f"{reason} ({price})",)

    def _note(self, item: Item, made: Sequence[str]) -> str:
        """The shape, where it is not that of what the statement reads first."""
        if not made:
            return ""
        shape = shape_text(self.stage.tensors[made[0]], self.letters, self.stage.mesh.axes)
        read = next(iter(item.operands), None)
        seen = shape_text(self.stage.tensors[read], self.letters, self.stage.mesh.axes) if read is not None else ""
        return "" if shape == seen else shape


class MissingSize(Exception):
    """No tensor in a body has a dim of this size."""

    def __init__(self, size: Any) -> None:
        self.size = size


_FUNCTIONAL_NORMS = ("aten._native_batch_norm_legit_functional.default",)
