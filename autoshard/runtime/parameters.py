"""Parameters of a sharded model: load this rank's part, put the whole together again, sum and clip gradients.

Each module class may have a table `PLACEMENTS`: the names of its own parameters and buffers ("q.weight") -> the axes
that split them and along which dim, {"tp": 0}. What a table does not name, every rank holds whole.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from autoshard.runtime.collectives import gathered
from autoshard.runtime.mesh import Mesh

Placement = Mapping[str, int]


def placements(module: nn.Module) -> dict[str, Placement]:
    """Placements of all parameters and buffers by their full names. All names of a tied parameter are in it."""
    by_tensor: dict[int, Placement] = {}
    by_name: dict[str, Placement] = {}
    for path, child in module.named_modules():
        for name, placement in getattr(child, "PLACEMENTS", {}).items():
            by_name[f"{path}.{name}" if path else name] = placement
    tensors = dict(_tensors(module))
    for name, tensor in tensors.items():
        if name in by_name:
            by_tensor[id(tensor)] = by_name[name]
    return {name: by_tensor.get(id(tensor), {}) for name, tensor in tensors.items()}


# Making ---------------------------------------------------------------------------------------------------------------


def materialize(
    make: Callable[[], nn.Module],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    override: torch.dtype | None = None,
) -> nn.Module:
    """The module that `make` makes, with memory on `device` but no values yet; buffers are as a new batch norm's.

    dtype: of everything that names none. override: of everything of a floating dtype, if given. Tied parameters stay
    tied.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            module = make()
    finally:
        torch.set_default_dtype(before)
    first: dict[int, str] = {}
    ties = [
        (name, first[id(parameter)])
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    ]
    module = (module if override is None else module.to(override)).to_empty(device=device)
    for name, known in ties:
        path, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(path), attribute, module.get_parameter(known))
    for name, buffer in module.named_buffers():
        buffer.fill_(1 if name.endswith("running_var") else 0)
    return module


