"""The public API: names may come, parameters may come, none may go."""

from __future__ import annotations

import collections.abc
import inspect
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import prometheus_client
import pytest

import aiokv
import aiokv.testing
from aiokv import (
    AcquireTimeout,
    AiokvError,
    BlockKeys,
    CacheGeometry,
    CapacityError,
    ChunkedLocal,
    ConfigError,
    Deferred,
    FullAttention,
    Hit,
    KVRuntime,
    Lease,
    LeaseState,
    MediaSpan,
    Preempted,
    RecurrentState,
    ResidenceHint,
    RuntimeConfig,
    SlidingWindow,
    StorePolicy,
    Tier,
    TransferError,
    UsageError,
)
from aiokv.testing import FakeBackend, evict, exhaustive_hit, make_resident

ROOT = Path(__file__).resolve().parent.parent

NAMES = """
AcquireTimeout AiokvError BackendLost BlockKeys BlockRemoved BlockStored CacheGeometry CapacityError Checksum
ChunkedLocal ConfigError CopyBatch CopyFailed DeclineReason Declined DeferReason Deferred Direction EventsDropped
ForeignBlock FullAttention GroupSpec HintState Hit InvalidTransition KVRuntime Lease LeaseReleased LeaseState MediaSpan
Outcome PinState PinStatus Preempted RankTransfer RecurrentState ResidenceHint RuntimeConfig SlidingWindow StorePolicy
StreamCaptured Tier TierCleared TransferError UsageError run
"""
TESTING_NAMES = """
BrokenInvariant Device Driver FakeBackend FakeCopy FaultyBackend FencedBackend InjectedFaults Row RuntimeDriver
Scheduler Setup Witness evict exhaustive_hit exhaustive_sources make_resident run_cache_machine run_scheduler_machine
"""

IDENTITY = ("salt", "adapter", "media")
REQUEST = ("request_id", "token_ids", *IDENTITY, "reserve_tokens", "first_chunk", "align", "priority")
PARAMETERS: dict[Callable[..., object], tuple[str, ...]] = {
    KVRuntime: ("config", "arenas"),
    KVRuntime.open: (),
    KVRuntime.aclose: (),
    KVRuntime.close: (),
    KVRuntime.ready: (),
    KVRuntime.acquire: (*REQUEST, "timeout"),
    KVRuntime.admit: (*REQUEST, "timeout"),
    KVRuntime.try_acquire: REQUEST,
    KVRuntime.keys: ("token_ids", *IDENTITY),
    KVRuntime.prepare_keys: ("token_ids", *IDENTITY),
    KVRuntime.keep: ("token_ids", "tenant", "tier", "align", *IDENTITY),
    KVRuntime.revoke_hints: ("tenant",),
    KVRuntime.fence: ("stream",),
    KVRuntime.reset: ("tier",),
    KVRuntime.drain: (),
    KVRuntime.quiesce: (),
    KVRuntime.snapshot: (),
    KVRuntime.audit: (),
    KVRuntime.audit_sliced: (),
    KVRuntime.events: (),
    KVRuntime.transfers: (),
    KVRuntime.report: ("transfer_id", "rank", "outcome", "corrupt"),
    KVRuntime.lose_rank: ("rank",),
    Lease.block_table: ("group",),
    Lease.block_ids: ("group", "start"),
    Lease.append: ("token_ids",),
    Lease.extend: ("tokens",),
    Lease.try_extend: ("tokens",),
    Lease.confirm: ("num_tokens", "after", "publish_to", "states"),
    Lease.truncate: ("num_tokens", "after"),
    Lease.preempt: ("after",),
    Lease.try_fork: ("request_id", "at"),
    Preempted.try_resume: (),
    Preempted.resume: ("timeout",),
    Preempted.close: (),
    Lease.wait_on: ("stream",),
    Lease.ready: (),
    Lease.add_done_callback: ("callback",),
    Lease.finish: ("after",),
    Lease.release: ("after",),
    ResidenceHint.update: ("token_ids", "media"),
    ResidenceHint.refresh: (),
    ResidenceHint.revoke: (),
    ResidenceHint.release: (),
    CacheGeometry: ("groups", "hash_block_size"),
    FullAttention: ("name", "block_size", "lookahead", "sharded"),
    SlidingWindow: ("name", "block_size", "window", "lookahead", "sharded"),
    ChunkedLocal: ("name", "block_size", "chunk"),
    RecurrentState: ("name", "block_size"),
    RuntimeConfig: (
        "geometry",
        "gpu_blocks",
        "cpu_blocks",
        "cpu_bytes",
        "store_policy",
        "watermark",
        "checksum",
        "backend",
        "world_size",
        "remote_ranks",
        "hint_quota",
        "compute_stream",
    ),
    MediaSpan: ("digest", "start", "length"),
    Hit: ("prompt_tokens", "gpu_tokens", "cpu_tokens", "compute_tokens"),
    aiokv.run: ("main",),
    FakeBackend: ("manual",),
    FakeBackend.complete: ("n",),
    FakeBackend.complete_all: (),
    FakeBackend.fail: ("n",),
    FakeBackend.corrupt: ("n", "copies"),
    make_resident: ("kv", "token_ids", "layout", "salt"),
    evict: ("kv", "token_ids", "blocks", "tier"),
    exhaustive_hit: ("geometry", "num_tokens", "layout", "align"),
}
PROPERTIES: dict[type, tuple[str, ...]] = {
    KVRuntime: ("capacity_generation",),
    Lease: ("hit", "delivered", "prefix_tokens", "state"),
    FakeBackend: ("pending",),
}


