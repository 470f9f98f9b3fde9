"""What a runtime is built from, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from aiokv.backends.base import Backend
from aiokv.core.store_policy import EAGER_STORES, StoreSettings
from aiokv.errors import ConfigError
from aiokv.model.plan import StorePolicy
from aiokv.model.spec import CacheGeometry
from aiokv.runtime.config_file import Settings, parse_bytes

__all__ = ["RuntimeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Sizes, policy and backend of one runtime.

    `gpu_blocks` counts slots of the GPU pool, the null block included. The CPU tier is sized by `cpu_blocks` or by
    `cpu_bytes` (an `int` or text such as "8GiB"); with neither there is none. `watermark` is the fraction of the GPU
    pool that admissions leave free while another lease is held. `backend` is "auto", "host", "cuda" or a backend
    object. `close_grace_s` is how long `aclose` waits for running copies.

    `store_policy` says when blocks are copied to the CPU tier. LAZY keeps at least `lazy_fraction` of the GPU pool free
    or copied ahead of eviction, more if recent requests claimed more; SELECTIVE copies a block once it has been
    confirmed or hit `selective_count` times.
    """

    geometry: CacheGeometry
    gpu_blocks: int
    cpu_blocks: int | None = None
    cpu_bytes: int | str | None = None
    store_policy: StorePolicy = StorePolicy.EAGER
    lazy_fraction: float = EAGER_STORES.lazy_fraction
    selective_count: int = EAGER_STORES.selective_count
    watermark: float = 0.01
    backend: str | Backend = "auto"
    close_grace_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what no runtime could be built from; raises `ConfigError`."""
        if not isinstance(self.geometry, CacheGeometry):
            raise ConfigError(f"geometry must be a CacheGeometry, not {self.geometry!r}")
        self._settings()
        self._stores()
        if not isinstance(self.close_grace_s, int | float) or not self.close_grace_s >= 0:
            raise ConfigError(f"close_grace_s must be a number of seconds, zero or more, not {self.close_grace_s!r}")
        if not isinstance(self.backend, str) and not callable(getattr(self.backend, "submit", None)):
            raise ConfigError(f"backend must be a name or a backend object, not {self.backend!r}")

    @property
    def stores(self) -> StoreSettings:
        """The store policy and what it needs to know."""
        return self._stores()

    @property
    def cpu_size_bytes(self) -> int | None:
        """The CPU tier's size in bytes, where it was given so."""
        return self._settings().cpu_bytes

    def _stores(self) -> StoreSettings:
        return StoreSettings(
            policy=self.store_policy, lazy_fraction=self.lazy_fraction, selective_count=self.selective_count
        )

    def _settings(self) -> Settings:
        """The same values, checked the way those from files are."""
        return Settings(
            gpu_blocks=self.gpu_blocks,
            cpu_blocks=self.cpu_blocks,
            cpu_bytes=parse_bytes(self.cpu_bytes) if isinstance(self.cpu_bytes, str) else self.cpu_bytes,
            store_policy=self.store_policy,
            watermark=self.watermark,
            backend=self.backend if isinstance(self.backend, str) else "auto",
        )
