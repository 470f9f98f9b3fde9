"""The cache that operations are timed on: both pools full of what requests left, as in a server that has run a while.

It is filled by requests alone: each is admitted, confirmed, stored and finished. Between rounds blocks are moved by
name (`CacheState.placement`): those of the measured prompt to where its case wants them, and new ones into whatever
slots are free, so that the next allocation evicts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, final

import numpy as np

from aiokv.cli.bench.cases import BLOCK, GEOMETRIES, Layout, Model
from aiokv.cli.bench.operations.prompts import Prompts
from aiokv.core import CacheState
from aiokv.core.inflight import Transfer
from aiokv.core.lease_table import AcquireRequest, LeaseRecord
from aiokv.errors import ConfigError
from aiokv.model.ids import BoolArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Deferred, Outcome

__all__ = ["BenchWorld", "granted", "request_of"]

_FILL_BLOCKS: Final = 8_192
_GPU_STEPS: Final = {Layout.GPU: 1, Layout.INTERLEAVED: 2}
"""Every how many blocks one lies on the GPU; none does in the other layouts."""


@final
class BenchWorld:
    """A cache with full pools of `pool_slots` slots each."""

    __slots__ = ("_groups", "cache", "model", "pool_slots", "prompts")

    def __init__(self, model: Model, *, pool_slots: int) -> None:
        self.model = model
        self.pool_slots = pool_slots
        self._groups = len(GEOMETRIES[model].groups)
        if pool_slots < self._groups:
            raise ConfigError(f"a pool of {pool_slots} slots holds no block of each group")
        self.cache = CacheState(GEOMETRIES[model], gpu_blocks=pool_slots + 1, cpu_blocks=pool_slots)
        self.prompts = Prompts()

    def fill(self, progress: Callable[[float], object]) -> None:
        """Compute prompts until both pools are full; `progress` is told which part of that is done."""
        self.cache.warm()
        blocks = min(_FILL_BLOCKS, self.pool_slots // self._groups)
        prompts = -(-self.pool_slots // (blocks * self._groups))
        for done in range(prompts):
            self.compute(self.prompts.new_number(), blocks=blocks)
            progress((done + 1) / prompts)
        self.fill_free_slots()

    def compute(self, number: int, *, blocks: int) -> None:
        """A whole request for prompt `number`: its blocks are in both tiers afterwards."""
        record = granted(self.cache.try_acquire(request_of(self.prompts.keys(number, length=blocks * BLOCK))))
        self.run_until_idle()
        self.cache.confirm(record, blocks * BLOCK)
        self.cache.finish(record)
        self.run_until_idle()

    def arrange(self, number: int, *, blocks: int, layout: Layout) -> None:
        """Have the blocks of prompt `number` where `layout` says.

        What pressure has driven out of a tier is computed again.
        """
        keys = self.prompts.keys(number, length=blocks * BLOCK)
        wanted = _wanted_on_gpu(blocks, layout=layout)
        if not self._present(keys, tier=Tier.CPU).all() or not self._present(keys, tier=Tier.GPU)[:, wanted].all():
            self.compute(number, blocks=blocks)
        for group, present in enumerate(self._present(keys, tier=Tier.GPU)):
            positions = np.flatnonzero(present & ~wanted).tolist()
            self.cache.placement.evict(keys, group=group, positions=positions, tier=Tier.GPU)

    def fill_free_slots(self) -> None:
        """Put blocks that nobody asks for into every free slot of both tiers."""
        for tier, pool in self.cache.pools().items():
            if pool.free:
                keys = self.prompts.keys(self.prompts.new_number(), length=pool.free * BLOCK)
                self.cache.placement.place(keys, group=0, positions=np.arange(pool.free), tier=tier)

    def run_until_idle(self) -> None:
        """Run all slices, and end all copies well, until nothing is left to do."""
        self.cache.run_slices()
        while submissions := self.cache.outbox.take_submissions():
            self.end_copies(submissions)
            self.cache.run_slices()
        self.cache.outbox.take_settled()

    def end_copies(self, transfers: list[Transfer]) -> None:
        """Submit these, and end them well at once."""
        for transfer in transfers:
            self.cache.mark_submitted(transfer)
            self.cache.complete(transfer.transfer_id, Outcome.OK)

    def count_present(self, keys: BlockKeys, *, tier: Tier) -> int:
        """How many blocks are findable in a tier, in all groups together."""
        return int(np.count_nonzero(self._present(keys, tier=tier)))

    def _present(self, keys: BlockKeys, *, tier: Tier) -> BoolArray:
        """Which blocks are findable in a tier, shape `[groups, blocks]`."""
        return np.stack([self.cache.find_blocks(keys, group=g, tier=tier).present for g in range(self._groups)])


def request_of(keys: BlockKeys) -> AcquireRequest:
    """Ask for all of these tokens."""
    return AcquireRequest(request_id="bench", keys=keys, prompt_tokens=keys.num_tokens)


def granted(answer: LeaseRecord | Deferred) -> LeaseRecord:
    """The lease; `RuntimeError` if the request has to wait, which one that is alone with its cache never has to."""
    if isinstance(answer, Deferred):
        raise RuntimeError(f"a benchmark's request was deferred: {answer.reason.value}")
    return answer


def _wanted_on_gpu(blocks: int, *, layout: Layout) -> BoolArray:
    """Which blocks lie on the GPU in a layout."""
    wanted = np.zeros(blocks, np.bool_)
    if layout in _GPU_STEPS:
        wanted[:: _GPU_STEPS[layout]] = True
    return wanted
