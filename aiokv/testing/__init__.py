"""What embedders test themselves with: a fake backend, a faulty one, blocks by letter, eviction by name, the lookup
oracle, and the state machine that aiokv tests itself with, over their own scheduler.

No GPU, no clock, no thread (a `FaultyBackend` has those of the backend inside). The state machine alone needs
hypothesis (`pip install 'aiokv[test]'`), when it is run.
"""

from aiokv.backends.fake import FakeBackend, FakeCopy
from aiokv.testing.blocks import evict, make_resident
from aiokv.testing.driver import Driver, Setup, Witness
from aiokv.testing.faulty import FaultyBackend, InjectedFaults
from aiokv.testing.fenced_backend import FencedBackend
from aiokv.testing.forward import Row
from aiokv.testing.oracle import exhaustive_hit, exhaustive_sources
from aiokv.testing.run import run_cache_machine, run_scheduler_machine
from aiokv.testing.runtime_driver import RuntimeDriver
from aiokv.testing.scheduler import Device, Scheduler
from aiokv.testing.verdict import BrokenInvariant

__all__ = [
    "BrokenInvariant",
    "Device",
    "Driver",
    "FakeBackend",
    "FakeCopy",
    "FaultyBackend",
    "FencedBackend",
    "InjectedFaults",
    "Row",
    "RuntimeDriver",
    "Scheduler",
    "Setup",
    "Witness",
    "evict",
    "exhaustive_hit",
    "exhaustive_sources",
    "make_resident",
    "run_cache_machine",
    "run_scheduler_machine",
]
