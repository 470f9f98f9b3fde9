"""`aiokv bench soak`: nothing leaks, nothing lies, under mixed load, cancellation, faults, preemption and resets.

`command.py` the options · `settings.py` what they mean · `runner.py` the run, from opening to the figures · `world.py`
what all clients share · `client.py` requests one after the other, and how each is ended from outside · `session.py`
what a request does with its lease, `states.py` with its recurrent groups · `keeper.py` residence hints · `damage.py`
changed bytes in CPU memory · `ranks.py` ranks that only report · `watchdog.py` steps that never end · `ending.py` the
harvest and the rest after it · `findings.py` what was counted, and what it must be.
"""

from aiokv.cli.bench.soak.command import register

__all__ = ["register"]
