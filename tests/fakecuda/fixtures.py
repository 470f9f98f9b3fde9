"""Fixtures for every folder of tests that wants the fake driver: import them into its `conftest.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakecuda.build import NoCompiler
from tests.fakecuda.control import FakeDriver


@pytest.fixture
def fake_driver() -> Iterator[FakeDriver]:
    """The fake driver, new. Afterwards nothing may be pending, and tests that come later see no device.

    Whether there were violations is the test's to ask: some plant them.
    """
    try:
        driver = FakeDriver.load()
    except NoCompiler as reason:
        pytest.skip(str(reason))
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
    assert fake_driver.violations() == []
