"""Steers the fake driver and asks it what it saw.

Streams, events and pointers are integers here, or anything that `int()` takes (the handles of `cuda.bindings`).
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import ClassVar, Final, SupportsInt, final

from tests.fakecuda.build import build_fake_driver
from tests.fakecuda.kernels import DeviceArray, Kernel, Launched

_SIGNATURES: Final[dict[str, tuple[object, list[object]]]] = {
    "reset": (c_uint64, []),
    "set_driver_version": (None, [c_int]),
    "set_devices": (None, [c_int]),
    "set_absent": (None, [c_int]),
    "set_attribute": (c_int, [c_int, c_int]),
    "set_limits": (None, [c_uint64, c_uint64]),
    "set_timing": (None, [c_double, c_double]),
    "use_virtual_time": (None, []),
    "advance": (c_int64, [c_int64]),
    "set_patience": (None, [c_double]),
    "set_queue_depth": (None, [c_uint64]),
    "blocked_submissions": (c_uint64, []),
    "hold_all": (None, [c_int]),
    "hold_stream": (c_int, [c_void_p, c_int]),
    "step": (c_int64, [c_void_p, c_uint64]),
    "settle": (None, []),
    "drain": (c_int, [c_double]),
    "inject": (c_int, [c_char_p, c_int, c_int]),
    "fail_next_copy": (c_int, [c_void_p, c_int]),
    "reset_error": (None, []),
    "set_adversaries": (None, [c_int, c_int, c_int, c_int, c_uint64]),
    "lock_host_functions": (None, [c_int]),
    "num_violations": (c_uint64, []),
    "violation": (c_int, [c_uint64, c_char_p, c_size_t]),
    "forget_violations": (None, []),
    "watch_thread": (None, [c_int]),
    "calls": (c_int64, [c_char_p]),
    "inflight": (c_uint64, []),
    "pending": (c_uint64, []),
    "inflight_range": (c_uint64, [c_uint64, c_size_t]),
    "pageable": (c_uint64, []),
    "registered_bytes": (c_uint64, []),
    "event_done_ns": (c_int64, [c_void_p]),
    "context_depth": (c_int, []),
    "alias": (c_uint64, [c_uint64, c_size_t]),
    "host_access": (None, [c_uint64, c_size_t, c_int]),
    "launch": (c_int, [c_void_p, c_void_p, c_size_t, c_int64, ctypes.POINTER(c_uint64)]),
    "reading": (c_int64, [c_uint64, c_char_p, c_size_t]),
}
_MAX_TEXT = 320


@final
class FakeDriver:
    """The fake driver of this process. One may be loaded; `load` gives it to everyone who asks."""

    _loaded: ClassVar[FakeDriver | None] = None

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"fake_{name}")
            function.restype, function.argtypes = result, arguments

    @classmethod
    def load(cls, driver_version: int = 13000) -> FakeDriver:
        """Loads it so that `cuda.bindings` finds it: before their first call. The version they see then stays theirs.

        Raises `NoCompiler`.
        """
        if cls._loaded is None:
            cls._loaded = cls(ctypes.CDLL(str(build_fake_driver()), mode=ctypes.RTLD_GLOBAL))
        cls._loaded.set_driver_version(driver_version)
        return cls._loaded

    def reset(self) -> None:
        """As if just loaded; handles and pointers from before are refused. Not while anything is pending."""
        if pending := self._call("reset"):
            raise RuntimeError(
                f"{pending} operations are pending or running: drain the driver, or reset its error, first"
            )

    # What there is

    def set_driver_version(self, version: int) -> None:
        """What `cuDriverGetVersion` and `cuGetProcAddress` say from now on; `cuda.bindings` ask only once."""
        self._call("set_driver_version", version)

    def set_devices(self, count: int) -> None:
        self._call("set_devices", count)

    def hide(self) -> None:
        """From the next `cuInit` on there is no device."""
        self._call("set_absent", 1)

    def show(self) -> None:
        self._call("set_absent", 0)

    def set_attribute(self, attribute: SupportsInt, value: int) -> None:
        if self._call("set_attribute", int(attribute), value):
            raise ValueError("no more attributes can be set")

    def set_limits(self, *, device_bytes: int = 64 << 30, pinned_bytes: int = 64 << 30) -> None:
        """Beyond them memory is out (2)."""
        self._call("set_limits", device_bytes, pinned_bytes)

    # When things happen

    def set_timing(self, gbps: float = 0, latency_us: float = 0) -> None:
        """A copy takes `latency_us` and its bytes at `gbps` gigabytes per second (0: no time), one after another."""
        self._call("set_timing", gbps, latency_us)

    def use_virtual_time(self) -> None:
        """The clock stands at 0 and moves by `advance` only."""
        self._call("use_virtual_time")

    def advance(self, microseconds: float) -> int:
        """Moves the virtual clock and runs, in this thread, all that falls due; the time then, in ns."""
        return self._call("advance", round(microseconds * 1000))

    def hold(self, stream: SupportsInt | None = None) -> None:
        """Copies, kernels and host functions (of one stream, or all) wait for `release` or `step`."""
        if stream is None:
            self._call("hold_all", 1)
        else:
            self._check(self._call("hold_stream", int(stream), 1))

    def release(self, stream: SupportsInt | None = None) -> None:
        """Ends every hold, or that of one stream; what was held then runs behind the caller's back."""
        if stream is None:
            self._call("hold_all", 0)
        else:
            self._check(self._call("hold_stream", int(stream), 0))

    def step(self, stream: SupportsInt, n: int = 1) -> int:
        """Runs the next `n` copies, kernels and host functions of a stream now, held or not, and what that sets free.

        Fewer where the stream is empty or must wait for another: the answer says how many.
        """
        return self._check(self._call("step", int(stream), n))

    def settle(self) -> None:
        """Runs all that can run now: neither held, nor waiting for time or another stream."""
        self._call("settle")

    def drain(self, timeout_s: float = 10) -> bool:
        """Waits until nothing is pending; False if that took longer, or an error stands."""
        return bool(self._call("drain", timeout_s))

    def set_patience(self, seconds: float) -> None:
        """How long a call may wait on the device (20 s) before it gives up, and tells a violation."""
        self._call("set_patience", seconds)

    def set_queue_depth(self, depth: int) -> None:
        """How many operations a stream takes before a submission waits (1,024); 0: any number."""
        self._call("set_queue_depth", depth)

    def blocked_submissions(self) -> int:
        return self._call("blocked_submissions")

    # Faults and adversaries

    def inject(self, api: str, *, nth: int = 1, code: int) -> None:
        """The `nth` call of `api` (a symbol: `cuMemcpyBatchAsync`, `cuMemcpyBatchAsync_v2`) from now returns `code`."""
        self._check(self._call("inject", api.encode(), nth, code))

    def fail_next_copy(self, stream: SupportsInt, code: int = 700) -> None:
        """When the stream comes to its next copy the context is lost: every call says `code` until `reset_error()`."""
        self._check(self._call("fail_next_copy", int(stream), code))

    def reset_error(self) -> None:
        """The context works again; what was pending when it failed never ran."""
        self._call("reset_error")

    def adversaries(
        self,
        *,
        snapshot_sources: bool = True,
        torn_destinations: bool = True,
        shuffled_order: bool = True,
        hazards: bool = True,
        seed: int = 1,
    ) -> None:
        """Everything a real device may do, done.

        - `snapshot_sources`: a source under ANY order is read at the call; a later change of it is a violation.
        - `torn_destinations`: a destination is overwritten with rubbish as soon as the copy may start.
        - `shuffled_order`: the copies of a batch, and ready streams, run in any order; copies of one batch that depend
          on each other are a violation.
        - `hazards`: so are two pending operations on the same bytes, one writing, that nothing orders.
        """
        self._call("set_adversaries", snapshot_sources, torn_destinations, shuffled_order, hazards, seed)

    def lock_host_functions(self) -> None:
        """Host functions run under the driver's lock, as in real drivers: every other call waits for them."""
        self._call("lock_host_functions", 1)

    def watch_loop_thread(self) -> None:
        """From now on calls from this thread that wait, pin or free are violations."""
        self._call("watch_thread", 1)

    def unwatch_loop_thread(self) -> None:
        self._call("watch_thread", 0)

    # What was seen

    def violations(self) -> list[str]:
        """What would have been wrong bytes or a crash, oldest first; looks for unmapped registrations, too."""
        count = self._call("num_violations")
        texts: list[str] = []
        for index in range(count):
            buffer = ctypes.create_string_buffer(_MAX_TEXT)
            if self._call("violation", index, buffer, _MAX_TEXT):
                texts.append(f"and {count - index} more")
                break
            texts.append(buffer.value.decode())
        return texts

    def forget_violations(self) -> None:
        self._call("forget_violations")

    def calls(self, api: str) -> int:
        """How often a symbol was called since the reset."""
        return self._check(self._call("calls", api.encode()))

    def inflight(self) -> int:
        """Copies submitted and not ended; each of a batch counts."""
        return self._call("inflight")

    def pending(self) -> int:
        """Operations of every kind that have not ended."""
        return self._call("pending")

    def inflight_range(self, ptr: int, num_bytes: int) -> int:
        """Submissions with a copy that touches one of these bytes and has not ended; kernels do not count."""
        return self._call("inflight_range", ptr, num_bytes)

    def pageable(self) -> int:
        """Ends of copies so far that lay in memory the driver does not know."""
        return self._call("pageable")

    def registered_bytes(self) -> int:
        """Host memory registered or allocated now."""
        return self._call("registered_bytes")

    def event_done_ns(self, event: SupportsInt) -> int | None:
        """When the last recording was reached (`time.monotonic_ns`, or the virtual clock); None if it was not."""
        return self._check(self._call("event_done_ns", int(event))) or None

    def context_depth(self) -> int:
        """How many contexts lie on this thread's stack."""
        return self._call("context_depth")

    # The device's memory

    def read(self, ptr: int, num_bytes: int) -> bytes:
        return ctypes.string_at(self._alias(ptr, num_bytes), num_bytes)

    def write(self, ptr: int, data: bytes) -> None:
        ctypes.memmove(self._alias(ptr, len(data)), data, len(data))

    def host_reads(self, ptr: int, num_bytes: int) -> None:
        """The host uses these bytes now: a violation if something that writes them is pending."""
        self._call("host_access", ptr, num_bytes, 0)

    def host_writes(self, ptr: int, num_bytes: int) -> None:
        """The same for writing: a violation if anything on them is pending."""
        self._call("host_access", ptr, num_bytes, 1)

    # The engine's part

    def allocate(self, *shape: int, typestr: str = "|u1") -> DeviceArray:
        """An array on device 0; the fake keeps it until the reset. The caller's current context stays what it is."""
        context, pointer, array = c_void_p(), c_uint64(), DeviceArray(self, pointer=0, shape=shape, typestr=typestr)
        self._succeed(self.library.cuInit(0))
        self._succeed(self.library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self._succeed(self.library.cuCtxPushCurrent_v2(context))
        try:
            self._succeed(self.library.cuMemAlloc_v2(ctypes.byref(pointer), c_size_t(array.num_bytes)))
        finally:
            self._succeed(self.library.cuCtxPopCurrent_v2(None))
        array.pointer = pointer.value
        return array

    def launch(self, stream: SupportsInt, kernel: Kernel) -> Launched:
        """Puts a fake kernel on a stream. Raises `RuntimeError` with the driver's code."""
        steps, reading = kernel.steps(), c_uint64()
        code = self._call("launch", int(stream), steps, len(steps), round(kernel.duration_us * 1000), reading)
        if code:
            raise RuntimeError(f"the launch returned {code}")
        return Launched(self, reading=reading.value, lengths=kernel.read_lengths)

    def reading(self, reading: int, *, num_bytes: int) -> bytes | None:
        buffer = ctypes.create_string_buffer(num_bytes + 1)
        found = self._call("reading", reading, buffer, num_bytes)
        return buffer.raw[:num_bytes] if found >= 0 else None

    def begin_capture(self, stream: SupportsInt, *, mode: int = 0) -> None:
        """Begins a capture as an engine would: 0 global, 1 of this thread, 2 relaxed."""
        self._succeed(self.library.cuStreamBeginCapture_v2(c_void_p(int(stream)), mode))

    def end_capture(self, stream: SupportsInt) -> None:
        """Ends it. Raises `RuntimeError` with the driver's code where somebody has broken it."""
        graph = c_void_p()
        self._succeed(self.library.cuStreamEndCapture(c_void_p(int(stream)), ctypes.byref(graph)))

    def _alias(self, ptr: int, num_bytes: int) -> int:
        alias = self._call("alias", ptr, num_bytes)
        if not alias:
            raise ValueError(f"{ptr:#x}, {num_bytes} bytes, does not lie in one range of the driver's")
        return alias

    def _call(self, name: str, *arguments: object) -> int:
        result: int = getattr(self.library, f"fake_{name}")(*arguments)
        return result

    @staticmethod
    def _check(answer: int) -> int:
        if answer < 0:
            raise ValueError("no such stream, event or function")
        return answer

    @staticmethod
    def _succeed(code: int) -> None:
        if code:
            raise RuntimeError(f"the driver returned {code}")
