"""The emitted modules: the same text each time, no longer for a deeper model, with no trace of what is not there."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.api import compile
from autoshard.loading import load_workload
from autoshard.workload import Workload
from tests.folders import ROOT

HELPERS = {path.stem for path in (ROOT / "autoshard" / "runtime").glob("*.py")}


def emitted(spec: str, cluster: str, mesh: str | None, **options: object) -> dict[str, str]:
    """model.py, and the stages of a pipeline. Options that compile does not know are the workload's."""
    known = {name: options.pop(name) for name in ("stages", "microbatches") if name in options}
    made = compile(load_workload(str(ROOT / spec), options), cluster, mesh=mesh, **known)  # type: ignore[arg-type]
    return modules(made.files)


def modules(files: Mapping[str, str | bytes]) -> dict[str, str]:
    return {name: str(text) for name, text in files.items() if name == "model.py" or name.startswith("stage_")}


def without_header(text: str) -> str:
    """Times, and so the length of the header, may differ."""
    return text[text.index("\n\n") :]


def lines(texts: Mapping[str, str]) -> int:
    return sum(without_header(text).count("\n") for text in texts.values())


@pytest.mark.slow
def test_the_same_command_gives_the_same_bytes() -> None:
    options = {"mesh": "tp=2", "stages": 2, "microbatches": 2, "settings": {"depth": 2}}
    first, second = (compile(str(ROOT / "models/gpt.py:gpt_tiny"), "1x4@cpu", **options).files for _ in range(2))
    assert first == second
    assert list(first) == list(second) and {"model.py", "stage_0.py", "stage_1.py", "plan.json"} <= first.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ("models/gpt.py:gpt_tiny", "models/llama.py:llama_tiny", "tests/zoo.py:hf_gpt2", "tests/zoo.py:hf_llama")
)
def test_depth_does_not_lengthen(spec: str) -> None:
    shallow, deep = (emitted(spec, "1x2@cpu", "tp=2", depth=depth) for depth in (3, 6))
    assert abs(lines(shallow) - lines(deep)) <= 2  # of plans that take the same time, either may be found
    assert "range(6))" in deep["model.py"] and not re.search(r"self(\.\w+)+\[\d", deep["model.py"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "cluster"), [("models/llama.py:llama_8b", "8x8@H100-80GB"), ("models/gpt.py:gpt2_small", "1x8@A100-80GB")]
)
def test_large_models_are_short(spec: str, cluster: str) -> None:
    """At four layers: by the test above, more make it no longer."""
    assert lines(emitted(spec, cluster, None, depth=4)) <= 250


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """twice: whether each round calls its block twice."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head, self.twice = nn.Linear(8, 4), twice

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = inputs * 2
        for layer in self.layers:
            x = x + layer(x)
            if self.twice:
                x = x - layer(x)
        return F.cross_entropy(self.head(x), targets)


def tower(mesh: str, twice: bool = False) -> dict[str, str]:
    workload = Workload(Tower(twice), (torch.randn(8, 8), torch.randint(4, (8,))), name="tower.py:tower")
    pins = {"*.up.weight": "S(0)@tp"} if "tp" in mesh else {}
    return modules(compile(workload, "1x2@cpu", mesh=mesh, pins=pins).files)


def forward(text: str, name: str) -> ast.FunctionDef:
    """The forward of a class."""
    found = next(node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    return next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "forward")


@pytest.mark.parametrize("twice", (False, True))
def test_rounds_are_a_loop(twice: bool) -> None:
    text = tower("dp=2", twice)["model.py"]
    loops = [node for node in ast.walk(forward(text, "Tower")) if isinstance(node, ast.For)]
    assert [ast.unparse(loop.iter) for loop in loops] == ["self.layers"]
    calls = [node for node in ast.walk(loops[0]) if isinstance(node, ast.Call) and ast.unparse(node.func) == "layer"]
    assert len(calls) == 1 + twice
    assert "self.layers[" not in text and text.count("class Block") == 1


def test_axes_of_one_rank_leave_no_trace() -> None:
    with_one, plain = tower("dp=1,tp=2"), tower("tp=2")
    assert {name: without_header(text) for name, text in with_one.items()} == {
        name: without_header(text) for name, text in plain.items()
    }
    assert "dp" not in without_header(with_one["model.py"])


def imports(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield str(node.module)


def test_modules_import_torch_python_and_neighbours() -> None:
    golden = ROOT / "tests" / "golden"
    for path in golden.rglob("*.py"):
        stages = {neighbour.stem for neighbour in path.parent.glob("stage_*.py")}
        known = {"torch", *sys.stdlib_module_names, *HELPERS, *stages}
        assert {name.partition(".")[0] for name in imports(path.read_text())} <= known, path
