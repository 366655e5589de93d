"""The command line: what it prints, and what it says to bad input."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from autoshard.cli import app

MLP = "models/mlp.py:mlp"


def run(*arguments, command="plan"):
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def test_json_is_the_whole_plan():
    result = run(MLP, "--cluster", "1x4@cpu", "--mesh", "dp=2,tp=2", "--stages", "1", "--set", "batch=16", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["stages"][0]["mesh"] == {"dp": 2, "tp": 2}
    assert plan["predicted"]["step_time_s"] > 0
    assert plan["baselines"]


def test_table_names_the_stages_and_the_baselines():
    result = run(MLP, "--cluster", "1x2@cpu", "--stages", "2")
    assert result.exit_code == 0, result.output
    for text in ("stage 0:", "stage 1:", "this plan", "single device"):
        assert text in result.output


def test_the_plan_that_is_printed_is_not_worse_than_a_baseline_that_fits():
    plan = json.loads(run(MLP, "--cluster", "1x2@cpu", "--json").stdout)
    fitting = [found["step_time_s"] for found in plan["baselines"] if found["fits"]]
    assert plan["predicted"]["step_time_s"] <= min(fitting) * (1 + 1e-9)


BROKEN = {
    "raises.py": "def make():\n    return 1 / 0\n",
    "syntax.py": "def make(:\n",
    "needs.py": "import no_such_module\n",
    "number.py": "def make():\n    return 3\n",
    "branch.py": """
import torch
from autoshard.workload import Workload

