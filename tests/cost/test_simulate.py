import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cost.simulate import StageTimes, simulate
from autoshard.schedule import Instruction, build, in_flight


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", range(2, 9))
def test_equal_stages_take_the_closed_form(name: str, stages: int) -> None:
    forward, backward = 3.0, 5.0  # whole numbers: the closed form holds exactly
    for microbatches in range(stages, 4 * stages + 1):
        result = simulate(build(name, stages, microbatches), [StageTimes(forward, backward)] * stages)
        assert result.step_time_s == (microbatches + stages - 1) * (forward + backward)
        assert set(result.bubble_s) == {(stages - 1) * (forward + backward)}
        assert result.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
        assert result.in_flight == tuple(in_flight(name, stages, microbatches, s) for s in range(stages))


seconds = st.integers(0, 20).map(float)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, int, list[StageTimes], list[float]]:
    stages = draw(st.integers(1, 5))
    times = [StageTimes(draw(seconds), draw(seconds), draw(seconds)) for _ in range(stages)]
    moves = [draw(seconds) for _ in range(stages - 1)]
    return draw(st.sampled_from(["gpipe", "1f1b"])), draw(st.integers(1, 8)), times, moves


@given(pipelines())
def test_instructions_wait_for_what_they_need(case: tuple[str, int, list[StageTimes], list[float]]) -> None:
    name, microbatches, times, moves = case
    stages = len(times)
    result = simulate(build(name, stages, microbatches), times, moves)
    at = {(event.stage, event.instruction): event for event in result.timeline}
    assert len(at) == 2 * stages * microbatches
    free = [0.0] * stages
    for stage, row in enumerate(build(name, stages, microbatches)):
        for instruction in row:
            event = at[stage, instruction]
            assert event.start_s >= free[stage]
            free[stage] = event.end_s
            if instruction.kind == "F" and stage:
                assert event.start_s >= at[stage - 1, instruction].end_s + moves[stage - 1]
            if instruction.kind == "B" and stage < stages - 1:
                assert event.start_s >= at[stage + 1, instruction].end_s + moves[stage]
            if instruction.kind == "B" and stage == stages - 1:
                assert event.start_s >= at[stage, Instruction("F", instruction.microbatch)].end_s
    assert result.step_time_s == max(end + t.once_s for end, t in zip(free, times, strict=True))
    one_through = sum(t.forward_s + t.backward_s for t in times) + 2 * sum(moves)
    assert result.step_time_s >= max(max(result.busy_s), one_through)
    assert all(bubble >= 0 for bubble in result.bubble_s)


@given(pipelines(), st.integers(0, 4))
def test_a_slower_part_never_makes_the_step_faster(
    case: tuple[str, int, list[StageTimes], list[float]], which: int
) -> None:
    name, microbatches, times, moves = case
    before = simulate(build(name, len(times), microbatches), times, moves).step_time_s
    stage = which % len(times)
    slow = list(times)
    slow[stage] = StageTimes(times[stage].forward_s + 1, times[stage].backward_s, times[stage].once_s)
    assert simulate(build(name, len(times), microbatches), slow, moves).step_time_s >= before
    assert simulate(build(name, len(times), microbatches), times, [m + 1 for m in moves]).step_time_s >= before


def test_a_transfer_occupies_its_link() -> None:
    # Three forwards of 1 s, transfers of 4 s: the last arrives after 1 + 3 * 4 s.
    rows = build("gpipe", 2, 3)
    result = simulate(rows, [StageTimes(1, 1), StageTimes(1, 1)], [4.0], [0.0])
    assert next(e for e in result.timeline if e.stage == 1 and e.instruction == Instruction("F", 2)).start_s == 13


def test_rows_that_wait_for_each_other_are_refused() -> None:
    rows = ((Instruction("B", 0), Instruction("F", 0)), (Instruction("F", 0), Instruction("B", 0)))
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(rows, [StageTimes(1, 1)] * 2)
