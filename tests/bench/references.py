"""Rounds of the plain cache that do what a round of `aiokv bench NAME` does, timed in the same way."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Final, final

from aiokv.cli.bench.cases import BLOCK, Layout, Operation
from aiokv.cli.bench.operations.prompts import Prompts
from tests.bench.plain_cache import PlainPool, chain_hashes

__all__ = ["Reference"]

_TOKEN_BYTES: Final = 4


@final
class Reference:
    """Two plain pools of `slots` slots, and one prompt of `blocks` blocks that is resident in both."""

    def __init__(self, *, blocks: int, slots: int) -> None:
        self._prompts = Prompts()
        self._blocks = blocks
        self._number = self._prompts.new_number()
        rest = slots - blocks
        prompt = self.keys(self._number)
        self.gpu = PlainPool(slots, self.new_keys(rest) + prompt)
        self.cpu = PlainPool(slots, self.new_keys(rest) + prompt)

    def keys(self, number: int, *, count: int | None = None) -> list[bytes]:
        """The keys of a prompt as `bytes` that nobody has hashed for a dictionary yet."""
        count = self._blocks if count is None else count
        rows = self._prompts.keys(number, length=count * BLOCK).digests(1, 0, count)
        return [row.tobytes() for row in rows]

    def new_keys(self, count: int | None = None) -> list[bytes]:
        """Those of a prompt that was never seen."""
        return self.keys(self._prompts.new_number(), count=count)

    def run_round(self, operation: Operation, layout: Layout) -> int:
        """Its nanoseconds of CPU time, the garbage collector off."""
        rounds: dict[Operation, Callable[[], int]] = {
            Operation.HASH: self._hash,
            Operation.LOOKUP: {Layout.GPU: self._look_up_gpu, Layout.CPU: self._look_up_cpu}.get(layout, self._reserve),
            Operation.RESERVE: self._reserve,
            Operation.RELEASE: self._release,
            Operation.STORE: self._store,
            Operation.LOAD: self._load,
        }
        return rounds[operation]()

    def _hash(self) -> int:
        size = BLOCK * _TOKEN_BYTES
        tokens = self._prompts.tokens(self._prompts.new_number(), length=self._blocks * BLOCK).tobytes()
        return _timed(lambda: chain_hashes(tokens[at : at + size] for at in range(0, len(tokens), size)))

    def _look_up_gpu(self) -> int:
        keys, slots = self.keys(self._number), []
        took = _timed(lambda: slots.extend(self.gpu.hit(keys)))
        assert len(slots) == self._blocks
        self.gpu.release(slots)
        return took

    def _look_up_cpu(self) -> int:
        keys, sources, targets = self.keys(self._number), [], []

        def look_up() -> None:
            sources.extend(self.cpu.hit(keys))
            targets.extend(self.gpu.reserve(len(sources)))

        took = _timed(look_up)
        assert len(sources) == self._blocks
        self.cpu.release(sources)
        self._fill(targets)
        return took

    def _reserve(self) -> int:
        slots: list[int] = []
        took = _timed(lambda: slots.extend(self.gpu.reserve(self._blocks)))
        self._fill(slots)
        return took

    def _release(self) -> int:
        slots = self.gpu.hit(self.keys(self._number))
        assert len(slots) == self._blocks
        return _timed(lambda: self.gpu.release(slots))

    def _store(self) -> int:
        keys, sources = self.new_keys(), self.gpu.reserve(self._blocks)
        self.gpu.register(sources, keys)

        def store() -> None:
            wanted = [(key, slot) for key, slot in zip(keys, sources, strict=True) if key not in self.cpu.slot_of]
            self.gpu.pin([slot for _, slot in wanted])
            targets = self.cpu.reserve(len(wanted))
            self.cpu.register(targets, [key for key, _ in wanted])
            self.cpu.release(targets)
            self.gpu.release([slot for _, slot in wanted])

        took = _timed(store)
        self.gpu.release(sources)
        return took

    def _load(self) -> int:
        keys = self.new_keys()
        sources = self.cpu.hit(self.cpu.key_of[slot] for slot in tuple(self.cpu.order)[-self._blocks :])
        targets = self.gpu.reserve(self._blocks)
        assert len(sources) == self._blocks

        def load() -> None:
            self.gpu.pin(targets)
            self.gpu.register(targets, keys)
            self.gpu.release(targets)
            self.cpu.release(sources)

        took = _timed(load)
        self.gpu.release(targets)
        return took

    def _fill(self, slots: list[int]) -> None:
        self.gpu.register(slots, self.new_keys(len(slots)))
        self.gpu.release(slots)


def _timed(work: Callable[[], object]) -> int:
    was_on = gc.isenabled()
    gc.disable()
    try:
        started = time.thread_time_ns()
        work()
        return time.thread_time_ns() - started
    finally:
        if was_on:
            gc.enable()
