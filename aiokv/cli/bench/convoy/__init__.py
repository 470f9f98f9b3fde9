"""`aiokv bench convoy`: many clients ask at once for one long prefix that lies in the CPU tier: one copy per block.

`command.py` the options · `rounds.py` one crowd, and what it saw · `runner.py` all rounds, and the verdict.
"""

from aiokv.cli.bench.convoy.command import register

__all__ = ["register"]
