"""Each adversary finds the bug it is there for, and is silent where there is none."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.fakecuda import FakeDriver, Kernel
from tests.fakecuda.calls import (
    ANY,
    DURING_API_CALL,
    PAGE,
    STREAM,
    HostMemory,
    copy_batch,
    device_memory,
    new_event,
    new_stream,
    registered,
    succeed,
)

ONLY = {"snapshot_sources": False, "torn_destinations": False, "shuffled_order": False, "hazards": False}
NEW, OLD = bytes([1] * 64), bytes(64)


def turn_on(driver: FakeDriver, name: str, *, seed: int = 1) -> None:
    driver.adversaries(**(ONLY | {name: True}), seed=seed)


class Engine:
    """A block on the device, a place for it in pinned memory, the engine's stream and ours; all held."""

    def __init__(self, cu: ModuleType, driver: FakeDriver, memory: HostMemory) -> None:
        self.cu = cu
        self.driver = driver
        self.memory = memory
        self.block = device_memory(cu, PAGE)
        self.compute, self.copies = new_stream(cu), new_stream(cu)
        self.fence = new_event(cu)
        driver.hold()

    def compute_block(self) -> None:
        self.driver.launch(self.compute, Kernel().write(self.block, NEW))
        succeed(self.cu.cuEventRecord(self.fence, self.compute))

    def wait_for_fence(self) -> None:
        succeed(self.cu.cuStreamWaitEvent(self.copies, self.fence, 0))

    def store(self, *, order: int) -> None:
        batch = [(self.memory.address, self.block, 64)]
        assert copy_batch(self.cu, batch, stream=self.copies, order=order) == 0

    def load(self, *, order: int = STREAM) -> None:
        batch = [(self.block, self.memory.address, 64)]
        assert copy_batch(self.cu, batch, stream=self.copies, order=order) == 0

    def finish(self) -> None:
        self.driver.release()
        assert self.driver.drain()


@pytest.mark.parametrize(("order", "stored"), [(STREAM, NEW), (ANY, OLD), (DURING_API_CALL, OLD)])
def test_a_store_behind_its_fence_needs_the_order_of_the_stream(
    cu: ModuleType, fake_driver: FakeDriver, order: int, stored: bytes
) -> None:
    turn_on(fake_driver, "snapshot_sources")
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        engine.compute_block()
        engine.wait_for_fence()
        engine.store(order=order)
        engine.finish()
        assert memory.read(0, 64) == stored
    assert bool(fake_driver.violations()) == (order == ANY), "the source changed under a copy that may read any time"


