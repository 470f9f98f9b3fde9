"""What is fine, degraded and unusable."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from aiokv.cli.diagnosis import Finding, Level, diagnose, worst_level
from aiokv.cli.machine import Machine
from aiokv.model.plan import Checksum
from aiokv.model.sizes import format_bytes
from aiokv.runtime.config_file import Settings, parse_bytes

MIB = 1024**2
GIB = 1024**3
LAPTOP = Machine(
    system="Linux",
    architecture="x86_64",
    python="3.11.7",
    cpus=8,
    memory_total=16 * GIB,
    memory_available=12 * GIB,
    memory_limit=None,
    memlock_limit=8 * 1024**2,
    transparent_huge_pages="madvise",
    huge_pages_free=0,
    huge_page_size=2 * 1024**2,
    numa_nodes=1,
    cuda_driver=None,
    gpus=0,
    packages={"torch": "2.13.0", "uvloop": "0.23.0"},
)
SERVER = replace(
    LAPTOP,
    cuda_driver="13.0",
    gpus=8,
    numa_nodes=2,
    transparent_huge_pages="never",
    packages={"torch": "2.13.0", "uvloop": "0.23.0", "cuda-bindings": "12.9.10"},
)


def finding(machine: Machine, *, check: str, settings: Settings | None = None) -> Finding:
    (found,) = (one for one in diagnose(machine, settings=settings or Settings()) if one.check == check)
    return found


@pytest.mark.parametrize(
    ("backend", "level"), [("cuda", Level.UNUSABLE), ("auto", Level.DEGRADED), ("host", Level.FINE)]
)
def test_a_driver_that_is_too_old_counts_where_it_is_wanted(backend: str, level: Level) -> None:
    found = finding(replace(SERVER, cuda_driver="11.8"), check="CUDA driver", settings=Settings(backend=backend))
    assert found.level is level
    assert any("12.0" in line for line in found.advice) is (level is not Level.FINE)


def level(machine: Machine, *, settings: Settings | None = None) -> Level:
    return worst_level(diagnose(machine, settings=settings or Settings()))


@pytest.mark.parametrize("backend", ["auto", "host"])
def test_a_laptop_without_gpu_is_fine(backend: str) -> None:
    assert level(LAPTOP, settings=Settings(backend=backend)) is Level.FINE


def test_cuda_without_a_driver_is_unusable() -> None:
    settings = Settings(backend="cuda")
    assert level(LAPTOP, settings=settings) is Level.UNUSABLE
    assert "NVIDIA driver" in finding(LAPTOP, check="CUDA driver", settings=settings).advice[0]


@pytest.mark.parametrize("backend", ["auto", "cuda", "host"])
def test_a_cuda_server_is_fine(backend: str) -> None:
    assert level(SERVER, settings=Settings(backend=backend)) is Level.FINE


@pytest.mark.parametrize("version", [None, "12.9.9", "12.8", "14.0.0", "nonsense"])
@pytest.mark.parametrize(
    ("backend", "expected"), [("auto", Level.DEGRADED), ("cuda", Level.UNUSABLE), ("host", Level.FINE)]
)
def test_a_driver_without_fitting_bindings(version: str | None, backend: str, expected: Level) -> None:
    packages = {"torch": "2.13.0", "uvloop": "0.23.0"} | ({} if version is None else {"cuda-bindings": version})
    machine = replace(SERVER, packages=packages)
    settings = Settings(backend=backend)
    assert level(machine, settings=settings) is expected
    if expected is not Level.FINE:
        assert "aiokv[cuda]" in finding(machine, check="cuda-bindings", settings=settings).advice[0]


@pytest.mark.parametrize("version", ["12.9.10", "12.9.10.post1", "13.0.3", "13.2.0"])
def test_fitting_bindings_are_fine(version: str) -> None:
    assert level(replace(SERVER, packages={**SERVER.packages, "cuda-bindings": version})) is Level.FINE


def test_without_torch_it_is_unusable_and_without_uvloop_degraded() -> None:
    assert level(replace(LAPTOP, packages={"uvloop": "0.23.0"})) is Level.UNUSABLE
    assert level(replace(LAPTOP, packages={"torch": "2.13.0"})) is Level.DEGRADED


def test_windows_is_sent_to_wsl() -> None:
    found = finding(replace(LAPTOP, system="Windows"), check="system")
    assert (found.level, found.advice) == (Level.UNUSABLE, ("use WSL2",))


def test_another_system_is_fine_but_says_that_it_is_not_tested() -> None:
    machine = replace(LAPTOP, system="Darwin", architecture="arm64", memory_total=0, memory_available=0)
    assert level(machine, settings=Settings(cpu_bytes=GIB)) is Level.FINE
    assert "tested" in finding(machine, check="system").advice[0]


@pytest.mark.parametrize(
    ("cpu_bytes", "limit", "expected"),
    [
        (8 * GIB, None, Level.FINE),
        (None, GIB, Level.FINE),
        (int(12.5 * GIB), None, Level.DEGRADED),  # more than is available now
        (17 * GIB, None, Level.UNUSABLE),  # more than there is
        (3 * GIB, 4 * GIB, Level.FINE),
        (int(3.5 * GIB), 4 * GIB, Level.DEGRADED),
        (5 * GIB, 4 * GIB, Level.UNUSABLE),
    ],
)
def test_the_cpu_pool_is_held_against_the_memory_it_may_use(
    cpu_bytes: int | None, limit: int | None, expected: Level
) -> None:
    machine = replace(LAPTOP, memory_limit=limit)
    found = finding(machine, check="memory", settings=Settings(cpu_bytes=cpu_bytes))
    assert found.level is expected
    assert bool(found.advice) is (expected is not Level.FINE)


def test_what_does_not_fit_beside_what_runs_now_is_degraded_and_says_what_is_short() -> None:
    machine = replace(LAPTOP, memory_limit=8 * GIB, memory_left=2 * GIB)
    found = finding(machine, check="memory", settings=Settings(cpu_bytes=4 * GIB))
    assert found.level is Level.DEGRADED
    (advice,) = found.advice
    assert "the room left in the cgroup, 2 GiB, over which a runtime refuses to open; or free memory" in advice


@pytest.mark.parametrize(
    ("machine", "origin"),
    [
        (LAPTOP, "80 % of the machine's memory, 16 GiB; the rest is for the model and this process"),
        (
            replace(LAPTOP, memory_limit=4 * GIB),
            "80 % of the cgroup's memory limit, 4 GiB; the rest is for the model and this process; or raise that limit",
        ),
    ],
    ids=["machine", "cgroup"],
)
@pytest.mark.parametrize(
    ("settings", "unit"),
    [(Settings(cpu_blocks=32_768), "cpu_blocks"), (Settings(cpu_bytes=64 * GIB), "cpu_bytes")],
    ids=["blocks", "bytes"],
)
def test_what_never_fits_is_told_with_the_limit_and_its_share_in_the_unit_that_was_given(
    machine: Machine, origin: str, settings: Settings, unit: str
) -> None:
    found = memory_finding(machine, settings=settings)
    assert found.level is Level.UNUSABLE
    assert found.advice[0].startswith(f"set {unit} to at most ")
    assert found.advice[0].endswith(f": {origin}")


@pytest.mark.parametrize(
    "machine",
    [
        LAPTOP,
        replace(LAPTOP, memory_available=14 * GIB, swap_free=4 * GIB),
        replace(LAPTOP, memory_available=2 * GIB, swap_free=4 * GIB),
        replace(LAPTOP, memory_limit=4 * GIB, memory_left=GIB),
        replace(LAPTOP, memory_available=15 * GIB, commit_left=5 * GIB),
        replace(LAPTOP, memory_total=0, memory_available=0, memory_limit=3 * GIB),
    ],
    ids=["now", "share", "swap", "cgroup", "commit", "cgroup alone"],
)
@pytest.mark.parametrize(
    "settings",
    [
        Settings(cpu_blocks=2**31 - 1),
        Settings(cpu_blocks=7_000, checksum=Checksum.FULL),
        Settings(cpu_bytes=2**63 - 1),
        Settings(cpu_bytes=14 * GIB + 1),
    ],
    ids=["most blocks", "some blocks", "most bytes", "some bytes"],
)
def test_a_pool_made_as_small_as_advised_is_fine_and_a_larger_one_is_not(machine: Machine, settings: Settings) -> None:
    found = memory_finding(machine, settings=settings)
    assert found.level is not Level.FINE
    taken = [taken_from(advice, of=settings) for advice in found.advice]
    assert taken == sorted(taken, reverse=True, key=lambda one: (one.cpu_blocks, one.cpu_bytes))
    assert memory_finding(machine, settings=taken[-1]).level is Level.FINE
    assert memory_finding(machine, settings=one_more(taken[-1])).level is not Level.FINE


def test_where_there_is_no_room_for_a_pool_it_is_to_be_left_out() -> None:
    machine = replace(LAPTOP, memory_available=1_000)
    assert memory_finding(machine, settings=Settings(cpu_blocks=1)).advice[0].startswith("leave the CPU pool out: ")
    found = memory_finding(machine, settings=Settings(cpu_bytes=GIB))
    assert found.advice[0].startswith("leave the CPU pool out: the memory available now, 1000 B")


def memory_finding(machine: Machine, *, settings: Settings) -> Finding:
    """With blocks of 2 MiB."""
    (found,) = (f for f in diagnose(machine, settings=settings, block_bytes=2 * MIB) if f.check == "memory")
    return found


def taken_from(advice: str, *, of: Settings) -> Settings:
    """The settings with the size that the advice names, read as an operator would type it."""
    match = re.match(r'set (cpu_\w+) to at most "?(\w+)"?', advice)
    assert match, advice
    other = dict.fromkeys(("cpu_blocks", "cpu_bytes"))
    return replace(of, **(other | {match[1]: parse_bytes(match[2])}))  # type: ignore[arg-type]  # one of the two fields


def one_more(settings: Settings) -> Settings:
    """A block or a block's bytes more."""
    if settings.cpu_blocks is not None:
        return replace(settings, cpu_blocks=settings.cpu_blocks + 1)
    return replace(settings, cpu_bytes=(settings.cpu_bytes or 0) + 2 * MIB)


