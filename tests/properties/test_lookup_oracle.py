"""Joint lookup and attribution against the oracle that derives need from masks (laws 6 and 7; invariants 6, 7, 13)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.core.attribution import find_sources
from aiokv.core.coverage import covered_range
from aiokv.core.lookup import Residency, find_residency, longest_valid
from aiokv.core.probing import Guesses, Search
from aiokv.errors import ConfigError
from aiokv.model.ids import BoolArray, DigestArray, IntArray, SlotArray, Tier
from aiokv.model.keys import BlockKeys
from aiokv.model.plan import Found, Hit
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.oracle import exhaustive_hit, exhaustive_sources

MOST_TOKENS = 200


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt and what is cached of it."""

    geometry: CacheGeometry
    num_tokens: int
    layout: Mapping[str, str]
    align: int = 1

    def where(self, letters: str) -> list[BoolArray]:
        """Per group, which leading blocks have one of `letters`."""
        rows = [self.layout.get(g.name, "") for g in self.geometry.groups]
        return [np.array([letter in letters for letter in row], np.bool_) for row in rows]

    def lookup(self) -> int:
        """The hit, by the function under test."""
        return longest_valid(self.geometry, num_tokens=self.num_tokens, present=self.where("gcb"), align=self.align)

    def oracle(self) -> int:
        """The hit, by the masks."""
        return exhaustive_hit(self.geometry, self.num_tokens, self.layout, align=self.align)

    def oracle_sources(self) -> tuple[str, ...]:
        """The source of each token, by the masks."""
        return exhaustive_sources(self.geometry, self.num_tokens, self.layout, align=self.align)


@st.composite
def group_specs(draw: st.DrawFn, name: str, hash_block: int) -> GroupSpec:
    block = hash_block * draw(st.sampled_from([1, 1, 1, 1, 2, 2, 3, 4]).filter(lambda m: m * hash_block <= 64))
    sharded = draw(st.booleans())
    reach = draw(st.integers(1, 3 * block + 3) | st.sampled_from([1, block - 1 or 1, block, block + 1, 2 * block]))
    lookahead = draw(st.integers(0, 3)) == 0
    match draw(st.sampled_from(["full", "window", "window", "chunked", "chunked", "recurrent"])):
        case "full":
            return FullAttention(name, block_size=block, sharded=sharded, lookahead=lookahead)
        case "window":
            return SlidingWindow(name, block_size=block, sharded=sharded, lookahead=lookahead, window=reach)
        case "chunked":
            return ChunkedLocal(name, block_size=block, sharded=sharded, chunk=reach)
        case _:
            return RecurrentState(name, block_size=block, sharded=sharded)


@st.composite
def geometries(draw: st.DrawFn) -> CacheGeometry:
    hash_block = draw(st.sampled_from([4, 4, 4, 8, 16, 64]))
    groups = tuple(draw(group_specs(f"group{i}", hash_block)) for i in range(draw(st.integers(1, 4))))
    return CacheGeometry(
        groups=groups, hash_block_size=hash_block, context_parallel=draw(st.sampled_from([1, 1, 1, 1, 2, 3]))
    )


ANY_RESIDENCY = ("g", "gc", "gc", "gcb", "gcb", "gggggcccccbbb-", "ggccb-", "--gc")
NOTHING_MISSING = ("gc", "gcb", "gggc", "gccc")
SEEDS = st.integers(0, 2**32)
"""Rows of letters come from a seeded generator: uniform ones interleave more than drawn ones, and are much cheaper."""


