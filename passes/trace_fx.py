"""The second front end: torch.fx.symbolic_trace, for simple models whose plain graph is wanted."""

from dataclasses import replace

from torch import fx

from autoshard.workload import Workload


def symbolic(workload: Workload) -> Workload:
    """The workload with its model replaced by the symbolically traced one."""
    return replace(workload, model=fx.symbolic_trace(workload.model))
