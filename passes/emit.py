"""Local programs -> the text of model.py, and of stage_0.py, stage_1.py, ... for a pipeline.

Classes are prepared as records of strings (`emit_classes`); the Jinja2 templates in `autoshard/templates` only lay
them out.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from autoshard import schedule
from autoshard.passes.emit_classes import ClassText, Made, StageText, StageWriter
from autoshard.passes.emit_expression import Expression
from autoshard.passes.emit_format import LINE_LENGTH, formatted
from autoshard.passes.emit_scope import expression_text, symbols_of
from autoshard.passes.local import LocalCrossing, LocalProgram, LocalStage
from autoshard.passes.lower_convert import size_words, time_words
from autoshard.plan import Plan
from autoshard.program import Program
from autoshard.version import VERSION

HELPERS = ("collectives", "operators")


@dataclass(frozen=True)
class StageWiring:
    """What model.py of a pipeline says of one stage."""

    module: str
    root: str
    mesh: str
    ranks: str
    axes: str
    row: str


def emit(program: Program, plan: Plan, local: LocalProgram, constants: Mapping[str, bytes]) -> dict[str, str]:
    """File name -> text. constants: the file of values that modules read, if there is one."""
    letters, dtype, summed = letters_of(program), main_dtype(local.stages), _most_summed(local.stages)
    texts = [writer.text() for writer in _writers(program, local)]
    environment = Environment(
        loader=PackageLoader("autoshard", "templates"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        autoescape=False,
    )  # fmt: skip
    common: dict[str, Any] = {
        "world_size": len(plan.ranks),
        "microbatches": plan.microbatches,
        "batch_dims": repr({given.name: given.batch_dim for given in program.inputs.values()}),
        "dtype": str(dtype),
        "constants": bool(constants),
        "summed": repr(summed),
    }
    if len(local.stages) == 1:
        stage, text = local.stages[0], texts[0]
        imports = _imports(text.imports, text.classes, _wiring_imports("microbatch", "MicrobatchStep", bool(constants)))
        model = environment.get_template("model.py.jinja").render(
            **common,
            header=_wrapped(_header(program, plan, letters, local.stages)),
            imports=imports,
            mesh=repr(_mesh(stage)),
            classes=text.classes,
            root=text.root,
            groups=", ".join(f'mesh.group("{axis}")' for axis in text.root.axes),
        )
        return {"model.py": formatted(_spaced(model), "model.py")}
    return _pipeline(program, plan, local, texts, common, environment, letters)


def made_tensors(program: Program, local: LocalProgram) -> list[dict[tuple[str, int], tuple[Made, ...]]]:
    """Of each stage: module path and number of its call -> what the statements of that forward make, in order."""
    found = []
    for writer in _writers(program, local):
        writer.text()
        order: dict[tuple[str, int], tuple[Made, ...]] = {}
        for path, call in sorted(key for key in writer.made if key[1] >= 0):
            order[path, sum(1 for known, _ in order if known == path)] = writer.made[path, call]
        found.append(order)
    return found


def _writers(program: Program, local: LocalProgram) -> list[StageWriter]:
    letters, dtype, summed = letters_of(program), main_dtype(local.stages), _most_summed(local.stages)
    return [StageWriter(program, stage, letters, dtype, summed, len(local.stages)) for stage in local.stages]


def _pipeline(
    program: Program,
    plan: Plan,
    local: LocalProgram,
    texts: Sequence[StageText],
    common: Mapping[str, Any],
    environment: Environment,
    letters: Mapping[Any, str],
) -> dict[str, str]:
    files: dict[str, str] = {}
    rows = schedule.build(plan.schedule, len(local.stages), plan.microbatches)
    wirings = []
    for stage, text in zip(local.stages, texts, strict=True):
        name = f"stage_{stage.number}"
        header = [
            f"Stage {stage.number} of {len(texts)} of {program.source}, emitted by autoshard {VERSION}. Yours to edit.",
            f"Mesh: {stage.mesh}. {_legend(letters, program, [stage])}",
        ]
        source = environment.get_template("stage.py.jinja").render(
            header=_wrapped(header), imports=_imports(text.imports, text.classes, ()), classes=text.classes
        )
        files[f"{name}.py"] = formatted(_spaced(source), f"{name}.py")
        ranks = [plan.ranks[device] for device in plan.stages[stage.number].mesh.devices]
        wirings.append(
            StageWiring(
                name, text.root.name, repr(_mesh(stage)), _listed(ranks), repr(text.root.axes),
                " ".join(map(str, rows[stage.number])),
            )
        )  # fmt: skip
    imports = _imports(
        {(wiring.module, "") for wiring in wirings} | {("functools", ""), ("collections.abc", "Mapping"), ("dist", "")},
        (),
        _wiring_imports(
            "pipeline", "PipelineStep", bool(common["constants"]), "Crossing", *(["Tied"] if local.tied else [])
        ),
    )
    wanted = list(dict.fromkeys(s for c in local.crossings for e in c.dims for s in symbols_of(e.size)))
    tied = [f"Tied({tuple(t.shape)!r}, {dict(t.copies)!r})" for t in local.tied]
    source = environment.get_template("pipeline.py.jinja").render(
        **common,
        header=_wrapped(_header(program, plan, letters, local.stages)),
        imports=imports,
        stages=wirings,
        crossings=[_crossing(crossing) for crossing in local.crossings],
        tied=tied,
        sizes=[f"{_letter(s, letters)} = {_read(program, str(s))}" for s in wanted],
        shapes=_shapes(local.crossings, letters),
    )
    files["model.py"] = formatted(_spaced(source), "model.py")
    return files


def _listed(ranks: Sequence[int]) -> str:
    first, stop = ranks[0], ranks[-1] + 1
    if list(ranks) != list(range(first, stop)):
        return repr(list(ranks))
    return f"range({first}, {stop})" if first else f"range({stop})"


def _crossing(crossing: LocalCrossing) -> str:
    given = [repr(crossing.name), str(crossing.source), str(crossing.target), repr(dict(crossing.given))]
    given.append(repr(dict(crossing.taken)))
    if not crossing.needs_grad:
        given.append("gradient=False")
    return f"Crossing({', '.join(given)})"


def _letter(symbol: Any, letters: Mapping[Any, str]) -> str:
    return letters.get(symbol, str(symbol))


def _read(program: Program, symbol: str) -> str:
    node, dim = program.symbols[symbol]
    return f'inputs["{program.inputs[node].name}"][{dim}]'


def _shapes(crossings: Iterable[LocalCrossing], letters: Mapping[Any, str]) -> list[str]:
    found: dict[str, str] = {}
    for crossing in crossings:
        sizes = [
            expression_text(extent.size, lambda s: Expression(_letter(s, letters))).text for extent in crossing.dims
        ]
        shape = f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"
        dtype = f"dtype or {crossing.dtype}" if crossing.dtype.is_floating_point else str(crossing.dtype)
        found[crossing.name] = f'"{crossing.name}": ({shape}, {dtype})'
    return list(found.values())


# What the whole model has in common -----------------------------------------------------------------------------------


def letters_of(program: Program) -> dict[Any, str]:
    """A letter for each symbol: b for samples, then s, t, u, ..."""
    import_symbols = {str(s): s for node in program.graph.nodes for s in _node_symbols(node)}
    letters: dict[Any, str] = {}
    others = iter("stuvwxyzacefghijklmnopqr")
    for symbol, (node, dim) in program.symbols.items():
        if symbol not in import_symbols:
            continue
        batch = program.inputs[node].batch_dim == dim
        letters[import_symbols[symbol]] = "b" if batch else next(others, symbol)
    return letters


def _node_symbols(node: Any) -> Iterable[Any]:
    fake = node.meta.get("val")
    for value in fake if isinstance(fake, (tuple, list)) else (fake,):
        if isinstance(value, torch.Tensor):
            for size in value.shape:
                if isinstance(size, torch.SymInt):
                    yield from size.node.expr.free_symbols


def main_dtype(stages: Sequence[LocalStage]) -> torch.dtype:
    """The floating dtype of most parameters."""
    counts = Counter(s.dtype for stage in stages for s in stage.stored if s.dtype.is_floating_point and not s.is_buffer)
    return counts.most_common(1)[0][0] if counts else torch.float32


def _most_summed(stages: Sequence[LocalStage]) -> tuple[str, ...]:
    """The axes over which most parameters' gradients are summed."""
    counts = Counter(s.summed for stage in stages for s in stage.stored if not s.is_buffer and s.trainable)
    return counts.most_common(1)[0][0] if counts else ()


