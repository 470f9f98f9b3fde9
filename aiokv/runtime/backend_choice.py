"""Which backend a configuration means, how large the CPU pool becomes, and whether it fits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from aiokv.backends.arena import Layout
from aiokv.backends.base import Backend
from aiokv.backends.cuda import CudaBackend
from aiokv.backends.host import HostBackend
from aiokv.backends.host_memory import read_host_memory
from aiokv.backends.memory_plan import Demand, plan_memory
from aiokv.backends.remote import RemoteBackend
from aiokv.core.cache import CacheState
from aiokv.errors import ConfigError
from aiokv.model.ids import Tier
from aiokv.model.plan import StorePolicy
from aiokv.observe.readers import RuntimeFacts
from aiokv.runtime.config import RuntimeConfig
from aiokv.runtime.offload import Offloader

__all__ = ["build_core", "choose_backend", "describe_runtime", "plan_layout"]

_log = logging.getLogger(__name__)


def choose_backend(config: RuntimeConfig, *, device: str) -> Backend:
    """The backend object, for tensors on `device`. Memory of a CUDA device is copied by no other backend than CUDA's,
    which says itself what it misses: so "auto" tries no driver.
    """
    if not config.has_local_ranks:
        return RemoteBackend()
    if not isinstance(config.backend, str):
        return config.backend
    is_on_device = device.partition(":")[0] == "cuda"
    if config.backend == "auto":
        found = "on a CUDA device: copies by its driver" if is_on_device else "in host memory: copies in RAM"
        _log.info("backend auto: the tensors are %s", found)
    return CudaBackend() if config.backend == "cuda" or (config.backend == "auto" and is_on_device) else HostBackend()


def plan_layout(config: RuntimeConfig, arenas: Mapping[str, Sequence[object]]) -> Layout:
    """Check the engine's tensors and size the CPU pool; `ConfigError` names what does not fit."""
    cpu_blocks = config.cpu_blocks or 0
    if config.cpu_size_bytes is not None:
        empty = _layout(config, arenas, cpu_blocks=0)
        if not empty.cpu_block_bytes:
            raise ConfigError("cpu_bytes needs the engine's tensors: without arenas give cpu_blocks")
        cpu_blocks = config.cpu_size_bytes // empty.cpu_block_bytes
        if config.cpu_size_bytes and not cpu_blocks:
            given, needed = config.cpu_size_bytes, empty.cpu_block_bytes
            raise ConfigError(f"cpu_bytes of {given} bytes is less than one block of {needed} bytes")
    _warn_if_small(config, cpu_blocks=cpu_blocks)
    return _layout(config, arenas, cpu_blocks=cpu_blocks)


def build_core(config: RuntimeConfig, *, layout: Layout) -> CacheState:
    """The core of these pools, its indexes touched: takes seconds for ten million slots, so call it in a worker thread.

    Before that, `ConfigError` names the limit if they and the CPU arena do not fit into memory.
    """
    plan_memory(Demand.of(layout), read_host_memory()).require_fit()
    core = CacheState(
        config.geometry,
        gpu_blocks=config.gpu_blocks,
        cpu_blocks=layout.cpu_blocks,
        watermark=config.watermark,
        stores=config.stores,
        world_size=config.world_size,
        hint_quota=config.hint_quota,
    )
    core.warm()
    return core


def describe_runtime(offloader: Offloader, layout: Layout) -> RuntimeFacts:
    """What the metrics and the live state say of a runtime beside its counts."""
    from aiokv import __version__  # not known yet while the package is being imported

    slot_bytes = {Tier.GPU: layout.gpu_block_bytes, Tier.CPU: layout.cpu_block_bytes}
    return RuntimeFacts(
        version=__version__,
        backend=offloader.backend.name,
        slot_bytes=slot_bytes,
        read_pinning=lambda: offloader.backend.pinning.status,
        read_accepting=lambda: offloader.is_accepting,
        read_waiting=lambda: len(offloader.queue),
        bridge=offloader.backend.wake_mode.value,
        read_event_queue=offloader.publisher.longest_backlog,
    )


def _warn_if_small(config: RuntimeConfig, *, cpu_blocks: int) -> None:
    usable = config.gpu_blocks - 1
    if config.store_policy is StorePolicy.EAGER and 0 < cpu_blocks <= usable:
        _log.warning(
            "the CPU pool of %d blocks is not larger than the GPU pool of %d: eager stores cannot help, "
            "it holds copies of what the GPU still has; enlarge it or use StorePolicy.LAZY",
            cpu_blocks,
            usable,
        )


def _layout(config: RuntimeConfig, arenas: Mapping[str, Sequence[object]], *, cpu_blocks: int) -> Layout:
    return Layout(
        geometry=config.geometry,
        gpu_blocks=config.gpu_blocks,
        cpu_blocks=cpu_blocks,
        arenas=arenas,
        checksum=config.checksum,
    )
