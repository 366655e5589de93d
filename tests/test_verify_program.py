"""Verifying a folder: equal, not equal, and everything that may be wrong with it."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.compiled import Compiled, write_files
from autoshard.errors import AutoshardError, BadInput, BadPlan, ProgramFailed
from autoshard.passes.trace import trace
from autoshard.verify_program import verify
from autoshard.verify_reference import make_reference
from autoshard.workload import Workload
from tests.folders import mlp_dp2_tp2, mlp_pp2


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return mlp_dp2_tp2()


def changed(compiled: Compiled, file: str, old: str, new: str) -> Compiled:
    text = compiled.files[file]
    assert isinstance(text, str) and old in text
    return replace(compiled, files={**compiled.files, file: text.replace(old, new)})


@pytest.mark.parametrize("make", [mlp_dp2_tp2, mlp_pp2])
def test_a_right_folder_is_equal_and_leaves_nothing_behind(make: Callable[[], Compiled], tmp_path: Path) -> None:
    before, path = set(sys.modules), list(sys.path)
    result = verify(make().save(tmp_path / "out"))
    assert result.equal, str(result)
    assert max(result.errors[category] for category in ("loss", "gradients", "buffers", "parameters")) < 1e-12
    assert sys.path == path
    assert not {"model", "mesh", "collectives", "stage_0"} & (set(sys.modules) - before)
    assert not list((tmp_path / "out").rglob("__pycache__"))


def test_a_model_on_the_meta_device_is_compared() -> None:
    assert verify(mlp_dp2_tp2(device="meta"), steps=1).equal


@pytest.mark.parametrize(
    ("old", "new", "category"),
    [
        ("F.gelu(", "F.relu(", "loss"),
        ("x = sum_gradient(x, self.tp)", "x = x + 0", "gradients"),
        ("return x + self.down_proj.bias", "return x + 1.000001 * self.down_proj.bias", "gradients"),
    ],
)
def test_a_wrong_program_is_not_equal(compiled: Compiled, old: str, new: str, category: str) -> None:
    result = verify(changed(compiled, "model.py", old, new), steps=1)
    assert not result.equal
    assert result.errors[category] > 1e-9
    assert "NOT equal" in str(result)


@pytest.mark.parametrize(
    ("old", "new", "kind", "said"),
    [
        ("class Block(nn.Module):", "class Block(nn.Module:", BadInput, "model.py:22"),
        ("WORLD_SIZE = 4", "WORLD_SIZES = 4", BadInput, "does not define WORLD_SIZE"),
        ("WORLD_SIZE = 4", "WORLD_SIZE = 2 + 2", BadInput, "model.py:18"),
        ("def build(", "def built(", BadInput, "does not define build"),
        ("from torch import Tensor, nn", "from torch import Tensor, nm", BadInput, "cannot import name 'nm'"),
        ('"targets": 0}', '"target": 0}', BadInput, "'target', which is no input"),
        ("x = F.gelu(self.up_proj(x))", "x = F.gelu(self.upp_proj(x))", ProgramFailed, "F.gelu(self.upp_proj(x))"),
        ("hidden: int = 256", "hidden: int = 128", ProgramFailed, "blocks.0.up_proj.weight"),
        ("x = F.gelu(self.up_proj(x))", "import os; os._exit(3)", ProgramFailed, "ended with code 3"),
    ],
)
def test_mistakes_in_the_folder_are_told_with_their_line(
    compiled: Compiled, tmp_path: Path, old: str, new: str, kind: type[AutoshardError], said: str
) -> None:
    write_files(changed(compiled, "model.py", old, new).files, tmp_path)
    with pytest.raises(kind) as caught:
        verify(tmp_path)
    assert said in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_folder_must_be_one_of_ours(compiled: Compiled, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no folder"):
        verify(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"has no model\.py"):
        verify(tmp_path)
    write_files({**compiled.files, "plan.json": "{}"}, tmp_path)
    with pytest.raises(BadPlan, match="version is missing"):
        verify(tmp_path)
    (tmp_path / "plan.json").unlink()
    with pytest.raises(BadPlan, match="cannot read the plan"):
        verify(tmp_path)
    with pytest.raises(BadInput, match="steps is 0"):
        verify(compiled, steps=0)


def test_a_changed_workload_is_refused(compiled: Compiled, tmp_path: Path) -> None:
    plan = json.loads(str(compiled.files["plan.json"]))
    for settings, said in (({"depth": 3}, "the model of"), ({"batch": 32}, "the shapes of the inputs of")):
        write_files({**compiled.files, "plan.json": json.dumps({**plan, "settings": settings})}, tmp_path)
        with pytest.raises(BadPlan, match=said):
            verify(tmp_path)
    write_files({**compiled.files, "plan.json": json.dumps({**plan, "workload": ""})}, tmp_path)
    with pytest.raises(BadInput, match="does not say which workload"):
        verify(tmp_path)


class Noisy(nn.Module):
    """Draws numbers in one way or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "dropout":
            y = F.dropout(y, 0.5, self.training)
        elif self.kind == "none":
            y = F.dropout(y, 0.0, self.training)
        else:
            y = y + torch.rand_like(y)
        return y.float().square().mean()


def test_dropout_is_off_on_both_sides_and_other_random_numbers_are_refused() -> None:
    def of(kind: str) -> Workload:
        return Workload(Noisy(kind), (torch.randn(3, 4),))

    reference = make_reference(of("dropout"), trace(of("dropout")))
    assert any("dropout is off" in note for note in reference.notes)
    losses = reference.record(1).loss["step 0"], make_reference(of("none"), trace(of("none"))).record(1).loss["step 0"]
    assert losses[0].dtype == torch.float64
    with pytest.raises(BadInput, match="draws random numbers"):
        make_reference(of("rand"), trace(of("rand")))


def test_casts_that_are_lifted_are_told() -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).to(torch.float16).float().square().mean()

    workload = Workload(Casting(), (torch.randn(3, 4),))
    assert any("lifted to float64" in note for note in make_reference(workload, trace(workload)).notes)
