"""`aiokv bench memory`: what a slot costs, empty and resident, as the growth of the process's resident memory.

`command.py` the options · `filling.py` pools that are filled through the cache's own calls · `runner.py` the figures.
"""

from aiokv.cli.bench.footprint.command import register

__all__ = ["register"]
