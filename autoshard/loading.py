"""Workloads from their names: `file.py:name` or `package.module:name`, called with settings.

A workload that was loaded so can be loaded again: it carries its name and its settings, which are JSON values.
"""

import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoshard.errors import AutoshardError, BadInput
from autoshard.workload import Workload

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Names of the dtypes that a workload can be asked for."""


def load_workload(
    spec: str, settings: Mapping[str, Any], *, dtype: str | None = None, near: Path | None = None
) -> Workload:
    """The workload that `file.py:name` or `package.module:name` makes when called with `settings`.

    dtype: one of `DTYPES`: passed on where the callable has a text argument of that name, else the model and its inputs
        are cast. near: a folder; a file that is not there from here is looked for in it and above it.
    Raises BadInput for an unknown file, module or name, for code that fails, and for a callable that returns anything
    but a Workload.
    """
    make, settings = find_callable(spec, near), plain_settings(settings)
    if dtype is not None:
        check_dtype(dtype)
        asked = _parameters(make).get("dtype")
        if asked is not None and isinstance(asked.default, str):
            settings, dtype = {**settings, "dtype": dtype}, None
    made = users_code(f"calling '{spec}'", lambda: make(**settings))
    if not isinstance(made, Workload):
        raise BadInput(
            f"'{spec}' returned a {type(made).__name__}, not a Workload",
            help="name a function that returns autoshard.workload.Workload(model, args)",
        )
    made = replace(made, name=spec, settings=settings)
    return made if dtype is None else with_dtype(made, dtype)


def find_callable(spec: str, near: Path | None = None) -> Callable[..., Any]:
    """What a workload's name names. Raises BadInput."""
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise BadInput(f"'{spec}' is not a workload", help="write file.py:name or package.module:name")
    if source.endswith(".py"):
        source = str(_find_file(source, near))
    module = users_code(f"loading '{source}'", lambda: _load(source))
    make = getattr(module, name, None)
    if not callable(make):
        offered = [
            key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
        ]
        raise BadInput(f"'{source}' has no callable '{name}'", help=f"it has {', '.join(offered) or 'none'}")
    made: Callable[..., Any] = make
    return made


def _find_file(source: str, near: Path | None) -> Path:
    folders = [] if near is None else [near.resolve(), *near.resolve().parents]
    for path in (Path(source), *(folder / source for folder in folders)):
        if path.is_file():
            return path
    help = "give its path from here, or an absolute one"
    if near is not None:
        help = f"the program was compiled from there: do this in the folder where '{source}' lies"
    raise BadInput(f"there is no file '{source}'", help=help)


def _load(source: str) -> ModuleType:
    if not source.endswith(".py"):
        if "" not in sys.path:  # a console script does not look in the current folder
            sys.path.insert(0, "")
        return importlib.import_module(source)
    stem, file = Path(source).stem, Path(source).resolve()
    # A file called like another module that is loaded already must not take its place.
    known = getattr(sys.modules.get(stem), "__file__", None)
    free = stem not in sys.modules or (known is not None and Path(known).resolve() == file)
    found = importlib.util.spec_from_file_location(stem if free else f"workload_{stem}", source)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def integer_arguments(spec: str, near: Path | None = None) -> dict[str, int]:
    """The callable's keyword arguments that have a whole number for a default."""
    return {
        name: parameter.default
        for name, parameter in _parameters(find_callable(spec, near)).items()
        if isinstance(parameter.default, int) and not isinstance(parameter.default, bool)
    }


def takes_argument(spec: str, name: str, near: Path | None = None) -> bool:
    """Whether the callable has an argument of that name."""
    return name in _parameters(find_callable(spec, near))


def _parameters(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # a callable without a readable signature
        return {}


def plain_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they come back from JSON (tuples are lists). Raises BadInput for what JSON cannot hold."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(settings), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"a setting cannot be written into a plan: {error}",
            where=f"settings {dict(settings)!r}",
            help="use numbers, texts, true or false, None, lists and dicts of these",
        ) from error
    return plain


def check_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of that name. Raises BadInput for a name that is not in `DTYPES`."""
    if dtype not in DTYPES:
        raise BadInput(f"'{dtype}' is not a dtype", help=f"known dtypes: {', '.join(DTYPES)}")
    found: torch.dtype = getattr(torch, dtype)
    return found


def with_dtype(workload: Workload, dtype: str) -> Workload:
    """The workload with its model (in place) and the floating-point tensors among its arguments cast."""
    wanted = check_dtype(dtype)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(wanted) if tensor.is_floating_point() else tensor

    args, kwargs = pytree.tree_map_only(Tensor, cast, (tuple(workload.args), dict(workload.kwargs)))
    return replace(workload, model=workload.model.to(wanted), args=args, kwargs=kwargs)


def users_code(doing: str, run: Callable[[], Any]) -> Any:
    """Run code of the user's; whatever it raises is told as theirs, with the line, as BadInput."""
    try:
        return run()
    except AutoshardError:
        raise
    except (Exception, SystemExit) as error:
        raise BadInput(
            f"{doing} failed: {type(error).__name__}: {error}",
            where=users_line(error),
            help="mend that line, or the values given by --set",
        ) from error


def users_line(error: BaseException) -> str | None:
    """The innermost line of code that is not ours, nor the import system's: "models/gpt.py:41: `code`"."""
    ours = Path(__file__)
    lines = [entry for entry in traceback.extract_tb(error.__traceback__) if Path(entry.filename) != ours]
    lines = [entry for entry in lines if "importlib" not in entry.filename]
    return f"{lines[-1].filename}:{lines[-1].lineno}: `{lines[-1].line}`" if lines else None
