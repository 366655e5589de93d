"""Compiling from Python: what is fixed, plans given by hand, folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.api import compile, find_cluster, parse_bytes
from autoshard.cluster import parse_cluster, to_toml
from autoshard.compiled import Compiled, is_ours
from autoshard.errors import AutoshardError, BadInput, BadPlan, InfeasiblePlan
from autoshard.loading import load_workload
from autoshard.plan_file import from_json, plan_data, to_json
from autoshard.verify_program import verify
from tests.folders import MLP, ROOT

SPEC = str(ROOT / MLP)


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return compile(SPEC, "1x4@cpu", mesh="dp=2,tp=2", stages=1, microbatches=2, settings={"depth": 2})


def test_what_is_fixed_is_in_the_plan(compiled: Compiled) -> None:
    plan = compiled.plan
    assert str(plan.stages[0].mesh) == "dp=2,tp=2"
    assert (len(plan.stages), plan.microbatches) == (1, 2)
    assert plan.settings == {"depth": 2}
    assert compiled.files.keys() >= {"model.py", "plan.json", "train.py", "README.md"}


def test_the_same_input_gives_the_same_bytes(compiled: Compiled) -> None:
    again = compile(SPEC, "1x4@cpu", mesh="dp=2,tp=2", stages=1, microbatches=2, settings={"depth": 2})
    assert again.files == compiled.files


@pytest.mark.parametrize(
    ("text", "size"),
    [("100", 100), ("40GiB", 40 << 30), ("40GB", 40 * 10**9), ("1.5 MiB", 3 << 19), ("2k", 2000), ("1TiB", 1 << 40)],
)
def test_amounts_of_memory(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_a_dtype_is_asked_of_the_callable_or_cast(tmp_path: Path) -> None:
    assert load_workload(SPEC, {}, dtype="float64").settings == {"dtype": "float64"}
    (tmp_path / "plain.py").write_text(
        "import torch\nfrom autoshard.workload import Workload\n"
        "def make():\n    return Workload(torch.nn.Linear(2, 2), (torch.ones(2, 2),), loss=lambda y: y.mean())\n"
    )
    cast = load_workload(f"{tmp_path}/plain.py:make", {}, dtype="bfloat16")
    assert cast.settings == {} and cast.args[0].dtype == cast.model.weight.dtype == torch.bfloat16
    result = compile(f"{tmp_path}/plain.py:make", "1x2@cpu", mesh="tp=2", dtype="bfloat16")
    assert result.plan.dtype == "bfloat16"
    assert verify(result.save(tmp_path / "out"), steps=1).equal


def test_settings_that_a_plan_cannot_hold_are_refused() -> None:
    with pytest.raises(BadInput, match="cannot be written into a plan"):
        load_workload(SPEC, {"width": {1, 2}})


# Folders --------------------------------------------------------------------------------------------------------------


def test_saving_replaces_what_an_earlier_compile_left(compiled: Compiled, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    pipeline = compile(SPEC, "1x2@cpu", stages=2, settings={"depth": 2})
    assert pipeline.save(out) == out and (out / "stage_1.py").is_file()
    (out / "mine.txt").write_text("kept")
    compiled.save(out)
    assert not list(out.glob("stage_*.py"))
    assert (out / "mine.txt").read_text() == "kept"
    assert is_ours(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert (out.stat().st_mode & 0o755) == 0o755


def test_saving_keeps_out_of_other_folders(compiled: Compiled, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(BadInput, match="is not empty"):
        compiled.save(tmp_path)
    with pytest.raises(BadInput, match="is a file"):
        compiled.save(tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


# Plans given by hand --------------------------------------------------------------------------------------------------


def test_a_saved_plan_gives_the_same_program_and_prices(compiled: Compiled, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(to_json(compiled.plan))
    again = compile(SPEC, plan=path)
    assert again.plan.predicted == compiled.plan.predicted
    assert again.plan.stages == compiled.plan.stages
    assert again.files["model.py"] == compiled.files["model.py"]


def edited(compiled: Compiled, change: Callable[[Any], None]) -> str:
    data = json.loads(json.dumps(plan_data(compiled.plan)))
    change(data)
    return json.dumps(data)


def test_an_edited_layout_is_carried_out_and_priced(compiled: Compiled) -> None:
    name = "head.weight"
    was = plan_data(compiled.plan)["stages"][0]["layouts"][name]
    new = "S(0)@dp, I@tp" if was != "S(0)@dp, I@tp" else "I@dp, S(0)@tp"

    def change(data: Any) -> None:
        data["stages"][0]["layouts"][name] = new

    again = compile(SPEC, plan=from_json(edited(compiled, change)))
    assert again.plan.predicted.step_time_s != compiled.plan.predicted.step_time_s
    assert again.files["model.py"] != compiled.files["model.py"]
    assert verify(again, steps=2).equal


def put(path: str, value: Any) -> Callable[[Any], None]:
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
    ("change", "said"),
    [
        (put("fingerprints/model", "0"), "the model of"),
        (put("fingerprints/workload", "0"), "the shapes of the inputs of"),
        (put("settings/depth", 3), "the model of"),
        (put("stages/0/segments", [0, 1]), "the stages have 1 segments"),
        (put("stages/0/segments", [1, 2]), "the stage begins with segment 1"),
        (put("stages/0/devices", [0, 1, 2, 9]), "the plan uses device 9"),
        (put("microbatches", 5), "a batch of 16 cannot be divided by 5 microbatches x dp=2"),
        (put("schedule", "none"), "schedule is none for 1 stages and 2 microbatches"),
        (put("stages/0/layouts/head.weight", ...), "the stage reads parameter head.weight"),
        (put("stages/0/layouts/head.wait", "I@dp, I@tp"), "the model has no parameter head.wait"),
        (put("stages/0/layouts/head.weight", "P@dp, I@tp"), "cannot be kept as P@dp, I@tp"),
        (put("stages/0/layouts/head.weight", "S(2)@dp, I@tp"), "cannot be kept as S(2)@dp, I@tp"),
        (put("stages/0/operators/gelu", ...), "the stage runs gelu"),
        (put("stages/0/operators/gelu/results", ["P@dp, P@tp"]), "aten.gelu.default cannot run as"),
        (put("stages/0/operators/gelu/operands", []), "aten.gelu.default has 1 operands and 1 results"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(
    compiled: Compiled, change: Callable[[Any], None], said: str
) -> None:
    with pytest.raises(BadPlan) as caught:
        compile(SPEC, plan=from_json(edited(compiled, change)))
    assert said in str(caught.value)


def test_an_illegal_layout_is_told_with_the_users_line_and_the_ways_out(compiled: Compiled) -> None:
    change = put("stages/0/operators/gelu/results", ["P@dp, P@tp"])
    with pytest.raises(BadPlan, match=r"models/mlp\.py:\d+") as caught:
        compile(SPEC, plan=from_json(edited(compiled, change)))
    assert "it can run as" in str(caught.value)


def test_a_given_plan_must_fit_and_its_cluster_must_be_known(compiled: Compiled, tmp_path: Path) -> None:
    with pytest.raises(InfeasiblePlan, match="stage 0 of 1"):
        compile(SPEC, plan=compiled.plan, memory_limit="100KB")
    with pytest.raises(BadInput, match="mesh is given beside a plan"):
        compile(SPEC, plan=compiled.plan, mesh="dp=4")
    with pytest.raises(BadPlan, match="the plan uses device 2"):
        compile(SPEC, "1x2@cpu", plan=compiled.plan)
    slow = tmp_path / "slow.toml"
    slow.write_text(to_toml(parse_cluster("1x4@cpu")).replace("latency_s = ", "latency_s = 1"))
    other = compile(SPEC, slow, plan=compiled.plan).plan
    assert other.predicted.step_time_s > compiled.plan.predicted.step_time_s
    with pytest.raises(BadInput, match="was described in a file"):
        find_cluster(None, other)


def test_a_call_without_cluster_or_workload_is_refused() -> None:
    for arguments in ((SPEC,), (torch.nn.Linear(2, 2), "1x2@cpu")):
        with pytest.raises(AutoshardError):
            compile(*arguments)  # type: ignore[arg-type]