def test_without_the_adversary_the_wrong_order_passes_unseen(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """Why it is there."""
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        engine.compute_block()
        engine.wait_for_fence()
        engine.store(order=ANY)
        engine.finish()
        assert memory.read(0, 64) == NEW
    assert fake_driver.violations() == []


def test_a_source_reused_under_a_load_is_seen_whichever_bytes_arrive(cu: ModuleType, fake_driver: FakeDriver) -> None:
    turn_on(fake_driver, "snapshot_sources")
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        engine.load(order=ANY)
        assert fake_driver.violations() == []
        memory.write(0, NEW)
        engine.finish()
        assert "changed while it was in flight" in fake_driver.violations()[0]


def test_a_source_that_stays_is_no_violation(cu: ModuleType, watched_driver: FakeDriver) -> None:
    with registered(cu, PAGE) as memory:
        memory.write(0, NEW)
        engine = Engine(cu, watched_driver, memory)
        engine.load(order=ANY)
        engine.finish()
        memory.write(0, OLD)
        assert watched_driver.read(engine.block, 64) == NEW


def test_reading_a_destination_too_early_gives_rubbish(cu: ModuleType, fake_driver: FakeDriver) -> None:
    turn_on(fake_driver, "torn_destinations")
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        memory.write(0, NEW)
        engine.load()
        early = fake_driver.launch(engine.compute, Kernel().read(engine.block, num_bytes=64))
        assert fake_driver.step(engine.compute) == 1
        assert early.result() not in ([NEW], [OLD])
        engine.finish()
        assert fake_driver.read(engine.block, 64) == NEW


def test_a_destination_is_whole_until_the_copy_may_start(cu: ModuleType, fake_driver: FakeDriver) -> None:
    """Work that comes before the copy still finds what it needs there."""
    turn_on(fake_driver, "torn_destinations")
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        fake_driver.write(engine.block, NEW)
        reader = fake_driver.launch(engine.compute, Kernel().read(engine.block, num_bytes=64))
        succeed(cu.cuEventRecord(engine.fence, engine.compute))
        engine.wait_for_fence()
        engine.load()
        fake_driver.settle()
        assert fake_driver.step(engine.compute) == 1
        assert reader.result() == [NEW]
        engine.finish()
        assert fake_driver.read(engine.block, 64) == OLD


def test_a_failed_copy_leaves_its_destination_torn(cu: ModuleType, fake_driver: FakeDriver) -> None:
    turn_on(fake_driver, "torn_destinations")
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        fake_driver.fail_next_copy(engine.copies, 700)
        engine.store(order=STREAM)
        assert fake_driver.step(engine.copies) == 0
        assert memory.read(0, 64) not in (OLD, NEW)
        fake_driver.reset_error()


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_copies_of_a_batch_run_in_any_order(cu: ModuleType, fake_driver: FakeDriver, seed: int) -> None:
    """A chain within a batch, which runs from front to back without the adversary, comes out otherwise and is told."""
    turn_on(fake_driver, "shuffled_order", seed=seed)
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    fake_driver.write(device, bytes(range(33)))
    chain = [(device + i + 1, device + i, 1) for i in range(32)]
    assert copy_batch(cu, chain, stream=stream) == 0
    assert fake_driver.drain()
    assert fake_driver.read(device, 33) != bytes(33), "front to back fills it with the first byte"
    assert "one reads what another writes" in fake_driver.violations()[0]


def test_two_copies_of_a_batch_into_one_place_are_told(cu: ModuleType, fake_driver: FakeDriver) -> None:
    turn_on(fake_driver, "shuffled_order")
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    assert copy_batch(cu, [(device, device + 64, 16), (device + 15, device + 128, 16)], stream=stream) == 0
    assert "one writes where another writes" in fake_driver.violations()[0]
    assert fake_driver.drain()


def test_a_batch_of_independent_copies_is_fine_in_any_order(cu: ModuleType, watched_driver: FakeDriver) -> None:
    device, stream = device_memory(cu, PAGE), new_stream(cu)
    watched_driver.write(device, bytes(range(64)))
    assert copy_batch(cu, [(device + 64 + i, device + 63 - i, 1) for i in range(64)], stream=stream) == 0
    assert watched_driver.drain()
    assert watched_driver.read(device + 64, 64) == bytes(range(63, -1, -1))


@pytest.mark.parametrize("fenced", [True, False])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_that_no_event_puts_behind_compute_is_a_hazard(
    cu: ModuleType,
    fake_driver: FakeDriver,
    direction: str,
    fenced: bool,  # noqa: FBT001 - both ways
) -> None:
    turn_on(fake_driver, "hazards")
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        engine.compute_block()
        if fenced:
            engine.wait_for_fence()
        if direction == "store":
            engine.store(order=STREAM)
        else:
            engine.load()
        assert bool(fake_driver.violations()) == (not fenced)
        engine.finish()


@pytest.mark.parametrize("fenced", [True, False])
def test_a_load_over_a_block_that_compute_still_reads_is_a_hazard(
    cu: ModuleType,
    fake_driver: FakeDriver,
    fenced: bool,  # noqa: FBT001 - both ways
) -> None:
    turn_on(fake_driver, "hazards")
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        fake_driver.launch(engine.compute, Kernel().read(engine.block, num_bytes=64))
        succeed(cu.cuEventRecord(engine.fence, engine.compute))
        if fenced:
            engine.wait_for_fence()
        engine.load()
        assert bool(fake_driver.violations()) == (not fenced)
        engine.finish()


@pytest.mark.parametrize("fenced", [True, False])
def test_compute_that_does_not_wait_for_a_load_is_a_hazard(
    cu: ModuleType,
    fake_driver: FakeDriver,
    fenced: bool,  # noqa: FBT001 - both ways
) -> None:
    turn_on(fake_driver, "hazards")
    with registered(cu, PAGE) as memory:
        engine, landed = Engine(cu, fake_driver, memory), new_event(cu)
        engine.load()
        succeed(cu.cuEventRecord(landed, engine.copies))
        if fenced:
            succeed(cu.cuStreamWaitEvent(engine.compute, landed, 0))
        fake_driver.launch(engine.compute, Kernel().read(engine.block, num_bytes=64))
        assert bool(fake_driver.violations()) == (not fenced)
        engine.finish()


def test_a_path_over_a_third_stream_is_a_path(cu: ModuleType, watched_driver: FakeDriver) -> None:
    with registered(cu, PAGE) as memory:
        engine, relay, second = Engine(cu, watched_driver, memory), new_stream(cu), new_event(cu)
        engine.compute_block()
        succeed(cu.cuStreamWaitEvent(relay, engine.fence, 0))
        succeed(cu.cuEventRecord(second, relay))
        succeed(cu.cuStreamWaitEvent(engine.copies, second, 0))
        engine.store(order=STREAM)
        engine.finish()
        assert memory.read(0, 64) == NEW


def test_a_fence_recorded_too_early_is_no_path(cu: ModuleType, fake_driver: FakeDriver) -> None:
    turn_on(fake_driver, "hazards")
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        fake_driver.launch(engine.compute, Kernel().write(engine.block + 128, NEW))
        succeed(cu.cuEventRecord(engine.fence, engine.compute))
        fake_driver.launch(engine.compute, Kernel().write(engine.block, NEW))
        engine.wait_for_fence()
        engine.store(order=STREAM)
        assert "nothing orders them" in fake_driver.violations()[0]
        engine.finish()


def test_two_readers_and_neighbours_are_no_hazard(cu: ModuleType, watched_driver: FakeDriver) -> None:
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, watched_driver, memory)
        kernel = Kernel().read(engine.block, num_bytes=64).fill(engine.block + 64, value=3, num_bytes=64)
        watched_driver.launch(engine.compute, kernel)
        engine.store(order=STREAM)
        engine.finish()


def test_what_has_ended_orders_itself(cu: ModuleType, watched_driver: FakeDriver) -> None:
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, watched_driver, memory)
        engine.compute_block()
        assert watched_driver.step(engine.compute) == 1
        engine.store(order=STREAM)
        engine.finish()
        assert memory.read(0, 64) == NEW


def test_the_host_may_declare_what_it_touches(cu: ModuleType, fake_driver: FakeDriver) -> None:
    with registered(cu, PAGE) as memory:
        engine = Engine(cu, fake_driver, memory)
        engine.load()
        fake_driver.host_reads(memory.address, 64)
        fake_driver.host_writes(memory.address + 64, 64)
        assert fake_driver.violations() == [], "a load only reads there"
        fake_driver.host_writes(memory.address + 63, 1)
        assert "the host writes" in fake_driver.violations()[0]
        fake_driver.forget_violations()
        fake_driver.host_reads(engine.block, 1)
        assert "the host reads" in fake_driver.violations()[0]
        fake_driver.forget_violations()
        engine.finish()
        fake_driver.host_writes(memory.address, 64)
        assert fake_driver.violations() == []
