"""A fork shares whole confirmed blocks of its parent, findable or private, and computes the rest in its own slots."""

from __future__ import annotations

import pytest

from aiokv.core.counters import Phase, Source
from aiokv.core.lease_table import LeaseRecord, LeaseState
from aiokv.errors import CapacityError, InvalidTransition, LeaseReleased, UsageError
from aiokv.model.ids import Tier
from aiokv.model.plan import DeferReason, Deferred
from aiokv.model.spec import ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.host import Host
from aiokv.testing.streams import geometry_of

GPU, CPU = Tier.GPU, Tier.CPU
FULL = FullAttention("full", block_size=4)
COARSE = FullAttention("coarse", block_size=8)
STATE = RecurrentState("state", block_size=4)


def host(*groups: GroupSpec, gpu: int = 40, cpu: int = 40, slice_blocks: int = 1024) -> Host:
    return Host(geometry_of(*(groups or (FULL,))), gpu_blocks=gpu, cpu_blocks=cpu, slice_blocks=slice_blocks)


def table(h: Host, record: LeaseRecord, group: int = 0) -> list[int]:
    slots: list[int] = h.cache.block_ids(record, group=group).tolist()
    return slots


def forked(h: Host, record: LeaseRecord, num_tokens: int) -> LeaseRecord:
    fork = h.fork(record, num_tokens)
    assert isinstance(fork, LeaseRecord), fork
    return fork


@pytest.mark.parametrize(("tokens", "shared"), [(18, 4), (17, 4), (16, 4), (15, 3), (4, 1), (3, 0), (1, 0)])
def test_whole_blocks_are_shared_and_the_tail_is_computed_again(tokens: int, shared: int) -> None:
    h = host()
    record = h.admit(0, 18)
    h.confirm(record, 18)
    fork = forked(h, record, tokens)
    assert (fork.length, fork.keys.num_tokens) == (4 * shared, tokens)
    assert table(h, fork)[:shared] == table(h, record)[:shared]
    assert not set(table(h, fork)[shared:]) & set(table(h, record))
    assert fork.state is LeaseState.READY
    h.confirm(fork, tokens)
    h.check()
    h.tear_down()


def test_all_groups_start_at_one_length() -> None:
    h = host(FULL, COARSE)
    record = h.admit(0, 30)
    h.confirm(record, 30)
    assert forked(h, record, 22).length == 16
    h.check()
    h.tear_down()


def test_tokens_that_are_not_confirmed_are_computed_by_the_fork() -> None:
    h = host()
    record = h.admit(0, 24)
    h.confirm(record, 10)
    fork = forked(h, record, 24)
    assert fork.length == 8
    h.confirm(fork, 24)
    h.confirm(record, 24)
    h.check()
    assert table(h, fork)[2:] != table(h, record)[2:], "each computed its own: a duplicate stays private"
    h.tear_down()


def test_private_blocks_are_shared_too() -> None:
    """A duplicate and an unpublished block can be found by nobody, and still hold what the fork reads."""
    h = host()
    record = h.admit(0, 24)
    other = h.admit(0, 24, request_id="other")
    h.confirm(record, 24)
    h.confirm(other, 24, publish_to=8)
    fork = forked(h, other, 24)
    assert table(h, fork) == table(h, other)
    assert not set(table(h, fork)) & set(table(h, record))
    h.release(other)
    h.check()
    h.append(fork, 8)
    h.extend(fork, 8)
    h.confirm(fork, 32)
    h.check()
    h.tear_down()


def test_parent_and_fork_leave_in_any_order() -> None:
    h = host()
    record = h.admit(0, 18)
    h.confirm(record, 18)
    fork = forked(h, record, 18)
    grandchild = forked(h, fork, 17)
    h.release(fork)
    h.finish(record)
    h.check()
    h.confirm(grandchild, 17)
    h.check()
    h.tear_down()


def test_a_truncated_parent_leaves_shared_blocks_alone() -> None:
    """What is not findable but shared is not written either."""
    h = host()
    record = h.admit(0, 24)
    h.confirm(record, 24, publish_to=0)
    fork = forked(h, record, 24)
    before = table(h, record)
    assert h.truncate(record, 18, stream=2) == 16
    assert table(h, fork) == before
    h.append(record, 6)
    h.confirm(record, 24)
    h.check()
    h.tear_down()


