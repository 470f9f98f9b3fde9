"""`aiokv bench copy`: how fast blocks are copied between the tiers, beside one plain copy in the same run.

`command.py` the options · `settings.py` sizes, and how slots lie · `batches.py` what is copied at once ·
`world.py` memory, copies, and what they left · `on_device.py` the same on a CUDA device · `runner.py` all cases, and
the verdict.
"""

from aiokv.cli.bench.copy.command import register

__all__ = ["register"]
