"""Whole plans of small models: what the user fixes holds, memory is honoured, nothing beats the plan."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from autoshard.cluster import Cluster, parse_cluster
from autoshard.compiler import PlanOptions, make_plan, parse_mesh
from autoshard.errors import BadInput, InfeasiblePlan
from autoshard.passes.inter_op import InterOp
from autoshard.passes.segment import Chain, segment
from autoshard.passes.trace import trace
from autoshard.placement import I, S
from autoshard.plan import Plan
from autoshard.plan_file import from_json, to_json
from autoshard.program import Program
from models.gpt import gpt_tiny
from models.mlp import mlp
from models.resnet import resnet_tiny

Traced = tuple[Program, Chain]
FOUR = parse_cluster("1x4@cpu")
EIGHT = parse_cluster("2x4@cpu")


@pytest.fixture(scope="module")
def gpt() -> Traced:
    program = trace(gpt_tiny())
    return program, segment(program)


@pytest.fixture(scope="module")
def resnet() -> Traced:
    program = trace(resnet_tiny())
    return program, segment(program)


def plan_of(
    traced: Traced, cluster: Cluster = FOUR, *, baselines: bool = False, mesh: str = "", **fixed: object
) -> Plan:
    options = PlanOptions(mesh=parse_mesh(mesh) if mesh else None, **fixed)  # type: ignore[arg-type]
    return InterOp(cluster, options, baselines)(*traced)


def linears(plan: Plan, traced: Traced) -> list[tuple[int, str]]:
    """(stage, node name) of every linear."""
    names = {node.name for node in traced[0].operators() if str(node.target) == "aten.linear.default"}
    return [(number, name) for number, stage in enumerate(plan.stages) for name in stage.operators if name in names]


CASES = [
    ("dp=4", 1, {}, FOUR),
    ("tp=4", 1, {}, FOUR),
    ("dp=2,tp=2", 1, {}, FOUR),
    ("dp=2", 2, {}, FOUR),
    ("tp=2", 2, {}, FOUR),
    ("dp=2,tp=2", 2, {"microbatches": 2}, EIGHT),
    ("dp=2,cp=2,tp=2", 1, {}, EIGHT),
    ("dp=4,tp=1", 1, {}, FOUR),
]


@pytest.mark.parametrize(("mesh", "stages", "fixed", "cluster"), CASES)
def test_a_fixed_mesh_holds_and_is_used(
    gpt: Traced, mesh: str, stages: int, fixed: dict[str, object], cluster: Cluster
) -> None:
    plan = plan_of(gpt, cluster, mesh=mesh, stages=stages, **fixed)
    axes = dict(parse_mesh(mesh))
    assert len(plan.stages) == stages
    assert [dict(zip(stage.mesh.axes, stage.mesh.sizes, strict=True)) for stage in plan.stages] == [axes] * stages
    assert plan.microbatches == fixed.get("microbatches", plan.microbatches)
    for number, name in linears(plan, gpt):
        stage = plan.stages[number]
        given, weight = stage.operators[name].operands[:2]
        for axis, (axis_name, size) in enumerate(zip(stage.mesh.axes, stage.mesh.sizes, strict=True)):
            if size > 1:
                assert axis_name != "dp" or given[axis] == S(0)
                assert axis_name != "tp" or weight[axis].is_sharded
    check_plan(plan, gpt)


def check_plan(plan: Plan, traced: Traced) -> None:
    """What holds for every plan."""
    assert sum(plan.predicted.breakdown.values()) == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    assert from_json(to_json(plan)) == plan
    covered = [number for stage in plan.stages for number in range(*stage.segments)]
    assert covered == list(range(len(traced[1].segments)))
    assert {name for stage in plan.stages for name in stage.operators} == {node.name for node in traced[0].operators()}
    sent = {name: layout for stage in plan.stages for name, layout in stage.sends.items()}
    for number, stage in enumerate(plan.stages):
        predicted = stage.predicted
        assert predicted.peak_memory_bytes == plan.predicted.peak_memory_bytes[number]
        held = predicted.parameter_bytes + predicted.gradient_bytes + predicted.optimizer_bytes
        kept = predicted.in_flight * predicted.saved_bytes_per_microbatch
        assert predicted.peak_memory_bytes == pytest.approx(held + kept + predicted.transient_bytes, abs=16)
        in_flight = min(plan.microbatches, len(plan.stages) - number)
        assert predicted.in_flight == (plan.microbatches if plan.schedule == "gpipe" else in_flight)
        for name, layout in (*stage.receives.items(), *stage.sends.items()):
            assert all(placement.kind in ("I", "S") for placement in layout)
            assert name in sent
        if all(other.mesh.sizes == stage.mesh.sizes for other in plan.stages):
            assert all(sent[name] == layout for name, layout in stage.receives.items())
    devices = [device for stage in plan.stages for device in stage.mesh.devices]
    assert len(set(devices)) == len(devices)
    assert not set(devices) & set(plan.idle_devices)


def test_parameters_pinned_to_shards_are_zero_3(gpt: Traced) -> None:
    plan = plan_of(gpt, mesh="dp=4", pins={"*": "S(0)@dp"})
    assert set(plan.stages[0].parameters.values()) == {(S(0),)}
    whole = plan_of(gpt, mesh="dp=4", pins={"*": "I@dp"})
    assert set(whole.stages[0].parameters.values()) == {(I,)}
    assert plan.stages[0].predicted.parameter_bytes * 4 == whole.stages[0].predicted.parameter_bytes
    for number, name in linears(plan, gpt):
        assert plan.stages[number].operators[name].operands[0] == (S(0),)
    check_plan(plan, gpt)


def test_never_worse_than_a_baseline_and_the_same_twice(gpt: Traced) -> None:
    plan = plan_of(gpt, baselines=True)
    names = [baseline.name for baseline in plan.baselines]
    assert names[:3] == ["single device", "dp=4", "zero3 dp=4"]
    assert "dp=1,tp=2,pp=2" in names
    fitting = [b.step_time_s for b in plan.baselines if b.fits and b.step_time_s is not None]
    assert plan.predicted.step_time_s <= min(fitting) * (1 + 1e-6)
    check_plan(plan, gpt)
    again = plan_of(gpt, baselines=True)
    untimed = replace(plan, timing={}, solver=replace(plan.solver, time_s=0.0))
    assert replace(again, timing={}, solver=replace(again.solver, time_s=0.0)) == untimed


def test_a_tied_parameter_lies_alike_in_both_stages(gpt: Traced) -> None:
    plan = plan_of(gpt, mesh="tp=2", stages=2)
    first, last = plan.stages
    tied = set(first.parameters) & set(last.parameters)
    users = {name for name, p in ((p.name, p) for p in gpt[0].parameters.values()) if p.aliases}
    assert tied and tied <= users
    assert all(first.parameters[name] == last.parameters[name] for name in tied)


def test_memory_is_honoured_until_nothing_fits(gpt: Traced) -> None:
    free = plan_of(gpt, stages=1)
    limit = int(max(free.predicted.peak_memory_bytes) * 0.4)
    plan = plan_of(gpt, memory_limit_bytes=limit)
    assert max(plan.predicted.peak_memory_bytes) <= limit
    assert plan.predicted.step_time_s >= free.predicted.step_time_s * 0.5
    check_plan(plan, gpt)
    with pytest.raises(InfeasiblePlan, match="short") as caught:
        plan_of(gpt, memory_limit_bytes=20_000)
    assert caught.value.exit_code == 1
    assert "stage 0 of" in str(caught.value)
    assert "largest tensors" in str(caught.value)


def test_cuts_are_where_the_user_wants_them(gpt: Traced) -> None:
    paths = [part.path for part in gpt[1].segments]
    plan = plan_of(gpt, mesh="tp=2", stages=2, cut_before=("blocks.2",))
    assert plan.stages[1].segments[0] == paths.index("blocks.2")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda traced: plan_of(traced, stages=99), "99 stages, but the model has"),
        (lambda traced: plan_of(traced, mesh="dp=3"), "mesh dp=3 has 3 devices, which does not divide the cluster's 4"),
        (lambda traced: plan_of(traced, mesh="dp=4", microbatches=8), "a batch of 8 cannot be divided by"),
        (lambda traced: plan_of(traced, cut_before=("nowhere",)), "'nowhere' does not begin a segment"),
        (lambda traced: plan_of(traced, mesh="dp=4", pins={"*": "S(0)@tp"}), "names axis 'tp'"),
        (lambda traced: plan_of(traced, mesh="dp=4", pins={"*": "S(0)"}), "names no axis"),
        (lambda traced: plan_of(traced, mesh="dp=4", pins={"no_such": "S(0)@dp"}), "names no parameter"),
    ],
)
def test_bad_input(gpt: Traced, build: Callable[[Traced], Plan], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        build(gpt)
    assert caught.value.exit_code == 2


def test_coupled_samples_stay_one_microbatch(resnet: Traced) -> None:
    plan = plan_of(resnet, mesh="dp=4")
    assert plan.microbatches == 1
    assert any(note.startswith("one microbatch") for note in plan.notes)
    check_plan(plan, resnet)
    with pytest.raises(BadInput, match="running_mean"):
        plan_of(resnet, microbatches=2)


def test_observers_see_the_passes_in_order() -> None:
    seen: list[str] = []

    class Recorder:
        def on_start(self, name: str) -> None:
            seen.append(f"start {name}")

        def on_end(self, name: str, result: object, seconds: float) -> None:
            assert seconds >= 0
            seen.append(f"end {type(result).__name__}")

    _, _, plan = make_plan(mlp(), FOUR, PlanOptions(mesh=parse_mesh("dp=4")), [Recorder()], baselines=False)
    assert seen == ["start program", "end Program", "start chain", "end Chain", "start plan", "end Plan"]
    assert plan.timing.keys() == {"trace_s", "segment_s", "plan_s"}
    assert plan.fingerprints.keys() == {"model", "workload", "cluster", "torch"}


def test_the_slowest_devices_of_a_mixed_mesh_count(gpt: Traced) -> None:
    fast = plan_of(gpt, parse_cluster("2x2@H100-80GB"), mesh="dp=4")
    slow = plan_of(gpt, parse_cluster("2x2@V100-32GB"), mesh="dp=4")
    mixed = plan_of(gpt, parse_cluster("1x2@H100-80GB+1x2@V100-32GB"), mesh="dp=4")
    assert fast.predicted.breakdown["compute"] < mixed.predicted.breakdown["compute"]
    assert mixed.predicted.breakdown["compute"] == pytest.approx(slow.predicted.breakdown["compute"], rel=1e-6)
