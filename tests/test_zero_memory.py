"""ZeRO-3 as emitted: a gathered weight lives as long as it is used, in forward and again in backward."""

import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.compiled import write_files
from autoshard.ranks import run_ranks
from autoshard.verify_folder import Folder, named_for, read_folder, use_modules
from tests.equality import compiled, subject


@dataclass
class Gathered:
    """Every tensor that `collectives.gathered` made: its memory, for as long as it lives, and its bytes."""

    made: list[tuple[StorageWeakRef, int]]
    peak: int = 0

    def living(self) -> int:
        """Bytes of those that are still there."""
        return sum(size for storage, size in self.made if not storage.expired())

    def watch(self, gather: Any) -> Any:
        """`gather`, watched."""

        def watched(*args: Any) -> Tensor:
            whole: Tensor = gather(*args)
            self.made.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
            self.peak = max(self.peak, self.living())
            return whole

        return watched


def train(_rank: int, _ranks: int, folder: Folder, state: dict[str, Tensor], inputs: dict[str, Tensor]) -> list[int]:
    """Bytes gathered in forward; of them kept when it has ended; most at a time; kept when backward has ended."""
    use_modules(folder)
    model, parameters, collectives = map(importlib.import_module, ("model", "parameters", "collectives"))
    module, mesh, _ = model.build(dtype=torch.float64)
    parameters.load_full(module, mesh, state)
    gathered = Gathered([])
    collectives.gathered = gathered.watch(collectives.gathered)
    loss = module(**mesh.share(named_for(model, inputs, folder), model.BATCH_DIMS))
    total, kept = sum(size for _, size in gathered.made), gathered.living()
    loss.backward()
    return [total, kept, gathered.peak, gathered.living()]


def test_gathered_weights_are_not_kept_for_backward(tmp_path: Path) -> None:
    reference, program = subject("gpt_tiny").reference, compiled("gpt_tiny", "zero3")
    text = program.files["model.py"]
    assert isinstance(text, str) and "    @gather_again()\n" in text
    keeping = replace(program, files={**program.files, "model.py": text.replace("    @gather_again()\n", "")})
    found = {}
    for name, variant in (("emitted", program), ("keeping", keeping)):
        write_files(variant.files, tmp_path / name) if (tmp_path / name).mkdir() is None else None
        found[name] = run_ranks(train, 4, read_folder(tmp_path / name), reference.state, reference.inputs)
    weights = sum(p.nbytes for n, p in reference.workload.model.named_parameters() if n.endswith("weight"))
    for rank in found["emitted"]:
        total, kept, peak, after = rank
        assert total == weights
        assert (kept, after) == (0, 0)
        assert peak < total / 3, "more is there at a time than one block needs"
    for total, kept, peak, after in found["keeping"]:  # the measure sees it where they are kept
        assert kept > 0.9 * total and peak == total and after == 0
