"""A mesh: named axes over ranks, and the process group of each axis that this rank belongs to."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def start() -> torch.device:
    """Join the ranks that torchrun started, by nccl where there are GPUs, else by gloo. Returns this rank's device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


class Mesh:
    """Axes, outermost first, over `ranks` in row-major order (all ranks from 0 on when left out).

    Making a process group is something all ranks do together: every rank makes every mesh, in the same order, also the
    meshes of pipeline stages that it has no part in. An axis of one rank has no group.
    """

    def __init__(self, axes: Mapping[str, int], ranks: Sequence[int] | None = None) -> None:
        self.axes = dict(axes)
        self.ranks = list(range(math.prod(self.axes.values()))) if ranks is None else list(ranks)
        if len(self.ranks) != math.prod(self.axes.values()):
            raise ValueError(f"{len(self.ranks)} ranks do not fill a mesh of {self.axes}")
        if max(self.ranks) >= dist.get_world_size():
            raise RuntimeError(
                f"the mesh needs rank {max(self.ranks)}, but there are only {dist.get_world_size()} ranks: "
                f"start more processes (torchrun --nproc-per-node)"
            )
        self._groups: dict[str, ProcessGroup] = {}
        grid = torch.tensor(self.ranks).reshape(tuple(self.axes.values()))
        for dim, (axis, size) in enumerate(self.axes.items()):
            if size == 1:
                continue
            for line in grid.movedim(dim, -1).reshape(-1, size).tolist():
                group = dist.new_group(line)
                if dist.get_rank() in line:
                    self._groups[axis] = group

    def group(self, axis: str) -> ProcessGroup:
        """The ranks that differ from this one only along `axis`. KeyError for an axis of one rank."""
        return self._groups[axis]

    def size(self, axis: str) -> int:
        """Ranks along `axis`; 1 for an axis that this mesh lacks."""
        return self.axes.get(axis, 1)

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Where `rank` (this one, if left out) stands along each axis. ValueError where it has no part in the mesh."""
        place = self.ranks.index(dist.get_rank() if rank is None else rank)
        found = {}
        for axis in reversed(self.axes):
            place, found[axis] = divmod(place, self.axes[axis])
        return {axis: found[axis] for axis in self.axes}

    def __contains__(self, rank: int) -> bool:
        return rank in self.ranks

    def box(self, shape: Sequence[int], placement: Mapping[str, int], rank: int | None = None) -> tuple[slice, ...]:
        """The part of a tensor of `shape` that `rank` holds; placement: axis -> the dim it splits (others: whole).

        Shards are cut as torch.chunk cuts. Where several axes split one dim, the earlier axis cuts first.
        """
        box = [(0, size) for size in shape]
        for axis, place in self.coordinates(rank).items():
            if axis in placement:
                start, size = box[placement[axis]]
                step = -(-size // self.axes[axis])
                begin = min(size, place * step)
                box[placement[axis]] = (start + begin, min(step, size - begin))
        return tuple(slice(start, start + size) for start, size in box)

    def share(self, inputs: Mapping[str, Tensor], batch_dims: Mapping[str, int | None]) -> dict[str, Tensor]:
        """This rank's data-parallel share of a global batch: each input cut along its batch dim, if it has one."""
        return {
            name: value if (dim := batch_dims[name]) is None else value[self.box(value.shape, {"dp": dim})]
            for name, value in inputs.items()
        }


def check_inputs(inputs: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Raise ValueError unless all ranks with this rank's "dp" coordinate were given the same inputs.

    For debugging: it compares the inputs element by element over the network.
    """
    for axis in mesh.axes:
        if axis == "dp" or mesh.size(axis) == 1:
            continue
        group = mesh.group(axis)
        for name, value in inputs.items():
            shapes: list[tuple[int, ...]] = [()] * group.size()
            dist.all_gather_object(shapes, tuple(value.shape), group=group)
            first = value.detach().clone(memory_format=torch.contiguous_format)
            if len(set(shapes)) == 1:
                dist.broadcast(first, group_src=0, group=group)
            same = len(set(shapes)) == 1 and torch.equal(first, value)
            found = ""
            if not same and len(set(shapes)) == 1:
                found = f" at {(first != value).nonzero()[0].tolist()}"
            verdicts: list[str | None] = [None] * group.size()
            message = None if same else f"input '{name}' of rank {dist.get_rank()} differs along '{axis}'{found}"
            dist.all_gather_object(verdicts, message, group=group)
            if any(verdicts):
                raise ValueError("; ".join(verdict for verdict in verdicts if verdict))
