"""What this machine offers, read from the system as plain facts. `aiokv.cli.diagnosis` judges them.

Files are read under a root directory, so that a test can lay out any machine. What cannot be read is absent, not an
error: containers hide parts of `/proc` and `/sys`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, final

__all__ = ["PACKAGES", "Machine", "read_cuda_driver", "read_machine"]

PACKAGES: Final = ("torch", "uvloop", "cuda-bindings")
"""The installed versions of these are reported."""

_NO_LIMIT_V1: Final = 2**60  # cgroup v1 writes "no limit" as a number near 2**63, rounded to pages


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts; sizes in bytes. `None` where there is no limit, or no driver. `packages` holds what is installed only."""

    system: str
    architecture: str
    python: str
    cpus: int
    memory_total: int
    memory_available: int
    memory_limit: int | None
    memlock_limit: int | None
    transparent_huge_pages: str
    huge_pages_free: int
    huge_page_size: int
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
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if status == 0 else None


def read_machine(*, root: Path = Path("/"), cuda_driver: Callable[[], str | None] = read_cuda_driver) -> Machine:
    """Read the facts below `root`; `cuda_driver` asks for the driver's version."""
    meminfo = _read_meminfo(root / "proc/meminfo")
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=platform.python_version(),
        cpus=_count_cpus(),
        memory_total=meminfo.get("MemTotal", 0),
        memory_available=meminfo.get("MemAvailable", 0),
        memory_limit=_read_memory_limit(root),
        memlock_limit=_read_memlock_limit(),
        transparent_huge_pages=_read_transparent_huge_pages(root),
        huge_pages_free=meminfo.get("HugePages_Free", 0),
        huge_page_size=meminfo.get("Hugepagesize", 0),
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


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_meminfo(path: Path) -> dict[str, int]:
    """Sizes in bytes; counts, which carry no unit, as they are."""
    lines = re.findall(r"^(\w+):\s+(\d+)( kB)?$", _read_text(path), re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in lines}


def _read_transparent_huge_pages(root: Path) -> str:
    chosen = re.search(r"\[(\w+)\]", _read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return chosen[1] if chosen else "unavailable"


def _read_memlock_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _read_memory_limit(root: Path) -> int | None:
    """The smallest memory limit of this process's control group and those around it, version 2 or 1."""
    texts = [_read_text(path).strip() for path in _limit_files(root)]
    limits = [int(text) for text in texts if text.isdecimal()]
    return min((limit for limit in limits if limit < _NO_LIMIT_V1), default=None)


def _limit_files(root: Path) -> Iterable[Path]:
    mount = root / "sys/fs/cgroup"
    yield from (mount / "memory.max", mount / "memory/memory.limit_in_bytes")
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        parts = Path(group).parts[1:]
        yield from (base.joinpath(*parts[:depth], name) for depth in range(1, len(parts) + 1))


def _read_packages() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
