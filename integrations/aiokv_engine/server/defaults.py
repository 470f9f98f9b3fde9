"""What is served with where nobody says otherwise. Apart, as the command is described before torch is imported."""

from __future__ import annotations

from typing import Final

__all__ = ["CPU_BLOCKS", "GPU_BLOCKS", "GRACE_S", "HOST", "MAX_QUEUE", "PORT"]

HOST: Final = "127.0.0.1"
PORT: Final = 8000
GPU_BLOCKS: Final = 512
CPU_BLOCKS: Final = 1024
MAX_QUEUE: Final = 256
"""How many prompts wait."""
GRACE_S: Final = 30.0
"""How long running requests may go on after the first signal."""
