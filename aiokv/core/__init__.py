"""The synchronous heart: pools, lookup, plans, leases, transfers. No I/O, no clock, no `await`."""

from aiokv.core.cache import CacheState

__all__ = ["CacheState"]
