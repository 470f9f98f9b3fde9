"""What admitting a request would take: where its prefix comes from and how many slots it claims. Pure.

Rules: changes nothing; every number that admission checks is computed here, so that `Deferred` costs a plan and nothing
else (law 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from aiokv.core.attribution import find_sources
from aiokv.core.coverage import covered_range
from aiokv.core.inflight import InflightTable
from aiokv.core.lease_table import AcquireRequest
from aiokv.core.lookup import Residency
from aiokv.core.probing import GroupResidency
from aiokv.model.ids import BoolArray, IntArray
from aiokv.model.plan import Hit
from aiokv.model.spec import CacheGeometry, FullAttention, RecurrentState

__all__ = ["STATE_CLAIMS", "AcquirePlan", "GroupPlan", "empty_pool_claims", "most_claims", "plan_acquire"]

STATE_CLAIMS = 2
"""Slots that a recurrent group claims: the working state and the one being captured."""

_NOTHING: Final[IntArray] = np.zeros(0, np.int64)


class GroupPlan(NamedTuple):
    """One group's part of a plan. Positions are absolute block positions, ascending."""

    hit_positions: IntArray
    hit_slots: IntArray
    load_positions: IntArray
    load_sources: IntArray
    join_positions: IntArray
    join_sources: IntArray
    is_loaded: BoolArray
    """Over the blocks of the prefix: comes from the CPU tier, by a load of its own or a joined one."""
    claim_start: int
    """Table positions `[claim_start, claim_stop)` are claimed for compute."""
    claim_stop: int
    state_claims: int
    capacity_tokens: int


class _Loads(NamedTuple):
    """Four fields of a `GroupPlan`: loads of its own, and those that it joins."""

    load_positions: IntArray
    load_sources: IntArray
    join_positions: IntArray
    join_sources: IntArray


_NO_LOADS: Final = _Loads(_NOTHING, _NOTHING, _NOTHING, _NOTHING)


class AcquirePlan(NamedTuple):
    """What admission would do. Valid until a pool changes."""

    length: int
    groups: Sequence[GroupPlan]
    hit: Hit
    switches: int
    claims: int
    """GPU slots claimed in all."""
    hit_slots: IntArray
    """GPU slots to pin, distinct."""

    @property
    def slots(self) -> int:
        """GPU slots that the lease holds once all are named."""
        joined = sum(len(group.join_sources) for group in self.groups) if self.hit.cpu_tokens else 0
        return self.claims + len(self.hit_slots) + joined

    @property
    def load_sources(self) -> IntArray:
        """CPU slots that get a load of their own, distinct."""
        return _concatenated([group.load_sources for group in self.groups])


def plan_acquire(
    geometry: CacheGeometry, request: AcquireRequest, *, residency: Residency, inflight: InflightTable, capacity: int
) -> AcquirePlan:
    """Turn a residency into the plan of an admission.

    A prefix that does not fit into `capacity` GPU slots, beside those that compute claims, is left unused.
    """
    plan = _plan(geometry, request, residency=residency, inflight=inflight)
    if plan.length and plan.slots > capacity:
        nothing = Residency(length=0, groups=residency.groups)
        return _plan(geometry, request, residency=nothing, inflight=inflight)
    return plan


def empty_pool_claims(geometry: CacheGeometry, request: AcquireRequest) -> int:
    """GPU slots that the request would claim with nothing cached."""
    total = 0
    for index, block in enumerate(geometry.block_sizes):
        if isinstance(geometry.groups[index], RecurrentState):
            total += STATE_CLAIMS
        else:
            total -= -_claim_capacity(geometry, request, index=index, length=0) // block  # rounded up
    return total


def most_claims(geometry: CacheGeometry, request: AcquireRequest) -> int:
    """A number that is at least `empty_pool_claims`, without asking each group."""
    whole = request.prompt_tokens + request.reserve_tokens
    return len(geometry.block_sizes) * (whole // min(geometry.block_sizes) + STATE_CLAIMS)


def _plan(
    geometry: CacheGeometry, request: AcquireRequest, *, residency: Residency, inflight: InflightTable
) -> AcquirePlan:
    length, claims = residency.length, 0
    covered: list[range] = []
    groups: list[GroupPlan] = []
    for index, found in enumerate(residency.groups):
        span = covered_range(geometry, index, length)
        group = _plan_group(
            geometry, request, index=index, residency=found, length=length, inflight=inflight, covered=span
        )
        claims += len(group.load_positions) + group.claim_stop - group.claim_start + group.state_claims
        covered.append(span)
        groups.append(group)
    loads = [group.is_loaded for group in groups]
    hit, switches = find_sources(
        geometry, num_tokens=request.prompt_tokens, length=length, loads=loads, covered=covered
    )
    hit_slots = _concatenated([group.hit_slots for group in groups])
    return AcquirePlan(length, groups, hit=hit, switches=switches, claims=claims, hit_slots=hit_slots)


def _plan_group(
    geometry: CacheGeometry,
    request: AcquireRequest,
    *,
    index: int,
    residency: GroupResidency,
    length: int,
    inflight: InflightTable,
    covered: range,
) -> GroupPlan:
    block = geometry.effective_block_size(index)
    on_gpu = residency.on_gpu[covered.start : covered.stop]
    hits = on_gpu.nonzero()[0]
    if covered.start:
        hits += covered.start
    is_loaded = np.zeros(covered.stop, np.bool_)
    if len(hits) == len(on_gpu):
        hit_slots, loads = residency.gpu_slots[covered.start : covered.stop], _NO_LOADS
    else:
        hit_slots = residency.gpu_slots[hits]
        np.logical_not(on_gpu, out=is_loaded[covered.start :])
        loads = _plan_loads(is_loaded.nonzero()[0], residency=residency, inflight=inflight)
    capacity = _claim_capacity(geometry, request, index=index, length=length)
    recurrent = isinstance(geometry.groups[index], RecurrentState)
    return GroupPlan(
        hits,
        hit_slots,
        *loads,
        is_loaded,
        claim_start=covered.stop,
        claim_stop=covered.stop if recurrent else max(-(-capacity // block), covered.stop),
        state_claims=STATE_CLAIMS if recurrent else 0,
        capacity_tokens=capacity,
    )


def _plan_loads(positions: IntArray, *, residency: GroupResidency, inflight: InflightTable) -> _Loads:
    """How what lies at `positions` comes from the CPU tier."""
    sources = residency.cpu_slots[positions]
    loading = inflight.loading_ids(sources)
    if not np.count_nonzero(loading):
        return _Loads(positions, sources, _NOTHING, _NOTHING)
    is_joined = loading != 0
    own = ~is_joined
    return _Loads(positions[own], sources[own], positions[is_joined], sources[is_joined])


def _claim_capacity(geometry: CacheGeometry, request: AcquireRequest, *, index: int, length: int) -> int:
    """Tokens that group `index` has room for after admission with a prefix of `length` tokens."""
    whole = request.prompt_tokens + request.reserve_tokens
    if request.first_chunk is None or isinstance(geometry.groups[index], FullAttention | RecurrentState):
        return whole
    return min(whole, length + request.first_chunk)


def _concatenated(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
