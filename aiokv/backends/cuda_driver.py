"""The CUDA driver, as far as aiokv needs it: `CudaDriver`, a thin layer over `cuda.bindings.driver`.

Nothing is imported or loaded before `CudaDriver.load()`, and no call is made but through an object it gave.

Rules
- A call is made inside `with driver.current():`, which pushes the primary context of the device, pops it again, and
  lets the thread meanwhile do what another thread's stream capture in global mode would forbid. The caller's current
  device and capture mode are as before. `submitting()` does the same without the capture mode: what only enqueues
  needs none. Methods that say so make either by themselves.
- A forked child never calls the driver: both raise `UsageError` there.
- Handles are plain `int`s. What the driver refuses is a `CudaError`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from importlib import import_module
from types import ModuleType
from typing import Any, Final, final

from aiokv.backends.cuda_versions import OLDEST_DRIVER, are_bindings_supported, as_text, is_driver_supported
from aiokv.errors import ConfigError, UsageError

__all__ = ["CudaDriver", "CudaError"]

_log = logging.getLogger(__name__)

# The driver's own numbers: the names that bindings have for them change with their versions.
_NOT_READY: Final = 600
_NOT_FOUND: Final = 500
_CAPTURE_IMPLICIT: Final = 906
_RELAXED: Final = 2
_EVENT_BLOCKING: Final = 1
_EVENT_UNTIMED: Final = 2
_STREAM_NON_BLOCKING: Final = 1
_HOST_NUMA_ID: Final = 134
_DEVICE_ORDINAL: Final = 9
_FOR_ALL_CONTEXTS: Final = 1

_ELAPSED_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_float), ctypes.c_void_p, ctypes.c_void_p)


class CudaError(Exception):
    """The driver answered a call with an error; `name` is the driver's own for the code."""

    def __init__(self, code: int, api: str, *, name: str = "") -> None:
        self.code = code
        self.api = api
        self.name = name or f"error {code}"
        super().__init__(f"{api}: {self.name} ({code})")


@final
class _Current:
    """The primary context is current in this thread until the end of the block, and captures are not minded."""

    __slots__ = ("_driver", "_mode")

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._mode: Any = None

    def __enter__(self) -> None:
        self._driver.push()
        try:
            self._mode = self._driver.exchange_capture_mode(None)
        except BaseException:
            self._driver.leave(None)
            raise

    def __exit__(self, *exc_info: object) -> None:
        self._driver.leave(self._mode)


@final
class _Submitting:
    """The same, with the thread's capture mode left alone."""

    __slots__ = ("_driver",)

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

    def __enter__(self) -> None:
        self._driver.push()

    def __exit__(self, *exc_info: object) -> None:
        self._driver.leave(None)


