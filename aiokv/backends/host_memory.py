"""What the system says of its memory, as plain facts. `aiokv.backends.memory_plan` holds a plan against them.

Files are read under a root directory, so that a test can lay out any machine. What cannot be read is absent, not an
error: containers hide parts of `/proc` and `/sys`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

__all__ = ["HostMemory", "read_host_memory", "read_text"]

_NO_LIMIT_V1: Final = 2**60  # cgroup v1 writes "no limit" as a number near 2**63, rounded to pages
_NEVER_OVERCOMMIT: Final = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Facts; sizes in bytes, 0 for what the system does not say, `None` where there is no limit."""

    memory_total: int
    memory_available: int
    memory_limit: int | None
    """Of the control groups around this process, the least."""
    memory_left: int | None = None
    """What the fullest of them still takes, page cache that it can give back not counted as used."""
    swap_free: int = 0
    commit_left: int | None = None
    """What may still be mapped, where the system promises no more than it has (`vm.overcommit_memory=2`)."""
    memlock_limit: int | None
    shm_free: int | None = None
    """Of `/dev/shm`; `None` where there is none."""
    transparent_huge_pages: str
    huge_pages_free: int
    huge_page_size: int


class _Group(NamedTuple):
    """One memory control group; `left` may be negative."""

    limit: int
    left: int


class _Files(NamedTuple):
    """How the files of a control group are called, in version 2 or 1."""

    limit: str
    usage: str
    reclaimable: str


_V2: Final = _Files("memory.max", "memory.current", "inactive_file")
_V1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def read_host_memory(*, root: Path = Path("/")) -> HostMemory:
    """Read the facts below `root`, in some tenths of a millisecond."""
    meminfo = _read_meminfo(root / "proc/meminfo")
    groups = list(_read_groups(root))
    return HostMemory(
        memory_total=meminfo.get("MemTotal", 0),
        memory_available=meminfo.get("MemAvailable", 0),
        memory_limit=min((group.limit for group in groups), default=None),
        memory_left=max(min(group.left for group in groups), 0) if groups else None,
        swap_free=meminfo.get("SwapFree", 0),
        commit_left=_find_commit_left(root, meminfo),
        memlock_limit=_read_memlock_limit(),
        shm_free=_read_shm_free(root / "dev/shm"),
        transparent_huge_pages=_read_transparent_huge_pages(root),
        huge_pages_free=meminfo.get("HugePages_Free", 0),
        huge_page_size=meminfo.get("Hugepagesize", 0),
    )


def read_text(path: Path) -> str:
    """The text of a file; empty if there is none to read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _read_meminfo(path: Path) -> dict[str, int]:
    """Sizes in bytes; counts, which carry no unit, as they are."""
    lines = re.findall(r"^(\w+):\s+(\d+)( kB)?$", read_text(path), re.MULTILINE)
    return {name: int(number) * (1024 if unit else 1) for name, number, unit in lines}


def _read_groups(root: Path) -> Iterator[_Group]:
    """Those that limit memory, of this process's control group and those around it."""
    for directory, files in _find_groups(root):
        limit = read_text(directory / files.limit).strip()
        if limit.isdecimal() and int(limit) < _NO_LIMIT_V1:
            usage = read_text(directory / files.usage).strip()
            stat = re.search(rf"^{files.reclaimable} (\d+)$", read_text(directory / "memory.stat"), re.MULTILINE)
            used = max(int(usage if usage.isdecimal() else 0) - int(stat[1] if stat else 0), 0)
            yield _Group(limit=int(limit), left=int(limit) - used)


def _find_groups(root: Path) -> Iterator[tuple[Path, _Files]]:
    mount = root / "sys/fs/cgroup"
    yield from ((mount, _V2), (mount / "memory", _V1))
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = (mount / "memory", _V1) if controllers else (mount, _V2)
        parts = Path(group).parts[1:]
        yield from ((base.joinpath(*parts[:depth]), files) for depth in range(1, len(parts) + 1))


def _find_commit_left(root: Path, meminfo: dict[str, int]) -> int | None:
    if read_text(root / "proc/sys/vm/overcommit_memory").strip() != _NEVER_OVERCOMMIT:
        return None
    return max(meminfo.get("CommitLimit", 0) - meminfo.get("Committed_AS", 0), 0)


def _read_memlock_limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _read_shm_free(path: Path) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _read_transparent_huge_pages(root: Path) -> str:
    chosen = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    return chosen[1] if chosen else "unavailable"
