"""Samples are followed through real mask code, to the value, and what couples them is refused."""

import pytest
import torch
from torch import fx, nn

from autoshard.passes.microbatch import CoupledSamples, sample_placements
from autoshard.passes.trace import trace
from autoshard.placement import P
from autoshard.program import operand_values, tensor_operands
from autoshard.workload import Workload
from models.encdec import encdec_tiny
from models.gpt import gpt_tiny
from tests import zoo

BATCH, LENGTH, WIDTH = 8, 6, 5


def values(program, model, inputs, whole=None, found=None):
    """Every node's value. Of a microbatch, where `whole` has the batch's: sums that are used whole come from there."""
    state = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    held = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            kind = program.parameters.get(node.name) or program.buffers.get(node.name)
            given = program.inputs.get(node.name)
            held[node] = (
                inputs[given.name] if given else state[kind.name].detach() if kind else program.constants[node.name]
            )
        elif node.op == "call_function":
            used = dict(held)
            if found is not None and node.name in found:
                for source, value, want in zip(
                    tensor_operands(node), operand_values(node), found[node.name].operands, strict=True
                ):
                    if want != P and found[value.node].results[value.index] == P:
                        used[source] = whole[source]
            args, kwargs = fx.map_arg((node.args, node.kwargs), used.__getitem__)
            held[node] = node.target(*args, **kwargs)
    return held


def check_microbatches(workload, count=2):
    """The same graph run on each microbatch holds, node by node, the parts of what it holds on the batch."""
    program = trace(workload)
    found = sample_placements(program)
    tensors = [value for value in (*workload.args, *workload.kwargs.values()) if isinstance(value, torch.Tensor)]
    inputs = dict(zip([given.name for given in program.inputs.values()], tensors, strict=True))
    dims = {given.name: given.batch_dim for given in program.inputs.values()}
    whole = values(program, workload.model, inputs)
    parts = []
    for at in range(count):
        mine = {name: x if dims[name] is None else x.chunk(count, dims[name])[at] for name, x in inputs.items()}
        parts.append(values(program, workload.model, mine, whole, found))
    for node in whole:
        for index, placement in enumerate(found[node.name].results if node.name in found else ()):
            pieces, expected = [part[node] for part in parts], whole[node]
            if isinstance(expected, (tuple, list)):
                pieces, expected = [piece[index] for piece in pieces], expected[index]
            if placement.is_sharded:
                pieces = [torch.cat(pieces, placement.dim)]
            elif placement == P:
                pieces = [sum(pieces)]
            for piece in pieces:  # some models make their loss in float32, whatever they are in
                torch.testing.assert_close(piece, expected, rtol=1e-6, atol=1e-12)
    return found


@pytest.mark.parametrize("make", (gpt_tiny, encdec_tiny, *zoo.ALL), ids=lambda make: make.__name__)
def test_microbatches_make_the_batch(make):
    check_microbatches(make(dtype="float64"))


def numbers(x):
    return torch.arange(x.shape[0])


def lookup_mask(x, ids):
    rows, columns = numbers(x)[:, None, None], torch.arange(x.shape[1])
    allowed = (ids > 0)[rows, columns[None, None, :]] & (columns[:, None] >= columns)
    return torch.where(allowed, x @ x.mT, 0)


def vmapped_mask(x, ids):
    def allowed(row, query, key):
        return torch.ops.aten.index.Tensor(ids > 0, [row, key]) & (key <= query)

    along = torch.arange(x.shape[1])
    for dims in ((None, None, 0), (None, 0, None), (0, None, None)):
        allowed = torch.vmap(allowed, in_dims=dims)
    return torch.where(allowed(numbers(x), along, along), x @ x.mT, 0)


def target_scores(x, ids):
    flat = x.flatten(0, 1)
    return flat[torch.arange(flat.shape[0]), ids.flatten()]


def shifted(x, ids):
    made = x.new_zeros(x.shape)
    made[:, 1:] = x[:, :-1]
    return made.type_as(x)


LOCAL = {
    "mask": lookup_mask,
    "vmapped mask": vmapped_mask,
    "last token": lambda x, ids: x[numbers(x), (ids > 1).sum(1) - 1],
    "score of a target": target_scores,
    "some of each": lambda x, ids: x[numbers(x)[:, None], ids[:, :3]],
    "moved": lambda x, ids: x[numbers(x)[:, None], :, torch.tensor([[3, 1]])],
    "shifted": shifted,
    "like": lambda x, ids: x + numbers(x).new_ones((x.shape[0], 1, 1)),
}
COUPLED = {
    "numbered": (lambda x, ids: x + numbers(x)[:, None, None], r"arange.* makes a tensor of \[8\] that tells the"),
    "compared": (lambda x, ids: x * (numbers(x) > 3)[:, None, None], "arange"),
    "backwards": (lambda x, ids: x[numbers(x).flip(0)], "arange"),
    "next": (lambda x, ids: x[(numbers(x) + 1) % x.shape[0]], "arange"),
    "another dim": (lambda x, ids: x[:, numbers(x) % x.shape[1]], "arange"),
    "summed up": (lambda x, ids: x.cumsum(0), r"cumsum.* couples the samples of a batch \(linear \[8, 6, 5\] S\(0\)\)"),
}


class Toy(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.linear, self.middle = nn.Linear(WIDTH, WIDTH), middle

    def forward(self, x, ids):
        return self.middle(self.linear(x), ids).square().sum()


def toy(middle):
    torch.manual_seed(0)
    x, ids = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64), torch.randint(WIDTH, (BATCH, LENGTH))
    return Workload(Toy(middle).double(), (x, ids))


@pytest.mark.parametrize("name", LOCAL)
def test_lookups_at_each_own_sample_are_followed(name):
    check_microbatches(toy(LOCAL[name]), count=4)


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_samples_are_refused(name):
    middle, message = COUPLED[name]
    with pytest.raises(CoupledSamples, match=message):
        sample_placements(trace(toy(middle)))
