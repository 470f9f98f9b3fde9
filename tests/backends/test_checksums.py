"""Checksums of CPU blocks: what each way of checking finds, which slots have one, and what a load says of the rest."""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv import Checksum
from aiokv.backends.arena import Layout
from aiokv.backends.base import EventStatus
from aiokv.backends.checksums import BlockChecksums, Digest, choose_digest
from aiokv.backends.host import HostBackend, HostFaults
from aiokv.model.ids import SlotArray
from tests.backends.support import GUARD_S, end_of, geometry_of, load, store

FULL, SAMPLED, OFF = Checksum.FULL, Checksum.SAMPLED, Checksum.OFF
DONE, CORRUPT, FAILED = EventStatus.DONE, EventStatus.CORRUPT, EventStatus.FAILED
PAGE: Final = 4096
BLOCKS: Final = 5
DIGESTS: Final = MappingProxyType({"crc32": zlib.crc32, "best": choose_digest()})


def slots_of(*slots: int) -> SlotArray:
    return np.array(slots, np.int32)


def arena_of(width: int, *, blocks: int = BLOCKS) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, size=(blocks, width), dtype=np.uint8)


def run(steps: Iterator[None]) -> int:
    return sum(1 for _ in steps)


def corrupt_of(checksums: BlockChecksums, slots: SlotArray, *, num_bytes: int) -> list[int]:
    found: list[int] = []
    run(checksums.compare(slots, num_bytes=num_bytes, corrupt=found))
    return found


