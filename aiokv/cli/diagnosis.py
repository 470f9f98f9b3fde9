"""What the facts of a machine mean for aiokv: one finding per matter, each with advice where something can be better.

- *Unusable*: aiokv cannot run as configured. `backend="cuda"` on a machine without a driver is that.
- *Degraded*: it runs, but something that was paid for or asked for goes unused: a GPU nobody can reach, uvloop missing,
  a CPU pool that will be swapped or killed.
- *Fine*: the rest. A machine without a GPU is fine under `backend="auto"` or `"host"`. Limits that do not bind the
  CUDA driver (memlock) and settings that only cost start-up time (huge pages) give advice but stay fine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import final

from aiokv.backends.chunks import MOST_BYTES_PER_CALL
from aiokv.backends.cuda_versions import OLDEST_DRIVER, are_bindings_supported, is_driver_supported
from aiokv.backends.memory_plan import LimitKind, MemoryPlan, Registration
from aiokv.cli.machine import Machine
from aiokv.cli.memory_advice import advise_smaller_pool, find_shortages
from aiokv.cli.memory_view import ArenaSize, find_arena_size, plan_settings
from aiokv.model.sizes import format_bytes
from aiokv.runtime.config_file import Settings

__all__ = ["Finding", "Level", "diagnose", "plan_machine", "worst_level"]


class Level(IntEnum):
    """How well a thing serves; the number is the exit status of `aiokv doctor`."""

    FINE = 0
    DEGRADED = 1
    UNUSABLE = 2


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One matter: what was found, how it is judged, and what to change, if anything."""

    check: str
    level: Level
    found: str
    advice: tuple[str, ...] = ()


def diagnose(machine: Machine, *, settings: Settings, block_bytes: int | None = None) -> tuple[Finding, ...]:
    """Judge `machine` for a runtime with `settings`, whose blocks have so many bytes; pure."""
    plan = plan_machine(machine, settings=settings, block_bytes=block_bytes)
    return (
        _check_system(machine),
        _check_driver(machine, settings),
        _check_bindings(machine, settings),
        _check_torch(machine),
        _check_uvloop(machine),
        _check_memory(machine, plan, settings=settings, block_bytes=block_bytes),
        _check_pinned_memory(machine, settings, plan=plan),
        _check_memlock(machine, settings),
        _check_huge_pages(machine, settings),
        _check_numa(machine, settings),
    )


def plan_machine(machine: Machine, *, settings: Settings, block_bytes: int | None = None) -> MemoryPlan:
    """What a runtime with `settings` takes of this machine's memory."""
    registration = Registration.PINNED if _wants_cuda(machine, settings) else Registration.NONE
    return plan_settings(settings, machine, registration=registration, block_bytes=block_bytes)


def worst_level(findings: Iterable[Finding]) -> Level:
    """The level of the whole: that of its worst finding."""
    return max((finding.level for finding in findings), default=Level.FINE)


def _check_system(machine: Machine) -> Finding:
    found = f"{machine.system} {machine.architecture}, Python {machine.python}, {machine.cpus} CPUs"
    if machine.system == "Windows":
        return Finding(check="system", level=Level.UNUSABLE, found=found, advice=("use WSL2",))
    if machine.system != "Linux" or machine.architecture not in ("x86_64", "AMD64"):
        return Finding(check="system", level=Level.FINE, found=found, advice=("only Linux x86-64 is tested",))
    return Finding(check="system", level=Level.FINE, found=found)


def _check_driver(machine: Machine, settings: Settings) -> Finding:
    if machine.cuda_driver is not None:
        found = f"supports CUDA {machine.cuda_driver}, {machine.gpus} GPUs visible to the kernel driver"
        if _wants_cuda(machine, settings) and not is_driver_supported(machine.cuda_driver):
            level = Level.UNUSABLE if settings.backend == "cuda" else Level.DEGRADED
            advice = (f"install a driver for CUDA {OLDEST_DRIVER} or newer, or use backend 'host'",)
            return Finding(check="CUDA driver", level=level, found=found, advice=advice)
        unused = ("backend 'host' leaves it unused",) if settings.backend == "host" else ()
        return Finding(check="CUDA driver", level=Level.FINE, found=found, advice=unused)
    if settings.backend == "cuda":
        advice = ("install the NVIDIA driver, or use backend 'auto' or 'host'",)
        return Finding(check="CUDA driver", level=Level.UNUSABLE, found="none", advice=advice)
    return Finding(check="CUDA driver", level=Level.FINE, found="none: the host backend is used")


def _check_bindings(machine: Machine, settings: Settings) -> Finding:
    installed = machine.packages.get("cuda-bindings")
    if not _wants_cuda(machine, settings):
        return Finding(check="cuda-bindings", level=Level.FINE, found=installed or "not installed, not needed")
    level = Level.UNUSABLE if settings.backend == "cuda" else Level.DEGRADED
    advice = ("pip install 'aiokv[cuda]'",)
    if installed is None:
        return Finding(check="cuda-bindings", level=level, found="not installed", advice=advice)
    if not are_bindings_supported(installed):
        return Finding(check="cuda-bindings", level=level, found=f"{installed}, outside 12.9.10 to 13", advice=advice)
    return Finding(check="cuda-bindings", level=Level.FINE, found=installed)


