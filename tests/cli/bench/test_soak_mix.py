"""What a soak mixes in: recurrent states, hints, changed bytes, ranks; and that it would notice if they went wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from aiokv import CacheGeometry, Checksum, FullAttention, RecurrentState, ResidenceHint
from aiokv.backends.checksums import BlockChecksums
from aiokv.cli.bench.kv_bytes import KvBytes, codes_of
from aiokv.core.cache import CacheState
from aiokv.core.free_list import FreeList
from aiokv.core.pool import Pool
from aiokv.model.ids import SlotArray
from tests.cli.bench.test_soak import ZEROS, soaked

NOTHING_WRONG = dict.fromkeys(ZEROS, 0)


def test_states_are_captured_hit_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Section 5: a state is found under its exact length, copied whole before it is advanced; invariant 9."""
    status, report = soaked(capsys, "--seconds", "1.2", "--groups", "full,state", "--store-policy", "lazy")
    assert (status, report["complaints"]) == (0, [])
    assert report["groups"] == "full,state"
    assert report["captured"] >= 10
    assert report["compared_states"] >= 50
    assert report["gpu_tokens"] >= 100


def test_a_state_of_another_length_than_it_is_confirmed_under_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = KvBytes.advance_state

    def one_short(memory: KvBytes, group: str, slot: int, *, codes: np.ndarray, start: int, stop: int) -> None:
        advance(memory, group, slot, codes=codes, start=start, stop=max(start, stop - 1))

    monkeypatch.setattr(KvBytes, "advance_state", one_short)
    status, report = soaked(capsys, "--seconds", "0.5", "--groups", "full,state")
    assert status == 1
    assert report["corrupt"]


@pytest.mark.parametrize("checksum", [Checksum.FULL, Checksum.SAMPLED])
def test_changed_bytes_in_cpu_memory_are_found_and_never_served(
    checksum: Checksum, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = soaked(
        capsys, "--seconds", "1.5", "--groups", "full", "--gpu-blocks", "96", "--checksum", checksum.value
    )
    assert (status, report["complaints"]) == (0, [])
    assert report["flipped"] >= report["found"] == report["flipped_loaded"] >= 1
    assert report["corrupt"] == 0


def test_a_checksum_that_is_not_compared_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(checksums: BlockChecksums, slots: SlotArray, *, num_bytes: int, corrupt: list[int]) -> Iterator[None]:
        yield

    monkeypatch.setattr(BlockChecksums, "compare", compare)
    status, report = soaked(capsys, "--seconds", "1.5", "--groups", "full", "--gpu-blocks", "96", "--checksum", "full")
    assert status == 1
    assert report["corrupt"]
    assert f"{report['flipped_loaded']} changed blocks were loaded, 0 were found" in report["complaints"]


def test_a_hint_that_promises_too_much_is_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResidenceHint, "held_tokens", property(lambda hint: hint.num_tokens + 1))
    status, report = soaked(capsys, "--seconds", "1", "--seed", "1")
    assert status == 1
    assert {name for name in ZEROS if report[name]} == {"violations"}
    assert "tokens, and a request hit" in report["notes"][0]


def test_ranks_answer_in_any_order_and_one_that_fails_is_believed(capsys: pytest.CaptureFixture[str]) -> None:
    """Law 3: a block is findable after every rank's copy ended OK."""
    status, report = soaked(capsys, "--seconds", "1.2", "--groups", "full", "--remote-ranks", "2", "--faults", "0.1")
    assert (status, {name: report[name] for name in ZEROS}) == (0, NOTHING_WRONG)
    assert report["rank_reports"] >= 40
    assert report["rank_failures"] >= 1


# Broken books: the run must get to its verdict.


def lose_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    unpin, calls = Pool.unpin, itertools.count(1)
    monkeypatch.setattr(Pool, "unpin", lambda pool, slots: unpin(pool, slots[: -1 if next(calls) % 50 == 0 else None]))


