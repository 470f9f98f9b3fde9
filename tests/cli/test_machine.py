"""The facts of a machine are read from `/proc` and `/sys`, whatever of them is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiokv.cli.machine import read_cuda_driver, read_machine

GIB = 1024**3
MEMINFO = """MemTotal:       16777216 kB
MemAvailable:    8388608 kB
HugePages_Total:      12
HugePages_Free:       10
Hugepagesize:       2048 kB
"""


def lay_out(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def no_driver() -> str | None:
    return None


def limit_of(root: Path) -> int | None:
    return read_machine(root=root, cuda_driver=no_driver).memory_limit


def test_a_full_machine_is_read(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        proc__meminfo=MEMINFO,
        sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n",
        sys__devices__system__node__node0__cpulist="0-3",
        sys__devices__system__node__node1__cpulist="4-7",
        proc__driver__nvidia__gpus__a__information="Model: H200",
    )
    machine = read_machine(root=tmp_path, cuda_driver=lambda: "12.9")
    assert (machine.memory_total, machine.memory_available) == (16 * GIB, 8 * GIB)
    assert (machine.huge_pages_free, machine.huge_page_size) == (10, 2 * 1024**2)
    assert machine.transparent_huge_pages == "madvise"
    assert machine.numa_nodes == 2
    assert (machine.cuda_driver, machine.gpus) == ("12.9", 1)
    assert machine.cpus >= 1
    assert "torch" in machine.packages


def test_an_empty_root_gives_facts_and_no_error(tmp_path: Path) -> None:
    machine = read_machine(root=tmp_path, cuda_driver=no_driver)
    assert (machine.memory_total, machine.memory_limit, machine.numa_nodes, machine.gpus) == (0, None, 1, 0)
    assert machine.transparent_huge_pages == "unavailable"


def test_this_machine_can_be_read() -> None:
    assert read_machine(cuda_driver=no_driver).cpus >= 1


def test_the_smallest_limit_on_the_way_to_the_group_binds(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        proc__self__cgroup="0::/outer/inner\n",
        sys__fs__cgroup__memory_max="ignored: not the file's name",
    )
    group = tmp_path / "sys/fs/cgroup/outer"
    (group / "inner").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    (group / "memory.max").write_text(f"{4 * GIB}\n")
    (group / "inner/memory.max").write_text(f"{6 * GIB}\n")
    assert limit_of(tmp_path) == 4 * GIB


def test_in_a_container_the_limit_lies_at_the_mount(tmp_path: Path) -> None:
    lay_out(tmp_path, proc__self__cgroup="0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{2 * GIB}\n")
    assert limit_of(tmp_path) == 2 * GIB


@pytest.mark.parametrize(("text", "limit"), [(str(3 * GIB), 3 * GIB), ("9223372036854771712", None), ("", None)])
def test_version_1_groups_are_read(tmp_path: Path, text: str, limit: int | None) -> None:
    lay_out(tmp_path, proc__self__cgroup="4:memory:/job\n3:cpu,cpuacct:/job\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(text)
    assert limit_of(tmp_path) == limit


def test_the_driver_is_asked_without_an_error_where_there_is_none() -> None:
    version = read_cuda_driver()
    assert version is None or version.partition(".")[0].isdecimal()
