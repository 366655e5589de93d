"""Lookups without their counting indices are the same lookups: random ones, values and gradients."""

import random

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from autoshard.passes.normalize_build import Builder
from autoshard.passes.normalize_index import counts_along, drop_counting_indices
from autoshard.program import operator_name

aten = torch.ops.aten


def counting(build, choose, size, place, sizes):
    """arange(size) along one place of the indices together, by one of several ways; now and then it is another."""
    made = choose.choice(
        [
            lambda: build.call(aten.arange.default, size),
            lambda: build.call(aten.arange.start_step, 0, size, 1),
            lambda: build.call(aten.arange.start_step, size - 1, -1, -1),
        ]
    )()
    after = len(sizes) - place - 1
    if choose.random() < 0.5:
        for _ in range(after):
            made = build.call(aten.unsqueeze.default, made, -1)
        return made
    made = build.call(aten.reshape.default, made, [size, *[1] * (len(sizes) - 1)])
    made = build.call(aten.transpose.int, made, 0, place)
    return build.call(aten.expand.default, made, [-1 if choose.random() < 0.7 else length for length in sizes])


def lookup(seed):
    """A graph of one random lookup, and its inputs."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    shape = [choose.choice((2, 3, 4)) for _ in range(choose.randint(1, 4))]
    sizes = [choose.choice((1, 2, 3)) for _ in range(choose.randint(1, 3))]
    dims = [dim for dim in range(len(shape)) if choose.random() < 0.8] or [0]
    places = {dim: choose.randrange(len(sizes)) for dim in dims if choose.random() < 0.6}
    for dim, place in places.items():
        sizes[place] = shape[dim]
    places = {dim: place for dim, place in places.items() if sizes[place] == shape[dim]}
    inputs, indices = [torch.randn(shape, dtype=torch.float64)], {}
    for dim in dims:
        if dim not in places:
            own = [choose.choice((1, size)) for size in sizes[choose.randrange(len(sizes)) :]]
            inputs.append(torch.randint(-shape[dim], shape[dim], own, dtype=choose.choice((torch.int64, torch.int32))))
            indices[dim] = len(inputs) - 1
    graph, mode = fx.Graph(), FakeTensorMode()
    given = [graph.placeholder(f"x{at}") for at in range(len(inputs))]
    for node, tensor in zip(given, inputs, strict=True):
        node.meta.update(val=mode.from_tensor(tensor), frames=())
    build = Builder(graph, given[0])
    arguments = [
        given[indices[dim]]
        if dim in indices
        else counting(build, choose, shape[dim], places[dim], sizes)
        if dim in places
        else None
        for dim in range(len(shape))
    ]
    graph.output(build.call(aten.index.Tensor, given[0], arguments))
    return graph, inputs


def run(graph, inputs):
    x = inputs[0].clone().requires_grad_()
    result = fx.Interpreter(fx.GraphModule({}, graph)).run(x, *inputs[1:])
    (gradient,) = torch.autograd.grad((result * torch.arange(result.numel()).reshape(result.shape)).sum(), x)
    return result.detach(), gradient


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_random_lookups_stay_the_same(start):
    rewritten = set()
    for seed in range(start, start + 100):
        graph, inputs = lookup(seed)
        result, gradient = run(graph, inputs)
        before = len(graph.nodes)
        drop_counting_indices(graph)
        now, new_gradient = run(graph, inputs)
        assert graph.output_node().args[0].meta["val"].shape == result.shape, seed
        assert torch.equal(now, result), seed
        torch.testing.assert_close(new_gradient, gradient, rtol=1e-12, atol=1e-12, msg=str(seed))
        names = {operator_name(node) for node in graph.nodes if node.op == "call_function"}
        kind = {"aten.gather.default", "aten.index.Tensor"} & names
        rewritten.add("same" if len(graph.nodes) == before and "aten.index.Tensor" in kind else (*kind, "views")[0])
    assert rewritten == {"same", "views", "aten.index.Tensor", "aten.gather.default"}


def test_what_counts():
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    x.meta.update(val=mode.from_tensor(torch.zeros(3)), frames=())
    build = Builder(graph, x)
    plain = build.call(aten.arange.start, 0, 3)
    column = build.call(aten.unsqueeze.default, plain, 1)
    assert [counts_along(node) for node in (plain, column)] == [0, 0]
    assert counts_along(build.call(aten.permute.default, column, [1, 0])) == 1
    assert counts_along(build.call(aten.expand.default, column, [2, 3, 4])) == 1
    others = (
        build.call(aten.arange.start, 1, 4),
        build.call(aten.arange.start_step, 0, 6, 2),
        build.call(aten.arange.default, 1),
        build.call(aten.add.Tensor, plain, 1),
        build.call(aten.flip.default, plain, [0]),
        build.call(aten.reshape.default, build.call(aten.expand.default, column, [3, 2]), [2, 3]),
        build.call(aten._to_copy.default, plain, dtype=torch.float64),
        x,
    )
    assert [counts_along(node) for node in others] == [None] * len(others)
