"""What a user hands over: a model and one global batch of its arguments."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model with the arguments of one training step.

    model: any nn.Module, on the CPU or on the meta device.
    args, kwargs: arguments of its forward for the global batch; tensors may be on the meta device.
    loss: maps what forward returns to the scalar loss; None when forward returns the loss itself, or a mapping,
        dataclass or tuple whose "loss" (or first element) is the loss.
    name: how the workload is called in messages and headers, "models/gpt.py:gpt_tiny".
    settings: what the callable of that name was called with, JSON values: name and settings make the workload again.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
