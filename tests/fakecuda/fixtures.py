"""Fixtures for every folder of tests that wants the fake driver: import them into its `conftest.py`.

`skipped_without_compiler` is for tests that load it in another process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from tests.fakecuda.build import NoCompiler
from tests.fakecuda.calls import succeed
from tests.fakecuda.control import FakeDriver


@contextmanager
def skipped_without_compiler() -> Iterator[None]:
    """Skips the test if the driver cannot be built inside, but not in CI, which installs a compiler."""
    try:
        yield
    except NoCompiler as reason:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(reason))


@pytest.fixture
def fake_driver() -> Iterator[FakeDriver]:
    """The fake driver, new. Afterwards nothing may be pending, and tests that come later see no device.

    Skipped where there is no Linux or no C compiler, but not in CI, which installs one.

    Whether there were violations is the test's to ask: some plant them.
    """
    if sys.platform != "linux":
        pytest.skip("the fake driver is for Linux")
    with skipped_without_compiler():
        driver = FakeDriver.load()
    driver.reset()
    yield driver
    driver.release()
    driver.reset_error()
    drained = driver.drain()
    if drained:
        driver.reset()
    driver.hide()
    assert drained, "operations are pending that nothing will ever run"


@pytest.fixture
def watched_driver(fake_driver: FakeDriver) -> Iterator[FakeDriver]:
    """The same with every adversary, and a test that ends with violations fails."""
    fake_driver.adversaries()
    yield fake_driver
    found = fake_driver.violations()
    assert not found, found


@pytest.fixture
def cu(fake_driver: FakeDriver) -> Iterator[ModuleType]:
    """`cuda.bindings.driver` on the fake driver, with the primary context of device 0 current in this thread."""
    bindings: ModuleType = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    succeed(bindings.cuInit(0))
    context = succeed(bindings.cuDevicePrimaryCtxRetain(0))
    succeed(bindings.cuCtxPushCurrent(context))
    yield bindings
    if fake_driver.context_depth():
        succeed(bindings.cuCtxPopCurrent())
