"""Whole journeys GPU to CPU to GPU on the fake driver, every adversary on: exact bytes, in every layout and way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiokv.backends.base import EventStatus
from aiokv.backends.cuda import CudaBackend
from aiokv.model.ids import Direction
from tests.backends.cuda.rig import Rig, Tensor, run_script
from tests.backends.support import GUARD_S, batch_of, end_of, layout_of, load, store, wait_until

CPU_BLOCKS = 7


def tensor_of(kind: str, *, rig: Rig, blocks: int, seed: int) -> tuple[Tensor, int]:
    """A tensor and its axis of blocks."""
    dense = {"dense": (blocks, 3, 4), "K and V outermost": (2, blocks, 5), "flat": (blocks,)}
    if kind in dense:
        return rig.dense(*dense[kind], seed=seed), 1 if kind.startswith("K") else 0
    views = {
        "a layer of a page": ((blocks, 8), (24, 1), 8, 24 * blocks),
        "heads outermost": ((blocks, 3, 4), (4, 4 * blocks, 1), 0, 12 * blocks),
    }
    shape, strides, offset, span = views[kind]
    view = Tensor(fake=rig.fake, pointer=0, span=span, shape=shape, strides=strides, offset=offset)
    return rig.filled(view, seed=seed), 0


KINDS = ["dense", "K and V outermost", "flat", "a layer of a page", "heads outermost"]


def blocks_of(tensors: Sequence[tuple[Tensor, int]]) -> list[list[bytes]]:
    return [tensor.blocks(axis=axis) for tensor, axis in tensors]


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_block_comes_back_as_it_went_and_nothing_else_changes(watched_rig: Rig, data: st.DataObject) -> None:
    gpu_blocks = data.draw(st.integers(3, 9))
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    tensors = [tensor_of(kind, rig=watched_rig, blocks=gpu_blocks, seed=seed) for seed, kind in enumerate(kinds)]
    count = data.draw(st.integers(1, min(gpu_blocks - 1, CPU_BLOCKS)))
    start = data.draw(st.permutations(range(gpu_blocks)))[:count]
    rest = data.draw(st.permutations(range(CPU_BLOCKS)))[:count]
    end = data.draw(st.permutations(range(1, gpu_blocks)))[:count]
    backend = watched_rig.open(
        {"full": [tensor for tensor, _ in tensors]}, gpu_blocks=gpu_blocks, cpu_blocks=CPU_BLOCKS
    )
    expected = blocks_of(tensors)
    assert all(set(blocks[0]) == {0} for blocks in expected), "the null block is zero"

    stored = backend.submit(batch_of(Direction.STORE, dict(zip(start, rest, strict=True))))
    assert end_of(stored) is EventStatus.DONE
    assert blocks_of(tensors) == expected
    loaded = backend.submit(batch_of(Direction.LOAD, dict(zip(rest, end, strict=True))))
    assert end_of(loaded) is EventStatus.DONE
    for blocks in expected:
        went = [blocks[slot] for slot in start]
        for slot, block in zip(end, went, strict=True):
            blocks[slot] = block
    assert blocks_of(tensors) == expected
    assert backend.close(deadline_s=GUARD_S)


def journey(backend: CudaBackend, tensor: Tensor, *, blocks: int) -> None:
    """Store `blocks` blocks, load them in reverse, compare."""
    before = tensor.blocks()
    assert end_of(backend.submit(store({slot: slot - 1 for slot in range(1, blocks)}))) is EventStatus.DONE
    assert end_of(backend.submit(load({blocks - 1 - slot: slot for slot in range(1, blocks)}))) is EventStatus.DONE
    assert tensor.blocks()[1:blocks] == before[1:blocks][::-1]


def test_groups_lie_in_slots_of_one_size(watched_rig: Rig) -> None:
    large, small = watched_rig.dense(4, 16), watched_rig.dense(4, 6, seed=1)
    backend = watched_rig.open({"full": [large], "swa": [small]}, gpu_blocks=4)
    assert end_of(backend.submit(store({1: 0}, group="full"))) is EventStatus.DONE
    assert end_of(backend.submit(store({2: 1}, group="swa"))) is EventStatus.DONE
    assert backend.cpu_slot(0).tobytes() == large.blocks()[1]
    assert backend.cpu_slot(1).tobytes() == small.blocks()[2] + bytes(10)
    assert (backend.block_bytes("full"), backend.block_bytes("swa")) == (16, 6)


def test_adjacent_slots_are_one_copy_of_one_call(watched_rig: Rig) -> None:
    fake, backend = watched_rig.fake, watched_rig.open({"full": [watched_rig.dense(8, 64)]}, gpu_blocks=8)
    fake.hold()
    before = fake.calls("cuMemcpyBatchAsync")
    backend.submit(store({1: 3, 2: 4, 3: 5}))
    assert (fake.calls("cuMemcpyBatchAsync") - before, fake.inflight()) == (1, 1)
    backend.submit(load({0: 4, 2: 5}))
    assert (fake.calls("cuMemcpyBatchAsync") - before, fake.inflight()) == (2, 3)


def test_a_batch_of_nothing_ends_behind_those_before_it(watched_rig: Rig) -> None:
    fake, backend = watched_rig.fake, watched_rig.open({"full": [watched_rig.dense(8, 64)]}, gpu_blocks=8)
    fake.hold()
    first, empty = backend.submit(store({1: 3})), backend.submit(store({}))
    assert (first.query(), empty.query()) == (EventStatus.PENDING, EventStatus.PENDING)
    fake.release()
    assert (end_of(empty), first.query()) == (EventStatus.DONE, EventStatus.DONE)


def test_a_long_batch_is_cut(watched_rig: Rig) -> None:
    """40 layers that do not touch, 512 blocks: 20,440 copies."""
    layers = [watched_rig.dense(512, 4, seed=seed) for seed in range(40)]
    backend = watched_rig.open({"full": layers}, gpu_blocks=512, cpu_blocks=512)
    fake = watched_rig.fake
    before, calls = [layer.blocks() for layer in layers], fake.calls("cuMemcpyBatchAsync")
    event = backend.submit(store({slot: slot - 1 for slot in range(1, 512)}))
    assert end_of(event) is EventStatus.DONE
    assert fake.calls("cuMemcpyBatchAsync") - calls >= 3
    for slot in range(1, 512):
        assert backend.cpu_slot(slot - 1).tobytes() == b"".join(layer[slot] for layer in before)


def test_a_long_batch_does_not_hold_who_submits_it(watched_rig: Rig) -> None:
    """The driver's queue takes one entry, and nothing moves: whoever hands over waits, and that is not who submits."""
    layers = [watched_rig.dense(512, 4, seed=seed) for seed in range(40)]
    backend, fake = watched_rig.open({"full": layers}, gpu_blocks=512, cpu_blocks=512), watched_rig.fake
    fake.hold()
    fake.set_queue_depth(1)
    event = backend.submit(store({slot: slot for slot in range(512)}))
    wait_until(lambda: fake.blocked_submissions() > 0)
    assert event.query() is EventStatus.PENDING
    fake.release()
    assert end_of(event) is EventStatus.DONE


