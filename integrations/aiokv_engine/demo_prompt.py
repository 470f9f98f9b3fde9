"""One long prompt, answered again and again while its blocks are moved between the tiers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, final

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from aiokv import Tier, UsageError
from aiokv.testing import evict
from aiokv_engine.demo_report import COLD, CPU_HIT, GPU_HIT, INTERLEAVED, Run
from aiokv_engine.llama import CHUNK
from aiokv_engine.scheduler import GROUP, Answer, Ready, Request
from aiokv_engine.selfcheck import POISON, Comparison
from aiokv_engine.serving import Serving

__all__ = ["LongPrompt", "Moment", "Reference", "answer_from_every_tier", "ignore_moment"]

_STRIPE: Final = 8  # blocks kept, then as many evicted, for the interleaved run


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A run just before computing: all blocks of its prefix are on the GPU tier."""

    run: str
    serving: Serving
    ready: Ready


def ignore_moment(_: Moment) -> None:
    """Observes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The answer computed without a cache, and how others are compared with it."""

    answer: Answer
    comparison: Comparison


async def answer_from_every_tier(prompt: "LongPrompt", *, step: Callable[[str], None]) -> tuple[Run, ...]:
    """Answers the prompt four times, its blocks moved in between; calls `step` with what begins."""
    step("cold: nothing cached")
    cold = await prompt.run(COLD)
    step("GPU hit")
    gpu_hit = await prompt.run(GPU_HIT)
    step("CPU hit")
    await prompt.evict(range(prompt.published_blocks))
    await prompt.overwrite_gpu()
    cpu_hit = await prompt.run(CPU_HIT)
    step("interleaved tiers")
    await prompt.evict(block for block in range(prompt.published_blocks) if block // _STRIPE % 2)
    return cold, gpu_hit, cpu_hit, await prompt.run(INTERLEAVED)


@final
class LongPrompt:
    """Answers one prompt, compares the answers, and moves its blocks out of the GPU tier.

    It must be the only prompt that `serving` has ever seen: the whole GPU arena is overwritten between runs.
    """

    __slots__ = ("_meter", "_observe", "_reference", "_request", "_serving", "_table")

    def __init__(
        self,
        serving: Serving,
        *,
        request: Request,
        reference: Reference,
        observe: Callable[[Moment], None] = ignore_moment,
    ) -> None:
        self._serving = serving
        self._request = request
        self._reference = reference
        self._observe = observe
        self._meter = _Meter(serving)
        self._table: tuple[int, ...] = ()

    @property
    def published_blocks(self) -> int:
        """How many of the prompt's blocks the engine makes findable: those of complete chunks."""
        block_size = self._serving.kv.config.geometry.hash_block_size
        return len(self._request.token_ids) // CHUNK * CHUNK // block_size

    async def run(self, name: str) -> Run:
        """Answers the prompt once; returns where its tokens came from, how long it took and whether it is right."""
        bytes_before, switches_before = self._meter.load_bytes(), self._meter.source_switches()

        def note(ready: Ready) -> None:
            self._table = ready.lease.block_table(GROUP)
            self._observe(Moment(run=name, serving=self._serving, ready=ready))

        answer = await self._serving.engine.generate(replace(self._request, on_ready=note))
        await self._serving.kv.drain()
        expected = self._reference.answer
        return Run(
            name=name,
            prompt_tokens=answer.hit.prompt_tokens,
            gpu_tokens=answer.hit.gpu_tokens,
            cpu_tokens=answer.hit.cpu_tokens,
            compute_tokens=answer.hit.compute_tokens,
            ttft_s=answer.first_token_s,
            load_bytes=self._meter.load_bytes() - bytes_before,
            load_s=answer.load_s,
            source_switches=self._meter.source_switches() - switches_before,
            tokens_equal=answer.token_ids == expected.token_ids,
            logits_equal=self._reference.comparison.are_equal(_logits(answer), _logits(expected)),
        )

    async def evict(self, blocks: Iterable[int]) -> None:
        """Evicts these blocks of the prompt, by position, from the GPU tier and overwrites the memory they were in."""
        positions = list(blocks)
        evict(self._serving.kv, self._request.token_ids, {GROUP: positions}, tier=Tier.GPU)
        await self._overwrite([self._table[position] for position in positions])

    async def overwrite_gpu(self) -> None:
        """Overwrites all memory of the GPU tier save the null block, once nothing in it can be found any more."""
        await self._overwrite(range(1, self._serving.kv.config.gpu_blocks))

    async def _overwrite(self, slots: Sequence[int]) -> None:
        await self._serving.engine.run(partial(_poison, self._serving.arenas, slots=torch.tensor(slots)))


@final
class _Meter:
    """Reads what the runtime counts, through its Prometheus collector."""

    __slots__ = ("_registry",)

    def __init__(self, serving: Serving) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(serving.kv.collector)

    def load_bytes(self) -> int:
        """Returns the bytes copied from the CPU tier to the GPU tier so far."""
        return self._read("aiokv_transfer_bytes_total", labels={"direction": "load"})

    def source_switches(self) -> int:
        """Returns the changes from one tier to the other along all matched prefixes so far."""
        return self._read("aiokv_interleaved_runs_sum", labels={})

    def _read(self, name: str, *, labels: dict[str, str]) -> int:
        value = self._registry.get_sample_value(name, labels)
        if value is None:
            raise UsageError(f"the runtime does not export {name}")
        return int(value)


def _poison(arenas: Sequence[Tensor], *, slots: Tensor) -> None:
    for arena in arenas:
        arena[:, slots] = POISON


def _logits(answer: Answer) -> Tensor:
    return torch.stack([token.logits for token in answer.tokens])
