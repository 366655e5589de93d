"""Toy graphs under layouts given by hand: which conversions there are, where they stand, and what is summed when."""

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.cluster import parse_cluster
from autoshard.compiler import PlanOptions, make_plan, parse_mesh
from autoshard.passes.lower import Lower
from autoshard.placement import I, P, R, S
from autoshard.plan import OperatorPlan
from autoshard.workload import Workload

CLUSTER = parse_cluster("1x2@cpu")


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.gate = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return self.down(self.up(y) * self.gate(y))


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x, targets):
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x), targets)


def half_frozen():
    model = Tower()
    model.blocks[1].requires_grad_(False)
    return model


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.square = nn.Linear(8, 8, bias=False)

    def forward(self, x, targets):
        return F.cross_entropy(self.square(self.square(x)), targets)


@cache
def planned(make, mesh, microbatches):
    """A plan to change."""
    workload = Workload(make(), (torch.randn(4, 8), torch.randint(4, (4,))))
    options = PlanOptions(mesh=parse_mesh(mesh), stages=1, microbatches=microbatches)
    return make_plan(workload, CLUSTER, options, baselines=False)


def lowered(make, mesh, operators, parameters=(), microbatches=1):
    """The stage where everything is whole but these operators: node -> (operands, result), and these parameters."""
    program, chain, plan = planned(make, mesh, microbatches)
    stage, whole = plan.stages[0], (I,) * mesh.count("=")
    made = {
        name: OperatorPlan(
            tuple(whole for _ in one.operands), tuple(whole for _ in one.results), tuple(None for _ in whole)
        )
        for name, one in stage.operators.items()
    }
    for name, (operands, result) in operators.items():
        made[name] = replace(made[name], operands=operands, results=(result,))
    stored = dict.fromkeys(stage.parameters, whole) | dict(parameters)
    plan = replace(plan, stages=(replace(stage, operators=made, parameters=stored),))
    return Lower(CLUSTER)(program, chain, plan).stages[0]


def conversions(stage):
    """(function, what it converts, the module that it stands in) in order."""
    return [(n.target, n.arguments["x"].name, n.frames[-1].path) for n in stage.nodes if n.converts]


WIDE = {
    "linear": (((R,), (S(0),)), (S(1),)),
    "linear_1": (((R,), (S(0),)), (S(1),)),
    "mul": (((S(1),), (S(1),)), (S(1),)),
    "linear_2": (((S(1),), (S(1),)), (P,)),
}
WEIGHTS = {"blocks.0.up.weight": (S(0),), "blocks.0.gate.weight": (S(0),), "blocks.0.down.weight": (S(1),)}


def test_readers_of_one_layout_share_a_conversion():
    stage = lowered(Tower, "tp=2", WIDE, WEIGHTS)
    assert conversions(stage) == [("sum_gradient", "layer_norm", "blocks.0"), ("all_reduce", "linear_2", "")]
    first, second = (next(n for n in stage.nodes if n.results == (name,)) for name in ("linear", "linear_1"))
    assert first.arguments["input"] == second.arguments["input"] != first.arguments["weight"]
    names = [name for node in stage.nodes for name in node.results]
    assert names.index(first.arguments["input"].name) == names.index("layer_norm") + 1
    assert {stored.name: stored.placement for stored in stage.stored if stored.placement} == {
        "blocks.0.up.weight": {"tp": 0},
        "blocks.0.gate.weight": {"tp": 0},
        "blocks.0.down.weight": {"tp": 1},
    }
    assert all(stored.summed == () for stored in stage.stored)
    assert [str(extent) for extent in stage.tensors["mul"].dims[1:]] == ["16/tp"]


def test_what_comes_into_a_block_is_converted_outside():
    norm = ((S(0),), (R,), (R,)), (S(0),)
    stage = lowered(Tower, "tp=2", {"layer_norm_1": norm})
    assert conversions(stage) == [("shard", "add", ""), ("all_gather_invariant", "layer_norm_1", "blocks.1")]
    summed = {stored.name: stored.summed for stored in stage.stored if stored.summed}
    assert summed == {"blocks.1.norm.weight": ("tp",), "blocks.1.norm.bias": ("tp",)}


def test_sizes_of_one_rank_leave_nothing():
    wide = {
        name: (tuple((R, *layout) for layout in operands), (S(0), *result)) for name, (operands, result) in WIDE.items()
    }
    stored = {name: (S(1), *layout) for name, layout in WEIGHTS.items()}
    stage, plain = lowered(Tower, "dp=1,tp=2", wide, stored), lowered(Tower, "tp=2", WIDE, WEIGHTS)
    assert stage.axes == ("tp",) and str(stage).splitlines()[1:] != []
    assert [replace(node, frames=()) for node in stage.nodes] == [replace(node, frames=()) for node in plain.nodes]
    assert [s.placement for s in stage.stored] == [s.placement for s in plain.stored]


def test_gradients_are_summed_once_a_step_or_at_the_use_that_needs_it():
    both = {name: (((S(0),), (R,)), (S(0),)) for name in ("linear", "linear_1")}
    stage = lowered(Twice, "dp=2", both)
    assert stage.stored[0].summed == ("dp",)
    assert conversions(stage) == [("all_gather_invariant", "linear_1", ""), ("all_gather_invariant", "targets", "")]
    stage = lowered(Twice, "dp=2", {"linear": both["linear"]})
    assert stage.stored[0].summed == ()
    assert ("sum_gradient", "p_square_weight", "") in conversions(stage)  # around torch's own module


def test_sharded_parameters_are_gathered_at_each_use():
    use = ((S(0),), (R,)), (S(0),)
    rows = {"blocks.0.up.weight": (S(0),)}
    stage = lowered(half_frozen, "dp=2", {"linear": use, "linear_3": use}, rows)
    assert ("gather_parameter", "p_blocks_0_up_weight", "blocks.0") in conversions(stage)
    assert stage.gathers_again
    assert all(stored.summed == () for stored in stage.stored)  # frozen parameters have no gradients
    assert not lowered(Tower, "dp=2", {"linear": use}).gathers_again


def test_counts_of_the_whole_step():
    counted = {"ne": (((S(0),),), (S(0),)), "sum_1": (((S(0),),), (P,))}
    stage = lowered(Tower, "dp=2", counted, microbatches=2)
    assert list(stage.totals) == ["count"]
    assert [node.target for node in stage.total_nodes] == ["aten.ne.Scalar", "aten.sum.default", "all_reduce"]
    assert not {"aten.ne.Scalar", "aten.sum.default"} & {node.target for node in stage.nodes}
    division = stage.nodes[-1]
    total = stage.tensors[division.operands()[1]]
    assert (division.target, total.kind, total.attribute) == ("aten.div.Tensor", "total", "count")
    once = lowered(Tower, "dp=2", {})
    assert once.totals == {} and once.total_nodes == ()
