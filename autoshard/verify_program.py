"""`verify`: an emitted program against the original, step by step, on CPU processes of this machine, in float64."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoshard.cluster import Cluster, parse_cluster
from autoshard.compiled import PLAN, Compiled, read_plan, write_files
from autoshard.errors import BadInput
from autoshard.loading import load_workload
from autoshard.passes.trace import trace
from autoshard.plan import Plan
from autoshard.plan_check import check_fingerprints
from autoshard.program import Program
from autoshard.verify import TOLERANCE, Errors, compare, differing
from autoshard.verify_divergence import first_divergence
from autoshard.verify_folder import Folder, read_folder, record_folder
from autoshard.verify_reference import make_reference, on_cpu
from autoshard.verify_twin import make_twin, too_large
from autoshard.workload import Workload


@dataclass(frozen=True)
class VerifyResult:
    """What a comparison found.

    errors: largest relative error by category ("loss", "gradients", "buffers", "parameters"), errors.worst[category]
    with the name of the tensor. first_divergence: the first operator, in the user's lines, that differs; None where
    equal or not looked for. notes: what was compared in another form than the folder's own.
    """

    equal: bool
    errors: Errors
    first_divergence: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = ["equal" if self.equal else "NOT equal", str(self.errors)]
        if self.first_divergence is not None:
            lines.append(f"first divergence: {self.first_divergence}")
        return "\n".join((*lines, *(f"note: {note}" for note in self.notes)))


@dataclass(frozen=True)
class _Subject:
    """What is to be verified. near: where the workload's file may lie."""

    workload: Workload
    program: Program
    plan: Plan
    near: Path | None
    notes: tuple[str, ...] = ()


def verify(program: str | Path | Compiled, steps: int = 3) -> VerifyResult:
    """Train the emitted program and the original for `steps` steps of AdamW and compare losses, the first step's
    gradients, and buffers and parameters after the last.

    program: a folder that `Compiled.save` wrote, or the Compiled itself. Its plan must belong to the workload as it is
    now. Where this machine carries too few ranks or too little memory, a reduced twin is compared; the notes say so.
    Raises BadInput for a folder or workload that cannot be used, BadPlan where they do not belong together,
    ProgramFailed for a rank that fails.
    """
    if steps < 1:
        raise BadInput(f"steps is {steps}", help="give 1 or more")
    if isinstance(program, Compiled):
        subject = _Subject(program.workload, program.program, program.plan, None)
        with _written(program) as folder:
            return _verified(subject, folder, steps)
    path = Path(program)
    if not path.is_dir():
        raise BadInput(f"there is no folder '{path}'", help="give the folder that `autoshard compile ... --out` wrote")
    folder = read_folder(path)
    return _verified(_loaded(read_plan(path / PLAN), path), folder, steps)


def _loaded(plan: Plan, path: Path) -> _Subject:
    if not plan.workload:
        raise BadInput(
            "the plan does not say which workload it was made for",
            where=str(path / PLAN),
            help="compile from file.py:name, or verify what `compile` returned",
        )
    workload = load_workload(plan.workload, plan.settings, dtype=plan.dtype, near=path)
    program = trace(workload)
    check_fingerprints(plan, program, str(path / PLAN))
    return _Subject(workload, program, plan, path)


def _verified(subject: _Subject, folder: Folder, steps: int) -> VerifyResult:
    reason = too_large(subject.program, folder.world_size)
    if reason is None:
        return _compared(subject, folder, steps)
    twin = make_twin(subject.workload, subject.plan, reason, subject.near)
    with _written(Compiled(twin.plan, twin.files, twin.workload, twin.program)) as small:
        return _compared(_Subject(twin.workload, twin.program, twin.plan, subject.near, twin.notes), small, steps)


def _compared(subject: _Subject, folder: Folder, steps: int) -> VerifyResult:
    reference = make_reference(on_cpu(subject.workload, subject.near), subject.program)
    # The ranks first: they are forked, and this process has computed nothing yet.
    recordings = record_folder(folder, reference.state, reference.inputs, steps, dropout=reference.dropout)
    # All buffers, also those that no state dict has: the model is run again if it differs.
    buffers = reference.workload.model.named_buffers(remove_duplicate=False)
    state = {name: value.detach().clone() for name, value in (*buffers, *reference.state.items())}
    original = reference.record(steps)
    errors = compare(original, recordings)
    divergence = None
    if not errors.equal(TOLERANCE):
        divergence = first_divergence(
            subject.program,
            subject.plan,
            _cluster(subject.plan),
            folder,
            state,
            reference.inputs,
            differing(original, recordings, "gradients"),
        )
    return VerifyResult(errors.equal(TOLERANCE), errors, divergence, subject.notes + reference.notes)


def _cluster(plan: Plan) -> Cluster:
    """The plan's cluster, for the prices that chose its conversions; a plain one where only a file describes it."""
    try:
        return parse_cluster(plan.cluster)
    except BadInput:
        devices = max(device for stage in plan.stages for device in stage.mesh.devices) + 1
        return parse_cluster(f"1x{devices}@cpu")


@contextlib.contextmanager
def _written(compiled: Compiled) -> Iterator[Folder]:
    """The files in a folder for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="autoshard-") as path:
        write_files(compiled.files, Path(path))
        yield read_folder(Path(path))
