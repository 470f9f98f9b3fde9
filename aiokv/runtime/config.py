"""What a runtime is built from, checked before anything is allocated."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass

from aiokv.backends.base import Backend
from aiokv.core.hints import HINT_QUOTA
from aiokv.core.store_policy import EAGER_STORES, StoreSettings
from aiokv.errors import ConfigError
from aiokv.model.numbers import is_number, is_whole
from aiokv.model.plan import Checksum, StorePolicy
from aiokv.model.spec import CacheGeometry
from aiokv.runtime.config_file import Settings, parse_bytes
from aiokv.runtime.tracer_guard import check_tracer_provider

__all__ = ["RuntimeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Sizes, policy and backend of one runtime.

    `gpu_blocks` counts slots of the GPU pool, the null block included. The CPU tier is sized by `cpu_blocks` or by
    `cpu_bytes` (an `int` or text such as "8GiB"); with neither there is none. `watermark` is the fraction of the GPU
    pool that admissions leave free while another lease is held. `backend` is "auto", "host", "cuda" or a backend
    object. `close_grace_s` is how long `aclose` waits for running copies. A lease that is held for longer than
    `lease_age_limit_s` is reported in the log, in the audit and in the metrics; `None`: none is.

    `store_policy` says when blocks are copied to the CPU tier. LAZY keeps at least `lazy_fraction` of the GPU pool free
    or copied ahead of eviction, more if recent requests claimed more; SELECTIVE copies a block once it has been
    confirmed or hit `selective_count` times.

    `checksum` says which bytes of a stored block are checked when it is loaded, so that a changed one is computed again
    and never served. The backend checks what it has stored in its own memory; ranks in other processes check theirs.

    Every block lies in parts on `world_size` ranks. The backend copies for all of them, so that `arenas` holds all
    ranks' tensors, but for those in `remote_ranks`: other processes copy theirs, told by `KVRuntime.transfers`, and
    answer to `KVRuntime.report`. If all are remote there are no arenas, and `backend` stays "auto".

    `compute_stream` is the engine's stream, or a callable that returns the current one: where a lease ends without
    `after=`, its blocks are used again behind a fence of it. Needed by backends of devices, by no other.

    `tracer_provider` makes OpenTelemetry spans around admissions and copies: a provider, or "global" for the one that
    the process has set by the time the runtime opens. Its processors are called on the loop: let them export elsewhere.

    The residence hints of one tenant hold at most the fraction `hint_quota` of each pool; 0 declines them all.
    """

    geometry: CacheGeometry
    gpu_blocks: int
    cpu_blocks: int | None = None
    cpu_bytes: int | str | None = None
    store_policy: StorePolicy = StorePolicy.EAGER
    lazy_fraction: float = EAGER_STORES.lazy_fraction
    selective_count: int = EAGER_STORES.selective_count
    watermark: float = 0.01
    checksum: Checksum = Checksum.OFF
    backend: str | Backend = "auto"
    close_grace_s: float = 30.0
    lease_age_limit_s: float | None = None
    world_size: int = 1
    remote_ranks: Collection[int] = ()
    hint_quota: float = HINT_QUOTA
    compute_stream: object = None
    tracer_provider: object = None

    def __post_init__(self) -> None:
        """Refuse what no runtime could be built from; raises `ConfigError`."""
        if not isinstance(self.geometry, CacheGeometry):
            raise ConfigError(f"geometry must be a CacheGeometry, not {self.geometry!r}")
        self._settings()
        self._stores()
        if not is_number(self.close_grace_s) or not 0 <= self.close_grace_s <= sys.float_info.max:  # law 8
            raise ConfigError(f"close_grace_s must be a number of seconds, zero or more, not {self.close_grace_s!r}")
        if not isinstance(self.backend, str) and not callable(getattr(self.backend, "submit", None)):
            raise ConfigError(f"backend must be a name or a backend object, not {self.backend!r}")
        self._check_ranks()
        check_tracer_provider(self.tracer_provider)

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

    @property
    def has_local_ranks(self) -> bool:
        """Whether the backend has anything to copy."""
        return len(self.remote_ranks) < self.world_size

    def _check_ranks(self) -> None:
        if not is_whole(self.world_size) or self.world_size < 1:
            raise ConfigError(f"world_size must be a whole number, 1 or more, not {self.world_size!r}")
        ranks = range(self.world_size)
        if not isinstance(self.remote_ranks, Collection) or not all(rank in ranks for rank in self.remote_ranks):
            raise ConfigError(f"remote_ranks must be ranks of a world of {self.world_size}, not {self.remote_ranks!r}")
        if len(set(self.remote_ranks)) != len(self.remote_ranks):
            raise ConfigError(f"remote_ranks names a rank twice: {self.remote_ranks!r}")
        if not self.has_local_ranks and self.backend != "auto":
            raise ConfigError(f"every rank is remote, so that backend {self.backend!r} has nothing to copy")
        if not self.has_local_ranks and self.checksum is not Checksum.OFF:
            raise ConfigError("every rank is remote, so that nothing is checked here: the ranks report what is corrupt")

    def _settings(self) -> Settings:
        """The same values, checked the way those from files are."""
        return Settings(
            gpu_blocks=self.gpu_blocks,
            cpu_blocks=self.cpu_blocks,
            cpu_bytes=parse_bytes(self.cpu_bytes) if isinstance(self.cpu_bytes, str) else self.cpu_bytes,
            store_policy=self.store_policy,
            watermark=self.watermark,
            checksum=self.checksum,
            hint_quota=self.hint_quota,
            backend=self.backend if isinstance(self.backend, str) else "auto",
            lease_age_limit_s=self.lease_age_limit_s,
        )
