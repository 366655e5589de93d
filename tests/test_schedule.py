import pytest

from autoshard.errors import BadInput
from autoshard.schedule import build, format_schedule, in_flight


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", range(1, 6))
def test_every_stage_runs_every_forward_and_backward_once_in_order(name: str, stages: int) -> None:
    for microbatches in range(1, 12):
        for stage, row in enumerate(build(name, stages, microbatches)):
            for kind in ("F", "B"):
                assert [i.microbatch for i in row if i.kind == kind] == list(range(microbatches))
            held = most = 0
            for instruction in row:
                held += 1 if instruction.kind == "F" else -1
                assert held >= 0
                most = max(most, held)
            assert most == in_flight(name, stages, microbatches, stage)


def test_printed() -> None:
    assert format_schedule(build("1f1b", 2, 3)) == "stage 0: F0 F1 B0 F2 B1 B2\nstage 1: F0 B0 F1 B1 F2 B2"
    assert format_schedule(build("gpipe", 1, 2)) == "stage 0: F0 F1 B0 B1"


@pytest.mark.parametrize(("name", "stages", "microbatches"), [("zigzag", 2, 2), ("1f1b", 0, 2), ("gpipe", 2, 0)])
def test_refusals(name: str, stages: int, microbatches: int) -> None:
    with pytest.raises(BadInput):
        build(name, stages, microbatches)
