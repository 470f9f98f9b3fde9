"""What the tests of the runtime share: a small runtime over a fake backend, prompts, turns of the loop, the books."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, Unpack

from aiokv import BlockKeys, CacheGeometry, FullAttention, KVRuntime, Lease, RuntimeConfig, SlidingWindow, StorePolicy
from aiokv.backends.base import Backend
from aiokv.core.audit import Snapshot
from aiokv.runtime.acquire import RequestOptions
from aiokv.testing import FakeBackend

BLOCK = 16
GROUP = "full"
GEOMETRY = CacheGeometry(groups=(FullAttention(GROUP, block_size=BLOCK),), hash_block_size=BLOCK)
HYBRID = CacheGeometry(
    groups=(FullAttention(GROUP, block_size=BLOCK), SlidingWindow("swa", block_size=BLOCK, window=2 * BLOCK)),
    hash_block_size=BLOCK,
)
PATIENCE_TURNS = 20_000
"""After so many turns of the loop a test gives up; never how many something is expected to take."""


def _compute_nothing(lease: Lease) -> None:
    """There is no memory to write to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugged:
    """What a runtime copies with: the fake backend itself, or a device of which that decides when copies end."""

    backend: Backend
    arenas: Mapping[str, Sequence[object]] = field(default_factory=dict)
    compute_stream: object = None
    compute: Callable[[Lease], None] = _compute_nothing
    """Stands for a forward: reads what is confirmed, writes the KV of the other tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An open runtime and its fake backend."""

    kv: KVRuntime
    backend: FakeBackend
    compute: Callable[[Lease], None] = _compute_nothing


class Plug(Protocol):
    """Puts something else behind a fake backend."""

    def __call__(self, fake: FakeBackend, *, geometry: CacheGeometry, gpu_blocks: int) -> Plugged: ...


_plugs: list[Plug] = []


@contextmanager
def plugged_into(plug: Plug) -> Iterator[None]:
    """Meanwhile runtimes are opened over what `plug` puts behind the fake backend."""
    _plugs.append(plug)
    try:
        yield
    finally:
        _plugs.pop()


def plug_in(backend: FakeBackend, *, geometry: CacheGeometry = GEOMETRY, gpu_blocks: int = 9) -> Plugged:
    """The backend that was meant, or what is plugged in behind it."""
    return _plugs[-1](backend, geometry=geometry, gpu_blocks=gpu_blocks) if _plugs else Plugged(backend=backend)


@asynccontextmanager
async def opened(
    *,
    gpu_blocks: int = 9,
    cpu_blocks: int = 16,
    manual: bool = True,
    watermark: float = 0.0,
    geometry: CacheGeometry = GEOMETRY,
    close_grace_s: float = 30.0,
    store_policy: StorePolicy = StorePolicy.EAGER,
    lease_age_limit_s: float | None = None,
    hint_quota: float = 0.1,
) -> AsyncIterator[Case]:
    """A runtime with `gpu_blocks - 1` usable GPU slots, closed afterwards; what still runs then is completed first."""
    backend = FakeBackend(manual=manual)
    plugged = plug_in(backend, geometry=geometry, gpu_blocks=gpu_blocks)
    config = RuntimeConfig(
        geometry=geometry,
        gpu_blocks=gpu_blocks,
        cpu_blocks=cpu_blocks,
        watermark=watermark,
        backend=plugged.backend,
        compute_stream=plugged.compute_stream,
        close_grace_s=close_grace_s,
        store_policy=store_policy,
        lease_age_limit_s=lease_age_limit_s,
        hint_quota=hint_quota,
    )
    async with KVRuntime(config, arenas=plugged.arenas) as kv:
        case = Case(kv=kv, backend=backend, compute=plugged.compute)
        try:
            yield case
        finally:
            await complete_copies_until(case, asyncio.ensure_future(kv.aclose()))


def config_of(*, hash_block_size: int = BLOCK, **settings: Any) -> RuntimeConfig:  # noqa: ANN401  # bad ones too
    """Nine GPU blocks, four CPU blocks and a fake backend, unless told otherwise."""
    geometry = CacheGeometry(groups=GEOMETRY.groups, hash_block_size=hash_block_size)
    defaults: dict[str, Any] = {"geometry": geometry, "gpu_blocks": 9, "cpu_blocks": 4, "backend": FakeBackend()}
    return RuntimeConfig(**defaults | settings)


def prompt(blocks: int, *, seed: int = 0, extra: int = 1) -> list[int]:
    """Tokens of `blocks` full blocks and `extra` more; prompts of different seeds have no token in common."""
    first = (seed + 1) * 1_000_000
    return list(range(first, first + blocks * BLOCK + extra))


def granted(
    kv: KVRuntime, token_ids: list[int] | BlockKeys, *, name: str = "request", **options: Unpack[RequestOptions]
) -> Lease:
    """A lease, admitted at once."""
    lease = kv.try_acquire(name, token_ids, **options)
    assert isinstance(lease, Lease)
    return lease


async def turns(count: int = 1) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    for _ in range(PATIENCE_TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("gave up waiting")


async def finish_copies(case: Case) -> None:
    """Complete whatever is submitted until nothing is queued, sliced or running."""
    await complete_copies_until(case, asyncio.ensure_future(case.kv.drain()))


async def complete_copies_until(case: Case, ended: asyncio.Future[None]) -> None:
    """Complete whatever is submitted, turn by turn, until `ended` is done."""
    while not ended.done():
        case.backend.complete_all()
        await asyncio.sleep(0)
    await ended


@cache
def whole_pool(blocks: int) -> BlockKeys:
    """A prompt of so many blocks, hashed already."""
    keys = BlockKeys(prompt(blocks, seed=400, extra=0), hash_block_size=BLOCK, salt="the whole pool")
    keys.hash_more(keys.num_blocks)
    return keys


async def assert_all_given_back(case: Case) -> None:
    """Invariant 12: no pins, nothing reserved, and one request can have the whole pool."""
    await finish_copies(case)
    assert_nothing_held(case.kv)
    config = case.kv.config
    whole = whole_pool((config.gpu_blocks - 1) // len(config.geometry.groups))
    async with case.kv.acquire("the whole pool", whole, timeout=10.0) as lease:
        assert lease.capacity_tokens == whole.num_tokens
    await finish_copies(case)
    assert_nothing_held(case.kv)


def assert_nothing_held(kv: KVRuntime) -> None:
    """The audit is empty, and so are the tables behind it."""
    audit = kv.audit()
    assert (audit.leases, audit.pins, audit.reservations, audit.violations) == ((), (), (), ())
    state = kv.snapshot()
    assert state.transfers == ()
    assert state.gpu.reserved == state.gpu.claimed == 0


def is_shut(backend: FakeBackend) -> bool:
    """Closed, or never opened."""
    return backend.closed or backend.layout is None


def state_of(kv: KVRuntime) -> Snapshot:
    """The snapshot, once the audit agrees with it."""
    assert kv.audit().violations == ()
    return kv.snapshot()
