"""Ways to run a chain of segments on one mesh shape, as numbers per segment: what the stage search chooses from.

A mesh shape is an axis "dp" and inner axes. Where samples are independent, splitting the batch over dp leaves every
rank the problem of a mesh of the inner axes alone with dp times as many microbatches, so one small integer program per
(inner axes, samples a rank sees at once) prices the shapes of every dp. What dp adds is known in closed form, for each
trainable parameter of L bytes as the inner axes store it:

    whole on dp                once a step   all_reduce(L)
    sharded over dp (ZeRO-3)   a microbatch  2 all_gather(L) + reduce_scatter(L), and L / dp held with its states
    remat of every segment     a microbatch  forward_s again; a segment keeps only what enters it

The four products of these are the ways of a shape. All of them are feasible plans: the search on them gives an upper
bound that the program over all axes at once, solved for the stages chosen, can only lower.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autoshard.passes.inter_options import MeshShape

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Numbers:
    """One segment in one way. forward_s, backward_s: one microbatch; tail_s: once a step.

    held_bytes: parameters, gradients, optimizer state. saved_bytes: kept from forward to backward of one microbatch.
    working_bytes: beside those while it runs. arriving_bytes: of the values that enter it, on one device.
    """

    forward_s: float
    backward_s: float
    tail_s: float
    held_bytes: float
    saved_bytes: float
    working_bytes: float
    arriving_bytes: float

    @property
    def time_s(self) -> float:
        """Forward and backward of one microbatch."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Stored:
    """A parameter on the inner axes: bytes on the fullest device, how many of them an optimizer step holds in all.

    factor: (parameter + gradient + optimizer state) / parameter. segments: numbers of those that use it, in order.
    divisible: whether dp can cut a dim that the inner axes do not cut.
    """

    name: str
    bytes: float
    factor: float
    trainable: bool
    segments: tuple[int, ...]
    divisible: bool


@dataclass(frozen=True)
class DataParallelPrices:
    """Seconds of collectives of so many bytes over dp, of an optimizer step, and of a gradient's sum over two
    stages."""

    ranks: int
    all_reduce_s: Mapping[float, float]
    all_gather_s: Mapping[float, float]
    reduce_scatter_s: Mapping[float, float]
    optimizer_s_per_byte: float
    stages_sum_s_per_byte: float = 0.0


@dataclass(frozen=True)
class Shared:
    """A parameter that several segments use; its first segment's numbers contain it.

    held_bytes, tail_s: what a stage without that first segment adds. sum_s: seconds once a step in which every stage
    that holds it, but not all of its segments, adds up its gradient with the others.
    """

    segments: tuple[int, ...]
    held_bytes: float
    tail_s: float
    sum_s: float

    def split_by(self, start: int, stop: int) -> bool:
        """Whether segments [start, stop) use it and others do too."""
        inside = sum(start <= number < stop for number in self.segments)
        return 0 < inside < len(self.segments)


@dataclass(frozen=True, order=True)
class Variant:
    """What the integer program on the inner axes is asked for.

    used: every axis must be used for what its name says (`intra_split`). factor: a byte kept from forward to backward
    is worth `factor` times the seconds of running forward again a byte that this would free; 0: bytes are free.
    """

    used: bool = False
    factor: float = 0.0


@dataclass(frozen=True)
class Way:
    """One way to run every segment of the chain on meshes of `shape`.

    sharded: parameters sharded over dp (ZeRO-3). remat: every segment's forward is run again. shared: parameters that
    several segments use. variant: of the layouts on the inner axes.
    """

    shape: MeshShape
    sharded: bool
    remat: bool
    segments: tuple[Numbers, ...]
    shared: tuple[Shared, ...] = ()
    variant: Variant = Variant()

    @property
    def kind(self) -> tuple[MeshShape, bool, Variant]:
        """Ways of one kind store parameters alike."""
        return self.shape, self.sharded, self.variant

    @property
    def name(self) -> str:
        """ "dp=8,tp=4, sharded parameters, remat"."""
        parts = [",".join(f"{axis}={size}" for axis, size in self.shape) or "one device"]
        marks = ["sharded parameters"] * self.sharded + ["lean"] * (self.variant.factor > 0) + ["remat"] * self.remat
        return ", ".join(parts + marks)


def ways_of_shape(
    shape: MeshShape, base: Sequence[Numbers], parameters: Sequence[Stored], prices: DataParallelPrices
) -> Iterator[Way]:
    """The ways of a shape, from the inner axes' numbers `base`."""
    for sharded in (False, True)[: 2 if prices.ranks > 1 else 1]:
        segments, shared = _with_parameters(base, parameters, prices, sharded)
        plain = Way(shape, sharded, False, segments, shared)
        yield plain
        yield replace(plain, remat=True, segments=tuple(_with_remat(numbers) for numbers in segments))


