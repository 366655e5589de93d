"""A user's own loop on several ranks against the same loop in one process, in float64."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.errors import AutoshardError, BadInput, UntraceableModel
from autoshard.parallelize import full_state_dict, load_full_state_dict, parallelize
from autoshard.ranks import run_ranks

STEPS = 3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied embedding and head, a frozen parameter, a result beside the loss."""

    def __init__(self, vocab: int = 24, width: int = 8, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.dropout(self.embed(tokens)) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten())}


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    pairs = torch.randint(24, (count, 2, 8, 5), generator=generator)
    pairs[:, 1, 3:, 2] = -100  # some targets do not count
    return [(tokens, targets) for tokens, targets in pairs]


def make(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model().double()


def train(model: Model, optimizer: torch.optim.Optimizer, share: Callable[[Tensor], Tensor]) -> list[float]:
    losses = []
    for tokens, targets in batches():
        loss = model(share(tokens), targets=share(targets))["loss"]
        (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def whole(x: Tensor) -> Tensor:
    return x


@functools.cache
def plain() -> tuple[list[float], dict[str, Tensor], float]:
    model = make()
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6), whole)
    with torch.no_grad():
        last = float(model(*batches(1)[0])["loss"])
    return losses, {name: value.clone() for name, value in model.state_dict().items()}, last


