"""What this machine offers, read from the system as plain facts. `aiokv.cli.diagnosis` judges them.

Files are read under a root directory, so that a test can lay out any machine. What cannot be read is absent, not an
error: containers hide parts of `/proc` and `/sys`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, final

from aiokv.backends.cuda_versions import as_text
from aiokv.backends.host_memory import HostMemory, read_host_memory

__all__ = ["PACKAGES", "Machine", "read_cuda_driver", "read_machine"]

PACKAGES: Final = ("torch", "uvloop", "cuda-bindings")
"""The installed versions of these are reported."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(HostMemory):
    """Facts, those of its memory among them. No driver: `None`. `packages` holds what is installed only."""

    system: str
    architecture: str
    python: str
    cpus: int
    numa_nodes: int
    cuda_driver: str | None
    gpus: int
    packages: Mapping[str, str]


def read_cuda_driver() -> str | None:
    """The CUDA version the installed driver supports, such as "12.9"; asking it neither initialises nor uses a GPU."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int(0)
        status = library.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # no such library, or one without the entry
        return None
    return as_text(number.value) if status == 0 else None


def read_machine(*, root: Path = Path("/"), cuda_driver: Callable[[], str | None] = read_cuda_driver) -> Machine:
    """Read the facts below `root`; `cuda_driver` asks for the driver's version."""
    memory = read_host_memory(root=root)
    return Machine(
        **{fact.name: getattr(memory, fact.name) for fact in fields(memory)},
        system=platform.system(),
        architecture=platform.machine(),
        python=platform.python_version(),
        cpus=_count_cpus(),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or 1,
        cuda_driver=cuda_driver(),
        gpus=len(list((root / "proc/driver/nvidia/gpus").glob("*"))),
        packages=_read_packages(),
    )


def _count_cpus() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    else:  # a separate branch, which the type checker skips on Linux
        return os.cpu_count() or 1


def _read_packages() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
