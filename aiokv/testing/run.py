"""`run_cache_machine`: the state machine against any driver, in one line of a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiokv.errors import ConfigError
from aiokv.testing.driver import Driver, Setup, Witness

if TYPE_CHECKING:
    from aiokv.testing.tier_machine import TierMachine

__all__ = ["run_cache_machine"]


def run_cache_machine(
    make_driver: Callable[[Setup, Witness], Driver] = Driver, *, max_examples: int = 300, steps: int = 80
) -> Counter[str]:
    """Take `max_examples` runs of `steps` random steps each through drivers, and check everything after every step.

    `make_driver` is a `Driver` class or whatever else makes one. The answer counts what the runs have met (loads that
    failed, leases that waited, prefixes that were forked, ...): a test asserts that it was enough. What is broken is
    raised as hypothesis found it, shrunk, with the steps that lead there. hypothesis' current profile says the rest
    (seeds, database). `ConfigError` if hypothesis is not installed.
    """
    try:
        from aiokv.testing.machine import CacheMachine
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    seen: Counter[str] = Counter()

    class Run(CacheMachine):
        pass

    Run.seen, Run.make_driver = seen, make_driver
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


def _missing(error: ModuleNotFoundError) -> Exception:
    """What to say instead; an import that fails for another reason stays what it is."""
    if error.name != "hypothesis":
        return error
    return ConfigError("the state machine needs hypothesis: pip install 'aiokv[test]', or hypothesis alone")
