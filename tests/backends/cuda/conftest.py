"""The fake driver, and a rig of device memory and backends on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.cuda.rig import Rig
from tests.fakecuda import FakeDriver
from tests.fakecuda.fixtures import fake_driver, watched_driver

__all__ = ["fake_driver", "rig", "watched_driver", "watched_rig"]


@pytest.fixture
def rig(fake_driver: FakeDriver) -> Iterator[Rig]:
    made = Rig(fake_driver)
    yield made
    made.close()


@pytest.fixture
def watched_rig(watched_driver: FakeDriver) -> Iterator[Rig]:
    """With every adversary; violations fail the test."""
    made = Rig(watched_driver)
    yield made
    made.close()
