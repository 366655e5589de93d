"""Does the sharded program compute what the model does? Both run in float64 on the CPU and are compared by numbers.

Compared are the losses of a few optimizer steps, every gradient of the first step, and buffers and parameters after
the last. Casts to float32 that models make inside (norms, rotary tables, losses) would drown a fault at 1e-7:
`lift_float32_casts` makes them casts to float64, on both sides.

The relative error of a tensor is its largest difference over its largest value, or over `FLOORS` times the largest
value of its category where that is more: a gradient that is zero but for rounding (a key's bias, say) has no scale of
its own. With a tolerance of 1e-9 a fault goes unseen only below 1e-13 of the largest gradient.
AdamW divides by the root of the squared gradient: where that is rounding noise, an update is noise times lr / eps.
Here eps = 1e-6, so that this is 1e-12 at most, below the floor of parameters, while a wrong update, being of
order lr = 1e-3, stands far above it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autoshard.runtime.mesh import Mesh
from autoshard.runtime.parameters import full_gradients, full_state

CATEGORIES = ("loss", "gradients", "buffers", "parameters")
FLOORS: Mapping[str, float] = {"loss": 0.0, "gradients": 1e-4, "buffers": 1e-4, "parameters": 1e-2}
LEARNING_RATE, EPSILON = 1e-3, 1e-6  # of AdamW
TOLERANCE = 1e-9  # float64


@dataclass(frozen=True)
class Recording:
    """What a few training steps of a model, or of one rank's stage, left behind. Names are the user's.

    loss: "step 0"... -> scalar. gradients: of the first step, whole tensors. buffers, parameters: after the last step.
    constant: the buffers that training left as they were.
    """

    loss: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    constant: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Worst:
    """The largest relative error of a category, and the tensor that has it. inf: missing, misshapen or not finite."""

    error: float
    name: str


@dataclass(frozen=True)
class Errors:
    """Largest relative error by category: "loss", "gradients", "buffers", "parameters"."""

    worst: Mapping[str, Worst]

    def __getitem__(self, category: str) -> float:
        return self.worst[category].error

    def equal(self, tolerance: float = TOLERANCE) -> bool:
        """Whether every error is within the tolerance."""
        return all(worst.error <= tolerance for worst in self.worst.values())

    def __str__(self) -> str:
        return "\n".join(f"{category:<11}{worst.error:9.2e}  {worst.name}" for category, worst in self.worst.items())


# Running both sides ---------------------------------------------------------------------------------------------------


def record_model(model: nn.Module, loss: Callable[[], Tensor], steps: int = 3) -> Recording:
    """Train `model` (in float64, changed in place) for `steps` AdamW steps on the loss that `loss()` computes."""

    def step() -> Tensor:
        value = loss()
        value.backward()
        return value

    return _record(
        step,
        model,
        steps,
        lambda: {name: p.grad for name, p in _named_parameters(model) if p.grad is not None},
        lambda: {**dict(_named_parameters(model)), **dict(model.named_buffers(remove_duplicate=False))},
    )


def record_rank(module: nn.Module, mesh: Mesh, step: Callable[[], Tensor], steps: int = 3) -> Recording:
    """The same for this rank's sharded module (in float64), called by every rank together.

    step: runs forward and backward of one step, adds to the gradients and returns the loss.
    """
    return _record(step, module, steps, lambda: full_gradients(module, mesh), lambda: full_state(module, mesh))


def _record(
    step: Callable[[], Tensor],
    module: nn.Module,
    steps: int,
    gradients_of: Callable[[], Mapping[str, Tensor | None]],
    state_of: Callable[[], Mapping[str, Tensor]],
) -> Recording:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, eps=EPSILON) if trained else None
    losses: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    buffers = dict(module.named_buffers(remove_duplicate=False))
    before = _copied(buffers)
    with lift_float32_casts():
        for number in range(steps):
            module.zero_grad()
            losses[f"step {number}"] = step().detach().clone()
            if number == 0:
                gradients = _copied(gradients_of())
            if optimizer is not None:
                optimizer.step()
    state = state_of()
    after = _copied({name: value for name, value in state.items() if name in buffers})
    return Recording(
        losses,
        gradients,
        buffers=after,
        parameters=_copied({name: value for name, value in state.items() if name not in buffers}),
        constant=frozenset(name for name, value in after.items() if value.equal(before[name])),
    )


def in_float64(value: Any) -> Any:
    """Tensors of a nested structure that are of a floating type, in float64; all else as it is."""
    return pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, value)


def _named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _copied(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items() if tensor is not None}


# Comparing ------------------------------------------------------------------------------------------------------------


def compare(reference: Recording, candidates: Sequence[Recording]) -> Errors:
    """Largest relative errors over all ranks. Each rank answers for the names of its stage, together for all of them.

    A gradient of the reference that is zero need not be there in the candidate.
    """
    return Errors({category: _worst(reference, candidates, category) for category in CATEGORIES})


def _worst(reference: Recording, candidates: Sequence[Recording], category: str) -> Worst:
    wanted: Mapping[str, Tensor] = getattr(reference, category)
    floor = FLOORS[category] * max((_largest(tensor) for tensor in wanted.values()), default=0.0)
    worst = Worst(0.0, "")
    for name, tensor in wanted.items():
        found = [getattr(candidate, category)[name] for candidate in candidates if name in getattr(candidate, category)]
        error = max((relative_error(tensor, value, floor) for value in found), default=math.inf)
        if not found and category == "gradients" and _largest(tensor) == 0:
            error = 0.0
        if not found and category == "buffers" and name in reference.constant:
            continue  # the sharded program may hold it in another form
        if error > worst.error:
            worst = Worst(error, name if found else f"{name} (missing)")
    for candidate in candidates:
        for name in getattr(candidate, category):
            if name not in wanted and not (
                category == "gradients" and _largest(getattr(candidate, category)[name]) == 0
            ):
                worst = Worst(math.inf, f"{name} (not in the model)")
    return worst


def differing(reference: Recording, candidates: Sequence[Recording], category: str) -> list[str]:
    """Names of the tensors of a category that are off by more than the tolerance on some rank."""
    wanted: Mapping[str, Tensor] = getattr(reference, category)
    floor = FLOORS[category] * max((_largest(tensor) for tensor in wanted.values()), default=0.0)
    found = [
        [getattr(candidate, category)[name] for candidate in candidates if name in getattr(candidate, category)]
        for name in wanted
    ]
    return [
        name
        for (name, tensor), values in zip(wanted.items(), found, strict=True)
        if any(relative_error(tensor, value, floor) > TOLERANCE for value in values)
        or (not values and _largest(tensor) > 0)
    ]


def relative_error(reference: Tensor, candidate: Tensor, floor: float = 0.0) -> float:
    """Largest difference over the larger of floor and the largest value; inf for other shapes or stray infinities."""
    if reference.shape != candidate.shape:
        return math.inf
    reference, candidate = reference.double(), candidate.double()
    same = (reference == candidate) | (reference.isnan() & candidate.isnan())
    difference = torch.where(same, 0.0, (reference - candidate).abs())
    largest = float(difference.max()) if difference.numel() else 0.0
    if largest == 0:
        return 0.0
    scale = max(_largest(reference), floor)
    return largest / scale if math.isfinite(largest) and scale > 0 else math.inf


def _largest(tensor: Tensor) -> float:
    """The largest absolute value that is finite."""
    values = tensor.detach().double().abs()
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else 0.0


# Casts ----------------------------------------------------------------------------------------------------------------

_LOWER: Mapping[torch.dtype, torch.dtype] = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}


class _Lift(TorchDispatchMode):
    """Operators that are asked for a lower floating dtype give float64 (complex64: complex128)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.view.dtype:  # a look at the bits, not a cast
            return func(*args, **(kwargs or {}))
        args = tuple(_LOWER.get(arg, arg) if isinstance(arg, torch.dtype) else arg for arg in args)
        kwargs = {
            name: _LOWER.get(arg, arg) if isinstance(arg, torch.dtype) else arg for name, arg in (kwargs or {}).items()
        }
        return func(*args, **kwargs)


class _Literals(TorchFunctionMode):
    """`torch.tensor(0.1)` is the float32 next to 0.1, as where the model runs as written, and where it is traced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("dtype") in (None, torch.float32):
            asked = kwargs.pop("dtype", None)
            value = func(*args, **kwargs)
            if asked is not None or (args and not isinstance(args[0], Tensor) and value.dtype == torch.float64):
                needs_grad = value.requires_grad
                with _disable_current_modes():
                    value = value.detach().to(torch.float32).to(torch.float64)
                value.requires_grad_(needs_grad)
            return value
        return func(*args, **kwargs)


@contextlib.contextmanager
def lift_float32_casts() -> Iterator[None]:
    """Inside, casts to float32 and lower, and tensors made in them, are float64; so is torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Literals(), _Lift():
            yield
    finally:
        torch.set_default_dtype(before)