def test_a_pool_given_in_blocks_is_held_against_memory_once_a_block_has_a_size() -> None:
    settings = Settings(cpu_blocks=1024)
    unknown = finding(LAPTOP, check="memory", settings=settings)
    assert (unknown.level, unknown.advice) == (
        Level.FINE,
        ("give --block-bytes, the size of a block of your model",),
    )
    assert "whether 1,024 CPU blocks fit is unknown" in unknown.found
    (found,) = (f for f in diagnose(LAPTOP, settings=settings, block_bytes=GIB) if f.check == "memory")
    assert found.level is Level.UNUSABLE


def test_the_calls_that_pin_the_pool_are_told_where_cuda_is_used() -> None:
    big = replace(SERVER, memory_total=1024 * GIB, memory_available=1000 * GIB)
    settings = Settings(cpu_bytes=500 * GIB)
    found = finding(big, check="pinned memory", settings=settings)
    assert (found.level, found.advice) == (Level.FINE, ())
    assert "8 calls of at most 64 GiB" in found.found
    assert finding(LAPTOP, check="pinned memory", settings=settings).found == "not needed without CUDA"
    assert "no CPU pool" in finding(big, check="pinned memory").found


def test_blocks_that_no_registration_can_hold_are_degraded() -> None:
    big = replace(SERVER, memory_total=4096 * GIB, memory_available=4000 * GIB)
    findings = diagnose(big, settings=Settings(cpu_bytes=2048 * GIB), block_bytes=GIB + 1)
    (found,) = (f for f in findings if f.check == "pinned memory")
    assert found.level is Level.DEGRADED
    assert found.advice


@pytest.mark.parametrize("check", ["memlock", "huge pages", "NUMA"])
def test_what_only_cuda_gains_from_is_advised_to_cuda_machines_only(check: str) -> None:
    assert finding(SERVER, check=check).advice
    host = finding(SERVER, check=check, settings=Settings(backend="host"))
    assert (host.level, host.advice) == (Level.FINE, ())


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 * GIB, "8 GiB"), (2**42, "4 TiB")]
)
def test_sizes_are_shown_for_people(size: int, text: str) -> None:
    assert format_bytes(size) == text
