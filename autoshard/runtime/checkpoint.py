"""Checkpoints that any layout writes and any layout reads: whole tensors under the original names.

    DIRECTORY/step-00000100/weights-0.pt      {"blocks.0.up.weight": tensor, ...}: a state dict of the original model
                            optimizer-0.pt    {"blocks.0.up.weight": {"exp_avg": tensor, "step": tensor}, ...}

The number in a file's name is the rank that wrote it, the first of its pipeline stage; the stages' files together are
the model. What has the shape of its parameter is split and put together as the parameter is. Tied parameters stand
there under each of their names. `DIRECTORY` must be one folder for all ranks; a checkpoint is there whole or not at
all, as it is written under another name and renamed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import Placement, gather_full, load_full, placements


def save(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer, directory: str | Path, step: int) -> Path:
    """Write the checkpoint after `step` steps; returns its folder. All ranks of all stages call it together.

    The first rank of a stage holds the stage's whole tensors in the memory of its host while it writes.
    ValueError for an optimizer with state of another shape than the parameter's that is not a scalar.
    """
    final = Path(directory) / f"step-{step:08}"
    draft = final.with_name(f"{final.name}.draft")
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    writer = mesh.ranks[0]
    for name, content in (("weights", _weights(module, mesh)), ("optimizer", _state(module, mesh, optimizer))):
        if dist.get_rank() == writer:
            torch.save(content, draft / f"{name}-{writer}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        if final.exists():
            shutil.rmtree(final)
        os.replace(draft, final)
    dist.barrier()
    return final


def load(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer | None, directory: str | Path) -> int:
    """Fill module and optimizer from the latest checkpoint in `directory`; returns the steps that it had done.

    optimizer: None to leave its state. Learning rates and the like are not in a checkpoint: set them as they should be.
    FileNotFoundError where there is none, KeyError and ValueError as `load_full`.
    """
    found = latest(directory)
    if found is None:
        raise FileNotFoundError(f"there is no checkpoint in {directory}")
    load_full(module, mesh, _read(found, "weights"))
    if optimizer is not None:
        _load_state(module, mesh, optimizer, _read(found, "optimizer"))
    return steps_done(found)


def latest(directory: str | Path) -> Path | None:
    """The folder of the checkpoint with the most steps, or None."""
    found = [path for path in Path(directory).glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return max(found, key=steps_done, default=None)


def steps_done(checkpoint: Path) -> int:
    """The steps that a checkpoint had done, by its folder's name."""
    return int(checkpoint.name.removeprefix("step-"))


def _read(checkpoint: Path, kind: str) -> dict[str, Any]:
    """What all stages wrote, mapped into memory: a rank reads only its part of the tensors."""
    whole: dict[str, Any] = {}
    for path in sorted(checkpoint.glob(f"{kind}-*.pt")):
        whole |= torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return whole


def _weights(module: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """The stage's whole state dict, on the CPU of its first rank; empty elsewhere."""
    table, copies, whole = placements(module), _Copies(mesh), {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        copy = copies.whole(tensor, table[name])
        if copy is not None:
            whole[name] = copy
    return whole


def _state(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter name, whole, on the CPU of the stage's first rank; empty elsewhere."""
    table, copies, whole = placements(module), _Copies(mesh), {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        state: dict[str, Any] = {}
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(f"the optimizer's '{key}' of '{name}' has another shape than the parameter")
            split = isinstance(value, Tensor) and value.shape == parameter.shape
            copy = copies.whole(value, table[name] if split else {}) if isinstance(value, Tensor) else value
            if copy is not None:
                state[key] = copy
        if state:
            whole[name] = state
    return whole


class _Copies:
    """Whole tensors on the CPU of the first rank of a mesh. A tensor that is asked for again is the same copy."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.made = mesh, dict[int, Tensor | None]()

    def whole(self, tensor: Tensor, placement: Placement) -> Tensor | None:
        """The copy on the first rank, None on the others; all ranks of the mesh call it together."""
        if id(tensor) not in self.made:
            whole = gather_full(tensor, placement, self.mesh)
            self.made[id(tensor)] = whole.cpu().clone() if dist.get_rank() == self.mesh.ranks[0] else None
        return self.made[id(tensor)]


def _load_state(module: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]) -> None:
    table = placements(module)
    names = {parameter: name for name, parameter in module.named_parameters(remove_duplicate=False) if name in whole}
    state: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        if parameter in names:
            name = names[parameter]
            state[number] = {key: _part(value, table[name], mesh) for key, value in whole[name].items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _part(value: Any, placement: Placement, mesh: Mesh) -> Any:
    """This rank's part of a whole tensor, in memory of its own; a scalar as it is."""
    if not isinstance(value, Tensor):
        return value
    return (value[mesh.box(value.shape, placement)] if value.dim() else value).clone()