def _with_parameters(
    base: Sequence[Numbers], parameters: Sequence[Stored], prices: DataParallelPrices, sharded: bool
) -> tuple[tuple[Numbers, ...], tuple[Shared, ...]]:
    segments, shared = list(base), []
    for parameter in parameters:
        first, cut = parameter.segments[0], sharded and parameter.divisible
        share = 1 / prices.ranks if cut else 1.0
        held, size = parameter.bytes * parameter.factor, parameter.bytes
        optimizer_s = prices.optimizer_s_per_byte * size * parameter.trainable
        once_s = 0.0 if cut or not parameter.trainable or prices.ranks == 1 else prices.all_reduce_s[size]
        numbers = segments[first]
        segments[first] = replace(
            numbers,
            tail_s=numbers.tail_s + once_s - optimizer_s * (1 - share),
            held_bytes=numbers.held_bytes - held * (1 - share),
        )
        if cut:
            for number in parameter.segments:
                segments[number] = _gathered(segments[number], parameter, prices)
        if len(parameter.segments) > 1:
            sum_s = prices.stages_sum_s_per_byte * size * share * parameter.trainable
            shared.append(Shared(parameter.segments, held * share, once_s + optimizer_s * share, sum_s))
    return tuple(segments), tuple(shared)


def _gathered(numbers: Numbers, parameter: Stored, prices: DataParallelPrices) -> Numbers:
    """A segment that gathers a parameter before use, again in backward, and scatters its gradient."""
    gather_s = prices.all_gather_s[parameter.bytes]
    scatter_s = prices.reduce_scatter_s[parameter.bytes] if parameter.trainable else 0.0
    return replace(
        numbers,
        forward_s=numbers.forward_s + gather_s,
        backward_s=numbers.backward_s + gather_s + scatter_s,
        working_bytes=max(numbers.working_bytes, 2 * parameter.bytes),
    )


def _with_remat(numbers: Numbers) -> Numbers:
    """The same segment, run again in backward; what it saves then lives for one microbatch of one segment."""
    return replace(
        numbers,
        backward_s=numbers.backward_s + numbers.forward_s,
        saved_bytes=min(numbers.saved_bytes, numbers.arriving_bytes),
        working_bytes=numbers.working_bytes + numbers.saved_bytes,
    )


@dataclass(frozen=True)
class Totals:
    """A run of segments in one way."""

    forward_s: float
    backward_s: float
    tail_s: float
    held_bytes: float
    saved_bytes: float
    working_bytes: float
    arriving_bytes: float

    def peak_bytes(self, in_flight: int) -> float:
        """Bytes at the peak with this many microbatches in flight."""
        return self.held_bytes + in_flight * self.saved_bytes + self.working_bytes


class Ranges:
    """Sums over runs of segments of one way, by prefix sums."""

    def __init__(self, way: Way) -> None:
        def prefix(values: Iterator[float]) -> list[float]:
            return list(accumulate(values, initial=0.0))

        self.way = way
        self._forward = prefix(numbers.forward_s for numbers in way.segments)
        self._backward = prefix(numbers.backward_s for numbers in way.segments)
        self._tail = prefix(numbers.tail_s for numbers in way.segments)
        self._held = prefix(numbers.held_bytes for numbers in way.segments)
        self._saved = prefix(numbers.saved_bytes for numbers in way.segments)
        self._working = [numbers.working_bytes for numbers in way.segments]

    @cached_property
    def times_s(self) -> Floats:
        """Forward and backward at [start, stop]; infinity where stop <= start."""
        time_s = np.array(self._forward) + np.array(self._backward)
        return np.where(self._is_run, time_s[None, :] - time_s[:, None], np.inf)

    def peaks_bytes(self, in_flight: int) -> Floats:
        """A lower bound of `peak_bytes` at [start, stop]: without what shared parameters add."""
        kept = np.array(self._held) + in_flight * np.array(self._saved)
        return np.where(self._is_run, kept[None, :] - kept[:, None] + self._most_working, np.inf)

    @cached_property
    def _is_run(self) -> NDArray[np.bool_]:
        numbers = np.arange(len(self._held))
        return numbers[:, None] < numbers[None, :]

    @cached_property
    def _most_working(self) -> Floats:
        """The largest of segments start .. stop - 1 at [start, stop]."""
        count = len(self._working)
        most = np.zeros((count + 1, count + 1))
        for start in range(count):
            most[start, start + 1 :] = np.maximum.accumulate(self._working[start:])
        return most

    def totals(self, start: int, stop: int) -> Totals:
        """Segments [start, stop) as one stage."""
        held, tail = self._held[stop] - self._held[start], self._tail[stop] - self._tail[start]
        for shared in self.way.shared:
            if shared.split_by(start, stop):
                tail += shared.sum_s
                if shared.segments[0] < start:
                    held, tail = held + shared.held_bytes, tail + shared.tail_s
        return Totals(
            self._forward[stop] - self._forward[start],
            self._backward[stop] - self._backward[start],
            tail,
            held,
            self._saved[stop] - self._saved[start],
            max(self._working[start:stop]),
            self.way.segments[start].arriving_bytes,
        )
