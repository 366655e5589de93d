"""The intra-operator pass on small traced models: what experts do comes out, pins and limits hold."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autoshard.cluster import parse_cluster
from autoshard.errors import BadInput, InfeasiblePlan
from autoshard.passes.intra_op import ChainProblem, ChainSolution, Pin, solve_chain
from autoshard.passes.segment import segment
from autoshard.passes.trace import trace
from autoshard.placement import I, P, R, S
from autoshard.plan import Mesh
from autoshard.program import Program
from autoshard.workload import Workload


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int, hidden: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def stack(width: int, hidden: int, depth: int, batch: int) -> Program:
    with torch.device("meta"):
        model, x = Stack(width, hidden, depth), torch.empty(batch, width)
    return trace(Workload(model, (x,)))


@pytest.fixture(scope="module")
def small() -> Program:
    return stack(256, 1024, 4, 512)


def problem(
    program: Program,
    axes: tuple[str, ...] = ("dp",),
    sizes: tuple[int, ...] = (4,),
    cluster: str = "1x8@A100-80GB",
    **options: object,
) -> ChainProblem:
    chain = segment(program)
    count = 1
    for size in sizes:
        count *= size
    mesh = Mesh(axes, sizes, tuple(range(count)))
    whole = (0, len(chain.segments))
    return ChainProblem(program, chain, whole, parse_cluster(cluster), mesh, **options)  # type: ignore[arg-type]


def layout(solution: ChainSolution, name: str) -> tuple[object, ...]:
    return solution.parameters[name]


def test_large_weights_are_cut_by_columns_then_rows() -> None:
    found = solve_chain(problem(stack(8192, 32768, 2, 2048), ("tp",)))
    assert layout(found, "blocks.0.up.weight") == (S(0),)
    assert layout(found, "blocks.0.down.weight") == (S(1),)


def test_many_samples_are_split_and_gradients_summed_once() -> None:
    found = solve_chain(problem(stack(1024, 4096, 2, 65536), ("tp",), cluster="4x1@A100-80GB"))
    assert set(found.parameters.values()) == {(I,)}
    linears = [plan for name, plan in found.operators.items() if name.startswith("linear")]
    assert linears and all(plan.operands == ((S(0),), (R,)) for plan in linears)
    assert sum(cost.once_s for cost in found.costs) > 0


def test_a_tight_limit_shards_the_parameters_over_the_data_axis() -> None:
    program = stack(1024, 4096, 2, 8192)
    free = solve_chain(problem(program, cluster="4x1@A100-80GB"))
    assert set(free.parameters.values()) == {(I,)}
    held = sum(cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes for cost in free.costs)
    limit = free.memory_bytes - held // 2
    tight = solve_chain(problem(program, cluster="4x1@A100-80GB", memory_limit_bytes=limit))
    assert tight.memory_bytes <= limit
    assert tight.objective > free.objective
    assert any(layout_[0].is_sharded for layout_ in tight.parameters.values())
    assert tight.gap < 1e-4


def test_equal_blocks_are_solved_once_and_lose_little(small: Program) -> None:
    folded = solve_chain(problem(small, ("dp", "tp"), (2, 2)))
    unfolded = solve_chain(problem(small, ("dp", "tp"), (2, 2), fold=False))
    assert unfolded.objective <= folded.objective * (1 + 1e-6)
    blocks = [
        {name: layout_ for name, layout_ in folded.parameters.items() if f"blocks.{i}." in name} for i in range(4)
    ]
    assert all(list(block.values()) == list(blocks[0].values()) for block in blocks)
    same = [cost for number, cost in enumerate(folded.costs) if small_path(small, number)]
    assert len(same) >= 3 and len(set(same)) <= 2
    assert sum(
        cost.forward_s + cost.backward_s + cost.once_s + cost.optimizer_s for cost in folded.costs
    ) == pytest.approx(folded.objective)


def small_path(program: Program, number: int) -> bool:
    return segment(program).segments[number].path.startswith("blocks")


def test_folding_loses_nothing_where_all_blocks_agree(small: Program) -> None:
    pins = tuple(
        Pin(f"blocks.*.{name}", placement, "tp") for name, placement in (("norm", I), ("up", S(1)), ("down", P))
    )
    folded, unfolded = (solve_chain(problem(small, ("tp",), pins=pins, fold=fold)) for fold in (True, False))
    assert unfolded.objective == pytest.approx(folded.objective, rel=1e-5)


def test_pins_hold(small: Program) -> None:
    pins = (
        Pin("blocks.*.up.weight", S(0), "tp"),
        Pin("blocks.2.norm", S(0), "tp"),
        Pin("input:x", S(0), "dp"),
    )
    found = solve_chain(problem(small, ("dp", "tp"), (2, 2), pins=pins))
    assert all(found.parameters[f"blocks.{i}.up.weight"][1] == S(0) for i in range(4))
    normed = [plan for name, plan in found.operators.items() if name.startswith("layer_norm")]
    assert normed[2].results[0][1] == S(0)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (Pin("blocks.9.up.weight", S(0), "tp"), "names no parameter, input or module"),
        (Pin("embed.weight", S(0), "ep"), "names axis 'ep'"),
        (Pin("embed.weight", P, "tp"), "stores a parameter as P"),
    ],
)
def test_pins_that_name_nothing_are_refused(small: Program, pin: Pin, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        solve_chain(problem(small, ("dp", "tp"), (2, 2), pins=(pin,)))


def test_pins_that_leave_nothing_are_refused(small: Program) -> None:
    with pytest.raises(InfeasiblePlan, match=r"pin blocks.0.norm=S\(1\)@tp leaves no way to run layer_norm"):
        solve_chain(problem(small, ("tp",), pins=(Pin("blocks.0.norm", S(1), "tp"),)))


def test_what_does_not_fit_says_by_how_much_and_what_is_largest(small: Program) -> None:
    with pytest.raises(InfeasiblePlan) as refusal:
        solve_chain(problem(small, memory_limit_bytes=2**20))
    text = str(refusal.value)
    assert "per device, 1.00 MiB are there:" in text and "short" in text
    assert "largest tensors:" in text and "optimizer state" in text and "more devices" in text


def test_running_blocks_again_takes_time_and_saves_bytes(small: Program) -> None:
    plain = solve_chain(problem(small, remat=False, in_flight=4, microbatches=4))
    again = solve_chain(problem(small, remat=True, in_flight=4, microbatches=4))
    assert again.remat and all(path.startswith("blocks") for path in again.remat)
    assert again.objective > plain.objective
    assert sum(cost.saved_bytes for cost in again.costs) < sum(cost.saved_bytes for cost in plain.costs)
    assert again.memory_bytes < plain.memory_bytes
    chosen = solve_chain(
        problem(small, in_flight=4, microbatches=4, memory_limit_bytes=(again.memory_bytes + plain.memory_bytes) // 2)
    )
    assert plain.objective < chosen.objective <= again.objective * (1 + 1e-6)


def test_values_that_cross_stages_are_whole_or_split_by_samples(small: Program) -> None:
    whole = problem(small, ("dp", "tp"), (2, 2), microbatches=2)
    middle = len(whole.chain.segments) // 2
    first = solve_chain(replace(whole, segments=(0, middle)))
    ((value, sent),) = first.sends.items()
    assert sent[0] == S(0) and sent[1].kind in "IS"
    second = solve_chain(replace(whole, segments=(middle, len(whole.chain.segments)), receives={value: sent}))
    assert dict(second.receives) == {value: sent}
    assert set(first.operators).isdisjoint(second.operators)
    assert len(first.costs) + len(second.costs) == len(whole.chain.segments)


def test_one_device_needs_no_choice(small: Program) -> None:
    alone = solve_chain(problem(small, (), ()))
    assert all(plan.implementations == () for plan in alone.operators.values())
    ones = solve_chain(problem(small, ("dp", "tp"), (1, 1)))
    assert all(layout_ == (I, I) for layout_ in ones.parameters.values())
    assert alone.objective == pytest.approx(ones.objective)
    assert sum(cost.collectives_s for cost in ones.costs) == pytest.approx(0.0, abs=1e-12)


def test_the_same_problem_twice_has_the_same_answer(small: Program) -> None:
    first, second = (solve_chain(problem(small, ("dp", "tp"), (2, 2))) for _ in range(2))
    assert str(first).splitlines()[1:] == str(second).splitlines()[1:]
