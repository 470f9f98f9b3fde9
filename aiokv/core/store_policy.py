"""When GPU blocks are copied to the CPU tier: one strategy object, chosen once.

EAGER      every block as soon as it is confirmed
SELECTIVE  every block that was seen so many times: confirmed, or hit by an admitted request
LAZY       the blocks that the GPU evicts next, ahead of the allocator
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, assert_never, final

import numpy as np

from aiokv.core.lazy_walk import LazyWalk
from aiokv.core.lease_table import LeaseRecord
from aiokv.core.offers import Offer, Offers
from aiokv.core.planner import AcquirePlan
from aiokv.core.sightings import MAX_COUNT, Sightings
from aiokv.core.slices import Job
from aiokv.core.store_queue import StoreQueue
from aiokv.core.world import World
from aiokv.errors import ConfigError
from aiokv.model.ids import BoolArray, DigestArray
from aiokv.model.numbers import is_number, is_whole
from aiokv.model.plan import StorePolicy

__all__ = ["EAGER_STORES", "StoreSettings", "Strategy", "choose_strategy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Which policy, and what it needs to know.

    `lazy_fraction` is the part of the GPU pool that LAZY keeps free or copied ahead of the allocator, more if recent
    requests claimed more; `selective_count` how often SELECTIVE must have seen a block. `ConfigError` for other values.
    """

    policy: StorePolicy = StorePolicy.EAGER
    lazy_fraction: float = 0.125
    selective_count: int = 2

    def __post_init__(self) -> None:
        fraction, count = self.lazy_fraction, self.selective_count
        if not isinstance(self.policy, StorePolicy):
            raise ConfigError(f"store_policy must be a StorePolicy, not {self.policy!r}")
        if not is_number(fraction) or not 0.0 < fraction <= 1.0:
            raise ConfigError(f"lazy_fraction must be a number over 0 and at most 1, not {fraction!r}")
        if not is_whole(count) or not 1 <= count <= MAX_COUNT:
            raise ConfigError(f"selective_count must be a whole number from 1 to {MAX_COUNT}, not {count!r}")


EAGER_STORES: Final = StoreSettings()


class Strategy(Protocol):
    """A store policy at work. Every method may change queues; none raises."""

    @property
    def is_due(self) -> bool:
        """Whether `work` should run, because of something else than an offer. Changes nothing."""
        ...

    def admitted(self, record: LeaseRecord, plan: AcquirePlan) -> None:
        """A request was let in, with these hits and claims."""
        ...

    def offer(self, offer: Offer) -> None:
        """Blocks of a request were confirmed."""
        ...

    def flush(self, record: LeaseRecord) -> Job:
        """A request is about to finish: plan what it has offered."""
        ...

    def work(self) -> Job:
        """What is due, a slice at a time. Nothing is due until that has ended."""
        ...


def choose_strategy(settings: StoreSettings, *, world: World, queue: StoreQueue) -> Strategy:
    """The strategy of a policy."""
    match settings.policy:
        case StorePolicy.EAGER:
            return Offers(world, queue=queue, choice=_Everything())
        case StorePolicy.SELECTIVE:
            blocks = world.gpu.capacity + (world.cpu.capacity if world.cpu is not None else 0)
            choice = _SeenOften(Sightings(blocks), least=settings.selective_count)
            return Offers(world, queue=queue, choice=choice)
        case StorePolicy.LAZY:
            return LazyWalk(world, queue=queue, fraction=settings.lazy_fraction)
        case _:
            assert_never(settings.policy)


@final
class _Everything:
    """EAGER's choice."""

    __slots__ = ()

    def choose(self, digests: DigestArray) -> BoolArray:
        """Every block."""
        return np.ones(len(digests), np.bool_)


@final
class _SeenOften:
    """SELECTIVE's choice."""

    __slots__ = ("_least", "_sightings")

    def __init__(self, sightings: Sightings, *, least: int) -> None:
        self._sightings = sightings
        self._least = least

    def choose(self, digests: DigestArray) -> BoolArray:
        """Blocks that have been offered at least so many times, this one included."""
        return self._sightings.count(digests) >= self._least
