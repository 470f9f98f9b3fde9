"""vLLM's side of `aiokv bench compare`: the same operations on vLLM's own classes, run by the peer's interpreter.

Imports nothing of aiokv. Asked in JSON lines on stdin, it answers each with one JSON line on stdout:
`{"open": CASE}` builds the world of a case, `{"rounds": n}` answers the nanoseconds of n rounds, the end of stdin ends
it. Whatever else is printed goes to stderr. A round is that of a batch of requests, which go through the operation one
right after the other; one request's share is answered. A short request that is not timed leads in.

What is timed is vLLM's production path with nothing added: KVCacheManager with its coordinator and BlockPool, and the
scheduler's half of SimpleCPUOffloadConnector (eager stores, no events). The few values of the engine's configuration
that the latter reads are given as they are by default. Each round has new requests, and so new hash objects.
"""

# ruff: noqa: ANN401, E402  # vLLM's types are not known where this is checked; it prints while it is imported

import gc
import itertools
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

_ANSWERS: Final = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import numpy as np
import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

BLOCK: Final = 16
WINDOW: Final = 1024
VOCABULARY: Final = 100_000
FILLER_BLOCKS: Final = 4096
MOST_PROMPTS: Final = 64
LEAD_IN_BLOCKS: Final = 64

Case = dict[str, Any]
Hasher = Callable[[Any], list[bytes]]
Step = Callable[[list[Any]], object]

HASHER: Final[Hasher] = get_request_block_hasher(BLOCK, sha256)  # vLLM's default algorithm


def kv_cache_config(case: Case) -> Any:
    """One layer per group; all groups share the pool."""
    shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float16}
    specs = [FullAttentionSpec(**shape)]
    if case["model"] == "hybrid":
        specs.append(SlidingWindowSpec(**shape, sliding_window=WINDOW))
    page, blocks = specs[0].page_size_bytes, case["pool_slots"] + 1  # the null block is none of the slots
    layers = [f"layer{number}" for number in range(len(specs))]
    size = page * blocks
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[KVCacheTensor(size=size, layers=layers[:1], layer_stride=size, block_stride=page)],
        kv_cache_groups=[KVCacheGroupSpec([layer], spec) for layer, spec in zip(layers, specs, strict=True)],
    )


def engine_config(max_model_len: int) -> SimpleNamespace:
    """What SimpleCPUOffloadScheduler reads of VllmConfig: one rank, no speculation, no events."""
    return SimpleNamespace(
        kv_events_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
        model_config=SimpleNamespace(max_model_len=max_model_len),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_model_len),
        max_in_flight_tokens=max_model_len,
        num_prefill_lookahead_tokens=0,
    )


@dataclass(frozen=True)
class Round:
    """Requests that go through an operation: one that leads in, and those that are timed."""

    lead_in: list[Any]
    measured: list[Any]

    @property
    def everyone(self) -> list[Any]:
        """All of them."""
        return self.lead_in + self.measured

    def timed(self, *steps: Step) -> int:
        """The lead-in takes all steps, then the others do; nanoseconds of one of these."""
        timed(self.lead_in, *steps)
        return timed(self.measured, *steps)


