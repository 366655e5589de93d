"""Emitted text under review: what people get for the tiny models.

`make golden` writes it anew, and the diff is the review.
"""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.api import compile
from autoshard.loading import load_workload
from autoshard.passes.emit_format import LINE_LENGTH
from tests.folders import ROOT

GOLDEN = ROOT / "tests" / "golden"
FOUR = {"cluster": "1x4@A100-80GB"}

# A file, or the folder of a pipeline: workload, and what it is compiled with.
CASES = {
    "gpt_tiny__dp2_tp2": ("models/gpt.py:gpt_tiny", {**FOUR, "mesh": "dp=2,tp=2"}),
    "llama_tiny__dp2_tp2": ("models/llama.py:llama_tiny", {**FOUR, "mesh": "dp=2,tp=2"}),
    "llama_tiny__pp2_tp2": ("models/llama.py:llama_tiny", {**FOUR, "mesh": "tp=2", "stages": 2, "microbatches": 2}),
    "mlp__dp4_zero3": ("models/mlp.py:mlp", {**FOUR, "mesh": "dp=4", "pins": {"*weight": "S(0)@dp"}}),
    "vit_tiny__tp2": ("models/vit.py:vit_tiny", {"cluster": "1x2@A100-80GB", "mesh": "tp=2"}),
    "resnet_tiny__dp4": ("models/resnet.py:resnet_tiny", {**FOUR, "mesh": "dp=4"}),
    "encdec_tiny__dp2_tp2": ("models/encdec.py:encdec_tiny", {**FOUR, "mesh": "dp=2,tp=2"}),
}


def emitted(name: str) -> dict[Path, str]:
    """The modules of one case, by the golden file that they should be like."""
    source, options = CASES[name]
    workload = replace(load_workload(str(ROOT / source), {}), name=source)  # as from the root, wherever tests run
    files = compile(workload, **options).files
    modules = {file: str(text) for file, text in files.items() if file == "model.py" or file.startswith("stage_")}
    if len(modules) == 1:
        return {GOLDEN / f"{name}.py": modules["model.py"]}
    return {GOLDEN / name / file: text for file, text in modules.items()}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, update_golden: bool) -> None:
    texts = emitted(name)
    for path, text in texts.items():
        if update_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"write {path.relative_to(ROOT)} with `make golden`, and read it"
        assert text == path.read_text(), f"{path.relative_to(ROOT)} differs: `make golden`, and read the diff"
        assert CASES[name][0] in text.partition("\n")[0]
    found = set(GOLDEN.glob(f"{name}.py")) | set(GOLDEN.glob(f"{name}/*.py"))
    assert found == set(texts)


def test_nothing_else_is_golden() -> None:
    assert {path.stem for path in GOLDEN.iterdir() if path.name != "__pycache__"} == CASES.keys()


@pytest.mark.parametrize("command", (["check", "--extend-select=E501"], ["format", "--check", "--diff"]))
def test_golden_is_clean(command: list[str]) -> None:
    options = ["--isolated", "--no-cache", f"--line-length={LINE_LENGTH}"]
    ruff = [sys.executable, "-m", "ruff", *command, *options, str(GOLDEN)]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
