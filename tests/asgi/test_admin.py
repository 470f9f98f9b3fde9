"""`/kv`: what is held, who holds it, resets; never at the price of the event loop, never more than was asked for."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from aiokv import KVRuntime, Lease, RuntimeConfig, Tier
from aiokv.core.audit import Audit, HolderKind, Holding
from aiokv.core.pool_values import PoolCounts
from aiokv.testing import FakeBackend, make_resident
from aiokv_asgi import KvRoutes
from aiokv_asgi.views import show_audit, take_snapshot
from tests.asgi.support import AUTHORIZED, TOKEN, Embedded, app_of, client_of, embedded, new_runtime
from tests.runtime.support import GEOMETRY, GROUP, granted, prompt, turns, until


async def get(case: Embedded, path: str, **query: Any) -> Any:  # noqa: ANN401  # JSON
    answer = await case.client.get(path, headers=AUTHORIZED, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def held(kv: KVRuntime, count: int) -> list[Lease]:
    return [granted(kv, prompt(1, seed=seed), name=f"request {seed}") for seed in range(count)]


def released(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()


# Snapshot.


async def test_a_snapshot_shows_pools_leases_copies_and_hints() -> None:
    backend = FakeBackend(manual=True)
    async with embedded(new_runtime(backend=backend)) as case:
        make_resident(case.kv, prompt(4), {GROUP: "bccb"})
        with case.kv.keep(prompt(2), tenant="acme"):
            lease = granted(case.kv, prompt(4), name="req-1")
            await until(lambda: bool(backend.pending))
            body = await get(case, "/kv/snapshot")
            snapshot = case.kv.snapshot()
            assert snapshot.cpu is not None
            for tier, counts in (("gpu", snapshot.gpu), ("cpu", snapshot.cpu)):
                assert PoolCounts(**body["pools"][tier]) == counts
            (shown,) = body["leases"]["listed"]
            assert shown.pop("age_s") >= 0
            assert shown == {
                "lease_id": snapshot.leases[0].lease_id,
                "request_id": "req-1", "state": "loading", "prefix_tokens": 64, "confirmed_tokens": 64,
                "gpu_blocks": 5, "unnamed_claims": 0,
            }  # fmt: skip
            (copy,) = body["transfers"]["listed"]
            assert (copy["direction"], copy["group"], copy["blocks"], copy["waiters"]) == ("load", GROUP, 2, 1)
            assert (body["transfers"]["count"], body["hints"]["count"]) == (1, 1)
            assert body["hints"]["listed"][0]["tier"] == "gpu"
            lease.release()
        backend.complete_all()


async def test_a_list_is_cut_and_says_how_many_there_are() -> None:
    async with embedded(new_runtime(gpu_blocks=200)) as case:
        leases = held(case.kv, 80)
        for path in ("/kv/snapshot", "/kv/audit"):
            body = await get(case, path, limit=45)
            assert body["leases"]["count"] == 80
            listed = [lease["request_id"] for lease in body["leases"]["listed"]]
            assert listed == [f"request {number}" for number in range(45)]
            assert len((await get(case, path))["leases"]["listed"]) == 80
        released(leases)


async def test_leases_that_go_while_the_list_is_made_are_left_out() -> None:
    async with embedded(new_runtime(gpu_blocks=400)) as case:
        leases = held(case.kv, 100)
        asking = asyncio.ensure_future(get(case, "/kv/snapshot"))
        while not asking.done():
            if leases:
                leases.pop().release()
            await asyncio.sleep(0)
        body = asking.result()
        listed = {lease["request_id"] for lease in body["leases"]["listed"]}
        assert {f"request {number}" for number in range(len(leases))} <= listed
        assert len(listed) <= body["leases"]["count"] <= 100
        assert {lease["state"] for lease in body["leases"]["listed"]} == {"ready"}
        released(leases)


async def test_the_loop_turns_while_a_long_list_is_made() -> None:
    async with new_runtime(gpu_blocks=700) as kv:
        leases = held(kv, 300)
        making, turned = take_snapshot(kv, limit=300), 0
        with pytest.raises(StopIteration) as ended:
            while True:
                making.send(None)
                turned += 1
        assert turned >= 9, "one turn for every 32 leases"
        leases_shown = ended.value.value["leases"]
        assert isinstance(leases_shown, dict)
        assert len(leases_shown["listed"]) == leases_shown["count"] == 300
        released(leases)


async def test_ages_are_those_of_leases_and_not_of_the_machine() -> None:
    async with embedded() as case:
        before = time.monotonic()
        leases = held(case.kv, 2)
        for path in ("/kv/snapshot", "/kv/audit"):
            ages = [lease["age_s"] for lease in (await get(case, path))["leases"]["listed"]]
            assert all(0 <= age <= time.monotonic() - before + 0.001 for age in ages)
            assert len(ages) == 2
        released(leases)


# Audit.


async def test_an_audit_says_who_holds_what_since_when() -> None:
    backend = FakeBackend(manual=True)
    async with embedded(new_runtime(backend=backend)) as case:
        make_resident(case.kv, prompt(3), {GROUP: "ccc"})
        lease = granted(case.kv, prompt(3), name="req-1")
        await until(lambda: bool(backend.pending))
        body, audit = await get(case, "/kv/audit"), case.kv.audit()
        assert body["violations"] == {"count": 0, "listed": []}
        assert body["overdue"] == 0
        assert body["pins"]["count"] == len(audit.pins)
        pins = {(pin["kind"], pin["tier"]): pin for pin in body["pins"]["listed"]}
        assert pins["lease", "gpu"]["request_id"] == "req-1"
        assert pins["load", "cpu"]["blocks"] == 3
        assert pins["load", "cpu"]["waiters"] == {"count": 1, "listed": ["req-1"]}
        assert all(pin["age_s"] >= 0 for pin in body["pins"]["listed"])
        blocks = [pin["blocks"] for pin in body["pins"]["listed"]]
        assert blocks == sorted(blocks, reverse=True)
        lease.release()
        backend.complete_all()


def test_the_largest_holdings_come_first() -> None:
    holdings = tuple(
        Holding(kind=HolderKind.LEASE, holder_id=blocks, request_id=f"of {blocks}", tier=Tier.GPU, blocks=blocks)
        for blocks in (2, 5, 1, 4)
    )
    body: Any = show_audit(Audit(leases=(), pins=holdings, reservations=holdings, violations=()), limit=3)
    for shown in (body["pins"], body["reservations"]):
        assert [holding["request_id"] for holding in shown["listed"]] == ["of 5", "of 4", "of 2"]
        assert shown["count"] == 4


async def test_of_many_who_wait_for_one_copy_the_first_are_named() -> None:
    backend = FakeBackend(manual=True)
    async with embedded(new_runtime(backend=backend)) as case:
        make_resident(case.kv, prompt(1), {GROUP: "c"})
        leases = [granted(case.kv, prompt(1), name=f"request {number}") for number in range(15)]
        await until(lambda: bool(backend.pending))
        pins = (await get(case, "/kv/audit"))["pins"]["listed"]
        (waiters,) = [pin["waiters"] for pin in pins if (pin["kind"], pin["tier"]) == ("load", "cpu")]
        assert waiters["count"] == 15
        assert len(waiters["listed"]) == 10
        released(leases)
        backend.complete_all()


async def test_a_violation_is_shown() -> None:
    async with embedded() as case:
        (lease,) = held(case.kv, 1)
        record = case.kv.core.leases()[0]
        taken = record.tables[0].take_range(0, 1)
        body = await get(case, "/kv/audit")
        assert body["violations"]["count"] > 0
        assert "gpu slot 1 has 1 pins, 0 holders" in body["violations"]["listed"]
        record.tables[0].put_run(0, taken)
        lease.release()
        assert (await get(case, "/kv/audit"))["violations"]["count"] == 0


async def test_the_loop_turns_while_a_large_pool_is_audited_and_one_audit_runs_at_a_time() -> None:
    asyncio.get_running_loop().set_debug(False)
    async with embedded(new_runtime(gpu_blocks=30_000, cpu_blocks=0)) as case:
        lease = granted(case.kv, prompt(29_000, extra=1))
        audits = [asyncio.ensure_future(get(case, "/kv/audit")) for _ in range(3)]
        served = 0
        while not audits[0].done():
            await asyncio.sleep(0)
            served += 1
        assert served > 25, "about one turn for every 1024 slots"
        assert not audits[2].done()
        bodies = await asyncio.gather(*audits)
        assert all(body["violations"]["count"] == 0 for body in bodies)
        lease.release()


async def test_an_audit_that_is_cancelled_lets_the_next_one_run() -> None:
    async with embedded(new_runtime(gpu_blocks=30_000, cpu_blocks=0)) as case:
        for turns_before in (1, 3, 9):
            asking = asyncio.ensure_future(get(case, "/kv/audit"))
            await turns(turns_before)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()
        assert (await get(case, "/kv/audit"))["violations"]["count"] == 0


# Reset.


async def test_a_tier_is_reset_and_the_other_keeps_its_blocks() -> None:
    async with embedded() as case:
        make_resident(case.kv, prompt(4), {GROUP: "bbbb"})
        answer = await case.client.post("/kv/reset?tier=cpu", headers=AUTHORIZED)
        assert (answer.status_code, answer.json()) == (200, {"reset": ["cpu"]})
        pools = case.kv.core.pools()
        assert (pools[Tier.CPU].resident, pools[Tier.GPU].resident) == (0, 4)
        answer = await case.client.post("/kv/reset?tier=all", headers=AUTHORIZED)
        assert answer.json() == {"reset": ["gpu", "cpu"]}
        assert case.kv.core.pools()[Tier.GPU].resident == 0


@pytest.mark.parametrize(
    "query", ["", "?tier=", "?tier=disk", "?tier=GPU", "?tier=gpu&tier=cpu", "?tier=%00", "?Tier=gpu"]
)
async def test_an_unknown_tier_resets_nothing(query: str) -> None:
    async with embedded() as case:
        make_resident(case.kv, prompt(4), {GROUP: "bbbb"})
        before = case.kv.snapshot()
        answer = await case.client.post(f"/kv/reset{query}", headers=AUTHORIZED)
        assert (answer.status_code, answer.json()) == (400, {"error": "tier is one of all, cpu, gpu"})
        assert case.kv.snapshot() == before


async def test_a_tier_that_is_not_configured_cannot_be_reset() -> None:
    async with embedded(new_runtime(cpu_blocks=0)) as case:
        answer = await case.client.post("/kv/reset?tier=cpu", headers=AUTHORIZED)
        assert (answer.status_code, answer.json()) == (400, {"error": "tier is one of all, gpu"})
        answer = await case.client.post("/kv/reset?tier=all", headers=AUTHORIZED)
        assert answer.json() == {"reset": ["gpu"]}


async def test_a_reset_that_is_cancelled_has_still_forgotten_the_tier() -> None:
    async with embedded(new_runtime(gpu_blocks=40_000, cpu_blocks=0)) as case:
        make_resident(case.kv, prompt(20_000), {GROUP: "g" * 20_000})
        asking = asyncio.ensure_future(case.client.post("/kv/reset?tier=gpu", headers=AUTHORIZED))
        await until(lambda: case.kv.core.is_sweeping)
        asking.cancel()
        await asyncio.wait([asking])
        await case.kv.drain()
        assert case.kv.core.pools()[Tier.GPU].free == 39_999


# Requests that cannot be answered.


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "many", "1.5", "", "\N{FULLWIDTH DIGIT NINE}", "1" * 5000])
@pytest.mark.parametrize("path", ["/kv/snapshot", "/kv/audit"])
async def test_a_limit_that_is_none_is_refused(path: str, limit: str) -> None:
    async with embedded() as case:
        answer = await case.client.get(path, headers=AUTHORIZED, params={"limit": limit})
        assert (answer.status_code, answer.json()) == (400, {"error": "limit is a whole number from 1 to 1000"})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/kv/snapshot", 405),
        ("DELETE", "/kv/audit", 405),
        ("GET", "/kv/reset", 405),
        ("HEAD", "/kv/reset", 405),
        ("OPTIONS", "/kv/reset", 405),
        ("HEAD", "/kv/snapshot", 200),
        ("HEAD", "/kv/audit", 200),
        ("GET", "/kv", 404),
    ],
)
async def test_methods_and_paths(method: str, path: str, status: int) -> None:
    async with embedded() as case:
        answer = await case.client.request(method, path, headers=AUTHORIZED)
        assert answer.status_code == status
        assert method != "HEAD" or answer.content == b""


async def test_before_it_is_open_nothing_can_be_shown_and_afterwards_the_end() -> None:
    kv = new_runtime()
    kv_routes = KvRoutes(kv, admin_token=TOKEN)
    app = app_of(kv_routes)
    async with client_of(app) as client:
        for method, path in (("GET", "/kv/snapshot"), ("GET", "/kv/audit"), ("POST", "/kv/reset?tier=gpu")):
            answer = await client.request(method, path, headers=AUTHORIZED)
            assert answer.status_code == 503
            assert "not open" in answer.json()["error"]
        async with kv_routes.lifespan(app):
            pass
        body = (await client.get("/kv/audit", headers=AUTHORIZED)).json()
        assert (body["leases"]["count"], body["pins"]["count"]) == (0, 0)


async def test_no_answer_holds_tokens_or_salts() -> None:
    tokens = prompt(3, seed=900)
    config = RuntimeConfig(geometry=GEOMETRY, gpu_blocks=33, cpu_blocks=8, backend=FakeBackend(manual=False))
    async with embedded(KVRuntime(config)) as case:
        lease = granted(case.kv, tokens, salt="salt-secret", adapter="adapter-secret")
        lease.confirm(lease.num_tokens)
        for path in ("/kv/snapshot", "/kv/audit", "/live.json", "/metrics"):
            text = (await case.client.get(path, headers=AUTHORIZED)).text
            assert "secret" not in text
            assert str(tokens[0])[:6] not in text
        lease.release()
