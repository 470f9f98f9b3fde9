"""`aiokv bench scale`: what a block costs in pools of several sizes, in turns, and how many times as much as in the
smallest.

`settings.py` sizes and operations · `runner.py` the turns, ratios and the verdict · `table.py` what people read ·
`command.py` the options.
"""

from aiokv.cli.bench.scale.command import register

__all__ = ["register"]
