"""Emitted folders for tests: the hand-written ones of tests/emitted, with helpers and a plan beside them."""

import re
from pathlib import Path

from autoshard.cluster import parse_cluster
from autoshard.compiled import Compiled
from autoshard.compiler import PlanOptions, make_plan, parse_mesh
from autoshard.loading import load_workload
from autoshard.plan_file import to_json

ROOT = Path(__file__).parent.parent
MLP = "models/mlp.py:mlp"


def hand_written(name: str, mesh: str, stages: int, microbatches: int, **settings: object) -> Compiled:
    """The folder `tests/emitted/NAME` with the plan it carries out."""
    ranks = {"mlp_dp2_tp2": 4, "mlp_pp2": 2}[name]
    workload = load_workload(str(ROOT / MLP), settings)
    options = PlanOptions(mesh=parse_mesh(mesh), stages=stages, microbatches=microbatches)
    program, _, plan = make_plan(workload, parse_cluster(f"1x{ranks}@cpu"), options, baselines=False)
    files: dict[str, str | bytes] = {
        file.name: re.sub(r"from autoshard\.runtime\.", "from ", file.read_text())
        for folder in (ROOT / "autoshard" / "runtime", ROOT / "tests" / "emitted" / name)
        for file in folder.glob("*.py")
        if file.name != "__init__.py"
    }
    return Compiled(plan, {**files, "plan.json": to_json(plan)}, workload, program)


def mlp_dp2_tp2(**settings: object) -> Compiled:
    """The multilayer perceptron on dp=2,tp=2, two microbatches."""
    return hand_written("mlp_dp2_tp2", "dp=2,tp=2", 1, 2, **settings)


def mlp_pp2(**settings: object) -> Compiled:
    """The multilayer perceptron in two stages, four microbatches."""
    return hand_written("mlp_pp2", "dp=1", 2, 4, **settings)
