"""The thread that touches memory runs on the GPU's node, where there is a choice."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from aiokv.backends.numa import find_cpus, run_on_node
from aiokv.backends.pinned import PinnedArena
from tests.backends.registrar import RecordingRegistrar
from tests.backends.support import GUARD_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NUMA nodes are read from Linux's /sys")


def machine(root: Path, *nodes: str) -> Path:
    for number, cpus in enumerate(nodes):
        directory = root / f"sys/devices/system/node/node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cpus}\n")
    return root


def affinity_after(node: int | None, root: Path) -> tuple[bool, set[int]]:
    """What a thread of its own may run on afterwards."""
    found: list[tuple[bool, set[int]]] = []
    thread = threading.Thread(target=lambda: found.append((run_on_node(node, root=root), os.sched_getaffinity(0))))
    thread.start()
    thread.join(GUARD_S)
    return found[0]


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3", {0, 1, 2, 3}), ("0-1,8,10-11", {0, 1, 8, 10, 11}), ("", set()), ("7", {7})]
)
def test_lists_of_cpus_are_read(tmp_path: Path, text: str, cpus: set[int]) -> None:
    assert find_cpus(0, root=machine(tmp_path, text)) == cpus
    assert find_cpus(5, root=tmp_path) == set()


def test_a_thread_runs_on_the_cpus_of_the_node_and_its_process_goes_on_everywhere(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    chosen = min(before)
    bound, cpus = affinity_after(1, machine(tmp_path, "9000", f"{chosen}"))
    assert (bound, cpus) == (True, {chosen})
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("node", "nodes"),
    [(None, ("0", "1")), (0, ("0",)), (1, ("0", "")), (1, ("0", "9000-9003")), (7, ("0", "1"))],
    ids=["unknown", "the only one", "without CPUs", "CPUs of others", "not there"],
)
def test_otherwise_nothing_is_changed(tmp_path: Path, node: int | None, nodes: tuple[str, ...]) -> None:
    bound, cpus = affinity_after(node, machine(tmp_path, *nodes))
    assert not bound
    assert cpus == os.sched_getaffinity(0)


def test_an_arena_is_touched_and_registered_on_the_node_of_its_gpu(tmp_path: Path) -> None:
    chosen = min(os.sched_getaffinity(0))
    registrar = RecordingRegistrar()
    root = machine(tmp_path, "9000", f"{chosen}")
    arena = PinnedArena(blocks=4, block_bytes=4096, registrar=registrar, node=1, root=root)
    done = threading.Event()
    arena.pinning.when_settled(done.set)
    assert done.wait(GUARD_S)
    assert registrar.cpus == [{chosen}]
    assert arena.close(deadline_s=GUARD_S)