class Model(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return x.mean()

def make():
    return Workload(Model(), (torch.randn(4, 4, requires_grad=True),))
""",
    "missing.toml": '[[groups]]\ntype = "cpu"\nnodes = 1\n',
    "negative.toml": '[[groups]]\ntype = "cpu"\nnodes = 1\ndevices_per_node = 2\n[groups.inside]\nlatency_s = -1\n',
    "broken.json": '{"version": 1,',
    "old.json": '{"version": 2}',
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope.py:mlp"], "there is no file 'nope.py'"),
        (["no_such_module:mlp"], "No module named 'no_such_module'"),
        (["models/mlp.py:nope"], "has no callable 'nope'"),
        (["models/mlp.py"], "is not a workload"),
        (["models/mlp.py:"], "is not a workload"),
        (["models/mlp.py:Block"], "missing 2 required positional arguments"),
        ([MLP, "--set", "foo=3"], "unexpected keyword argument 'foo'"),
        ([MLP, "--set", "foo"], "name=value"),
        (["{tmp}/raises.py:make"], "raises.py:2: `return 1 / 0`"),
        (["{tmp}/syntax.py:make"], "SyntaxError"),
        (["{tmp}/needs.py:make"], "needs.py:1"),
        (["{tmp}/number.py:make"], "returned a int, not a Workload"),
        ([MLP, "--mesh", "dp=3"], "does not divide the cluster's 2"),
        ([MLP, "--mesh", "dp"], "dp"),
        ([MLP, "--stages", "9"], "at most 5"),
        ([MLP, "--microbatches", "0"], "give 1 or more"),
        ([MLP, "--cluster", "1x2@gpuu"], "did you mean cpu?"),
        ([MLP, "--cluster", "nope.toml"], "nope.toml"),
    ],
)
def test_bad_input_is_refused_in_words(arguments, said, tmp_path: Path):
    refused(["plan", *arguments], said, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope.py:mlp"], "there is no file 'nope.py'"),
        (["{tmp}/number.py:make"], "returned a int, not a Workload"),
        (["{tmp}/branch.py:make"], "branch.py:7: `if x.sum() > 0:`"),
        ([MLP, "--stages", "9"], "at most 5"),
        ([MLP, "--mesh", "dp=3"], "does not divide the cluster's 2"),
        ([MLP, "--mesh", "dp=2", "--stages", "2"], "need 4 devices; the cluster has 2"),
        ([MLP, "--cluster", "{tmp}/missing.toml"], "field 'devices_per_node' is missing"),
        ([MLP, "--cluster", "{tmp}/negative.toml"], "groups[0].inside.latency_s"),
        ([MLP, "--microbatches", "few"], "'few' is no number of microbatches"),
        ([MLP, "--microbatches", "5"], "a batch of 16 cannot be divided by 5 microbatches"),
        ([MLP, "--schedule", "zigzag"], "'zigzag' is not a schedule"),
        ([MLP, "--optimizer", "adm"], "'adm' is not an optimizer"),
        ([MLP, "--dtype", "float8"], "'float8' is not a dtype"),
        ([MLP, "--memory-limit", "lots"], "'lots' is not an amount of memory"),
        ([MLP, "--memory-limit", "0"], "'0' is not an amount of memory"),
        ([MLP, "--time-limit", "0"], "time limit is 0"),
        ([MLP, "--pin", "blocks.0"], "--pin blocks.0 pins nothing"),
        ([MLP, "--pin", "nothing.*=S(0)@tp", "--mesh", "tp=2"], "names no parameter, input or module"),
        ([MLP, "--pin", "head.weight=X@tp", "--mesh", "tp=2"], "'X' is not a placement"),
        ([MLP, "--cut-before", "blocks.9"], "'blocks.9' does not begin a segment"),
        ([MLP, "--plan", "{tmp}/nope.json"], "cannot read the plan"),
        ([MLP, "--plan", "{tmp}/broken.json"], "broken.json:1"),
        ([MLP, "--plan", "{tmp}/old.json"], "this autoshard reads version 1"),
        ([MLP, "--out", "{tmp}"], "is not empty and was not written by autoshard"),
        ([MLP, "--out", "{tmp}/raises.py"], "is a file"),
        ([MLP, "--out", "{tmp}/raises.py/out"], "cannot write folder"),
    ],
)
def test_nothing_is_written_when_compile_refuses(arguments, said, tmp_path: Path):
    out = [] if "--out" in arguments else ["--out", "{tmp}/out"]
    refused(["compile", *arguments, *out], said, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(BROKEN)


def refused(arguments, said, folder, code=2):
    for name, text in BROKEN.items():
        (folder / name).write_text(text)
    arguments = [argument.format(tmp=folder) for argument in arguments]
    if "--cluster" not in arguments:
        arguments += ["--cluster", "1x2@cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    assert said in result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
    return result.output


def test_a_plan_without_cluster_is_refused():
    result = run(MLP)
    assert result.exit_code == 2
    assert "no cluster to plan for" in result.output


def test_what_cannot_fit_is_told_with_stage_shortfall_and_largest_tensors(tmp_path: Path):
    arguments = ["compile", MLP, "--stages", "2", "--memory-limit", "100KB", "--out", "{tmp}/out"]
    said = refused(arguments, "stage 0 of 2", tmp_path, code=1)
    for text in ("short", "largest tensors:", "would help"):
        assert text in said
    assert not (tmp_path / "out").exists()


def test_compile_then_verify(tmp_path: Path):
    out = tmp_path / "out"
    flags = ["--cluster", "1x2@cpu", "--mesh", "tp=2", "--pin", "blocks.*.up_proj.weight=S(0)@tp", "--set", "depth=2"]
    compiled = run(MLP, *flags, "--out", out, command="compile")
    assert compiled.exit_code == 0, compiled.output
    for text in ("stage 0: tp=2 on devices 0, 1", "this plan", "single device", "model.py"):
        assert text in compiled.output
    plan = json.loads((out / "plan.json").read_text())
    assert plan["settings"] == {"depth": 2}
    assert plan["stages"][0]["layouts"]["blocks.1.up_proj.weight"] == "S(0)@tp"

    equal = run(out, "--json", command="verify")
    assert equal.exit_code == 0, equal.output
    answer = json.loads(equal.stdout)
    assert answer["equal"] and answer["errors"].keys() == {"loss", "gradients", "buffers", "parameters"}

    model = out / "model.py"
    assert "gelu" in model.read_text()
    model.write_text(model.read_text().replace("gelu", "silu"))
    different = run(out, "--steps", 1, command="verify")
    assert different.exit_code == 1, different.output
    assert "NOT equal" in different.output
    model.write_text("def build(:\n")
    broken = run(out, command="verify")
    assert broken.exit_code == 2
    assert "model.py:1" in broken.output

    again = run(MLP, "--plan", out / "plan.json", "--out", out, command="compile")
    assert again.exit_code == 0, again.output
    assert run(out, "--steps", 1, command="verify").exit_code == 0
    other = run("models/gpt.py:gpt_tiny", "--plan", out / "plan.json", "--out", out, command="compile")
    assert other.exit_code == 2
    assert "changed since the plan was made" in other.output or "unexpected keyword" in other.output
    fixed = run(MLP, "--plan", out / "plan.json", "--mesh", "tp=2")
    assert fixed.exit_code == 2
    assert "mesh is given beside a plan" in fixed.output


def test_torch_without_gloo_is_told(tmp_path: Path, monkeypatch):
    out = tmp_path / "out"
    assert run(MLP, "--cluster", "1x2@cpu", "--mesh", "dp=2", "--out", out, command="compile").exit_code == 0
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    result = run(out, command="verify")
    assert result.exit_code == 2
    assert "no gloo backend" in result.output


def test_a_folder_of_someone_else_is_no_program(tmp_path: Path):
    result = run(tmp_path, command="verify")
    assert result.exit_code == 2
    assert "has no model.py" in result.output