def test_a_fork_is_truncated_down_to_its_prefix() -> None:
    h = host()
    record = h.admit(0, 24)
    h.confirm(record, 24)
    fork = forked(h, record, 22)
    h.confirm(fork, 22)
    with pytest.raises(UsageError):
        h.truncate(fork, 19)
    assert h.truncate(fork, 20) == 20
    h.check()
    h.tear_down()


def test_its_prompt_is_attributed_like_any_other() -> None:
    """Law 7: a fork is an admitted request; what it shares came from the GPU tier."""
    h = host()
    record = h.admit(0, 18)
    h.confirm(record, 18)
    forked(h, record, 18)
    counters = h.cache.counters
    assert [counters.prompt_tokens[source, Phase.FIRST] for source in Source] == [16, 0, 2 + 18]
    assert (counters.forks, counters.leases_opened) == (1, 2)
    h.tear_down()


def test_a_fork_without_slots_is_deferred_and_changes_nothing() -> None:
    h = host(gpu=8, cpu=0)
    record = h.admit(0, 20, reserve_tokens=8)
    h.confirm(record, 20)
    assert h.fork(record, 18) == Deferred(DeferReason.CAPACITY)
    h.release(record)
    h.tear_down()


def test_a_fork_that_could_never_fit_is_refused() -> None:
    h = host(gpu=8, cpu=0)
    record = h.admit(0, 4, reserve_tokens=24)
    h.append(record, 20)
    with pytest.raises(CapacityError):
        h.fork(record, 24)
    h.tear_down()


@pytest.mark.parametrize(("at", "length"), [(44, 40), (40, 40), (39, 0), (20, 0)])
def test_a_window_shares_what_it_still_holds(at: int, length: int) -> None:
    """At 36 the window reads block 7, which was given back when 40 tokens were confirmed: nothing is shared."""
    h = host(SlidingWindow("window", block_size=4, window=9), cpu=0)
    record = h.admit(0, 44)
    h.confirm(record, 40)
    fork = forked(h, record, at)
    assert fork.length == length
    h.confirm(fork, at)
    h.check()
    h.tear_down()


def test_a_chunked_group_shares_its_chunk() -> None:
    h = host(ChunkedLocal("chunked", block_size=4, chunk=16), cpu=0)
    record = h.admit(0, 60)
    h.confirm(record, 58)
    fork = forked(h, record, 58)
    assert fork.length == 56
    assert table(h, fork)[:14] == [*[0] * 12, *table(h, record)[12:14]]
    h.check()
    h.tear_down()


def test_a_recurrent_group_shares_a_captured_state_only() -> None:
    h = host(STATE, FULL)
    record = h.admit(0, 24)
    h.confirm(record, 16, states=(16,))
    h.confirm(record, 18)
    fork = forked(h, record, 18)
    assert fork.length == 16
    assert table(h, fork)[3] == table(h, record)[3] != 0
    h.confirm(fork, 18)
    h.confirm(record, 23)
    assert forked(h, record, 23).length == 0, "no state is held within the last block"
    h.check()
    h.tear_down()


def test_a_draft_head_recomputes_its_last_block() -> None:
    h = host(FullAttention("draft", block_size=4, lookahead=True))
    record = h.admit(0, 20)
    h.confirm(record, 20)
    assert forked(h, record, 20).length == 16
    assert forked(h, record, 19).length == 12
    h.check()
    h.tear_down()


def test_a_lease_of_an_older_epoch_forks_nothing() -> None:
    h = host()
    record = h.admit(0, 18)
    h.confirm(record, 18)
    h.reset(GPU)
    with pytest.raises(UsageError, match="older than the last reset"):
        h.fork(record, 18)
    h.tear_down()


def test_neither_while_loading_nor_afterwards_nor_beyond_what_is_known() -> None:
    h = host()
    h.place(0, range(4), tier=CPU)
    record = h.admit(0, 18)
    with pytest.raises(InvalidTransition, match="cannot be forked while it is loading"):
        h.fork(record, 18)
    h.end_all()
    for tokens in (0, -1, 19):
        with pytest.raises(UsageError, match="1 to 18 are known"):
            h.fork(record, tokens)
    h.release(record)
    with pytest.raises(LeaseReleased):
        h.fork(record, 18)
    h.tear_down()
