"""Clipping in the user's loop: by the norm over all ranks, tied weights counted once."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autoshard.parallelize import clip_grad_norm_, full_state_dict, parallelize
from autoshard.ranks import run_ranks
from tests.test_parallelize import batches, make

MAX_NORM = 0.05


def clipped(rank: int, ranks: int, fixed: dict[str, Any] | None) -> tuple[list[float], dict[str, Tensor]]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if fixed is not None:
        parallelize(model, cluster=f"1x{ranks}@cpu", **fixed)
    norms = []
    for tokens, targets in batches():
        model(tokens, targets=targets)["loss"].backward()
        norms.append(float(clip_grad_norm_(model, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: value.clone() for name, value in full_state_dict(model).items()}


@pytest.mark.parametrize(
    "fixed", [{"mesh": "dp=2,tp=2", "stages": 1}, {"mesh": "tp=2", "stages": 2, "microbatches": 2}], ids=str
)
def test_every_rank_scales_alike(fixed: dict[str, Any]) -> None:
    expected, state = clipped(0, 1, None)
    assert min(expected) > MAX_NORM
    for norms, found in run_ranks(clipped, 4, fixed, timeout_s=300):
        assert norms == pytest.approx(expected, rel=1e-9)
        for name, value in found.items():
            torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-12)
