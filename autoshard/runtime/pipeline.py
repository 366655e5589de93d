"""One training step over pipeline stages: every rank runs its stage's row of a schedule.

A stage is a module whose forward takes, by name, inputs of the model and values received from earlier stages, for one
microbatch, and returns the values it sends in the order of the crossings; the last stage returns the loss, last.
What `microbatch.py` says of losses, `stage.microbatches`, `denominators` and `stage.totals` holds for each stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.runtime.mesh import Mesh
from autoshard.runtime.microbatch import only_named, split_batch, tell_microbatches, totals
from autoshard.runtime.parameters import GradientReducer, new_gradients
from autoshard.runtime.transfer import Arrival, End, Messages, Placement

Shapes = Mapping[str, tuple[Sequence[int], torch.dtype]]


@dataclass(frozen=True)
class Crossing:
    """A value made by stage `source` and used by stage `target`.

    given, taken: its placement on the source's and on the target's mesh, axis -> dim it splits; ranks along other axes
    hold copies. gradient: whether a gradient comes back (never for integers).
    """

    name: str
    source: int
    target: int
    given: Placement = field(default_factory=dict)
    taken: Placement = field(default_factory=dict)
    gradient: bool = True


@dataclass(frozen=True)
class Tied:
    """One parameter that several stages have a copy of. copies: stage -> (its name there, its placement there)."""

    shape: Sequence[int]
    copies: Mapping[int, tuple[str, Placement]]


class PipelineStep:
    """Runs this rank's stage by its row of the schedule.

    stage: this rank's stage. meshes: of all stages; this rank is in one of them. rows: for each stage its instructions,
    "F0 F1 B0 B1": forward and backward of microbatch 0 and 1. crossings: of the whole pipeline.
    batch_dims: input name -> the dim that counts samples, or None; along "dp" every rank passes its equal share.
    shapes: maps the shapes of a microbatch's inputs, whole over "dp", to shape and dtype of every crossing value.
    Every rank makes the step, together: it makes process groups. Forward and backward values travel through groups of
    their own: with nccl a send waits for its receive, and two ranks that send to each other first would wait forever.
    """

    def __init__(
        self,
        stage: nn.Module,
        meshes: Sequence[Mesh],
        rows: Sequence[str],
        crossings: Sequence[Crossing],
        batch_dims: Mapping[str, int | None],
        shapes: Callable[[Mapping[str, tuple[int, ...]]], Shapes],
        *,
        reducer: GradientReducer | None = None,
        tied: Sequence[Tied] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.rank = dist.get_rank()
        self.index = next(index for index, mesh in enumerate(meshes) if self.rank in mesh)
        self.stage, self.meshes, self.batch_dims, self.shapes = stage, meshes, batch_dims, shapes
        self.reducer, self.tied, self.device = reducer, tied, torch.device(device)
        self.instructions = [(word[0], int(word[1:])) for word in rows[self.index].split()]
        self.microbatches = _check_rows(rows)
        tell_microbatches(stage, self.microbatches)
        # For `clip_grad_norm`: a tied parameter counts on the first stage that has it.
        copies = [parameter.copies for parameter in tied]
        self.counted_elsewhere = tuple(c[self.index][0] for c in copies if self.index in c and self.index > min(c))

        everyone = sorted(rank for mesh in meshes for rank in mesh.ranks)
        self.everyone, forward, backward = (dist.new_group(everyone) for _ in range(3))
        self.forward_messages, self.backward_messages = Messages(forward), Messages(backward)
        self.received = [crossing for crossing in crossings if crossing.target == self.index]
        self.sent = [crossing for crossing in crossings if crossing.source == self.index]
        self.outputs = list(dict.fromkeys(crossing.name for crossing in self.sent))
        if self.index == len(meshes) - 1:
            self.outputs.append("loss")
        # Stages may divide the batch among different numbers of ranks: cut it so that all agree on every microbatch.
        shares = max(mesh.size("dp") for mesh in meshes)
        self.shares = shares // meshes[self.index].size("dp")
        if any(shares % mesh.size("dp") for mesh in meshes):
            raise ValueError("the stages' sizes of axis 'dp' must divide the largest of them")

    def step(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Add the gradients of this rank's share of a batch to the parameters'. The loss, float64, on every rank."""
        with new_gradients(self.stage):
            with self.reducer.defer() if self.reducer else contextlib.nullcontext():
                loss = self._run(inputs, self.instructions)
            self._sum_tied_gradients()
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The loss alone, on every rank."""
        return self._run(inputs, [(kind, part) for kind, part in self.instructions if kind == "F"])

    def _run(self, inputs: Mapping[str, Tensor], instructions: Sequence[tuple[str, int]]) -> Tensor:
        parts = split_batch(inputs, self.batch_dims, self.microbatches, self.shares)
        run = _Run(self, parts)
        losses: list[Tensor] = []
        with totals(self.stage, parts):
            for position, (kind, part) in enumerate(instructions):
                run.expect(kind, part)
                if position + 1 < len(instructions):  # the next message may arrive while this instruction runs
                    run.expect(*instructions[position + 1])
                if kind == "F":
                    losses += run.forward(part)
                else:
                    run.backward(part)
        self.forward_messages.finish()
        self.backward_messages.finish()
        # In float64, which holds a loss of any dtype: other stages do not know the loss's own.
        loss = (
            torch.stack(losses).sum(0).double() if losses else torch.zeros((), dtype=torch.float64, device=self.device)
        )
        dist.broadcast(loss, src=self.meshes[-1].ranks[0], group=self.everyone)
        return loss

    def _sum_tied_gradients(self) -> None:
        for tied in self.tied:
            if self.index not in tied.copies:
                continue
            parameter = self.stage.get_parameter(tied.copies[self.index][0])
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
            parts = {self.index: own}
            for giver, (_, given) in tied.copies.items():
                for taker, (_, taken) in tied.copies.items():
                    if giver != taker and self.index in (giver, taker):
                        ends = (self.meshes[giver], given), (self.meshes[taker], taken)
                        if self.index == giver:
                            self.backward_messages.send(own, tied.shape, *ends)
                        else:
                            received = self.backward_messages.receive(tied.shape, own.dtype, own.device, *ends)
                            parts[giver] = received.wait()
            self.backward_messages.finish()
            parameter.grad = torch.stack([parts[stage] for stage in sorted(parts)]).sum(0)


class _Run:
    """The microbatches of one step that are under way on this rank."""

    def __init__(self, owner: PipelineStep, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self.owner, self.parts = owner, parts
        self.arriving: dict[tuple[str, int], dict[int, Arrival]] = {}
        self.values: dict[int, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}  # received, returned
        own_mesh = owner.meshes[owner.index]
        whole = []
        for part in parts:
            shapes = {name: list(value.shape) for name, value in part.items()}
            for name, dim in owner.batch_dims.items():
                if dim is not None and name in shapes:
                    shapes[name][dim] *= own_mesh.size("dp")
            whole.append(owner.shapes({name: tuple(shape) for name, shape in shapes.items()}))
        self.shapes: list[Shapes] = whole

    def expect(self, kind: str, part: int) -> None:
        """Post the receives that this instruction needs, once."""
        owner, arriving = self.owner, {}
        if (kind, part) in self.arriving:
            return
        for number, crossing in enumerate(owner.received if kind == "F" else owner.sent):
            shape, dtype = self.shapes[part][crossing.name]
            if kind == "B" and not _has_gradient(crossing, dtype):
                continue
            ends = self._ends(crossing)
            messages, ends = (owner.forward_messages, ends) if kind == "F" else (owner.backward_messages, ends[::-1])
            arriving[number] = messages.receive(shape, dtype, owner.device, *ends)
        self.arriving[kind, part] = arriving

    def forward(self, part: int) -> list[Tensor]:
        """Run the stage on microbatch `part` and send what later stages need; the loss, if it is made here."""
        owner, received = self.owner, {}
        for number, arrival in self.arriving.pop(("F", part)).items():
            crossing, value = owner.received[number], arrival.wait()
            if torch.is_grad_enabled() and _has_gradient(crossing, value.dtype):
                value.requires_grad_()
            received[crossing.name] = value
        result = owner.stage(**only_named(owner.stage.forward, self.parts[part]), **received)
        results = (result,) if isinstance(result, Tensor) else tuple(result)
        returned = dict(zip(owner.outputs, results, strict=True))
        for crossing in owner.sent:
            shape, dtype = self.shapes[part][crossing.name]
            value = returned[crossing.name].detach()
            if value.dtype != dtype:
                raise TypeError(f"'{crossing.name}' is {value.dtype}, receivers wait for {dtype}")
            owner.forward_messages.send(value, shape, *self._ends(crossing), part)
        if torch.is_grad_enabled():
            self.values[part] = received, returned
        return [returned["loss"].detach()] if "loss" in returned else []

    def backward(self, part: int) -> None:
        """Run microbatch `part` backward from the gradients that later stages send, and send on its own."""
        owner = self.owner
        received, returned = self.values.pop(part)
        owner.forward_messages.finish(part)  # long since received: lets go of the memory
        gradients: dict[str, Tensor] = {}
        for number, arrival in self.arriving.pop(("B", part)).items():
            name, gradient = owner.sent[number].name, arrival.wait()
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
        if "loss" in returned:
            gradients["loss"] = torch.ones_like(returned["loss"])
        names = [name for name in gradients if returned[name].requires_grad]
        if names:
            torch.autograd.backward([returned[name] for name in names], [gradients[name] for name in names])
        for crossing in owner.received:
            shape, dtype = self.shapes[part][crossing.name]
            if _has_gradient(crossing, dtype):
                value = received[crossing.name]
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                owner.backward_messages.send(gradient, shape, *self._ends(crossing)[::-1])

    def _ends(self, crossing: Crossing) -> tuple[End, End]:
        meshes = self.owner.meshes
        return (meshes[crossing.source], crossing.given), (meshes[crossing.target], crossing.taken)


def _check_rows(rows: Sequence[str]) -> int:
    """Number of microbatches. Values between two stages are told apart by their order: it must be the same for all."""
    orders = [[word[1:] for word in row.split() if word[0] == kind] for row in rows for kind in "FB"]
    if any(order != orders[0] for order in orders[::2]) or any(order != orders[1] for order in orders[1::2]):
        raise ValueError("every stage must run the microbatches in the same order")
    if sorted(orders[0]) != sorted(set(orders[1])) or len(orders[0]) != len(orders[1]):
        raise ValueError("every stage must run each microbatch once forward and once backward")
    return len(orders[0])


def _has_gradient(crossing: Crossing, dtype: torch.dtype) -> bool:
    return crossing.gradient and dtype.is_floating_point
