"""A training that is interrupted and goes on under another layout has the losses of one that is not. float64."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.ranks import run_ranks
from autoshard.runtime import checkpoint
from autoshard.runtime import collectives as c
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.microbatch import MicrobatchStep
from autoshard.runtime.parameters import GradientReducer, clip_grad_norm, full_state, initialize, normal
from autoshard.runtime.pipeline import Crossing, PipelineStep, Tied

BATCH, SEQUENCE, WIDTH, HIDDEN, VOCABULARY, STEPS = 8, 3, 4, 7, 10, 6
BATCH_DIMS = {"tokens": 0, "targets": 0}
SHAPES = {"embed": (VOCABULARY, WIDTH), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH), "head": (VOCABULARY, WIDTH)}


class Part(nn.Module):
    """Some of the layers of a residual MLP under a tied head; `up` and `down` are split unevenly over tp."""

    PLACEMENTS: ClassVar = {"up": {"tp": 1}, "down": {"tp": 0}}

    def __init__(self, mesh: Mesh, *names: str) -> None:
        super().__init__()
        self.mesh, self.microbatches = mesh, 1
        for name in names:
            box = mesh.box(SHAPES[name], self.PLACEMENTS.get(name, {}))
            self.register_parameter(name, nn.Parameter(torch.empty([s.stop - s.start for s in box]).double()))
        if {"embed", "head"} <= {*names}:
            self.head = self.embed

    def hidden(self, tokens: Tensor) -> Tensor:
        h = F.embedding(tokens, self.embed)
        x = c.sum_gradient(h, self.mesh.group("tp")) if self.mesh.size("tp") > 1 else h
        y = torch.tanh(x @ self.up) @ self.down
        return h + (c.all_reduce(y, self.mesh.group("tp")) if self.mesh.size("tp") > 1 else y)

    def loss(self, h: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy((h @ self.head.t()).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = c.all_reduce(loss, self.mesh.group("dp")) if self.mesh.size("dp") > 1 else loss
        return loss / (BATCH * SEQUENCE)


class Whole(Part):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.loss(self.hidden(tokens), targets)


class First(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.hidden(tokens)


class Last(Part):
    def forward(self, h: Tensor, targets: Tensor) -> Tensor:
        return self.loss(h, targets)


def build(layout: str, rank: int) -> tuple[Part, Mesh, Any]:
    if layout != "stages":
        mesh = Mesh({"dp": 2, "tp": 2} if layout == "dp2 tp2" else {"dp": 4})
        module: Part = Whole(mesh, *SHAPES)
        reducer = GradientReducer(module, {name: [mesh.group("dp")] for name, _ in module.named_parameters()})
        return module, mesh, MicrobatchStep(module, 1, BATCH_DIMS, reducer=reducer)
    meshes = [Mesh({"tp": 3}, [0, 1, 2]), Mesh({"dp": 1}, [3])]
    mesh = meshes[rank // 3]
    module = Last(mesh, "head") if rank == 3 else First(mesh, "embed", "up", "down")
    rows, crossings = ["F0 F1 B0 B1", "F0 B0 F1 B1"], [Crossing("h", 0, 1)]
    shapes = lambda whole: {"h": ((*whole["tokens"], WIDTH), torch.float64)}  # noqa: E731
    tied = [Tied(SHAPES["embed"], {0: ("embed", {}), 1: ("head", {})})]
    return module, mesh, PipelineStep(module, meshes, rows, crossings, BATCH_DIMS, shapes, tied=tied)


def train(program: tuple[Part, Mesh, Any], optimizer: torch.optim.Optimizer, first: int, end: int) -> list[float]:
    module, mesh, step = program
    losses = []
    for number in range(first, end):
        torch.manual_seed(number)
        batch = {name: torch.randint(VOCABULARY, (BATCH, SEQUENCE)) for name in BATCH_DIMS}
        optimizer.zero_grad()
        losses.append(float(step.step(mesh.share(batch, BATCH_DIMS))))
        clip_grad_norm(module, mesh, 0.5, counted_elsewhere=step.counted_elsewhere)
        optimizer.step()
    return losses


def start(layout: str, rank: int) -> tuple[tuple[Part, Mesh, Any], torch.optim.Optimizer]:
    program = build(layout, rank)
    initialize(*program[:2], lambda name, shape: normal("embed" if name == "head" else name, shape, std=0.5))
    return program, torch.optim.AdamW(program[0].parameters(), lr=0.05)


def relay(rank: int, ranks: int, folder: Path, layouts: tuple[str, ...]) -> list[float]:
    """Each layout trains two steps and hands over to the next through a checkpoint. The losses."""
    losses: list[float] = []
    for layout in layouts:
        program, optimizer = start(layout, rank)
        if losses:
            nn.utils.vector_to_parameters(torch.full((999,), torch.nan).double(), program[0].parameters())
            assert checkpoint.load(*program[:2], optimizer, folder) == len(losses)
        losses += train(program, optimizer, len(losses), len(losses) + STEPS // len(layouts))
        checkpoint.save(*program[:2], optimizer, folder, len(losses))
    return losses


def test_any_layout_goes_on_from_any_other(tmp_path: Path) -> None:
    expected = run_ranks(relay, 4, tmp_path / "whole", ("dp4",))[0]
    assert expected[-1] < expected[0]
    for layouts in (("dp2 tp2", "stages", "dp4"), ("stages", "dp4", "dp2 tp2"), ("stages", "dp2 tp2")):
        for losses in run_ranks(relay, 4, tmp_path / "-".join(layouts), layouts):
            torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


def test_the_same_layout_goes_on_bit_for_bit(tmp_path: Path) -> None:
    for layout in ("dp2 tp2", "stages"):
        parts = [run_ranks(relay, 4, tmp_path / f"{layout}{n}", (layout,) * n)[0] for n in (1, 2)]
        assert parts[0] == parts[1]


def write(rank: int, ranks: int, folder: Path, layout: str) -> dict[str, Tensor]:
    program, optimizer = start(layout, rank)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        checkpoint.load(*program[:2], optimizer, folder)
    train(program, optimizer, 0, 1)
    checkpoint.save(*program[:2], optimizer, folder, 1)
    checkpoint.save(*program[:2], optimizer, folder, 10)
    return {name: value.clone() for name, value in full_state(*program[:2]).items()}


def test_the_files_are_state_dicts_of_the_original(tmp_path: Path) -> None:
    for layout, parts in (("dp2 tp2", ["0"]), ("stages", ["0", "3"])):
        states = run_ranks(write, 4, tmp_path / layout, layout)
        (tmp_path / layout / "step-00000099.draft").mkdir()  # of a save that was cut off
        found = checkpoint.latest(tmp_path / layout)
        assert found is not None and checkpoint.steps_done(found) == 10
        names = [f"{kind}-{part}.pt" for kind in ("optimizer", "weights") for part in parts]
        assert sorted(path.name for path in found.iterdir()) == names
        weights = {n: v for part in parts for n, v in torch.load(found / f"weights-{part}.pt").items()}
        assert {name: tuple(value.shape) for name, value in weights.items()} == SHAPES
        assert all(value.equal(weights[name]) for state in states for name, value in state.items())
        moments = torch.load(found / f"optimizer-{parts[0]}.pt")["up"]
        assert moments["exp_avg"].shape == SHAPES["up"] and moments["step"] == 1
