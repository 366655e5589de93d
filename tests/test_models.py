"""The workloads of models/ and tests/zoo.py: they train, export, take sizes, and have the published sizes."""

import inspect

import pytest
import torch

from models.encdec import encdec_base, encdec_tiny
from models.gpt import gpt2_small, gpt_tiny
from models.llama import llama_8b, llama_70b, llama_405b, llama_tiny
from models.mlp import mlp
from models.resnet import resnet50, resnet_tiny
from models.vit import vit_base, vit_tiny
from tests import zoo

TINY = (mlp, gpt_tiny, llama_tiny, vit_tiny, resnet_tiny, encdec_tiny, *zoo.ALL)
PARAMETERS = (
    (gpt2_small, 124_439_808),
    (llama_8b, 8_030_261_248),
    (llama_70b, 70_553_706_496),
    (llama_405b, 405_853_388_800),
    (vit_base, 86_567_656),
    (resnet50, 25_557_032),
    (encdec_base, 63_346_688),
)


def loss_of(workload):
    result = workload.model(*workload.args, **workload.kwargs)
    return result if isinstance(result, torch.Tensor) else result.loss


@pytest.mark.parametrize("make", TINY)
def test_trains(make):
    workload = make(dtype="float64")
    loss = loss_of(workload)
    loss.backward()
    assert loss.shape == () and loss.isfinite()
    assert [name for name, p in workload.model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("make", TINY)
def test_exports_in_training_mode(make):
    workload = make(dtype="float64")
    program = torch.export.export(workload.model, workload.args, dict(workload.kwargs), strict=False)
    loss, exported = loss_of(make(dtype="float64")), program.module()(*workload.args, **workload.kwargs)
    torch.testing.assert_close(exported if isinstance(exported, torch.Tensor) else exported.loss, loss)


@pytest.mark.parametrize("make", TINY)
def test_same_seed_same_workload(make):
    first, second = make(), make()
    torch.testing.assert_close(first.model.state_dict(), second.model.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(first.args, second.args, rtol=0, atol=0)
    torch.testing.assert_close(dict(first.kwargs), dict(second.kwargs), rtol=0, atol=0)


@pytest.mark.parametrize("make", TINY)
def test_batch_is_a_keyword(make):
    workload = make(batch=4)
    tensors = [t for t in (*workload.args, *workload.kwargs.values()) if isinstance(t, torch.Tensor)]
    assert {t.shape[0] for t in tensors} == {4}


@pytest.mark.parametrize(("make", "count"), PARAMETERS)
def test_real_sizes_cost_nothing_and_count_as_published(make, count):
    workload = make()
    assert sum(p.numel() for p in workload.model.parameters()) == count
    tensors = (*workload.model.parameters(), *workload.model.buffers(), *workload.args)
    assert {t.device.type for t in tensors} == {"meta"}


@pytest.mark.parametrize(("tiny", "real"), [
    (gpt_tiny, gpt2_small), (llama_tiny, llama_8b), (llama_tiny, llama_70b), (llama_tiny, llama_405b),
    (vit_tiny, vit_base), (resnet_tiny, resnet50), (encdec_tiny, encdec_base),
])  # fmt: skip
def test_real_sizes_are_keywords_of_the_tiny_model(tiny, real):
    tiny_sizes, real_sizes = (inspect.signature(make).parameters for make in (tiny, real))
    assert tiny_sizes.keys() == real_sizes.keys()
    scaled = {name: size.default for name, size in tiny_sizes.items()}
    torch.testing.assert_close(loss_of(real(**scaled)), loss_of(tiny()), rtol=0, atol=0)


def test_rotary_attention_sees_distances_only():
    """The same tokens a few places later give the same products of queries and keys."""
    from models.llama import rotate

    model = llama_tiny(dtype="float64").model.model
    cos, sin = model.rotary_tables(torch.zeros(1, 12, 64, dtype=torch.float64))
    q, k = torch.randn(2, 1, 1, 4, 16, dtype=torch.float64)
    near = rotate(q, cos[:4], sin[:4]) @ rotate(k, cos[:4], sin[:4]).transpose(-1, -2)
    far = rotate(q, cos[8:], sin[8:]) @ rotate(k, cos[8:], sin[8:]).transpose(-1, -2)
    torch.testing.assert_close(near, far, rtol=1e-5, atol=1e-5)  # the tables are made in float32