def _mesh(stage: LocalStage) -> dict[str, int]:
    return {a: size for a, size in zip(stage.mesh.axes, stage.mesh.sizes, strict=True) if size > 1}


def _header(program: Program, plan: Plan, letters: Mapping[Any, str], stages: Sequence[LocalStage]) -> list[str]:
    breakdown = ", ".join(f"{name} {time_words(s)}" for name, s in plan.predicted.breakdown.items() if s >= 5e-7)
    peak = size_words(max(plan.predicted.peak_memory_bytes))
    meshes = list(dict.fromkeys(str(stage.mesh) for stage in plan.stages))
    several = f"{len(plan.stages)} stages, " if len(plan.stages) > 1 else ""
    count = f"; {plan.microbatches} microbatches, {plan.schedule}" if plan.microbatches > 1 else ""
    return [
        f"Emitted by autoshard {VERSION} from {program.source} for {plan.cluster}. Yours to edit.",
        f"{several}mesh {' / '.join(meshes)}{count}.".capitalize(),
        f"Predicted step {time_words(plan.predicted.step_time_s)} ({breakdown}), at most {peak} per device.",
        _legend(letters, program, stages),
    ]


def _wrapped(comments: Iterable[str]) -> list[str]:
    """Comments as lines that are not too long behind their mark."""
    return [line for text in comments for line in textwrap.wrap(text, LINE_LENGTH - 2, break_on_hyphens=False)]


