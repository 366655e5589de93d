"""Faults put on purpose into emitted folders: a wrong collective, group, placement, divisor. Each must be caught."""

import re
from dataclasses import dataclass, replace

import pytest

from autoshard import verify_folder
from autoshard.compiled import Compiled
from autoshard.errors import ProgramFailed
from autoshard.verify import TOLERANCE
from autoshard.verify_program import verify
from tests.equality import compiled, errors_of, subject

GRID = ("gpt_tiny", "dp2_tp2")
ZERO = ("gpt_tiny", "zero3")
SEQUENCE = ("gpt_tiny", "sequence")
PIPELINE = ("gpt_tiny", "pp2_dp2")
MICROBATCHES = ("mlp", "pp2_tp2")
UNEVEN = ("hf_bert", "dp4")  # ranks have different counts of labels that are not ignored
NORMS = ("resnet_tiny", "synced")


@dataclass(frozen=True)
class Fault:
    """In `file` of a cell's folder, `pattern` becomes `text`. caught: the category that differs, or words of a refusal.

    least: how large the error is at least.
    """

    name: str
    cell: tuple[str, str]
    file: str
    pattern: str
    text: str
    caught: str
    least: float = 1e-6


FAULTS = (
    # Values. A bias that begins as zeros shows a fault only after a step.
    Fault("all-reduce dropped", GRID, "model.py", r"all_reduce\((self\.mlp\(.+\)), self\.tp\)", r"\1", "loss"),
    Fault("addend on every rank", GRID, "model.py", r"keep_one\((self\.o_proj\.bias), self\.tp\)", r"\1", "loss"),
    Fault("residual twice", GRID, "model.py", r"(?m)return x \+ y$", "return x + x + y", "loss"),
    Fault(
        "all-reduce over the wrong group",
        GRID,
        "model.py",
        r"logits = all_reduce\(logits, self\.tp\)",
        "logits = all_reduce(logits, self.dp)",
        "loss",
    ),
    Fault(
        "loss summed over the wrong group",
        GRID,
        "model.py",
        r'(reduction="sum"\) / \w+), self\.dp\)',
        r"\1, self.tp)",
        "loss",
    ),
    Fault(
        "reduce-scatter made a slice",
        SEQUENCE,
        "model.py",
        r"reduce_scatter\((self\.mlp\(.+\)), dim=1",
        r"shard(\1, dim=1",
        "loss",
    ),
    Fault(
        "statistics of a rank's own samples",
        NORMS,
        "model.py",
        r"sync_batch_norm\((self\.conv1\(x\)), self\.bn1, self\.dp\)",
        r"self.bn1(\1)",
        "loss",
    ),
    # The loss.
    Fault("mean on each rank, summed", GRID, "model.py", r'reduction="sum"\) / \w+,', 'reduction="mean"),', "loss"),
    Fault(
        "average of averages",
        UNEVEN,
        "model.py",
        r'reduction="sum"\) / \w+, self\.dp\)',
        'reduction="mean") / 4, self.dp)',
        "loss",
    ),
    Fault(
        "count of the microbatch",
        MICROBATCHES,
        "stage_1.py",
        r'self\.totals\["count"\]',
        'self.denominators(targets)["count"]',
        "loss",
    ),
    # Shards.
    Fault(
        "shard along another dim",
        GRID,
        "model.py",
        r'"o_proj\.weight": {"tp": 1}',
        '"o_proj.weight": {"tp": 0}',
        "o_proj.weight",
    ),
    Fault(
        "shards of one weight swapped",
        GRID,
        "parameters.py",
        r"mesh\.box\(whole\[name\]\.shape, table\[name\]\)",
        'mesh.box(whole[name].shape, table[name], dist.get_rank() ^ ("k_proj" in name))',
        "loss",
        1e-9,
    ),
    Fault(
        "boxes of all ranks in reverse",
        GRID,
        "mesh.py",
        r"start, size = box\[placement\[axis\]\]",
        "place, (start, size) = self.axes[axis] - 1 - place, box[placement[axis]]",
        "gradients",
    ),
    # Gradients.
    Fault(
        "no sum over replicas",
        GRID,
        "model.py",
        r'summed_groups\(module, mesh, \("dp",\)\)',
        "summed_groups(module, mesh, ())",
        "gradients",
    ),
    Fault(
        "sum over copies too",
        GRID,
        "model.py",
        r'summed_groups\(module, mesh, \("dp",\)\)',
        'summed_groups(module, mesh, ("dp", "tp"))',
        "gradients",
    ),
    Fault("one bias not summed", ZERO, "model.py", r'"o_proj\.bias": \("dp",\)', '"o_proj.bias": ()', "gradients"),
    Fault(
        "gradients of parts not added up",
        GRID,
        "model.py",
        r"\n +x = sum_gradient\(x, self\.tp\)(\n +x = F\.gelu)",
        r"\1",
        "gradients",
    ),
    Fault(
        "gradient added up that is whole",
        GRID,
        "collectives.py",
        r"(def all_reduce\((?:.|\n)+?)lambda d: d\)",
        r"\1lambda d: summed(d, group))",
        "gradients",
    ),
    Fault(
        "gather with the other backward",
        GRID,
        "collectives.py",
        r"(def all_gather_invariant\((?:.|\n)+?)own_shard",
        r"\1reduced_shard",
        "gradients",
    ),
    Fault(
        "gathered weight's gradient not reduced",
        ZERO,
        "model.py",
        r"gather_parameter\((self\.up_proj\.weight)",
        r'__import__("collectives").all_gather_invariant(\1',
        "gradients",
    ),
    Fault(
        "reduce-scatter of gradients made a slice",
        ZERO,
        "collectives.py",
        r"return reduced_shard\(gradient, self\.dim, self\.group\)",
        "return own_shard(gradient, self.dim, self.group)",
        "gradients",
    ),
    Fault("tie cut", UNEVEN, "model.py", r"\n +self\.cls\.predictions\.decoder\.weight = .+", "", "gradients"),
    # Stages.
    Fault("tied gradients not added up", PIPELINE, "model.py", r"TIED = \[(.|\n)+?\n\]", "TIED = []", "gradients"),
    Fault(
        "crossing arrives along another dim",
        PIPELINE,
        "model.py",
        r'(Crossing\("x", 0, 1, {"dp": 0}), {"dp": 0}\)',
        r'\1, {"dp": 1})',
        "loss",
    ),
    Fault(
        "crossing arrives whole",
        PIPELINE,
        "model.py",
        r'(Crossing\("x", 0, 1, {"dp": 0}), {"dp": 0}\)',
        r"\1, {})",
        "failed",
    ),
    Fault(
        "crossing left whole",
        PIPELINE,
        "model.py",
        r'(Crossing\("x", 0, 1,) {"dp": 0}, {"dp": 0}\)',
        r'\1 {}, {"dp": 0})',
        "this rank's part of",
    ),
    Fault(
        "no gradient comes back",
        PIPELINE,
        "model.py",
        r'(Crossing\("x", 0, 1, {"dp": 0}, {"dp": 0})\)',
        r"\1, gradient=False)",
        "gradients",
    ),
    Fault(
        "one microbatch twice",
        PIPELINE,
        "microbatch.py",
        r"pieces = list\(value\.tensor_split\(microbatches, dim\)\)",
        "pieces = [value.tensor_split(microbatches, dim)[0]] * microbatches",
        "loss",
    ),
    # Buffers.
    Fault(
        "running variance not kept",
        NORMS,
        "operators.py",
        r"\n\s+norm\.running_var\.copy_\(variance\)",
        "",
        "buffers",
    ),
    Fault("batches not counted", NORMS, "operators.py", r"\n\s+norm\.num_batches_tracked\.add_\(1\)", "", "buffers"),
)
WATCHED = (
    "average of averages",
    "all-reduce dropped",
    "tied gradients not added up",
    "statistics of a rank's own samples",
)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wait for each other forever end within the time of a test."""
    monkeypatch.setattr(verify_folder, "TIMEOUT_S", 120.0)


def faulty(fault: Fault) -> Compiled:
    """The program of the fault's cell with the fault in it."""
    program = compiled(*fault.cell)
    text = program.files[fault.file]
    assert isinstance(text, str)
    changed = re.sub(fault.pattern, fault.text, text)
    assert changed != text, f"{fault.file} has no {fault.pattern}"
    return replace(program, files={**program.files, fault.file: changed})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught(fault: Fault) -> None:
    found, program = subject(fault.cell[0]), faulty(fault)
    if fault.caught not in ("loss", "gradients", "buffers"):
        with pytest.raises(ProgramFailed) as caught:
            errors_of(found, program)
        assert fault.caught in str(caught.value)
        return
    errors = errors_of(found, program)
    assert not errors.equal(TOLERANCE)
    assert errors[fault.caught] > fault.least, str(errors)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in WATCHED], ids=lambda fault: fault.name)
def test_verify_says_where(fault: Fault) -> None:
    result = verify(faulty(fault), steps=1)
    assert not result.equal
    assert result.first_divergence is not None and "models/" in result.first_divergence