@pytest.mark.parametrize("digest", DIGESTS.values(), ids=DIGESTS)
@given(data=st.data(), width=st.integers(1, 3 * PAGE), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_full_finds_any_single_wrong_bit_and_names_its_copy(
    digest: Digest, data: st.DataObject, width: int, bit: int
) -> None:
    rows = arena_of(width)
    checksums = BlockChecksums(rows, how=FULL, digest=digest)
    order = slots_of(*data.draw(st.permutations(range(BLOCKS))))
    run(checksums.record(order, num_bytes=width))
    assert corrupt_of(checksums, order, num_bytes=width) == []
    place = data.draw(st.integers(0, BLOCKS - 1))
    rows[order[place], data.draw(st.integers(0, width - 1))] ^= 1 << bit
    assert corrupt_of(checksums, order, num_bytes=width) == [place]


@pytest.mark.parametrize("how", [FULL, SAMPLED])
@pytest.mark.parametrize("width", [(1 << 20) + 1, 3 << 20])
def test_a_block_longer_than_a_step_is_checked_from_its_first_page_to_its_last(how: Checksum, width: int) -> None:
    rows = arena_of(width, blocks=2)
    checksums = BlockChecksums(rows, how=how, digest=zlib.crc32)
    steps = run(checksums.record(slots_of(1), num_bytes=width))
    assert steps >= (2 if how is FULL else 1), "one step is a millisecond, not a block"
    for page in (slice(0, PAGE), slice(PAGE << 7, (PAGE << 7) + PAGE), slice(width - PAGE, width)):
        rows[1, page] ^= 0xFF
        assert corrupt_of(checksums, slots_of(0, 1), num_bytes=width) == [1]
        rows[1, page] ^= 0xFF


@given(pages=st.integers(1, 70), start=st.integers(0, PAGE - 1), data=st.data())
@settings(max_examples=60)
def test_sampled_finds_any_page_that_has_changed_however_blocks_lie_in_pages(
    pages: int, start: int, data: st.DataObject
) -> None:
    width = start + pages * PAGE
    rows = arena_of(width, blocks=2)
    checksums = BlockChecksums(rows, how=SAMPLED, digest=zlib.crc32)
    run(checksums.record(slots_of(0, 1), num_bytes=width))
    page = data.draw(st.integers(0, pages - 1))
    rows[1, start + page * PAGE :][:PAGE] ^= 0xFF
    assert corrupt_of(checksums, slots_of(0, 1), num_bytes=width) == [1]


@pytest.mark.parametrize("width", [1, 63, 64, 65, 4096, 5000, 9 * PAGE])
@pytest.mark.parametrize("how", [FULL, SAMPLED])
def test_a_slot_that_holds_another_block_is_found(how: Checksum, width: int) -> None:
    rows = arena_of(width)
    rows[:, 0] = range(BLOCKS)
    checksums = BlockChecksums(rows, how=how, digest=choose_digest())
    every = slots_of(*range(BLOCKS))
    run(checksums.record(every, num_bytes=width))
    rows[[1, 3]] = rows[[3, 1]]
    assert corrupt_of(checksums, every, num_bytes=width) == [1, 3]


def test_sampled_misses_a_wrong_byte_between_its_pieces_and_full_does_not() -> None:
    """What the cheaper way costs, so that nobody takes it for the other."""
    found = {}
    for how in (SAMPLED, FULL):
        rows = arena_of(4 * PAGE)
        checksums = BlockChecksums(rows, how=how, digest=choose_digest())
        run(checksums.record(slots_of(2), num_bytes=4 * PAGE))
        rows[2, 64] ^= 1
        found[how] = corrupt_of(checksums, slots_of(2), num_bytes=4 * PAGE)
    assert found == {SAMPLED: [], FULL: [0]}


def test_bytes_behind_the_block_of_a_smaller_group_are_not_looked_at() -> None:
    rows = arena_of(100)
    checksums = BlockChecksums(rows, how=FULL, digest=choose_digest())
    run(checksums.record(slots_of(1), num_bytes=60))
    rows[1, 60:] = 0
    assert corrupt_of(checksums, slots_of(1), num_bytes=60) == []


def test_a_slot_without_a_checksum_is_not_checked() -> None:
    rows = arena_of(100)
    checksums = BlockChecksums(rows, how=FULL, digest=choose_digest())
    assert corrupt_of(checksums, slots_of(*range(BLOCKS)), num_bytes=100) == []
    run(checksums.record(slots_of(1, 2), num_bytes=100))
    rows[:] ^= 0xFF
    checksums.forget(slots_of(2, 3))
    assert corrupt_of(checksums, slots_of(*range(BLOCKS)), num_bytes=100) == [1]
    assert corrupt_of(checksums, slots_of(), num_bytes=100) == []


@pytest.mark.parametrize("how", [FULL, SAMPLED])
def test_many_small_blocks_go_in_steps(how: Checksum) -> None:
    rows = arena_of(256, blocks=1000)
    checksums = BlockChecksums(rows, how=how, digest=choose_digest())
    every = np.arange(1000, dtype=np.int32)
    assert run(checksums.record(every, num_bytes=256)) >= 7
    rows[[3, 998], :64] ^= 1
    assert corrupt_of(checksums, every, num_bytes=256) == [3, 998]


@pytest.mark.skipif(importlib.util.find_spec("xxhash") is None, reason="the package xxhash is not installed")
def test_xxh3_is_taken_where_it_is_installed() -> None:
    assert choose_digest() is importlib.import_module("xxhash").xxh3_64_intdigest


def test_without_xxhash_it_is_crc32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xxhash", None)
    assert choose_digest() is zlib.crc32


# In the copy thread.


class Rig:
    """Open host backends over two groups of different size; closes them."""

    def __init__(self) -> None:
        self.kv = arena_of(3 * PAGE, blocks=9)
        self.state = arena_of(100, blocks=9)
        self._backends: list[HostBackend] = []

    def open(self, how: Checksum, *, faults: HostFaults | None = None) -> HostBackend:
        backend = HostBackend(faults=faults)
        arenas: dict[str, Sequence[object]] = {"full": [self.kv], "r": [[self.state]]}
        layout = Layout(geometry=geometry_of(*arenas), gpu_blocks=9, cpu_blocks=6, arenas=arenas, checksum=how)
        backend.open(layout)
        self._backends.append(backend)
        return backend

    def end(self) -> None:
        for backend in self._backends:
            assert backend.close(deadline_s=GUARD_S)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.end()


@pytest.mark.parametrize("how", [FULL, SAMPLED])
def test_a_load_names_the_copies_whose_source_has_changed(rig: Rig, how: Checksum) -> None:
    backend = rig.open(how)
    assert end_of(backend.submit(store({1: 5, 2: 0, 3: 3, 4: 1}))) is DONE
    good = backend.submit(load({3: 1, 5: 2, 1: 3, 0: 4}))
    assert (end_of(good), good.corrupt_copies(), good.detail()) == (DONE, (), "")
    for slot in (5, 0):
        backend.cpu_slot(slot)[7] ^= 0x40
    bad = backend.submit(load({3: 1, 5: 2, 1: 3, 0: 4}))
    assert (end_of(bad), list(bad.corrupt_copies())) == (CORRUPT, [1, 3])
    assert "2 of 4 blocks" in bad.detail()


def test_off_takes_what_it_finds(rig: Rig) -> None:
    backend = rig.open(OFF)
    end_of(backend.submit(store({1: 5})))
    backend.cpu_slot(5)[:] ^= 0xFF
    assert end_of(backend.submit(load({5: 2}))) is DONE


def test_a_new_store_has_a_new_checksum_of_the_length_of_its_own_group(rig: Rig) -> None:
    backend = rig.open(FULL)
    end_of(backend.submit(store({1: 5})))
    backend.cpu_slot(5)[:] ^= 0xFF
    end_of(backend.submit(store({2: 5}, group="r")))
    assert end_of(backend.submit(load({5: 3}, group="r"))) is DONE
    backend.cpu_slot(5)[99] ^= 1
    assert end_of(backend.submit(load({5: 3}, group="r"))) is CORRUPT
    end_of(backend.submit(store({2: 5})))
    assert end_of(backend.submit(load({5: 4}))) is DONE


def test_a_store_that_failed_leaves_its_slots_without_a_checksum(rig: Rig) -> None:
    """Nobody can load them but by name, and what they hold is nobody's block."""
    backend = rig.open(FULL, faults=HostFaults(fail=frozenset({1})))
    end_of(backend.submit(store({1: 5})))
    assert end_of(backend.submit(store({2: 5}))) is FAILED
    assert end_of(backend.submit(load({5: 3}))) is DONE


def test_what_a_stray_write_does_after_a_store_is_found(rig: Rig) -> None:
    backend = rig.open(FULL, faults=HostFaults(corrupt=frozenset({0})))
    assert end_of(backend.submit(store({1: 4, 2: 5}))) is DONE
    event = backend.submit(load({5: 1, 4: 2}))
    assert (end_of(event), list(event.corrupt_copies())) == (CORRUPT, [1])


def test_an_empty_load_is_not_corrupt(rig: Rig) -> None:
    backend = rig.open(FULL)
    nothing: dict[int, int] = {}
    assert end_of(backend.submit(store(nothing))) is DONE
    assert end_of(backend.submit(load(nothing))) is DONE


def test_a_checksum_that_cannot_be_taken_fails_its_copy_and_not_the_thread(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(buffer: Any, begun: int) -> int:  # noqa: ANN401  # any buffer
        raise MemoryError(len(buffer) + begun)

    monkeypatch.setattr("aiokv.backends.host.choose_digest", lambda: broken)
    backend = rig.open(FULL)
    event = backend.submit(store({1: 5}))
    assert end_of(event) is FAILED
    assert "MemoryError" in event.detail()
    assert end_of(backend.submit(load({5: 2}))) is DONE, "it has no checksum"
