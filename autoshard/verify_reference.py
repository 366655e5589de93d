"""The original on one process, in float64: its parameters, its inputs by name, and the steps that it trains.

A model that is there is compared with the values it has. One on the meta device is asked for on the CPU where its
callable has an argument `device`; else its parameters and inputs get values that follow from their names.
"""

import contextlib
import copy
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoshard.errors import BadInput
from autoshard.loading import load_workload, takes_argument
from autoshard.passes.trace import training
from autoshard.passes.trace_export import find_loss, plain, read_signature
from autoshard.program import Program, bound_arguments, operator_name
from autoshard.runtime.parameters import normal
from autoshard.verify import Recording, in_float64, record_model
from autoshard.verify_folder import no_dropout
from autoshard.workload import Workload

LOWER = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Reference:
    """The original, ready to run. state: values under the user's names. inputs: the global batch by argument name.

    dropout: whether dropout is as the model has it (there is none then), or off.
    """

    workload: Workload
    state: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    dropout: bool
    notes: tuple[str, ...]

    def record(self, steps: int) -> Recording:
        """Train for some steps. Changes the model: call it once."""
        workload = self.workload

        def loss() -> Tensor:
            result = workload.model(*workload.args, **workload.kwargs)
            value: Tensor = workload.loss(result) if workload.loss is not None else find_loss(plain(result))
            return value.reshape(())

        with training(workload.model), contextlib.nullcontext() if self.dropout else no_dropout():
            return record_model(workload.model, loss, steps)


def make_reference(workload: Workload, program: Program) -> Reference:
    """The workload in float64, the model a copy. Raises BadInput for a forward that draws random numbers."""
    drops = _check_random(program)
    notes = ["casts to float32 and lower are lifted to float64 on both sides"] if _casts(program) else []
    if drops:
        notes.append("dropout is off on both sides: its masks are not compared")
    try:
        model = copy.deepcopy(workload.model)
    except Exception as error:  # whatever the model's own copying raises
        raise BadInput(
            f"the model cannot be copied: {type(error).__name__}: {error}", help="verify the folder it was saved to"
        ) from error
    filled = [name for name, tensor in _tensors(model) if tensor.is_meta]
    model = _filled(model).double()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    lost = sorted({name for name, _ in model.named_buffers() if name in filled} - state.keys())
    if lost:
        state |= {name: model.get_buffer(name).clone() for name in lost}
        notes.append(f"values of buffers on the meta device are made up: {', '.join(lost[:3])}")
    elif filled:
        notes.append("the model is on the meta device: its parameters have values that follow from their names")
    args, kwargs = in_float64(_inputs(workload, program))
    workload = replace(workload, model=model, args=args, kwargs=kwargs)
    return Reference(workload, state, named_inputs(workload), not drops, tuple(notes))


def on_cpu(workload: Workload, near: Path | None) -> Workload:
    """The workload with its model on the CPU, where it is on the meta device and its callable can make it so."""
    if not any(tensor.is_meta for _, tensor in _tensors(workload.model)) or not workload.name:
        return workload
    if not takes_argument(workload.name, "device", near):
        return workload
    return load_workload(workload.name, {**workload.settings, "device": "cpu"}, near=near)


def named_inputs(workload: Workload) -> dict[str, Tensor]:
    """The tensors of a workload's arguments under the names that its program gives them."""
    leaves = pytree.tree_leaves((tuple(workload.args), dict(workload.kwargs)))
    names = read_signature(workload).leaves
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(name, str)}


# What the model draws and casts ---------------------------------------------------------------------------------------

_RANDOM = ("bernoulli", "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "multinomial", "normal")


def _check_random(program: Program) -> bool:
    """Whether dropout is active. Raises BadInput for other random numbers."""
    drops = False
    for node in program.operators():
        name, arguments = operator_name(node), bound_arguments(node)
        short = name.split(".")[1]
        if "dropout" in short:
            drops |= float(arguments.get("p", 0.0) or 0.0) > 0 and arguments.get("train", True) is not False
        elif float(arguments.get("dropout_p", 0.0) or 0.0) > 0:
            drops = True
        elif short in _RANDOM:
            raise BadInput(
                f"the forward draws random numbers ({name}): two runs of it cannot be compared",
                help="give the numbers as an input of the model, or verify a workload without them",
            )
    return drops


def _casts(program: Program) -> bool:
    """Whether the program names a dtype below float64."""
    return any(
        argument in LOWER
        for node in program.operators()
        for argument in bound_arguments(node).values()
        if isinstance(argument, torch.dtype)
    )


# Values for what is on the meta device --------------------------------------------------------------------------------


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _filled(model: nn.Module) -> nn.Module:
    """The model off the meta device. Tensors that have values keep them."""
    made: dict[int, Tensor] = {}

    def value(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            whole = normal(name, tuple(tensor.shape)).to(tensor.dtype)
            made[id(tensor)] = nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole
        return made[id(tensor)]

    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = value(f"{path}.{name}" if path else name, tensor)
    return model


def _inputs(workload: Workload, program: Program) -> Any:
    """(args, kwargs) with a value for every tensor on the meta device."""
    highs = {given.name: given.high for given in program.inputs.values()}
    given = (tuple(workload.args), dict(workload.kwargs))
    leaves, spec = pytree.tree_flatten(given)
    names = read_signature(workload).leaves
    values = [
        _drawn(name, leaf, highs.get(name)) if isinstance(leaf, Tensor) and leaf.is_meta else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return pytree.tree_unflatten(values, spec)


def _drawn(name: str, tensor: Tensor, high: int | None) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if tensor.is_floating_point():
        return torch.randn(tuple(tensor.shape), generator=generator).to(tensor.dtype)
    return torch.randint(high or 2, tuple(tensor.shape), generator=generator).to(tensor.dtype)
