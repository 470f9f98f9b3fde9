"""The storm of whole lives once more, on the CUDA backend and the fake driver, with every adversary and oracle on.

Compute, loads and stores are ordered on the device alone. A copy fails now and then, is refused by the driver, or ends
late; now and then the whole device stands still for some turns, while requests come, leave and are cancelled.
"""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from aiokv import CacheGeometry, StorePolicy
from aiokv.backends.cuda import CudaBackend
from aiokv.testing import FaultyBackend
from tests.backends.cuda.rig import Rig
from tests.cancellation.moods import assert_enough, find_lacking
from tests.cancellation.storms import ENOUGH, Storm
from tests.device.engine import DeviceEngine
from tests.device.weather import Weather, opened
from tests.runtime.support import GEOMETRY, HYBRID, assert_nothing_held


@pytest.mark.parametrize(
    ("policy", "geometry", "faults"),
    [
        pytest.param(StorePolicy.EAGER, GEOMETRY, 0.0, id="eager"),
        pytest.param(StorePolicy.EAGER, HYBRID, 0.05, id="eager, two groups, failing"),
        pytest.param(StorePolicy.LAZY, HYBRID, 0.05, id="lazy, two groups, failing"),
        pytest.param(StorePolicy.SELECTIVE, GEOMETRY, 0.05, id="selective, failing"),
    ],
)
async def test_every_kernel_of_a_life_reads_what_was_computed_for_its_prefix(
    watched_rig: Rig, policy: StorePolicy, geometry: CacheGeometry, faults: float
) -> None:
    """Laws 1, 3, 4, 5 and 10 on the device, for every store policy."""
    asyncio.get_running_loop().set_debug(False)
    gpu_blocks, fake, cuda = 30 * len(geometry.groups) + 1, watched_rig.fake, CudaBackend()
    fake.set_timing(latency_us=60)
    fake.set_queue_depth(0)  # while the device stands still the engine goes on launching
    engine = DeviceEngine(watched_rig, geometry, gpu_blocks=gpu_blocks)
    backend = FaultyBackend(cuda, fail=faults, refuse=faults / 2, late=faults)
    settings = {"gpu_blocks": gpu_blocks, "cpu_blocks": 240, "store_policy": policy}
    least = {**ENOUGH, "computed": 100, "read": 100, "looked at copies": 2, "held": 2, "captured": 2}
    seen: Counter[str] = Counter()
    async with opened(engine, backend, geometry=geometry, **settings) as kv:
        for seed in range(7, 11):  # copies take real time: on a busy machine one storm may try little of something
            weather = Weather(kv, engine, backend=cuda, seed=seed)
            storm = Storm(kv, engine, seed=seed, within=20)
            await asyncio.wait_for(storm.blow(weather.turn), 50.0)
            await kv.drain()
            assert_nothing_held(kv)
            assert (weather.unheld, weather.broken) == ([], [])
            seen += storm.seen + weather.seen
            if not find_lacking(seen + engine.seen, least):
                break
    assert fake.drain()
    engine.judge()
    assert (engine.wrong, engine.unread) == ([], 0)
    assert_enough(seen + engine.seen, least)
