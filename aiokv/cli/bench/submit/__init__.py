"""`aiokv bench submit`: what handing copies to a backend costs the loop's thread.

`command.py` the options · `settings.py` how many copies, to whom · `runner.py` host cases · `to_device.py` those of a
CUDA device, beside `listed.py`, the bindings' own way.
"""

from aiokv.cli.bench.submit.command import register

__all__ = ["register"]
