"""Residence hints as a program sees them: scopes, quotas, sessions, waiters, leaks, the end of the runtime."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable

import pytest

from aiokv import (
    Declined,
    DeclineReason,
    Deferred,
    HintState,
    InvalidTransition,
    KVRuntime,
    MediaSpan,
    ResidenceHint,
    RuntimeConfig,
    Tier,
    UsageError,
)
from aiokv.core.counters import HintClosing, RevokeReason
from aiokv.testing import FakeBackend, evict, make_resident
from tests.runtime.support import (
    BLOCK,
    GEOMETRY,
    GROUP,
    Case,
    assert_all_given_back,
    finish_copies,
    granted,
    opened,
    prompt,
    state_of,
    turns,
    until,
)


def kept(kv: KVRuntime, token_ids: list[int], *, tenant: str = "a", tier: Tier = Tier.GPU) -> ResidenceHint:
    hint = kv.keep(token_ids, tenant=tenant, tier=tier)
    assert isinstance(hint, ResidenceHint)
    return hint


# Scopes.


async def test_a_system_prompt_stays_while_its_scope_lasts() -> None:
    async with opened(hint_quota=0.5) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ggg"})
        with case.kv.keep(prompt(3), tenant="acme") as hint:
            assert isinstance(hint, ResidenceHint)
            assert (hint.state, hint.blocks, hint.held_tokens, hint.is_whole) == (HintState.HELD, 3, 48, True)
            assert (hint.tenant, hint.tier, hint.num_tokens) == ("acme", Tier.GPU, 49)
            assert repr(hint) == "<ResidenceHint of 'acme' in gpu: 3 blocks, held>"
            granted(case.kv, prompt(5, seed=1, extra=0)).release()
            with pytest.raises(UsageError, match="pinned"):
                evict(case.kv, prompt(3), {GROUP: (0,)})
            async with case.kv.acquire("request", prompt(3)) as lease:
                assert lease.prefix_tokens == 48
        assert (hint.state, hint.blocks, hint.held_tokens) == (HintState.RELEASED, 0, 0)
        await finish_copies(case)
        evict(case.kv, prompt(3), {GROUP: (0, 1, 2)})
        await assert_all_given_back(case)


async def test_a_scope_that_fails_or_is_cancelled_gives_back() -> None:
    async with opened(hint_quota=0.5) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ggg"})

        async def hold() -> None:
            with case.kv.keep(prompt(3)):
                await asyncio.sleep(3600.0)

        task = asyncio.create_task(hold())
        await turns(2)
        assert len(case.kv.audit().hints) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ZeroDivisionError), case.kv.keep(prompt(3)):
            _ = 1 // 0
        assert case.kv.audit().hints == ()
        await assert_all_given_back(case)


async def test_a_declined_scope_runs_all_the_same() -> None:
    """A hint is no condition: whoever needs to know asks which of the two it is."""
    async with opened(hint_quota=0.1) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ggg"})
        before = case.kv.snapshot()
        ran = []
        with case.kv.keep(prompt(3)) as hint:
            ran.append(hint)
        assert ran == [Declined(DeclineReason.QUOTA)]
        assert case.kv.snapshot() == before
        await assert_all_given_back(case)


async def test_release_is_idempotent_and_final() -> None:
    async with opened(hint_quota=0.5) as case:
        hint = kept(case.kv, prompt(3))
        hint.release()
        hint.release()
        hint.revoke()
        assert case.kv.core.counters.hints_closed[HintClosing.RELEASED] == 1
        for call in (hint.refresh, lambda: hint.update(prompt(2))):
            with pytest.raises(InvalidTransition, match="released"):
                call()
        await assert_all_given_back(case)


# Sessions.


async def test_a_session_keeps_what_it_has_computed_from_turn_to_turn() -> None:
    async with opened(hint_quota=1.0) as case:
        with case.kv.keep([], tenant="session 7") as hint:
            assert isinstance(hint, ResidenceHint)
            for blocks in (2, 4, 6):
                async with case.kv.acquire(f"turn {blocks}", prompt(blocks)) as lease:
                    lease.confirm(lease.num_tokens)
                    await turns(2)
                    assert hint.update(lease.keys) == blocks * BLOCK
                await finish_copies(case)
                assert hint.blocks == blocks
        await assert_all_given_back(case)


async def test_blocks_that_come_later_are_held_without_polling() -> None:
    """The system prompt was evicted; its next request loads it, and from then on it stays."""
    async with opened(hint_quota=0.5) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        hint = kept(case.kv, prompt(3))
        assert (hint.blocks, hint.is_whole) == (0, False)
        lease = granted(case.kv, prompt(3))
        case.backend.complete_all()
        await until(lambda: hint.is_whole)
        assert hint.held_tokens == 48
        lease.release()
        hint.release()
        await assert_all_given_back(case)


async def test_raw_tokens_are_hashed_with_the_salt_adapter_and_media_of_the_hint() -> None:
    async with opened(hint_quota=1.0) as case:
        media = (MediaSpan(b"picture", 3, 4),)
        keys = case.kv.keys(prompt(4), salt="s", adapter="a", media=media)
        lease = granted(case.kv, keys)
        lease.confirm(lease.num_tokens)
        hint = case.kv.keep(prompt(2), salt="s", adapter="a", media=media)
        assert isinstance(hint, ResidenceHint)
        assert hint.held_tokens == 32
        assert hint.update(prompt(4)) == 64
        assert hint.update(keys) == 64
        assert hint.update(prompt(4), media=()) == 0
        assert hint.update(prompt(4)) == 0, "the media it was given last"
        for other in (case.kv.keys(prompt(4)), case.kv.keys(prompt(4), salt="s")):
            with pytest.raises(UsageError, match="another salt or adapter"):
                hint.update(other)
        lease.release()
        hint.release()
        await assert_all_given_back(case)


async def test_raw_tokens_are_hashed_like_the_keys_that_a_hint_was_kept_with() -> None:
    """Law 10: what was in the keys, the salt, the adapter and the media, is in those of the next turn."""
    async with opened(hint_quota=1.0) as case:
        keys = case.kv.keys(prompt(4), salt="s", adapter="a", media=(MediaSpan(b"picture", 3, 4),))
        lease = granted(case.kv, keys)
        lease.confirm(lease.num_tokens)
        with case.kv.keep(case.kv.keys(prompt(2), salt="s", adapter="a")) as other, case.kv.keep(keys) as hint:
            assert isinstance(hint, ResidenceHint) and isinstance(other, ResidenceHint)
            assert other.update(prompt(4)) == 0
            assert other.update(prompt(4), media=(MediaSpan(b"picture", 3, 4),)) == 64
            assert hint.update(prompt(2)) == 32
            assert hint.update(prompt(4)) == 64
        lease.release()
        await assert_all_given_back(case)


async def test_media_of_a_hint_change_with_what_it_holds_and_not_otherwise() -> None:
    """Law 2: a declined or refused update leaves them; an iterator is read once; keys have media of their own."""
    async with opened(hint_quota=0.5) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ggg"})
        picture = MediaSpan(b"picture", 3, 4)
        hint = kept(case.kv, prompt(3))
        assert hint.update(prompt(6), media=(picture,)) == Declined(DeclineReason.QUOTA)
        assert hint.update(prompt(3)) == 48
        with pytest.raises(UsageError, match="media belong to the BlockKeys"):
            hint.update(case.kv.keys(prompt(3)), media=(picture,))
        for wrong in (5, ["picture"]):
            with pytest.raises(UsageError, match="media must be MediaSpan values"):
                hint.update(prompt(3), media=wrong)  # type: ignore[arg-type]  # that is the point
        assert hint.update(prompt(3)) == 48
        assert hint.update(prompt(3), media=iter((picture,))) == 0
        assert hint.update(prompt(3)) == 0
        hint.release()
        await assert_all_given_back(case)


async def test_what_a_caller_does_to_their_keys_later_changes_no_hint() -> None:
    async with opened(hint_quota=1.0) as case:
        make_resident(case.kv, prompt(4), {GROUP: "gggg"})
        keys = case.kv.keys(prompt(2, extra=0))
        hint = case.kv.keep(keys)
        assert isinstance(hint, ResidenceHint)
        keys.append(prompt(4)[32:])
        assert hint.refresh() == 32
        assert hint.update(keys) == 64
        hint.release()
        await assert_all_given_back(case)


# Nobody waits for a hint.


async def test_the_head_of_the_queue_gets_room_from_hints() -> None:
    async with opened(hint_quota=1.0) as case:
        make_resident(case.kv, prompt(4), {GROUP: "gggg"})
        hint = kept(case.kv, prompt(4))
        blocking = granted(case.kv, prompt(4, seed=1, extra=0))
        waiting = asyncio.create_task(case.kv.acquire("waiting", prompt(8, seed=2, extra=0)))
        await turns(3)
        assert not waiting.done()
        assert hint.blocks == 4, "it would not have been enough"
        blocking.release()
        lease = await waiting
        assert hint.state is HintState.REVOKED
        lease.release()
        assert hint.refresh() == 0
        hint.release()
        await assert_all_given_back(case)


async def test_a_released_hint_lets_in_who_polls() -> None:
    async with opened(hint_quota=1.0) as case:
        make_resident(case.kv, prompt(4), {GROUP: "gggg"})
        hint = kept(case.kv, prompt(4))
        before = case.kv.capacity_generation
        hint.release()
        assert case.kv.capacity_generation > before
        await assert_all_given_back(case)


async def test_an_extension_and_a_resumption_get_room_from_hints() -> None:
    async with opened(hint_quota=1.0) as case:
        lease = granted(case.kv, prompt(4, extra=0))
        preempted = granted(case.kv, prompt(2, seed=1, extra=0)).preempt()
        make_resident(case.kv, prompt(4, seed=2), {GROUP: "gggg"})
        hint = kept(case.kv, prompt(4, seed=2))
        assert lease.try_extend(BLOCK) == 5 * BLOCK
        assert hint.state is HintState.REVOKED
        hint.refresh()
        resumed = preempted.try_resume()
        assert not isinstance(resumed, Deferred)
        assert case.kv.core.counters.hints_revoked[RevokeReason.CAPACITY] >= 1
        lease.release()
        resumed.release()
        hint.release()
        await assert_all_given_back(case)


# Operators.


async def test_an_operator_revokes_all_hints_of_a_tenant() -> None:
    async with opened(hint_quota=1.0) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ggg"})
        mine = [kept(case.kv, prompt(3)), kept(case.kv, prompt(2))]
        other = kept(case.kv, prompt(3), tenant="b")
        assert case.kv.revoke_hints(tenant="a") == 2
        assert [hint.state for hint in (*mine, other)] == [HintState.REVOKED] * 2 + [HintState.HELD]
        assert mine[0].refresh() == 48
        assert case.kv.revoke_hints() == 2
        assert case.kv.revoke_hints() == 0
        other.revoke()
        assert case.kv.core.counters.hints_revoked[RevokeReason.OPERATOR] == 4
        for hint in (*mine, other):
            hint.release()
        await assert_all_given_back(case)


async def test_a_reset_revokes_and_is_back_when_nothing_is_held() -> None:
    async with opened(hint_quota=1.0) as case:
        make_resident(case.kv, prompt(3), {GROUP: "bbb"})
        hints = [kept(case.kv, prompt(3), tenant=f"{i}") for i in range(5)]
        cpu = kept(case.kv, prompt(3), tier=Tier.CPU)
        await case.kv.reset(Tier.GPU)
        assert [hint.state for hint in hints] == [HintState.REVOKED] * 5
        assert state_of(case.kv).gpu.free == 8
        assert (cpu.state, cpu.blocks) == (HintState.HELD, 3)
        for hint in (*hints, cpu):
            hint.release()
        await assert_all_given_back(case)


async def test_the_audit_and_the_metrics_show_hints() -> None:
    async with opened(hint_quota=1.0) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ggg"})
        with case.kv.keep(prompt(3), tenant="acme"), case.kv.keep(prompt(5)):
            (first, second) = case.kv.audit().hints
            assert (first.tenant, first.blocks, second.blocks) == ("acme", 3, 3)
            assert shown(case, "aiokv_hints", state="whole") == 1
            assert shown(case, "aiokv_hints", state="partial") == 1
            assert shown(case, "aiokv_hint_blocks", tier="gpu") == 3
            assert shown(case, "aiokv_pool_blocks", tier="gpu", state="resident") == 3
            case.kv.revoke_hints()
        assert shown(case, "aiokv_hints", state="whole") == 0
        assert shown(case, "aiokv_hints_opened_total") == 2
        assert shown(case, "aiokv_hints_revoked_total", reason="operator") == 2
        assert shown(case, "aiokv_hints_closed_total", how="released") == 2
        assert shown(case, "aiokv_hints_declined_total", reason="quota") == 0
        assert isinstance(case.kv.keep(prompt(9)), Declined)
        assert shown(case, "aiokv_hints_declined_total", reason="quota") == 1
        await assert_all_given_back(case)


# Leaks and ends.


async def test_a_dropped_hint_is_warned_about_counted_and_given_back() -> None:
    """Law 4: at the loop's next turn."""
    async with opened(hint_quota=1.0) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ggg"})
        with pytest.warns(ResourceWarning, match="hint of tenant 'acme' was garbage collected") as warned:
            kept(case.kv, prompt(3), tenant="acme")
            gc.collect()
            await until(lambda: not case.kv.core.hints.live())
            await turns(2)
        assert len(warned) == 1
        assert case.kv.core.counters.hints_closed[HintClosing.FINALIZER] == 1
        await assert_all_given_back(case)


