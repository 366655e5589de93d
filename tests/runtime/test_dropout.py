"""Dropout masks: the same on copies, others on shards."""

import torch
import torch.nn.functional as F

from autoshard.ranks import run_ranks
from autoshard.runtime.mesh import Mesh
from autoshard.runtime.operators import attention_with_dropout, dropout


def draw(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = Mesh({"dp": 2, "tp": 2})
    torch.manual_seed(0)
    x = torch.ones(4, 4, 8, 8)
    y = attention_with_dropout(x, x, x, 0.5, True, mesh.group("tp"), is_causal=True)
    return dropout(x, 0.5, True, mesh.group("tp")), y


def test_copies_agree_and_shards_differ() -> None:
    drawn = run_ranks(draw, 4)  # ranks 0 and 2 are copies, 0 and 1 are shards
    for number in range(2):
        assert torch.equal(drawn[0][number], drawn[2][number])
        assert torch.equal(drawn[1][number], drawn[3][number])
        assert not torch.equal(drawn[0][number], drawn[1][number])


def test_nothing_is_dropped_in_evaluation() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind()
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert torch.equal(attention_with_dropout(q, k, v, 0.5, False, is_causal=True), expected)
