"""The engine's side of the check, the one place that differs: torch on a GPU, or kernels of the fake driver.

Streams are what either calls a stream; rows are bytes of device memory, `[..., bytes]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tests.fakecuda import DeviceArray, FakeDriver

Bytes = NDArray[np.uint8]

_MATRIX: Final = 4096
_PROBES: Final = 20
_FAKE_MICROS: Final = 0.5
"""Of what a GPU would be kept busy for, the fake is: there is no clock to be ahead of but the test's own threads."""


class Rows(Protocol):
    """Device memory of the engine's."""

    tensor: Any
    """What aiokv is given."""

    def read(self) -> Bytes:
        """All bytes as they are now, in the shape of the rows. Nothing may write them meanwhile."""
        ...

    def write(self, content: Bytes) -> None:
        """Replace all of them, from the host, before this returns."""
        ...


class Engine(Protocol):
    """Memory, streams and kernels."""

    def rows(self, *shape: int) -> Rows:
        """New memory, full of zeros."""
        ...

    def stream(self) -> Any:  # noqa: ANN401  # whatever the engine calls a stream
        """A stream that does not wait for the default one."""
        ...

    def work(self, stream: object, *, micros: float) -> None:
        """Compute for about so long, on memory of its own."""
        ...

    def fill(self, stream: object, rows: Rows, *, row: int, value: int) -> None:
        """A kernel that writes one row of `[n, bytes]`."""
        ...

    def copy(self, stream: object, source: Rows, *, row: int, target: Rows, target_row: int) -> None:
        """A kernel that reads one row and keeps it in another."""
        ...

    def settle(self) -> list[str]:
        """Wait for all streams; what the driver complains of since the last time, which a real one never does."""
        ...


@final
class TorchRows:
    """A torch tensor."""

    def __init__(self, tensor: Any) -> None:  # noqa: ANN401  # a torch.Tensor
        self.tensor = tensor

    def read(self) -> Bytes:
        """See `Rows`."""
        content: Bytes = self.tensor.cpu().numpy()
        return content

    def write(self, content: Bytes) -> None:
        """See `Rows`."""
        torch = import_module("torch")
        self.tensor.copy_(torch.from_numpy(content))
        torch.cuda.synchronize()


@final
class TorchEngine:
    """Computes with torch on device 0. Delays are products of matrices, as a forward pass is made of them."""

    def __init__(self, *, device: str = "cuda:0", matrix: int = _MATRIX) -> None:
        self._torch = torch = import_module("torch")
        self._device = device
        self._factors = [torch.randn(matrix, matrix, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self._products: dict[int, Any] = {}
        self._micros_per_product = 100.0
        self._micros_per_product = self._measure()

    def rows(self, *shape: int) -> TorchRows:
        """See `Engine`."""
        made = TorchRows(self._torch.zeros(shape, dtype=self._torch.uint8, device=self._device))
        self._torch.cuda.synchronize()
        return made

    def stream(self) -> Any:  # noqa: ANN401  # a torch.cuda.Stream
        """See `Engine`."""
        made = self._torch.cuda.Stream()
        self._products[made.cuda_stream] = self._torch.empty_like(self._factors[0])
        self._torch.cuda.synchronize()
        self.work(made, micros=0)  # the first product on a stream allocates
        self._torch.cuda.synchronize()
        return made

    def work(self, stream: Any, *, micros: float) -> None:  # noqa: ANN401
        """See `Engine`."""
        with self._torch.cuda.stream(stream):
            for _ in range(1 + int(micros / self._micros_per_product)):
                self._torch.matmul(*self._factors, out=self._products[stream.cuda_stream])

    def fill(self, stream: Any, rows: Rows, *, row: int, value: int) -> None:  # noqa: ANN401
        """See `Engine`."""
        with self._torch.cuda.stream(stream):
            rows.tensor[row].fill_(value)

    def copy(self, stream: Any, source: Rows, *, row: int, target: Rows, target_row: int) -> None:  # noqa: ANN401
        """See `Engine`. An addition, as a copy might be made by a copy engine."""
        with self._torch.cuda.stream(stream):
            self._torch.add(source.tensor[row], 0, out=target.tensor[target_row])

    def settle(self) -> list[str]:
        """See `Engine`."""
        self._torch.cuda.synchronize()
        return []

    def _measure(self) -> float:
        """How long one product takes once the clocks have risen: the second half of many."""
        stream = self.stream()
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in (begin, end):
            self.work(stream, micros=_PROBES * self._micros_per_product)
            event.record(stream)
        self._torch.cuda.synchronize()
        return float(max(1e3 * begin.elapsed_time(end) / _PROBES, 1.0))


@final
class FakeRows:
    """An array of the fake driver's."""

    def __init__(self, array: DeviceArray) -> None:
        self.tensor = array

    def read(self) -> Bytes:
        """See `Rows`."""
        return np.frombuffer(self.tensor.read(), np.uint8).reshape(self.tensor.shape)

    def write(self, content: Bytes) -> None:
        """See `Rows`."""
        self.tensor.write(content.tobytes())

    def address(self, row: int) -> int:
        """Of one row."""
        return self.tensor.pointer + row * self.tensor.shape[-1]


@final
class FakeEngine:
    """The same on the fake driver, which does everything that a GPU may do and complains of what nothing orders."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self._kernel = import_module("tests.fakecuda").Kernel
        self._bindings = import_module("cuda.bindings.driver")
        self._scratch: dict[int, FakeRows] = {}
        driver.adversaries()

    def rows(self, *shape: int) -> FakeRows:
        """See `Engine`."""
        return FakeRows(self._driver.allocate(*shape))

    def stream(self) -> int:
        """See `Engine`."""
        context = self._succeed(self._bindings.cuDevicePrimaryCtxRetain(0))
        self._succeed(self._bindings.cuCtxPushCurrent(context))
        try:
            made = int(self._succeed(self._bindings.cuStreamCreate(1)))
        finally:
            self._succeed(self._bindings.cuCtxPopCurrent())
        self._scratch[made] = self.rows(1, 1)
        return made

    def work(self, stream: Any, *, micros: float) -> None:  # noqa: ANN401
        """See `Engine`."""
        kernel = self._kernel(duration_us=_FAKE_MICROS * micros)
        self._driver.launch(stream, kernel.fill(self._scratch[stream].address(0), value=1, num_bytes=1))

    def fill(self, stream: Any, rows: Any, *, row: int, value: int) -> None:  # noqa: ANN401
        """See `Engine`."""
        kernel = self._kernel().fill(rows.address(row), value=value, num_bytes=rows.tensor.shape[-1])
        self._driver.launch(stream, kernel)

    def copy(self, stream: Any, source: Any, *, row: int, target: Any, target_row: int) -> None:  # noqa: ANN401
        """See `Engine`."""
        num_bytes = source.tensor.shape[-1]
        kernel = self._kernel().copy(target.address(target_row), source.address(row), num_bytes=num_bytes)
        self._driver.launch(stream, kernel)

    def settle(self) -> list[str]:
        """See `Engine`."""
        if not self._driver.drain():
            raise TimeoutError("the fake driver has not come to rest")
        found = self._driver.violations()
        self._driver.forget_violations()
        return found

    @staticmethod
    def _succeed(result: tuple[Any, ...]) -> Any:  # noqa: ANN401  # whatever the call gives
        if int(result[0]):
            raise RuntimeError(f"the driver returned {result[0]}")
        return result[1] if len(result) > 1 else None
