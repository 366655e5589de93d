"""A model that runs as the emitted program of its plan, while the user goes on holding the model itself.

The emitted module has parameters of its own (its reducer hangs on them); they share memory with the user's: each of
the user's parameters gets this rank's part for its data, so that an optimizer made before stays valid and what it
changes is what runs. A call runs a whole training step, all microbatches forward and backward, sets the gradients
aside, and returns the loss; the loss's backward hands them to the user's parameters, scaled by its own gradient.
"""

import contextlib
import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoshard.api import compile
from autoshard.compiled import write_files
from autoshard.compiler import parse_mesh
from autoshard.errors import AutoshardError, BadInput
from autoshard.passes.trace_export import batch_of, read_signature
from autoshard.program import Program, bound_arguments
from autoshard.runtime.mesh import start
from autoshard.workload import Workload


@dataclass(frozen=True)
class Request:
    """What a user asked `parallelize` for. fixed: arguments of `compile`. inputs: "global" or "share"."""

    fixed: Mapping[str, Any]
    inputs: str = "global"


@dataclass(frozen=True)
class Shared:
    """What rank 0 compiled, as every rank gets it.

    result: forward's result with, for each leaf, whether it is the loss. modal: why training and evaluation differ,
    None where they do not.
    """

    files: Mapping[str, str | bytes]
    result: Any
    dtype: torch.dtype
    modal: str | None


@dataclass(frozen=True)
class Running:
    """The emitted program on this rank, wired to the user's model.

    names: input name for each tensor leaf of forward's arguments. order: keys of the whole state dict. pairs: the
    user's trainable parameters with the emitted ones. folder: holds the sources for as long as the program is used.
    """

    shared: Shared
    module: nn.Module
    mesh: Any
    step: Any
    parameters: ModuleType
    batch_dims: Mapping[str, int | None]
    names: tuple[Any, ...]
    order: tuple[str, ...]
    pairs: tuple[tuple[nn.Parameter, nn.Parameter], ...]
    device: torch.device
    folder: Any = field(repr=False)

    def run(self, model: nn.Module, request: Request, args: Any, kwargs: Any) -> Any:
        """One call of the model: a training step where gradients are on, else the loss alone."""
        inputs = self.inputs(args, kwargs, request)
        if not model.training and self.shared.modal is not None:
            raise BadInput(
                f"the program is that of training, and {self.shared.modal}",
                help="evaluate the original with `full_state_dict(model)`, or keep model.train() under torch.no_grad()",
            )
        self.module.train(model.training)
        for _, emitted in self.pairs:
            emitted.grad = None
        if not torch.is_grad_enabled():
            loss = self.step.evaluate(inputs)
        else:
            loss = self.step.step(inputs)
            gradients = [emitted.grad for _, emitted in self.pairs]
            for _, emitted in self.pairs:
                emitted.grad = None
            anchor = torch.zeros((), device=loss.device, requires_grad=True)  # a stage may have no parameters
            loss = _Deliver.apply(loss, gradients, anchor, *(own for own, _ in self.pairs))
        self.share_buffers(model)
        loss = loss.to(self.shared.dtype)
        return pytree.tree_map(lambda is_loss: loss if is_loss else None, self.shared.result)

    def inputs(self, args: Any, kwargs: Any, request: Request) -> dict[str, Tensor]:
        """This rank's share of a batch, by input name."""
        leaves = pytree.tree_leaves((args, kwargs))
        if len(leaves) != len(self.names):
            raise BadInput(
                f"forward was compiled for {len(self.names)} arguments and got {len(leaves)}",
                help="call the model with the same kinds of arguments each time",
            )
        named = {
            name: leaf.to(self.device) for name, leaf in zip(self.names, leaves, strict=True) if isinstance(name, str)
        }
        if request.inputs == "share":
            return named
        share: dict[str, Tensor] = self.mesh.share(named, self.batch_dims)
        return share

    def share_buffers(self, model: nn.Module) -> None:
        """The user's buffers are those of the emitted module, which may have replaced its own."""
        own = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            if name in own:
                path, _, last = name.rpartition(".")
                model.get_submodule(path)._buffers[last] = buffer

    def clip(self, max_norm: float) -> Tensor:
        """Scale the user's gradients by their norm over all ranks. All ranks call it together."""
        for own, emitted in self.pairs:
            emitted.grad = own.grad
        try:
            norm: Tensor = self.parameters.clip_grad_norm(
                self.module, self.mesh, max_norm, counted_elsewhere=self.step.counted_elsewhere
            )
        finally:
            for _, emitted in self.pairs:
                emitted.grad = None
        return norm

    def full_state(self) -> dict[str, Tensor]:
        """The whole state dict, on the CPU of every rank. All ranks call it together."""
        own = {name: value.detach() for name, value in self.parameters.full_state(self.module, self.mesh).items()}
        leads = self.mesh.ranks[0] == dist.get_rank()
        tables: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(tables, {n: (v.shape, v.dtype) for n, v in own.items()} if leads else {})
        whole: dict[str, Tensor] = {}
        for rank, table in enumerate(tables):
            for name, (shape, dtype) in table.items():
                mine = rank == dist.get_rank()
                value = own[name].contiguous() if mine else torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(value, src=rank)
                whole[name] = value.to("cpu", copy=True) if mine else value.cpu()
        return {name: whole[name] for name in self.order if name in whole}


