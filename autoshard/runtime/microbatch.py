"""One training step in microbatches, on ranks that all run the same module.

The losses of the microbatches sum to the loss of the step. Two things help a module to see to that: `microbatches`,
their number, which is set on it, and `totals`: where it has a method `denominators(...) -> dict of tensors` (the count
of valid tokens, say) that takes some of the inputs, its results are summed over all microbatches before the step and
are there, under the same names, during it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.runtime.parameters import GradientReducer


class MicrobatchStep:
    """Runs forward and backward of one global step in `microbatches` parts; gradients are summed over ranks once.

    batch_dims: input name -> the dim that counts samples; None for an input that every microbatch gets whole.
    """

    counted_elsewhere: tuple[str, ...] = ()  # for `clip_grad_norm`: there are no other stages

    def __init__(
        self,
        module: nn.Module,
        microbatches: int,
        batch_dims: Mapping[str, int | None],
        *,
        reducer: GradientReducer | None = None,
    ) -> None:
        self.module, self.microbatches, self.batch_dims, self.reducer = module, microbatches, batch_dims, reducer
        tell_microbatches(module, microbatches)

    def step(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Add the gradients of this rank's share of a batch to the parameters' and return the loss, detached."""
        with self.reducer.defer() if self.reducer else contextlib.nullcontext():
            return self._run(inputs, backward=True)

    @torch.no_grad()
    def evaluate(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The loss alone."""
        return self._run(inputs, backward=False)

    def _run(self, inputs: Mapping[str, Tensor], backward: bool) -> Tensor:
        parts = split_batch(inputs, self.batch_dims, self.microbatches)
        losses = []
        with totals(self.module, parts):
            for part in parts:
                loss = self.module(**only_named(self.module.forward, part))
                if backward:
                    loss.backward()
                losses.append(loss.detach())
        return torch.stack(losses).sum(0)


def split_batch(
    inputs: Mapping[str, Tensor], batch_dims: Mapping[str, int | None], microbatches: int, shares: int = 1
) -> list[dict[str, Tensor]]:
    """Cut inputs along their batch dims, as evenly as they allow.

    shares: how many equal shares, each cut by itself, lie one after the other in these inputs.
    """
    parts: list[dict[str, Tensor]] = [{} for _ in range(microbatches)]
    for name, value in inputs.items():
        dim = batch_dims[name]
        if dim is None:
            pieces = [value] * microbatches
        elif value.shape[dim] < microbatches or value.shape[dim] % shares:
            raise ValueError(
                f"input '{name}' has {value.shape[dim]} samples on this rank: "
                f"they cannot be cut into {shares} equal shares of {microbatches} microbatches"
            )
        elif shares == 1:
            pieces = list(value.tensor_split(microbatches, dim))
        else:
            cut = [share.tensor_split(microbatches, dim) for share in value.chunk(shares, dim)]
            pieces = [torch.cat(piece, dim) for piece in zip(*cut, strict=True)]
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = piece
    return parts


@contextlib.contextmanager
def totals(stage: Any, parts: Sequence[Mapping[str, Tensor]]) -> Iterator[None]:
    """While inside, `stage.totals` has the sums of `stage.denominators` over all microbatches."""
    if not hasattr(stage, "denominators"):
        yield
        return
    with torch.no_grad():
        counts = [stage.denominators(**only_named(stage.denominators, part)) for part in parts]
    stage.totals = {name: torch.stack([count[name] for count in counts]).sum(0) for name in counts[0]}
    try:
        yield
    finally:
        stage.totals = None


def tell_microbatches(stage: Any, microbatches: int) -> None:
    """Let the stage know into how many parts a step is cut."""
    stage.microbatches = microbatches


def only_named(function: Callable[..., Any], inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs that `function` has parameters for."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in inputs.items() if name in names}
