"""Which module each operator belongs to, as far as cutting goes: a block of a list, or a child of what holds blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from autoshard.program import Frame, Program


@dataclass(frozen=True)
class Unit:
    """A module call that is cut as one. is_block: it is a member of a list of modules."""

    path: str
    call: int = 0
    is_block: bool = False


class Units:
    """of: the unit of every operator. child: where it is cut further, the module below its unit.

    A module is divided, down from the model, while it holds a list of modules or all of the parameters. Members of a
    list are divided only where they differ and are made of a list themselves, as stages of a convolution network are.
    """

    def __init__(
        self,
        program: Program,
        nodes: Sequence[fx.Node],
        key: Callable[[Sequence[int]], str],
        heavy: Callable[[Sequence[int]], bool],
        live: Sequence[int],
    ) -> None:
        self._key, self._heavy, self._live, self._classes = key, heavy, live, program.classes
        self._children: dict[str, list[str]] = {}
        for path in program.classes:
            if path:
                self._children.setdefault(path.rpartition(".")[0], []).append(path)
        self._numbers: dict[str, list[int]] = {}
        for n, node in enumerate(nodes):
            for frame in node.meta.get("frames", ()):
                self._numbers.setdefault(frame.path, []).append(n)
        self._owners = {parameter.name.rpartition(".")[0] for parameter in program.parameters.values()}
        self._divided: set[str] = set()
        self._blocks: set[str] = set()
        self._visit("")
        places = [self._place(node.meta.get("frames", ())) for node in nodes]
        self.of = [unit for unit, _ in places]
        self.child = [child for _, child in places]

    def _is_list(self, path: str) -> bool:
        """Whether a module's children are numbered, as in ModuleList and Sequential, and two or more do heavy work."""
        children = self._children.get(path, ())
        numbered = len(children) > 1 and all(child.rpartition(".")[2].isdigit() for child in children)
        return numbered and sum(self._heavy(self._numbers.get(child, ())) for child in children) > 1

    def _lists(self, path: str) -> list[str]:
        """The outermost lists at or below a module."""
        if self._is_list(path):
            return [path]
        return [found for child in self._children.get(path, ()) for found in self._lists(child)]

    def _visit(self, path: str) -> None:
        """Divide the module at `path`."""
        self._divided.add(path)
        children = self._children.get(path, [])
        if self._is_list(path):
            repeats, width = self._repeats(children), self._width(path)
            for child in children:
                if not repeats and self._is_made_of_list(child, width):
                    self._visit(child)
                else:
                    self._blocks.add(child)
            return
        owning = [child for child in children if any(_inside(owner, child) for owner in self._owners)]
        for child in children:
            if self._lists(child) or (owning == [child] and path not in self._owners):
                self._visit(child)

    def _repeats(self, members: Sequence[str]) -> bool:
        """Whether three or more members of a list, or all but the first, compute the same."""
        return len(members) > 2 and len({self._key(self._numbers.get(member, ())) for member in members[1:]}) == 1

    def _width(self, path: str) -> int:
        """Most tensors with a gradient alive between members of a list."""
        starts = [numbers[0] for child in self._children[path][1:] if (numbers := self._numbers.get(child))]
        return max((self._live[start] for start in starts), default=0)

    def _is_made_of_list(self, path: str, width: int) -> bool:
        """Whether it is a stage, not a block: most of it is a list of one class, cut as narrowly as the list around."""
        owners = [owner for owner in self._owners if _inside(owner, path)]
        for found in self._lists(path):
            one_class = len({self._classes[child] for child in self._children[found]}) == 1
            narrow = self._width(found) <= width
            if one_class and narrow and 2 * sum(_inside(owner, found) for owner in owners) > len(owners):
                return True
        return False

    def _place(self, frames: Sequence[Frame]) -> tuple[Unit, str]:
        owner = Unit("")
        for at, frame in enumerate(frames):
            if frame.path in self._divided:
                owner = Unit(frame.path, frame.call)
                continue
            is_block = frame.path in self._blocks
            below = frames[at + 1].path if is_block and at + 1 < len(frames) else frame.path
            return Unit(frame.path, frame.call, is_block), below
        return owner, owner.path


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")
