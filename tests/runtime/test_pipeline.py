"""Pipelined and microbatched steps of a toy model against the same model run whole, in float64."""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.ranks import run_ranks
from autoshard.runtime import collectives as c
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.microbatch import MicrobatchStep, split_batch
from autoshard.runtime.parameters import GradientReducer, clip_grad_norm, full_gradients
from autoshard.runtime.pipeline import Crossing, PipelineStep, Tied
from autoshard.runtime.transfer import messages

BATCH, SEQUENCE, WIDTH, VOCABULARY, MICROBATCHES = 8, 6, 4, 10, 4
BATCH_DIMS = {"tokens": 0, "targets": 0, "scale": None}
ROWS = {
    "gpipe": lambda stages: ["F0 F1 F2 F3 B0 B1 B2 B3"] * stages,
    "1f1b": lambda stages: {
        2: ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
        3: ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
    }[stages],
}


def inputs() -> dict[str, Tensor]:
    torch.manual_seed(5)
    targets = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    targets[torch.rand(targets.shape) < 0.4] = -100
    targets[6] = -100  # samples without any valid token
    return {
        "tokens": torch.randint(VOCABULARY, (BATCH, SEQUENCE)),
        "targets": targets,
        "scale": torch.rand(WIDTH, dtype=torch.float64),
    }


