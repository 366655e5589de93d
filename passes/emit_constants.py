"""Values of buffers and of the graph's constants: what no optimizer changes and no seed makes."""

import io
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from autoshard.errors import BadInput
from autoshard.passes.local import LocalProgram
from autoshard.program import Program


def constant_files(program: Program, local: LocalProgram, model: nn.Module) -> Mapping[str, bytes]:
    """constants.pt, where a stage needs one: a file of torch.save, name -> value.

    A buffer of a model on the meta device has no value: one that checkpoints hold is left out.
    Raises BadInput for one that they do not.
    """
    stored = {s.name: s for stage in local.stages for s in stage.stored if s.is_buffer}
    known: dict[str, Tensor] = {**dict(model.named_buffers(remove_duplicate=False)), **program.constants}
    lost = [name for name, one in stored.items() if known[name].is_meta and not one.persistent]
    values = {
        name: known[name].detach().cpu().contiguous().clone() for name in sorted(stored) if not known[name].is_meta
    }
    if not values and not lost:
        return {}
    if lost:
        raise BadInput(
            f"the buffer {lost[0]} is in no checkpoint, and on the meta device it has no value",
            help="make it on the CPU, or compute it in forward",
        )
    content = io.BytesIO()
    torch.save(values, content)
    return {"constants.pt": content.getvalue()}
