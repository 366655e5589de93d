"""The intra-operator pass: how every operator of a run of segments is sharded over one mesh, by an integer program.

Variables
    x[n,s]      1 if node n runs strategy s          n: operators, stored parameters, inputs, values that cross stages
    e[t,u,q,p]  share of value t that is made in layout q and that use u wants in layout p, >= 0
    y[t,q,p]    t is converted from q to p, for all uses that share the conversion
    z[t,q,c]    the gradient of parameter t, stored as q, is summed once a step from partial sums c
    m[t,c]      value t is kept for backward in the memory that layouts c have in common
    w, v        bytes at work beside everything kept: the largest transient, the largest segment that is run again

Objective, in seconds of one step (M microbatches, count[n] equal blocks; forward counts twice where it is run again)
    sum x[n,s] count[n] (M (forward + backward)[n,s] + optimizer[n,s])
  + sum y[t,q,p] count M (forward + backward)[t,q,p]          e in place of y where a use is alone
  + sum z[t,q,c] count once[t,q,c]
  + price of a byte * (left side of "memory")
  A parameter that is gathered (S -> R) is gathered in every microbatch, again in backward, and its gradient is
  scattered: 2 forward + backward. One that is stored whole and used by different samples (I -> R) is summed once.

Families of rows, and the functions that build them
    "choice"     sum_s x[n,s] = 1                                               intra_model._choose
    "producer"   sum_p e[t,u,q,p] = sum of x[producer(t),s] that yield q        intra_model._flow
    "consumer"   sum_q e[t,u,q,p] = sum of x[u,s] that want p                   intra_model._flow
    "shared"     y[t,q,p] >= e[t,u,q,p]                                         intra_model._shared
    "summed"     z[t,q,c] >= sum_{p in c} e[t,u,q,p]                            intra_model._summed
    "saved"      m[t,c] >= sum of x of one keeper of t whose layout is c        intra_memory._kept_once
    "transient"  w >= bytes of one node or conversion at work                   intra_memory.build
    "again"      v >= bytes that one segment saves while it is run again        intra_memory.build
    "memory"     parameters + gradients + optimizer states
                 + in flight * (saved, or what enters a segment that is run again) + w + v <= limit
                                                                                intra_memory._limit
Only x is integer: for fixed x the rest is a transport problem, whose vertices are integral.

How it is solved (`intra_solve`). Whether a segment is run again (remat) is decided outside: each way is a program of
its own. Message passing (`intra_ascent`) bounds each from below and finds choices; what provably cannot be part of a
better choice gets no columns, and HiGHS solves the few thousand that are left. The optimum is kept; the gap that is
reported is between the choice's bill and the bound. Without bytes first: a choice that fits is the optimum, since bytes
only forbid.

Folding (`intra_fold`): equal segments are one group whose nodes count k times. What one block hands to the next is
converted k times, what all read (masks, tables) once, and what enters the run is first brought, once, to the layout in
which the blocks hand it on. Every folded plan is a plan of the unfolded chain at the same price.
Nothing is merged before solving: messages along a chain of operators do what merging would.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from autoshard.cluster import Cluster
from autoshard.cost.prices import Prices
from autoshard.passes.intra_assembly import Assembly, Surroundings
from autoshard.passes.intra_bill import Terms
from autoshard.passes.intra_fold import Folder
from autoshard.passes.intra_pins import Pin, match_pins
from autoshard.passes.intra_read import ChainSolution, Reading, SegmentCost, explain
from autoshard.passes.intra_solve import OutOfMemory, Solver
from autoshard.passes.intra_strategies import EvenRule, StrategyMaker, Uneven
from autoshard.passes.intra_tables import TableMaker
from autoshard.passes.microbatch import CoupledSamples, sample_placements
from autoshard.passes.segment import Chain
from autoshard.placement import Layout
from autoshard.plan import Mesh
from autoshard.program import Program, Value
from autoshard.rules import AxisStrategy

__all__ = ["ChainProblem", "ChainSolution", "Pin", "SegmentCost", "solve_chain"]


@dataclass(frozen=True)
class ChainProblem:
    """Segments [start, stop) of a chain on one mesh.

    microbatches: of one step; sizes are those of one of them. in_flight: microbatches whose activations are alive at
    the peak. memory_limit_bytes: of one device, None for no limit; reserved_bytes of it are not the plan's.
    memory_price_s_per_byte: seconds that a byte at the peak is worth. remat: True or False for all segments that are
    modules, None to choose. uneven: which dims may be cut into unequal shards. receives, sends: layouts already decided
    of values that cross into or out of the range. fold: solve equal segments once.
    samples: what `sample_placements(program)` gave, where the caller knows it; prices: the mesh's, likewise.
    used: axes that must be used for what their names say (`intra_split`).
    """

    program: Program
    chain: Chain
    segments: tuple[int, int]
    cluster: Cluster
    mesh: Mesh
    microbatches: int = 1
    optimizer: str = "adamw"
    memory_limit_bytes: int | None = None
    in_flight: int = 1
    reserved_bytes: int = 0
    memory_price_s_per_byte: float = 0.0
    remat: bool | None = None
    pins: tuple[Pin, ...] = ()
    time_limit_s: float = 60.0
    relative_gap: float = 1e-6
    uneven: Uneven = "weights"
    receives: Mapping[Value, Layout] | None = None
    sends: Mapping[Value, Layout] | None = None
    fold: bool = True
    samples: Mapping[str, AxisStrategy] | None = None
    used: tuple[str, ...] = ()
    prices: Prices | None = None


def solve_chain(problem: ChainProblem) -> ChainSolution:
    """The cheapest way to run the segments on the mesh.

    Raises InfeasiblePlan where memory or pins leave nothing (bytes short, largest tensors, what would fit), BadInput
    for pins that name nothing, CoupledSamples where several microbatches cannot be cut apart.
    """
    assembly = assemble(problem)
    graph = assembly.build()
    prices = assembly.maker.prices
    maker = TableMaker(prices)
    tables = [maker.table(graph, wire) for wire in graph.wires]
    limit = None if problem.memory_limit_bytes is None else problem.memory_limit_bytes - problem.reserved_bytes
    terms = Terms(problem.microbatches, problem.in_flight, limit, problem.memory_price_s_per_byte)
    remat = tuple(problem.remat if group.path else False for group in graph.groups)
    solver = Solver(graph, tables, terms, remat, problem.time_limit_s, problem.relative_gap)
    try:
        solved = solver.solve()
    except OutOfMemory as short:
        raise explain(assembly, graph, terms, short) from None
    return Reading(assembly, graph, solved).solution()


def assemble(problem: ChainProblem) -> Assembly:
    """What the choice graph is built from."""
    program, axes, segments = problem.program, problem.mesh.axes, problem.chain.segments
    pinned = match_pins(program, problem.pins, axes)

    def mark(name: str) -> Hashable:
        return pinned.of(name)

    folder = Folder(program, segments, mark)
    start, stop = problem.segments
    runs = (
        folder.runs(start, stop)
        if problem.fold
        else tuple(run for n in range(start, stop) for run in folder.runs(n, n + 1))
    )
    sizes = frozenset(size for parameter in program.parameters.values() for size in parameter.type.shape)
    prices = problem.prices or Prices(problem.cluster, problem.mesh, problem.optimizer)
    maker = StrategyMaker(problem.mesh.sizes, prices, EvenRule(problem.uneven, sizes), problem.optimizer)
    around = Surroundings(
        axes, problem.microbatches, _samples(problem), pinned, problem.receives or {}, problem.sends or {}, problem.used
    )
    return Assembly(program, segments, start, stop, runs, maker, around)


def _samples(problem: ChainProblem) -> Mapping[str, AxisStrategy]:
    """Where samples lie in every value. One microbatch may couple them; then no dim is known to count samples."""
    if problem.samples is not None:
        return problem.samples
    try:
        return sample_placements(problem.program)
    except CoupledSamples:
        if problem.microbatches > 1:
            raise
        return {}
