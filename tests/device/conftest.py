"""The fake driver of every test here, and a rig of device memory on it."""

from __future__ import annotations

from tests.backends.cuda.conftest import rig, watched_rig
from tests.fakecuda.fixtures import fake_driver, watched_driver

__all__ = ["fake_driver", "rig", "watched_driver", "watched_rig"]
