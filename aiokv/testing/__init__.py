"""What embedders test themselves with: a fake backend, a faulty one, blocks by letter, eviction by name, the oracle.

No GPU, no clock, no thread (a `FaultyBackend` has those of the backend inside).
"""

from aiokv.backends.fake import FakeBackend, FakeCopy
from aiokv.testing.blocks import evict, make_resident
from aiokv.testing.faulty import FaultyBackend, InjectedFaults
from aiokv.testing.oracle import exhaustive_hit, exhaustive_sources

__all__ = [
    "FakeBackend",
    "FakeCopy",
    "FaultyBackend",
    "InjectedFaults",
    "evict",
    "exhaustive_hit",
    "exhaustive_sources",
    "make_resident",
]
