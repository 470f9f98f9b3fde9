"""All sections, and how each runs: in a thread, for so long at most; whatever happens to it, the others go on."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from tests.gpu.bench import Bench, Found
from tests.gpu.modules import FOR_REQUESTS, find_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the check."""

    name: str
    run: Callable[[Bench], Found]
    limit_s: float
    is_judged: bool = False
    """Whether the check fails with it."""
    needs: tuple[str, ...] = ()
    """Modules without which it is left out."""


def _imported(module: str, function: str) -> Callable[[Bench], Found]:
    """A function of `tests/gpu`, imported when it is called: what some need is not everywhere."""
    return lambda bench: getattr(import_module(f"tests.gpu.{module}"), function)(bench)


SECTIONS: Final = (
    Section(name="bytes", run=_imported("contents", "check_bytes"), limit_s=30, is_judged=True),
    Section(name="races", run=_imported("races", "check_races"), limit_s=60, is_judged=True),
    Section(
        name="requests", run=_imported("requests", "check_requests"), limit_s=30, is_judged=True, needs=FOR_REQUESTS
    ),
    Section(name="wakeups", run=_imported("requests", "measure_wakeups"), limit_s=30, needs=FOR_REQUESTS),
    Section(name="submits", run=_imported("costs", "measure_submits"), limit_s=20),
    Section(name="queries", run=_imported("costs", "measure_queries"), limit_s=10),
    Section(name="queue_depth", run=_imported("costs", "measure_queue_depth"), limit_s=10),
    Section(name="speeds", run=_imported("speeds", "measure_speeds"), limit_s=45),
    Section(name="registration", run=_imported("registration", "measure_registration"), limit_s=45),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a section."""

    section: Section
    found: Found = field(default_factory=Found)
    skipped: str = ""
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong with it; left out is not wrong."""
        return not self.found.faults

    def as_json(self) -> dict[str, Any]:
        """As it is printed."""
        said = {"skipped": self.skipped} if self.skipped else {"seconds": round(self.seconds, 2)}
        return {"ok": self.is_ok, **said, **self.found.figures, "faults": self.found.faults}


def run_sections(bench: Bench, *, sections: Iterable[Section], total_s: float) -> Iterator[Result]:
    """One after the other, none beyond `total_s` altogether."""
    give_up = time.monotonic() + total_s
    for section in sections:
        missing = find_missing(section.needs)
        if missing:
            yield Result(section=section, skipped=f"not installed: {', '.join(missing)}")
            continue
        yield _run(bench, section, limit_s=max(min(section.limit_s, give_up - time.monotonic()), 0.0))


def _run(bench: Bench, section: Section, *, limit_s: float) -> Result:
    found: list[Found] = []
    began = time.monotonic()
    # A daemon: a call of the driver that hangs cannot keep the others from being told.
    thread = threading.Thread(target=lambda: found.append(_call(bench, section)), name=section.name, daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        late = Found(faults=[f"it did not end within {limit_s:.0f} s"])
        return Result(section=section, found=late, seconds=time.monotonic() - began)
    return Result(section=section, found=found[0], seconds=time.monotonic() - began)


def _call(bench: Bench, section: Section) -> Found:
    try:
        return section.run(bench)
    except BaseException as error:  # told as this section's fault
        where = "".join(traceback.format_exception(error)[-3:]).strip()
        return Found(faults=[f"{type(error).__name__}: {error}", where])
