"""Where a change of placement stands: in which module call, and before which operator.

It stands in the innermost call that holds all its readers (not inside a module without children, a norm say, which
should stay as the user wrote it), before the first of them, and before the child call that this first reader is in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.program import Frame

CONTAINERS = frozenset({f"torch.nn.modules.container.{name}" for name in ("Sequential", "ModuleList", "ModuleDict")})

Call = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """Before the operator at `position`, inside the module calls `frames`."""

    position: int
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Placer:
    """calls: the frames of every operator of a stage, in order. classes: module path -> class, of the whole model."""

    calls: Sequence[tuple[Frame, ...]]
    classes: Mapping[str, str]

    def place(self, readers: Sequence[int], producer: int, maker: int | None) -> Place:
        """The place of a change for these operators, after the operator `producer` (-1: from the start).

        A reader at the number of operators stands for the end of the outermost call. maker: the operator that made the
        value first, -1 for what enters the stage, None for what is stored. What comes into a repeated block from
        outside is changed outside, so that blocks stay alike.
        """
        first = min(readers)
        depth = self._depth(readers, maker is None)
        if maker is not None:
            depth = self._outside_blocks(first, depth, self._frames(maker) if maker >= 0 else ())
        position = self._start(first, depth)
        while position <= producer and depth < len(self._frames(first)):
            depth += 1
            position = self._start(first, depth)
        return Place(max(position, producer + 1), self._frames(first)[:depth])

    def _frames(self, index: int) -> tuple[Frame, ...]:
        if index < len(self.calls):
            return self.calls[index]
        return self.calls[-1][:1] if self.calls else ()

    def _depth(self, readers: Sequence[int], is_stored: bool) -> int:
        """How many frames all readers share, less those better left alone: what a module stores stays in it."""
        chains = [self._frames(index) for index in readers]
        depth = 0
        while all(depth < len(chain) for chain in chains) and len({_key(chain[depth]) for chain in chains}) == 1:
            depth += 1
        while depth > 1 and self._is_closed(chains[0][depth - 1], is_stored):
            depth -= 1
        return max(depth, 1)

    def _outside_blocks(self, first: int, depth: int, maker: tuple[Frame, ...]) -> int:
        frames = self._frames(first)
        for level in range(1, depth):
            if frames[level].path.rpartition(".")[2].isdigit():
                shared = [_key(frame) for frame in maker[: level + 1]] == [_key(frame) for frame in frames[: level + 1]]
                if not shared:
                    return level
        return depth

    def _is_closed(self, frame: Frame, is_stored: bool) -> bool:
        if frame.class_name in CONTAINERS:
            return True
        childless = not has_children(frame.path, self.classes)
        return childless and (not is_stored or frame.class_name.startswith("torch.nn."))

    def _start(self, first: int, depth: int) -> int:
        """Where the child call that holds operator `first` begins, below the call of this depth."""
        frames = self._frames(first)
        if len(frames) <= depth:
            return first
        child = [_key(frame) for frame in frames[: depth + 1]]
        while first > 0 and [_key(frame) for frame in self._frames(first - 1)[: depth + 1]] == child:
            first -= 1
        return first


def has_children(path: str, classes: Mapping[str, str]) -> bool:
    """Whether a module has modules inside."""
    prefix = f"{path}." if path else ""
    return any(name.startswith(prefix) and name != path for name in classes)


def _key(frame: Frame) -> Call:
    return frame.path, frame.call
