"""How long aiokv holds the loop's thread at a time: CPU time of each of its steps, by `time.thread_time`.

A step is one synchronous public call, one stretch of a public coroutine between two suspensions, or one callback that
the runtime left with the loop (a tick of the bridge, a slice of work, an attempt for the head of the queue). What the
host does in between, computing and comparing bytes, is no part of it. Steps are counted in buckets that are 2 % wide,
so that a long run needs no more memory than a short one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar, final

from aiokv import run

__all__ = ["HoldMeter", "Metered", "run_metered"]

P = ParamSpec("P")
T = TypeVar("T")

_GROWTH: Final = 1.02
_LEAST_S: Final = 1e-7
_BUCKETS: Final = 1024  # up to 64 s
_RUNTIME: Final = "aiokv.runtime."


@final
class HoldMeter:
    """Times steps of one thread."""

    __slots__ = ("_counts", "_excluded", "longest_s", "longest_step", "steps")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._excluded = 0.0
        self.steps = 0
        self.longest_s = 0.0
        self.longest_step = ""
        """What the longest step was."""

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call and time it."""
        excluded, started = self._excluded, time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            self._note(time.thread_time() - started - (self._excluded - excluded), function)

    def exclude(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it as a part of some step, whose time it does not count to."""
        started = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            self.exclude_s(time.thread_time() - started)

    def exclude_s(self, seconds: float) -> None:
        """So much of the step that is being timed is not aiokv's doing."""
        self._excluded += seconds

    def percentile_s(self, fraction: float) -> float:
        """No more than this for `fraction` of all steps; 0.0 before the first."""
        wanted, seen = math.ceil(self.steps * fraction), 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(_LEAST_S * _GROWTH**bucket, self.longest_s)
        return 0.0

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Time what the runtime asks this loop to call."""
        for name, place in (("call_soon", 0), ("call_later", 1), ("add_reader", 1)):
            setattr(loop, name, self._watching(getattr(loop, name), place=place))

    def _watching(self, register: Callable[..., Any], *, place: int) -> Callable[..., Any]:
        """The method `register` of a loop, which takes a callback as its argument number `place`."""

        def registered(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # whatever the loop takes and gives
            return register(*args[:place], self._timed(args[place]), *args[place + 1 :], **kwargs)

        return registered

    def _timed(self, callback: Callable[..., object]) -> Callable[..., object]:
        module = str(getattr(callback, "__module__", ""))  # those of tasks have none
        return partial(self.call, callback) if module.startswith(_RUNTIME) else callback

    def _note(self, seconds: float, step: Callable[..., object]) -> None:
        self.steps += 1
        if seconds > self.longest_s:
            self.longest_s = seconds
            self.longest_step = _name_of(step)
        bucket = math.ceil(math.log(max(seconds, _LEAST_S) / _LEAST_S, _GROWTH))
        self._counts[min(bucket, _BUCKETS - 1)] += 1


@final
class Metered(Coroutine[Any, Any, T]):
    """Runs a coroutine and times each stretch of it."""

    __slots__ = ("_coroutine", "_meter")

    def __init__(self, meter: HoldMeter, coroutine: Coroutine[Any, Any, T]) -> None:
        self._meter = meter
        self._coroutine = coroutine

    def send(self, value: object) -> object:
        """See `collections.abc.Coroutine`."""
        return self._meter.call(self._coroutine.send, value)

    def throw(self, *args: Any) -> object:  # noqa: ANN401  # the three forms that coroutines take
        """See `collections.abc.Coroutine`."""
        return self._meter.call(self._coroutine.throw, *args)

    def close(self) -> None:
        """See `collections.abc.Coroutine`."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        value: object = None
        try:
            suspended = self.send(value)
            while True:
                try:
                    value = yield suspended
                except GeneratorExit:
                    self.close()
                    raise
                except BaseException as error:
                    suspended = self.throw(error)
                else:
                    suspended = self.send(value)
        except StopIteration as end:
            result: T = end.value
            return result


def run_metered(main: Callable[[], Coroutine[Any, Any, T]], *, meter: HoldMeter) -> T:
    """`aiokv.run`, on a loop that `meter` watches."""

    async def watched() -> T:
        meter.watch(asyncio.get_running_loop())
        return await main()

    return run(watched)


def _name_of(step: Callable[..., object]) -> str:
    """A method by its class, a stretch of a coroutine by the coroutine's name."""
    owner = getattr(step, "__self__", None)
    return str(getattr(owner, "__qualname__", getattr(step, "__qualname__", type(step).__name__)))
