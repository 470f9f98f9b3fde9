"""Device memory and backends on the fake driver."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.backends.cuda import CudaBackend
from aiokv.backends.cuda_driver import CudaDriver
from aiokv.model.plan import Checksum
from tests.backends.support import GUARD_S, layout_of, wait_until
from tests.fakecuda import FakeDriver, build_fake_driver
from tests.fakecuda.fixtures import skipped_without_compiler

Bytes = NDArray[np.uint8]

api = pytest.importorskip(
    "cuda.bindings.driver", reason="cuda-bindings is not installed: pip install 'aiokv[test]'", exc_type=ImportError
)
"""The driver as an engine calls it."""


def call(function: Any, *arguments: Any) -> Any:  # noqa: ANN401  # whatever the bindings take and give
    """A driver call of the engine's; it must succeed."""
    code, *results = function(*arguments)
    assert int(code) == 0, f"{function.__name__}: {code}"
    return results[0] if results else None


def run_script(name: str, *arguments: str) -> str:
    """What a script of this folder prints, which loads the fake driver in a process of its own and must succeed."""
    script = Path(__file__).with_name(name)
    with skipped_without_compiler():
        build_fake_driver()
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD_S,
        cwd=script.parents[3],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Tensor:
    """A view of device memory as an engine would name it, by `__cuda_array_interface__`; strides in bytes."""

    fake: FakeDriver
    pointer: int
    span: int
    """Bytes from the first to the last."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": self.shape,
            "strides": self.strides,
            "typestr": "|u1",
            "data": (self.pointer + self.offset, False),
            "version": 3,
        }

    def memory(self) -> Bytes:
        """All bytes of the allocation as they are now."""
        return np.frombuffer(self.fake.read(self.pointer, self.span), np.uint8).copy()

    def blocks(self, *, axis: int = 0) -> list[bytes]:
        """Each block's bytes, read through shape and strides."""
        memory = self.memory()[self.offset :]
        view = np.lib.stride_tricks.as_strided(memory, shape=self.shape, strides=self.strides)
        return [np.ascontiguousarray(view.take(index, axis)).tobytes() for index in range(self.shape[axis])]


class Rig:
    """Makes tensors and backends; what a test leaves open is closed behind it."""

    def __init__(self, fake: FakeDriver) -> None:
        self.fake = fake
        self.driver = CudaDriver.load()
        self.backends: list[CudaBackend] = []

    def dense(self, *shape: int, seed: int = 0) -> Tensor:
        """Device memory of its own, full of random bytes."""
        strides = np.empty(shape, np.uint8).strides
        return self.filled(
            Tensor(fake=self.fake, pointer=0, span=int(np.prod(shape)), shape=shape, strides=strides), seed=seed
        )

    def filled(self, tensor: Tensor, *, seed: int = 0) -> Tensor:
        """`tensor`, with memory behind it."""
        with self.driver.current():
            pointer = int(call(api.cuMemAlloc, tensor.span))
        self.fake.write(pointer, np.random.default_rng(seed).integers(0, 256, tensor.span, np.uint8).tobytes())
        return replace(tensor, pointer=pointer)

    def open(
        self,
        arenas: Mapping[str, Sequence[object]],
        *,
        gpu_blocks: int,
        cpu_blocks: int = 8,
        checksum: Checksum = Checksum.OFF,
    ) -> CudaBackend:
        """A backend whose CPU arena is settled."""
        backend = CudaBackend()
        layout = layout_of(arenas, gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks)
        backend.open(replace(layout, checksum=checksum))
        self.backends.append(backend)
        wait_until(lambda: backend.pinning.status.is_settled)
        return backend

    def stream(self) -> int:
        """A stream of the engine's."""
        with self.driver.current():
            return int(call(api.cuStreamCreate, 1))

    def close(self) -> None:
        self.fake.release()
        for backend in self.backends:
            backend.close(deadline_s=GUARD_S)
