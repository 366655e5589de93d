"""`parallelize`: a model that trains on all ranks of torchrun, in the user's own loop.

    @autoshard.parallelize(cluster="cluster.toml")
    class GPT(nn.Module): ...

    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for tokens, targets in batches:
        loss = model(tokens, targets)      # the first call traces, plans and loads this rank's part
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

In one process the model is left as it is. Under torchrun a call of the model is a whole training step: its forward
must return the loss, and what else it returns is None.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autoshard.cluster import Cluster
from autoshard.errors import BadInput
from autoshard.parallel_model import Request, Running, bound, is_distributed, make_running, of_class
from autoshard.plan import Plan

T = TypeVar("T")

_STATE = "_autoshard"
"""Attribute of a parallel model. Not a dict: torch.export copies those of a model that it traces."""


def parallelize(
    model: T | None = None,
    *,
    cluster: Cluster | str | Path | None = None,
    mesh: str | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str = "auto",
    pins: Mapping[str, str] | None = None,
    cut_before: Sequence[str] | None = None,
    optimizer: str = "adamw",
    memory_limit: int | str | None = None,
    time_limit: float | None = None,
    plan: Plan | str | Path | None = None,
    inputs: str = "global",
) -> Any:
    """A model, or a class or function that makes one, so that it runs on all ranks; left out: a decorator of these.

    cluster, and what fixes a part of the search: as for `compile`; the plan must use as many ranks as there are.
    inputs: "global": every rank passes the same batch and takes its part of it. "share": every rank passes its
        data-parallel share, ranks of one replica the same; `mesh` must then be given, and says how many there are.

    The first call is for all ranks together: rank 0 traces and plans, all get the same program, kept in memory.
    Parameters keep their identity: optimizers made before hold this rank's part, nothing for other stages. Parameters
    are rank 0's; of a model on the meta device they follow from their names. `model.state_dict()` has this rank's
    parts; `full_state_dict(model)` the whole. Under `torch.no_grad()` a call gives the loss alone. model.eval() is
    refused where the program of training cannot do it (batch norm).
    Raises every AutoshardError but NotEqual, on all ranks; BadInput for a cluster, mesh or inputs that are not there.
    """
    if inputs not in ("global", "share"):
        raise BadInput(f"inputs is '{inputs}'", help='give "global" or "share"')
    if inputs == "share" and mesh is None:
        raise BadInput("inputs are shares of a batch, and no mesh says of how many", help='give mesh="dp=2,tp=4"')
    if cluster is None and plan is None:
        raise BadInput("there is no cluster to plan for", help='give one: cluster="1x8@A100-80GB", or a TOML file')
    fixed = {
        "cluster": cluster,
        "mesh": mesh,
        "stages": stages,
        "microbatches": microbatches,
        "schedule": schedule,
        "pins": pins,
        "cut_before": cut_before,
        "optimizer": optimizer,
        "memory_limit": memory_limit,
        "time_limit": time_limit,
        "plan": plan,
    }
    request = Request(fixed, inputs)

    def wrap(given: Any) -> Any:
        if isinstance(given, nn.Module):
            return _diverted(given, request)
        if isinstance(given, type) and issubclass(given, nn.Module):
            return _diverting_class(given, request)
        if callable(given):
            return _diverting_function(given, request)
        raise BadInput(
            f"a {type(given).__name__} cannot be parallelized", help="give a module, or a class or function making one"
        )

    return wrap if model is None else wrap(model)


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The whole state dict of a parallel model, on the CPU of every rank. All ranks call it together.

    Before the first call, and in one process: the model's own.
    """
    running = _running(model)
    return dict(model.state_dict()) if running is None else running.full_state()


def load_full_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill this rank's part of a parallel model from a whole state dict under the original names."""
    running = _running(model)
    if running is None:
        model.load_state_dict(state)
    else:
        running.parameters.load_full(running.module, running.mesh, state)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale a model's gradients to a 2-norm of at most `max_norm` over all ranks; returns the norm before.

    In place of torch.nn.utils.clip_grad_norm_, which sees only this rank's parts and would scale each rank otherwise.
    All ranks call it together. In one process it is torch's.
    """
    running = _running(model)
    if running is None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return running.clip(max_norm)


def _running(model: nn.Module) -> Running | None:
    state: _State | None = model.__dict__.get(_STATE)
    return None if state is None else state.running


# Diverting a model's call ---------------------------------------------------------------------------------------------


@dataclass
class _State:
    """What a parallel model remembers: its own class, and what runs from its first call on."""

    kind: type[nn.Module]
    request: Request
    running: Running | None = None


class _Parallel(nn.Module):
    """Put before the user's class once a model is parallel."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state: _State = self.__dict__[_STATE]
        args, kwargs = bound(self, args, kwargs)
        if state.running is None:
            with of_class(self, state.kind):
                state.running = make_running(self, state.request, args, kwargs)
        return state.running.run(self, state.request, args, kwargs)


def _diverted(model: nn.Module, request: Request) -> nn.Module:
    """The same object; among several ranks its class becomes one whose call runs the emitted program."""
    if not is_distributed() or isinstance(model, _Parallel):
        return model
    kind = type(model)
    model.__dict__[_STATE] = _State(kind, request)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    model.__class__ = type(kind.__name__, (_Parallel, kind), names)
    return model


def _diverting_class(kind: type[nn.Module], request: Request) -> type[nn.Module]:
    """The same class, whose instances are diverted when they are made. Subclasses are not."""
    made = kind.__init__

    @functools.wraps(made)
    def initialise(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if type(self) is kind:
            _diverted(self, request)

    kind.__init__ = initialise  # type: ignore[method-assign]
    return kind


def _diverting_function(make: Callable[..., Any], request: Request) -> Callable[..., nn.Module]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> nn.Module:
        model = make(*args, **kwargs)
        if not isinstance(model, nn.Module):
            raise BadInput(f"{make.__name__} returned a {type(model).__name__}, not a module")
        return _diverted(model, request)

    return made
