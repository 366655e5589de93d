"""An emitted folder on this machine: read without running it, then run on forked ranks, in float64, and recorded.

Its modules are imported in the ranks only, with the folder first on the path, so that nothing of it stays behind in
this process. Whatever goes wrong in it is told with its file and line.
"""

import ast
import contextlib
import importlib
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import AutoshardError, BadInput, ProgramFailed
from autoshard.ranks import RanksFailed, run_ranks
from autoshard.verify import Recording, record_rank

NAMES = ("WORLD_SIZE", "BATCH_DIMS", "build")
"""What the model.py of an emitted folder must have."""

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Folder:
    """An emitted folder.

    modules: names of its Python files. world_size: ranks that it runs on. preload: what its ranks would each import.
    """

    path: Path
    modules: tuple[str, ...]
    world_size: int
    preload: tuple[str, ...] = ()


def read_folder(path: Path) -> Folder:
    """Read a folder without running it. Raises BadInput naming file and line of what is wrong with it."""
    if not (path / "model.py").is_file():
        raise BadInput(
            f"'{path}' is not a folder that autoshard wrote: it has no model.py",
            help="give the folder that `autoshard compile ... --out` wrote",
        )
    trees = {file.stem: _parsed(file) for file in sorted(path.glob("*.py"))}
    defined = dict(_defined(trees["model"]))
    for name in NAMES:
        if name not in defined:
            raise BadInput(
                f"model.py does not define {name}",
                where=str(path / "model.py"),
                help="put it back, or compile the folder again",
            )
    reruns = any("utils.checkpoint" in file.read_text(encoding="utf-8") for file in path.glob("*.py"))
    return Folder(
        path.resolve(),
        tuple(trees),
        _world_size(defined["WORLD_SIZE"], path / "model.py"),
        ("torch._dynamo",) if reruns else (),  # checkpointing imports it when first called: seconds a rank
    )


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        text = (getattr(error, "text", None) or "").strip()
        raise BadInput(
            f"the folder holds Python that cannot be read: {getattr(error, 'msg', error)}",
            where=f"{file}:{line}: `{text}`" if line else str(file),
            help="mend that line, or compile the folder again",
        ) from error


def _defined(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Names that a module binds at its top, with the statement that does."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, node) for alias in node.names)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node) for target in targets if isinstance(target, ast.Name))


def _world_size(node: ast.stmt, file: Path) -> int:
    value = getattr(node, "value", None)
    if isinstance(value, ast.Constant) and isinstance(value.value, int) and value.value >= 1:
        return value.value
    raise BadInput(
        "WORLD_SIZE is not a whole number, 1 or more",
        where=f"{file}:{node.lineno}",
        help="write the number of ranks of the plan, WORLD_SIZE = 4",
    )


# Running it -----------------------------------------------------------------------------------------------------------


def record_folder(
    folder: Folder, state: Mapping[str, Tensor], inputs: Mapping[str, Tensor], steps: int, *, dropout: bool
) -> list[Recording]:
    """Train on all ranks of the folder for some steps; what each rank recorded.

    state: the whole model's, float64, under the user's names. inputs: the global batch by argument name. dropout:
    whether it is on; else dropout does nothing.
    Raises BadInput for code of the folder that cannot be imported, ProgramFailed for a rank that fails or dies.
    """
    try:
        found: list[Recording] = run_ranks(
            _rank, folder.world_size, folder, state, inputs, steps, dropout, timeout_s=TIMEOUT_S, preload=folder.preload
        )
    except RanksFailed as error:
        lines = [line for line in error.detail.strip().splitlines() if line.strip()]
        raise ProgramFailed(
            f"rank {error.rank} of the emitted program failed: {lines[-1] if lines else 'it gave no reason'}",
            where=str(folder.path),
            help="a rank that was killed may have run out of memory: see the system's log",
        ) from error
    return found


def _rank(
    rank: int,
    _world_size: int,
    folder: Folder,
    state: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    steps: int,
    dropout: bool,
) -> Recording:
    with telling_line(folder, f"rank {rank}: importing the emitted program failed", BadInput):
        use_modules(folder)
        if not dropout:
            without_dropout_helper(folder)
        model, parameters = importlib.import_module("model"), importlib.import_module("parameters")
    with telling_line(folder, f"rank {rank} of the emitted program failed", ProgramFailed):
        module, mesh, step = model.build(device="cpu", dtype=torch.float64)
        parameters.load_full(module, mesh, state)
        share = mesh.share(named_for(model, inputs, folder), model.BATCH_DIMS)
        with contextlib.nullcontext() if dropout else no_dropout():
            return record_rank(module, mesh, lambda: step.step(share), steps)


def named_for(model: ModuleType, inputs: Mapping[str, Tensor], folder: Folder) -> dict[str, Tensor]:
    """The inputs that model.py's BATCH_DIMS names. Raises BadInput where there is no such input."""
    unknown = [name for name in model.BATCH_DIMS if name not in inputs]
    if unknown:
        raise BadInput(
            f"BATCH_DIMS names '{unknown[0]}', which is no input of the model",
            where=str(folder.path / "model.py"),
            help=f"inputs are {', '.join(inputs)}",
        )
    return {name: inputs[name] for name in model.BATCH_DIMS}


def use_modules(folder: Folder) -> None:
    """From now on this process imports the folder's modules under their names. For forked ranks only."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder.path))
    for name in folder.modules:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@contextlib.contextmanager
def telling_line(folder: Folder, doing: str, kind: type[AutoshardError]) -> Iterator[None]:
    """Any exception inside becomes one of `kind` that names the folder's innermost line."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as error:
        entries = [
            entry for entry in traceback.extract_tb(error.__traceback__) if Path(entry.filename).parent == folder.path
        ]
        where = f"{entries[-1].filename}:{entries[-1].lineno}: `{entries[-1].line}`" if entries else str(folder.path)
        text = next((line for line in str(error).splitlines() if line.strip()), "")
        raise kind(
            f"{doing}: {type(error).__name__}: {text}",
            where=where,
            help="mend that line, or compile the folder again" if entries else None,
        ) from error


# Dropout --------------------------------------------------------------------------------------------------------------


class _NoDropout(torch.overrides.TorchFunctionMode):
    """Dropout passes its input through; attention drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _NATIVE_DROPOUTS:
            x = args[0] if args else kwargs["input"]
            return x, torch.ones_like(x, dtype=torch.bool)
        if func is torch.nn.functional.scaled_dot_product_attention:
            args, kwargs = args[:4] + (0.0,) * (len(args) > 4) + args[5:], {**kwargs}
            if "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_DROPOUTS = frozenset(
    {
        torch.nn.functional.dropout,
        torch.nn.functional.dropout1d,
        torch.nn.functional.dropout2d,
        torch.nn.functional.dropout3d,
        torch.nn.functional.alpha_dropout,
        torch.nn.functional.feature_alpha_dropout,
        torch.dropout,
        torch.feature_dropout,
        torch.ops.aten.dropout.default,
    }
)
_NATIVE_DROPOUTS = frozenset({torch.native_dropout, torch.ops.aten.native_dropout.default})


def no_dropout() -> contextlib.AbstractContextManager[Any]:
    """Inside, dropout does nothing."""
    return _NoDropout()


def without_dropout_helper(folder: Folder) -> None:
    """Let the folder's own `dropout`, if it has one, do nothing: its modules take it from there."""
    if "operators" in folder.modules:
        operators: Any = importlib.import_module("operators")
        operators.dropout = _passed_through


def _passed_through(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x
