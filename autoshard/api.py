"""What the command line calls: load a workload and plan it."""

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from autoshard.cluster import parse_cluster
from autoshard.compiler import PlanOptions, make_plan
from autoshard.errors import AutoshardError, BadInput
from autoshard.plan import Plan
from autoshard.workload import Workload


def load_workload(spec: str, settings: Mapping[str, Any]) -> Workload:
    """The workload that `file.py:name` or `package.module:name` makes when called with `settings`.

    Raises BadInput for an unknown file, module or name, for code that fails, and for a callable that returns anything
    but a Workload.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise BadInput(f"'{spec}' is not a workload", help="write file.py:name or package.module:name")
    if source.endswith(".py") and not Path(source).is_file():
        raise BadInput(f"there is no file '{source}'", help="give its path from here, or an absolute one")
    module = _users_code(f"loading '{source}'", lambda: _load(source))
    make = getattr(module, name, None)
    if not callable(make):
        offered = [
            key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
        ]
        raise BadInput(f"'{source}' has no callable '{name}'", help=f"it has {', '.join(offered) or 'none'}")
    made = _users_code(f"calling '{spec}'", lambda: make(**settings))
    if not isinstance(made, Workload):
        raise BadInput(
            f"'{spec}' returned a {type(made).__name__}, not a Workload",
            help="name a function that returns autoshard.workload.Workload(model, args)",
        )
    return replace(made, name=spec)


def plan(workload: Workload, cluster: str, options: PlanOptions) -> Plan:
    """The plan of a workload on a cluster (a TOML file or "2x8@A100-80GB"). Raises AutoshardError."""
    return make_plan(workload, parse_cluster(cluster), options)[2]


def _load(source: str) -> ModuleType:
    if not source.endswith(".py"):
        if "" not in sys.path:  # a console script does not look in the current folder
            sys.path.insert(0, "")
        return importlib.import_module(source)
    stem = Path(source).stem
    # A file called like a module that is loaded already must not take its place.
    found = importlib.util.spec_from_file_location(stem if stem not in sys.modules else f"workload_{stem}", source)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    found.loader.exec_module(module)
    return module


def _users_code(doing: str, run: Callable[[], Any]) -> Any:
    """Run code of the user's; whatever it raises is told as theirs, with the line."""
    try:
        return run()
    except AutoshardError:
        raise
    except Exception as error:
        ours = Path(__file__)
        lines = [entry for entry in traceback.extract_tb(error.__traceback__) if Path(entry.filename) != ours]
        lines = [entry for entry in lines if "importlib" not in entry.filename]
        raise BadInput(
            f"{doing} failed: {type(error).__name__}: {error}",
            where=f"{lines[-1].filename}:{lines[-1].lineno}: `{lines[-1].line}`" if lines else None,
            help="mend that line, or the values given by --set",
        ) from error
