"""The configurations that an expert would write down, as points of the same search."""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.passes.inter_options import MeshShape
from autoshard.passes.inter_search import Candidate, Search, Wanted, without_memory
from autoshard.passes.inter_sites import Sites
from autoshard.plan import Baseline


@dataclass(frozen=True)
class Textbook:
    """A configuration by name: every stage has this mesh shape."""

    name: str
    wanted: Wanted


@dataclass(frozen=True)
class PricedBaseline:
    """A baseline and the pipeline behind it (None: it cannot run, or does not fit)."""

    baseline: Baseline
    candidate: Candidate | None


def textbooks(sites: Sites, segments: int) -> Iterator[Textbook]:
    """Single device, data parallel, ZeRO-3, and every grid dp x tp x pp of all devices with tp inside a node."""
    devices = sites.cluster.size
    yield Textbook("single device", Wanted(1, (), False))
    if devices == 1:
        return
    data: MeshShape = (("dp", devices),)
    yield Textbook(f"dp={devices}", Wanted(1, data, False))
    yield Textbook(f"zero3 dp={devices}", Wanted(1, data, True))
    for pp in range(1, min(devices, segments) + 1):
        each = devices // pp
        if devices % pp or each not in sites.sizes:
            continue
        for shape in sites.shapes(each):
            sizes = dict(shape)
            name = f"dp={sizes.get('dp', 1)},tp={sizes.get('tp', 1)},pp={pp}"
            if (pp, shape) != (1, data):
                yield Textbook(name, Wanted(pp, shape, False))


def price_baselines(search: Search, books: Iterator[Textbook]) -> tuple[PricedBaseline, ...]:
    """Each textbook configuration with its best microbatch count, cuts and remat; unlimited memory where none fits.

    Those that the search has no time left for have no price.
    """
    found = []
    for book in books:
        if search.is_late():
            found.append(PricedBaseline(Baseline(book.name, None, None, False), None))
            continue
        candidate = search.best(book.wanted)
        shown = candidate or search.best(without_memory(book.wanted))
        peak = max(search.peak_bytes(shown), default=None) if shown else None
        time_s = shown.step_time_s if shown else None
        found.append(PricedBaseline(Baseline(book.name, time_s, peak, candidate is not None), candidate))
    return tuple(found)