def fill_buffers(module: nn.Module, path: str | Path) -> None:
    """Give buffers that no checkpoint holds their values, from a file of torch.save."""
    values: Mapping[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    with torch.no_grad():
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if name in values:
                buffer.copy_(values[name])


# Loading --------------------------------------------------------------------------------------------------------------


def load_full(module: nn.Module, mesh: Mesh, whole: Mapping[str, Tensor] | str | Path) -> None:
    """Fill parameters and buffers with this rank's part of a whole state dict under the original names.

    whole: a mapping, a file of torch.save, a .safetensors file or a folder of such; files are mapped, not read whole.
    Names that this stage lacks are passed over. KeyError for a missing name, ValueError for a shape that does not fit.
    """
    if isinstance(whole, (str, Path)):
        whole = open_weights(Path(whole))
    table, persistent = placements(module), set(module.state_dict())
    done: dict[int, str] = {}
    missing = []
    with torch.no_grad():
        for name, tensor in _tensors(module):
            if name not in whole:
                missing.append((name, id(tensor)))
                continue
            part = whole[name][mesh.box(whole[name].shape, table[name])]
            if part.shape != tensor.shape:
                raise ValueError(
                    f"'{name}': this rank's part of {list(whole[name].shape)} is {list(part.shape)}, "
                    f"but the module holds {list(tensor.shape)}"
                )
            tensor.copy_(part)
            done[id(tensor)] = name
    lost = [name for name, key in missing if key not in done and name in persistent]
    if lost:
        raise KeyError(f"no value for {', '.join(lost[:5])}{f' and {len(lost) - 5} more' if len(lost) > 5 else ''}")


def open_weights(path: Path) -> Mapping[str, Tensor]:
    """Tensors by name of a torch.save or .safetensors file, or of all .safetensors files of a folder, memory-mapped."""
    if path.is_dir():
        return {
            name: value for file in sorted(path.glob("*.safetensors")) for name, value in _safetensors(file).items()
        }
    if path.suffix == ".safetensors":
        return _safetensors(path)
    loaded: Mapping[str, Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return loaded


def _safetensors(path: Path) -> dict[str, Tensor]:
    """The format: 8 bytes length of a JSON header, the header, then the tensors' bytes."""
    dtypes = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
        "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    }  # fmt: skip
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    content = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[8 + length :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        piece, dtype = content[start:end], dtypes[entry["dtype"]]
        if piece.data_ptr() % dtype.itemsize:
            piece = piece.clone()
        tensors[name] = piece.view(dtype).view(entry["shape"])
    return tensors


def initialize(
    module: nn.Module, mesh: Mesh, draw: Callable[[str, Sequence[int]], Tensor] | None = None, *, seed: int = 0
) -> None:
    """Fill the parameters with values that depend on their names and whole shapes only, not on the layout.

    draw(name, whole shape) -> the whole value; left out: `normal` with this seed. Pass names as the user's model has
    them: a tied parameter is drawn under the first of its names.
    """
    table = placements(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shape = whole_shape(parameter, table[name], mesh)
            whole = normal(name, shape, seed=seed) if draw is None else draw(name, shape)
            parameter.copy_(whole[mesh.box(shape, table[name])])


def normal(name: str, shape: Sequence[int], *, seed: int = 0, std: float = 0.02) -> Tensor:
    """Normal values for matrices, ones for other weights, zeros for biases; from a generator of this name's own."""
    if len(shape) < 2:
        return torch.zeros(tuple(shape)) if name.endswith("bias") else torch.ones(tuple(shape))
    generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator) * std


# Putting together -----------------------------------------------------------------------------------------------------


def whole_shape(tensor: Tensor, placement: Placement, mesh: Mesh) -> tuple[int, ...]:
    """Shape of the whole of which each rank holds `tensor`. All ranks of the mesh call it together."""
    shape = list(tensor.shape)
    for axis in reversed(mesh.axes):
        if axis in placement and mesh.size(axis) > 1:
            dim = placement[axis]
            shape[dim] = _summed_size(shape[dim], mesh.group(axis), tensor.device)
    return tuple(shape)


def gather_full(tensor: Tensor, placement: Placement, mesh: Mesh) -> Tensor:
    """The whole of which each rank holds `tensor`. All ranks of the mesh call it together."""
    tensor = tensor.detach()
    for axis in reversed(mesh.axes):  # the last axis cut last
        if axis in placement and mesh.size(axis) > 1:
            dim, group = placement[axis], mesh.group(axis)
            tensor = gathered(tensor, dim, group, _summed_size(tensor.shape[dim], group, tensor.device))
    return tensor


def full_state(module: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """The whole state dict of this stage under the original names, on every rank."""
    table = placements(module)
    return {name: gather_full(tensor, table[name], mesh) for name, tensor in module.state_dict(keep_vars=True).items()}


def full_gradients(module: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """The whole gradients of this stage's parameters; those without one are left out. Tied ones under each name."""
    table = placements(module)
    return {
        name: gather_full(parameter.grad, table[name], mesh)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.grad is not None
    }


def _summed_size(size: int, group: ProcessGroup, device: torch.device) -> int:
    total = torch.tensor(size, device=device)
    dist.all_reduce(total, group=group)
    return int(total)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# Gradients ------------------------------------------------------------------------------------------------------------


def summed_groups(module: nn.Module, mesh: Mesh, default: Sequence[str] = ()) -> dict[str, tuple[ProcessGroup, ...]]:
    """Parameter name -> groups over which its gradient is a partial sum, for `GradientReducer`.

    A class may have a table `SUMMED`: parameter name -> axes. What no table names is summed over the axes `default`.
    """
    axes: dict[int, Sequence[str]] = {}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for path, child in module.named_modules():
        for name, listed in getattr(child, "SUMMED", {}).items():
            axes[id(parameters[f"{path}.{name}" if path else name])] = listed
    return {
        name: tuple(mesh.group(axis) for axis in axes.get(id(parameter), default))
        for name, parameter in module.named_parameters()
        if axes.get(id(parameter), default)
    }


class GradientReducer:
    """Sums the gradients of parameters that every rank of a group holds whole but uses on its own part of the work.

    groups: parameter name -> the groups to sum over. Each backward sums the gradient that it adds, once. Inside
    `defer()` gradients are left as they are, and what was added is summed once at the end:

        with reducer.defer():
            for part in microbatches:
                model(part).backward()

    Make it when the parameters have their final device: moving a module off the meta device makes new parameters.
    """

    def __init__(self, module: nn.Module, groups: Mapping[str, Sequence[ProcessGroup]]) -> None:
        self.module, self.deferred = module, False
        self.parameters: list[tuple[nn.Parameter, tuple[ProcessGroup, ...]]] = []
        for name, of_parameter in groups.items():
            parameter = module.get_parameter(name)
            self.parameters.append((parameter, tuple(of_parameter)))
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient, groups=tuple(of_parameter): self._arrived(gradient, groups))

    def _arrived(self, gradient: Tensor, groups: tuple[ProcessGroup, ...]) -> Tensor:
        if self.deferred:
            return gradient
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        for group in groups:
            dist.all_reduce(gradient, group=group)
        return gradient

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Sum what the backward passes inside add to the gradients once, at the end."""
        with new_gradients(self.module):
            self.deferred = True
            try:
                yield
            finally:
                self.deferred = False
            self._reduce()

    def _reduce(self) -> None:
        """Sum all gradients in place; small ones with the same groups and dtype travel together."""
        open_buckets: dict[tuple[tuple[ProcessGroup, ...], torch.dtype], list[Tensor]] = {}
        for parameter, groups in self.parameters:
            if parameter.grad is None:
                continue
            bucket = open_buckets.setdefault((groups, parameter.grad.dtype), [])
            bucket.append(parameter.grad)
            if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
                _sum_in_place(open_buckets.pop((groups, parameter.grad.dtype)), groups)
        for (groups, _), bucket in open_buckets.items():
            _sum_in_place(bucket, groups)


BUCKET_BYTES = 32 << 20  # enough to hide the latency of a collective, little beside the gradients themselves


def _sum_in_place(gradients: list[Tensor], groups: Sequence[ProcessGroup]) -> None:
    alone = len(gradients) == 1 and gradients[0].is_contiguous()
    flat = gradients[0] if alone else torch.cat([gradient.flatten() for gradient in gradients])
    for group in groups:
        dist.all_reduce(flat, group=group)
    if not alone:
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))


@contextlib.contextmanager
def new_gradients(module: nn.Module) -> Iterator[None]:
    """Set the gradients of `module` aside, and add them to those that came up inside afterwards."""
    aside = [(parameter, parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    for parameter, _ in aside:
        parameter.grad = None
    yield
    for parameter, older in aside:
        parameter.grad = older if parameter.grad is None else older.add_(parameter.grad)


def clip_grad_norm(
    module: nn.Module,
    mesh: Mesh,
    max_norm: float,
    *,
    group: ProcessGroup | None = None,
    counted_elsewhere: Iterable[str] = (),
) -> Tensor:
    """Scale all gradients so that their 2-norm over the whole model is at most `max_norm`; returns the norm before.

    Each element counts once, however many ranks hold it. group: the ranks of all stages (left out: all ranks).
    counted_elsewhere: parameters tied to another stage's that already counts them.
    """
    table, skip = placements(module), set(counted_elsewhere)
    gradients = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    here = (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
    device = next((gradient.device for _, gradient in gradients), here)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for name, gradient in gradients:
        if name not in skip:
            copies = math.prod(size for axis, size in mesh.axes.items() if axis not in table[name])
            total += gradient.to(torch.float64).square().sum() / copies
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
    for _, gradient in gradients:
        gradient.mul_(scale.to(gradient.dtype))
    return norm
