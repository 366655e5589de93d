"""What the command line calls: load a workload and plan it."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from autoshard.cluster import parse_cluster
from autoshard.compiler import PlanOptions, make_plan
from autoshard.errors import BadInput
from autoshard.plan import Plan
from autoshard.workload import Workload


def load_workload(spec: str, settings: dict[str, Any]) -> Workload:
    """The workload that `file.py:name` or `package.module:name` makes when called with `settings`.

    Raises BadInput for an unknown file, module or name, and for a callable that returns something else.
    """
    source, _, name = spec.rpartition(":")
    if not source:
        raise BadInput(f"'{spec}' is not a workload", help="write file.py:name or package.module:name")
    try:
        if source.endswith(".py"):
            found = importlib.util.spec_from_file_location(Path(source).stem, source)
            assert found is not None and found.loader is not None
            module = importlib.util.module_from_spec(found)
            sys.modules[found.name] = module
            found.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise BadInput(f"cannot load '{source}': {error}", help="check the path or the module's name") from error
    if not callable(getattr(module, name, None)):
        raise BadInput(f"'{source}' has no callable '{name}'", help="name a function that returns a Workload")
    made = getattr(module, name)(**settings)
    if not isinstance(made, Workload):
        raise BadInput(f"'{spec}' returned {type(made).__name__}", help="return an autoshard.workload.Workload")
    return Workload(made.model, made.args, made.kwargs, made.loss, spec)


def plan(workload: Workload, cluster: str, options: PlanOptions) -> Plan:
    """The plan of a workload on a cluster (a TOML file or "2x8@A100-80GB")."""
    return make_plan(workload, parse_cluster(cluster), options)[2]
