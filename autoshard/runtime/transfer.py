"""Moving a tensor from the ranks of one mesh to the ranks of another, whatever part each of them holds or needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from autoshard.runtime.mesh import Mesh

Placement = Mapping[str, int]
End = tuple[Mesh, Placement]
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Message:
    """The part of a tensor that one rank sends to another: in the sender's and in the receiver's own coordinates."""

    sender: int
    receiver: int
    sent: Box
    received: Box


def messages(shape: Sequence[int], giver: End, taker: End) -> list[Message]:
    """How every rank of `taker` gets its box of a tensor from the boxes that the ranks of `giver` hold.

    Each piece comes from one of the ranks that hold it; those who want it take turns among the copies.
    """
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for rank in giver[0].ranks:
        box = giver[0].box(shape, giver[1], rank)
        holders.setdefault(tuple((s.start, s.stop) for s in box), []).append(rank)
    found, turns = [], dict.fromkeys(holders, 0)
    for receiver in taker[0].ranks:
        wanted = taker[0].box(shape, taker[1], receiver)
        for held, copies in holders.items():
            overlap = [(max(w.start, h[0]), min(w.stop, h[1])) for w, h in zip(wanted, held, strict=True)]
            if all(start < stop for start, stop in overlap):
                sent = tuple(slice(a - h[0], b - h[0]) for (a, b), h in zip(overlap, held, strict=True))
                received = tuple(slice(a - w.start, b - w.start) for (a, b), w in zip(overlap, wanted, strict=True))
                found.append(Message(copies[turns[held] % len(copies)], receiver, sent, received))
                turns[held] += 1
    return found


class Messages:
    """Sends and receives through one process group, without waiting until it must."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank = group, dist.get_rank()
        self.under_way: list[tuple[int, Any, Tensor]] = []
        self.known: dict[Any, list[Message]] = {}

    def send(self, value: Tensor, shape: Sequence[int], giver: End, taker: End, part: int = 0) -> None:
        """Start to send this rank's part of a tensor of `shape`; part: the microbatch, for `finish`."""
        self.under_way = [entry for entry in self.under_way if not entry[1].is_completed()]  # gloo never says so
        expected = [piece.stop - piece.start for piece in giver[0].box(shape, giver[1])]
        if list(value.shape) != expected:
            raise ValueError(f"this rank's part of {list(shape)} must be {expected}, but it is {list(value.shape)}")
        for message in self._messages(shape, giver, taker):
            if message.sender == self.rank:
                piece = value[message.sent].contiguous()
                self.under_way.append((part, dist.isend(piece, message.receiver, group=self.group), piece))

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, giver: End, taker: End
    ) -> Arrival:
        """Start to receive this rank's part of a tensor of `shape`."""
        box = [piece.stop - piece.start for piece in taker[0].box(shape, taker[1])]
        value = torch.empty(box, dtype=dtype, device=device)
        pieces = []
        for message in self._messages(shape, giver, taker):
            if message.receiver == self.rank:
                place = value[message.received]
                piece = (
                    place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
                )
                pieces.append((dist.irecv(piece, message.sender, group=self.group), piece, place))
        return Arrival(value, pieces)

    def finish(self, part: int | None = None) -> None:
        """Wait until what was sent of microbatch `part` (of all, if left out) has left."""
        for number, work, _ in self.under_way:
            if part is None or number == part:
                work.wait()
        self.under_way = [entry for entry in self.under_way if part is not None and entry[0] != part]

    def _messages(self, shape: Sequence[int], giver: End, taker: End) -> list[Message]:
        ends = [(tuple(mesh.ranks), tuple(sorted(placement.items()))) for mesh, placement in (giver, taker)]
        key = (tuple(shape), *ends)
        if key not in self.known:
            self.known[key] = messages(shape, giver, taker)
        return self.known[key]


@dataclass
class Arrival:
    """A tensor whose pieces are on their way."""

    value: Tensor
    pieces: list[tuple[Any, Tensor, Tensor]]

    def wait(self) -> Tensor:
        for work, piece, place in self.pieces:
            work.wait()
            if piece is not place:
                place.copy_(piece)
        self.pieces = []
        return self.value
