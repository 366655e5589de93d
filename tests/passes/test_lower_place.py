"""Where a conversion stands: in which module call, and before which operator."""

import pytest

from autoshard.passes.lower_place import Place, Placer
from autoshard.program import Frame

CLASSES = {"": "Model", "blocks": "torch.nn.modules.container.ModuleList", "norm": "torch.nn.LayerNorm"} | {
    f"blocks.{n}{below}": kind
    for n in range(2)
    for below, kind in (("", "Block"), (".mlp", "MLP"), (".mlp.up", "torch.nn.Linear"), (".own", "Scale"))
}  # fmt: skip


def frames(*paths):
    return tuple(Frame(path, 0, CLASSES[path]) for path in ("", *paths))


CALLS = [
    frames(),  # 0: makes x
    frames("blocks.0", "blocks.0.own"),
    frames("blocks.0", "blocks.0.mlp", "blocks.0.mlp.up"),  # 2
    frames("blocks.0", "blocks.0.mlp"),
    frames("blocks.0"),  # 4
    frames("blocks.1", "blocks.1.own"),
    frames("blocks.1", "blocks.1.mlp", "blocks.1.mlp.up"),  # 6
    frames("norm"),
]


@pytest.mark.parametrize(
    ("readers", "producer", "maker", "position", "path"),
    [
        ((2, 3), 1, 1, 2, "blocks.0.mlp"),  # the call that holds both
        ((1, 3), 0, 0, 1, ""),  # from outside a repeated block: before the block
        ((2,), 1, 1, 2, "blocks.0.mlp"),  # not inside a module without children
        ((4,), 3, 3, 4, "blocks.0"),
        ((2, 6), 1, 1, 2, "blocks.0"),  # readers in two blocks: where it is made, and passed on
        ((6,), 4, 4, 5, ""),  # from one block into the next
        ((7,), 6, 6, 7, ""),
        ((8,), 7, 7, 8, ""),  # the end of the stage
        ((2,), -1, None, 2, "blocks.0.mlp"),  # stored by torch's own module: around its call
        ((1,), -1, None, 1, "blocks.0.own"),  # stored by the user's own module: in it
        ((2, 6), -1, None, 1, ""),  # shared by blocks
        ((2,), -1, -1, 1, ""),  # an input of the stage, read in a block
    ],
)
def test_place(readers, producer, maker, position, path):
    place = Placer(CALLS, CLASSES).place(readers, producer, maker)
    assert (place.position, place.frames[-1].path) == (position, path)
    assert place == Place(position, CALLS[min(*readers, 7, 7)][: len(place.frames)])
