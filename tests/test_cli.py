"""The command line: what it prints, and what it says to bad input."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autoshard.cli import app

MLP = "models/mlp.py:mlp"


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


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
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    if "--cluster" not in arguments:
        arguments += ["--cluster", "1x2@cpu"]
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)
