"""One thread for all torch work, so that the event loop and the copies have the other cores.

torch's own threads are set in this thread: with more than one, another busy process on the machine makes every matrix
product wait at a barrier, so one is the default.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, final

import torch

__all__ = ["TorchWorker", "deliver"]

R = TypeVar("R")
T = TypeVar("T")


@final
class TorchWorker:
    """Runs one piece of work after another, in the order they were given. Belongs to the loop it is made on."""

    __slots__ = ("_executor", "_loop")

    def __init__(self, *, torch_threads: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="aiokv-engine",
            initializer=torch.set_num_threads,
            initargs=(torch_threads,),
        )

    def start(self, work: Callable[[], T], *, done: Callable[[Future[T]], None]) -> None:
        """Hands `work` to the thread; `done` is called with its outcome on the loop, whoever still waits for it."""
        future = self._executor.submit(work)
        future.add_done_callback(lambda outcome: self._loop.call_soon_threadsafe(done, outcome))

    async def run(self, work: Callable[[], T]) -> T:
        """Runs `work` and returns what it returns. When cancelled it stops waiting; the work runs to its end."""
        waiter: asyncio.Future[T] = self._loop.create_future()
        self.start(work, done=lambda outcome: deliver(outcome, to=waiter, pick=lambda result: result))
        return await waiter

    def close(self) -> None:
        """Takes no more work and drops what has not begun; what runs ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def deliver(outcome: Future[R], *, to: asyncio.Future[T], pick: Callable[[R], T]) -> None:
    """Passes what `pick` takes from the outcome on to a waiter, if it is still there."""
    if to.done():
        return
    if outcome.cancelled():
        to.cancel()
    elif error := outcome.exception():
        to.set_exception(error)
    else:
        to.set_result(pick(outcome.result()))
