"""Meshes, loading and gathering of parameters, sums and clipping of gradients."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from autoshard.placement import R, S, local_shape
from autoshard.ranks import run_ranks
from autoshard.runtime.mesh import Mesh, check_inputs
from autoshard.runtime.parameters import (
    GradientReducer,
    clip_grad_norm,
    full_gradients,
    full_state,
    initialize,
    load_full,
)

WHOLE = {
    "embed.weight": (10, 4),
    "inner.up.weight": (7, 4),
    "inner.up.bias": (7,),
    "head.weight": (10, 4),
    "scale": (3,),
}


class Inner(nn.Module):
    PLACEMENTS: ClassVar = {"up.weight": {"tp": 0, "dp": 0}, "up.bias": {"tp": 0}}

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.up = nn.Module()
        self.up.weight = empty("inner.up.weight", self.PLACEMENTS["up.weight"], mesh)
        self.up.bias = empty("inner.up.bias", self.PLACEMENTS["up.bias"], mesh)


class Model(nn.Module):
    PLACEMENTS: ClassVar = {"embed.weight": {"tp": 1}}

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.embed, self.head, self.inner = nn.Module(), nn.Module(), Inner(mesh)
        self.embed.weight = empty("embed.weight", self.PLACEMENTS["embed.weight"], mesh)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(3))


def empty(name: str, placement: dict[str, int], mesh: Mesh) -> nn.Parameter:
    box = mesh.box(WHOLE[name], placement)
    return nn.Parameter(torch.zeros([s.stop - s.start for s in box], dtype=torch.float64))


def whole_state() -> dict[str, Tensor]:
    torch.manual_seed(1)
    state = {name: torch.randn(shape, dtype=torch.float64) for name, shape in WHOLE.items()}
    return {**state, "head.weight": state["embed.weight"], "scale": torch.randn(3)}


def save_safetensors(path: Path, tensors: dict[str, Tensor]) -> None:
    names = {torch.float64: "F64", torch.float32: "F32"}
    header, content = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in tensors.items():
        piece = tensor.numpy().tobytes()
        offsets = [len(content), len(content) + len(piece)]
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        content += piece
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def state_round_trip(rank: int, ranks: int, folder: Path) -> None:
    mesh, state = Mesh({"dp": 2, "tp": ranks // 2}), whole_state()
    sources = (state, folder / "state.pt", str(folder / "state.safetensors"), folder)
    for source in sources:
        model = Model(mesh)
        load_full(model, mesh, source)
        got = full_state(model, mesh)
        assert got.keys() == state.keys()
        for name, value in state.items():
            assert got[name].equal(value), name
    for parameter in model.parameters():
        parameter.grad = 2 * parameter.detach()
    for name, value in full_gradients(model, mesh).items():
        assert value.equal(2 * state[name])
    distinct = torch.cat([state[name].flatten() for name in ("embed.weight", "inner.up.weight", "inner.up.bias")])
    norm = clip_grad_norm(model, mesh, 1.0)
    torch.testing.assert_close(norm, 2 * distinct.norm(), rtol=1e-12, atol=0)
    torch.testing.assert_close(clip_grad_norm(model, mesh, 100.0), torch.tensor(1.0).double(), rtol=1e-6, atol=0)
    with pytest.raises(KeyError, match=r"no value for inner\.up\.bias"):
        load_full(model, mesh, {name: value for name, value in state.items() if "bias" not in name})
    with pytest.raises(ValueError, match="'scale'"):
        load_full(model, mesh, {**state, "scale": torch.zeros(4)})


def initial_weights(rank: int, ranks: int) -> list[Tensor]:
    states = []
    for axes in ({"dp": 2, "tp": 2}, {"dp": 4, "tp": 1}, {"dp": 1, "tp": 4}):
        mesh = Mesh(axes)
        model = Model(mesh)
        initialize(model, mesh, seed=7)
        states.append(full_state(model, mesh))
    for state in states[1:]:
        for name, value in state.items():
            assert value.equal(states[0][name]), name
    assert states[0]["embed.weight"].std() > 0.01 and states[0]["inner.up.bias"].eq(0).all()
    return [states[0]["embed.weight"]]


def boxes(rank: int, ranks: int) -> None:
    mesh = Mesh({"dp": 2, "tp": 3})
    for shape in ((7, 5), (1, 2), (12, 6)):
        for placement in ({}, {"dp": 0}, {"dp": 0, "tp": 0}, {"dp": 1, "tp": 0}):
            layout = tuple(S(placement[axis]) if axis in placement else R for axis in mesh.axes)
            for other in range(6):
                box = mesh.box(shape, placement, other)
                coordinates = tuple(mesh.coordinates(other).values())
                assert tuple(s.stop - s.start for s in box) == local_shape(shape, layout, (2, 3), coordinates)
    assert mesh.coordinates() == {"dp": rank // 3, "tp": rank % 3}
    assert mesh.group("tp").rank() == rank % 3 and mesh.group("dp").rank() == rank // 3
    second = Mesh({"tp": 2, "none": 1}, ranks=[4, 2])
    assert (rank in second) == (rank in (4, 2))
    with pytest.raises(KeyError):
        second.group("none")
    x = torch.arange(7)
    assert mesh.share({"x": x, "y": x}, {"x": 0, "y": None})["x"].equal(x[:4] if rank < 3 else x[4:])
    with pytest.raises(RuntimeError, match="only 6 ranks"):
        Mesh({"dp": 8})


def unequal_inputs(rank: int, ranks: int) -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    tokens = torch.arange(6).view(2, 3) + 10 * mesh.coordinates()["dp"]
    check_inputs({"tokens": tokens}, mesh)
    if rank == 3:
        tokens[1, 2] = 0
    if rank > 1:
        with pytest.raises(ValueError, match=r"input 'tokens' of rank 3 differs along 'tp' at \[1, 2\]"):
            check_inputs({"tokens": tokens}, mesh)


def reduced_gradients(rank: int, ranks: int) -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    model = nn.Linear(3, 2).double()
    reducer = GradientReducer(model, {"weight": (mesh.group("dp"), mesh.group("tp")), "bias": (mesh.group("tp"),)})

    def expected(times: int) -> tuple[Tensor, Tensor]:
        each = [torch.arange(3.0).double() + r for r in range(ranks)]
        return times * sum(each).expand(2, 3), torch.full((2,), 2.0 * times).double()

    def backward() -> None:
        model(torch.arange(3.0).double() + rank).sum().backward()

    def check(times: int) -> None:
        for parameter, wanted in zip(model.parameters(), expected(times), strict=True):
            torch.testing.assert_close(parameter.grad, wanted)

    backward()
    check(1)
    backward()  # accumulates
    check(2)
    with reducer.defer():
        backward()
        assert not model.weight.grad.equal(expected(1)[0])
        backward()
        backward()
    check(5)
    backward()
    check(6)
    model.zero_grad()
    with reducer.defer():
        pass
    assert model.weight.grad is None


def test_states_round_trip(tmp_path: Path) -> None:
    state = whole_state()
    torch.save(state, tmp_path / "state.pt")
    save_safetensors(tmp_path / "state.safetensors", state)
    run_ranks(state_round_trip, 4, tmp_path)
    run_ranks(state_round_trip, 6, tmp_path)


def test_initial_weights_do_not_depend_on_the_layout() -> None:
    run_ranks(initial_weights, 4)


def test_boxes_and_groups() -> None:
    run_ranks(boxes, 6)


def test_unequal_inputs_are_named() -> None:
    run_ranks(unequal_inputs, 4)


def test_gradients_are_summed_once() -> None:
    run_ranks(reduced_gradients, 4)
