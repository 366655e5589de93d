"""What a user may fix of the search, and the refusals of what cannot be."""

import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from autoshard.errors import BadInput
from autoshard.placement import product
from autoshard.schedule import NAMES

MeshShape = tuple[tuple[str, int], ...]
"""Axes of one stage's mesh with their sizes, outermost first: (("dp", 2), ("tp", 4))."""


@dataclass(frozen=True)
class PlanOptions:
    """A part of the search that is fixed; None and the defaults leave it free.

    mesh: of one stage. stages, microbatches: counts. schedule: "auto", "gpipe" or "1f1b". optimizer: "adamw", "adam",
    "momentum" or "sgd". pins: "parameter pattern" or "input:name" -> "S(0)@tp". cut_before: module paths that begin a
    stage. memory_limit_bytes: of every device, where less than it has. time_limit_s: seconds the search may take (None:
    as many as it needs; a limit makes the answer depend on the machine's speed). dtype: the dtype the workload was
    built with, for the record.
    """

    mesh: MeshShape | None = None
    stages: int | None = None
    microbatches: int | None = None
    schedule: str = "auto"
    optimizer: str = "adamw"
    pins: Mapping[str, str] = field(default_factory=dict)
    cut_before: tuple[str, ...] = ()
    memory_limit_bytes: int | None = None
    time_limit_s: float | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.schedule not in ("auto", *NAMES):
            raise BadInput(f"'{self.schedule}' is not a schedule", help=f"known schedules: auto, {', '.join(NAMES)}")
        for name, count in (("stages", self.stages), ("microbatches", self.microbatches)):
            if count is not None and count < 1:
                raise BadInput(f"{name} is {count}", help="give 1 or more")
        for name, limit in (("memory limit", self.memory_limit_bytes), ("time limit", self.time_limit_s)):
            if limit is not None and limit <= 0:
                raise BadInput(f"{name} is {limit}", help="give a number above 0")


_TAKEN = frozenset({"self", "torch", "nn", "F", "dist", "mesh", "module", "training", "totals", "microbatches"})
_AXIS = re.compile(r"([A-Za-z_]\w*)=(\d+)")


def parse_mesh(text: str) -> MeshShape:
    """Read "dp=2,tp=4". Raises BadInput for what is no axis, an axis named twice and a size of 0."""
    axes: list[tuple[str, int]] = []
    for part in map(str.strip, text.split(",")):
        match = _AXIS.fullmatch(part)
        if match is None or int(match[2]) < 1:
            raise BadInput(f"'{part}' is not a mesh axis", where=f"mesh '{text}'", help='write "dp=2,tp=4"')
        if keyword.iskeyword(match[1]) or hasattr(nn.Module, match[1]) or match[1] in _TAKEN:
            raise BadInput(
                f"'{match[1]}' has another meaning in emitted code",
                where=f"mesh '{text}'",
                help="name the axis tp, say",
            )
        if match[1] in dict(axes):
            raise BadInput(f"axis {match[1]} is named twice", where=f"mesh '{text}'")
        axes.append((match[1], int(match[2])))
    return tuple(axes)


def format_mesh(shape: MeshShape) -> str:
    """ "dp=2,tp=4"; "one device" where there is no axis."""
    return ",".join(f"{axis}={size}" for axis, size in shape) or "one device"


def check_options(options: PlanOptions, devices: int, segments: int, batch: int) -> None:
    """Refuse numbers that do not go together. Raises BadInput that names them."""
    _check_stages(options, devices, segments)
    dp, count = dict(options.mesh or ()).get("dp", 1), options.microbatches or 1
    if batch % (dp * count):
        parts = [f"{count} microbatches"] * (options.microbatches is not None) + [f"dp={dp}"] * (dp > 1)
        raise BadInput(
            f"a batch of {batch} cannot be divided by {' x '.join(parts)} = {dp * count}",
            help=f"choose divisors of {batch}, or a batch that is a multiple of {dp * count}",
        )


def _check_stages(options: PlanOptions, devices: int, segments: int) -> None:
    stages = options.stages or 1
    if stages > segments:
        raise BadInput(
            f"{stages} stages, but the model has {segments} segment{'s' * (segments != 1)} to put in them",
            help=f"ask for at most {segments}",
        )
    each = product([size for _, size in options.mesh or ()])
    if options.mesh is not None and devices % each:
        raise BadInput(
            f"mesh {format_mesh(options.mesh)} has {each} devices, which does not divide the cluster's {devices}",
            help="the mesh is that of one stage; its size must divide the number of devices",
        )
    if stages * each > devices:
        what = f"{stages} stages" + (f" of mesh {format_mesh(options.mesh)}" if options.mesh else "")
        raise BadInput(f"{what} need {stages * each} devices; the cluster has {devices}")
    if options.stages is not None and len(options.cut_before) > options.stages - 1:
        cuts = ", ".join(options.cut_before)
        raise BadInput(f"{len(options.cut_before)} cuts ({cuts}) make more than {options.stages} stages")


def cut_segments(options: PlanOptions, beginnings: Sequence[frozenset[str]]) -> frozenset[int]:
    """Segment numbers that `cut_before` names.

    beginnings[i]: paths of the modules whose first operator is the first of segment i.
    """
    cuts = set()
    for path in options.cut_before:
        found = [number for number, paths in enumerate(beginnings) if path in paths]
        if not found or found == [0]:
            known = sorted({name for number, paths in enumerate(beginnings) if number for name in paths}, key=_natural)
            raise BadInput(
                f"'{path}' does not begin a segment" + (" after the first" if found else ""),
                where="cut_before",
                help=f"modules that a stage can begin with: {', '.join(known) or 'none'}",
            )
        cuts.add(found[-1] if found[0] == 0 else found[0])
    return frozenset(cuts)


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]
