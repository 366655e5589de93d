"""Pipeline schedules as explicit instructions: one row a stage, in the order in which the stage runs them.

    gpipe   all forwards, then all backwards in the same order: every microbatch is in flight
    1f1b    stage s runs min(m, p - s) forwards, then one backward and one forward in turn: p - s in flight

Both have the bubble of (p - 1) (forward + backward) where stages are equal. "none" is one stage: 1f1b on it.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autoshard.errors import BadInput

NAMES = ("gpipe", "1f1b")


@dataclass(frozen=True)
class Instruction:
    """Run the forward ("F") or backward ("B") of one microbatch."""

    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


@lru_cache(maxsize=4096)
def build(name: str, stages: int, microbatches: int) -> tuple[tuple[Instruction, ...], ...]:
    """The instructions of every stage for one training step.

    Raises BadInput for an unknown name, and for less than one stage or microbatch.
    """
    if name not in (*NAMES, "none"):
        raise BadInput(f"'{name}' is not a schedule", help=f"known schedules: {', '.join(NAMES)}")
    if stages < 1 or microbatches < 1:
        raise BadInput(f"{stages} stages and {microbatches} microbatches", help="give 1 or more of each")
    return tuple(_row(in_flight(name, stages, microbatches, stage), microbatches) for stage in range(stages))


def in_flight(name: str, stages: int, microbatches: int, stage: int) -> int:
    """Most microbatches whose activations a stage holds at once."""
    return microbatches if name == "gpipe" else min(microbatches, stages - stage)


def _row(warmup: int, microbatches: int) -> tuple[Instruction, ...]:
    """`warmup` forwards, then a backward and a forward in turn, then the backwards that are left."""
    row = [Instruction("F", microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        row.append(Instruction("B", microbatch))
        if warmup + microbatch < microbatches:
            row.append(Instruction("F", warmup + microbatch))
    return tuple(row)


def format_schedule(rows: tuple[tuple[Instruction, ...], ...]) -> str:
    """One line a stage: "stage 0: F0 F1 B0 B1"."""
    return "\n".join(f"stage {stage}: {' '.join(map(str, row))}" for stage, row in enumerate(rows))
