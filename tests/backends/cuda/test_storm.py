"""Random copies in both directions, kernels of the engine, holds and refused calls, every adversary on; then all bytes.

The storm keeps to what the core keeps to: a slot belongs to one copy at a time, and what uses it next waits for the
fence of its last kernel.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest

from aiokv.backends.base import EventStatus
from aiokv.backends.cuda_completion import CudaEvent
from aiokv.errors import CopyFailed
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import CopyBatch
from tests.backends.cuda.rig import Rig
from tests.backends.support import GUARD_S, wait_until
from tests.fakecuda import Kernel

LAYERS: Final = 40
BLOCKS: Final = 160
BYTES: Final = 8
STEPS: Final = 250


class Storm:
    """What every slot holds, one byte each, and what is under way."""

    def __init__(self, rig: Rig, *, seed: int) -> None:
        self.random = random.Random(seed)
        self.fake = rig.fake
        self.layers = [rig.dense(BLOCKS, BYTES) for _ in range(LAYERS)]
        self.backend = rig.open({"full": self.layers}, gpu_blocks=BLOCKS, cpu_blocks=BLOCKS)
        self.streams = [rig.stream(), rig.stream()]
        self.gpu: dict[int, int] = {}
        self.cpu: dict[int, int] = {}
        self.fences: dict[int, object] = {}
        self.running: list[tuple[CudaEvent, CopyBatch]] = []
        self.ended = dict.fromkeys(EventStatus, 0)
        self.refused = 0

    def compute(self) -> None:
        """A kernel fills a slot that no copy uses; whoever uses it next waits for its fence."""
        free = [slot for slot in range(1, BLOCKS) if not self.is_busy(gpu=slot)]
        if not free:
            return
        slot, value, stream = self.random.choice(free), self.random.randrange(1, 256), self.random.choice(self.streams)
        kernel = Kernel(duration_us=self.random.choice([0, 50]))
        for layer in self.layers:
            kernel.fill(layer.pointer + slot * BYTES, value=value, num_bytes=BYTES)
        if slot in self.fences:
            self.backend.wait(stream, self.fences[slot])
        self.fake.launch(stream, kernel)
        self.gpu[slot], self.fences[slot] = value, self.backend.fence(stream)

    def copy(self) -> None:
        direction = self.random.choice(list(Direction))
        gpu = [slot for slot in range(1, BLOCKS) if not self.is_busy(gpu=slot)]
        cpu = [slot for slot in range(BLOCKS) if not self.is_busy(cpu=slot)]
        known, other = (gpu, self.gpu) if direction is Direction.STORE else (cpu, self.cpu)
        sources = [slot for slot in known if slot in other]
        targets = cpu if direction is Direction.STORE else gpu
        count = min(self.random.choice([1, 2, 5, 30, 120]), len(sources), len(targets))
        chosen, into = self.choose(sources, count), self.choose(targets, count)
        engine = chosen if direction is Direction.STORE else into
        batch = CopyBatch(
            direction=direction,
            group="full",
            source_blocks=np.array(chosen, np.int64),
            target_blocks=np.array(into, np.int64),
            after=tuple(self.fences[slot] for slot in engine if slot in self.fences),
        )
        try:
            event = self.backend.submit(batch)
        except CopyFailed:
            self.refused += 1
            return
        self.running.append((event, batch))

    def choose(self, slots: Sequence[int], count: int) -> list[int]:
        """Adjacent ones at times, forwards or backwards."""
        if self.random.random() < 0.5:
            return self.random.sample(list(slots), count)
        start = self.random.randrange(len(slots) - count + 1)
        found = list(slots[start : start + count])
        return found if self.random.random() < 0.5 else found[::-1]

    def is_busy(self, *, gpu: int | None = None, cpu: int | None = None) -> bool:
        for _, batch in self.running:
            if gpu in batch.slots(Tier.GPU) or cpu in batch.slots(Tier.CPU):
                return True
        return False

    def look(self) -> None:
        """What has ended is known and free again; of what failed nothing is known."""
        left = []
        for event, batch in self.running:
            status = event.query()
            if status is EventStatus.PENDING:
                left.append((event, batch))
                continue
            self.ended[status] += 1
            source, target = (self.gpu, self.cpu) if batch.direction is Direction.STORE else (self.cpu, self.gpu)
            for here, there in zip(batch.source_blocks.tolist(), batch.target_blocks.tolist(), strict=True):
                if status is EventStatus.DONE:
                    target[there] = source[here]
                else:
                    target.pop(there, None)
        self.running = left

    def step(self) -> None:
        what = self.random.choices(["compute", "copy", "look", "hold", "release", "refuse"], [30, 30, 20, 2, 8, 3])[0]
        if what in ("compute", "copy", "look"):
            getattr(self, what)()
        elif what == "hold":
            self.fake.hold()
        elif what == "release":
            self.fake.release()
        else:
            self.fake.inject("cuMemcpyBatchAsync", nth=self.random.randrange(1, 4), code=2)

    def finish(self) -> None:
        self.fake.release()

        def is_over() -> bool:
            self.look()
            return not self.running

        wait_until(is_over)
        wait_until(self.fake.drain)

    def check(self) -> None:
        memory = [layer.blocks() for layer in self.layers]
        for slot, value in self.gpu.items():
            assert {layer[slot] for layer in memory} == {bytes([value]) * BYTES}, f"GPU slot {slot}"
        for slot, value in self.cpu.items():
            assert set(self.backend.cpu_slot(slot).tolist()) == {value}, f"CPU slot {slot}"
        assert {layer[0] for layer in memory} == {bytes(BYTES)}, "the null block"


@pytest.mark.parametrize("seed", range(4))
def test_after_a_storm_every_byte_is_where_it_belongs(watched_rig: Rig, seed: int) -> None:
    storm = Storm(watched_rig, seed=seed)
    for _ in range(STEPS):
        storm.step()
    storm.finish()
    storm.check()
    assert storm.ended[EventStatus.DONE] > 10
    assert storm.ended[EventStatus.FAILED] + storm.refused > 0
    assert storm.ended[EventStatus.LOST] == storm.ended[EventStatus.CORRUPT] == 0
    assert len(storm.gpu) > 10
    assert len(storm.cpu) > 10
    assert storm.backend.close(deadline_s=GUARD_S)
