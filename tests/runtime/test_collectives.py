"""Every conversion, forward and backward, against what its two placements mean; on 2, 3 and 4 gloo ranks."""

import contextlib
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from autoshard.placement import CONVERSIONS, shard_sizes
from autoshard.ranks import run_ranks
from autoshard.runtime import collectives as c

CASES: dict[tuple[str, str], Callable[..., Tensor]] = {
    ("S", "R"): lambda x, d, e, g, n: c.all_gather(x, d, g, n),
    ("S", "I"): lambda x, d, e, g, n: c.all_gather_invariant(x, d, g, n),
    ("P", "I"): lambda x, d, e, g, n: c.all_reduce(x, g),
    ("P", "R"): lambda x, d, e, g, n: c.all_reduce_both(x, g),
    ("P", "S"): lambda x, d, e, g, n: c.reduce_scatter(x, e, g),
    ("I", "R"): lambda x, d, e, g, n: c.sum_gradient(x, g),
    ("I", "S"): lambda x, d, e, g, n: c.shard(x, e, g),
    ("R", "S"): lambda x, d, e, g, n: c.take_shard(x, e, g),
    ("I", "P"): lambda x, d, e, g, n: c.keep_one(x, g),
    ("R", "P"): lambda x, d, e, g, n: c.keep_one_both(x, g),
    ("S", "P"): lambda x, d, e, g, n: c.pad_shard(x, d, g, n),
    ("R", "I"): lambda x, d, e, g, n: c.keep_one_gradient(x, g),
    ("S", "S"): lambda x, d, e, g, n: c.all_to_all(x, d, e, g, n),
}
SHAPES = [(12, 24), (5, 7), (1, 3), (3, 0, 2), (6, 2, 5), (7, 1, 12)]
GRADIENT_OF = {"R": "P", "P": "I", "I": "I", "S": "S"}


def spread(whole: Tensor, kind: str, dim: int, rank: int, ranks: int) -> Tensor:
    """What `rank` holds of `whole`. Drawn from the global generator, which is the same on all ranks."""
    if kind == "S":
        return whole.split(shard_sizes(whole.shape[dim], ranks), dim)[rank].contiguous()
    if kind == "P":
        parts = [torch.randn(whole.shape).to(whole.dtype) for _ in range(ranks - 1)]
        return [*parts, whole - sum(parts)][rank]
    return whole.clone()


def check(everyone: list[Tensor], kind: str, dim: int, whole: Tensor) -> None:
    """Whether the ranks' tensors, at the placement `kind`, stand for `whole`."""
    if kind == "S":
        assert [t.shape[dim] for t in everyone] == list(shard_sizes(whole.shape[dim], len(everyone)))
        everyone = [torch.cat(everyone, dim)]
    elif kind == "P":
        everyone = [sum(everyone[1:], everyone[0])]
    for value in everyone:
        assert value.dtype == whole.dtype
        torch.testing.assert_close(value, whole, rtol=0, atol=1e-12)


def strided(x: Tensor) -> Tensor:
    """The same values in non-contiguous memory."""
    return torch.stack([x, x + 1], -1)[..., 0]


def conversions(rank: int, ranks: int) -> int:
    group = dist.group.WORLD
    held: list[Tensor] = []  # what this rank got, checked against the other ranks' at the end
    expected: list[tuple[str, int, Tensor]] = []
    for (source, target), convert in CASES.items():
        for shape in SHAPES:
            for d in range(len(shape)) if source == "S" else (0,):
                for e in range(len(shape)) if target == "S" else (0,):
                    if source == target and d == e:
                        continue
                    torch.manual_seed(len(held))
                    value, gradient = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
                    x = strided(spread(value, source, d, rank, ranks)).requires_grad_()
                    assert x.numel() < 2 or not x.is_contiguous()
                    minus = len(shape) if len(held) % 2 else 0  # negative dims are dims too
                    y = convert(x, d - minus, e - minus, group, shape[d])
                    y.backward(strided(spread(gradient, GRADIENT_OF[target], e, rank, ranks)))
                    held += [y.detach(), x.grad]
                    expected += [(target, e, value), (GRADIENT_OF[source], d, gradient)]
                    for dtype in (torch.int64, torch.bool):
                        if dtype == torch.int64 or "P" not in (source, target):
                            x = spread((value * 9).to(dtype), source, d, rank, ranks)
                            held.append(convert(x, d, e, group, shape[d]))
                            expected.append((target, e, (value * 9).to(dtype)))
    everyone: list[list[Tensor]] = [[]] * ranks
    dist.all_gather_object(everyone, held)
    for tensors, (kind, dim, whole) in zip(zip(*everyone, strict=True), expected, strict=True):
        check(list(tensors), kind, dim, whole)
    return len(held)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_conversions(ranks: int) -> None:
    assert set(CASES) == set(CONVERSIONS)
    assert min(run_ranks(conversions, ranks)) > 200


