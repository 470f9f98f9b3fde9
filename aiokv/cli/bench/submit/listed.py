"""The peer of `bench submit`: the same copies handed over as lists, the way the bindings' own function wants them."""

from __future__ import annotations

from typing import final

from aiokv.backends.cuda_copies import Copies
from aiokv.cli.bench.device import BenchDevice

__all__ = ["ListedCopies"]

_STREAM_ORDER = 1


@final
class ListedCopies:
    """A stream of its own, on which it submits."""

    def __init__(self, device: BenchDevice) -> None:
        self._device = device
        with device.driver.current():
            self._stream = device.driver.create_stream()

    def submit(self, copies: Copies) -> None:
        """One call for all, an object per address."""
        api = self._device.api
        attributes = api.CUmemcpyAttributes()
        attributes.srcAccessOrder = api.CUmemcpySrcAccessOrder(_STREAM_ORDER)
        with self._device.driver.submitting():
            targets = [api.CUdeviceptr(address) for address in copies.targets.tolist()]
            sources = [api.CUdeviceptr(address) for address in copies.sources.tolist()]
            sizes, count = copies.sizes.tolist(), len(copies.sizes)
            self._device.call("cuMemcpyBatchAsync", targets, sources, sizes, count, [attributes], [0], 1, self._stream)

    def is_idle(self) -> bool:
        """Whether all of it has been copied."""
        with self._device.driver.current():
            return self._device.driver.is_idle(self._stream)

    def close(self) -> None:
        """Once it is idle."""
        with self._device.driver.current():
            self._device.driver.destroy_stream(self._stream)
