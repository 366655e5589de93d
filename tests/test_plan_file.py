"""Plans survive the trip through JSON, and every damaged field is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import BadPlan
from autoshard.placement import I, P, Placement, R, S
from autoshard.plan import Baseline, Mesh, OperatorPlan, Plan, Predicted, Solver, StagePlan, StagePrediction
from autoshard.plan_file import from_json, plan_data, to_json


def small_plan() -> Plan:
    predicted = StagePrediction(0.1, 0.2, 0.25, 0.05, 1e-3, 2e-3, 1 << 40, 5, 6, 7, 2, 9, 10)
    first = StagePlan(
        Mesh(("dp", "tp"), (2, 1), (0, 1)),
        (0, 3),
        {"linear": OperatorPlan(((S(0), I), (R, S(1))), ((S(0), P),), (None, "vocab_embedding"))},
        {"blocks.0.weight": (S(12), I)},
        {},
        {"add[1]": (S(0), I)},
        ("blocks.0",),
        predicted,
    )
    last = StagePlan(
        Mesh((), (), (2,)),
        (3, 4),
        {"sum_1": OperatorPlan(((),), ((),), ())},
        {"w": ()},
        {"add[1]": ()},
        {},
        (),
        predicted,
    )
    return Plan(
        (first, last),
        4,
        "1f1b",
        Predicted(0.123456789012345, (10, 11), {"compute": 0.1, "bubble": 0.023456789012345}),
        (Baseline("dp=4", 0.2, 12, True), Baseline("single device", None, None, False)),
        Solver(0.01, 3.5, "time limit"),
        "adamw",
        (3,),
        {"model": "ab", "workload": "cd", "cluster": "ef", "torch": "2.13.0"},
        "models/gpt.py:gpt_tiny",
        "1x4@cpu",
        {"trace_s": 1.0, "plan_s": 2.0},
        ("a note",),
        {"depth": 12, "sizes": [1, 2.5, None], "name": "tiny"},
        "bfloat16",
    )


def test_round_trip_is_exact() -> None:
    plan = small_plan()
    text = to_json(plan)
    assert from_json(text) == plan
    assert to_json(from_json(text)) == text


placements = st.one_of(st.sampled_from([I, R, P]), st.integers(0, 11).map(lambda dim: Placement("S", dim)))
seconds = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@settings(max_examples=50, deadline=None)
@given(
    layouts=st.dictionaries(st.text(min_size=1), st.tuples(placements, placements), max_size=4),
    breakdown=st.dictionaries(st.text(), seconds, max_size=4),
    step=seconds,
)
def test_round_trip_of_any_layout_name_and_number(layouts: Any, breakdown: Any, step: float) -> None:
    plan = small_plan()
    stage = replace(plan.stages[0], parameters=layouts, sends=layouts)
    plan = replace(plan, stages=(stage,), predicted=Predicted(step, (1,), breakdown))
    assert from_json(to_json(plan)) == plan


def test_json_has_the_keys_of_the_contract() -> None:
    data = plan_data(small_plan())
    assert data["predicted"].keys() >= {"step_time_s", "peak_memory_bytes", "breakdown"}
    assert data["solver"].keys() >= {"gap", "time_s"}
    assert data["stages"][0].keys() >= {"mesh", "devices", "segments", "layouts"}
    assert data["stages"][0]["mesh"] == {"dp": 2, "tp": 1}
    assert data.keys() >= {"idle_devices", "microbatches", "schedule", "baselines", "timing"}
    assert data["baselines"][0].keys() >= {"name", "step_time_s", "fits"}


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        *parents, last = [int(key) if key.isdigit() else key for key in path.split("/")]
        for key in parents:
            data = data[key]
        if value is ...:
            del data[last]
        else:
            data[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("version", 99), "the plan has version 99; this autoshard reads version 1"),
        (put("microbatches", 0), "microbatches must be an integer of at least 1"),
        (put("microbatches", True), "microbatches must be an integer of at least 1"),
        (put("schedule", "zigzag"), "schedule must be one of none, gpipe, 1f1b"),
        (put("stages", []), "stages must have at least one stage"),
        (put("stages", {}), "stages must be a list"),
        (put("predicted/step_time_s", "fast"), "predicted.step_time_s must be a number"),
        (put("predicted/step_time_s", ...), "predicted.step_time_s is missing"),
        (put("stages/1/segments", [4, 3]), r"stages[1].segments must be [first, end)"),
        (put("stages/0/mesh/dp", -2), "stages[0].mesh.dp must be an integer of at least 1"),
        (put("stages/0/devices", [0]), "stages[0].devices has 1 devices for a mesh of 2"),
        (put("stages/0/devices", [1, 1]), "stages[0].devices names a device twice"),
        (put("stages/0/layouts/blocks.0.weight", "S(0)@dp"), "one placement@axis for each of the axes dp, tp"),
        (put("stages/0/layouts/blocks.0.weight", "X@dp, I@tp"), "'X' is not a placement"),
        (put("stages/0/operators/linear/implementations", []), "must have 2 entries"),
        (put("settings", []), "settings must be an object"),
        (put("dtype", 16), "dtype must be a string"),
        (put("baselines/0/fits", 1), "baselines[0].fits must be true or false"),
    ],
)
def test_damage_is_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    data = json.loads(to_json(small_plan()))
    change(data)
    with pytest.raises(BadPlan) as caught:
        from_json(json.dumps(data), where="out/plan.json")
    assert message in str(caught.value)
    assert "out/plan.json" in str(caught.value)


def test_text_that_is_not_json_is_named() -> None:
    with pytest.raises(BadPlan, match="not JSON"):
        from_json("{")
