"""The fork runner: results, and the first real reason when a rank fails."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from autoshard.errors import BadPlan
from autoshard.ranks import RanksFailed, run_ranks


def test_results_come_in_the_order_of_ranks() -> None:
    def work(rank: int, ranks: int, factor: int) -> torch.Tensor:
        x = torch.tensor(float(rank))
        dist.all_reduce(x)
        return x + factor * rank

    assert run_ranks(work, 3, 10) == [3, 13, 23]


def test_the_first_real_traceback_is_reported() -> None:
    def work(rank: int, ranks: int) -> None:
        if rank == 2:
            raise ZeroDivisionError("the real reason")
        dist.all_reduce(torch.zeros(2))

    with pytest.raises(RanksFailed, match="the real reason") as failure:
        run_ranks(work, 3)
    assert failure.value.rank == 2


def test_a_rank_that_dies_is_reported() -> None:
    def work(rank: int, ranks: int) -> None:
        if rank == 1:
            os._exit(7)
        dist.all_reduce(torch.zeros(2))

    with pytest.raises(RanksFailed, match="rank 1 failed:\nthe process ended with code 7"):
        run_ranks(work, 2)


def test_late_ranks_are_killed() -> None:
    def work(rank: int, ranks: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.zeros(2))
        time.sleep(600)

    begin = time.monotonic()
    with pytest.raises(RanksFailed, match=r"no answer before the deadline|Timed out"):
        run_ranks(work, 2, timeout_s=1.5)
    assert time.monotonic() - begin < 20


def test_refusals_keep_their_type() -> None:
    def work(rank: int, ranks: int) -> None:
        if rank == 0:
            raise BadPlan("not this model", where="plan.json", help="plan again")
        dist.all_reduce(torch.zeros(2))

    with pytest.raises(BadPlan) as refusal:
        run_ranks(work, 2)
    assert (refusal.value.where, refusal.value.help) == ("plan.json", "plan again")


def test_ranks_after_autograd_in_the_parent() -> None:
    x = torch.randn(200, 200, requires_grad=True)
    (x @ x).sum().backward()

    def work(rank: int, ranks: int) -> float:
        y = torch.randn(200, 200, requires_grad=True)
        (y @ y).sum().backward()
        return float(y.grad.shape[0])

    assert run_ranks(work, 4) == [200.0] * 4
