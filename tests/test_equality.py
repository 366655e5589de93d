"""The equality matrix: every tiny model under every configuration trains as the model does, to 1e-9 in float64.

The whole of it takes long. Cells that are not in `COVERING` are marked `matrix`: `make matrix` runs all of them, the
ordinary run passes them over.
"""

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from autoshard.verify import TOLERANCE
from tests.equality import CONFIGURATIONS, MODELS, compiled, errors_of, subject, with_args

ONLY = {  # of a configuration that not every model is run under, the models
    "pp2_dp2_tp2": ("gpt_tiny", "llama_tiny", "hf_t5"),
    "gpipe": ("gpt_tiny",),
    "sequence": ("gpt_tiny",),
    "synced": ("resnet_tiny",),
}
CELLS = tuple((model, name) for model in MODELS for name in CONFIGURATIONS if model in ONLY.get(name, MODELS))
COVERING = frozenset(
    {
        ("gpt_tiny", "pp2_dp2_tp2"),
        ("gpt_tiny", "gpipe"),
        ("gpt_tiny", "sequence"),
        ("gpt_tiny", "zero3"),
        ("gpt_tiny", "planned"),
        ("llama_tiny", "tp4"),
        ("llama_tiny", "pp2_dp2"),
        ("mlp", "dp4"),
        ("mlp", "pp2_tp2"),
        ("vit_tiny", "dp2_tp2"),
        ("vit_tiny", "zero3"),
        ("resnet_tiny", "dp4"),
        ("resnet_tiny", "pp2_tp2"),
        ("resnet_tiny", "synced"),
        ("encdec_tiny", "pp2_tp2"),
        ("encdec_tiny", "tp4"),
        ("hf_gpt2", "dp2_tp2"),
        ("hf_gpt2", "pp2_dp2"),
        ("hf_llama", "dp4"),
        ("hf_llama", "planned"),
        ("hf_bert", "tp4"),
        ("hf_bert", "dp4"),
        ("hf_vit", "dp2_tp2"),
        ("hf_vit", "planned"),
        ("hf_t5", "pp2_dp2"),
        ("hf_t5", "zero3"),
    }
)


def cell(model: str, name: str) -> object:
    """A parameter set; cells of a model go to one worker, which traces the model once."""
    marks = [pytest.mark.xdist_group(model)]
    if (model, name) not in COVERING:
        marks += [pytest.mark.matrix, pytest.mark.slow]
    return pytest.param(model, name, marks=marks, id=f"{model}-{name}")


@pytest.mark.parametrize(("model", "name"), [cell(*pair) for pair in CELLS])
def test_training_is_equal(model: str, name: str, record_property: Callable[[str, object], None]) -> None:
    errors = errors_of(subject(model), compiled(model, name))
    record_property("error", max(worst.error for worst in errors.worst.values()))
    assert errors.equal(TOLERANCE), str(errors)


@pytest.mark.parametrize("name", ["zero3", "pp2_dp2_tp2"])
def test_batch_and_sequence_are_symbols(name: str) -> None:
    """What was compiled for 8 samples of 32 tokens trains on 12 of 24."""
    found = subject("gpt_tiny")
    assert found.workload.args[0].shape == (8, 32)
    errors = errors_of(with_args(found, *torch.randint(128, (2, 12, 24))), compiled("gpt_tiny", name))
    assert errors.equal(TOLERANCE), str(errors)


def test_the_ordinary_run_covers_every_model_and_configuration() -> None:
    assert set(CELLS) >= COVERING
    models, names = (Counter(pair[place] for pair in COVERING) for place in (0, 1))
    assert all(models[model] >= 2 for model in MODELS)
    assert all(names[name] >= (1 if name in ONLY else 3) for name in CONFIGURATIONS)
