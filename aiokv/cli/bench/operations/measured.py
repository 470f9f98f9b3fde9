"""The prompts of a case: where their blocks lie before a round, the leases of a round, and what these must have hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import final

from aiokv.cli.bench.cases import BLOCK, Case, Layout
from aiokv.cli.bench.operations.timing import Prepared, VoidRoundError, now_ns
from aiokv.cli.bench.operations.world import BenchWorld, granted, request_of
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState

__all__ = ["Batch", "MeasuredPrompts"]


@final
class Batch:
    """Requests of `blocks` blocks each that go through an operation one right after the other, and their leases."""

    __slots__ = ("_layout", "_requests", "_world", "blocks", "records")

    def __init__(self, requests: Sequence[AcquireRequest], *, blocks: int, layout: Layout, world: BenchWorld) -> None:
        self._requests = requests
        self._layout = layout
        self._world = world
        self.blocks = blocks
        self.records: list[LeaseRecord] = []
        """Of those that were let in."""

    def admit(self) -> int:
        """Let all requests in; the nanoseconds of `try_acquire`."""
        try_acquire = self._world.cache.try_acquire
        started = now_ns()
        answers = [try_acquire(request) for request in self._requests]
        took = now_ns() - started
        self.records = [granted(answer) for answer in answers]
        return took

    def name_claims(self) -> int:
        """Have every claim named, and so all loads in the outbox; the nanoseconds of these slices.

        As the runtime does it, before other sliced work: hits that are offered to the CPU tier are no part of it.
        """
        name_slice = self._world.cache.name_slice
        started = now_ns()
        for record in self.records:
            while record.unnamed_claims:
                name_slice(record)
        return now_ns() - started

    def run_until_ready(self) -> None:
        """Run slices until no lease waits for a load."""
        run_slice = self._world.cache.run_slice
        for record in self.records:
            while record.state is not LeaseState.READY:
                run_slice()

    def release(self) -> None:
        """Give back what the leases hold."""
        for record in self.records:
            self._world.cache.release(record)

    def check_hits(self) -> None:
        """`VoidRoundError` unless each request hit what the case says: then something else was measured."""
        from_gpu, from_cpu = {
            Layout.GPU: (self.blocks, 0),
            Layout.CPU: (0, self.blocks),
            Layout.INTERLEAVED: (self.blocks - self.blocks // 2, self.blocks // 2),
            Layout.MISS: (0, 0),
        }[self._layout]
        for record in self.records:
            hit = record.hit
            if (hit.gpu_tokens, hit.cpu_tokens) != (from_gpu * BLOCK, from_cpu * BLOCK):
                raise VoidRoundError(f"{hit} of a prompt with {from_gpu} blocks on the GPU, {from_cpu} in the CPU tier")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Numbers:
    """The prompts of one round."""

    lead_in: int
    measured: tuple[int, ...]


@final
class MeasuredPrompts:
    """The prompts of several rounds in turn, see `Case.rounds_in_turn`. With the layout MISS each is a new one.

    Their blocks are put where the case wants them some rounds before they are measured, where there are several: that
    looks them up, and would leave them in the processor's caches. One token follows the blocks of a prompt that lies
    in the cache, since the last token is always computed.
    """

    __slots__ = ("_ahead", "_arranged", "_case", "_rounds", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._case = case
        self._world = world
        rounds = [self._new_numbers() for _ in range(case.rounds_in_turn)]
        if case.layout is not Layout.MISS:
            for numbers in rounds:
                world.compute(numbers.lead_in, blocks=case.lead_in_blocks)
                for number in numbers.measured:
                    world.compute(number, blocks=case.blocks)
        self._rounds = cycle(rounds)
        self._arranged: deque[_Numbers] = deque()
        self._ahead = len(rounds) // 2

    def arrange(self) -> Prepared[Batch]:
        """Have the next prompts' blocks where the case wants them, no slot free, and requests with keys in new
        buffers."""
        case = self._case
        while len(self._arranged) <= self._ahead:
            self.arrange_others()
        numbers = self._arranged.popleft()
        if case.layout is Layout.MISS:
            numbers = self._new_numbers()
        self._world.fill_free_slots()
        return Prepared(
            lead_in=self._batch_of([numbers.lead_in], blocks=case.lead_in_blocks),
            measured=self._batch_of(numbers.measured, blocks=case.blocks),
        )

    def arrange_others(self) -> None:
        """Put the blocks of the prompts of a later round where they are to be."""
        case, numbers = self._case, next(self._rounds)
        if case.layout is not Layout.MISS:
            self._world.arrange(numbers.lead_in, blocks=case.lead_in_blocks, layout=case.layout)
            for number in numbers.measured:
                self._world.arrange(number, blocks=case.blocks, layout=case.layout)
        self._arranged.append(numbers)

    def _new_numbers(self) -> _Numbers:
        new_number = self._world.prompts.new_number
        return _Numbers(lead_in=new_number(), measured=tuple(new_number() for _ in range(self._case.requests)))

    def _batch_of(self, numbers: Sequence[int], *, blocks: int) -> Batch:
        layout = self._case.layout
        length = blocks * BLOCK + (layout is not Layout.MISS)
        requests = [request_of(self._world.prompts.keys(number, length=length)) for number in numbers]
        return Batch(requests, blocks=blocks, layout=layout, world=self._world)
