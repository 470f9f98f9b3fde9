"""`aiokv bench hold`: how long the loop's thread is held while many long prompts are acquired, stored and released.

`command.py` the options · `settings.py` what is asked for · `clients.py` what a client does, and how its steps are
timed · `load.py` the clients of a phase · `runner.py` both phases, and the verdict.
"""

from aiokv.cli.bench.holds.command import register

__all__ = ["register"]
