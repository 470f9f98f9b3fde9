"""`run_cache_machine`: the state machine against any driver, or any scheduler, in one line of a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aiokv.core.cache import CacheState
from aiokv.errors import ConfigError
from aiokv.testing.driver import Driver, Setup, Witness
from aiokv.testing.scheduler import Device, Scheduler

if TYPE_CHECKING:
    from aiokv.testing.tier_machine import TierMachine

__all__ = ["run_cache_machine", "run_scheduler_machine"]


def run_cache_machine(
    make_driver: Callable[[Setup, Witness], Driver] = Driver, *, max_examples: int = 300, steps: int = 80
) -> Counter[str]:
    """Take `max_examples` runs of `steps` random steps each through drivers, and check everything after every step.

    `make_driver` is a `Driver` class or whatever else makes one. The answer counts what the runs have met (loads that
    failed, leases that waited, prefixes that were forked, ...): a test asserts that it was enough. What is broken is
    raised as hypothesis found it, shrunk, with the steps that lead there. hypothesis' current profile says the rest
    (seeds, database). `ConfigError` if hypothesis is not installed.
    """
    with _hypothesis():
        from aiokv.testing.wait_machine import WaitMachine
    seen: Counter[str] = Counter()

    class Run(WaitMachine):
        pass

    Run.seen, Run.make_driver = seen, staticmethod(make_driver)
    _run(Run, max_examples=max_examples, steps=steps)
    return seen


def run_scheduler_machine(
    make_scheduler: Callable[[CacheState, Device], Scheduler], *, max_examples: int = 100, steps: int = 60
) -> Counter[str]:
    """The same machine over a whole scheduler: requests come and go, `aiokv.testing.scheduler` says what it plugs in.

    Groups of full, window and chunked attention are drawn. Answers and raises like `run_cache_machine`.
    """
    with _hypothesis():
        from aiokv.testing.scheduler_machine import SchedulerMachine
    seen: Counter[str] = Counter()

    class Run(SchedulerMachine):
        pass

    Run.seen, Run.make_scheduler = seen, staticmethod(make_scheduler)
    _run(Run, max_examples=max_examples, steps=steps)
    return seen


def _run(machine: type[TierMachine], *, max_examples: int, steps: int) -> None:
    from hypothesis import HealthCheck, settings
    from hypothesis.stateful import run_state_machine_as_test

    budget = settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=budget)


@contextmanager
def _hypothesis() -> Iterator[None]:
    """`ConfigError` if it is missing; an import that fails for another reason stays what it is."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ConfigError(
            "the state machine needs hypothesis: pip install 'aiokv[test]', or hypothesis alone"
        ) from error
