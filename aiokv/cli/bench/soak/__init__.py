"""`aiokv bench soak`: nothing leaks, nothing lies, under mixed load, cancellation, faults, preemption and resets.

`command.py` the options · `runner.py` the run from opening to verdict · `world.py` what all clients share · `client.py`
requests one after the other, and how each is ended from outside · `session.py` what a request does with its lease ·
`findings.py` what was counted, and what it must be.
"""

from aiokv.cli.bench.soak.command import register

__all__ = ["register"]