def give_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    take, calls = FreeList.take, itertools.count(1)

    def taken(free: FreeList, n: int) -> SlotArray:
        slots = take(free, n)
        return np.full_like(slots, slots[-1]) if len(slots) > 1 and next(calls) % 20 == 0 else slots

    monkeypatch.setattr(FreeList, "take", taken)


def raise_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    pin, calls = Pool.pin, itertools.count(1)

    def pinned(pool: Pool, slots: SlotArray) -> None:
        if next(calls) % 100 == 0:
            raise IndexError("the books are broken")
        pin(pool, slots)

    monkeypatch.setattr(Pool, "pin", pinned)


def spin_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pin, calls = Pool.pin, itertools.count(1)

    def pinned(pool: Pool, slots: SlotArray) -> None:
        if next(calls) == 40:
            while True:
                pass
        pin(pool, slots)

    monkeypatch.setattr(Pool, "pin", pinned)


def cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def counts(pool: Pool) -> None:
        raise IndexError("the books are broken")

    monkeypatch.setattr(Pool, "counts", counts)


def cannot_be_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm(cache: CacheState) -> None:
        raise IndexError("the books are broken")

    monkeypatch.setattr(CacheState, "warm", warm)


@pytest.mark.parametrize(
    "wreck", [lose_pins, give_out_twice, raise_now_and_then, spin_once, cannot_be_read, cannot_be_warmed]
)
def test_broken_books_give_a_report_and_no_traceback(
    wreck: Callable[[pytest.MonkeyPatch], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wreck(monkeypatch)
    status, report = soaked(capsys, "--seconds", "0.7", "--clients", "6", "--grace", "0.3", "--seed", "1")
    assert status == 1
    assert not report["ok"]
    assert report["violations"] or report["errors"]
    assert report["complaints"]
    assert "Traceback" not in capsys.readouterr().err


# States as bytes.

BLOCK, LENGTH = 16, 100
STATE = RecurrentState("state", block_size=BLOCK)
TOKENS = [n * n for n in range(LENGTH)]
CODES = codes_of(1, TOKENS)


@pytest.fixture
def memory() -> KvBytes:
    geometry = CacheGeometry(groups=(FullAttention("full", block_size=BLOCK), STATE), hash_block_size=BLOCK)
    kv_bytes = KvBytes(geometry, gpu_blocks=6, token_words=3)
    kv_bytes.poison_slots("state", np.arange(6, dtype=np.int32))
    return kv_bytes


def test_a_state_moves_on_token_by_token_or_in_leaps(memory: KvBytes) -> None:
    memory.begin_state("state", 2)
    assert memory.is_state("state", 2, codes=CODES, length=0)
    for start in range(0, 60, 20):
        memory.advance_state("state", 2, codes=CODES, start=start, stop=start + 20)
    assert memory.is_state("state", 2, codes=CODES, length=60)
    assert not any(memory.is_state("state", 2, codes=CODES, length=other) for other in (0, 59, 61))
    assert not memory.is_state("state", 2, codes=codes_of(2, TOKENS), length=60)


def test_a_copy_of_a_state_is_whole_and_its_source_stays(memory: KvBytes) -> None:
    memory.begin_state("state", 2)
    memory.advance_state("state", 2, codes=CODES, start=0, stop=32)
    memory.copy_state("state", source=2, target=3)
    memory.advance_state("state", 3, codes=CODES, start=32, stop=40)
    assert memory.is_state("state", 2, codes=CODES, length=32)
    assert memory.is_state("state", 3, codes=CODES, length=40)


@pytest.mark.parametrize("part", [0, 1])
def test_a_wrong_bit_in_a_state_stays_wrong(memory: KvBytes, part: int) -> None:
    memory.begin_state("state", 2)
    memory.arenas["state"][0][part][2, -1] ^= np.uint64(1)
    memory.advance_state("state", 2, codes=CODES, start=0, stop=LENGTH)
    assert not memory.is_state("state", 2, codes=CODES, length=LENGTH)


def test_the_null_block_holds_no_state(memory: KvBytes) -> None:
    memory.begin_state("state", 0)
    assert not memory.is_state("state", 0, codes=CODES, length=0)
