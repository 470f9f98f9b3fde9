"""A driver's host registration, recorded: what is registered, in which order, by which thread, what goes wrong."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Collection

from tests.backends.support import GUARD_S


class DriverError(Exception):
    """What a registrar raises; no class that the arena could know."""


class RecordingRegistrar:
    """Keeps books as a driver does: whole pages, none of them twice. `fail` names calls by number, from 0.

    With `gated` every registration waits inside until `let` lets it through.
    """

    def __init__(
        self, *, fail: Collection[int] = (), fail_unregister: Collection[int] = (), gated: bool = False
    ) -> None:
        self._fail = fail
        self._fail_unregister = fail_unregister
        self._gate = threading.Semaphore(0) if gated else None
        self.entered = threading.Semaphore(0)
        self.begun = 0
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.threads: set[str] = set()
        self.cpus: list[set[int]] = []
        """Where the thread of each registration may run."""
        self._attempts = {"register": 0, "unregister": 0}

    def register_host(self, address: int, num_bytes: int) -> None:
        self.threads.add(threading.current_thread().name)
        if sys.platform == "linux":
            self.cpus.append(os.sched_getaffinity(0))
        self.begun += 1
        self.entered.release()
        if self._gate is not None:
            assert self._gate.acquire(timeout=GUARD_S), "nobody let this registration through"
        if self._count("register") in self._fail:
            raise DriverError("CUDA_ERROR_OUT_OF_MEMORY")
        if num_bytes < 1:
            raise DriverError("CUDA_ERROR_INVALID_VALUE")
        pages = {page for start, size in self.registered.items() for page in _pages(start, size)}
        if pages & set(_pages(address, num_bytes)):
            raise DriverError("CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self.registered[address] = num_bytes
        self.calls.append(("register", address, num_bytes))

    def unregister_host(self, address: int) -> None:
        if self._count("unregister") in self._fail_unregister:
            raise DriverError("CUDA_ERROR_ILLEGAL_ADDRESS")
        self.calls.append(("unregister", address, self.registered.pop(address)))

    def let(self, n: int = 1) -> None:
        """Let `n` registrations through."""
        assert self._gate is not None
        self._gate.release(n)

    def wait_inside(self) -> None:
        """Until one more registration has begun."""
        assert self.entered.acquire(timeout=GUARD_S), "no registration began"

    def _count(self, what: str) -> int:
        number, self._attempts[what] = self._attempts[what], self._attempts[what] + 1
        return number


def _pages(address: int, num_bytes: int) -> range:
    return range(address // mmap.PAGESIZE, -(-(address + num_bytes) // mmap.PAGESIZE))
