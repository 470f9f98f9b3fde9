"""The fixtures of this folder."""

from tests.fakecuda.fixtures import cu, fake_driver, watched_driver

__all__ = ["cu", "fake_driver", "watched_driver"]
