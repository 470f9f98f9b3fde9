"""Every count has one writer, the loop's thread: that is why reading needs no lock."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import pytest

from aiokv import KVRuntime, RuntimeConfig
from aiokv.observe.stats import Histogram, Stats
from tests.observe.support import Scrape
from tests.runtime.support import GEOMETRY, GROUP, prompt

LIBRARY = Path(__file__).parents[2] / "aiokv"
COUNTING = {"stats", "_stats", "counters"}


class WatchedDict(dict[Any, Any]):
    """Remembers which threads have written to it."""

    def __init__(self, values: dict[Any, Any], writers: set[int]) -> None:
        super().__init__(values)
        self.writers = writers

    def __setitem__(self, key: object, value: object) -> None:
        self.writers.add(threading.get_ident())
        super().__setitem__(key, value)

    def pop(self, key: object, default: object = None) -> object:
        self.writers.add(threading.get_ident())
        return super().pop(key, default)


class WatchedCounts(list[int]):
    """The buckets of a histogram, likewise."""

    def __init__(self, values: list[int], writers: set[int]) -> None:
        super().__init__(values)
        self.writers = writers

    def __setitem__(self, index: SupportsIndex | slice, value: int | Iterable[int]) -> None:
        self.writers.add(threading.get_ident())
        super().__setitem__(index, value)  # type: ignore[assignment, index]  # one signature for both overloads


def watch(counts: object, writers: set[int]) -> None:
    """Put watched values into every slot that holds a dictionary or a histogram."""
    for name in type(counts).__slots__:  # type: ignore[attr-defined]  # both classes have slots
        value = getattr(counts, name)
        if isinstance(value, Histogram):
            value.counts = WatchedCounts(value.counts, writers)
        elif isinstance(value, dict):
            for histogram in (inner for inner in value.values() if isinstance(inner, Histogram)):
                histogram.counts = WatchedCounts(histogram.counts, writers)
            setattr(counts, name, WatchedDict(value, writers))


async def test_only_the_loops_thread_counts_while_others_copy_and_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.get_running_loop().set_debug(False)
    writers: set[int] = set()
    stats = Stats()
    watch(stats, writers)
    monkeypatch.setattr("aiokv.runtime.opening.Stats", lambda: stats)
    tensor = np.zeros((9, 256), np.uint8)
    config = RuntimeConfig(geometry=GEOMETRY, gpu_blocks=9, cpu_blocks=16, watermark=0.0, backend="host")
    async with KVRuntime(config, arenas={GROUP: [tensor]}) as kv:
        watch(kv.core.counters, writers)
        for seed in range(24):
            async with kv.acquire(f"{seed}", prompt(3, seed=seed % 4)) as lease:
                lease.confirm(lease.num_tokens)
                await asyncio.to_thread(Scrape, kv.collector)
            await kv.drain()
        scrape = Scrape(kv.collector)
    assert writers == {threading.get_ident()}
    assert scrape("aiokv_transfer_blocks_total", direction="load", outcome="ok") > 0
    assert scrape.sum("aiokv_prompt_tokens_total") == 24 * 49
    assert not scrape.errors


def paths_of(node: ast.AST) -> list[str]:
    """The names along a target such as `self._stats.polls[result]`."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=name):
            return [*paths_of(value), name]
        case ast.Subscript(value=value):
            return paths_of(value)
        case _:
            return []


def writes(tree: ast.AST) -> Iterator[str]:
    """Every statement that stores into something reached through the counts, and every observation."""
    for node in ast.walk(tree):
        targets: list[ast.AST] = []
        match node:
            case ast.Assign():
                targets = list(node.targets)
            case ast.AugAssign() | ast.AnnAssign():
                targets = [node.target]
            case ast.Call(func=ast.Attribute(attr="observe" | "pop" | "update" | "clear")):
                targets = [node.func]
        for path in map(paths_of, targets):
            if COUNTING & set(path[:-1]):
                yield ".".join(path)


def test_only_the_core_and_the_runtime_write_counts() -> None:
    found: dict[str, list[str]] = {}
    for file in sorted(LIBRARY.rglob("*.py")):
        if written := list(writes(ast.parse(file.read_text(encoding="utf-8")))):
            found[file.relative_to(LIBRARY).as_posix()] = written
    outside = {name: written for name, written in found.items() if not name.startswith(("core/", "runtime/"))}
    assert outside == {
        "observe/checks.py": ["stats.check_due", "stats.violations"],  # called by the loop's thread
        "observe/metrics.py": ["view.stats.check_due"],  # the flag that asks for it
    }
    assert len(found) > len(outside), "the search finds what the core and the runtime write"
