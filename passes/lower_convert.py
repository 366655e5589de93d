"""Single changes of placement as calls of the functions of `autoshard/runtime/collectives.py`, with their reasons."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autoshard.cost.convert import Step
from autoshard.passes.local import Extent, Ref
from autoshard.placement import Kind, Placement

FUNCTIONS: Mapping[tuple[Kind, Kind], str] = MappingProxyType(
    {
        ("S", "R"): "all_gather",
        ("S", "I"): "all_gather_invariant",
        ("P", "I"): "all_reduce",
        ("P", "R"): "all_reduce_both",
        ("P", "S"): "reduce_scatter",
        ("I", "R"): "sum_gradient",
        ("I", "S"): "shard",
        ("R", "S"): "take_shard",
        ("I", "P"): "keep_one",
        ("R", "P"): "keep_one_both",
        ("R", "I"): "keep_one_gradient",
        ("S", "P"): "pad_shard",
        ("S", "S"): "all_to_all",
    }
)
_NEED_SIZE = frozenset({"all_gather", "all_gather_invariant", "gather_parameter", "pad_shard", "all_to_all"})


@dataclass(frozen=True)
class Call:
    """A function with its arguments besides the tensor, group left out."""

    function: str
    arguments: Mapping[str, Any]


def call(step: Step, x: str, is_parameter: bool, whole: Extent | None) -> Call:
    """The call that does one step on the tensor `x`.

    whole: the extent, before this axis cut it, of the dim that is sharded at the step's start; None where it is not.
    """
    source, target = step.source, step.target
    function = FUNCTIONS[source.kind, target.kind]
    if function == "all_gather" and is_parameter:
        function = "gather_parameter"
    arguments: dict[str, Any] = {"x": Ref(x)}
    if function == "all_to_all":
        arguments |= {"source": source.dim, "target": target.dim}
    elif source.is_sharded or target.is_sharded:
        arguments["dim"] = source.dim if source.is_sharded else target.dim
    if function in _NEED_SIZE and whole is not None:
        arguments["size"] = whole
    return Call(function, arguments)


def reason(source: Placement, target: Placement, axis: str, wanted_by: str, is_parameter: bool) -> str:
    """Why a step is there, in a few words."""
    if is_parameter and source.is_sharded and not target.is_sharded:
        return f"{axis} stores a part of it each: gather it for this use"
    match source.kind, target.kind:
        case "S", "R" | "I":
            return f"{wanted_by} needs all of dim {source.dim}, which {axis} splits"
        case "P", "S":
            return f"add up the partial sums of {axis}, keep a share of dim {target.dim}"
        case "P", _:
            return f"add up the partial sums of {axis}"
        case "I", "R":
            return f"each rank of {axis} uses this for its own part: in backward, add up the gradients"
        case "S", "S":
            return f"{wanted_by} needs all of dim {source.dim}: split dim {target.dim} over {axis} instead"
        case _, "S":
            return f"each rank of {axis} keeps its share of dim {target.dim}"
        case _, "P":
            return f"it will be added to partial sums over {axis}: one rank adds it"
        case _:
            return f"every rank of {axis} goes on with the same: count its gradient once"


def price_words(size_bytes: float, forward_s: float, backward_s: float) -> str:
    """ "2.0 MiB, 12 us forward, 12 us backward"; what takes no time is left out."""
    parts = [size_words(size_bytes)]
    parts += [
        f"{time_words(seconds)} {way}" for seconds, way in ((forward_s, "forward"), (backward_s, "backward")) if seconds
    ]
    return ", ".join(parts)


def size_words(size_bytes: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def time_words(seconds: float) -> str:
    """Seconds with a unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
