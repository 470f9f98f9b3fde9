"""How long aiokv holds the loop's thread at a time: CPU time of each of its steps, by `time.thread_time`.

A step is one synchronous public call, one stretch of a public coroutine between two suspensions, or one callback that
the runtime left with the loop (a tick of the bridge, a slice of work, an attempt for the head of the queue). What the
host does in between, computing and comparing bytes, is no part of it. Steps are counted by what they are, in buckets
that are 2 % wide, so that a long run needs no more memory than a short one.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, final

from aiokv import run

__all__ = ["HoldMeter", "LongStep", "Metered", "Steps", "run_metered"]

P = ParamSpec("P")
T = TypeVar("T")

_GROWTH: Final = 1.02
_LEAST_S: Final = 1e-7
_BUCKETS: Final = 1024  # up to 64 s
_LONGEST: Final = 10
_RUNTIME: Final = "aiokv.runtime."


class LongStep(NamedTuple):
    """One of the longest steps, and what it was."""

    seconds: float
    step: str


@final
class Steps:
    """How long steps took."""

    __slots__ = ("_counts", "count", "longest_s")

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self.count = 0
        self.longest_s = 0.0

    def note(self, seconds: float) -> None:
        """One more step."""
        self.count += 1
        self.longest_s = max(self.longest_s, seconds)
        bucket = math.ceil(math.log(max(seconds, _LEAST_S) / _LEAST_S, _GROWTH))
        self._counts[min(bucket, _BUCKETS - 1)] += 1

    def percentile_s(self, fraction: float) -> float:
        """No more than this for `fraction` of them; 0.0 before the first."""
        wanted, seen = math.ceil(self.count * fraction), 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(_LEAST_S * _GROWTH**bucket, self.longest_s)
        return 0.0


@final
class HoldMeter:
    """Times steps of one thread."""

    __slots__ = ("_all", "_excluded", "_kinds", "_longest")

    def __init__(self) -> None:
        self._all = Steps()
        self._kinds: dict[str, Steps] = {}
        self._longest: list[LongStep] = []
        self._excluded = 0.0

    @property
    def steps(self) -> int:
        """How many were timed."""
        return self._all.count

    @property
    def longest_s(self) -> float:
        """The longest of all."""
        return self._all.longest_s

    @property
    def longest_step(self) -> str:
        """What the longest step was; empty before the first."""
        return self.longest[0].step if self._longest else ""

    @property
    def longest(self) -> tuple[LongStep, ...]:
        """The ten longest, longest first."""
        return tuple(sorted(self._longest, reverse=True))

    @property
    def kinds(self) -> Mapping[str, Steps]:
        """Steps by what they are: the method that was called, the coroutine, the callback."""
        return self._kinds

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call and time it."""
        excluded, started = self._excluded, time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            self._note(time.thread_time() - started - (self._excluded - excluded), _name_of(function))

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
        return self._all.percentile_s(fraction)

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
        return partial(self._call_back, callback) if module.startswith(_RUNTIME) else callback

    def _call_back(self, callback: Callable[..., object], *args: object) -> object:
        """Like `call`, for what the loop calls: a callback that was given another to run goes by that one's name."""
        excluded, started = self._excluded, time.thread_time()
        try:
            return callback(*args)
        finally:
            step = args[0] if args and callable(args[0]) else callback
            self._note(time.thread_time() - started - (self._excluded - excluded), _name_of(step))

    def _note(self, seconds: float, step: str) -> None:
        self._all.note(seconds)
        kind = self._kinds.get(step)
        if kind is None:
            kind = self._kinds[step] = Steps()
        kind.note(seconds)
        if len(self._longest) < _LONGEST:
            heapq.heappush(self._longest, LongStep(seconds, step))
        elif seconds > self._longest[0].seconds:
            heapq.heapreplace(self._longest, LongStep(seconds, step))


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
