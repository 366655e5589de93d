"""The whole step's time of solved stages, by the simulator, and what it is made of."""

from collections.abc import Mapping, Sequence

from autoshard import schedule
from autoshard.cost.prices import Prices
from autoshard.cost.simulate import Simulation, StageTimes, simulate
from autoshard.passes.inter_sites import Sites
from autoshard.placement import Layout, local_shape
from autoshard.plan import Predicted, StagePlan
from autoshard.program import TensorType


def predicted(
    stages: Sequence[StagePlan],
    microbatches: int,
    name: str,
    transfers_s: Sequence[float],
) -> Predicted:
    """Simulate one step. transfers_s[i]: seconds from stage i to i + 1 for one microbatch, as long back.

    The breakdown is that of the stage that ends the step: what it computes and communicates, its gradient sums and
    optimizer; "transfers" is what the step takes longer than it would with transfers for nothing, "bubble" the rest.
    """
    run = _simulated(stages, microbatches, name, transfers_s)
    without = _simulated(stages, microbatches, name, [0.0] * len(transfers_s))
    # Of stages that end together, the one with the most work waits least.
    last = max(range(len(stages)), key=lambda number: (_end_s(run, stages, number), run.busy_s[number]))
    parts = stages[last].predicted
    transfers = max(0.0, run.step_time_s - without.step_time_s)
    breakdown = {
        "compute": microbatches * parts.compute_s,
        "collectives": microbatches * parts.collectives_s,
        "gradient sums": parts.once_s,
        "optimizer": parts.optimizer_s,
        "transfers": transfers,
    }
    breakdown["bubble"] = max(0.0, run.step_time_s - sum(breakdown.values()))
    excess = sum(breakdown.values()) - run.step_time_s
    breakdown["transfers"] -= min(excess, breakdown["transfers"])
    return Predicted(
        sum(breakdown.values()),
        tuple(stage.predicted.peak_memory_bytes for stage in stages),
        breakdown,
    )


def _simulated(stages: Sequence[StagePlan], microbatches: int, name: str, transfers_s: Sequence[float]) -> Simulation:
    times = [
        StageTimes(
            stage.predicted.forward_s, stage.predicted.backward_s, stage.predicted.once_s + stage.predicted.optimizer_s
        )
        for stage in stages
    ]
    return simulate(schedule.build(name, len(stages), microbatches), times, tuple(transfers_s))


def _end_s(run: Simulation, stages: Sequence[StagePlan], number: int) -> float:
    ends = [event.end_s for event in run.timeline if event.stage == number]
    predicted = stages[number].predicted
    return max(ends, default=0.0) + predicted.once_s + predicted.optimizer_s


def boundary_transfers_s(
    stages: Sequence[StagePlan], sites: Sites, types: Mapping[str, TensorType], optimizer: str
) -> tuple[float, ...]:
    """Seconds of what crosses each boundary for one microbatch, each receiving device its share.

    types: of each value that crosses, in one microbatch. A value that passes a stage by is counted at every boundary on
    its way.
    """
    found = []
    for number in range(len(stages) - 1):
        left, right = stages[number], stages[number + 1]
        arriving: dict[str, int] = {}
        for later in stages[number + 1 :]:
            for name, layout in later.receives.items():
                if any(name in earlier.sends for earlier in stages[: number + 1]):
                    arriving.setdefault(name, _local_bytes(types[name], layout, later.mesh.sizes))
        prices = Prices(sites.cluster, left.mesh, optimizer)
        found.append(prices.transfer_s(sum(arriving.values()), left.mesh, right.mesh) if arriving else 0.0)
    return tuple(found)


def _local_bytes(type_: TensorType, layout: Layout, sizes: Sequence[int]) -> int:
    return TensorType(local_shape(type_.shape, layout, sizes), type_.dtype).nbytes
