"""What a soak copies with: the host backend, or CUDA's on the machine's driver or on the fake one of a checkout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, final

from aiokv.backends.cuda import CudaBackend
from aiokv.backends.host import HostBackend, HostFaults, Stall
from aiokv.cli.bench.backends import CopyingBackend
from aiokv.cli.bench.device import BenchDevice, find_driver
from aiokv.cli.bench.device_memory import DeviceMemory, watch_driver
from aiokv.cli.bench.kv_bytes import HostMemory, KvBytes, Memory
from aiokv.cli.bench.soak.settings import Sabotage, SoakBackend, SoakSettings

__all__ = ["Copying"]

_TOKEN_WORDS: Final = 4
_CORRUPT_EVERY: Final = 50
_STUCK_COPY: Final = 100


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """Of one run."""

    copier: CopyingBackend
    memory: KvBytes
    stream: int | None = None
    """The engine's, if it has one."""
    figures: Mapping[str, object] = field(default_factory=dict)
    violations: Callable[[], list[str]] = list
    """What a driver that judges has seen so far."""

    @classmethod
    def of(cls, settings: SoakSettings, *, stall: Stall) -> Copying:
        """`ConfigError` where there is no CUDA driver, nor a fake one."""
        if settings.backend is SoakBackend.CUDA:
            return cls._on_device(settings)
        host = HostBackend(faults=_sabotaged(settings.sabotage, stall=stall))
        return cls(copier=host, memory=_kv_bytes(settings, HostMemory()))

    @classmethod
    def _on_device(cls, settings: SoakSettings) -> Copying:
        kind = find_driver()
        fake = watch_driver(kind)
        memory = DeviceMemory(BenchDevice(), fake=fake)
        return cls(
            copier=CudaBackend(),
            memory=_kv_bytes(settings, memory),
            stream=memory.stream,
            figures={"driver": kind.value},
            violations=list if fake is None else fake.violations,
        )


def _kv_bytes(settings: SoakSettings, memory: Memory) -> KvBytes:
    return KvBytes(settings.geometry, gpu_blocks=settings.gpu_blocks, token_words=_TOKEN_WORDS, memory=memory)


def _sabotaged(sabotage: Sabotage, *, stall: Stall) -> HostFaults:
    if sabotage is Sabotage.BYTE:
        return HostFaults(corrupt=frozenset(range(_CORRUPT_EVERY, 1_000_000, _CORRUPT_EVERY)))
    return HostFaults(stall={_STUCK_COPY: stall}) if sabotage is Sabotage.COPY else HostFaults()
