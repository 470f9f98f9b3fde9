"""The book of fences: which are waited for before a slot is used again, and which are forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.core.fences import Fence, FenceBook
from aiokv.errors import UsageError
from aiokv.model.ids import IntArray
from aiokv.model.spec import FullAttention
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

SLOTS = 16


def slots_of(*slots: int) -> IntArray:
    return np.array(slots, np.int64)


def noted(book: FenceBook, stream: object, *slots: int) -> Fence:
    """A recorded fence that these slots were used before."""
    fence = book.add(stream, f"{stream} {len(book)}")
    book.note(slots_of(*slots), fence.number)
    return fence


def test_without_fences_nothing_is_waited_for() -> None:
    book = FenceBook(SLOTS)
    assert book.find_waits(slots_of(1, 2)) == ()
    assert len(book) == 0
    assert not book.promised


def test_a_slot_waits_for_its_own_fence_and_not_for_later_ones() -> None:
    book = FenceBook(SLOTS)
    first = noted(book, "a", 1)
    second = noted(book, "a", 2)
    assert book.find_waits(slots_of(1)) == (first,)
    assert book.find_waits(slots_of(1, 2)) == (second,), "it stands for all before it"
    assert book.find_waits(slots_of(3)) == ()
    assert book.find_waits(slots_of()) == ()


def test_each_stream_is_waited_for_and_the_one_that_asks_is_not() -> None:
    book = FenceBook(SLOTS)
    first = noted(book, "a", 1)
    second = noted(book, "b", 1)
    assert set(book.find_waits(slots_of(1))) == {first, second}
    assert book.find_waits(slots_of(1), beside="a") == (second,)
    assert book.find_waits(slots_of(1), beside="b") == (first,)


def test_an_older_fence_does_not_hide_a_newer_one_of_the_same_slot() -> None:
    """Two holders of one slot: the one that leaves last was given the fence that was made first."""
    book = FenceBook(SLOTS)
    older, newer = book.add("a", 1), book.add("b", 2)
    book.note(slots_of(5), newer.number)
    book.note(slots_of(5, 6), older.number)
    assert set(book.find_waits(slots_of(5))) == {older, newer}
    assert book.find_waits(slots_of(6)) == (older,)


def test_an_older_fence_of_a_lease_does_not_hide_a_newer_one() -> None:
    """Confirmed behind a fence of one stream, then given back behind one of another that was made before."""
    h = Host(geometry_of(FullAttention("f", block_size=4)), gpu_blocks=9, cpu_blocks=8)
    record = h.admit(0, 9)
    h.turn()
    older, newer = h.cache.fences.add("a", 1), h.cache.fences.add("b", 2)
    h.confirm(record, 8, after=newer)
    slots = h.cache.block_ids(record, group=0).copy()
    h.cache.release(record, after=older)
    for slot in slots.tolist():
        assert set(h.cache.fences.find_waits(slots_of(slot))) == {older, newer}
    h.end_all()
    h.tear_down()


def test_passed_fences_are_forgotten_oldest_first() -> None:
    book = FenceBook(SLOTS)
    fences = [noted(book, "a", slot) for slot in range(1, 9)]
    passed = {fence.mark for fence in fences[:3]}
    for _ in range(3):
        book.forget_passed(lambda mark: mark in passed)
    assert len(book) == 5
    assert book.find_waits(slots_of(3)) == ()
    assert book.find_waits(slots_of(4)) == (fences[3],)
    book.forget_passed(lambda mark: True)
    book.forget_passed(lambda mark: True)
    assert len(book) == 0
    assert book.find_waits(slots_of(8)) == ()


def test_asking_how_far_streams_are_is_bounded() -> None:
    """However many fences there are, of however many streams: each new one costs a few questions."""
    book = FenceBook(SLOTS)
    for number in range(1000):
        book.add(f"stream {number % 7}", number)
    asked: list[object] = []

    def is_passed(mark: object) -> bool:
        asked.append(mark)
        return True

    book.forget_passed(is_passed)
    assert 1 <= len(asked) <= 8
    rounds = 0
    while len(book):
        book.forget_passed(is_passed)
        rounds += 1
        assert rounds <= 100


def test_streams_that_stand_still_do_not_keep_others_from_being_asked() -> None:
    book = FenceBook(SLOTS)
    for number in range(20):
        noted(book, f"stuck {number}", 1)
    noted(book, "running", 2)
    for _ in range(21):
        book.forget_passed(lambda mark: str(mark).startswith("running"))
    assert len(book) == 20
    assert book.find_waits(slots_of(2)) != ()
    assert all(fence.stream != "running" for fence in book.find_waits(slots_of(2)))


def test_what_is_promised_is_recorded_once_for_each_stream() -> None:
    book = FenceBook(SLOTS)
    promised = [book.promise(stream) for stream in ("a", "b", "a")]
    book.note(slots_of(1), promised[-1].number)
    recorded: list[object] = []

    def record(stream: object) -> object:
        recorded.append(stream)
        return f"mark of {stream}"

    book.keep_promises(record)
    assert recorded == ["a", "b"]
    assert not book.promised
    assert [fence.mark for fence in promised] == ["mark of a", "mark of b", "mark of a"]
    assert book.find_waits(slots_of(1)) == (promised[2], promised[1])


def test_what_cannot_be_recorded_stays_promised() -> None:
    book = FenceBook(SLOTS)
    first, second = book.promise("a"), book.promise("b")

    def record(stream: object) -> object:
        if stream == "b":
            raise UsageError("being captured")
        return "mark"

    for _ in range(2):
        with pytest.raises(UsageError):
            book.keep_promises(record)
        assert (first.mark, second.mark, book.promised) == ("mark", None, [second])


def test_a_stream_that_has_nothing_to_wait_for_is_forgotten() -> None:
    book = FenceBook(SLOTS)
    fence = book.promise("a")
    book.note(slots_of(1), fence.number)
    book.keep_promises(lambda stream: None)
    assert book.find_waits(slots_of(1)) == ()
    assert not book.promised


def test_streams_need_not_be_hashable() -> None:
    book = FenceBook(SLOTS)
    stream, other = [1], [1]
    fence, another = noted(book, stream, 1), noted(book, other, 1)
    assert set(book.find_waits(slots_of(1))) == {fence, another}
    assert book.find_waits(slots_of(1), beside=stream) == (another,)


def test_what_is_no_fence_of_this_cache_is_refused() -> None:
    book, other = FenceBook(SLOTS), FenceBook(SLOTS)
    fence = book.add("a", 1)
    assert book.check(fence) is fence
    for thing in (other.add("a", 1), "a", 1, None):
        with pytest.raises(UsageError, match="fence"):
            book.check(thing)


USES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, SLOTS - 1), st.booleans()), max_size=40)


@settings(max_examples=200, deadline=None)
@given(uses=USES, asked=st.sets(st.integers(0, SLOTS - 1), min_size=1), passed=st.integers(0, 40))
def test_every_use_of_a_slot_is_covered_by_what_is_waited_for(
    uses: list[tuple[str, int, bool]], asked: set[int], passed: int
) -> None:
    """Whatever the order in which fences are made and used: some that were made early are used late."""
    book = FenceBook(SLOTS)
    users: dict[int, list[Fence]] = {}
    late: list[tuple[int, Fence]] = []

    def use(slot: int, fence: Fence) -> None:
        users.setdefault(slot, []).append(fence)
        book.note(slots_of(slot), fence.number)

    for stream, slot, is_late in uses:
        fence = book.add(stream, len(book))
        if is_late:
            late.append((slot, fence))
        else:
            use(slot, fence)
    for slot, fence in reversed(late):
        use(slot, fence)

    def is_passed(mark: object) -> bool:
        return isinstance(mark, int) and mark < passed

    for _ in range(20):
        book.forget_passed(is_passed)
    waits = book.find_waits(slots_of(*asked))
    assert len({fence.stream for fence in waits}) == len(waits)
    for slot in asked:
        for fence in users.get(slot, ()):
            is_waited_for = any(w.stream == fence.stream and w.number >= fence.number for w in waits)
            assert is_waited_for or is_passed(fence.mark)
