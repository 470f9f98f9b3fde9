"""`aiokv bench submit`: what handing copies to a backend costs the loop's thread.

`command.py` the options · `settings.py` how many copies · `runner.py` all cases.
"""

from aiokv.cli.bench.submit.command import register

__all__ = ["register"]