def test_short_batches_behind_a_long_one_keep_their_turn(watched_rig: Rig) -> None:
    layers = [watched_rig.dense(512, 4, seed=seed) for seed in range(40)]
    backend = watched_rig.open({"full": layers}, gpu_blocks=512, cpu_blocks=512)
    events = [backend.submit(store({slot: slot for slot in range(512)}))]
    events += [backend.submit(store({slot: slot})) for slot in range(5)]
    wait_until(lambda: events[-1].query() is not EventStatus.PENDING)
    assert [event.query() for event in events] == [EventStatus.DONE] * 6


def test_no_submission_waits_for_room_in_the_queue(watched_rig: Rig) -> None:
    fake, backend = watched_rig.fake, watched_rig.open({"full": [watched_rig.dense(8, 64)]}, gpu_blocks=8)
    fake.set_queue_depth(1000)
    fake.hold()
    events = [backend.submit(store({1 + number % 7: number % 8})) for number in range(800)]
    assert fake.blocked_submissions() == 0
    assert events[-1].query() is EventStatus.PENDING
    fake.release()
    assert end_of(events[-1]) is EventStatus.DONE
    assert {event.query() for event in events} == {EventStatus.DONE}
    assert fake.blocked_submissions() == 0


def test_older_drivers_copy_one_by_one(watched_rig: Rig) -> None:
    watched_rig.fake.set_driver_version(12_030)
    tensor = watched_rig.dense(300, 3, 4)
    backend = watched_rig.open({"full": [tensor]}, gpu_blocks=300, cpu_blocks=300)
    journey(backend, tensor, blocks=300)
    assert watched_rig.fake.calls("cuMemcpyBatchAsync") == 0
    assert watched_rig.fake.calls("cuMemcpyAsync") >= 299


def test_memory_that_could_not_be_pinned_is_copied_all_the_same(rig: Rig) -> None:
    rig.fake.inject("cuMemHostRegister_v2", code=2)
    tensor = rig.dense(8, 64)
    backend = rig.open({"full": [tensor]}, gpu_blocks=8)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in backend.pinning.status.reason
    journey(backend, tensor, blocks=8)
    assert rig.fake.pageable() > 0


def test_copies_submitted_before_the_arena_is_settled_wait_for_it(watched_rig: Rig) -> None:
    tensor = watched_rig.dense(8, 64)
    backend = CudaBackend()
    watched_rig.backends.append(backend)
    backend.open(layout_of({"full": [tensor]}, gpu_blocks=8))
    journey(backend, tensor, blocks=8)
    assert watched_rig.fake.pageable() == 0


def test_the_estimate_follows_the_devices_clock(watched_rig: Rig) -> None:
    fake, backend = watched_rig.fake, watched_rig.open({"full": [watched_rig.dense(8, 1 << 16)]}, gpu_blocks=8)
    assert backend.eta_seconds(Direction.STORE, 1 << 20) == 0.0
    fake.set_timing(gbps=1)
    fake.use_virtual_time()
    event = backend.submit(store({1: 0, 3: 2, 5: 4}))
    fake.advance(100)
    assert event.query() is EventStatus.PENDING
    fake.advance(100)
    assert event.query() is EventStatus.DONE
    assert backend.eta_seconds(Direction.STORE, 10**6) == pytest.approx(1e-3, rel=0.01)
    assert backend.eta_seconds(Direction.LOAD, 10**6) == 0.0


@pytest.mark.parametrize("version", [12_000, 12_080, 13_000])
def test_drivers_of_every_version(version: int) -> None:
    """In a process of its own: the bindings ask for the version once."""
    said = run_script("journey.py", str(version))
    calls = {12_000: "cuMemcpyAsync", 12_080: "cuMemcpyBatchAsync", 13_000: "cuMemcpyBatchAsync"}
    assert said == f"driver {version}, copies by {calls[version]}, as they went, 0 violations\n"
