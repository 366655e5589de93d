"""What `compile` hands back: the plan and the files of its program, and how they become a folder."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autoshard.errors import BadInput, BadPlan
from autoshard.plan import Plan
from autoshard.plan_file import from_json
from autoshard.program import Program
from autoshard.workload import Workload

PLAN = "plan.json"
_OURS_ONLY = ("stage_*.py", "weights.pt")  # of an earlier compile: not to be left beside a program that has none


@dataclass(frozen=True)
class Compiled:
    """A plan with its emitted program. files: name -> content. workload, program: what was compiled."""

    plan: Plan
    files: Mapping[str, str | bytes] = field(repr=False)
    workload: Workload = field(repr=False)
    program: Program = field(repr=False)

    def save(self, folder: str | Path) -> Path:
        """Write the files into `folder`, made if need be; returns it.

        A folder that an earlier compile wrote (it has a readable plan.json) is written anew: its files of the same
        names are replaced, stages and weights that are no more are removed, and whatever else is in it stays. All
        files are written beside it first, and then renamed into it, plan.json last.
        Raises BadInput for a folder that is not empty and not ours, and where it cannot be written.
        """
        target = Path(folder)
        check_folder(target)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        except OSError as error:
            raise _unwritable(target, error) from error
        try:
            write_files(self.files, draft)
            if target.exists() and any(target.iterdir()):
                _replace_files(draft, target)
            else:
                with contextlib.suppress(FileNotFoundError):
                    target.rmdir()
                draft.chmod(0o777 & ~_umask())
                os.replace(draft, target)
        except OSError as error:
            raise _unwritable(target, error) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return target


def check_folder(folder: Path) -> None:
    """Raise BadInput unless a program may be written into `folder`: it is not there, empty, or written by us."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise BadInput(f"'{folder}' is a file", help="name a folder to write to")
    if any(folder.iterdir()) and not is_ours(folder):
        raise BadInput(
            f"folder '{folder}' is not empty and was not written by autoshard",
            help="name another folder, or empty this one",
        )


def is_ours(folder: Path) -> bool:
    """Whether an earlier compile wrote the folder: its plan.json can be read."""
    try:
        read_plan(folder / PLAN)
    except (BadInput, OSError):
        return False
    return True


def read_plan(path: Path) -> Plan:
    """The plan of a file. Raises BadPlan, also for a file that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadPlan(f"cannot read the plan '{path}': {reason}", help="give the path of a plan.json") from error
    return from_json(text, where=str(path))


def write_files(files: Mapping[str, str | bytes], folder: Path) -> None:
    """Write files by name into a folder that is there; a name may lie in a folder of its own."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def _replace_files(draft: Path, target: Path) -> None:
    names = sorted(path.relative_to(draft) for path in draft.rglob("*") if path.is_file())
    for name in sorted(names, key=lambda name: name == Path(PLAN)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(draft / name, target / name)
    for pattern in _OURS_ONLY:
        for stale in target.glob(pattern):
            if Path(stale.name) not in names:
                stale.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(folder: Path, error: OSError) -> BadInput:
    return BadInput(f"cannot write folder '{folder}': {error.strerror}", help="name a folder that can be written to")
