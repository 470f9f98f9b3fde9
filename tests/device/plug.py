"""Puts the fake device behind a fake backend: `DevicePlug` for `tests.runtime.support.plugged_into`."""

from __future__ import annotations

from typing import Final, final

from aiokv import CacheGeometry, Lease
from aiokv.backends.cuda import CudaBackend
from aiokv.testing import FakeBackend
from tests.backends.cuda.rig import Rig, Tensor
from tests.device.mirrored import MirroredBackend
from tests.fakecuda import Kernel
from tests.runtime.support import BLOCK, Plugged

__all__ = ["DevicePlug"]

_WIDTH: Final = 32


@final
class DevicePlug:
    """Every runtime gets a backend and tensors of its own: a copy that is stuck keeps those it has."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._stream = rig.stream()
        self.opened = 0
        """How many runtimes ran on the device."""
        self.computed = 0
        """Kernels launched."""

    def __call__(self, fake: FakeBackend, *, geometry: CacheGeometry, gpu_blocks: int) -> Plugged:
        tensors = {group.name: self._rig.dense(gpu_blocks, _WIDTH) for group in geometry.groups}
        self.opened += 1
        return Plugged(
            backend=MirroredBackend(fake, cuda=CudaBackend(), fake=self._rig.fake),
            arenas={group: [tensor] for group, tensor in tensors.items()},
            compute_stream=self._stream,
            compute=lambda lease: self._compute(lease, tensors),
        )

    def _compute(self, lease: Lease, tensors: dict[str, Tensor]) -> None:
        kernel, first = Kernel(duration_us=20), lease.confirmed_tokens // BLOCK
        for group, tensor in tensors.items():
            for position, slot in enumerate(lease.block_table(group)):
                address = tensor.pointer + slot * _WIDTH
                if slot and position < first:
                    kernel.read(address, num_bytes=_WIDTH)
                elif slot:
                    kernel.fill(address, value=position % 251, num_bytes=_WIDTH)
        self._rig.fake.launch(self._stream, kernel)
        self.computed += 1
