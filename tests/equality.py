"""Tiny models, configurations, and an emitted program of one under the other, compared with the model step by step.

What a model costs once is made once: its trace, its segments, and the recording of its own training, which runs in a
fork so that this process, which forks the ranks, has computed nothing. A plan and its folder are made for each pair.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from autoshard.api import load_workload
from autoshard.cluster import parse_cluster
from autoshard.compiled import Compiled, write_files
from autoshard.compiler import PlanOptions, emitting, parse_mesh, planning, run_passes
from autoshard.passes.segment import Chain, segment
from autoshard.passes.trace import trace
from autoshard.program import Program
from autoshard.ranks import run_ranks
from autoshard.verify import Errors, Recording, compare
from autoshard.verify_folder import read_folder, record_folder
from autoshard.verify_reference import Reference, make_reference
from autoshard.workload import Workload

ROOT = Path(__file__).parent.parent
STEPS = 3

MODELS: Mapping[str, str] = {
    "gpt_tiny": "models/gpt.py",
    "llama_tiny": "models/llama.py",
    "mlp": "models/mlp.py",
    "vit_tiny": "models/vit.py",
    "resnet_tiny": "models/resnet.py",
    "encdec_tiny": "models/encdec.py",
    **dict.fromkeys(("hf_gpt2", "hf_llama", "hf_bert", "hf_vit", "hf_t5"), "tests/zoo.py"),
}


@dataclass(frozen=True)
class Configuration:
    """What is fixed of the search. options: of PlanOptions. split: whether weights are pinned to shards over dp."""

    ranks: int = 4
    mesh: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    split: bool = False


CONFIGURATIONS: Mapping[str, Configuration] = {
    "dp4": Configuration(4, "dp=4", {"stages": 1}),
    "tp4": Configuration(4, "tp=4", {"stages": 1}),
    "dp2_tp2": Configuration(4, "dp=2,tp=2", {"stages": 1}),
    "zero3": Configuration(4, "dp=4", {"stages": 1}, split=True),
    "pp2_tp2": Configuration(4, "tp=2", {"stages": 2, "microbatches": 2}),
    "pp2_dp2": Configuration(4, "dp=2", {"stages": 2, "microbatches": 2}),
    "planned": Configuration(4),
    "pp2_dp2_tp2": Configuration(8, "dp=2,tp=2", {"stages": 2, "microbatches": 2}),
    "gpipe": Configuration(4, "dp=2", {"stages": 2, "microbatches": 4, "schedule": "gpipe"}),
    # Layouts that these models do not get by themselves, for their collectives.
    "sequence": Configuration(4, "dp=2,tp=2", {"stages": 1, "pins": {"blocks.?": "S(1)@tp"}}),
    "synced": Configuration(4, "dp=4", {"stages": 1, "pins": {"*bn?": "S(0)@dp"}}),
}
COUPLED = frozenset({"resnet_tiny"})  # batch norm couples the samples of a step: no microbatches


@dataclass(frozen=True)
class Subject:
    """A model with what all configurations share."""

    workload: Workload
    program: Program
    chain: Chain
    reference: Reference
    recording: Recording


@cache
def subject(model: str) -> Subject:
    """The model traced, and its training recorded."""
    workload = load_workload(f"{ROOT / MODELS[model]}:{model}", {})
    program = trace(workload)
    return _recorded(workload, program, segment(program))


def with_args(found: Subject, *args: Tensor) -> Subject:
    """The same model trained on another batch."""
    return _recorded(replace(found.workload, args=args), found.program, found.chain)


def _recorded(workload: Workload, program: Program, chain: Chain) -> Subject:
    reference = make_reference(workload, program)
    return Subject(workload, program, chain, reference, run_ranks(_record, 1, reference)[0])


def _record(_rank: int, _world_size: int, reference: Reference) -> Recording:
    return reference.record(STEPS)


@cache
def compiled(model: str, name: str) -> Compiled:
    """The model's program under a configuration."""
    found, configuration = subject(model), CONFIGURATIONS[name]
    cluster = parse_cluster(f"1x{configuration.ranks}@cpu")
    mesh = None if configuration.mesh is None else parse_mesh(configuration.mesh)
    options = PlanOptions(mesh=mesh, **configuration.options)
    if model in COUPLED and options.microbatches is not None:
        options = replace(options, microbatches=1)
    if configuration.split:
        options = replace(options, pins=_split_weights(found.workload.model, configuration.ranks))
    plan_pass = planning(cluster, options, baselines=False)[-1]
    given = {"workload": found.workload, "program": found.program, "chain": found.chain}
    results = run_passes((plan_pass, *emitting(cluster)), given)
    return Compiled(results["plan"], results["files"], found.workload, found.program)


def _split_weights(model: nn.Module, ranks: int) -> dict[str, str]:
    """Every weight that has a row for each rank."""
    weights = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
    return {name: "S(0)@dp" for name, weight in weights.items() if weight.shape[0] >= ranks}


def errors_of(found: Subject, program: Compiled) -> Errors:
    """Train an emitted program of the subject's model on its ranks and compare it with the model."""
    reference = found.reference
    with tempfile.TemporaryDirectory(prefix="equality-") as path:
        write_files(program.files, Path(path))
        folder = read_folder(Path(path))
        ranks = record_folder(folder, reference.state, reference.inputs, STEPS, dropout=reference.dropout)
    return compare(found.recording, ranks)
