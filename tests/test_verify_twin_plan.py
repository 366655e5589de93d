"""A plan carried over to a shallower, narrower instance of its model."""

from dataclasses import replace

import pytest

from autoshard.cluster import parse_cluster
from autoshard.compiler import PlanOptions, make_plan, parse_mesh
from autoshard.loading import load_workload
from autoshard.passes.inter_setting import fingerprints
from autoshard.plan_price import given_plan
from autoshard.verify_twin_plan import Traced, carried_plan

LLAMA = "models/llama.py:llama_tiny"


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 4)])
def test_layouts_are_carried_and_legal(stages: int, microbatches: int) -> None:
    options = PlanOptions(mesh=parse_mesh("dp=2,tp=4"), stages=stages, microbatches=microbatches)
    cluster = parse_cluster(f"{stages}x8@cpu")
    settings = {"depth": 6, "heads": 8, "kv_heads": 4, "batch": 16}
    program, chain, plan = make_plan(load_workload(LLAMA, settings), cluster, options, baselines=False)
    little = parse_cluster(f"1x{4 * stages}@cpu")
    small_settings = {**settings, "depth": 2 * stages, "width": 32, "hidden": 64}
    small_program, small_chain, _ = make_plan(load_workload(LLAMA, small_settings), little, baselines=False)
    shape = parse_mesh("dp=2,tp=2")
    carried = carried_plan(
        plan, Traced(program, chain), Traced(small_program, small_chain), shape, min(microbatches, 2)
    )
    assert carried is not None
    checked = given_plan(
        replace(carried, fingerprints=fingerprints(small_program, little)), small_program, small_chain, little
    )
    assert [stage.mesh.sizes for stage in checked.stages] == [(2, 2)] * stages
    stored = {name: layout for stage in plan.stages for name, layout in stage.parameters.items()}
    found = {name: layout for stage in checked.stages for name, layout in stage.parameters.items()}
    assert found and all(layout == stored[name] for name, layout in found.items() if name in stored)


def test_another_model_is_not_carried() -> None:
    cluster = parse_cluster("1x4@cpu")
    options = PlanOptions(mesh=parse_mesh("dp=2,tp=2"), stages=1)
    program, chain, plan = make_plan(load_workload(LLAMA, {}), cluster, options, baselines=False)
    other, other_chain, _ = make_plan(load_workload("models/gpt.py:gpt_tiny", {}), cluster, options, baselines=False)
    shape = parse_mesh("dp=2,tp=2")
    assert carried_plan(plan, Traced(program, chain), Traced(other, other_chain), shape, 1) is None
