"""The files beside the emitted modules: they are clean, the same each time, and train."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.cluster import parse_cluster
from autoshard.compiler import PlanOptions, make_plan, parse_mesh
from autoshard.passes.emit_folder import WEIGHTS_LIMIT_BYTES, folder_files
from autoshard.ranks import run_ranks
from autoshard.workload import Workload

MODEL = """
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from collectives import all_reduce, sum_gradient
from mesh import Mesh
from microbatch import MicrobatchStep

WORLD_SIZE = 2
BATCH_DIMS = {"x": 0, "targets": 0}
PLACEMENTS = {"up.weight": {"tp": 0}, "down.weight": {"tp": 1}}


class Tiny(nn.Module):
    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.PLACEMENTS, self.tp = PLACEMENTS, mesh.group("tp")
        self.up = nn.Linear(6, 8 // self.tp.size(), bias=False)
        self.down = nn.Linear(8 // self.tp.size(), 5, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = torch.tanh(self.up(sum_gradient(x, self.tp)))
        return F.cross_entropy(all_reduce(self.down(h), self.tp), targets)


def build(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[Tiny, Mesh, MicrobatchStep]:
    mesh = Mesh({"tp": 2})
    module = Tiny(mesh).to(device, dtype)
    return module, mesh, MicrobatchStep(module, 1, BATCH_DIMS)
"""


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.down(torch.tanh(self.up(x))), targets)


def tiny() -> Tiny:
    torch.manual_seed(3)
    return Tiny()


def make_files(weights: dict[str, Tensor] | None) -> dict[str, str | bytes]:
    workload = Workload(tiny(), (torch.randn(4, 6), torch.randint(5, (4,))), name="tiny.py:tiny")
    options = PlanOptions(mesh=parse_mesh("tp=2"))
    program, _, plan = make_plan(workload, parse_cluster("1x2@cpu"), options)
    return dict(folder_files(program, plan, {"model.py": MODEL.lstrip()}, weights))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("emitted")
    for name, content in make_files(tiny().state_dict()).items():
        (made / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return made


def test_the_same_bytes_twice(folder: Path) -> None:
    again = make_files(tiny().state_dict())
    helpers = {"checkpoint.py", "collectives.py", "mesh.py", "microbatch.py", "parameters.py"}
    others = {"model.py", "train.py", "test_equivalence.py", "plan.json", "README.md", "weights.pt"}
    assert {path.name for path in folder.iterdir()} == again.keys() == helpers | others
    for name, content in again.items():
        assert (folder / name).read_bytes() == (content if isinstance(content, bytes) else content.encode()), name
    plan = json.loads(again["plan.json"])
    assert set(plan["timing"].values()) == {0.0} and plan["solver"]["time_s"] == 0


def test_texts_are_clean(folder: Path) -> None:
    for command in (["check"], ["format", "--check", "--diff"]):
        for where in (folder, folder.parent):  # which changes what import sorters take for modules of the folder
            ruff = [sys.executable, "-m", "ruff", *command, "--isolated", "--no-cache", "--line-length", "120"]
            done = subprocess.run([*ruff, str(folder)], capture_output=True, text=True, cwd=where)
            assert done.returncode == 0, done.stdout + done.stderr
    for path in folder.glob("*.py"):
        assert "from autoshard" not in path.read_text()
    assert all(f"`{path.name}` | " in (folder / "README.md").read_text() for path in folder.iterdir())


def test_weights_are_written_where_they_are_small_and_there() -> None:
    tied = torch.randn(WEIGHTS_LIMIT_BYTES // 8)  # once half of the limit, twice as much as it
    found = make_files({"a": tied, "b": tied[:10], "c": tied})["weights.pt"]
    assert isinstance(found, bytes) and len(found) < WEIGHTS_LIMIT_BYTES
    assert "weights.pt" not in make_files({"a": tied, "b": tied.clone()})
    assert "weights.pt" not in make_files({"a": torch.empty(2, device="meta")})


def train(rank: int, ranks: int, folder: Path, *words: str) -> list[float]:
    sys.path.insert(0, str(folder))
    script = importlib.import_module("train")
    arguments: argparse.Namespace = script.parse(list(words))
    losses: list[float] = script.train(arguments, torch.device("cpu"))
    if rank == 0 and not arguments.resume:
        model = tiny()
        expected = model(**script.global_batch(0, 0))
        torch.testing.assert_close(torch.tensor(losses[0]), expected, rtol=1e-5, atol=0)
    return losses


def test_training_goes_on_where_it_stopped(folder: Path, tmp_path: Path) -> None:
    whole = run_ranks(train, 2, folder, "--steps", "5")[0]
    first = run_ranks(train, 2, folder, "--steps", "3", "--every", "2", "--checkpoint", str(tmp_path))[0]
    rest = run_ranks(train, 2, folder, "--steps", "5", "--checkpoint", str(tmp_path), "--resume")[0]
    assert len(set(whole)) == 5 and first + rest == whole
    assert {path.name for path in tmp_path.iterdir()} == {f"step-{n:08}" for n in (2, 3, 5)}


@pytest.mark.slow
def test_the_script_by_itself(folder: Path, tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": ""}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)

    script, here = str(folder / "train.py"), str(tmp_path)
    alone = run(sys.executable, script)
    message = "train.py: needs 2 ranks, but 1 started: torchrun --nproc-per-node 2 train.py\n"
    assert (alone.returncode, alone.stdout, alone.stderr) == (2, "", message)
    assert "--resume needs --checkpoint" in run(sys.executable, script, "--resume").stderr
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    done = run(*launch, "--steps", "2", "--checkpoint", here)
    assert [line.split("  ")[0] for line in done.stdout.splitlines()] == ["step 1", "step 2"], done.stderr
    again = run(sys.executable, script, "--checkpoint", here)
    assert f"there is a checkpoint already, {here}/step-00000002" in again.stderr
