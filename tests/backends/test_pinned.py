"""A pinned arena: registered as a whole or not at all, in the background, and given back in any state."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from aiokv.backends.chunks import MOST_BYTES, MOST_BYTES_PER_CALL, cut_chunks
from aiokv.backends.pinned import PinnedArena
from aiokv.backends.pinning import NOTHING_TO_PIN
from aiokv.errors import ConfigError, UsageError
from aiokv.model.pinning import PinState, PinStatus
from tests.backends.registrar import RecordingRegistrar
from tests.backends.support import GUARD_S, give_way, wait_until

PAGE = mmap.PAGESIZE
BLOCKS, BLOCK_BYTES = 10, 3 * PAGE // 2
CHUNK = 4 * BLOCK_BYTES  # ends on a slot and on a page


def arena_of(registrar: RecordingRegistrar, *, blocks: int = BLOCKS) -> PinnedArena:
    return PinnedArena(blocks=blocks, block_bytes=BLOCK_BYTES, registrar=registrar, most_chunk_bytes=CHUNK)


def settle(arena: PinnedArena) -> PinStatus:
    done = threading.Event()
    arena.pinning.when_settled(done.set)
    assert done.wait(GUARD_S), "it never settled"
    return arena.pinning.status


@contextmanager
def paused(arena: PinnedArena) -> Iterator[threading.Event]:
    quiet = threading.Event()
    arena.pinning.pause(quiet.set)
    try:
        yield quiet
    finally:
        arena.pinning.resume()


def test_all_of_it_is_registered_in_chunks_by_a_thread_of_its_own() -> None:
    registrar = RecordingRegistrar()
    arena = arena_of(registrar)
    assert settle(arena) == PinStatus(
        state=PinState.PINNED, registered_bytes=BLOCKS * BLOCK_BYTES, total_bytes=BLOCKS * BLOCK_BYTES
    )
    starts = [arena.address + i * CHUNK for i in range(3)]
    assert registrar.registered == dict(zip(starts, (CHUNK, CHUNK, 2 * BLOCK_BYTES), strict=True))
    assert registrar.threads == {"aiokv-pin"}
    assert arena.close(deadline_s=GUARD_S)


def test_it_is_zero_and_exactly_as_long_as_its_blocks() -> None:
    registrar = RecordingRegistrar()
    arena = arena_of(registrar)
    settle(arena)
    assert arena.rows.shape == (BLOCKS, BLOCK_BYTES)
    assert arena.num_bytes == BLOCKS * BLOCK_BYTES == sum(registrar.registered.values())
    assert not arena.rows.any()
    arena.rows[3] = 7
    assert np.count_nonzero(arena.rows) == BLOCK_BYTES
    assert arena.close(deadline_s=GUARD_S)


def test_it_is_unregistered_in_reverse_when_it_is_closed() -> None:
    registrar = RecordingRegistrar()
    arena = arena_of(registrar)
    settle(arena)
    assert arena.close(deadline_s=GUARD_S)
    there = [address for what, address, _ in registrar.calls if what == "register"]
    back = [address for what, address, _ in registrar.calls if what == "unregister"]
    assert back == there[::-1]
    assert registrar.registered == {}
    assert arena.pinning.status.state is PinState.CLOSED
    calls = len(registrar.calls)
    assert arena.close(deadline_s=0.0), "closed twice"
    assert len(registrar.calls) == calls


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failed_chunk_takes_back_those_before_it(failing: int, caplog: pytest.LogCaptureFixture) -> None:
    registrar = RecordingRegistrar(fail={failing})
    with caplog.at_level(logging.INFO, logger="aiokv"):
        arena = arena_of(registrar)
        status = settle(arena)
    assert (status.state, status.registered_bytes) == (PinState.UNPINNED, 0)
    assert status.reason.startswith(f"chunk {failing + 1} of 3")
    assert "CUDA_ERROR_OUT_OF_MEMORY" in status.reason
    assert registrar.registered == {}
    back = [address for what, address, _ in registrar.calls if what == "unregister"]
    assert back == [arena.address + i * CHUNK for i in reversed(range(failing))]
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "it is said once"
    arena.rows[:] = 1  # unpinned memory works
    assert arena.close(deadline_s=GUARD_S)


@pytest.mark.skipif(sys.platform != "linux", reason="residency of pages is asked of Linux")
@pytest.mark.parametrize("fail", [set(), {0}, {2}])
def test_every_page_is_there_when_it_has_settled(fail: set[int]) -> None:
    """Unpinned as well: the first copies would wait for them otherwise."""
    arena = arena_of(RecordingRegistrar(fail=fail), blocks=64)
    settle(arena)
    assert are_resident(arena.address, arena.num_bytes)
    assert arena.close(deadline_s=GUARD_S)


def test_pauses_and_an_end_at_any_time_leave_nothing_registered_and_let_no_call_through() -> None:
    """Many arenas, each paused again and again by two threads and closed by a third."""
    intruded = 0
    for number in range(60):
        registrar = RecordingRegistrar(fail={number} if number % 3 == 0 else ())
        arena = arena_of(registrar, blocks=80)
        intruders: list[int] = []
        threads = [threading.Thread(target=pause_often, args=(arena, registrar, intruders)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(number):
            give_way()
        assert arena.close(deadline_s=GUARD_S)
        for thread in threads:
            thread.join(GUARD_S)
            assert not thread.is_alive()
        assert registrar.registered == {}
        assert arena.pinning.status.state is PinState.CLOSED
        intruded += sum(intruders)
    assert intruded == 0


def pause_often(arena: PinnedArena, registrar: RecordingRegistrar, intruders: list[int]) -> None:
    """Counts calls that began while everything was said to be quiet; closing is no call that a pause holds off."""
    for _ in range(20):
        with paused(arena) as quiet:
            assert quiet.wait(GUARD_S)
            before = registrar.begun
            give_way()
            intruders.append(registrar.begun - before)


def test_progress_is_told_chunk_by_chunk() -> None:
    registrar = RecordingRegistrar(gated=True)
    arena = arena_of(registrar)
    registrar.wait_inside()
    assert arena.pinning.status == PinStatus(state=PinState.PINNING, total_bytes=BLOCKS * BLOCK_BYTES)
    registrar.let()
    registrar.wait_inside()
    assert (arena.pinning.status.state, arena.pinning.status.registered_bytes) == (PinState.PINNING, CHUNK)
    registrar.let(2)
    assert settle(arena).state is PinState.PINNED
    assert arena.close(deadline_s=GUARD_S)


def test_a_pause_waits_for_the_chunk_in_progress_and_begins_no_other() -> None:
    registrar = RecordingRegistrar(gated=True)
    arena = arena_of(registrar)
    registrar.wait_inside()
    registrar.let(3)
    registrar = RecordingRegistrar(gated=True)
    other = arena_of(registrar)
    registrar.wait_inside()
    with paused(other) as quiet:
        assert not quiet.is_set(), "a call is in progress"
        registrar.let(3)
        assert quiet.wait(GUARD_S)
        assert len(registrar.registered) == 1
        settle(arena)  # while another thread has done all its work, this one has not gone on
        assert len(registrar.registered) == 1
        with paused(other) as again:
            assert again.is_set(), "nothing is in progress"
        assert len(registrar.registered) == 1, "it was paused twice and resumed once"
    assert settle(other).state is PinState.PINNED
    assert arena.close(deadline_s=GUARD_S)
    assert other.close(deadline_s=GUARD_S)


def test_a_roll_back_waits_for_the_end_of_a_pause() -> None:
    registrar = RecordingRegistrar(gated=True, fail={1})
    arena = arena_of(registrar, blocks=8)  # the second chunk is the last
    registrar.wait_inside()
    registrar.let()
    registrar.wait_inside()
    with paused(arena) as quiet:
        registrar.let()
        assert quiet.wait(GUARD_S)
        for _ in range(1000):
            give_way()
        assert [what for what, *_ in registrar.calls] == ["register"]
        assert arena.pinning.status.state is PinState.PINNING
    assert settle(arena).state is PinState.UNPINNED
    assert registrar.registered == {}


def test_closed_in_the_midst_of_pinning_it_stops_and_gives_back_what_it_has() -> None:
    registrar = RecordingRegistrar(gated=True)
    arena = arena_of(registrar)
    registrar.wait_inside()
    registrar.let()
    registrar.wait_inside()
    waiter = threading.Event()
    arena.pinning.when_settled(waiter.set)
    threading.Timer(0.05, registrar.let).start()
    assert arena.close(deadline_s=GUARD_S)
    assert waiter.is_set(), "who waited is told"
    assert [what for what, *_ in registrar.calls] == ["register", "register", "unregister", "unregister"]
    assert arena.pinning.status.state is PinState.CLOSED


def test_closed_while_paused_it_does_not_wait() -> None:
    registrar = RecordingRegistrar()
    arena = arena_of(registrar, blocks=400)
    with paused(arena) as quiet:
        assert quiet.wait(GUARD_S)
        assert arena.close(deadline_s=GUARD_S)
    assert registrar.registered == {}


def test_a_call_that_is_late_is_undone_when_it_ends() -> None:
    registrar = RecordingRegistrar(gated=True)
    arena = arena_of(registrar)
    registrar.wait_inside()
    assert not arena.close(deadline_s=0.0)
    assert arena.pinning.status.state is PinState.CLOSED
    registrar.let()
    wait_until(lambda: [what for what, *_ in registrar.calls] == ["register", "unregister"])
    assert arena.close(deadline_s=GUARD_S), "and now it has ended"
    assert registrar.registered == {}
    assert arena.pinning.status == PinStatus(state=PinState.CLOSED, total_bytes=BLOCKS * BLOCK_BYTES)


def test_what_a_stuck_copy_may_use_is_neither_unregistered_nor_unmapped() -> None:
    registrar = RecordingRegistrar()
    arena = arena_of(registrar)
    settle(arena)
    arena.leave()
    assert not arena.close(deadline_s=GUARD_S)
    assert len(registrar.registered) == 3
    addresses = [(arena.address, arena.num_bytes)]
    del arena
    gc.collect()
    assert all(is_mapped(address, size) for address, size in addresses)


def test_unpinned_memory_that_a_stuck_copy_may_use_stays_mapped() -> None:
    arena = arena_of(RecordingRegistrar(fail={0}))
    settle(arena)
    arena.leave()
    assert not arena.close(deadline_s=GUARD_S)
    address, size = arena.address, arena.num_bytes
    del arena
    gc.collect()
    assert is_mapped(address, size)


def test_registered_memory_stays_mapped_when_everybody_lets_go_of_it() -> None:
    arena = arena_of(RecordingRegistrar())
    settle(arena)
    address, size = arena.address, arena.num_bytes
    del arena
    gc.collect()
    assert is_mapped(address, size)


def test_closed_memory_is_unmapped_with_its_last_view() -> None:
    arena = arena_of(RecordingRegistrar(), blocks=1000)
    settle(arena)
    address, size = arena.address, arena.num_bytes
    row = arena.rows[999]
    assert arena.close(deadline_s=GUARD_S)
    del arena
    gc.collect()
    assert is_mapped(address, size)
    assert row.sum() == 0
    del row
    gc.collect()
    assert not is_mapped(address, size)


def test_what_the_driver_does_not_let_go_of_is_kept_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    registrar = RecordingRegistrar(fail_unregister={0})
    arena = arena_of(registrar)
    settle(arena)
    assert not arena.close(deadline_s=GUARD_S)
    assert not arena.close(deadline_s=GUARD_S), "and it stays so"
    assert len(registrar.registered) == 1, "the others were unregistered"
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    address, size = arena.address + 2 * CHUNK, 2 * BLOCK_BYTES
    del arena
    gc.collect()
    assert is_mapped(address, size)


def test_an_empty_arena_has_nothing_to_pin() -> None:
    arena = arena_of(RecordingRegistrar(), blocks=0)
    assert arena.pinning is NOTHING_TO_PIN
    assert settle(arena).state is PinState.NOT_NEEDED
    arena.leave()
    assert arena.close(deadline_s=0.0)


def test_who_gives_up_waiting_is_not_called() -> None:
    registrar = RecordingRegistrar(gated=True)
    arena = arena_of(registrar)
    told: list[str] = []
    gone, there = lambda: told.append("gone"), lambda: told.append("there")
    arena.pinning.when_settled(gone)
    arena.pinning.when_settled(there)
    arena.pinning.forget(gone)
    arena.pinning.forget(gone)
    registrar.let(3)
    settle(arena)
    assert told == ["there"]
    assert arena.close(deadline_s=GUARD_S)


def test_a_waiter_that_fails_does_not_keep_others_from_being_told(caplog: pytest.LogCaptureFixture) -> None:
    registrar = RecordingRegistrar(gated=True)
    arena = arena_of(registrar)
    arena.pinning.when_settled(lambda: [][0])
    registrar.let(3)
    assert settle(arena).state is PinState.PINNED
    assert "could not be told" in caplog.text
    assert arena.close(deadline_s=GUARD_S)


def test_memory_that_cannot_be_mapped_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="cannot map"):
        PinnedArena(blocks=2**40, block_bytes=2**20, registrar=RecordingRegistrar())
    with pytest.raises(ConfigError, match="at least one byte"):
        PinnedArena(blocks=1, block_bytes=1, registrar=RecordingRegistrar(), most_chunk_bytes=0)


def test_a_forked_child_neither_inherits_nor_closes_it() -> None:
    registrar = RecordingRegistrar()
    arena = arena_of(registrar)
    settle(arena)
    arena.rows[:] = 1
    child = os.fork()
    if child == 0:
        try:
            arena.close(deadline_s=0.0)
        except UsageError:
            os._exit(7 if not is_mapped(arena.address, arena.num_bytes) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert arena.close(deadline_s=GUARD_S)


@pytest.mark.parametrize("slot_bytes", [1, 3, 511, 4095, 4096, 6144, 2**20 + 1, 2**21, 5 * 2**30])
@pytest.mark.parametrize("most", [1, 2**20, MOST_BYTES])
def test_chunks_end_on_slots_and_pages_and_are_as_large_as_they_may_be(slot_bytes: int, most: int) -> None:
    chunks = cut_chunks(slots=10**9, slot_bytes=slot_bytes, most_bytes=most)
    size = chunks.slots_per_chunk * slot_bytes
    assert size % PAGE == 0
    assert chunks.count * chunks.slots_per_chunk >= chunks.slots > (chunks.count - 1) * chunks.slots_per_chunk
    unit = slot_bytes * (PAGE // np.gcd(slot_bytes, PAGE))
    assert size <= most < size + unit or size == unit > most


def test_no_ordinary_slot_needs_a_call_that_the_driver_refuses() -> None:
    for slot_bytes in (1, 2**21 + 1, 16 * 2**20 - 1, 2**30):
        chunks = cut_chunks(slots=10**9, slot_bytes=slot_bytes)
        assert chunks.largest_bytes <= MOST_BYTES < MOST_BYTES_PER_CALL


def are_resident(address: int, num_bytes: int) -> bool:
    """Whether the system has given all of these pages."""
    pages = (ctypes.c_ubyte * -(-num_bytes // PAGE))()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert libc.mincore(address, num_bytes, pages) == 0, os.strerror(ctypes.get_errno())
    return all(page & 1 for page in pages)


def is_mapped(address: int, num_bytes: int) -> bool:
    """Whether all of it is memory of this process."""
    with open("/proc/self/maps", encoding="ascii") as file:
        ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in file]
    return any(start <= address and address + num_bytes <= end for start, end in ranges)
