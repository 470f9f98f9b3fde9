"""Every byte of copies in both directions at once, while kernels compute and write blocks beside them."""

from __future__ import annotations

import numpy as np

from aiokv.backends.cuda import CudaBackend
from aiokv.model.ids import Direction
from tests.gpu.bench import Bench, Found, Slots, batch, opened, spin
from tests.gpu.engine import Bytes, Rows

_WORK_MICROS = 2000.0


class Memory:
    """Keys and values of one layer, one more layer, and what all of it should hold by now."""

    def __init__(self, bench: Bench, *, blocks: int, num_bytes: int) -> None:
        self.split = bench.engine.rows(2, blocks, num_bytes)
        self.plain = bench.engine.rows(blocks, num_bytes)
        random = np.random.default_rng(0)
        self.wanted = random.integers(0, 256, (3, blocks, num_bytes), np.uint8)
        self.split.write(self.wanted[:2])
        self.plain.write(self.wanted[2])
        self.wanted[:, 0] = 0  # the null block is zeroed at opening

    def found(self) -> Bytes:
        """What is there."""
        return np.concatenate([self.split.read(), self.plain.read()[None]])


def check_bytes(bench: Bench) -> Found:
    """Rounds of a store and a load at once behind kernels that write what is stored."""
    sizes, found = bench.sizes, Found()
    memory = Memory(bench, blocks=sizes.blocks, num_bytes=sizes.fragment_bytes)
    compute = bench.engine.stream()
    random = np.random.default_rng(1)
    with opened(
        [memory.split.tensor, memory.plain.tensor], gpu_blocks=sizes.blocks, cpu_blocks=sizes.blocks
    ) as backend:
        cpu = random.integers(0, 256, (sizes.blocks, 3 * sizes.fragment_bytes), np.uint8)
        for slot in range(sizes.blocks):
            backend.cpu_slot(slot)[:] = cpu[slot]
        for number in range(sizes.rounds):
            _one_round(bench, backend, memory=memory, cpu=cpu, compute=compute, random=random)
            complaints = bench.engine.settle()
            wrong_gpu = np.flatnonzero((memory.found() != memory.wanted).any(axis=(0, 2)))
            wrong_cpu = [slot for slot in range(sizes.blocks) if not np.array_equal(backend.cpu_slot(slot), cpu[slot])]
            found.require(not len(wrong_gpu), f"round {number}: GPU blocks {wrong_gpu.tolist()[:8]} are wrong")
            found.require(not wrong_cpu, f"round {number}: CPU blocks {wrong_cpu[:8]} are wrong")
            found.faults += complaints
        pinned = backend.pinning.status.state.value
    copied = sizes.rounds * 2 * (sizes.blocks // 4) * 3 * sizes.fragment_bytes
    found.figures = {"rounds": sizes.rounds, "bytes_compared": copied, "pinned": pinned}
    return found


def _one_round(
    bench: Bench, backend: CudaBackend, *, memory: Memory, cpu: Bytes, compute: object, random: np.random.Generator
) -> None:
    """A quarter of the blocks is stored, a quarter loaded, a quarter written by kernels meanwhile."""
    quarter = bench.sizes.blocks // 4
    gpu_slots = 1 + random.permutation(bench.sizes.blocks - 1)
    stored, loaded, beside = (gpu_slots[i * quarter : (i + 1) * quarter] for i in range(3))
    cpu_slots = random.permutation(bench.sizes.blocks)
    targets, sources = cpu_slots[:quarter], cpu_slots[quarter : 2 * quarter]
    bench.engine.work(compute, micros=_WORK_MICROS)
    _write(bench, memory.plain, blocks=stored, compute=compute, wanted=memory.wanted[2], random=random)
    fence = backend.fence(compute)
    events = [
        backend.submit(batch(Direction.STORE, gpu=stored, cpu=targets, after=fence)),
        backend.submit(batch(Direction.LOAD, gpu=loaded, cpu=sources, after=fence)),
    ]
    bench.engine.work(compute, micros=_WORK_MICROS)
    _write(bench, memory.plain, blocks=beside, compute=compute, wanted=memory.wanted[2], random=random)
    spin(*events)
    cpu[targets] = memory.wanted[:, stored].transpose(1, 0, 2).reshape(quarter, -1)
    memory.wanted[:, loaded] = cpu[sources].reshape(quarter, 3, -1).transpose(1, 0, 2)


def _write(
    bench: Bench, rows: Rows, *, blocks: Slots, compute: object, wanted: Bytes, random: np.random.Generator
) -> None:
    for block in blocks.tolist():
        value = int(random.integers(256))
        bench.engine.fill(compute, rows, row=block, value=value)
        wanted[block] = value