class _Deliver(torch.autograd.Function):
    """Passes the loss on; in backward hands out gradients that are there already, times the loss's gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], anchor: Tensor, *own: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("backward through the loss a second time: call the model again")
        gradients = [None if one is None else one.mul_(scale.to(one.dtype)) for one in ctx.gradients]
        ctx.gradients = None
        return (None, None, None, *gradients)


# Getting there --------------------------------------------------------------------------------------------------------


def bound(model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of forward, positional where they can be, so that one call is written in one way."""
    try:
        found = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # forward itself will tell
        return args, kwargs
    return found.args, found.kwargs


def make_running(model: nn.Module, request: Request, args: Any, kwargs: Any) -> Running:
    """Compile on rank 0, give every rank the files, load this rank's part. All ranks call it together.

    model: of the user's own class. Raises, on every rank, what compiling raises.
    """
    device = start()
    if dist.get_backend() != "nccl":
        device = torch.device("cpu")
    workload = _workload(model, request, args, kwargs)
    names, order = read_signature(workload).leaves, tuple(model.state_dict())
    shared = _compiled_on_rank_0(workload, request)
    folder = tempfile.TemporaryDirectory(prefix="autoshard-", ignore_cleanup_errors=True)
    write_files(shared.files, Path(folder.name))
    emitted, parameters = _imported(Path(folder.name))
    if dist.get_world_size() != emitted.WORLD_SIZE:
        raise BadInput(
            f"the plan runs on {emitted.WORLD_SIZE} ranks and there are {dist.get_world_size()}",
            help=f"start {emitted.WORLD_SIZE} (torchrun --nproc-per-node), or fix a mesh that uses all",
        )
    module, mesh, step = emitted.build(device=str(device))
    _load(model, module, mesh, parameters, device)
    pairs = _joined(model, module)
    running = Running(shared, module, mesh, step, parameters, emitted.BATCH_DIMS, names, order, pairs, device, folder)
    running.share_buffers(model)
    return running


def _workload(model: nn.Module, request: Request, args: Any, kwargs: Any) -> Workload:
    """The global batch. Of a share, as many copies as there are data-parallel ranks."""
    name = f"{type(model).__module__}:{type(model).__qualname__}"
    if request.inputs == "share":
        dp = dict(parse_mesh(request.fixed["mesh"])).get("dp", 1)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        batch = batch_of(tensors)
        args, kwargs = pytree.tree_map_only(
            Tensor, lambda t: torch.cat([t] * dp) if t.dim() and t.shape[0] == batch else t, (args, kwargs)
        )
    return Workload(model, args, kwargs, name=name)


