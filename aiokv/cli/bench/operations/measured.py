"""The prompts of one case: where their blocks lie before a round, the lease of a round, and what it must have hit."""

from __future__ import annotations

from collections import deque
from itertools import cycle
from typing import Final, final

from aiokv.cli.bench.cases import BLOCK, Case, Layout
from aiokv.cli.bench.operations.timing import VoidRoundError, now_ns
from aiokv.cli.bench.operations.world import BenchWorld, granted, request_of
from aiokv.core.lease_table import LeaseRecord

__all__ = ["MeasuredPrompts"]

_MOST_PROMPTS: Final = 64


@final
class MeasuredPrompts:
    """Several prompts in turn, as many as fill half a pool. With the layout MISS each is a new one.

    Their blocks are put where the case wants them some rounds before they are measured, where there are several: that
    looks them up, and would leave them in the processor's caches. One token follows the blocks of a prompt that lies
    in the cache, since the last token is always computed.
    """

    __slots__ = ("_ahead", "_arranged", "_case", "_numbers", "_record", "_request", "_world")

    def __init__(self, case: Case, *, world: BenchWorld) -> None:
        self._case = case
        self._world = world
        most = min(_MOST_PROMPTS, case.pool_slots // (2 * case.slots))
        numbers = [world.prompts.new_number() for _ in range(max(1, most))]
        if case.layout is not Layout.MISS:
            for number in numbers:
                world.compute(number, blocks=case.blocks)
        self._numbers = cycle(numbers)
        self._arranged: deque[int] = deque()
        self._ahead = len(numbers) // 2
        self._request = request_of(world.prompts.keys(numbers[0], length=1))
        self._record: LeaseRecord | None = None

    @property
    def record(self) -> LeaseRecord:
        """The lease of this round."""
        if self._record is None:
            raise RuntimeError("nothing was admitted in this round")
        return self._record

    def arrange(self) -> None:
        """Have the next prompt's blocks where the case wants them, no slot free, and a request with keys in new
        buffers."""
        case, prompts = self._case, self._world.prompts
        while len(self._arranged) <= self._ahead:
            self.arrange_another()
        number, length = self._arranged.popleft(), case.blocks * BLOCK + 1
        if case.layout is Layout.MISS:
            number, length = prompts.new_number(), case.blocks * BLOCK
        self._world.fill_free_slots()
        self._request = request_of(prompts.keys(number, length=length))
        self._record = None

    def arrange_another(self) -> None:
        """Put the blocks of a prompt that is measured later where they are to be."""
        number = next(self._numbers)
        if self._case.layout is not Layout.MISS:
            self._world.arrange(number, blocks=self._case.blocks, layout=self._case.layout)
        self._arranged.append(number)

    def admit(self) -> int:
        """Let the request in; the nanoseconds of `try_acquire`."""
        try_acquire, request = self._world.cache.try_acquire, self._request
        started = now_ns()
        answer = try_acquire(request)
        took = now_ns() - started
        self._record = granted(answer)
        return took

    def release(self) -> None:
        """Give back what the round holds."""
        self._world.cache.release(self.record)
        self._world.run_until_idle()

    def check_hit(self) -> None:
        """`VoidRoundError` unless the request hit what the case says: then something else was measured."""
        blocks = self._case.blocks
        from_gpu, from_cpu = {
            Layout.GPU: (blocks, 0),
            Layout.CPU: (0, blocks),
            Layout.INTERLEAVED: (blocks - blocks // 2, blocks // 2),
            Layout.MISS: (0, 0),
        }[self._case.layout]
        hit = self.record.hit
        if (hit.gpu_tokens, hit.cpu_tokens) != (from_gpu * BLOCK, from_cpu * BLOCK):
            raise VoidRoundError(f"{hit} of a prompt with {from_gpu} blocks on the GPU, {from_cpu} in the CPU tier")
