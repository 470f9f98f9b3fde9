"""`aiokv bench hash|lookup|...`: a round is the operation that its case names, on full pools, and leaves nothing."""

from __future__ import annotations

import gc
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from aiokv.cli.bench.cases import LAYOUTS, Case, Collector, Layout, Model, Operation
from aiokv.cli.bench.operations import Bench, BenchWorld, Times, open_case
from aiokv.cli.bench.operations.prompts import Prompts
from aiokv.cli.bench.operations.runner import check_memory, pool_bytes
from aiokv.cli.bench.operations.timing import Prepared, Rounds, VoidRoundError
from aiokv.cli.bench.summary import Spread, describe_interpreter
from aiokv.core.counters import EvictReason, LookupResult
from aiokv.errors import ConfigError
from aiokv.model.ids import Direction, Tier
from aiokv.model.plan import Outcome
from tests.cli.test_main import run

AGES = 10**12
SLOTS = 320
BLOCKS = 21
GROUPS = {Model.FULL: 1, Model.HYBRID: 2}
SHORT = 64
CASES = [
    Case(operation=operation, layout=layout, model=model, blocks=BLOCKS, pool_slots=SLOTS, requests=requests)
    for operation, model, requests in product(Operation, Model, (1, 3))
    for layout in LAYOUTS[operation]
]
TIMED_ON_A_CACHE = [case for case in CASES if case.operation is not Operation.HASH]
WITH_LOADS = [case for case in CASES if case.operation in (Operation.LOAD, Operation.LIFECYCLE)]
RESERVATIONS = [
    case for case in CASES if case.layout is Layout.MISS and case.operation in (Operation.LOOKUP, Operation.RESERVE)
]
STORES = [case for case in CASES if case.operation is Operation.STORE]
PARTS = {
    Operation.HASH: ({"hash"}, set()),
    Operation.LOOKUP: ({"acquire", "name"}, set()),
    Operation.RESERVE: ({"acquire", "name"}, set()),
    Operation.RELEASE: ({"release"}, set()),
    Operation.STORE: ({"plan", "complete"}, {"confirm"}),
    Operation.LOAD: ({"submit", "complete"}, {"acquire", "name"}),
    Operation.LIFECYCLE: ({"acquire", "confirm", "finish"}, set()),
}


def name_of(case: Case) -> str:
    return f"{case.operation.value}-{case.layout.value}-{case.model.value}-{case.requests}"


def full_world(model: Model = Model.FULL) -> BenchWorld:
    world = BenchWorld(model, pool_slots=SLOTS)
    world.fill(lambda _done: None)
    return world


def opened(case: Case, world: BenchWorld) -> Bench:
    return open_case(case, world=world)


def requests_in(case: Case) -> int:
    """All requests of a round: those that are timed, and the one that leads in, as long as they are where all are
    short."""
    assert case.blocks <= SHORT
    return case.requests + 1


def blocks_in(case: Case) -> int:
    """Blocks of all prompts of a round, in all groups: the window covers a whole prompt."""
    return requests_in(case) * BLOCKS * GROUPS[case.model]