def _compiled_on_rank_0(workload: Workload, request: Request) -> Shared:
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            compiled = compile(workload, **request.fixed)
            files = {name: text for name, text in compiled.files.items() if name != "weights.pt"}
            answer = [_shared(compiled.program, files)]
        except AutoshardError as error:
            answer = [error]
        except Exception as error:  # the other ranks must not wait for this one
            answer = [error]
            dist.broadcast_object_list([BadInput(f"rank 0 failed: {error}")], src=0)
            raise
    dist.broadcast_object_list(answer, src=0)
    if isinstance(answer[0], Exception):
        raise answer[0]
    shared: Shared = answer[0]
    return shared


def _shared(program: Program, files: Mapping[str, str | bytes]) -> Shared:
    loss = next(node for node in program.graph.nodes if node.name == program.loss).meta["val"]
    is_loss = [leaf == program.loss for leaf in program.outputs]
    if not any(is_loss):  # forward's result is the loss in another shape
        is_loss = [True] * len(is_loss)
    return Shared(files, pytree.tree_unflatten(is_loss, program.out_spec), loss.dtype, _modal(program))


def _modal(program: Program) -> str | None:
    updated = [buffer.name for buffer in program.buffers.values() if buffer.updated_by is not None]
    if updated:
        return f"its forward changes buffers ({updated[0]})"
    drops = (bound_arguments(node).get("dropout_p") for node in program.operators())
    return "its attention has dropout" if any(float(found or 0) > 0 for found in drops) else None


def _imported(folder: Path) -> tuple[ModuleType, ModuleType]:
    """The folder's model and parameters modules; the names they have there stay whose they are in this process."""
    names = [path.stem for path in folder.glob("*.py")]
    aside = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        return importlib.import_module("model"), importlib.import_module("parameters")
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(aside)


def _load(model: nn.Module, module: nn.Module, mesh: Any, parameters: ModuleType, device: torch.device) -> None:
    """Rank 0's values in every rank's part; a model on the meta device gets values that follow from the names."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    if any(tensor.is_meta for tensor in tensors.values()):
        parameters.initialize(module, mesh)
        return
    whole: dict[str, Tensor] = {}
    sent: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in sent:
            value = tensor.detach().to(device, copy=True).contiguous()
            dist.broadcast(value, src=0)
            sent[id(tensor)] = value.cpu() if device.type != "cpu" else value
        whole[name] = sent[id(tensor)]
    parameters.load_full(module, mesh, whole)


def _joined(model: nn.Module, module: nn.Module) -> tuple[tuple[nn.Parameter, nn.Parameter], ...]:
    """Give the user's parameters the memory of the emitted ones, and none to those of other stages."""
    own = dict(model.named_parameters(remove_duplicate=False))
    pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for name, emitted in module.named_parameters(remove_duplicate=False):
        _point(own[name], emitted.data)
        pairs[id(own[name])] = own[name], emitted
    for parameter in own.values():
        if id(parameter) not in pairs:
            device = "cpu" if parameter.is_meta else parameter.device
            _point(parameter, torch.empty(0, dtype=parameter.dtype, device=device))
        parameter.grad = None
    return tuple(pair for pair in pairs.values() if pair[0].requires_grad)


def _point(parameter: nn.Parameter, data: Tensor) -> None:
    """Another memory for a parameter that optimizers hold."""
    if parameter.is_meta:
        torch.utils.swap_tensors(parameter, nn.Parameter(data, parameter.requires_grad))
    else:
        parameter.data = data


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextlib.contextmanager
def of_class(model: nn.Module, kind: type[nn.Module]) -> Iterator[None]:
    """Inside, the model is of the user's own class again."""
    current = type(model)
    model.__class__ = kind
    try:
        yield
    finally:
        model.__class__ = current