def _legend(letters: Mapping[Any, str], program: Program, stages: Sequence[LocalStage]) -> str:
    meanings: dict[str, str] = {}
    for symbol, letter in letters.items():
        node, dim = program.symbols[str(symbol)]
        given = program.inputs[node]
        meanings.setdefault(letter, "samples" if letter == "b" else f"dim {dim} of {given.name}")
    listed = ", ".join(f"{letter} {meaning}" for letter, meaning in meanings.items())
    axes = list(dict.fromkeys(axis for stage in stages for axis in stage.axes))
    share = [f"64/{axes[-1]} its share of 64 over axis {axes[-1]}"] if axes else []
    return f"Shapes in comments are a rank's own: {', '.join([listed] * bool(listed) + share)}."


# Imports --------------------------------------------------------------------------------------------------------------


def _wiring_imports(module: str, name: str, constants: bool, *more: str) -> tuple[tuple[str, str], ...]:
    found = [("mesh", "Mesh"), (module, name), *((module, other) for other in more), ("torch", ""), ("nn", "")]
    found += [("parameters", name) for name in ("GradientReducer", "materialize", "summed_groups")]
    if constants:
        found += [("parameters", "fill_buffers"), ("pathlib", "Path")]
    return tuple(found)


_STANDARD = ("functools", "collections.abc", "pathlib", "typing")


def _imports(
    found: Iterable[tuple[str, str]], classes: Sequence[ClassText], more: Iterable[tuple[str, str]]
) -> list[str]:
    """Import lines in three blocks: the standard library, torch, neighbours."""
    names = {*found, *more}
    body = "\n".join(_class_lines(classes))
    if "torch." in body:
        names.add(("torch", ""))
    if any(text.placements or text.summed for text in classes):
        names.add(("typing", "ClassVar"))
    if any(text.axes for text in classes):
        names.add(("ProcessGroup", ""))
    tensors = ["Tensor"] if "Tensor" in body else []
    modules = ["nn"] if classes or ("nn", "") in names else []
    standard = []
    for module in _STANDARD:
        listed = sorted(name for where, name in names if where == module)
        if listed == [""]:
            standard.append(f"import {module}")
        elif listed:
            standard.append(f"from {module} import {', '.join(listed)}")
    torch_lines = ["import torch"] if ("torch", "") in names else []
    torch_lines += ["import torch.distributed as dist"] if ("dist", "") in names else []
    torch_lines += ["import torch.nn.functional as F"] if ("F", "") in names else []
    if tensors or modules:
        torch_lines.append(f"from torch import {', '.join([*tensors, *modules])}")
    torch_lines += ["from torch.distributed import ProcessGroup"] if ("ProcessGroup", "") in names else []
    torch_lines += (
        ["from torch.utils.checkpoint import checkpoint"] if ("torch.utils.checkpoint", "checkpoint") in names else []
    )
    special = {*_STANDARD, "torch", "dist", "F", "nn", "ProcessGroup", "torch.utils.checkpoint"}
    neighbours: dict[str, list[str]] = {}
    for module, name in sorted(names):
        if module not in special:
            neighbours.setdefault(module, []).append(name)
    plain = [f"import {module}" for module, listed in neighbours.items() if listed == [""]]
    own = [
        f"from {module} import {', '.join(_sorted(listed))}" for module, listed in neighbours.items() if listed != [""]
    ]
    blocks = [block for block in (standard, torch_lines, [*plain, *own]) if block]
    return [line for number, block in enumerate(blocks) for line in ([""] if number else []) + block]


def _sorted(names: Iterable[str]) -> list[str]:
    """Classes before functions, as import sorters have it."""
    return sorted(names, key=lambda name: (not name[:1].isupper(), name))


def _class_lines(classes: Sequence[ClassText]) -> Iterable[str]:
    for text in classes:
        yield from text.init
        for forward in text.forwards:
            yield from (*forward.parameters, forward.returns, *forward.lines)


def _spaced(source: str) -> str:
    return source.rstrip() + "\n"
