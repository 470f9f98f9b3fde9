"""What a runtime is built from, checked before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from aiokv.backends.base import Backend
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
    """

    geometry: CacheGeometry
    gpu_blocks: int
    cpu_blocks: int | None = None
    cpu_bytes: int | str | None = None
    store_policy: StorePolicy = StorePolicy.EAGER
    watermark: float = 0.01
    backend: str | Backend = "auto"
    close_grace_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what no runtime could be built from; raises `ConfigError`."""
        if not isinstance(self.geometry, CacheGeometry):
            raise ConfigError(f"geometry must be a CacheGeometry, not {self.geometry!r}")
        self._settings()
        if self.store_policy is not StorePolicy.EAGER:
            raise ConfigError(f"store_policy {self.store_policy.value!r} is not supported by this version: use EAGER")
        if not isinstance(self.close_grace_s, int | float) or not self.close_grace_s >= 0:
            raise ConfigError(f"close_grace_s must be a number of seconds, zero or more, not {self.close_grace_s!r}")
        if not isinstance(self.backend, str) and not callable(getattr(self.backend, "submit", None)):
            raise ConfigError(f"backend must be a name or a backend object, not {self.backend!r}")

    @property
    def cpu_size_bytes(self) -> int | None:
        """The CPU tier's size in bytes, where it was given so."""
        return self._settings().cpu_bytes

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
