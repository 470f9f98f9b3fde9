"""The turns of a comparison: ours, the peer's, ours, the peer's, for each pair; then medians, ratios and the verdict.

While one side works the other waits for its next question, so that they never run at once and share whatever the
machine does to them. Each turn of short prompts has several rounds; the first turn of a pair warms up and is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from aiokv import run
from aiokv.cli.bench.compare.pairs import Pair, all_pairs
from aiokv.cli.bench.compare.process import Worker
from aiokv.cli.bench.compare.settings import CompareSettings, pinnable_core
from aiokv.cli.bench.compare.sides import our_worker, peer_worker
from aiokv.cli.bench.compare.slot_memory import SlotMemory, check_memory, measure_memory
from aiokv.cli.bench.operations.runner import available_memory
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.cli.output import new_progress

__all__ = ["SCHEMA_VERSION", "Result", "compare", "complaints_about", "take_turns"]

SCHEMA_VERSION: Final = 1
_WARM_UP: Final = 1
_BLOCKS_PER_TURN: Final = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one pair took, in nanoseconds of one request in each round."""

    pair: Pair
    ours_ns: tuple[int, ...]
    peer_ns: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """How many times as long the peer took; of the medians."""
        return median(self.peer_ns) / max(median(self.ours_ns), 1)

    @property
    def is_too_slow(self) -> bool:
        """Whether the floor was missed."""
        return self.pair.floor is not None and self.ratio < self.pair.floor

    def as_json(self) -> dict[str, object]:
        """The figures of one pair."""
        return {
            **self.pair.own_case,
            "peer_operation": self.pair.peer_operation,
            "peer_layout": self.pair.peer_layout.value,
            "ours": _summary(self.ours_ns, blocks=self.pair.case.blocks),
            "peer": _summary(self.peer_ns, blocks=self.pair.case.blocks),
            "ratio": round(self.ratio, 3),
            "floor": self.pair.floor,
            "note": self.pair.note,
        }


def compare(settings: CompareSettings) -> tuple[BenchReport, list[Result]]:
    """Run it, with a progress bar on stderr."""
    pairs = all_pairs(
        operations=settings.operations,
        models=settings.models,
        blocks=settings.blocks,
        pool_slots=settings.pool_slots,
    )
    check_memory(settings.memory_slots, available=available_memory())
    with new_progress() as progress:
        task = progress.add_task("compare", total=len(pairs) + bool(settings.memory_slots))
        figures, results = run(_measure(pairs, settings=settings, step=lambda: progress.advance(task)))
        costs = run(_memory(settings, step=lambda: progress.advance(task)))
    report = BenchReport(
        benchmark="compare",
        schema_version=SCHEMA_VERSION,
        figures={**figures, **({"memory": costs.figures} if costs else {})},
        complaints=(*complaints_about(results), *(costs.complaints if costs else ())),
        cases=tuple(result.as_json() for result in results),
    )
    return report, results


async def take_turns(pair: Pair, *, ours: Worker, peer: Worker, repeats: int) -> Result:
    """Open a pair on both sides and let them work in turns, ours first."""
    await ours.open(pair.own_case)
    await peer.open(pair.peer_case)
    rounds = max(1, _BLOCKS_PER_TURN // (pair.case.blocks * pair.case.requests))
    ours_ns: list[int] = []
    peer_ns: list[int] = []
    for turn in range(_WARM_UP + repeats):
        for worker, times in ((ours, ours_ns), (peer, peer_ns)):
            taken = await worker.rounds(rounds)
            times += taken if turn >= _WARM_UP else []
    return Result(pair=pair, ours_ns=tuple(ours_ns), peer_ns=tuple(peer_ns))


async def _measure(
    pairs: Sequence[Pair], *, settings: CompareSettings, step: Callable[[], None]
) -> tuple[dict[str, object], list[Result]]:
    core = pinnable_core()
    results = []
    async with peer_worker(settings, core=core) as peer, our_worker(settings, core=core) as ours:
        for pair in pairs:
            results.append(await take_turns(pair, ours=ours, peer=peer, repeats=settings.repeats))
            step()
        figures: dict[str, object] = {
            "ours": ours.system,
            "ours_python": ours.python,
            "peer": peer.system,
            "peer_python": peer.python,
            "cpu": describe_interpreter()["cpu"],
            "core": core,
            "gc": "off",
            "repeats": settings.repeats,
            "pool_slots": settings.pool_slots,
        }
    return figures, results


async def _memory(settings: CompareSettings, *, step: Callable[[], None]) -> SlotMemory | None:
    """None if nobody asks for it."""
    if not settings.memory_slots:
        return None
    costs = await measure_memory(settings)
    step()
    return costs


def _summary(times_ns: Sequence[int], *, blocks: int) -> dict[str, object]:
    spread = Spread.of(times_ns)
    return {
        "us": round(spread.median / 1e3, 3),
        "us_p10": round(spread.p10 / 1e3, 3),
        "us_p90": round(spread.p90 / 1e3, 3),
        "us_per_block": round(spread.median / 1e3 / blocks, 4),
        "rounds": len(times_ns),
    }


def complaints_about(results: Sequence[Result]) -> tuple[str, ...]:
    """Each floor that was missed, in words."""
    return tuple(
        f"{_words_for(result.pair)}: {result.ratio:.2f}x as fast as the peer, not {result.pair.floor:g}x"
        for result in results
        if result.is_too_slow
    )


def _words_for(pair: Pair) -> str:
    case = pair.case
    return f"{case.operation.value} {case.layout.value}, {case.model.value}, {case.blocks:,} blocks"
