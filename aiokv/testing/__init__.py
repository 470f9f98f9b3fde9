"""What embedders test themselves with: a fake backend, blocks by letter, eviction by name, the lookup oracle.

No GPU, no clock, no thread.
"""

from aiokv.backends.fake import FakeBackend, FakeCopy
from aiokv.testing.blocks import evict, make_resident
from aiokv.testing.oracle import exhaustive_hit, exhaustive_sources

__all__ = ["FakeBackend", "FakeCopy", "evict", "exhaustive_hit", "exhaustive_sources", "make_resident"]
