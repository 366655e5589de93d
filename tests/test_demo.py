"""The demo trains both programs, prints both curves, and says so when they differ."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoshard import api, demo
from autoshard.compiled import Compiled
from autoshard.errors import BadInput


def test_batches_are_the_text_and_the_bytes_that_follow() -> None:
    text = demo.read_text()
    assert len(text) > 100_000
    batches = demo.make_batches(text, (3, 10), 2)
    assert len(batches) == 2 and not batches[0]["tokens"].equal(batches[1]["tokens"])
    for batch in batches:
        assert batch["tokens"].shape == batch["targets"].shape == (3, 10)
        assert batch["tokens"][:, 1:].equal(batch["targets"][:, :-1])
        assert bytes(batch["tokens"][2].tolist()) in text


@pytest.mark.slow
def test_both_trainings_agree(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Compiled] = []
    compile_ = api.compile
    monkeypatch.setattr(api, "compile", lambda *args, **kwargs: made.append(compile_(*args, **kwargs)) or made[-1])
    assert demo.run_demo(tmp_path / "out", 3) == 0
    text = capsys.readouterr().out
    for part in ("dp=2,tp=2", "S(0)@tp", "one process", "largest difference", "torchrun --nproc-per-node 4 train.py"):
        assert part in text
    assert (tmp_path / "out" / "model.py").is_file()

    train = demo.train_emitted
    monkeypatch.setattr(api, "compile", lambda *args, **kwargs: made[0])
    monkeypatch.setattr(demo, "train_emitted", lambda *given: worse(train(*given)))
    assert demo.run_demo(tmp_path / "out", 1) == 1
    assert "not the same training" in capsys.readouterr().out


def worse(run: demo.Run) -> demo.Run:
    losses: Sequence[float] = run.losses
    return replace(run, losses=tuple(1.01 * loss for loss in losses))


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    for out, steps, message in ((None, 0, "0 steps"), (tmp_path, 1, "is not empty")):
        with pytest.raises(BadInput, match=message):
            demo.run_demo(out, steps)
