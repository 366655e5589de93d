import pytest
import torch

from autoshard.cluster import parse_cluster
from autoshard.cost.compute import operator_seconds
from autoshard.cost.prices import Prices
from autoshard.plan import Mesh
from autoshard.program import Operator, TensorType


def prices(spec: str, optimizer: str = "adamw", **axes: int) -> Prices:
    cluster = parse_cluster(spec)
    return Prices(cluster, Mesh(tuple(axes), tuple(axes.values()), tuple(range(cluster.size))), optimizer)


def test_the_slowest_device_of_the_mesh_counts() -> None:
    x, w = TensorType((512, 512), torch.float32, True), TensorType((512, 512), torch.float32, True)
    op = Operator("aten.linear.default", (x, w), (x,))
    of = prices("1x1@A100-80GB+1x1@T4", tp=2)
    slow = parse_cluster("1x1@T4").devices[0]
    price = of.operator(op)
    assert (price.forward_s, price.backward_s) == operator_seconds(op, slow)
    assert price.communication_s == 0.0 and price.total_s == price.forward_s + price.backward_s
    assert of.memory_bytes == 16 * 10**9


def test_implementations_pay_for_what_they_communicate() -> None:
    of = prices("2x4@A100-80GB", dp=2, tp=4)
    logits, target = TensorType((4096, 8000), torch.float32, True), TensorType((4096,), torch.int64)
    loss = Operator("aten.cross_entropy_loss.default", (logits, target), (TensorType((), torch.float32, True),))
    price = of.operator(loss, (None, "vocab_cross_entropy"))
    assert price.communication_s == pytest.approx(
        of.collective_s("all_reduce", 1, 4 * 4096) + of.collective_s("all_reduce", 1, 3 * 4 * 4096)
    )
    assert price.communication_backward_s == 0.0
    image = TensorType((8, 64, 32, 32), torch.float32, True)
    norm = Operator("aten.batch_norm.default", (image,), (image,))
    price = of.operator(norm, ("batch_norm_synced", None))
    assert 0 < price.communication_backward_s < price.communication_s
    assert of.operator(norm, (None, None)).communication_s == 0.0


def test_optimizers_move_their_states() -> None:
    each = [prices("1x1@A100-80GB", name, dp=1).optimizer_s(1e9) for name in ("sgd", "momentum", "adamw")]
    assert each == sorted(each) and each[0] == pytest.approx(3e9 / (2039e9 * 0.8))


def test_transfers_pair_ranks_and_grow_with_bytes_and_distance() -> None:
    of = prices("2x4@A100-80GB", dp=8)
    first, second, far = (Mesh(("dp",), (2,), ranks) for ranks in ((0, 1), (2, 3), (4, 5)))
    assert of.transfer_s(1e6, first, second) < of.transfer_s(1e6, first, far) < of.transfer_s(2e6, first, far)
    one = Mesh(("dp",), (1,), (4,))
    assert of.transfer_s(1e8, first, one) > 0
    assert of.transfer_s(1e8, first, first) == 0.0


def test_one_rank_axes_communicate_for_nothing() -> None:
    of = prices("1x1@cpu", dp=1, tp=1)
    assert of.collective_s("all_reduce", 0, 1e9) == 0.0
