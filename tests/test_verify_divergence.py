"""The first operator that differs, named from a folder with a fault in it."""

from pathlib import Path

import pytest

from autoshard.api import compile
from autoshard.verify_program import verify

SUM = "all_reduce(self.mlp(self.post_attention_layernorm(x)), self.tp)"
FAULTS = [
    pytest.param(
        {"mesh": "dp=2,tp=2", "stages": 1, "microbatches": 2},
        "model.py",
        f"y = {SUM}",
        "y = self.mlp(self.post_attention_layernorm(x))",
        ("all_reduce over tp of what aten.linear.default makes", "model.layers.0.mlp, models/llama.py:63"),
        id="dropped all-reduce",
    ),
    pytest.param(
        {"mesh": "tp=2", "stages": 2, "microbatches": 2},
        "stage_1.py",
        "F.silu",
        "F.relu",
        ("stage 1, model.layers.2.mlp, models/llama.py:62",),
        id="another operator in a later stage",
    ),
    pytest.param(
        {"mesh": "dp=2,tp=2", "stages": 1},
        "model.py",
        "x = sum_gradient(x, self.tp)",
        "x = x",
        ("forward agrees", "model.layers.3.input_layernorm, models/llama.py:23"),
        id="missing sum in backward",
    ),
]


@pytest.mark.parametrize(("options", "file", "text", "fault", "words"), FAULTS)
def test_the_first_difference_is_named(
    options: dict[str, object], file: str, text: str, fault: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    compile("models/llama.py:llama_tiny", "1x4@cpu", **options).save(tmp_path)  # type: ignore[arg-type]
    source = (tmp_path / file).read_text()
    assert text in source
    (tmp_path / file).write_text(source.replace(text, fault, 1))
    result = verify(tmp_path)
    assert not result.equal
    assert result.first_divergence is not None
    assert all(word in result.first_divergence for word in words), result.first_divergence


def test_nothing_is_named_where_all_agrees(tmp_path: Path) -> None:
    compile("models/mlp.py:mlp", "1x2@cpu", mesh="dp=2").save(tmp_path)
    result = verify(tmp_path)
    assert result.equal and result.first_divergence is None
