"""The traced program computes what the model does, to the last gradient, however it was traced."""

import pytest
import torch
from torch import fx, nn

from autoshard.errors import BadInput, UntraceableModel
from autoshard.passes.microbatch import CoupledSamples, sample_placements
from autoshard.passes.segment import segment
from autoshard.passes.trace import trace
from autoshard.placement import I, S
from autoshard.program import operator_name
from autoshard.workload import Workload
from models.encdec import encdec_tiny
from models.gpt import gpt_tiny
from models.llama import llama_8b, llama_tiny
from models.mlp import mlp
from models.resnet import resnet_tiny
from models.vit import vit_tiny
from tests import zoo

MODELS = (gpt_tiny, llama_tiny, mlp, vit_tiny, resnet_tiny, encdec_tiny, *zoo.ALL)
STACKS = (gpt_tiny, llama_tiny, zoo.hf_gpt2, zoo.hf_llama, zoo.hf_bert, zoo.hf_t5)


def loss_of(result):
    if isinstance(result, torch.Tensor):
        return result
    return result["loss"]


def run(program, model, inputs):
    """Loss and gradients by parameter name, from the program's graph on the model's own parameters."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    given = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in program.inputs:
                given.append(inputs[program.inputs[node.name].name])
            elif node.name in program.constants:
                given.append(program.constants[node.name])
            else:
                kind = program.parameters.get(node.name) or program.buffers[node.name]
                given.append(tensors[kind.name].detach().clone().requires_grad_(tensors[kind.name].requires_grad))
    interpreter = fx.Interpreter(fx.GraphModule(nn.Module(), program.graph), garbage_collect_values=False)
    interpreter.run(*given)
    values = {node.name: value for node, value in interpreter.env.items()}
    leaves = {kind.name: values[node] for node, kind in program.parameters.items() if kind.trainable}
    found = torch.autograd.grad(values[program.loss], list(leaves.values()), allow_unused=True)
    return values[program.loss], dict(zip(leaves, found, strict=True))


def named_inputs(program, workload):
    tensors = [value for value in (*workload.args, *workload.kwargs.values()) if isinstance(value, torch.Tensor)]
    return dict(zip([given.name for given in program.inputs.values()], tensors, strict=True))


def check(program, workload):
    model = workload.model.train()
    # The model changes its running statistics; the program, being functional, does not.
    state = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss, gradients = run(program, model, named_inputs(program, workload))
    model.zero_grad()
    expected = loss_of(model(*workload.args, **workload.kwargs))
    expected.backward()
    for name, buffer in model.named_buffers():
        buffer.copy_(state[name])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    named = dict(model.named_parameters())
    assert set(gradients) == {name for name, parameter in named.items() if parameter.requires_grad}
    for name, gradient in gradients.items():
        whole = named[name].grad
        assert (gradient is None or not gradient.any()) if whole is None else gradient is not None, name
        if whole is not None:
            error = (gradient - whole).abs().max()
            assert error <= 1e-9 * whole.abs().max() + 1e-14, (name, float(error))


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_program_equals_the_model(make):
    workload = make(dtype="float64")
    check(trace(workload), workload)


@pytest.mark.parametrize("make", STACKS, ids=lambda make: make.__name__)
def test_a_shortened_trace_is_the_full_one(make):
    """Five blocks: three are traced, two are copies. They must compute, and be built, as five traced ones."""
    workload = make(depth=5, dtype="float64")
    before = [name for name, _ in workload.model.named_modules()]
    short, full = trace(workload), trace(workload, shorten=False)
    assert [name for name, _ in workload.model.named_modules()] == before
    assert [operator_name(node) for node in short.operators()] == [operator_name(node) for node in full.operators()]
    assert [kind.name for kind in short.parameters.values()] == [kind.name for kind in full.parameters.values()]
    check(short, workload)


def test_both_front_ends_agree():
    workload = mlp(dtype="float64")
    exported, symbolic = trace(workload), trace(workload, frontend="fx")
    assert [operator_name(n) for n in exported.operators()] == [operator_name(n) for n in symbolic.operators()]
    check(symbolic, workload)


def test_tied_parameters_are_one():
    program = trace(gpt_tiny())
    tied = [parameter for parameter in program.parameters.values() if parameter.aliases]
    assert len(tied) == 1


def test_a_big_model_is_traced_without_weights():
    workload = llama_8b()
    program = trace(workload)
    assert all(parameter.is_meta for parameter in workload.model.parameters())
    keys = [found.key for found in segment(program).segments]
    assert max(keys.count(key) for key in keys) >= 30


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class ByValue(Toy):
    def forward(self, x):
        x = self.linear(x)
        if x.abs().max() > 10:
            x = x / 10
        return x.sum()


class ByNone(Toy):
    def forward(self, x, mask=None):
        x = self.linear(x)
        return (x if mask is None else x * mask).sum()


class NoLoss(Toy):
    def forward(self, x):
        return self.linear(x)


def test_control_flow_on_values_is_refused_with_its_line():
    with pytest.raises(UntraceableModel, match=r"(?s)test_trace\.py:\d+: `if x\.abs\(\)\.max\(\) > 10:`.*torch\.where"):
        trace(Workload(ByValue(), (torch.randn(8, 4),)))


def test_control_flow_on_none_works():
    workload = Workload(ByNone().double(), (torch.randn(8, 4, dtype=torch.float64),))
    check(trace(workload), workload)


def test_a_forward_without_a_loss_is_refused():
    with pytest.raises(BadInput, match="a scalar loss is needed"):
        trace(Workload(NoLoss(), (torch.randn(8, 4),)))


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_segments_hold_every_operator_once_in_order(make):
    program = trace(make())
    chain = segment(program)
    held = [name for found in chain.segments for name in found.nodes]
    position = {node.name: at for at, node in enumerate(program.graph.nodes)}
    assert sorted(held) == sorted(node.name for node in program.operators())
    made: set[str] = set()
    for found in chain.segments:
        assert {value.node for value in found.inputs} <= made
        assert list(found.nodes) == sorted(found.nodes, key=position.__getitem__)
        made |= set(found.nodes)


@pytest.mark.parametrize("make", (gpt_tiny, llama_tiny, mlp, vit_tiny, encdec_tiny), ids=lambda make: make.__name__)
def test_samples_are_followed(make):
    program = trace(make())
    found = sample_placements(program)
    for node, given in program.inputs.items():
        assert found[node].results == (S(0),) if given.batch_dim == 0 else found[node].results[0] != S(0)
    assert all(found[node].results == (I,) for node in program.parameters)


def test_batch_norm_couples_samples():
    with pytest.raises(CoupledSamples):
        sample_placements(trace(resnet_tiny()))
