"""`aiokv.run`: a program that is interrupted at any suspension gives back what it holds and lets the interrupt out."""

from __future__ import annotations

import signal
from itertools import count

import aiokv
from aiokv import KVRuntime
from aiokv.testing import FakeBackend
from tests.cancellation.ways import Suspensions
from tests.runtime.support import config_of, is_shut, prompt, turns


def interrupted_at(at: int) -> bool:
    """Run a program to its end, or press Ctrl-C at one of its suspensions; whether that was reached."""
    backend = FakeBackend(manual=False)
    kv = KVRuntime(config_of(backend=backend))

    async def serve() -> None:
        async with kv:
            async with kv.acquire("request", prompt(3)) as lease:
                lease.confirm(lease.num_tokens)
                await turns(2)
            await kv.drain()

    main = Suspensions(serve(), at=at)
    main.strike = lambda: signal.raise_signal(signal.SIGINT)
    was_interrupted = False
    try:
        aiokv.run(main)
    except KeyboardInterrupt:
        was_interrupted = True
    assert was_interrupted is main.struck
    assert is_shut(backend)
    return main.struck


def test_a_program_interrupted_at_any_suspension_closes_its_runtime() -> None:
    """Law 4, and the order of the shutdown: who opened a runtime closes it, whatever ends the program."""
    for at in count(1):
        if not interrupted_at(at):
            break
    assert at > 5
