"""Settings of the whole suite.

- Every async test runs on asyncio's own loop and on uvloop, in asyncio debug mode. A storm that debug mode makes too
  slow turns it off in its first line: `asyncio.get_running_loop().set_debug(False)`.
- While an async test runs, a blocking call made by aiokv or an integration on the loop fails the test (blockbuster; it
  does not see ctypes). A test opts out with `@pytest.mark.allow_blocking("the reason")`.
- What the loop's exception handler would only log (a task's exception that nobody retrieved, a callback that raised)
  fails the test, unless the test sets a handler of its own.
- Hypothesis is derandomised, so that a failure is the same everywhere; new seeds: `pytest --hypothesis-profile=random`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio
from blockbuster import BlockBuster
from hypothesis import HealthCheck, settings

REPOSITORY = Path(__file__).resolve().parent.parent

_loop_errors: list[str] = []

# Machines that run tests are slow and shared: durations judge nothing.
_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("ci", _COMMON, derandomize=True, database=None)
settings.register_profile("local", _COMMON, derandomize=True)
settings.register_profile("random", _COMMON, derandomize=False, max_examples=500)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loops each async test runs on; `@pytest.mark.asyncio(loop_factories=["uvloop"])` picks some."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if sys.platform != "win32":
        import uvloop

        factories["uvloop"] = uvloop.new_event_loop
    return {name: partial(_new_strict_loop, factory) for name, factory in factories.items()}


def _new_strict_loop(factory: Callable[[], asyncio.AbstractEventLoop]) -> asyncio.AbstractEventLoop:
    loop = factory()
    loop.set_exception_handler(_fail_test)
    return loop


def _fail_test(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What a loop would only log fails the test: see `_strict_loop`, which looks at `_loop_errors`."""
    loop.default_exception_handler(context)
    _loop_errors.append(f"{context.get('message')}: {context.get('exception')!r}")
    if isinstance(context.get("exception"), pytest.fail.Exception):
        # pytest-timeout raises this in its signal handler. asyncio lets it out; uvloop brings it here and goes on.
        for task in asyncio.all_tasks(loop):
            task.print_stack()
        loop.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that opts out of the blocking-call check must say why."""
    for item in items:
        for marker in item.iter_markers("allow_blocking"):
            if not (marker.args and isinstance(marker.args[0], str) and marker.args[0].strip()):
                raise pytest.UsageError(f'{item.nodeid}: allow_blocking needs a reason, as in allow_blocking("...")')


@pytest.fixture(scope="session")
def blocking_call_guard() -> BlockBuster:
    """One guard for all tests, over the code under test only: a test may read a file, aiokv may not."""
    sources = ModuleType("sources")
    sources.__path__ = [str(REPOSITORY / "aiokv")]
    integrations = ModuleType("integrations")
    integrations.__path__ = [str(REPOSITORY / "integrations")]
    return BlockBuster(scanned_modules=[sources, integrations])


@pytest.fixture(autouse=True)
def _no_blocking_calls(request: pytest.FixtureRequest) -> Iterator[None]:
    if not pytest_asyncio.is_async_test(request.node) or request.node.get_closest_marker("allow_blocking"):
        yield
        return
    guard: BlockBuster = request.getfixturevalue("blocking_call_guard")
    guard.activate()
    try:
        yield
    finally:
        guard.deactivate()


@pytest.fixture(autouse=True)
def _strict_loop() -> Iterator[None]:
    """Judges when the loop is closed: pytest-asyncio makes it after this fixture and so tears it down before."""
    _loop_errors.clear()
    yield
    errors = list(_loop_errors)
    assert not errors
