"""Who is in flight when: worked out beforehand from the trace alone, so that both sides are asked for the same.

A request comes when the one before it has been admitted and its prompt confirmed. Before it comes, the oldest end until
no more than `in_flight` run with it and all of them together fit into `blocks`: nobody has to wait for capacity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from aiokv.cli.bench.replay.settings import ReplaySettings
from aiokv.cli.bench.replay.trace import TraceRequest
from aiokv.errors import ConfigError

__all__ = ["Arrival", "plan_arrivals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request, and how many of the oldest end before it comes."""

    index: int
    request: TraceRequest
    ends: int


def plan_arrivals(requests: Sequence[TraceRequest], *, settings: ReplaySettings) -> list[Arrival]:
    """All arrivals in order; `ConfigError` for a request that is too long for the pool."""
    running: deque[int] = deque()
    arrivals = []
    total = 0
    for index, request in enumerate(requests):
        blocks = -(-(request.input_length + request.output_length) // settings.block_size)
        if blocks > settings.blocks_in_flight:
            raise ConfigError(
                f"request {index} of the trace needs {blocks} GPU blocks; of {settings.gpu_blocks} "
                f"{settings.blocks_in_flight} are for requests in flight: give more --gpu-blocks"
            )
        ends = 0
        while running and (len(running) >= settings.in_flight or total + blocks > settings.blocks_in_flight):
            total -= running.popleft()
            ends += 1
        running.append(blocks)
        total += blocks
        arrivals.append(Arrival(index=index, request=request, ends=ends))
    return arrivals
