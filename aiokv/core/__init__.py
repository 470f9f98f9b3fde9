"""The synchronous heart: pools, lookup, plans, leases, transfers. No I/O, no clock, no `await`."""
