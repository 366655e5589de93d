"""Layouts that the user fixed: patterns matched against parameters, inputs and modules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autoshard.errors import BadInput
from autoshard.placement import Placement
from autoshard.program import Frame, Program


@dataclass(frozen=True)
class Pin:
    """One tensor's placement on one axis.

    pattern: fnmatch on a parameter's name (any alias), "input:NAME", or a module's path (results of its last operator).
    """

    pattern: str
    placement: Placement
    axis: str

    def __str__(self) -> str:
        return f"{self.pattern}={self.placement}@{self.axis}"


@dataclass(frozen=True)
class Pinned:
    """Pins by node: (axis number, pin). Placeholders: their own layout; operators: their first result's."""

    by_node: Mapping[str, tuple[tuple[int, Pin], ...]]

    def of(self, node: str) -> tuple[tuple[int, Pin], ...]:
        """Pins of a node."""
        return self.by_node.get(node, ())


def match_pins(program: Program, pins: Sequence[Pin], axes: Sequence[str]) -> Pinned:
    """Find what each pin names. Raises BadInput for a pin that names nothing, or an axis that the mesh lacks.

    A pin on an axis of the user's mesh is needed; one on an axis that this mesh lacks is refused.
    """
    found: dict[str, list[tuple[int, Pin]]] = {}
    for pin in pins:
        if pin.axis not in axes:
            raise BadInput(f"pin {pin} names axis '{pin.axis}'", help=f"axes of the mesh: {', '.join(axes) or 'none'}")
        nodes = _named(program, pin)
        if not nodes:
            raise BadInput(
                f"pin {pin} names no parameter, input or module",
                help="write a parameter's name, input:NAME or a module's path",
            )
        for node in nodes:
            found.setdefault(node, []).append((axes.index(pin.axis), pin))
    return Pinned({node: tuple(pinned) for node, pinned in found.items()})


def _named(program: Program, pin: Pin) -> list[str]:
    if pin.pattern.startswith("input:"):
        name = pin.pattern.removeprefix("input:")
        return [node for node, given in program.inputs.items() if fnmatchcase(given.name, name)]
    parameters = [
        node
        for node, parameter in program.parameters.items()
        if any(fnmatchcase(name, pin.pattern) for name in (parameter.name, *parameter.aliases))
    ]
    if parameters:
        if pin.placement.kind not in ("I", "S"):
            raise BadInput(f"pin {pin} stores a parameter as {pin.placement}", help="parameters are stored I or S(dim)")
        return parameters
    return _last_operators(program, pin.pattern)


def _last_operators(program: Program, pattern: str) -> list[str]:
    """The last operator of each module whose path matches."""
    last: dict[str, str] = {}
    for node in program.operators():
        frames: tuple[Frame, ...] = node.meta.get("frames", ())
        for frame in frames:
            if frame.path and fnmatchcase(frame.path, pattern):
                last[frame.path] = node.name
    return list(dict.fromkeys(last.values()))