@st.composite
def cases(draw: st.DrawFn, residency: Sequence[str] = ANY_RESIDENCY) -> Case:
    geometry = draw(geometries())
    align = draw(st.sampled_from([1, 1, 1, 1, 2, 3, 16, 64]))
    blocks = [geometry.effective_block_size(i) for i in range(len(geometry.groups))]
    unit = draw(st.sampled_from([geometry.alignment(align), *blocks]))
    most = max(1, MOST_TOKENS // unit)
    boundary = unit * draw(st.integers(0, most) | st.just(most))
    num_tokens = max(0, boundary + draw(st.sampled_from([-1, 0, 1, 2, *blocks])))
    letters = draw(st.sampled_from(residency))
    random, layout = Random(draw(SEEDS)), {}
    for group, block in zip(geometry.groups, blocks, strict=True):
        full = num_tokens // block + random.randint(0, 1)
        known = random.choice([full, full, full, full, full // 2, 0])
        layout[group.name] = "".join(random.choices(letters, k=known))
    return Case(geometry=geometry, num_tokens=num_tokens, layout=layout, align=align)


def one_group(spec: GroupSpec, letters: str, *, num_tokens: int = 81, align: int = 1) -> Case:
    geometry = CacheGeometry(groups=(spec,), hash_block_size=16)
    return Case(geometry=geometry, num_tokens=num_tokens, layout={spec.name: letters}, align=align)


@pytest.mark.parametrize(
    ("letters", "length", "loads"),
    [("gcgcb", 80, [1, 3]), ("gc-cb", 32, [1]), ("-gggg", 0, [])],
)
def test_worked_example_one_full_group(letters: str, length: int, loads: list[int]) -> None:
    case = one_group(FullAttention("full", block_size=16), letters)
    assert case.lookup() == case.oracle() == length
    sources = case.oracle_sources()
    assert [block for block in range(length // 16) if sources[block * 16] == "cpu"] == loads
    assert Counter(sources)["compute"] == 81 - length


def test_worked_example_chunked_local() -> None:
    geometry = CacheGeometry(
        groups=(FullAttention("full", block_size=16), ChunkedLocal("chunked", block_size=16, chunk=64)),
        hash_block_size=16,
    )
    case = Case(geometry=geometry, num_tokens=81, layout={"full": "bcccc", "chunked": "bcccc"})
    assert case.lookup() == case.oracle() == 80
    assert list(covered_range(geometry, 1, 80)) == [4]
    without_first = replace(case, layout={"full": "bcccc", "chunked": "----c"})
    assert without_first.lookup() == without_first.oracle() == 80
    without_last = replace(case, layout={"full": "bcccc", "chunked": "bccc-"})
    assert without_last.lookup() == without_last.oracle() == 64, "at 64 the chunk starts anew and needs nothing"


def test_gpu_wins_over_cpu() -> None:
    case = one_group(FullAttention("full", block_size=16), "gbcbb")
    assert Counter(case.oracle_sources()) == {"gpu": 64, "cpu": 16, "compute": 1}


def test_only_chunked_or_window_one_groups_hit_an_empty_cache() -> None:
    chunked = one_group(ChunkedLocal("g", block_size=16, chunk=64), "")
    assert chunked.lookup() == chunked.oracle() == 64
    itself = one_group(SlidingWindow("g", block_size=16, window=1), "")
    assert itself.lookup() == itself.oracle() == 80
    assert itself.oracle_sources() == ("gpu",) * 80 + ("compute",)


def test_lookahead_needs_one_more_block_that_ends_before_the_last_token() -> None:
    spec = FullAttention("g", block_size=16, lookahead=True)
    lengths = {n: one_group(spec, "ggggg", num_tokens=n) for n in (80, 81, 96, 97)}
    assert {n: case.lookup() for n, case in lengths.items()} == {80: 48, 81: 64, 96: 64, 97: 64}
    assert {n: case.oracle() for n, case in lengths.items()} == {80: 48, 81: 64, 96: 64, 97: 64}


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_prompts_without_a_prefix_have_no_hit(num_tokens: int) -> None:
    case = one_group(SlidingWindow("g", block_size=16, window=1), "g", num_tokens=num_tokens)
    assert case.lookup() == case.oracle() == 0
    assert case.oracle_sources() == ("compute",) * num_tokens


@pytest.mark.parametrize(
    ("layout", "align"), [({"other": "g"}, 1), ({"g": "gx"}, 1), ({"g": "G"}, 1), ({"g": "g"}, 0), ({"g": "g"}, -1)]
)
def test_oracle_refuses_what_it_does_not_know(layout: dict[str, str], align: int) -> None:
    geometry = CacheGeometry(groups=(FullAttention("g", block_size=16),), hash_block_size=16)
    with pytest.raises(ConfigError):
        exhaustive_hit(geometry, 81, layout, align=align)
    with pytest.raises(ConfigError):
        exhaustive_sources(geometry, 81, layout, align=align)


@pytest.mark.parametrize("missing", [0, 1, 127, 128, 129, 639, 640, 641, 999, 1000])
def test_long_prompts_end_at_the_first_missing_block(missing: int) -> None:
    row = "gc" * 500
    case = one_group(FullAttention("full", block_size=16), row[:missing] + "-" + row[missing + 1 :], num_tokens=16_001)
    keys = BlockKeys(range(16_001), hash_block_size=16)
    gpu, cpu = RecordingIndex(case, keys, letters="g"), RecordingIndex(case, keys, letters="c")
    residency = find_residency(case.geometry, keys, gpu=gpu, cpu=cpu, num_tokens=16_001, align=1)
    assert residency.length == case.lookup() == 16 * missing
    assert max(gpu.probes.values()) == max(cpu.probes.values(), default=1) == 1


def test_longest_valid_equals_the_oracle() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=1000)
    @given(cases())
    def check(case: Case) -> None:
        length = case.oracle()
        assert case.lookup() == length
        seen["hit"] += length > 0
        seen["partial hit"] += 0 < length < case.num_tokens - case.geometry.alignment(case.align)
        seen["several groups"] += length > 0 and len(case.geometry.groups) > 1
        seen["lookahead"] += length > 0 and any(g.lookahead for g in case.geometry.groups)

    check()
    assert min(seen[kind] for kind in ("hit", "partial hit", "several groups", "lookahead")) >= 30, seen


def test_attribution_equals_the_oracle() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=500)
    @given(cases() | cases(NOTHING_MISSING))
    def check(case: Case) -> None:
        geometry, sources = case.geometry, case.oracle_sources()
        length = case.num_tokens - Counter(sources)["compute"]
        covered = [covered_range(geometry, i, length) for i in range(len(geometry.groups))]
        loads = [loaded_blocks(case, i, length=length) for i in range(len(geometry.groups))]
        found = find_sources(geometry, num_tokens=case.num_tokens, length=length, loads=loads, covered=covered)
        assert found.hit == totals(sources)
        switches = sum(a != b for a, b in pairwise(sources[:length]))
        assert found.switches == switches
        seen["cpu"] += found.hit.cpu_tokens > 0
        seen["interleaved"] += switches > 1
        seen["skipped by all"] += length > 0 and min(r.start for r in covered) > 0

    check()
    assert min(seen[kind] for kind in ("cpu", "interleaved", "skipped by all")) >= 10, seen


@settings(max_examples=300)
@given(cases(), SEEDS)
def test_more_residency_never_shortens_the_hit(case: Case, seed: int) -> None:
    random, more = Random(seed), {}
    for index, group in enumerate(case.geometry.groups):
        room = case.num_tokens // case.geometry.effective_block_size(index) + 1
        row = case.layout[group.name].ljust(room, "-")
        more[group.name] = "".join(random.choice("gcb-") if old == "-" else old for old in row)
    assert replace(case, layout=more).lookup() >= case.lookup()


@settings(max_examples=300)
@given(cases())
def test_lookup_in_both_tiers_equals_the_oracle_and_probes_each_key_once(case: Case) -> None:
    geometry = case.geometry
    keys = BlockKeys(range(case.num_tokens), hash_block_size=geometry.hash_block_size)
    gpu, cpu = RecordingIndex(case, keys, letters="gb"), RecordingIndex(case, keys, letters="cb")
    residency = find_residency(geometry, keys, gpu=gpu, cpu=cpu, num_tokens=case.num_tokens, align=case.align)
    assert residency.length == case.oracle()
    assert max(gpu.probes.values(), default=1) == 1
    assert max(cpu.probes.values(), default=1) == 1
    assert not (gpu.found & set(cpu.probes)), "the CPU tier is asked only for what the GPU tier misses"
    for index, row in enumerate(residency.groups):
        for block in covered_range(geometry, index, residency.length):
            letter = case.layout[geometry.groups[index].name][block]
            assert (bool(row.on_gpu[block]), bool(row.on_cpu[block])) == (letter in "gb", letter == "c")


@settings(max_examples=300)
@given(cases(), SEEDS)
def test_guesses_right_or_wrong_change_no_answer_and_spare_probes(case: Case, seed: int) -> None:
    """Invariant 7, wherever a lookup is told to look first."""
    geometry, random = case.geometry, Random(seed)
    keys = BlockKeys(range(case.num_tokens), hash_block_size=geometry.hash_block_size)

    def find(guesses: Guesses | None) -> tuple[Residency, RecordingIndex, RecordingIndex]:
        gpu, cpu = RecordingIndex(case, keys, letters="gb"), RecordingIndex(case, keys, letters="cb")
        found = find_residency(
            geometry, keys, gpu=gpu, cpu=cpu, num_tokens=case.num_tokens, align=case.align, guesses=guesses
        )
        return found, gpu, cpu

    expected, gpu, cpu = find(None)
    slots: dict[tuple[Tier, int], IntArray] = {}
    searches: dict[int, Search] = {}
    for index in range(len(geometry.groups)):
        for tier, pool in ((Tier.GPU, gpu), (Tier.CPU, cpu)):
            most = keys.num_blocks // geometry.hashes_per_block(index)
            blocks = random.choice((0, min(1, most), most, most))
            right = pool.find_quietly(keys.digests(geometry.hashes_per_block(index), 0, blocks), index)
            slots[tier, index] = np.array([random.choice((slot, slot, 0, 7)) for slot in right], np.int64)
            if tier is Tier.GPU and random.random() < 0.5:
                searches[index] = Search(blocks=blocks, last=b"", moment=random.choice((0, 1)))
    found, gpu_again, cpu_again = find(Guesses(slots, searches))
    assert found.length == expected.length
    for row, other in zip(found.groups, expected.groups, strict=True):
        assert np.array_equal(row.on_gpu, other.on_gpu)
        assert np.array_equal(row.on_cpu, other.on_cpu)
        assert np.array_equal(row.gpu_slots[row.on_gpu], other.gpu_slots[row.on_gpu])
        assert np.array_equal(row.cpu_slots[row.on_cpu], other.cpu_slots[row.on_cpu])
    assert gpu_again.probes <= gpu.probes
    assert cpu_again.probes <= cpu.probes


class RecordingIndex:
    """A tier that knows the blocks with one of `letters`, and counts what it is asked."""

    def __init__(self, case: Case, keys: BlockKeys, *, letters: str) -> None:
        self.probes: Counter[tuple[int, bytes]] = Counter()
        self.found: set[tuple[int, bytes]] = set()
        self._slots: dict[tuple[int, bytes], int] = {}
        for group, mask in enumerate(case.where(letters)):
            step = case.geometry.hashes_per_block(group)
            known = min(len(mask), keys.num_blocks // step)
            for block, digest in enumerate(keys.digests(step, 0, known)):
                if mask[block]:
                    self._slots[group, digest.tobytes()] = 1 + len(self._slots)

    def find(self, keys: DigestArray, group: int) -> Found:
        asked = [(group, row.tobytes()) for row in keys]
        self.probes.update(asked)
        self.found.update(set(asked) & set(self._slots))
        return Found(
            present=np.array([key in self._slots for key in asked], np.bool_),
            slots=self.find_quietly(keys, group),
        )

    def find_quietly(self, keys: DigestArray, group: int) -> IntArray:
        """The slots, 0 for what is missing; not counted."""
        return np.array([self._slots.get((group, row.tobytes()), 0) for row in keys], np.int64)

    def holds(self, slots: SlotArray, keys: DigestArray, *, group: int) -> BoolArray:
        return np.equal(slots, self.find_quietly(keys, group)) & np.greater(slots, 0)

    def may_have_come(self, keys: DigestArray, *, since: int) -> BoolArray:
        """All that are there may have come since any moment, and so may some of those that are not."""
        is_there = np.isin(keys[:, 0], [int.from_bytes(digest[:8], "little") for _, digest in self._slots])
        answer: BoolArray = is_there | (keys[:, 0] % np.uint64(2 + since) == 0)
        return answer


def loaded_blocks(case: Case, index: int, *, length: int) -> BoolArray:
    """Blocks of the prefix that group `index` covers and has on CPU only."""
    geometry = case.geometry
    loaded = np.zeros(length // geometry.effective_block_size(index), np.bool_)
    for block in covered_range(geometry, index, length):
        loaded[block] = case.layout[geometry.groups[index].name][block] == "c"
    return loaded


def totals(sources: tuple[str, ...]) -> Hit:
    count = Counter(sources)
    return Hit(
        prompt_tokens=len(sources),
        gpu_tokens=count["gpu"],
        cpu_tokens=count["cpu"],
        compute_tokens=count["compute"],
    )