def from_cpu(case: Case) -> int:
    """Blocks that the requests of a round load."""
    per_prompt = {Layout.CPU: BLOCKS, Layout.INTERLEAVED: BLOCKS // 2}.get(case.layout, 0)
    return requests_in(case) * per_prompt * GROUPS[case.model]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_round_tells_its_parts_and_their_sum(case: Case) -> None:
    bench = open_case(case)
    took = bench.run_round()
    assert (set(bench.times.counted), set(bench.times.beside)) == PARTS[case.operation]
    assert took == bench.times.total_ns == sum(bench.times.counted.values()) > 0
    assert bench.times.whole_ns == took + sum(bench.times.beside.values())


@pytest.mark.parametrize("case", TIMED_ON_A_CACHE, ids=name_of)
def test_rounds_leave_full_pools_and_nothing_held(case: Case) -> None:
    world = full_world(case.model)
    bench = opened(case, world)
    for _ in range(5):
        bench.run_round()
        cache = world.cache
        assert (cache.live_leases, cache.unfinished_transfers, cache.has_work) == (0, 0, False)
        for pool in cache.pools().values():
            assert pool.evictable + pool.free == SLOTS
    assert cache.audit().violations == ()


@pytest.mark.parametrize("case", TIMED_ON_A_CACHE, ids=name_of)
def test_a_round_finds_what_its_layout_says(case: Case) -> None:
    world = full_world(case.model)
    bench = opened(case, world)
    counters = world.cache.counters
    asked = {result: counters.lookups[result] for result in LookupResult}
    bench.run_round()
    expected = LookupResult.MISS if case.layout is Layout.MISS else LookupResult.HIT
    answers = {result: counters.lookups[result] - asked[result] for result in LookupResult}
    assert answers == {result: requests_in(case) * (result is expected) for result in LookupResult}


@pytest.mark.parametrize("case", RESERVATIONS, ids=name_of)
def test_letting_new_prompts_in_evicts_as_many_blocks_as_they_have(case: Case) -> None:
    world = full_world(case.model)
    bench = opened(case, world)
    for _ in range(4):
        before = world.cache.counters.evicted_blocks[Tier.GPU, EvictReason.CAPACITY]
        bench.run_round()
        evicted = world.cache.counters.evicted_blocks[Tier.GPU, EvictReason.CAPACITY] - before
        assert evicted == blocks_in(case)


@pytest.mark.parametrize("case", STORES, ids=name_of)
def test_a_store_round_copies_every_block_once_and_evicts_as_many(case: Case) -> None:
    world = full_world(case.model)
    bench = opened(case, world)
    for _ in range(4):
        counters = world.cache.counters
        stored = counters.transferred_blocks[Direction.STORE, Outcome.OK]
        evicted = counters.evicted_blocks[Tier.CPU, EvictReason.CAPACITY]
        bench.run_round()
        assert counters.transferred_blocks[Direction.STORE, Outcome.OK] - stored == blocks_in(case)
        assert counters.evicted_blocks[Tier.CPU, EvictReason.CAPACITY] - evicted == blocks_in(case)


@pytest.mark.parametrize("case", WITH_LOADS, ids=name_of)
def test_a_round_with_loads_copies_what_is_not_on_the_gpu(case: Case) -> None:
    world = full_world(case.model)
    bench = opened(case, world)
    for _ in range(4):
        before = world.cache.counters.transferred_blocks[Direction.LOAD, Outcome.OK]
        bench.run_round()
        assert world.cache.counters.transferred_blocks[Direction.LOAD, Outcome.OK] - before == from_cpu(case)


def test_a_lookup_round_loads_nothing() -> None:
    """Its loads are dropped before they are handed over, so that the blocks stay where they are."""
    world = full_world()
    case = Case(operation=Operation.LOOKUP, layout=Layout.CPU, model=Model.FULL, blocks=BLOCKS, pool_slots=SLOTS)
    bench = opened(case, world)
    before = dict(world.cache.counters.transferred_blocks)
    bench.run_round()
    after = world.cache.counters.transferred_blocks
    assert after[Direction.LOAD, Outcome.OK] == before[Direction.LOAD, Outcome.OK]
    assert after[Direction.LOAD, Outcome.DROPPED] - before[Direction.LOAD, Outcome.DROPPED] == blocks_in(case)


def test_a_short_request_leads_in_long_ones() -> None:
    blocks = 2 * SHORT + 1
    world = BenchWorld(Model.FULL, pool_slots=1_000)
    world.fill(lambda _done: None)
    case = Case(
        operation=Operation.LOAD, layout=Layout.CPU, model=Model.FULL, blocks=blocks, pool_slots=1_000, requests=3
    )
    bench, loaded = open_case(case, world=world), world.cache.counters.transferred_blocks
    before = loaded[Direction.LOAD, Outcome.OK]
    bench.run_round()
    assert loaded[Direction.LOAD, Outcome.OK] - before == 3 * blocks + SHORT


def test_a_case_takes_room_for_all_requests_and_the_one_that_leads_in() -> None:
    def case(*, pool_slots: int) -> Case:
        return Case(
            operation=Operation.LOOKUP,
            layout=Layout.GPU,
            model=Model.HYBRID,
            blocks=100,
            pool_slots=pool_slots,
            requests=3,
        )

    needed = 2 * (5 * 101 + 2 * 65)
    assert case(pool_slots=needed).slots == needed
    with pytest.raises(ConfigError, match="has too few"):
        case(pool_slots=needed - 1)


@pytest.mark.parametrize("layout", Layout)
def test_the_largest_prompts_that_a_pool_holds_are_measured(layout: Layout) -> None:
    case = Case(operation=Operation.LOOKUP, layout=layout, model=Model.FULL, blocks=99, pool_slots=230)
    assert case.slots == case.pool_slots
    bench = open_case(case)
    for _ in range(3):
        assert bench.run_round() > 0


def test_cases_may_share_a_cache_of_their_own_model_and_size_only() -> None:
    world = full_world()
    case = Case(operation=Operation.RESERVE, layout=Layout.MISS, model=Model.HYBRID, blocks=4, pool_slots=SLOTS)
    with pytest.raises(ConfigError, match="another model"):
        open_case(case, world=world)


def test_prompts_follow_from_their_number() -> None:
    prompts = Prompts()
    first, second = prompts.new_number(), prompts.new_number()
    long = prompts.tokens(first, length=100)
    assert np.array_equal(long[:37], prompts.tokens(first, length=37))
    assert not np.array_equal(long, prompts.tokens(second, length=100))
    one, other = prompts.keys(first, length=64), prompts.keys(first, length=64)
    assert one.num_hashed == 4
    assert np.array_equal(one.digests(1, 0, 4), other.digests(1, 0, 4))
    assert not np.shares_memory(one.digests(1, 0, 4), other.digests(1, 0, 4))


class Spoiled:
    """An operation whose first rounds are not what they should be."""

    def __init__(self, void: int) -> None:
        self.void = void
        self.prepared = 0
        self.calls: list[str] = []
        self.collector_was_on: list[bool] = []

    def prepare(self) -> Prepared[str]:
        self.prepared += 1
        return Prepared(lead_in="lead-in", measured="measured")

    def run(self, batch: str) -> Times:
        self.calls.append(f"run {batch}")
        self.collector_was_on.append(gc.isenabled())
        round_ns = 20 * self.prepared if batch == "measured" else AGES
        return Times(counted={"round": round_ns, "rest": 41}, beside={"other": 1_000})

    def restore(self, prepared: Prepared[str]) -> None:
        self.calls.append(f"restore {prepared.lead_in} and {prepared.measured}")
        if self.prepared <= self.void:
            raise VoidRoundError("not all blocks were there")


def test_only_what_is_measured_counts_and_its_requests_share_it() -> None:
    operation = Spoiled(void=0)
    rounds = Rounds(operation, requests=10, collector=Collector.OFF)
    assert rounds.run_round() == 2 + 4
    assert rounds.times == Times(counted={"round": 2, "rest": 4}, beside={"other": 100})
    assert rounds.times.whole_ns == 106
    assert operation.calls == ["run lead-in", "run measured", "restore lead-in and measured"]


def test_a_void_round_is_done_again() -> None:
    operation = Spoiled(void=3)
    assert Rounds(operation, requests=1, collector=Collector.OFF).run_round() == 20 * 4 + 41
    assert operation.prepared == 4


def test_an_operation_that_is_always_void_fails() -> None:
    with pytest.raises(VoidRoundError, match="not all blocks"):
        Rounds(Spoiled(void=1_000), requests=1, collector=Collector.OFF).run_round()


@pytest.mark.parametrize("collector", Collector)
def test_the_collector_is_as_asked_while_timed_and_as_before_afterwards(collector: Collector) -> None:
    operation = Spoiled(void=0)
    was_on = gc.isenabled()
    Rounds(operation, requests=1, collector=collector).run_round()
    assert operation.collector_was_on == [collector is Collector.ON] * 2
    assert gc.isenabled() is was_on


# The commands.


@pytest.mark.parametrize("operation", Operation)
def test_a_command_reports_every_layout_and_size(operation: Operation, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = (
        "--blocks",
        "5",
        "--blocks",
        "9",
        "--blocks",
        "5",
        "--pool-slots",
        "100",
        "--repeats",
        "4",
        "--requests",
        "2",
    )
    assert run("bench", operation.value, *sizes, "--gc", "on", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["benchmark"], report["ok"], report["gc"]) == (operation.value, True, "on")
    assert (report["pool_slots"], report["repeats"], report["model"], report["requests"]) == (100, 4, "full", 2)
    assert report["python"]
    assert report["cpu"]
    measured = [(case["layout"], case["blocks"]) for case in report["cases"]]
    assert measured == [(layout.value, blocks) for layout in LAYOUTS[operation] for blocks in (5, 9)]
    for case in report["cases"]:
        assert 0 < case["p10_us"] <= case["median_us"] <= case["p90_us"]
        assert case["us_per_block"] == pytest.approx(case["median_us"] / case["blocks"], rel=0.01)
        assert (set(case["parts_us"]), set(case["beside_us"])) == PARTS[operation]


def test_people_read_a_row_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "reserve", "--blocks", "7", "--pool-slots", "50", "--repeats", "2", "--model", "hybrid") == 0
    shown = capsys.readouterr().out
    assert "median_us" in shown
    assert "acquire" in shown
    assert "beside_us" not in shown
    assert "promised" not in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("load", "--layout", "gpu"), "no layout 'gpu', only cpu, interleaved"),
        (("lookup", "--blocks", "100", "--pool-slots", "100"), "needs 231 slots"),
        (("store", "--blocks", "64", "--pool-slots", "389", "--model", "hybrid"), "needs 390 slots"),
        (("load", "--blocks", "9", "--pool-slots", "100", "--requests", "10"), "10 x 9 blocks"),
        (("release", "--requests", "0"), ""),
        (("reserve", "--pool-slots", str(10**13)), "are available"),
        (("hash", "--blocks", str(10**13)), "are available"),
        (("hash", "--blocks", "1", "--requests", str(10**12)), "are available"),
        (("hash", "--blocks", "0"), ""),
        (("hash", "--repeats", "0"), ""),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", *arguments, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in " ".join(captured.err.split())


def test_pools_that_do_not_fit_into_memory_are_refused_before_they_are_made() -> None:
    check_memory(1_000, available=pool_bytes(1_000))
    with pytest.raises(ConfigError, match="1,000 slots"):
        check_memory(1_000, available=pool_bytes(1_000) - 1)


def test_ten_million_slots_fit_into_twenty_gibibytes() -> None:
    check_memory(10_000_000, available=20 * 2**30)


# What they tell.


def test_a_spread_is_the_median_and_the_outer_tenths() -> None:
    assert Spread.of([float(value) for value in range(100, -1, -1)]) == Spread(median=50.0, p10=10.0, p90=90.0)
    assert Spread.of([7.0]) == Spread(median=7.0, p10=7.0, p90=7.0)


def test_the_processor_is_named_as_the_system_does(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Other\n")
    assert describe_interpreter(cpuinfo=path)["cpu"] == "Some CPU @ 2 GHz"
    assert describe_interpreter(cpuinfo=tmp_path / "absent")["cpu"]
