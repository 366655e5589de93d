"""What lies beside the emitted modules: helpers, training script, test, plan, README and small weights.

Texts are templates of `autoshard/templates` filled with strings that are made here. Nothing of the clock and nothing of
this machine goes into a file: the same program and plan give the same bytes.
"""

import ast
import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from torch import Tensor

from autoshard.passes.emit_format import formatted
from autoshard.passes.emit_readme import readme_fields
from autoshard.plan import Plan
from autoshard.plan_file import to_json
from autoshard.program import Input, Program

WEIGHTS_LIMIT_BYTES = 64 << 20
OPTIMIZERS: Mapping[str, str] = {
    "adamw": "torch.optim.AdamW({}, lr=arguments.lr)",
    "adam": "torch.optim.Adam({}, lr=arguments.lr)",
    "momentum": "torch.optim.SGD({}, lr=arguments.lr, momentum=0.9)",
    "sgd": "torch.optim.SGD({}, lr=arguments.lr)",
}


def folder_files(
    program: Program, plan: Plan, model_files: Mapping[str, str | bytes], weights: Mapping[str, Tensor] | None
) -> Mapping[str, str | bytes]:
    """Name -> content of every file of the folder, `model_files` included.

    model_files: model.py, stage_0.py, ... and what they read; imports of neighbours get a mark, see `_marked`.
    weights: a state dict of the whole model; it is written where it is not None, has values (no meta tensors) and
    takes less than `WEIGHTS_LIMIT_BYTES`.
    """
    world_size = _world_size(str(model_files["model.py"]))
    templates = Environment(
        loader=PackageLoader("autoshard", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        keep_trailing_newline=True,
    )
    launch = f"torchrun --nproc-per-node {world_size} train.py"
    names = _first_names(program) if len(plan.stages) > 1 else ()
    train = templates.get_template("train.py.jinja").render(
        launch=launch,
        inputs=[_DrawnInput(found.name, _draw(found)) for found in program.inputs.values()],
        first_names=names,
        draw="lambda name, shape: normal(FIRST_NAMES.get(name, name), shape, seed=arguments.seed), " if names else "",
        # A stage may have no parameters: a list of groups may be empty where a list of parameters may not.
        optimizer=OPTIMIZERS.get(plan.optimizer, OPTIMIZERS["adamw"]).format(
            '[{"params": parameters}]' if len(plan.stages) > 1 else "parameters"
        ),
    )
    test = templates.get_template("test_equivalence.py.jinja").render(world_size=world_size, workload=plan.workload)
    content: dict[str, str | bytes] = {
        **model_files,
        "train.py": formatted(train, "train.py"),
        "test_equivalence.py": formatted(test, "test_equivalence.py"),
    }
    content |= _helpers({name: text for name, text in content.items() if isinstance(text, str)})
    modules = {name.removesuffix(".py") for name in content}
    content = {
        name: _marked(text, modules) if isinstance(text, str) and name.endswith(".py") else text
        for name, text in content.items()
    }
    content["plan.json"] = to_json(
        replace(plan, timing=dict.fromkeys(plan.timing, 0.0), solver=replace(plan.solver, time_s=0.0))
    )
    saved = None if weights is None else _saved(weights)
    if saved is not None:
        content["weights.pt"] = saved
    content["README.md"] = templates.get_template("README.md.jinja").render(
        launch=launch, **readme_fields(program, plan, world_size, content)
    )
    return content


@dataclass(frozen=True)
class _DrawnInput:
    name: str
    draw: str


def _world_size(model: str) -> int:
    found = re.search(r"^WORLD_SIZE = (\d+)$", model, re.MULTILINE)
    assert found is not None, "model.py sets no WORLD_SIZE"
    return int(found[1])


def _draw(found: Input) -> str:
    """The expression that draws values of an input, all ranks alike."""
    dtype = "" if found.type.dtype == torch.int64 else f", dtype={found.type.dtype}"
    if not (found.type.dtype.is_floating_point or found.type.dtype.is_complex):
        return f"torch.randint({found.high or 2}, {found.type.shape}, generator=generator{dtype})"
    return f"torch.randn({found.type.shape}, generator=generator{dtype})"


def _first_names(program: Program) -> tuple[tuple[str, str], ...]:
    """Further names of tied parameters with the first name of each."""
    return tuple((alias, tied.name) for tied in program.parameters.values() for alias in tied.aliases)


# Helpers --------------------------------------------------------------------------------------------------------------


def _helpers(python: Mapping[str, str]) -> dict[str, str]:
    """The files of the runtime that `python` imports, and those that they import, with flat names."""
    folder = files("autoshard").joinpath("runtime")
    found: dict[str, str] = {}
    wanted = [module for name, text in python.items() if name.endswith(".py") for module in _imported(text)]
    while wanted:
        name = f"{wanted.pop()}.py"
        if name in found or name in python or not folder.joinpath(name).is_file():
            continue
        text = folder.joinpath(name).read_text(encoding="utf-8")
        found[name] = text.replace("from autoshard.runtime.", "from ")
        wanted += _imported(found[name])
    return dict(sorted(found.items()))


def _imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        yield from _modules(node)


def _modules(node: ast.AST) -> list[str]:
    """The modules that a statement imports from."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def _marked(text: str, modules: set[str]) -> str:
    """`text` with a mark where the imports of its neighbours begin, after others.

    Import sorters take them for modules of the folder when run inside it, and for installed ones when run outside; the
    mark keeps them apart from torch in both cases.
    """
    imports = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    own = [not modules.isdisjoint(_modules(node)) for node in imports]
    if True not in own or own[0]:
        return text
    lines = text.splitlines(keepends=True)
    lines.insert(imports[own.index(True)].lineno - 1, "# isort: split\n")
    return "".join(lines)


# Weights --------------------------------------------------------------------------------------------------------------


def _saved(weights: Mapping[str, Tensor]) -> bytes | None:
    """The file of torch.save, or None where it would be too large or there are no values. Tied tensors stay tied."""
    copies: dict[tuple[object, ...], Tensor] = {}
    state, size = {}, 0
    for name, tensor in weights.items():
        if tensor.is_meta:
            return None
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in copies or tensor.numel() == 0:
            size += tensor.nbytes
            if size >= WEIGHTS_LIMIT_BYTES:
                return None
            # A copy of its own: a view would take all the memory that it looks at along.
            copies[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        state[name] = copies[key]
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()
