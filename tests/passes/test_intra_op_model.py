"""The integer program against brute force on small random graphs."""

import math

import pytest

from autoshard.passes.intra_ascent import Ascent
from autoshard.passes.intra_bill import Terms, bill
from autoshard.passes.intra_solve import OutOfMemory, Solver
from tests.passes.intra_stand_ins import brute_force, random_graph, tables_of

MESHES = ((2,), (2, 2), (2, 3))


@pytest.mark.parametrize("seed", range(24))
def test_the_program_finds_what_brute_force_finds(seed: int) -> None:
    graph = random_graph(seed, MESHES[seed % 3])
    tables, terms = tables_of(graph), Terms(microbatches=2, in_flight=2)
    solved = Solver(graph, tables, terms, (False, False), 20.0).solve()
    assert solved.objective == pytest.approx(brute_force(graph, tables, terms, (False, False)), rel=1e-5)
    assert solved.gap < 1e-4


@pytest.mark.parametrize("seed", range(24))
def test_with_a_memory_limit_too(seed: int) -> None:
    graph = random_graph(seed, MESHES[seed % 3])
    tables = tables_of(graph)
    remat = (False, None) if seed % 2 else (None, None)
    free = Solver(graph, tables, Terms(2, 2), (False, False), 20.0).solve()
    limit = int(free.bill.memory_bytes(free.remat, 2) * (0.6 + 0.05 * (seed % 8)))
    terms = Terms(2, 2, limit)
    best = brute_force(graph, tables, terms, remat)
    solver = Solver(graph, tables, terms, remat, 20.0)
    if math.isinf(best):
        with pytest.raises(OutOfMemory) as refusal:
            solver.solve()
        assert refusal.value.needed_bytes > limit
        return
    assert solver.solve().objective == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_can_have_a_price(seed: int) -> None:
    graph = random_graph(seed, MESHES[seed % 3])
    tables, terms = tables_of(graph), Terms(2, 2, None, 1e-4)
    solved = Solver(graph, tables, terms, (None, None), 20.0).solve()
    assert solved.objective == pytest.approx(brute_force(graph, tables, terms, (None, None)), rel=1e-5)


def test_the_same_program_twice_gives_the_same_choice() -> None:
    graph = random_graph(7, (2, 2), operators=6, choices=6)
    tables = tables_of(graph)
    first, second = (Solver(graph, tables, Terms(), (False, False), 20.0).solve() for _ in range(2))
    assert first.choice == second.choice
    assert bill(graph, tables, first.choice).step_s(first.remat, 1) == first.objective


@pytest.mark.parametrize("seed", range(12))
def test_messages_never_promise_too_much(seed: int) -> None:
    graph = random_graph(seed, MESHES[seed % 3])
    tables, terms, remat = tables_of(graph), Terms(2, 2, None, 1e-4), (False, seed % 2 == 0)
    ascent = Ascent(graph, tables, terms, remat)
    lower, choice = ascent.run(terms.price_s_per_byte, 40)
    best = brute_force(graph, tables, terms, remat)
    assert lower <= best * (1 + 1e-9)
    assert bill(graph, tables, choice).objective(remat, terms) >= best * (1 - 1e-9)
    spent = best - lower
    excess = ascent.excess()
    assert all((more <= spent * (1 + 1e-9) + 1e-9).any() for more in excess.strategies)