@final
class CudaDriver:
    """One device and its primary context, which is retained with the first call that needs it."""

    __slots__ = (
        "_api", "_context", "_device", "_elapsed", "_has_told", "_lock", "_pid", "_relaxed", "ordinal", "version",
    )  # fmt: skip

    def __init__(self, api: ModuleType, *, ordinal: int, version: int) -> None:
        self._api = api
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._context: Any = None
        self._has_told = False
        self._relaxed = api.CUstreamCaptureMode(_RELAXED)
        self.ordinal = ordinal
        """Which of the devices that this process sees."""
        self.version = version
        """What the driver supports: 12080 is CUDA 12.8."""
        self._device = self._call("cuDeviceGet", ordinal)
        # At its first entry point: newer bindings look for one that drivers before 12.8 do not have.
        self._elapsed = _ELAPSED_FUNCTION(self._require_function("cuEventElapsedTime", version=2000))

    @classmethod
    def load(cls, *, ordinal: int = 0) -> CudaDriver:
        """Find the driver and a device; `ConfigError` says what is missing. May take a second the first time."""
        api = _import_bindings()
        try:
            code = int(api.cuInit(0)[0])
        except Exception as error:  # bindings say in several ways that there is no library
            raise ConfigError(f"CUDA cannot be used: the driver's libcuda.so.1 does not load ({error})") from error
        if code:
            raise ConfigError(f"CUDA cannot be used: {CudaError(code, 'cuInit', name=_name_of(api, code))}")
        version, devices = int(api.cuDriverGetVersion()[1]), int(api.cuDeviceGetCount()[1])
        if not is_driver_supported(found := as_text(version)):
            raise ConfigError(f"CUDA cannot be used: the driver supports CUDA {found}, aiokv needs {OLDEST_DRIVER}")
        if not 0 <= ordinal < devices:
            raise ConfigError(f"CUDA cannot be used: there is no device {ordinal}, the driver sees {devices}")
        try:
            return cls(api, ordinal=ordinal, version=version)
        except CudaError as error:
            raise ConfigError(f"CUDA cannot be used: {error}") from error

    # Contexts.

    def current(self) -> _Current:
        """For the calls of a `with` block; `UsageError` in a forked child."""
        return _Current(self)

    def submitting(self) -> _Submitting:
        """The same for a block that only enqueues; `UsageError` in a forked child."""
        return _Submitting(self)

    def require_own_process(self) -> None:
        """`UsageError` in a forked child."""
        if os.getpid() != self._pid:
            raise UsageError(f"CUDA was begun in process {self._pid}; a forked child cannot use it")

    def push(self) -> None:
        """Make the primary context current in this thread. Every push is followed by a `leave`."""
        self.require_own_process()
        if self._context is None:
            self._retain()
        self._call("cuCtxPushCurrent", self._context)

    def leave(self, mode: Any) -> None:  # noqa: ANN401  # an enumeration of the bindings
        """Make current again what was before the last `push`, and set the mode of captures, unless it is `None`.

        What was called in between has been done: it must not look as if it was not, so a refusal is only logged.
        """
        undone = (("cuThreadExchangeStreamCaptureMode", mode),) if mode is not None else ()
        for call in (*undone, ("cuCtxPopCurrent",)):
            try:
                self._call(*call)
            except CudaError as error:
                self._note_left(error)

    def exchange_capture_mode(self, mode: Any) -> Any:  # noqa: ANN401  # an enumeration of the bindings
        """Set how this thread minds captures of other threads, `None` for not at all; the mode before."""
        return self._call("cuThreadExchangeStreamCaptureMode", self._relaxed if mode is None else mode)

    def release(self) -> None:
        """Give the primary context back. The next call retains it anew."""
        with self._lock:
            if self._context is not None:
                self._context = None
                self._call("cuDevicePrimaryCtxRelease", self._device)

    # Memory. These make the context current by themselves.

    def register_host(self, address: int, num_bytes: int) -> None:
        """Pin `num_bytes` bytes of this process at `address`, for all contexts."""
        with self.current():
            self._call("cuMemHostRegister", address, num_bytes, _FOR_ALL_CONTEXTS)

    def unregister_host(self, address: int) -> None:
        """Unpin what was registered at `address`."""
        with self.current():
            self._call("cuMemHostUnregister", address)

    def device_of(self, address: int) -> int:
        """The ordinal of the device whose memory `address` is."""
        with self.current():
            attribute = self._api.CUpointer_attribute(_DEVICE_ORDINAL)
            return int(self._call("cuPointerGetAttribute", attribute, address))

    def device_numa_node(self) -> int | None:
        """The NUMA node of the host next to the device; `None` where the driver does not know."""
        attribute = self._api.CUdevice_attribute(_HOST_NUMA_ID)
        try:
            with self.current():
                node = int(self._call("cuDeviceGetAttribute", attribute, self._device))
        except CudaError:  # an older driver
            return None
        return node if node >= 0 else None

    def zero_device(self, address: int, num_bytes: int, *, stream: int) -> None:
        """Enqueue zeroing device memory."""
        self._call("cuMemsetD8Async", address, 0, num_bytes, stream)

    # Streams.

    def create_stream(self) -> int:
        """A stream of the lowest priority that does not wait for the legacy default stream."""
        result = self._api.cuCtxGetStreamPriorityRange()
        self.require_success(int(result[0]), api="cuCtxGetStreamPriorityRange")
        return int(self._call("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, int(result[1])))

    def destroy_stream(self, stream: int) -> None:
        """Free a stream."""
        self._call("cuStreamDestroy", stream)

    def is_idle(self, stream: int) -> bool:
        """Whether all that was enqueued has ended."""
        return self._ask("cuStreamQuery", stream)

    def is_capturing(self, stream: int) -> bool:
        """Whether an event recorded here now would become part of a CUDA graph, or break its capture."""
        code, *status = self._api.cuStreamIsCapturing(stream)
        if int(code) == _CAPTURE_IMPLICIT:
            return True
        self.require_success(int(code), api="cuStreamIsCapturing")
        return int(status[0]) != 0

    # Events.

    def create_event(self) -> int:
        """An event that only orders and tells the end."""
        return int(self._call("cuEventCreate", _EVENT_BLOCKING | _EVENT_UNTIMED))

    def create_timed_event(self) -> int:
        """An event that also knows when it was reached."""
        return int(self._call("cuEventCreate", _EVENT_BLOCKING))

    def destroy_event(self, event: int) -> None:
        """Free an event, pending or not."""
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """Move the event to the end of what is enqueued in the stream."""
        self._call("cuEventRecord", event, stream)

    def query_event(self, event: int) -> bool:
        """Whether the event has been reached."""
        return self._ask("cuEventQuery", event)

    def wait_event(self, stream: int, event: int) -> None:
        """What is enqueued from now on waits for the event as it was recorded last."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def seconds_between(self, begin: int, end: int) -> float:
        """Device time between two timed events that have been reached."""
        milliseconds = ctypes.c_float()
        self.require_success(self._elapsed(ctypes.byref(milliseconds), begin, end), api="cuEventElapsedTime")
        return milliseconds.value / 1e3

    def find_function(self, symbol: str, *, version: int) -> int | None:
        """The address of the function `symbol` as of that version of CUDA; `None` where the driver has none."""
        code, address, *_ = self._api.cuGetProcAddress(symbol.encode(), version, 0)
        return int(address) if int(code) == 0 and address else None

    def require_success(self, code: int, *, api: str) -> None:
        """Raise the `CudaError` that a call of `api` has answered; for calls made past this class, too."""
        if code:
            raise CudaError(code, api, name=_name_of(self._api, code))

    # Helpers.

    def _require_function(self, symbol: str, *, version: int) -> int:
        address = self.find_function(symbol, version=version)
        if address is None:
            raise CudaError(_NOT_FOUND, symbol, name="the driver has no such function")
        return address

    def _retain(self) -> None:
        with self._lock:
            if self._context is None:
                self._context = self._call("cuDevicePrimaryCtxRetain", self._device)

    def _note_left(self, error: CudaError) -> None:
        """Say it once: a context that is lost refuses this each time."""
        if not self._has_told:
            self._has_told = True
            _log.warning("the caller's context, or its capture mode, could not be restored: %s", error)

    def _call(self, api: str, *arguments: Any) -> Any:  # noqa: ANN401  # whatever the bindings take and give
        try:
            code, *results = getattr(self._api, api)(*arguments)
        except RuntimeError as error:  # bindings that are newer than the driver miss a function
            raise CudaError(_NOT_FOUND, api, name=str(error)) from error
        if code:
            self.require_success(int(code), api=api)
        return results[0] if results else None

    def _ask(self, api: str, handle: int) -> bool:
        code = int(getattr(self._api, api)(handle)[0])
        if code == _NOT_READY:
            return False
        self.require_success(code, api=api)
        return True


def _import_bindings() -> ModuleType:
    try:
        package, driver = import_module("cuda.bindings"), import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            f"CUDA cannot be used: cuda-bindings is missing, pip install 'aiokv[cuda]' ({error})"
        ) from error
    found = str(getattr(package, "__version__", "0"))
    if not are_bindings_supported(found):
        raise ConfigError(f"CUDA cannot be used: cuda-bindings is {found}, aiokv needs 12.9.10 up to 13")
    return driver


def _name_of(api: ModuleType, code: int) -> str:
    try:
        found = api.cuGetErrorName(api.CUresult(code))[1]
    except Exception:  # a code that these bindings do not know
        return ""
    return found.decode() if isinstance(found, bytes) else str(found or "")
