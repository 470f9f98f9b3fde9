"""The fake driver, and a rig of device memory and backends on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.fakecuda import FakeDriver
from tests.fakecuda.fixtures import fake_driver, watched_driver

if TYPE_CHECKING:
    from tests.backends.cuda.rig import Rig

__all__ = ["fake_driver", "rig", "watched_driver", "watched_rig"]


@pytest.fixture
def rig(fake_driver: FakeDriver) -> Iterator[Rig]:
    from tests.backends.cuda.rig import Rig  # which needs the bindings

    made = Rig(fake_driver)
    yield made
    made.close()


@pytest.fixture
def watched_rig(watched_driver: FakeDriver) -> Iterator[Rig]:
    """With every adversary; violations fail the test."""
    from tests.backends.cuda.rig import Rig  # which needs the bindings

    made = Rig(watched_driver)
    yield made
    made.close()
