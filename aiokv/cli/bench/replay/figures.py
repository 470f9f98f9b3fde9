"""What a replay found, as figures; and what is not as promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokv.cli.bench.hold import HoldMeter
from aiokv.cli.bench.replay.peer import Served
from aiokv.cli.bench.replay.schedule import Arrival

__all__ = ["LEAST_RATIO", "beside", "complaints_about", "hold_figures", "side_figures"]

LEAST_RATIO: Final = 4.0
"""Requests per second, as a multiple of the peer's."""


def side_figures(slices: Sequence[Served], *, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Of one side. Hits are whole blocks only, never the last token of a prompt; rates are per token of all prompts."""
    prompt = sum(arrival.request.input_length for arrival in arrivals)
    hits = _hits_of(slices)
    gpu, cpu = (sum(hit[tier] for hit in hits) for tier in (0, 1))
    seconds, cpu_seconds = sum(part.seconds for part in slices), sum(part.cpu_seconds for part in slices)
    return {
        "requests": len(hits),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "requests_per_second": round(len(hits) / seconds, 1),
        "requests_per_cpu_second": round(len(hits) / cpu_seconds, 1),
        "prompt_tokens": prompt,
        "gpu_hit_tokens": gpu,
        "cpu_hit_tokens": cpu,
        "gpu_hit_rate": round(gpu / prompt, 4),
        "cpu_hit_rate": round(cpu / prompt, 4),
    }


def hold_figures(meter: HoldMeter) -> dict[str, Any]:
    """How long the loop was held at a time, in CPU milliseconds of its thread."""
    return {
        "steps": meter.steps,
        "ms_p50": round(1e3 * meter.percentile_s(0.5), 3),
        "ms_p99": round(1e3 * meter.percentile_s(0.99), 3),
        "ms_p999": round(1e3 * meter.percentile_s(0.999), 3),
        "ms_longest": round(1e3 * meter.longest_s, 3),
        "longest_step": meter.longest_step,
    }


def beside(
    name: str, ours: Sequence[Served], *, theirs: Sequence[Served], arrivals: Sequence[Arrival]
) -> dict[str, dict[str, Any]]:
    """The peer's figures, and ours as a multiple of them."""
    mine, other = side_figures(ours, arrivals=arrivals), side_figures(theirs, arrivals=arrivals)
    compared = ("requests_per_second", "requests_per_cpu_second", "gpu_hit_tokens", "cpu_hit_tokens")
    ratio = {figure: round(mine[figure] / other[figure], 3) for figure in compared if other[figure]}
    pairs = zip(_hits_of(ours), _hits_of(theirs), strict=True)
    return {
        "peer": {"name": name, **other},
        "ratio": {**ratio, "requests_with_same_hits": sum(one == another for one, another in pairs)},
    }


def complaints_about(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Each promise that was not kept, in words."""
    side, attributed, counted = figures["aiokv"], figures["attributed"], figures["metrics"]
    found = []
    if sum(attributed.values()) != side["prompt_tokens"]:
        found.append(f"{sum(attributed.values())} tokens were attributed, the prompts have {side['prompt_tokens']}")
    if counted != {source: tokens for source, tokens in attributed.items() if tokens}:
        found.append(f"the metrics count {counted}, the requests were given {attributed}")
    if figures["scrapes"]["failed"]:
        found.append(f"{figures['scrapes']['failed']} scrapes of the metrics failed")
    ratio = figures.get("ratio", {}).get("requests_per_second", LEAST_RATIO)
    if ratio < LEAST_RATIO:
        found.append(f"{ratio} times the peer's requests per second, not {LEAST_RATIO:g}")
    return tuple(found)


def _hits_of(slices: Sequence[Served]) -> list[tuple[int, int]]:
    return [hit for part in slices for hit in part.hits]
