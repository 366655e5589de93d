"""Names that emitted files use for themselves: variables avoid them, classes get a number, inputs are refused."""

import builtins
import keyword
from collections.abc import Iterable

from autoshard.errors import BadInput
from autoshard.passes.lower_convert import FUNCTIONS

_HELPERS = """
    gather_parameter gather_again shard_size vocab_embedding vocab_cross_entropy batch_norm sync_batch_norm dropout
    attention_with_dropout checkpoint materialize fill_buffers summed_groups
    GradientReducer Mesh MicrobatchStep PipelineStep Crossing Tied
"""
_LIBRARIES = "torch nn F dist functools Mapping ProcessGroup Tensor ClassVar Path"
IMPORTED = frozenset({*FUNCTIONS.values(), *_HELPERS.split(), *_LIBRARIES.split()})
VARIABLES = IMPORTED | {"self", *keyword.kwlist, *dir(builtins)}
"""What no variable may be called."""

_OF_CLASSES = frozenset({"PLACEMENTS", "SUMMED"})
_OF_STAGES = frozenset({"microbatches", "totals", "denominators"})


def check_names(inputs: Iterable[str], attributes: Iterable[str]) -> None:
    """Refuse what cannot keep its name. attributes: full names of modules and parameters. Raises BadInput."""
    for name in inputs:
        if name in IMPORTED or name == "self" or keyword.iskeyword(name):
            raise BadInput(
                f"an input of the model is called '{name}', which emitted code uses for something else",
                help="rename that argument of forward",
            )
    for path in attributes:
        parent, _, name = path.rpartition(".")
        if name in _OF_CLASSES or (not parent and name in _OF_STAGES):
            raise BadInput(
                f"'{path}' of the model is called as something that emitted code adds to its modules",
                help="rename that attribute",
            )