def weights() -> dict[str, Tensor]:
    torch.manual_seed(6)
    shapes = {"embed": (VOCABULARY, WIDTH), "first": (WIDTH, WIDTH), "second": (WIDTH, WIDTH)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def reference(batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    w = {name: value.requires_grad_() for name, value in weights().items()}
    h = F.embedding(batch["tokens"], w["embed"]) * batch["scale"]
    kind = batch["tokens"] % 3
    x = torch.tanh(torch.tanh(h @ w["first"]) @ w["second"] + h) + kind.unsqueeze(-1)
    logits = x @ w["embed"].t()
    loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in w.items()}


class Base(nn.Module):
    def __init__(self, mesh: Mesh, *names: str) -> None:
        super().__init__()
        self.mesh, self.totals = mesh, None
        for name in names:
            self.register_parameter(name, nn.Parameter(weights()[name]))

    def over(self, axis: str) -> bool:
        return self.mesh.size(axis) > 1


class First(Base):
    """Embeds. Returns h, and the kind of each token, which are integers."""

    def forward(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        # transposed memory: values sent need not be contiguous
        return (F.embedding(tokens.t(), self.embed) * scale).transpose(0, 1), tokens % 3


class Middle(Base):
    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(h @ self.first) @ self.second


class Last(Base):
    """Its samples are split over dp, its sequence over tp."""

    def denominators(self, targets: Tensor) -> dict[str, Tensor]:
        count = (targets != -100).sum()
        return {"count": c.all_reduce(count, self.mesh.group("dp")) if self.over("dp") else count}

    def forward(self, h: Tensor, x: Tensor, kind: Tensor, targets: Tensor) -> Tensor:
        if self.over("tp"):
            targets = c.shard(targets, 1, self.mesh.group("tp"))
        x = torch.tanh(x + h) + kind.unsqueeze(-1)
        logits = x @ self.embed.t()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        for axis in ("dp", "tp"):
            if self.over(axis):
                loss = c.all_reduce(loss, self.mesh.group(axis))
        return loss / self.totals["count"]


class FirstTwo(Base):
    def forward(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.embedding(tokens, self.embed) * scale
        return h, tokens % 3, torch.tanh(h @ self.first) @ self.second


class Whole(Base):
    def denominators(self, targets: Tensor) -> dict[str, Tensor]:
        return {"count": c.all_reduce((targets != -100).sum(), self.mesh.group("dp"))}

    def forward(self, tokens: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
        h = F.embedding(tokens, self.embed) * scale
        x = torch.tanh(torch.tanh(h @ self.first) @ self.second + h) + (tokens % 3).unsqueeze(-1)
        loss = F.cross_entropy((x @ self.embed.t()).flatten(0, 1), targets.flatten(), reduction="sum")
        return c.all_reduce(loss, self.mesh.group("dp")) / self.totals["count"]


def shapes(whole: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    batch, sequence = whole["tokens"]
    h = (batch, sequence, WIDTH), torch.float64
    return {"h": h, "x": h, "kind": ((batch, sequence), torch.int64)}


def reducer(module: Base) -> GradientReducer:
    groups = [module.mesh.group(axis) for axis in ("dp", "tp") if module.over(axis)]
    return GradientReducer(module, {name: groups for name, _ in module.named_parameters()})


def three_stages(rank: int, axes: tuple[dict[str, int], ...]) -> tuple[Base, PipelineStep]:
    first_ranks = [0, 0, 0]
    for stage in (1, 2):
        first_ranks[stage] = first_ranks[stage - 1] + torch.Size(axes[stage - 1].values()).numel()
    meshes = [
        Mesh(a, range(start, start + torch.Size(a.values()).numel()))
        for a, start in zip(axes, first_ranks, strict=True)
    ]
    dp = [{"dp": 0} if "dp" in a else {} for a in axes]
    last = {**dp[2], **({"tp": 1} if "tp" in axes[2] else {})}
    middle = {**dp[1], **({"tp": 2} if "tp" in axes[1] else {})}
    crossings = (
        Crossing("h", 0, 1, dp[0], dp[1]),
        Crossing("h", 0, 2, dp[0], last),
        Crossing("kind", 0, 2, dp[0], last),
        Crossing("x", 1, 2, middle, last),
    )
    return meshes, crossings


def compare(module: Base, mesh: Mesh, loss: Tensor, times: int) -> None:
    wanted_loss, wanted = reference(inputs())
    torch.testing.assert_close(loss, wanted_loss, rtol=1e-13, atol=0)
    for name, gradient in full_gradients(module, mesh).items():
        torch.testing.assert_close(gradient, times * wanted[name], rtol=1e-12, atol=1e-12, msg=name)


class MiddleSplit(Middle):
    """Hidden width split over tp; its result leaves split by width."""

    def forward(self, h: Tensor) -> Tensor:
        if not self.over("tp"):
            return super().forward(h)
        tp = self.mesh.group("tp")
        hidden = torch.tanh(c.sum_gradient(h, tp) @ c.shard(self.first, 1, tp))
        return c.reduce_scatter(hidden @ c.shard(self.second, 0, tp), 2, tp)


def pipelined(rank: int, ranks: int, axes: tuple[dict[str, int], ...], schedule: str) -> None:
    meshes, crossings = three_stages(rank, axes)
    stage = next(index for index, mesh in enumerate(meshes) if rank in mesh)
    mesh = meshes[stage]
    module = (First, MiddleSplit, Last)[stage](mesh, *(("embed",), ("first", "second"), ("embed",))[stage])
    whole_copies = {name: [mesh.group("dp")] for name, _ in module.named_parameters()} if module.over("dp") else {}
    of_stage = GradientReducer(module, whole_copies) if stage == 1 else reducer(module)
    tied = (Tied((VOCABULARY, WIDTH), {0: ("embed", {}), 2: ("embed", {})}),)
    step = PipelineStep(module, meshes, ROWS[schedule](3), crossings, BATCH_DIMS, shapes, reducer=of_stage, tied=tied)
    share = mesh.share(inputs(), BATCH_DIMS)
    for times in (1, 2, 3):
        compare(module, mesh, step.step(share), times)
    torch.testing.assert_close(step.evaluate(share), reference(inputs())[0], rtol=1e-13, atol=0)
    norm = clip_grad_norm(module, mesh, 1.0, group=step.everyone, counted_elsewhere=("embed",) if stage == 2 else ())
    wanted = torch.cat([3 * gradient.flatten() for gradient in reference(inputs())[1].values()]).norm()
    torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "axes",
    [
        ({}, {}, {}),
        ({"dp": 2}, {"dp": 1}, {"tp": 2}),
        ({"dp": 1}, {"dp": 2, "tp": 2}, {"dp": 1, "tp": 3}),
    ],
)
def test_three_stages(axes: tuple[dict[str, int], ...], schedule: str) -> None:
    run_ranks(pipelined, sum(torch.Size(a.values()).numel() for a in axes), axes, schedule)


def two_by_two(rank: int, ranks: int, schedule: str, last: dict[str, int]) -> None:
    meshes = [Mesh({"dp": 2}, [0, 1]), Mesh(last, [2, 3])]
    mesh = meshes[rank // 2]
    placement = {"dp": 0} if "dp" in last else {"tp": 1}
    crossings = [Crossing(name, 0, 1, {"dp": 0}, placement) for name in ("h", "kind", "x")]
    module = Last(mesh, "embed") if rank > 1 else FirstTwo(mesh, "embed", "first", "second")
    tied = (Tied((VOCABULARY, WIDTH), {0: ("embed", {}), 1: ("embed", {})}),)
    rows = ROWS[schedule](2)
    step = PipelineStep(module, meshes, rows, crossings, BATCH_DIMS, shapes, reducer=reducer(module), tied=tied)
    for times in (1, 2):
        compare(module, mesh, step.step(mesh.share(inputs(), BATCH_DIMS)), times)
    with pytest.raises(ValueError, match="same order"):
        PipelineStep(module, meshes, ["F0 F1 B0 B1", "F1 F0 B0 B1"], crossings, BATCH_DIMS, shapes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("last", [{"dp": 2}, {"tp": 2}])
def test_two_stages_of_two(schedule: str, last: dict[str, int]) -> None:
    run_ranks(two_by_two, 4, schedule, last)


def microbatched(rank: int, ranks: int) -> None:
    mesh = Mesh({"dp": 2})
    module = Whole(mesh, "embed", "first", "second")
    share = mesh.share(inputs(), BATCH_DIMS)
    for microbatches in (1, 2, 3, 4):
        step = MicrobatchStep(module, microbatches, BATCH_DIMS, reducer=reducer(module))
        module = step.module
        compare(module, mesh, step.step(share), 1)
        compare(module, mesh, step.step(share), 2)
        compare(module, mesh, step.evaluate(share), 2)
        module = Whole(mesh, "embed", "first", "second")


def test_microbatches_alone() -> None:
    run_ranks(microbatched, 2)


def test_batches_are_cut_so_that_stages_agree() -> None:
    x = torch.arange(8)
    two = [part["x"].tolist() for part in split_batch({"x": x}, {"x": 0}, 2, shares=2)]
    assert two == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ValueError, match="7 samples"):
        split_batch({"x": x[:7]}, {"x": 0}, 2, shares=2)
    assert [p["x"].tolist() for p in split_batch({"x": x[:5]}, {"x": 0}, 3)] == [[0, 1], [2, 3], [4]]


def plan_messages(rank: int, ranks: int) -> None:
    left, right = Mesh({"dp": 2, "tp": 2}, [0, 1, 2, 3]), Mesh({"tp": 3}, [3, 4, 5])
    copies = messages((8, 5), (left, {}), (Mesh({"dp": 4}, [2, 3, 4, 5]), {}))
    assert [m.sender for m in copies] == [0, 1, 2, 3]
    split = messages((8, 5), (left, {"tp": 1}), (Mesh({"dp": 2, "tp": 2}, [2, 3, 4, 5]), {"tp": 1}))
    assert sorted(m.sender for m in split) == [0, 1, 2, 3]
    for given in ({}, {"dp": 0}, {"dp": 0, "tp": 1}, {"tp": 0}):
        for taken in ({}, {"tp": 0}, {"tp": 1}):
            whole = torch.arange(40).view(8, 5)
            got = {r: torch.full_like(whole[right.box(whole.shape, taken, r)], -1) for r in right.ranks}
            for m in messages(whole.shape, (left, given), (right, taken)):
                got[m.receiver][m.received] = whole[left.box(whole.shape, given, m.sender)][m.sent]
            for r, value in got.items():
                assert value.equal(whole[right.box(whole.shape, taken, r)])


def test_messages_bring_every_element_once() -> None:
    run_ranks(plan_messages, 6)
