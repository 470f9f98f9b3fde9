"""vLLM's side of `aiokv bench compare`: the same operations on vLLM's own classes, run by the peer's interpreter.

Imports nothing of aiokv. Asked in JSON lines on stdin, it answers each with one JSON line on stdout:
`{"open": CASE}` builds the world of a case, `{"rounds": n}` answers the nanoseconds of n rounds, the end of stdin ends
it. Whatever else is printed goes to stderr.

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


Case = dict[str, Any]
Hasher = Callable[[Any], list[bytes]]

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


class World:
    """Both pools, full: whatever is allocated evicts."""

    def __init__(self, case: Case) -> None:
        self.blocks = int(case["blocks"])
        self.hit = 0
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
            self.plan_store(request)(request)
            self.leave(request)

    def tokens(self, blocks: int | None = None) -> list[int]:
        """So many whole blocks, by default those of the case, and one token more, which is always computed."""
        count = (self.blocks if blocks is None else blocks) * BLOCK + 1
        drawn: list[int] = self._random.integers(VOCABULARY, size=count).tolist()
        return drawn

    def request(self, tokens: list[int], hasher: Hasher | None = HASHER) -> Any:
        """A new request, hashed."""
        sampling = SamplingParams(max_tokens=1)
        return Request(f"request-{next(self._numbers)}", list(tokens), sampling, None, block_hasher=hasher)

    def admit(self, request: Any) -> None:
        """Local lookup, then slots for the whole prompt; new blocks can be found from now on."""
        blocks, self.hit, _ = self.manager.get_computed_blocks(request)
        self._check_room(self.manager.allocate_slots(request, request.num_tokens - self.hit, self.hit, blocks))

    def reserve(self, request: Any) -> None:
        """The same without registering the new blocks."""
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        taken = self.manager.allocate_slots(request, request.num_tokens - hit, hit, blocks, delay_cache_blocks=True)
        self._check_room(taken)

    def find_on_cpu(self, request: Any) -> None:
        """CPU lookup and pin."""
        self.hit, _ = self.offload.get_num_new_matched_tokens(request, 0)

    def allocate_for_load(self, request: Any) -> None:
        """GPU blocks to load into; each loses another block."""
        taken = self.manager.allocate_slots(request, 0, num_external_computed_tokens=self.hit, delay_cache_blocks=True)
        self._check_room(taken)

    def plan_load(self, request: Any) -> None:
        """Which CPU block is to be copied to which GPU block."""
        blocks = self.manager.get_blocks(request.request_id)
        self.offload.update_state_after_alloc(request, blocks, self.hit)

    def end_load(self, request: Any) -> None:
        """The copies go to the worker, which ends them."""
        self.offload.build_connector_meta(SchedulerOutput.make_empty())
        self.offload.update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))

    def register_loaded(self, request: Any) -> None:
        """The loaded blocks can be found from now on."""
        self.manager.cache_blocks(request, self.hit)

    def plan_store(self, request: Any) -> Callable[[Any], None]:
        """The request was computed in one step; what is answered plans its store and ends the copy."""
        blocks = self.manager.get_blocks(request.request_id)
        self.offload.update_state_after_alloc(request, blocks, 0)
        first = SchedulerOutput.make_empty()
        first.scheduled_new_reqs = [NewRequestData.from_request(request, blocks.get_block_ids())]
        first.num_scheduled_tokens = {request.request_id: request.num_tokens}
        self.offload.build_connector_meta(first)
        request.num_computed_tokens = request.num_tokens
        second = SchedulerOutput.make_empty()
        second.scheduled_cached_reqs = CachedRequestData.make_empty()
        second.scheduled_cached_reqs.req_ids = [request.request_id]
        second.scheduled_cached_reqs.new_block_ids = [None]
        second.num_scheduled_tokens = {request.request_id: 1}

        def store(_request: Any) -> None:
            meta = self.offload.build_connector_meta(second)
            done = SimpleCPUOffloadWorkerMetadata({meta.store_event: 1})
            self.offload.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))

        return store

    def leave(self, request: Any) -> None:
        """The request ends."""
        self.offload.request_finished(request, [])
        self.manager.free(request)

    def resident_requests(self) -> Iterator[Any]:
        """Requests, one after the other, whose prompts are found in the GPU pool."""
        prompts = self._prompts()
        for tokens in prompts:
            request = self.request(tokens)
            self.admit(request)
            self.leave(request)
        for tokens in itertools.cycle(prompts):
            yield self.request(tokens)

    def offloaded_requests(self) -> Iterator[Any]:
        """Requests, one after the other, whose prompts lie in the CPU pool only."""
        prompts = self._prompts()
        for tokens in prompts:
            request = self.request(tokens)
            self.admit(request)
            self.plan_store(request)(request)
            self.leave(request)
        while True:
            self._fill_gpu()
            for tokens in prompts:
                request = self.request(tokens)
                if self.manager.get_computed_blocks(request)[1]:
                    raise RuntimeError("the prompt is still in the GPU pool")
                yield request

    def new_requests(self) -> Iterator[Any]:
        """Requests of exactly so many blocks that nobody has seen."""
        while True:
            yield self.request(self.tokens()[:-1])

    def _prompts(self) -> list[list[int]]:
        """As many as fill half a pool, so that a large one is not measured in one warm spot."""
        count = min(MOST_PROMPTS, self._slots // (2 * (self.blocks + 1) * self._groups))
        return [self.tokens() for _ in range(max(1, count))]

    def check_hit(self) -> None:
        """The request that was let in last found its whole prompt: nothing else may be timed."""
        if self.hit != self.blocks * BLOCK:
            raise RuntimeError(f"{self.hit} tokens were found, not {self.blocks * BLOCK}")

    def _fill_gpu(self) -> None:
        """Others pass through the whole GPU pool: every slot holds a block of theirs afterwards."""
        for filler in self._fillers:
            request = self.request(filler.prompt_token_ids, None)
            request.block_hashes = list(filler.block_hashes)
            self.admit(request)
            self.manager.free(request)

    def _check_room(self, taken: object) -> None:
        if taken is None:
            raise MemoryError(f"a pool of {self._slots} slots has no room for {self.blocks} blocks")


def timed(request: Any, *steps: Callable[[Any], object]) -> int:
    """Nanoseconds of this thread for all steps."""
    began = time.thread_time_ns()
    for step in steps:
        step(request)
    return time.thread_time_ns() - began


def hash_rounds(world: World) -> Iterator[int]:
    """All block hashes of new tokens."""
    while True:
        request = world.request(world.tokens(), None)
        yield timed(request, HASHER)


def gpu_lookup_rounds(world: World) -> Iterator[int]:
    """Lookup and pin of a resident prompt, and a slot for its last token."""
    for request in world.resident_requests():
        yield timed(request, world.admit)
        world.check_hit()
        world.leave(request)


def cpu_lookup_rounds(world: World) -> Iterator[int]:
    """CPU lookup and pin, GPU blocks for the load, and its plan."""
    for request in world.offloaded_requests():
        yield timed(request, world.find_on_cpu, world.allocate_for_load, world.plan_load)
        world.end_load(request)
        world.register_loaded(request)
        world.check_hit()
        world.leave(request)


def load_rounds(world: World) -> Iterator[int]:
    """The plan of a load, and its end."""
    for request in world.offloaded_requests():
        world.find_on_cpu(request)
        world.allocate_for_load(request)
        yield timed(request, world.plan_load, world.end_load)
        world.register_loaded(request)
        world.check_hit()
        world.leave(request)


def whole_load_rounds(world: World) -> Iterator[int]:
    """From the choice of the GPU blocks until the loaded ones can be found."""
    for request in world.offloaded_requests():
        world.find_on_cpu(request)
        yield timed(request, world.allocate_for_load, world.plan_load, world.end_load, world.register_loaded)
        world.check_hit()
        world.leave(request)


def reserve_rounds(world: World) -> Iterator[int]:
    """Admission of a new prompt: each slot it is given loses another block. vLLM registers the new ones at once."""
    for request in world.new_requests():
        yield timed(request, world.admit)
        world.leave(request)


def unregistered_reserve_rounds(world: World) -> Iterator[int]:
    """The same without the registration."""
    for request in world.new_requests():
        yield timed(request, world.reserve)
        world.manager.cache_blocks(request, request.num_tokens)
        world.leave(request)


def release_rounds(world: World) -> Iterator[int]:
    """The slots of a resident prompt are given back; another request came and went since it was admitted."""
    requests = world.resident_requests()
    for request, other in zip(requests, requests, strict=True):
        world.admit(request)
        world.check_hit()
        world.admit(other)
        world.leave(other)
        yield timed(request, world.manager.free)
        world.offload.request_finished(request, [])


def store_rounds(world: World) -> Iterator[int]:
    """What a step does about a whole new prompt that was computed in the step before, and the end of its copy."""
    for request in world.new_requests():
        world.admit(request)
        yield timed(request, world.plan_store(request))
        world.leave(request)


ROUNDS: Final[dict[tuple[str, str], Callable[[World], Iterator[int]]]] = {
    ("hash", "miss"): hash_rounds,
    ("lookup", "gpu"): gpu_lookup_rounds,
    ("lookup", "cpu"): cpu_lookup_rounds,
    ("reserve", "miss"): reserve_rounds,
    ("reserve-unregistered", "miss"): unregistered_reserve_rounds,
    ("release", "gpu"): release_rounds,
    ("store", "miss"): store_rounds,
    ("load", "cpu"): load_rounds,
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
