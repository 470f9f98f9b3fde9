"""Limits and use of memory are read from whatever files of `/proc` and `/sys` are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiokv.backends.host_memory import read_host_memory

GIB = 1024**3


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def group_v2(directory: str, *, limit: str, usage: int, cache: int = 0) -> dict[str, str]:
    return {
        f"sys/fs/cgroup{directory}/memory.max": f"{limit}\n",
        f"sys/fs/cgroup{directory}/memory.current": f"{usage}\n",
        f"sys/fs/cgroup{directory}/memory.stat": f"anon 17\ninactive_file {cache}\nactive_file 3\n",
    }


def test_page_cache_that_can_be_given_back_is_not_counted_as_used(tmp_path: Path) -> None:
    lay_out(tmp_path, group_v2("", limit=f"{8 * GIB}", usage=7 * GIB, cache=4 * GIB))
    memory = read_host_memory(root=tmp_path)
    assert (memory.memory_limit, memory.memory_left) == (8 * GIB, 5 * GIB)


def test_the_group_that_is_fullest_says_what_is_left_and_the_tightest_what_the_limit_is(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {"proc/self/cgroup": "0::/outer/inner\n"}
        | group_v2("/outer", limit=f"{16 * GIB}", usage=15 * GIB)
        | group_v2("/outer/inner", limit=f"{8 * GIB}", usage=2 * GIB),
    )
    memory = read_host_memory(root=tmp_path)
    assert (memory.memory_limit, memory.memory_left) == (8 * GIB, 1 * GIB)


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    lay_out(tmp_path, group_v2("", limit=f"{GIB}", usage=2 * GIB))
    assert read_host_memory(root=tmp_path).memory_left == 0


def test_a_group_without_a_limit_limits_nothing(tmp_path: Path) -> None:
    lay_out(tmp_path, group_v2("", limit="max", usage=2 * GIB))
    memory = read_host_memory(root=tmp_path)
    assert (memory.memory_limit, memory.memory_left) == (None, None)


def test_version_1_groups_are_read(tmp_path: Path) -> None:
    lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        },
    )
    memory = read_host_memory(root=tmp_path)
    assert (memory.memory_limit, memory.memory_left) == (4 * GIB, 2 * GIB)


@pytest.mark.parametrize("usage", ["", "nonsense\n"])
def test_a_limit_counts_whole_where_nobody_says_what_is_used(tmp_path: Path, usage: str) -> None:
    lay_out(tmp_path, {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": usage})
    assert read_host_memory(root=tmp_path).memory_left == GIB


@pytest.mark.parametrize(("mode", "left"), [("0", None), ("1", None), ("2", 3 * GIB), ("", None)])
def test_only_strict_overcommit_limits_what_may_be_mapped(tmp_path: Path, mode: str, left: int | None) -> None:
    meminfo = f"CommitLimit: {8 * GIB // 1024} kB\nCommitted_AS: {5 * GIB // 1024} kB\nSwapFree: 2048 kB\n"
    lay_out(tmp_path, {"proc/meminfo": meminfo, "proc/sys/vm/overcommit_memory": f"{mode}\n"})
    memory = read_host_memory(root=tmp_path)
    assert memory.commit_left == left
    assert memory.swap_free == 2 * 1024**2


def test_shared_memory_is_measured_where_there_is_some(tmp_path: Path) -> None:
    assert read_host_memory(root=tmp_path).shm_free is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert (read_host_memory(root=tmp_path).shm_free or 0) > 0


def test_an_empty_root_gives_facts_and_no_error(tmp_path: Path) -> None:
    memory = read_host_memory(root=tmp_path)
    assert (memory.memory_total, memory.memory_limit, memory.commit_left) == (0, None, None)
