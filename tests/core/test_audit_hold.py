"""Law 8 for sliced audits: what a slice costs does not grow with the pools, also beside heavy traffic.

Judged are ratios of CPU time within one run; the times themselves are printed only (`pytest -s`), because machines that
run tests are slow and shared.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from typing import Final, final

import numpy as np
import pytest

from aiokv.core.audit import Audit
from aiokv.core.cache import CacheState
from aiokv.core.lease_table import AcquireRequest, LeaseRecord, LeaseState
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Outcome
from aiokv.model.spec import CacheGeometry, FullAttention

BLOCK: Final = 16
PROMPT: Final = 8192
"""Blocks of a prompt of 128k tokens."""
GEOMETRY: Final = CacheGeometry(groups=(FullAttention("full", block_size=BLOCK),), hash_block_size=BLOCK)
SMALL: Final = 20_000
LARGE: Final = 1_000_000
LIVE: Final = 40


@final
class Traffic:
    """A cache whose pools are nearly full, and requests that come and go, a few steps at a time."""

    def __init__(self, slots: int) -> None:
        self.cache = CacheState(GEOMETRY, gpu_blocks=slots + 1, cpu_blocks=slots)
        self.cache.warm()
        self.admitted = 0
        self._live: deque[LeaseRecord] = deque()
        self._prompts = [self._hashed(seed) for seed in range(max(9 * slots // (10 * PROMPT), 1))]
        for keys in self._prompts:
            self._admit(keys, blocks=PROMPT)
            self._work()
            while len(self._live) > min(LIVE, slots // (3 * PROMPT)):
                self.cache.finish(self._live.popleft())
                self._work()

    def step(self, number: int) -> None:
        """What one turn of a busy server does: one request comes, one goes, copies end, a slice of work is done."""
        rng = np.random.default_rng(number)
        self._admit(self._prompts[int(rng.integers(len(self._prompts)))], blocks=int(rng.integers(10, 1000)))
        if len(self._live) > LIVE:
            leave = self.cache.finish if number % 2 else self.cache.release
            leave(self._live.popleft())
        self.cache.run_slice()
        self._end_copies()

    def _admit(self, keys: BlockKeys, *, blocks: int) -> None:
        tokens = blocks * BLOCK
        record = self.cache.try_acquire(AcquireRequest(request_id="request", keys=keys, prompt_tokens=tokens))
        if isinstance(record, LeaseRecord):
            self.admitted += 1
            self._live.append(record)
            self.cache.run_slice()
            if record.state is LeaseState.READY:
                self.cache.confirm(record, tokens)

    def _work(self) -> None:
        while self.cache.has_work or self.cache.outbox.submissions:
            self.cache.run_slices()
            self._end_copies()

    def _end_copies(self) -> None:
        for transfer in self.cache.outbox.take_submissions():
            self.cache.mark_submitted(transfer)
            self.cache.complete(transfer.transfer_id, Outcome.OK)

    @staticmethod
    def _hashed(seed: int) -> BlockKeys:
        tokens = np.arange(seed * PROMPT * BLOCK, (seed + 1) * PROMPT * BLOCK, dtype=np.int32)
        keys = BlockKeys(tokens, hash_block_size=BLOCK)
        keys.hash_more(keys.num_blocks)
        return keys


@pytest.fixture(autouse=True)
def _without_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def audited(traffic: Traffic, *, is_busy: bool, name: str) -> tuple[Audit, list[float]]:
    """A sliced audit, and the CPU seconds of every slice."""
    seconds = []
    run = traffic.cache.audit_in_slices()
    goes_on = True
    while goes_on:
        started = time.thread_time()
        goes_on = run.run_slice()
        seconds.append(time.thread_time() - started)
        if is_busy and goes_on:
            traffic.step(len(seconds))
    p50, p99, most = (1e3 * float(np.percentile(seconds, q)) for q in (50, 99, 100))
    print(f"{name:14s} {len(seconds):5d} slices  p50 {p50:.3f}  p99 {p99:.3f}  max {most:.3f} ms")
    return run.result, seconds


def test_a_slice_of_an_audit_costs_the_same_at_a_million_slots() -> None:
    """Law 8: p99 of slices at most three times that of a pool of 20k, at rest and beside heavy traffic."""
    small, large = Traffic(SMALL), Traffic(LARGE)
    p99: dict[str, float] = {}
    for name, traffic, is_busy in (
        ("small, rest", small, False),
        ("large, rest", large, False),
        ("small, traffic", small, True),
        ("large, traffic", large, True),
    ):
        before = traffic.admitted
        audit, seconds = audited(traffic, is_busy=is_busy, name=name)
        assert audit.violations == ()
        assert (traffic.admitted > before) is is_busy
        p99[name] = float(np.percentile(seconds, 99))
    assert p99["large, rest"] <= 3 * p99["small, rest"]
    assert p99["large, traffic"] <= 3 * max(p99["small, traffic"], p99["small, rest"])


def test_a_slice_of_fewer_slots_is_shorter() -> None:
    """The host sets the budget."""
    traffic = Traffic(SMALL)
    whole = traffic.cache.audit()
    for slice_slots in (100, 1000, 10_000):
        run = traffic.cache.audit_in_slices(slice_slots=slice_slots)
        slices = 1
        while run.run_slice():
            slices += 1
        assert slices >= 2 * SMALL / slice_slots
        assert run.result == whole


def test_the_last_slice_puts_in_order_what_the_others_have_made() -> None:
    """Law 8: with a thousand leases it takes at most twice as long as the longest of the others."""
    cache = CacheState(GEOMETRY, gpu_blocks=SMALL)
    keys = BlockKeys(np.arange(BLOCK, dtype=np.int32), hash_block_size=BLOCK)
    for _ in range(1000):
        cache.try_acquire(AcquireRequest(request_id="request", keys=keys, prompt_tokens=BLOCK))
    runs = []
    for _ in range(5):
        run = cache.audit_in_slices()
        seconds, goes_on = [], True
        while goes_on:
            started = time.thread_time()
            goes_on = run.run_slice()
            seconds.append(time.thread_time() - started)
        assert len(run.result.leases) == len(run.result.pins) == 1000
        runs.append(seconds)
    assert min(seconds[-1] for seconds in runs) <= 2 * min(max(seconds[:-1]) for seconds in runs)
