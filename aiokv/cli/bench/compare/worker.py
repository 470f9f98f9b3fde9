"""Our side of a comparison: `python -m aiokv.cli.bench.compare.worker [CORE]`, asked in JSON lines.

It speaks as `tests/bench/peer_worker.py` does. Python's garbage collector is off while an operation is timed.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from typing import Final, TextIO, assert_never

from aiokv.cli.bench.cases import Case, Layout, Model, Operation
from aiokv.cli.bench.compare.pairs import Extent
from aiokv.cli.bench.footprint.runner import MeasuredPool, measure
from aiokv.cli.bench.operations import Bench, open_case
from aiokv.errors import AiokvError
from aiokv.model.ids import Tier

__all__ = ["MEASURED_POOL", "main"]

MEASURED_POOL: Final = MeasuredPool(tier=Tier.GPU, has_listener=False)
"""Whose memory is compared."""


def main(arguments: list[str]) -> None:
    """Answer what is asked until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed goes to stderr
    if arguments:
        os.sched_setaffinity(0, {int(arguments[0])})
    gc.disable()
    gc.freeze()
    _answer(answers, system=f"aiokv {version('aiokv')}", python=platform.python_version())
    bench: Bench | None = None
    extent = Extent.OPERATION
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if wanted := question.get("open"):
                bench = None  # the last world goes before the next one comes
                gc.collect()
                bench, extent = open_case(_case_of(wanted)), Extent(wanted["extent"])
                _answer(answers, opened=True)
            elif slots := question.get("memory"):
                _answer(answers, memory=measure(MEASURED_POOL, slots))
            else:
                if bench is None:
                    raise RuntimeError("no case is open")
                gc.collect()
                _answer(answers, ns=[_time_round(bench, extent=extent) for _ in range(question["rounds"])])
        except (AiokvError, RuntimeError, MemoryError) as error:
            _answer(answers, error=f"{type(error).__name__}: {error}")


def _case_of(wanted: Mapping[str, object]) -> Case:
    return Case(
        operation=Operation(wanted["operation"]),
        layout=Layout(wanted["layout"]),
        model=Model(wanted["model"]),
        blocks=int(str(wanted["blocks"])),
        pool_slots=int(str(wanted["pool_slots"])),
        requests=int(str(wanted["requests"])),
    )


def _time_round(bench: Bench, *, extent: Extent) -> int:
    """Nanoseconds of one request of a new round."""
    bench.run_round()
    match extent:
        case Extent.OPERATION:
            return bench.times.total_ns
        case Extent.WHOLE:
            return bench.times.whole_ns
        case _:
            assert_never(extent)


def _answer(answers: TextIO, **values: object) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
