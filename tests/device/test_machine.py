"""The state machine over the runtime once more, on the CUDA backend and the fake driver, with every oracle on.

What the machine computes is a kernel; copies end when the machine says so, and are made then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import pytest

from aiokv import KVRuntime, RuntimeConfig
from aiokv.backends.base import Backend
from aiokv.backends.cuda import CudaBackend
from aiokv.core.fences import Fence
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.testing import RuntimeDriver, Setup, Witness, run_cache_machine
from tests.backends.cuda.rig import Rig, Tensor
from tests.device.mirrored import MirroredBackend
from tests.device.slots import find_unheld
from tests.fakecuda import Kernel

WIDTH: Final = 8
KINDS: Final = ("hit", "loads", "load ok", "store ok", "came back")


class DeviceDriver(RuntimeDriver):
    """`kernels` counts what was launched, over all runs."""

    kernels = 0

    def __init__(self, setup: Setup, witness: Witness, *, rig: Rig) -> None:
        self.rig = rig
        super().__init__(setup, witness)

    def build_runtime(self, config: RuntimeConfig) -> KVRuntime:
        assert not isinstance(config.backend, str)
        inner: Backend = config.backend
        groups = config.geometry.groups
        self.cuda, self.streams = CudaBackend(), [self.rig.stream(), self.rig.stream()]
        self.tensors: dict[str, Tensor] = {group.name: self.rig.dense(config.gpu_blocks, WIDTH) for group in groups}
        mirrored = MirroredBackend(inner, cuda=self.cuda, fake=self.rig.fake)
        return KVRuntime(
            replace(config, backend=mirrored, compute_stream=self.streams[0]),
            arenas={group: [tensor] for group, tensor in self.tensors.items()},
        )

    def confirm(
        self,
        record: LeaseRecord,
        num_tokens: int,
        *,
        publish_to: int | None = None,
        states: Sequence[int] = (),
        after: Fence | None = None,
    ) -> None:
        """See `Driver`. Compute runs on the streams in turns, each behind what the other does with these blocks."""
        if record.state is LeaseState.READY and num_tokens > record.confirmed and after is None:
            stream = self.streams[DeviceDriver.kernels % len(self.streams)]
            self._lease(record).wait_on(stream)
            self._launch(record, num_tokens, stream=stream)
            after = self.kv.fence(stream)
        super().confirm(record, num_tokens, publish_to=publish_to, states=states, after=after)
        found = find_unheld(self.kv, self.cuda, fake=self.rig.fake, arrays=self.tensors)
        assert not found, found

    def close(self) -> None:
        super().close()
        assert self.rig.fake.violations() == [], self.rig.fake.violations()

    def _launch(self, record: LeaseRecord, num_tokens: int, *, stream: int) -> None:
        kernel = Kernel(duration_us=5)
        steps = 0
        for index, tensor in enumerate(self.tensors.values()):
            if index in record.state_slots:
                continue
            block, table = record.block_sizes[index], self.block_ids(record, group=index).tolist()
            for position, slot in enumerate(table[: -(-num_tokens // block)]):
                if slot:
                    steps += 1
                    add = kernel.read if (position + 1) * block <= record.confirmed else partial(kernel.fill, value=7)
                    add(tensor.pointer + slot * WIDTH, num_bytes=WIDTH)
        if steps:
            self.rig.fake.launch(stream, kernel)
            DeviceDriver.kernels += 1


@pytest.mark.timeout(120)
def test_the_runtime_keeps_its_invariants_on_the_device(watched_rig: Rig) -> None:
    """Invariants 1 to 13 after every step, law 5 all the while."""
    watched_rig.fake.set_queue_depth(0)
    before = DeviceDriver.kernels
    seen = run_cache_machine(partial(DeviceDriver, rig=watched_rig), max_examples=40, steps=40)
    assert DeviceDriver.kernels - before > 100
    missed = {kind: seen[kind] for kind in KINDS if not seen[kind]}
    assert not missed, (missed, seen)