def alone(rank: int, ranks: int) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    for convert in CASES.values():
        assert convert(x, 0, 1, dist.group.WORLD, None) is x
    assert c.gather_parameter(x, 0, dist.group.WORLD) is x


def test_one_rank_does_nothing() -> None:
    run_ranks(alone, 1)


class Layer(nn.Module):
    def __init__(self, width: int, split: int) -> None:
        super().__init__()
        self.split = split
        self.weight = nn.Parameter(torch.empty(width, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        weight = c.gather_parameter(self.weight, self.split, dist.group.WORLD, WIDTH)
        return torch.tanh(x @ weight.t()) @ weight


WIDTH = 21


def sharded_layers(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    wholes = [torch.randn(WIDTH, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    y = x
    for w in wholes:
        y = torch.tanh(y @ w.t()) @ w
    y.square().sum().backward()
    layers = nn.ModuleList(Layer(WIDTH, i % 2) for i in range(4))
    cuts = [shard_sizes(WIDTH, ranks)] * 4
    for layer, w, cut in zip(layers, wholes, cuts, strict=True):
        layer.weight.data = w.detach().split(cut, layer.split)[rank].clone()

    def run(mode: str) -> Tensor:
        h = x
        for layer in layers:
            h = checkpoint(layer, h, use_reentrant=False) if mode == "checkpoint" else layer(h)
        return h.square().sum() / ranks  # each rank has its part of the gradient

    for mode in ("plain", "again", "checkpoint", "again and checkpoint"):
        layers.zero_grad()
        with c.gather_again() if "again" in mode else contextlib.nullcontext():
            loss = run("checkpoint" if "checkpoint" in mode else "plain")
        for repeat in (1, 2):
            loss.backward(retain_graph=repeat == 1 and "checkpoint" not in mode)
            for layer, w, cut in zip(layers, wholes, cuts, strict=True):
                expected = repeat * w.grad.split(cut, layer.split)[rank]
                torch.testing.assert_close(layer.weight.grad, expected, rtol=1e-12, atol=1e-12)
            if "checkpoint" in mode:
                break


def resident(rank: int, ranks: int) -> tuple[int, int]:
    """Bytes allocated in all by weights alive after a forward of 8 layers: kept, and gathered again."""

    class Allocated(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.peak = 0
            self.seen: set[int] = set()

        def gone(self, key: int, nbytes: int) -> None:
            self.seen.discard(key)
            self.now -= nbytes

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, Tensor):
                    storage = t.untyped_storage()
                    key, nbytes = storage._cdata, storage.nbytes()
                    if key not in self.seen:
                        self.seen.add(key)
                        self.now += nbytes
                        weakref.finalize(storage, self.gone, key, nbytes)
            self.peak = max(self.peak, self.now)
            return out

    width, result = 256, []
    layers = [nn.Parameter(torch.randn(width // ranks, width)) for _ in range(8)]
    for again in (False, True):
        with Allocated() as allocated:
            allocated.seen = {weight.untyped_storage()._cdata for weight in layers}
            x = torch.randn(1, width)
            with c.gather_again() if again else contextlib.nullcontext():
                for weight in layers:
                    x = torch.tanh(nn.functional.linear(x, c.gather_parameter(weight, 0, dist.group.WORLD)))
            x.sum().backward()
        result.append(allocated.peak)
        for weight in layers:
            weight.grad = None
    return tuple(result)


def test_gathered_parameters_are_not_kept() -> None:
    run_ranks(sharded_layers, 2)
    run_ranks(sharded_layers, 4)
    for kept, again in run_ranks(resident, 2):
        whole = 256 * 256 * 4
        assert kept > 8 * whole
        assert again < 8 * whole / 2 + 4 * whole  # the gradients' shards, and a few whole weights in transit


def changed(rank: int, ranks: int) -> None:
    weight = nn.Parameter(torch.randn(2, 4))
    with c.gather_again():
        y = (torch.randn(3, 4, requires_grad=True) @ c.gather_parameter(weight, 0, dist.group.WORLD).t()).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="changed between forward and the backward"):
        y.backward()


def test_a_changed_parameter_is_noticed() -> None:
    run_ranks(changed, 2)
