"""`aiokv bench events`: what it costs to be watched, by readers of cache events and by a scrape of the metrics.

`command.py` the options · `settings.py` how much · `world.py` a busy runtime and who listens to it · `scrapes.py`
metrics read from another thread · `memory.py` bytes that events take · `runner.py` all figures, and the verdict.
"""

from aiokv.cli.bench.events.command import register

__all__ = ["register"]