def parallel(rank: int, ranks: int, fixed: dict[str, Any]) -> Any:
    model = make(seed=rank)  # every rank has its own values; those of rank 0 count
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    before = [id(parameter) for parameter in model.parameters()]
    run = parallelize(model, cluster=f"1x{ranks}@cpu", **fixed)
    assert run is model and isinstance(run, Model)
    share = whole
    if fixed.get("inputs") == "share":
        share = lambda x: x.chunk(2)[rank // (ranks // 2)]  # noqa: E731
    losses = train(run, optimizer, share)
    assert [id(parameter) for parameter in run.parameters()] == before
    with torch.no_grad():
        last = run(*map(share, batches(1)[0]))["loss"]
    assert not last.requires_grad
    held = sum(parameter.numel() for parameter in run.parameters())
    return losses, full_state_dict(run), float(last), held


@pytest.mark.parametrize(
    ("ranks", "fixed"),
    [
        (2, {"mesh": "dp=2", "stages": 1}),
        (2, {"mesh": "tp=2", "stages": 1}),
        (2, {"stages": 2, "microbatches": 4}),
        (4, {"mesh": "dp=2,tp=2", "stages": 1, "microbatches": 2}),
        (4, {"mesh": "dp=2", "stages": 2, "microbatches": 2}),
        (4, {"mesh": "dp=2,tp=2", "stages": 1, "inputs": "share"}),
    ],
)
def test_the_users_loop_is_the_same_on_ranks(ranks: int, fixed: dict[str, Any]) -> None:
    losses, state, last = plain()
    for found, full, final, held in run_ranks(parallel, ranks, fixed, timeout_s=300):
        assert found == pytest.approx(losses, rel=1e-9)
        assert final == pytest.approx(last, rel=1e-9)
        assert list(full) == list(state)
        for name, value in state.items():
            torch.testing.assert_close(full[name], value, rtol=1e-8, atol=1e-10)
        if fixed.get("stages") == 2:
            assert held < sum(parameter.numel() for parameter in make().parameters())


def test_one_process_keeps_the_model_itself() -> None:
    model = make()
    assert parallelize(model, cluster="1x2@cpu") is model and type(model) is Model

    @parallelize(cluster="1x2@cpu")
    class Mine(Model):
        pass

    @parallelize(cluster="1x2@cpu")
    def build() -> Model:
        return make()

    assert type(Mine()) is Mine and type(build()) is Model
    assert full_state_dict(model).keys() == model.state_dict().keys()


@parallelize(cluster="1x2@cpu", mesh="dp=2")
class Decorated(Model):
    """A class of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super(Decorated, self).__init__(dropout=dropout)  # noqa: UP008 - as older code has it


def decorated(rank: int, ranks: int) -> Any:
    torch.manual_seed(0)
    model = Decorated().double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    tokens, targets = batches(1)[0]
    model(tokens, targets)["loss"].backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    (result,) = (model(tokens, targets),)
    (2 * result["loss"]).backward()
    assert result["logits"] is None
    load_full_state_dict(model, {name: torch.zeros_like(value) for name, value in state.items()})
    zero = full_state_dict(model)
    load_full_state_dict(model, state)
    return type(model).__name__, isinstance(model, Decorated), grads, zero, full_state_dict(model), state


def test_a_class_is_decorated_in_place_and_gradients_add_up() -> None:
    reference = make()
    reference.load_state_dict(make().state_dict())
    for name, is_one, grads, zero, again, state in run_ranks(decorated, 2, timeout_s=300):
        assert name == "Decorated" and is_one
        assert all(not value.any() for value in zero.values())
        assert all(value.equal(state[key]) for key, value in again.items())
        assert grads["scale"] is None
        reference.load_state_dict(state)
        reference.zero_grad()
        for scale in (1, 2):
            (scale * reference(*batches(1)[0])["loss"]).backward()
        for key, parameter in reference.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(grads[key], parameter.grad, rtol=1e-9, atol=1e-12)


class Counting(nn.Module):
    """Batch norm, and a branch on values where asked for."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.linear, self.norm, self.branch = nn.Linear(4, 4), nn.BatchNorm1d(4), branch

    def forward(self, x: Tensor) -> Tensor:
        if self.branch and x.sum() > 0:
            x = x * 2
        return self.norm(self.linear(x)).square().mean()


def with_buffers(rank: int, ranks: int) -> Any:
    torch.manual_seed(0)
    model = parallelize(Counting().double(), cluster="1x2@cpu", mesh="dp=2", stages=1)
    x = torch.randn(8, 4, dtype=torch.float64)
    for _ in range(2):
        model(x).backward()
    model.eval()
    try:
        model(x)
        said = ""
    except BadInput as error:
        said = str(error)
    return dict(model.named_buffers()), full_state_dict(model), said


def test_buffers_are_the_users_and_evaluation_is_refused_where_it_differs() -> None:
    torch.manual_seed(0)
    reference = Counting().double()
    x = torch.randn(8, 4, dtype=torch.float64)
    for _ in range(2):
        reference(x)
    for buffers, full, said in run_ranks(with_buffers, 2, timeout_s=300):
        for name, value in reference.named_buffers():
            torch.testing.assert_close(buffers[name], value, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-12)
        assert "its forward changes buffers" in said


def dropping(rank: int, ranks: int) -> tuple[float, float, float]:
    torch.manual_seed(0)
    model = Decorated(dropout=0.5).double()
    batch = batches(1)[0]
    first, second = (float(model(*batch)["loss"].detach()) for _ in range(2))
    model.eval()
    with torch.no_grad():
        return first, second, float(model(*batch)["loss"])


def test_evaluation_drops_nothing() -> None:
    expected = float(make()(*batches(1)[0])["loss"].detach())
    for first, second, evaluated in run_ranks(dropping, 2, timeout_s=300):
        assert first != second
        assert evaluated == pytest.approx(expected, rel=1e-9)


def refused(rank: int, ranks: int, model: nn.Module, fixed: dict[str, Any], arguments: tuple[Any, ...]) -> str:
    try:
        parallelize(model, **fixed)(*arguments)
    except AutoshardError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("model", "fixed", "arguments", "said"),
    [
        (Counting(branch=True), {"cluster": "1x2@cpu"}, (torch.randn(4, 4),), UntraceableModel.__name__),
        (Counting(), {"cluster": "1x4@cpu", "mesh": "dp=4", "stages": 1}, (torch.randn(8, 4),), "runs on 4 ranks"),
        (Counting(), {"cluster": "1x2@cpu", "mesh": "dp=3"}, (torch.randn(8, 4),), "does not divide"),
        (nn.Linear(4, 4), {"cluster": "1x2@cpu", "mesh": "dp=2"}, (torch.randn(4, 4),), "a scalar loss is needed"),
    ],
)
def test_every_rank_is_told(model: nn.Module, fixed: dict[str, Any], arguments: tuple[Any, ...], said: str) -> None:
    told = run_ranks(refused, 2, model, fixed, arguments, timeout_s=300)
    assert all(said in one for one in told), told
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ({}, "no cluster to plan for"),
        ({"cluster": "1x2@cpu", "inputs": "mine"}, "inputs is 'mine'"),
        ({"cluster": "1x2@cpu", "inputs": "share"}, "no mesh says of how many"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(fixed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parallelize(make(), **fixed)
    with pytest.raises(BadInput, match="a int cannot be parallelized"):
        parallelize(3, cluster="1x2@cpu")  # type: ignore[arg-type]
