"""`aiokv bench bridge`: how soon a request goes on after its copies have ended, however many are in flight.

`command.py` the options · `settings.py` how many are in flight · `clocked.py` a device whose copies end by the clock ·
`paced.py` the CUDA backend on the fake driver, whose copies take what they are told to ·
`rounds.py` requests on a runtime · `idle.py` a loop with nothing in flight · `runner.py` all cases, and the verdict.
"""

from aiokv.cli.bench.bridge.command import register

__all__ = ["register"]
