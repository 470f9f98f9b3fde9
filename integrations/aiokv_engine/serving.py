"""An engine with its runtime and its memory, opened and closed together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from aiokv import CacheGeometry, FullAttention, KVRuntime, RuntimeConfig
from aiokv.runtime.config_file import Settings
from aiokv_engine.llama import LlamaModel
from aiokv_engine.paged_attention import make_arenas
from aiokv_engine.scheduler import GROUP, Engine

__all__ = ["Serving", "Sizes", "open_serving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the two pools in blocks, the null block included; the CPU tier's may be in bytes instead.

    With neither `cpu_blocks` nor `cpu_bytes` there is no CPU tier. `block_size` is in tokens.
    """

    gpu_blocks: int
    cpu_blocks: int | None = None
    cpu_bytes: int | None = None
    block_size: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An open engine, the runtime it leases blocks from, and the tensors of the GPU tier, one per layer."""

    engine: Engine
    kv: KVRuntime
    arenas: list[Tensor]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return sum(arena[:, 0].nbytes for arena in self.arenas)


@asynccontextmanager
async def open_serving(
    model: LlamaModel, *, sizes: Sizes, torch_threads: int = 1, settings: Settings | None = None
) -> AsyncIterator[Serving]:
    """Opens an engine for `model` on this machine's CPU: both tiers lie in its memory.

    Of `settings` everything is used but sizes and backend.
    """
    settings = settings or Settings()
    config = model.config
    shape = (sizes.gpu_blocks, sizes.block_size, config.num_kv_heads, config.head_dim)
    arenas = make_arenas(shape, layers=config.num_layers, dtype=model.dtype)
    group = FullAttention(GROUP, block_size=sizes.block_size)
    runtime_config = RuntimeConfig(
        geometry=CacheGeometry(groups=(group,), hash_block_size=sizes.block_size),
        gpu_blocks=sizes.gpu_blocks,
        cpu_blocks=sizes.cpu_blocks,
        cpu_bytes=sizes.cpu_bytes,
        store_policy=settings.store_policy,
        watermark=settings.watermark,
        checksum=settings.checksum,
        lease_age_limit_s=settings.lease_age_limit_s,
        hint_quota=settings.hint_quota,
        backend="host",
    )
    async with (
        KVRuntime(runtime_config, arenas={GROUP: arenas}) as kv,
        Engine(model, kv=kv, arenas=arenas, torch_threads=torch_threads) as engine,
    ):
        yield Serving(engine=engine, kv=kv, arenas=arenas)