class World:
    """Both pools, full: whatever is allocated evicts."""

    def __init__(self, case: Case) -> None:
        self.blocks = int(case["blocks"])
        self.requests = int(case["requests"])
        self.lead_in_blocks = min(self.blocks, LEAD_IN_BLOCKS)
        self.hits: dict[str, int] = {}
        self.stored_blocks = 0
        self._slots = int(case["pool_slots"])
        self._groups = 2 if case["model"] == "hybrid" else 1
        self._numbers = itertools.count()
        self._random = np.random.default_rng(0)
        config = kv_cache_config(case)
        longest = max(self.blocks, FILLER_BLOCKS) * BLOCK + BLOCK
        self.manager = KVCacheManager(config, longest, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
        self.offload = SimpleCPUOffloadScheduler(
            engine_config(longest), config, config.kv_cache_tensors[0].size, BLOCK, BLOCK
        )
        self.offload.bind_gpu_block_pool(self.manager.block_pool)
        filler_blocks = max(1, min(FILLER_BLOCKS, self._slots // 4))
        self._fillers = [self.request(self.tokens(filler_blocks)) for _ in range(self._slots // filler_blocks + 2)]
        for request in self._fillers:
            self.admit(request)
            self.plan_stores([request])([request])
            self.leave(request)

    def tokens(self, blocks: int) -> list[int]:
        """So many whole blocks, and one token more, which is always computed."""
        drawn: list[int] = self._random.integers(VOCABULARY, size=blocks * BLOCK + 1).tolist()
        return drawn

    def request(self, tokens: list[int], hasher: Hasher | None = HASHER) -> Any:
        """A new request, hashed."""
        sampling = SamplingParams(max_tokens=1)
        return Request(f"request-{next(self._numbers)}", list(tokens), sampling, None, block_hasher=hasher)

    def admit(self, request: Any) -> None:
        """Local lookup, then slots for the whole prompt; new blocks can be found from now on."""
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        self._check_room(self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks))
        self.hits[request.request_id] = hit

    def reserve(self, request: Any) -> None:
        """The same without registering the new blocks."""
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        taken = self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks, delay_cache_blocks=True)
        self._check_room(taken)

    def find_on_cpu(self, request: Any) -> None:
        """CPU lookup and pin."""
        self.hits[request.request_id], _ = self.offload.get_num_new_matched_tokens(request, 0)

    def allocate_for_load(self, request: Any) -> None:
        """GPU blocks to load into; each loses another block."""
        hit = self.hits[request.request_id]
        taken = self.manager.allocate_slots(request, 0, num_external_computed_tokens=hit, delay_cache_blocks=True)
        self._check_room(taken)

    def plan_load(self, request: Any) -> None:
        """Which CPU block is to be copied to which GPU block."""
        blocks = self.manager.get_blocks(request.request_id)
        self.offload.update_state_after_alloc(request, blocks, self.hits[request.request_id])

    def end_loads(self, batch: list[Any]) -> None:
        """In one step the copies of all go to the worker, which ends them."""
        self.offload.build_connector_meta(SchedulerOutput.make_empty())
        done = {request.request_id for request in batch}
        self.offload.update_connector_output(KVConnectorOutput(finished_recving=done))

    def register_loaded(self, request: Any) -> None:
        """The loaded blocks can be found from now on."""
        self.manager.cache_blocks(request, self.hits[request.request_id])

    def plan_stores(self, batch: list[Any]) -> Step:
        """The requests were computed in one step; what is answered plans their stores and ends the copies."""
        first = SchedulerOutput.make_empty()
        for request in batch:
            blocks = self.manager.get_blocks(request.request_id)
            self.offload.update_state_after_alloc(request, blocks, 0)
            first.scheduled_new_reqs.append(NewRequestData.from_request(request, blocks.get_block_ids()))
            first.num_scheduled_tokens[request.request_id] = request.num_tokens
        self.offload.build_connector_meta(first)
        second = SchedulerOutput.make_empty()
        second.scheduled_cached_reqs = CachedRequestData.make_empty()
        for request in batch:
            request.num_computed_tokens = request.num_tokens
            second.scheduled_cached_reqs.req_ids.append(request.request_id)
            second.scheduled_cached_reqs.new_block_ids.append(None)
            second.num_scheduled_tokens[request.request_id] = 1

        def store(_batch: list[Any]) -> None:
            meta = self.offload.build_connector_meta(second)
            self.stored_blocks = len(meta.store_gpu_blocks)
            done = SimpleCPUOffloadWorkerMetadata({meta.store_event: 1})
            self.offload.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))

        return store

    def free(self, request: Any) -> None:
        """Its slots are given back."""
        self.manager.free(request)

    def leave(self, request: Any) -> None:
        """The request ends."""
        self.offload.request_finished(request, [])
        self.manager.free(request)
        self.hits.pop(request.request_id, None)

    def come_and_go(self, batch: list[Any]) -> None:
        """Each request is let in and ends, before the next one comes."""
        for request in batch:
            self.admit(request)
            self.leave(request)

    def resident_rounds(self) -> Iterator[Round]:
        """Rounds, one after the other, whose prompts are found in the GPU pool."""
        prompts = self._prompts()
        for tokens in prompts:
            self.come_and_go(self._round_of(tokens).everyone)
        for tokens in itertools.cycle(prompts):
            yield self._round_of(tokens)

    def offloaded_rounds(self) -> Iterator[Round]:
        """Rounds, one after the other, whose prompts lie in the CPU pool only."""
        prompts = self._prompts()
        for tokens in prompts:
            for request in self._round_of(tokens).everyone:
                self.admit(request)
                self.plan_stores([request])([request])
                self.leave(request)
        while True:
            self._fill_gpu()
            for tokens in prompts:
                made = self._round_of(tokens)
                if any(self.manager.get_computed_blocks(request)[1] for request in made.everyone):
                    raise RuntimeError("a prompt is still in the GPU pool")
                yield made

    def new_rounds(self, hasher: Hasher | None = HASHER) -> Iterator[Round]:
        """Rounds of prompts of exactly so many blocks that nobody has seen."""
        while True:
            tokens = self._draw()
            yield self._round_of([drawn[:-1] for drawn in tokens], hasher)

    def _prompts(self) -> list[list[list[int]]]:
        """Of as many rounds as fill half a pool, so that a large one is not measured in one warm spot."""
        slots = (self.requests * (self.blocks + 1) + self.lead_in_blocks + 1) * self._groups
        count = min(MOST_PROMPTS // self.requests, self._slots // (2 * slots))
        return [self._draw() for _ in range(max(1, count))]

    def _draw(self) -> list[list[int]]:
        """The prompts of a round, the one that leads in first."""
        return [self.tokens(self.lead_in_blocks), *(self.tokens(self.blocks) for _ in range(self.requests))]

    def _round_of(self, tokens: list[list[int]], hasher: Hasher | None = HASHER) -> Round:
        lead_in, *measured = (self.request(drawn, hasher) for drawn in tokens)
        return Round([lead_in], measured)

    def check_hits(self, batch: list[Any]) -> None:
        """Each of these requests has found its whole prompt: nothing else may be timed."""
        for request in batch:
            hit, expected = self.hits[request.request_id], (request.num_tokens - 1) // BLOCK * BLOCK
            if hit != expected:
                raise RuntimeError(f"{hit} tokens were found, not {expected}")

    def check_stores(self, batch: list[Any]) -> None:
        """All blocks of these requests were stored in the last step, in every group."""
        expected = sum(len(request.block_hashes) for request in batch) * self._groups
        if self.stored_blocks != expected:
            raise RuntimeError(f"{self.stored_blocks} blocks were stored, not {expected}")

    def _fill_gpu(self) -> None:
        """Others pass through the whole GPU pool: every slot holds a block of theirs afterwards."""
        for filler in self._fillers:
            request = self.request(filler.prompt_token_ids, None)
            request.block_hashes = list(filler.block_hashes)
            self.admit(request)
            self.manager.free(request)
            del self.hits[request.request_id]

    def _check_room(self, taken: object) -> None:
        if taken is None:
            raise MemoryError(f"a pool of {self._slots} slots has no room for {self.blocks} blocks")


def each(*steps: Callable[[Any], object]) -> Step:
    """All steps of the first request, then all of the next one."""

    def walk(batch: list[Any]) -> None:
        for request in batch:
            for step in steps:
                step(request)

    return walk


def timed(batch: list[Any], *steps: Step) -> int:
    """Nanoseconds of this thread for all steps, shared by the requests."""
    began = time.thread_time_ns()
    for step in steps:
        step(batch)
    return (time.thread_time_ns() - began) // len(batch)


def hash_rounds(world: World) -> Iterator[int]:
    """All block hashes of new tokens."""
    for made in world.new_rounds(None):
        yield made.timed(each(HASHER))


def gpu_lookup_rounds(world: World) -> Iterator[int]:
    """Lookup and pin of resident prompts, and a slot for the last token of each."""
    for made in world.resident_rounds():
        yield made.timed(each(world.admit))
        world.check_hits(made.everyone)
        each(world.leave)(made.everyone)


def cpu_lookup_rounds(world: World) -> Iterator[int]:
    """CPU lookup and pin, GPU blocks for the load, and its plan."""
    for made in world.offloaded_rounds():
        yield made.timed(each(world.find_on_cpu, world.allocate_for_load, world.plan_load))
        world.end_loads(made.everyone)
        each(world.register_loaded)(made.everyone)
        world.check_hits(made.everyone)
        each(world.leave)(made.everyone)


def load_rounds(world: World) -> Iterator[int]:
    """The plans of loads and their end, until the loaded blocks can be found."""
    for made in world.offloaded_rounds():
        each(world.find_on_cpu, world.allocate_for_load)(made.everyone)
        yield made.timed(each(world.plan_load), world.end_loads, each(world.register_loaded))
        world.check_hits(made.everyone)
        each(world.leave)(made.everyone)


def unregistered_load_rounds(world: World) -> Iterator[int]:
    """The same without the registration, without which nobody can hit them."""
    for made in world.offloaded_rounds():
        each(world.find_on_cpu, world.allocate_for_load)(made.everyone)
        yield made.timed(each(world.plan_load), world.end_loads)
        each(world.register_loaded)(made.everyone)
        world.check_hits(made.everyone)
        each(world.leave)(made.everyone)


def whole_load_rounds(world: World) -> Iterator[int]:
    """From the CPU lookup until the loaded blocks can be found."""
    admit = each(world.find_on_cpu, world.allocate_for_load, world.plan_load)
    for made in world.offloaded_rounds():
        yield made.timed(admit, world.end_loads, each(world.register_loaded))
        world.check_hits(made.everyone)
        each(world.leave)(made.everyone)


def reserve_rounds(world: World) -> Iterator[int]:
    """Admission of new prompts: each slot they are given loses another block. vLLM registers the new ones at once."""
    for made in world.new_rounds():
        yield made.timed(each(world.admit))
        each(world.leave)(made.everyone)


def unregistered_reserve_rounds(world: World) -> Iterator[int]:
    """The same without the registration."""
    for made in world.new_rounds():
        yield made.timed(each(world.reserve))
        for request in made.everyone:
            world.manager.cache_blocks(request, request.num_tokens)
            world.leave(request)


def release_rounds(world: World) -> Iterator[int]:
    """The slots of resident prompts are given back; others came and went since these were admitted."""
    rounds = world.resident_rounds()
    for made, others in zip(rounds, rounds, strict=True):
        each(world.admit)(made.everyone)
        world.check_hits(made.everyone)
        world.come_and_go(others.measured)
        yield made.timed(each(world.free))
        for request in made.everyone:
            world.offload.request_finished(request, [])


def store_rounds(world: World) -> Iterator[int]:
    """What a step does about whole new prompts that were computed in the step before, and the end of their copies."""
    for made in world.new_rounds():
        each(world.admit)(made.everyone)
        timed(made.lead_in, world.plan_stores(made.lead_in))
        yield timed(made.measured, world.plan_stores(made.measured))
        world.check_stores(made.measured)
        each(world.leave)(made.everyone)


ROUNDS: Final[dict[tuple[str, str], Callable[[World], Iterator[int]]]] = {
    ("hash", "miss"): hash_rounds,
    ("lookup", "gpu"): gpu_lookup_rounds,
    ("lookup", "cpu"): cpu_lookup_rounds,
    ("reserve", "miss"): reserve_rounds,
    ("reserve-unregistered", "miss"): unregistered_reserve_rounds,
    ("release", "gpu"): release_rounds,
    ("store", "miss"): store_rounds,
    ("load", "cpu"): load_rounds,
    ("load-unregistered", "cpu"): unregistered_load_rounds,
    ("load-whole", "cpu"): whole_load_rounds,
}
"""By what is asked for, and where the prompt lies before it. A prefix that interleaves tiers vLLM cannot use."""


def answer(**values: object) -> None:
    """One line."""
    print(json.dumps(values), file=_ANSWERS, flush=True)


def main() -> None:
    """Answer what is asked until stdin ends."""
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    init_none_hash(sha256)
    gc.disable()
    gc.freeze()  # vLLM and torch; what is collected between rounds is of the case
    answer(system=f"vllm {vllm.__version__}", python=platform.python_version())
    rounds: Iterator[int] = iter(())
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if case := question.get("open"):
                rounds = iter(())  # the last world goes before the next one comes
                gc.collect()
                rounds = ROUNDS[case["operation"], case["layout"]](World(case))
                answer(opened=True)
            else:
                gc.collect()
                answer(ns=list(itertools.islice(rounds, question["rounds"])))
        except Exception as error:
            traceback.print_exc()
            answer(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
