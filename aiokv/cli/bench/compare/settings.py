"""What a comparison is asked for, and what it needs beside the installed package."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aiokv.cli.bench.cases import Model, Operation
from aiokv.cli.bench.compare.pairs import FLOORS
from aiokv.errors import ConfigError

__all__ = ["PEER_WORKER", "CompareSettings", "pinnable_core"]

PEER_WORKER: Final = Path(__file__).resolve().parents[4] / "tests/bench/peer_worker.py"
"""The peer's side, in a checkout."""

_DISTURBING: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings:
    """One comparison. `ConfigError` for what cannot be compared."""

    peer_python: Path
    peer_script: Path = PEER_WORKER
    blocks: tuple[int, ...] = (64, 512, 2048, 8192)
    operations: tuple[Operation, ...] = tuple(FLOORS)
    models: tuple[Model, ...] = tuple(Model)
    repeats: int = 15
    pool_slots: int = 20_000
    memory_slots: int = 1_000_000
    """Of the pools whose memory is compared; 0 leaves it out."""
    timeout_s: float = 120.0
    """For one answer of a worker."""

    def __post_init__(self) -> None:
        for script in (self.peer_script, self.peer_memory_script):
            if not script.is_file():
                raise ConfigError(
                    f"the peer's side of the comparison, {script}, is missing: it is a part of aiokv's source tree, "
                    "not of the installed package; run this in a checkout"
                )
        if not (self.blocks and self.operations and self.models):
            raise ConfigError("nothing was asked for")
        if self.memory_slots < 0:
            raise ConfigError(f"a pool of {self.memory_slots} slots is none")
        if unknown := [operation.value for operation in self.operations if operation not in FLOORS]:
            known = ", ".join(operation.value for operation in FLOORS)
            raise ConfigError(f"{unknown[0]} is not compared, only {known}")

    @property
    def peer_memory_script(self) -> Path:
        """The peer's side of the comparison of memory, beside the other one."""
        return self.peer_script.with_name("peer_memory.py")

    @property
    def peer_environment(self) -> dict[str, str]:
        """This process's, without what leads the peer's interpreter to our modules; it asks nobody on the network."""
        kept = {name: value for name, value in os.environ.items() if name not in _DISTURBING}
        return {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


def pinnable_core() -> int | None:
    """The core that both workers run on, one that this process may use; none where processes cannot be pinned."""
    return max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
