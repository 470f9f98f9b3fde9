"""Memory near the GPU: pages lie on the node of the thread that touches them first, and pinned ones cannot move.

So the thread that touches and registers runs on the CPUs of the GPU's node. This needs no privilege, which `mbind` does
in many containers, and leaves a policy alone that the operator has set for the process (`numactl`).
"""

from __future__ import annotations

import logging
import os
import re
import sys
from pathlib import Path
from typing import Final

__all__ = ["find_cpus", "run_on_node"]

_log = logging.getLogger(__name__)

_NODES: Final = "sys/devices/system/node"


def run_on_node(node: int | None, *, root: Path = Path("/")) -> bool:
    """Let the calling thread run on the CPUs of `node` only, from now on; whether it does.

    Nothing is changed where the node is unknown or the only one, has no CPU, or has none that this process may use.
    """
    if sys.platform != "linux" or node is None or len(list((root / _NODES).glob("node[0-9]*"))) <= 1:
        return False
    cpus = find_cpus(node, root=root) & os.sched_getaffinity(0)
    if not cpus:
        _log.info("NUMA node %d has no CPU for this process: the CPU arena lies where its pages fall", node)
        return False
    try:
        os.sched_setaffinity(0, cpus)  # of this thread
    except OSError as error:
        _log.info("cannot run on NUMA node %d (%s): the CPU arena lies where its pages fall", node, error)
        return False
    return True


def find_cpus(node: int, *, root: Path = Path("/")) -> frozenset[int]:
    """The CPUs of a node, as the system lists them ("0-3,8"); none for a node that is not there."""
    try:
        text = (root / _NODES / f"node{node}" / "cpulist").read_text(encoding="ascii")
    except (OSError, ValueError):
        return frozenset()
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(cpu for first, last in ranges for cpu in range(int(first), int(last or first) + 1))
