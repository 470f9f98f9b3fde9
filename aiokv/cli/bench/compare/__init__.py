"""`aiokv bench compare`: the operations of the core side by side with vLLM's own code, in turns on one core.

`pairs.py` what is compared with what, and the floors · `worker.py` our side, a process of its own; the peer's is
`tests/bench/peer_worker.py`, run by the peer's interpreter · `process.py` a worker as the driver sees it · `sides.py`
how each is started · `runner.py` the turns · `slot_memory.py` what a slot costs (the peer's side:
`tests/bench/peer_memory.py`) · `table.py` what people read.
"""

from __future__ import annotations

from aiokv.cli.bench.compare.command import register

__all__ = ["register"]
