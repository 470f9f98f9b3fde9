"""Both phases, their figures, and what they must be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, Protocol

from aiokv.cli.bench.garbage import frozen_garbage
from aiokv.cli.bench.hold import HoldMeter, Steps, run_metered
from aiokv.cli.bench.holds.load import Phase, churn, mixed
from aiokv.cli.bench.holds.settings import HoldSettings, Turn
from aiokv.cli.bench.memory import BYTES_PER_SLOT, require_memory
from aiokv.cli.bench.report import BenchReport
from aiokv.cli.output import new_progress

__all__ = ["SCHEMA_VERSION", "complaints_about", "figures_of", "hold"]

SCHEMA_VERSION: Final = 1

_BUDGETS_MS: Final = {"hold_ms_p99": 1.0, "hold_ms_p999": 2.0}
_PERCENTILES: Final = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


class _Load(Protocol):
    def __call__(self, settings: HoldSettings, *, phase: Phase, step: Callable[[], None]) -> Awaitable[None]: ...


def hold(settings: HoldSettings) -> BenchReport:
    """Run both phases, each in a loop and a runtime of its own, with a progress bar on stderr."""
    slots = settings.most_slots
    require_memory(slots * BYTES_PER_SLOT, what=f"pools of {slots:,} slots altogether")
    loads: dict[str, tuple[_Load, int]] = {
        "mixed": (mixed, settings.clients * (1 + settings.rounds * len(Turn))),
        "churn": (churn, settings.churn_prompts),
    }
    figures: dict[str, Any] = {
        "backend": "fake, its submissions untimed",
        "gc": "on, what existed before frozen, collections untimed",
        "clients": settings.clients,
        "prompt_blocks": settings.blocks,
        "gpu_slots": settings.gpu_blocks - 1,
        "cpu_slots": settings.cpu_blocks,
        "churn_slots": settings.churn_slots,
    }
    with new_progress() as progress:
        for name, (load, requests) in loads.items():
            task = progress.add_task(name, total=requests)
            figures |= figures_of(_measure(load, settings, step=partial(progress.advance, task)), name=name)
    return BenchReport(
        benchmark="hold",
        schema_version=SCHEMA_VERSION,
        figures=figures,
        complaints=complaints_about(figures, settings=settings),
    )


def _measure(load: _Load, settings: HoldSettings, *, step: Callable[[], None]) -> Phase:
    phase = Phase()

    async def main() -> None:
        with frozen_garbage(phase.meter) as phase.pauses:
            await load(settings, phase=phase, step=step)

    run_metered(main, meter=phase.meter)
    return phase


def figures_of(phase: Phase, *, name: str) -> dict[str, Any]:
    """Milliseconds of all steps and counts; then of each kind of step; then the longest ones."""
    return {
        name: {
            **_times(phase.meter),
            **phase.tally,
            "collections": phase.pauses.count if phase.pauses else 0,
            "longest_collection_ms": round(1e3 * phase.pauses.longest_s, 4) if phase.pauses else 0.0,
        },
        f"{name}_kinds": {kind: _by_percentile(steps) for kind, steps in sorted(phase.meter.kinds.items())},
        f"{name}_longest": [{"step": step, "ms": round(1e3 * seconds, 4)} for seconds, step in phase.meter.longest],
    }


def _times(meter: HoldMeter) -> dict[str, Any]:
    held = {f"hold_ms_{name}": round(1e3 * meter.percentile_s(share), 4) for name, share in _PERCENTILES.items()}
    return {"steps": meter.steps, **held, "hold_ms_max": round(1e3 * meter.longest_s, 4)}


def _by_percentile(steps: Steps) -> dict[str, Any]:
    parts = {f"ms_{name}": round(1e3 * steps.percentile_s(share), 4) for name, share in _PERCENTILES.items()}
    return {"steps": steps.count, **parts, "ms_max": round(1e3 * steps.longest_s, 4)}


def complaints_about(figures: Mapping[str, Any], *, settings: HoldSettings) -> tuple[str, ...]:
    """Each budget that was not kept; and whatever shows that something else was measured than should be."""
    held = [
        f"{phase}: {name} is {figures[phase][name]}, over {budget}"
        for phase in ("mixed", "churn")
        for name, budget in _BUDGETS_MS.items()
        if figures[phase][name] > budget
    ]
    least = {
        ("mixed", "requests"): settings.clients * (1 + settings.rounds * len(Turn)),
        ("mixed", "gpu_tokens"): 1,
        ("mixed", "cpu_tokens"): 1,
        ("mixed", "gpu_evicted"): 1,
        ("churn", "requests"): settings.churn_prompts,
        ("churn", "gpu_evicted"): settings.churn_blocks - settings.blocks,
    }
    missing = [
        f"{phase}: {name} is {figures[phase][name]}, at least {wanted} were to be seen"
        for (phase, name), wanted in least.items()
        if figures[phase][name] < wanted
    ]
    return (*held, *missing)
