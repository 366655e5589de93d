"""The comparison of runs: what counts as equal, and casts lifted to float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.ranks import run_ranks
from autoshard.runtime import collectives as c
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import GradientReducer, load_full
from autoshard.verify import (
    Recording,
    compare,
    in_float64,
    lift_float32_casts,
    record_model,
    record_rank,
    relative_error,
)


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.half().float(),
        lambda x: x.type(torch.bfloat16),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: x.sum(dtype=torch.float32),
        lambda x: torch.arange(3, dtype=torch.float32) / 7,
        lambda x: torch.arange(3) / 7,
        lambda x: torch.zeros_like(x, dtype=torch.float32),
        lambda x: torch.tensor(0.5),
        lambda x: torch.full((2,), 0.1),
        lambda x: torch.ops.aten._to_copy.default(x, dtype=torch.float32),
    ],
)
def test_casts_are_lifted(cast) -> None:  # type: ignore[no-untyped-def]
    with lift_float32_casts():
        assert cast(torch.randn(3, 3, dtype=torch.float64)).dtype == torch.float64
    assert torch.get_default_dtype() == torch.float32
    assert cast(torch.randn(3, 3, dtype=torch.float64)).dtype != torch.float64


def test_lifted_casts_keep_gradients_and_other_dtypes() -> None:
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with lift_float32_casts():
        x.float().exp().to(torch.float16).sum().backward()
        assert x.to(torch.int64).dtype == torch.int64
        assert torch.tensor([1, 2]).dtype == torch.int64 and torch.tensor(True).dtype == torch.bool
        assert torch.view_as_complex(torch.zeros(2, 2)).dtype == torch.complex128
    torch.testing.assert_close(x.grad, x.detach().exp(), rtol=1e-15, atol=0)


def test_literals_have_the_value_they_have_in_float32() -> None:
    with lift_float32_casts():
        assert torch.tensor(0.1).item() == torch.tensor(0.1, dtype=torch.float32).item()
        assert torch.tensor([0.1], dtype=torch.float64).item() == 0.1
        third = torch.tensor(1.0, dtype=torch.float64) / 3
        assert torch.as_tensor(third) == third
    plain = torch.tensor(0.1)
    with lift_float32_casts():
        assert torch.tensor(0.1).item() == plain.item()


def recording(**tensors: Tensor) -> Recording:
    return Recording({"step 0": torch.tensor(2.0).double()}, tensors, {}, {})


def test_relative_errors() -> None:
    a = torch.tensor([1.0, -4.0]).double()
    assert relative_error(a, a + torch.tensor([0.0, 4e-10])) == pytest.approx(1e-10)
    assert relative_error(a, a[:1]) == math.inf
    assert relative_error(a, a * math.nan) == math.inf
    infinite = torch.tensor([1.0, -math.inf, math.nan])
    assert relative_error(infinite, infinite) == 0
    assert relative_error(infinite, torch.tensor([1.0, 2.0, math.nan])) == math.inf
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0


def test_rounding_noise_is_not_an_error_but_a_missing_gradient_is() -> None:
    w, noise = torch.randn(4).double(), torch.full((4,), 1e-17).double()
    reference = recording(w=w, bias=noise)
    assert compare(reference, [recording(w=w, bias=-noise)]).equal()
    assert not compare(reference, [recording(w=w, bias=noise + 1e-11)]).equal()
    assert compare(reference, [recording(w=w), recording(bias=noise)]).equal()
    missing = compare(reference, [recording(w=w)])
    assert missing["gradients"] == math.inf and missing.worst["gradients"].name == "bias (missing)"
    assert compare(reference, [recording(w=w, bias=noise), recording(w=w + 1e-3)]).worst["gradients"].name == "w"
    assert compare(reference, [recording(w=w, bias=noise, more=w)])["gradients"] == math.inf


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y = self.down(torch.tanh(self.up(x)))
        return (y.float() - x).square().sum() / x.shape[0] * torch.tensor(0.1)


class Sharded(nn.Module):
    PLACEMENTS = {"up.weight": {"tp": 0}, "up.bias": {"tp": 0}, "down.weight": {"tp": 1}}  # noqa: RUF012

    def __init__(self, mesh: Mesh, fault: str) -> None:
        super().__init__()
        self.dp, self.tp, self.fault = mesh.group("dp"), mesh.group("tp"), fault
        hidden = mesh.box((9,), {"tp": 0})[0]
        width = hidden.stop - hidden.start
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6, bias=False)
        self.register_buffer("mean", torch.zeros(6))
        summed = ("up.weight", "up.bias") if fault == "sum" else ("up.weight", "up.bias", "down.weight")
        self.gradients = GradientReducer(self, dict.fromkeys(summed, (self.dp,)))

    def forward(self, x: Tensor) -> Tensor:
        samples = x.shape[0] if self.fault == "divisor" else 2 * x.shape[0]
        mean = c.all_reduce(x.detach().sum(0), self.dp) / (2 * x.shape[0])
        self.mean = 0.9 * self.mean + (0.2 if self.fault == "scale" else 0.1) * mean
        y = self.down(torch.tanh(self.up(c.sum_gradient(x, self.tp))))
        y = y if self.fault == "reduce" else c.all_reduce(y, self.tp)
        return c.all_reduce((y.float() - x).square().sum(), self.dp) / samples * torch.tensor(0.1)


def sharded(rank: int, ranks: int, state: dict[str, Tensor], x: Tensor, fault: str) -> Recording:
    mesh = Mesh({"dp": 2, "tp": 2})
    module = Sharded(mesh, fault).double()
    load_full(module, mesh, state)
    own = mesh.share({"x": x}, {"x": 0})["x"]
    if fault == "swap":
        own = x[:4] if rank > 1 else x[4:]
        module.up.weight.data = module.up.weight.data.flip(0)

    def step() -> Tensor:
        loss = module(own)
        loss.backward()
        return loss

    return record_rank(module, mesh, step)


@pytest.mark.parametrize(
    "fault, category",
    [
        ("", ""),
        ("sum", "gradients"),
        ("divisor", "loss"),
        ("scale", "buffers"),
        ("reduce", "loss"),
        ("swap", "gradients"),
    ],
)
def test_a_sharded_run_equals_the_model_and_faults_show(fault: str, category: str) -> None:
    torch.manual_seed(0)
    model = Model().double()
    x = in_float64(torch.randn(8, 6))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    reference = record_model(model, lambda: model(x))
    errors = compare(reference, run_ranks(sharded, 4, state, x, fault))
    assert errors.equal() == (not fault), str(errors)
    if fault:
        assert errors[category] > 1e-6
    else:
        assert max(errors[category] for category in errors.worst) < 1e-12
        assert errors.worst.keys() == {"loss", "gradients", "buffers", "parameters"}
