"""What no runtime can be built from is a `ConfigError` that names it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from aiokv import (
    ConfigError,
    KVRuntime,
    StorePolicy,
)
from aiokv.backends.host_memory import read_host_memory
from tests.runtime.support import GEOMETRY, GROUP, config_of

# Configurations.


@pytest.mark.parametrize(
    "settings",
    [
        {"geometry": None},
        {"gpu_blocks": 1},
        {"gpu_blocks": -1},
        {"gpu_blocks": 9.0},
        {"gpu_blocks": True},
        {"cpu_blocks": -1},
        {"cpu_blocks": "4"},
        {"cpu_bytes": "8GiB"},
        {"cpu_blocks": None, "cpu_bytes": "eight"},
        {"cpu_blocks": None, "cpu_bytes": -1},
        {"watermark": 1.0},
        {"watermark": -0.1},
        {"watermark": float("nan")},
        {"watermark": "0.1"},
        {"hint_quota": -0.1},
        {"hint_quota": 1.1},
        {"hint_quota": float("nan")},
        {"hint_quota": True},
        {"store_policy": "eager"},
        {"store_policy": StorePolicy.LAZY, "lazy_fraction": 0.0},
        {"store_policy": StorePolicy.LAZY, "lazy_fraction": 1.5},
        {"lazy_fraction": "0.1"},
        {"lazy_fraction": float("nan")},
        {"store_policy": StorePolicy.SELECTIVE, "selective_count": 0},
        {"selective_count": 256},
        {"selective_count": 2.0},
        {"selective_count": True},
        {"backend": "gpu"},
        {"backend": None},
        {"backend": 3},
        {"lease_age_limit_s": 0},
        {"lease_age_limit_s": float("nan")},
        {"lease_age_limit_s": "90"},
        {"lease_age_limit_s": True},
        {"close_grace_s": -1},
        {"close_grace_s": float("nan")},
        {"close_grace_s": "30"},
        {"close_grace_s": True},
        {"close_grace_s": float("inf")},
        {"close_grace_s": 10**400},
    ],
    ids=str,
)
def test_settings_that_make_no_runtime(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config_of(**settings)


def test_an_unknown_setting() -> None:
    with pytest.raises(TypeError, match="gpu_block"):
        config_of(gpu_block=9)


@pytest.mark.parametrize("config", [None, {}, GEOMETRY])
def test_a_config_that_is_none(config: Any) -> None:  # noqa: ANN401  # anything
    with pytest.raises(ConfigError):
        KVRuntime(config)


@pytest.mark.parametrize("arenas", [[np.zeros((9, 4))], 3, "full"])
def test_arenas_that_are_no_mapping(arenas: Any) -> None:  # noqa: ANN401  # anything
    with pytest.raises(ConfigError, match="arenas"):
        KVRuntime(config_of(), arenas=arenas)


async def test_the_cuda_backend_without_a_device() -> None:
    with pytest.raises(ConfigError, match=r"(?i)cuda"):
        await KVRuntime(config_of(backend="cuda")).open()


async def test_cpu_bytes_without_tensors_to_divide_by() -> None:
    with pytest.raises(ConfigError, match="cpu_blocks"):
        await KVRuntime(config_of(cpu_blocks=None, cpu_bytes="1MiB")).open()


@pytest.mark.parametrize(
    ("arenas", "named"),
    [
        ({}, "arenas"),
        ({GROUP: []}, "full"),
        ({GROUP: np.zeros((9, 4), np.float32)}, "full"),
        ({GROUP: [np.zeros((8, 4), np.float32)]}, r"full.*\[8, 4\]"),
        ({GROUP: [np.zeros((9, 4), np.float32), np.zeros((3, 9, 4), np.float32)]}, r"tensor 1.*\[3, 9, 4\]"),
        ({GROUP: [np.zeros((4, 9), np.float32)]}, r"\[4, 9\]"),
        ({GROUP: [[1, 2, 3]]}, "tensor 0"),
        ({"swa": [np.zeros((9, 4), np.float32)]}, "full"),
        ({GROUP: [np.zeros((9, 4), np.float32)], "swa": [np.zeros((9, 4), np.float32)]}, "swa"),
    ],
)
@pytest.mark.parametrize("backend", ["host", "auto"])
async def test_tensors_that_do_not_match_the_geometry(arenas: Any, named: str, backend: str) -> None:  # noqa: ANN401
    kv = KVRuntime(config_of(backend=backend), arenas=arenas)
    with pytest.raises(ConfigError, match=re.compile(named, re.DOTALL)):
        await kv.open()
    await kv.aclose()


@pytest.mark.parametrize("size", [{"cpu_blocks": 1_600_000}, {"cpu_blocks": None, "cpu_bytes": "100TiB"}])
async def test_a_cpu_pool_that_cannot_fit_is_refused_before_anything_is_touched(size: dict[str, Any]) -> None:
    """100 TiB: whatever machine this is, opening would end in the process being killed."""
    tensor = np.zeros((9, 1 << 26), np.uint8)  # nobody touches it
    kv = KVRuntime(config_of(backend="host", **size), arenas={GROUP: [tensor]})
    with pytest.raises(ConfigError, match=r"CPU arena 9\d\.\d+ TiB.*the machine's memory|CPU arena 100 TiB.*memory"):
        await kv.open()
    await kv.aclose()


@pytest.mark.skipif(
    read_host_memory().memory_total > 400 * 1024**3, reason="this machine has memory for the largest pools there are"
)
async def test_pools_whose_books_alone_cannot_fit_are_refused() -> None:
    kv = KVRuntime(config_of(gpu_blocks=2**31 - 1, cpu_blocks=2**31 - 1, watermark=0.0))
    with pytest.raises(ConfigError, match="index and slot state"):
        await kv.open()