async def test_a_hint_that_holds_nothing_any_more_is_dropped_in_silence() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        async with opened(hint_quota=1.0) as case:
            kept(case.kv, prompt(3)).release()
            revoked = kept(case.kv, prompt(3))
            revoked.revoke()
            outlives = kept(case.kv, prompt(2))
            del revoked
            gc.collect()
            await turns(3)
        assert outlives.state is HintState.RELEASED
        outlives.release()
        del outlives
        gc.collect()
        await turns(3)
    assert caught == []
    assert case.kv.core.counters.hints_closed == {
        HintClosing.RELEASED: 1, HintClosing.FINALIZER: 1, HintClosing.SHUTDOWN: 1,
    }  # fmt: skip
    assert case.kv.audit().pins == ()


async def test_after_the_end_nothing_is_kept() -> None:
    async with opened() as case:
        hint = kept(case.kv, prompt(0))
    with pytest.raises(UsageError, match="closed"):
        case.kv.keep(prompt(3))
    with pytest.raises(UsageError, match="closed"):
        hint.refresh()


# What is refused.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda kv: kv.keep(prompt(1), tenant=""), "tenant"),
        (lambda kv: kv.keep(prompt(1), tenant=7), "tenant"),
        (lambda kv: kv.keep(prompt(1), tier="gpu"), "tier"),
        (lambda kv: kv.keep(prompt(1), align=0), "align"),
        (lambda kv: kv.keep(prompt(1), align=True), "align"),
        (lambda kv: kv.keep(prompt(1), media=7), "media"),
        (lambda kv: kv.keep("text"), "token ids"),
        (lambda kv: kv.keep(kv.keys(prompt(1)), salt="s"), "belong to the BlockKeys"),
        (lambda kv: kv.keep(prompt(1), tier=Tier.CPU), "no cpu tier"),
    ],
)
async def test_wrong_input_is_named_and_changes_nothing(make: Callable[[KVRuntime], object], message: str) -> None:
    async with opened(cpu_blocks=0) as case:
        before = case.kv.snapshot()
        with pytest.raises(UsageError, match=message):
            make(case.kv)
        assert case.kv.snapshot() == before


async def test_the_default_quota_is_a_tenth() -> None:
    config = RuntimeConfig(geometry=GEOMETRY, gpu_blocks=101, cpu_blocks=50, backend=FakeBackend())
    async with KVRuntime(config) as kv:
        assert kv.core.hints.quota_blocks(Tier.GPU) == 10
        assert kv.core.hints.quota_blocks(Tier.CPU) == 5


def shown(case: Case, name: str, **labels: str) -> float:
    """One sample of a scrape."""
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for metric in case.kv.collector.collect()
        for sample in metric.samples
    }
    return samples[name, frozenset(labels.items())]
