"""What the command line calls: load a workload and plan it."""

from autoshard.cluster import parse_cluster
from autoshard.compiler import PlanOptions, make_plan
from autoshard.loading import load_workload
from autoshard.plan import Plan
from autoshard.workload import Workload

__all__ = ["load_workload", "plan"]


def plan(workload: Workload, cluster: str, options: PlanOptions) -> Plan:
    """The plan of a workload on a cluster (a TOML file or "2x8@A100-80GB"). Raises AutoshardError."""
    return make_plan(workload, parse_cluster(cluster), options)[2]
