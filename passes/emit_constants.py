"""Values that no checkpoint holds: constants of the graph and buffers that are not saved."""

import io
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autoshard.errors import BadInput
from autoshard.passes.local import LocalProgram
from autoshard.program import Program


def constant_files(program: Program, local: LocalProgram, model: nn.Module) -> Mapping[str, bytes]:
    """constants.pt, where a stage needs one: a file of torch.save, name -> value.

    Raises BadInput for a buffer without a value: of a model on the meta device.
    """
    wanted = {s.name for stage in local.stages for s in stage.stored if s.is_buffer and not s.persistent}
    if not wanted:
        return {}
    known: dict[str, Tensor] = {**dict(model.named_buffers(remove_duplicate=False)), **program.constants}
    values = {name: known[name].detach().cpu().contiguous().clone() for name in sorted(wanted)}
    lost = [name for name, value in values.items() if value.is_meta]
    if lost:
        raise BadInput(
            f"the buffer {lost[0]} is in no checkpoint, and on the meta device it has no value",
            help="make it on the CPU, or compute it in forward",
        )
    content = io.BytesIO()
    torch.save(values, content)
    return {"constants.pt": content.getvalue()}
