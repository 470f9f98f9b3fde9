"""The fixtures of this folder."""

from tests.fakecuda.fixtures import fake_driver, watched_driver

__all__ = ["fake_driver", "watched_driver"]