def parameters_of(function: Callable[..., object]) -> set[str]:
    """Names that a caller may use; options that come as a typed dictionary are among them."""
    signature = inspect.signature(function)
    names = set(signature.parameters)
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            hint = typing.get_type_hints(function)[parameter.name]
            names |= set(typing.get_type_hints(typing.get_args(hint)[0]))
    return names


def test_everything_public_is_listed_and_nothing_else_is() -> None:
    assert sorted(aiokv.__all__) == sorted(NAMES.split())
    assert sorted(aiokv.testing.__all__) == sorted(TESTING_NAMES.split())
    for module in (aiokv, aiokv.testing):
        assert all(hasattr(module, name) for name in module.__all__)


def test_every_public_class_and_function_is_documented() -> None:
    undocumented = [name for name in aiokv.__all__ if not inspect.getdoc(getattr(aiokv, name))]
    assert not undocumented


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda function: function.__qualname__)
def test_no_parameter_is_lost(function: Callable[..., object]) -> None:
    assert set(PARAMETERS[function]) <= parameters_of(function)


@pytest.mark.parametrize(("owner", "names"), PROPERTIES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_no_property_is_lost(owner: type, names: tuple[str, ...]) -> None:
    assert all(isinstance(inspect.getattr_static(owner, name), property) for name in names)


def test_errors_form_one_tree() -> None:
    assert issubclass(AcquireTimeout, TimeoutError)
    for error in (UsageError, CapacityError, AcquireTimeout, TransferError, ConfigError):
        assert issubclass(error, AiokvError)
    assert issubclass(aiokv.LeaseReleased, UsageError)
    assert issubclass(aiokv.InvalidTransition, UsageError)
    assert issubclass(aiokv.ForeignBlock, UsageError)
    assert issubclass(aiokv.StreamCaptured, UsageError)
    assert issubclass(aiokv.CopyFailed, TransferError)
    assert issubclass(aiokv.BackendLost, TransferError)


def test_the_synchronous_core_is_importable() -> None:
    code = "from aiokv.core import CacheState; print(CacheState.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "aiokv.core.cache"


async def test_the_embedding_example_of_the_contract_runs() -> None:
    token_ids = list(range(200))
    geometry = CacheGeometry(
        groups=(FullAttention("full", block_size=16), SlidingWindow("swa", block_size=16, window=512)),
        hash_block_size=16,
    )
    config = RuntimeConfig(
        geometry=geometry,
        gpu_blocks=1024,
        cpu_blocks=8192,
        store_policy=StorePolicy.EAGER,
        watermark=0.01,
        backend=FakeBackend(manual=False),
    )
    async with KVRuntime(config, arenas={}) as kv:
        stream = object()
        async with kv.acquire(
            "req-1",
            token_ids,
            salt="tenant-a",
            adapter=None,
            media=(),
            reserve_tokens=64,
            first_chunk=None,
            align=64,
            priority=0,
            timeout=5.0,
        ) as lease:
            hit = lease.hit
            assert hit.gpu_tokens + hit.cpu_tokens + hit.compute_tokens == hit.prompt_tokens == 200
            assert lease.prefix_tokens == 0
            assert len(lease.block_table("full")) == 17
            assert lease.block_ids("full", start=3).tolist() == list(lease.block_table("full")[3:])
            lease.append([7, 8, 9])
            await lease.extend(32)
            assert not isinstance(lease.try_extend(16), Deferred)
            lease.confirm(203, after=kv.fence(stream), publish_to=None, states=())
            lease.wait_on(stream)
        lease = await kv.admit("req-2", token_ids, salt="tenant-a", align=64)
        await lease.ready()
        assert lease.delivered.gpu_tokens == lease.prefix_tokens == 192
        lease.finish()
        lease.release(after=kv.fence(stream))
        polled = kv.try_acquire("req-3", kv.keys(token_ids, salt="tenant-b"))
        assert isinstance(polled, Lease)
        polled.add_done_callback(lambda lease: None)
        assert polled.state in LeaseState
        polled.release()
        assert isinstance(kv.capacity_generation, int)
        assert isinstance(await kv.prepare_keys(token_ids, salt=None, adapter=None, media=()), BlockKeys)
        await kv.ready()
        await kv.drain()
        await kv.reset(Tier.CPU)
        async with kv.quiesce():
            pass
        assert kv.snapshot() == kv.snapshot()
        for audit in (kv.audit(), await kv.audit_sliced()):
            assert (audit.leases, audit.pins, audit.reservations, audit.violations) == ((), (), (), ())
        registry = prometheus_client.CollectorRegistry()
        registry.register(kv.collector)
        assert b"aiokv_prompt_tokens_total" in prometheus_client.generate_latest(registry)


async def test_the_testing_example_of_the_contract_runs() -> None:
    token_ids = list(range(81))
    geometry = CacheGeometry(
        groups=(FullAttention("full", block_size=16), SlidingWindow("swa", block_size=16, window=32)),
        hash_block_size=16,
    )
    backend = FakeBackend(manual=True)
    config = RuntimeConfig(geometry=geometry, gpu_blocks=64, cpu_blocks=64, backend=backend)
    async with KVRuntime(config) as kv:
        layout = {"full": "gcgcb", "swa": "--cg-"}
        make_resident(kv, token_ids, layout, salt=None)
        lease = await kv.admit("req-1", token_ids)
        assert lease.prefix_tokens == exhaustive_hit(geometry, 81, layout, align=1) == 64
        await kv.ready()
        assert [(copy.direction, copy.group, len(copy)) for copy in backend.pending] == [
            ("load", "full", 2),
            ("load", "swa", 1),
        ]
        for copy in backend.pending:
            assert len(copy.source_blocks) == len(copy.target_blocks)
        backend.complete(n=1)
        backend.fail(n=1)
        await lease.ready()
        lease.release()
        backend.complete_all()
        await kv.drain()
        evict(kv, token_ids, {"full": (0, 2)}, tier=Tier.GPU)


def test_what_acquire_returns_is_a_coroutine_and_a_context_manager() -> None:
    kv = KVRuntime(
        RuntimeConfig(
            geometry=CacheGeometry(groups=(FullAttention("full", block_size=16),), hash_block_size=16),
            gpu_blocks=9,
            backend=FakeBackend(),
        )
    )
    call = kv.acquire("req-1", [1, 2, 3])
    assert isinstance(call, collections.abc.Coroutine)
    assert hasattr(call, "__aenter__")
    assert hasattr(call, "__aexit__")
    call.close()
