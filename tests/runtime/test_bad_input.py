"""Bad input gets a clear error of the right class, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiokv import (
    CapacityError,
    ConfigError,
    InvalidTransition,
    KVRuntime,
    Lease,
    LeaseReleased,
    MediaSpan,
    Tier,
    UsageError,
)
from aiokv.testing import evict, make_resident
from tests.runtime.support import BLOCK, GEOMETRY, GROUP, Case, config_of, granted, opened, prompt, state_of

# What a request may not say.

BAD_TOKENS: dict[str, Any] = {
    "nothing": [],
    "over int32": [1, 2**31],
    "under int32": [-(2**31) - 1],
    "floats": [1.0, 2.0],
    "a float array": np.array([1.0]),
    "strings": ["1"],
    "one string": "123",
    "bytes": b"123",
    "a bytearray": bytearray(b"123"),
    "nested": [[1, 2], [3]],
    "a matrix": np.zeros((2, 2), np.int32),
    "None in it": [1, None],
    "None": None,
    "one number": 7,
    "a generator": (n for n in range(3)),
    "a set": {1, 2},
}
BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "negative reserve": {"reserve_tokens": -1},
    "reserve of a float": {"reserve_tokens": 1.5},
    "reserve of a truth": {"reserve_tokens": True},
    "align of zero": {"align": 0},
    "negative align": {"align": -16},
    "align of a string": {"align": "64"},
    "first chunk of zero": {"first_chunk": 0},
    "first chunk of a float": {"first_chunk": 8.0},
    "priority of a string": {"priority": "high"},
    "priority of a float": {"priority": 0.5},
    "salt of a number": {"salt": 3},
    "adapter of bytes": {"adapter": b"lora"},
    "media of a number": {"media": 3},
    "media of strings": {"media": ["cat.png"]},
}
BAD_TIMEOUTS: list[Any] = [-1, -0.001, float("nan"), "5", True]


async def refused(case: Case, *args: Any, error: type[Exception] = UsageError, **options: Any) -> None:  # noqa: ANN401
    """Refused by all three ways in, and nothing has changed."""
    before = state_of(case.kv)
    with pytest.raises(error):
        await case.kv.acquire(*args, **options)
    with pytest.raises(error):
        await case.kv.admit(*args, **options)
    if "timeout" not in options:
        with pytest.raises(error):
            case.kv.try_acquire(*args, **options)
    assert state_of(case.kv) == before


@pytest.mark.parametrize("tokens", BAD_TOKENS.values(), ids=BAD_TOKENS)
async def test_token_ids_that_are_none(tokens: Any) -> None:  # noqa: ANN401  # anything
    async with opened() as case:
        await refused(case, "request", tokens)


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
async def test_options_out_of_range(options: dict[str, Any]) -> None:
    async with opened() as case:
        await refused(case, "request", prompt(2), **options)


@pytest.mark.parametrize("timeout", BAD_TIMEOUTS)
async def test_timeouts_that_are_none(timeout: Any) -> None:  # noqa: ANN401  # anything
    async with opened() as case:
        await refused(case, "request", prompt(2), timeout=timeout)
        lease = granted(case.kv, prompt(8, extra=0))
        other = case.kv.try_acquire("other", prompt(1, seed=1))
        assert not isinstance(other, Lease)
        with pytest.raises(UsageError):
            await lease.ready(timeout=timeout)
        lease.release()


async def test_a_timeout_that_no_float_can_hold_never_comes() -> None:
    async with opened() as case:
        lease = await case.kv.acquire("request", prompt(2), timeout=10**400)
        lease.release()


@pytest.mark.parametrize("request_id", ["", None, 7, b"id"])
async def test_request_ids_that_are_none(request_id: Any) -> None:  # noqa: ANN401  # anything
    async with opened() as case:
        await refused(case, request_id, prompt(2))


async def test_an_unknown_option() -> None:
    async with opened() as case:
        await refused(case, "request", prompt(2), error=TypeError, slat="tenant")


async def test_a_request_that_can_never_fit() -> None:
    async with opened() as case:
        await refused(case, "request", prompt(8), error=CapacityError)
        await refused(case, "request", prompt(1), error=CapacityError, reserve_tokens=8 * BLOCK)


@pytest.mark.parametrize("position", [3, 8191, 8192, 20_000])
async def test_the_error_names_the_position_in_the_whole_prompt(position: int) -> None:
    """Long prompts are converted in slices."""
    token_ids = list(range(30_000))
    token_ids[position] = 2**40
    async with opened() as case:
        with pytest.raises(UsageError, match=f"token {position} "):
            await case.kv.acquire("request", token_ids)
        with pytest.raises(UsageError, match=f"token {position} "):
            await case.kv.prepare_keys(token_ids)


async def test_an_identity_beside_keys_that_have_one() -> None:
    async with opened() as case:
        keys = case.kv.keys(prompt(2), salt="tenant")
        await refused(case, "request", keys, salt="other tenant")
        await refused(case, "request", keys, adapter="lora")
        await refused(case, "request", keys, media=(MediaSpan(b"digest", 0, 4),))
        granted(case.kv, prompt(2)).release()


async def test_keys_of_another_geometry() -> None:
    async with opened() as case, opened(geometry=GEOMETRY) as other:
        keys = KVRuntime(config_of(hash_block_size=8)).keys(prompt(2))
        await refused(case, "request", keys)
        granted(other.kv, prompt(2)).release()


# What a lease may not be told.


async def test_an_unknown_group() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        before = state_of(case.kv)
        for use in (lease.block_table, lease.block_ids):
            with pytest.raises(ConfigError, match=r"unknown group 'swa'.*'full'"):
                use("swa")
        with pytest.raises(UsageError):
            lease.state_slots(GROUP)
        assert state_of(case.kv) == before
        lease.release()


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [
        (2 * BLOCK + 2, {}),
        (-1, {}),
        (1.0, {}),
        (True, {}),
        (BLOCK, {"publish_to": -1}),
        (BLOCK, {"publish_to": 1.5}),
        (BLOCK, {"states": (2 * BLOCK,)}),
        (BLOCK, {"states": (-BLOCK,)}),
        (BLOCK, {"states": ("16",)}),
        (BLOCK, {"states": None}),
        (BLOCK, {"states": BLOCK}),
    ],
)
async def test_confirming_what_is_not_so(num_tokens: Any, options: dict[str, Any]) -> None:  # noqa: ANN401
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        before = state_of(case.kv)
        with pytest.raises(UsageError):
            lease.confirm(num_tokens, **options)
        assert state_of(case.kv) == before
        assert lease.confirmed_tokens == 0
        lease.release()


async def test_confirming_more_than_there_is_room_for() -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(1, extra=0))
        lease.append([1])
        with pytest.raises(UsageError, match="room for 16"):
            lease.confirm(BLOCK + 1)
        lease.release()


async def test_confirming_before_the_loads_have_ended() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        before = state_of(case.kv)
        with pytest.raises(InvalidTransition):
            lease.confirm(BLOCK)
        with pytest.raises(InvalidTransition):
            _ = lease.delivered
        assert state_of(case.kv) == before
        lease.release()


@pytest.mark.parametrize("tokens", list(BAD_TOKENS.values())[1:], ids=list(BAD_TOKENS)[1:])
async def test_appending_what_are_no_tokens(tokens: Any) -> None:  # noqa: ANN401  # anything
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        with pytest.raises(UsageError):
            lease.append(tokens)
        assert lease.num_tokens == 2 * BLOCK + 1
        lease.release()


@pytest.mark.parametrize("tokens", [-1, 1.5, "16", True, None])
async def test_extending_by_what_is_no_number_of_tokens(tokens: Any) -> None:  # noqa: ANN401  # anything
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        before = state_of(case.kv)
        with pytest.raises(UsageError):
            lease.try_extend(tokens)
        with pytest.raises(UsageError):
            await lease.extend(tokens)
        with pytest.raises(UsageError):
            lease.block_ids(GROUP, start=tokens if tokens is not None else -5)
        assert state_of(case.kv) == before
        lease.release()


@pytest.mark.parametrize("tokens", [9 * BLOCK, 10**10, 2**63, 10**30])
async def test_extending_by_what_can_never_fit_is_told_at_once(tokens: int) -> None:
    """Law 8: no memory is taken for positions that no pool has."""
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        before = state_of(case.kv)
        with pytest.raises(CapacityError, match="the pool has 8"):
            lease.try_extend(tokens)
        with pytest.raises(CapacityError, match="the pool has 8"):
            await lease.extend(tokens)
        assert state_of(case.kv) == before
        lease.release()


@pytest.mark.parametrize("callback", [None, 5, "print"])
async def test_a_callback_that_cannot_be_called(callback: Any) -> None:  # noqa: ANN401  # anything
    """Whoever asks for it is told, not the turn in which a copy ends."""
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "cc"})
        lease = granted(case.kv, prompt(2))
        with pytest.raises(UsageError, match="callable"):
            lease.add_done_callback(callback)
        case.backend.complete_all()
        await lease.ready()
        lease.release()


@pytest.mark.parametrize("backlog", [0, -1, None, "10", 1.5, True])
async def test_a_backlog_that_is_none(backlog: Any) -> None:  # noqa: ANN401  # anything
    """Whoever subscribes is told, not the next request."""
    async with opened() as case:
        with pytest.raises(UsageError, match="backlog"):
            case.kv.events(backlog=backlog)
        lease = granted(case.kv, prompt(2))
        lease.confirm(2 * BLOCK)
        lease.release()


USES_OF_A_LEASE: dict[str, Callable[[Lease], object]] = {
    "hit": lambda lease: lease.hit,
    "delivered": lambda lease: lease.delivered,
    "prefix_tokens": lambda lease: lease.prefix_tokens,
    "keys": lambda lease: lease.keys,
    "num_tokens": lambda lease: lease.num_tokens,
    "confirmed_tokens": lambda lease: lease.confirmed_tokens,
    "capacity_tokens": lambda lease: lease.capacity_tokens,
    "block_table": lambda lease: lease.block_table(GROUP),
    "block_ids": lambda lease: lease.block_ids(GROUP),
    "state_slots": lambda lease: lease.state_slots(GROUP),
    "append": lambda lease: lease.append([1]),
    "confirm": lambda lease: lease.confirm(1),
    "try_extend": lambda lease: lease.try_extend(1),
    "wait_on": lambda lease: lease.wait_on(None),
}


@pytest.mark.parametrize("end", [Lease.release, Lease.finish])
async def test_a_lease_that_was_given_back_is_poisoned(end: Callable[[Lease], None]) -> None:
    async with opened() as case:
        lease = granted(case.kv, prompt(2))
        end(lease)
        await case.kv.drain()
        before = state_of(case.kv)
        for name, use in USES_OF_A_LEASE.items():
            with pytest.raises(LeaseReleased, match="request"):
                pytest.fail(f"{name} gave {use(lease)!r}")
        for awaited in (lease.ready(), lease.extend(1)):
            with pytest.raises(LeaseReleased):
                await awaited
        lease.release()
        lease.finish()
        assert state_of(case.kv) == before


# What a runtime may not be asked.


async def test_resetting_what_is_no_tier() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "bb"})
        before = state_of(case.kv)
        for tier in ("gpu", 0, GROUP):
            with pytest.raises(UsageError):
                await case.kv.reset(tier)  # type: ignore[arg-type]  # that is the point
        assert state_of(case.kv) == before


@pytest.mark.parametrize(
    ("layout", "error"),
    [
        ({GROUP: "gx"}, UsageError),
        ({GROUP: "ggg"}, UsageError),
        ({"swa": "gg"}, ConfigError),
        ({GROUP: "gg", "swa": "g"}, ConfigError),
    ],
)
async def test_making_resident_what_cannot_be(layout: dict[str, str], error: type[Exception]) -> None:
    async with opened() as case:
        before = state_of(case.kv)
        with pytest.raises(error):
            make_resident(case.kv, prompt(2), layout)
        assert state_of(case.kv) == before


async def test_making_resident_more_than_is_free_removes_nothing() -> None:
    async with opened(gpu_blocks=9, cpu_blocks=2) as case:
        make_resident(case.kv, prompt(6), {GROUP: "gggggg"})
        before = state_of(case.kv)
        with pytest.raises(UsageError):
            make_resident(case.kv, prompt(3, seed=1), {GROUP: "ggg"})
        with pytest.raises(UsageError):
            make_resident(case.kv, prompt(3, seed=1), {GROUP: "ccc"})
        assert state_of(case.kv) == before


async def test_evicting_what_is_not_there() -> None:
    async with opened() as case:
        make_resident(case.kv, prompt(2), {GROUP: "g-"})
        before = state_of(case.kv)
        for positions, tier in (((1,), Tier.GPU), ((0,), Tier.CPU), ((0, 1), Tier.GPU), ((5,), Tier.GPU)):
            with pytest.raises(UsageError):
                evict(case.kv, prompt(2), {GROUP: positions}, tier=tier)
        assert state_of(case.kv) == before


async def test_an_error_about_many_blocks_is_short() -> None:
    async with opened(gpu_blocks=2001) as case:
        with pytest.raises(UsageError) as caught:
            evict(case.kv, prompt(2000), {GROUP: range(2000)})
        assert len(str(caught.value)) < 300