def _check_torch(machine: Machine) -> Finding:
    installed = machine.packages.get("torch")
    if installed is None:
        return Finding(check="torch", level=Level.UNUSABLE, found="not installed", advice=("pip install torch",))
    return Finding(check="torch", level=Level.FINE, found=installed)


def _check_uvloop(machine: Machine) -> Finding:
    installed = machine.packages.get("uvloop")
    if installed is None and machine.system != "Windows":
        advice = ("pip install uvloop: the recommended event loop",)
        return Finding(check="uvloop", level=Level.DEGRADED, found="not installed", advice=advice)
    return Finding(check="uvloop", level=Level.FINE, found=installed or "not made for Windows")


def _check_memory(machine: Machine, plan: MemoryPlan, *, settings: Settings, block_bytes: int | None) -> Finding:
    limit = "no cgroup limit" if machine.memory_limit is None else f"cgroup limit {format_bytes(machine.memory_limit)}"
    found = f"{format_bytes(machine.memory_total)}, {format_bytes(machine.memory_available)} available, {limit}"
    if find_arena_size(settings, block_bytes=block_bytes) is ArenaSize.UNKNOWN:
        unknown = ("give --block-bytes, the size of a block of your model",)
        found = f"{found}; whether {settings.cpu_blocks:,} CPU blocks fit is unknown"
        return Finding(check="memory", level=Level.FINE, found=found, advice=unknown)
    if not plan.arena_bytes:
        return Finding(check="memory", level=Level.FINE, found=found)
    level = Level.UNUSABLE if plan.broken(LimitKind.FIXED) else Level.DEGRADED
    advice = tuple(
        advise_smaller_pool(room, machine, settings=settings, block_bytes=block_bytes)
        for room in find_shortages(plan, machine)
    )
    found = f"{found}; the pools take {format_bytes(plan.total_bytes)}"
    return Finding(check="memory", level=level if advice else Level.FINE, found=found, advice=advice)


def _check_pinned_memory(machine: Machine, settings: Settings, *, plan: MemoryPlan) -> Finding:
    if not _wants_cuda(machine, settings):
        return Finding(check="pinned memory", level=Level.FINE, found="not needed without CUDA")
    if plan.chunks is None:
        return Finding(check="pinned memory", level=Level.FINE, found="no CPU pool of a known size to pin")
    calls, largest = plan.chunks.count, format_bytes(plan.chunks.largest_bytes)
    found = f"{format_bytes(plan.arena_bytes)} are registered in the background: {calls} calls of at most {largest}"
    if any(limit.allowed == MOST_BYTES_PER_CALL for limit in plan.broken(LimitKind.PINNING)):
        advice = ("one call of 512 GiB or more fails, so that the pool stays unpinned: its blocks are too large",)
        return Finding(check="pinned memory", level=Level.DEGRADED, found=found, advice=advice)
    return Finding(check="pinned memory", level=Level.FINE, found=found)


def _check_memlock(machine: Machine, settings: Settings) -> Finding:
    if machine.memlock_limit is None:
        return Finding(check="memlock", level=Level.FINE, found="unlimited")
    found = f"limit {format_bytes(machine.memlock_limit)}"
    if not _wants_cuda(machine, settings):
        return Finding(check="memlock", level=Level.FINE, found=f"{found}, not needed without CUDA")
    advice = ("if pinning the CPU pool fails, or for RDMA: ulimit -l unlimited",)
    return Finding(check="memlock", level=Level.FINE, found=found, advice=advice)


def _check_huge_pages(machine: Machine, settings: Settings) -> Finding:
    reserved = f"{machine.huge_pages_free} free of {format_bytes(machine.huge_page_size)} reserved ones, not used"
    found = f"transparent: {machine.transparent_huge_pages}; {reserved}"
    if machine.transparent_huge_pages == "never" and _wants_cuda(machine, settings):
        advice = ("pinning a large CPU pool is faster with them: transparent_hugepage=madvise",)
        return Finding(check="huge pages", level=Level.FINE, found=found, advice=advice)
    return Finding(check="huge pages", level=Level.FINE, found=found)


def _check_numa(machine: Machine, settings: Settings) -> Finding:
    found = "1 node" if machine.numa_nodes == 1 else f"{machine.numa_nodes} nodes"
    if machine.numa_nodes > 1 and _wants_cuda(machine, settings):
        advice = ("the CPU pool is laid on the GPU's node: let the process run there (numactl), pinned pages stay put",)
        return Finding(check="NUMA", level=Level.FINE, found=found, advice=advice)
    return Finding(check="NUMA", level=Level.FINE, found=found)


def _wants_cuda(machine: Machine, settings: Settings) -> bool:
    return settings.backend == "cuda" or (settings.backend == "auto" and machine.cuda_driver is not None)
