"""The engine on the fake device: every forward is a kernel on a compute stream; what one reads wrongly is told.

Each token's KV is a checksum of all tokens up to it. The host never waits for a kernel: what it has read is judged
later. Kernels of one request run on any of the streams; `wait_on` and fences alone order them with each other, with
loads and with stores.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from aiokv import CacheGeometry, KVRuntime, Lease
from aiokv.core.fences import Fence
from tests.backends.cuda.rig import Rig, Tensor
from tests.cancellation.storms import kv_of
from tests.device.slots import require_idle
from tests.fakecuda import Kernel, Launched
from tests.runtime.support import BLOCK

__all__ = ["DeviceEngine"]

TOKEN_BYTES: Final = 8
_STREAMS: Final = 2


@final
class DeviceEngine:
    """See `tests.cancellation.lives.Engine`. `kv` is set once it is open."""

    def __init__(self, rig: Rig, geometry: CacheGeometry, *, gpu_blocks: int, seed: int = 0) -> None:
        self.fake = rig.fake
        self.arrays: Mapping[str, Tensor] = {
            group.name: rig.dense(gpu_blocks, BLOCK * TOKEN_BYTES) for group in geometry.groups
        }
        self.streams = [rig.stream() for _ in range(_STREAMS)]
        self.spare = rig.stream()
        """No request runs on it."""
        self.kv: KVRuntime | None = None
        self.wrong: list[str] = []
        self.seen: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._reads: dict[int, deque[tuple[Launched, list[bytes], str]]] = {s: deque() for s in self.streams}

    def compute(self, lease: Lease, stop: int) -> Fence | None:
        """Launch the kernel that writes the KV of tokens from `lease.confirmed_tokens` to `stop`; its fence."""
        assert self.kv is not None
        stream, start = self._random.choice(self.streams), lease.confirmed_tokens
        lease.wait_on(stream)
        values, kernel = _bytes_of(kv_of(lease, stop)), self._kernel()
        for group, array in self.arrays.items():
            table = lease.block_ids(group).tolist()
            written = table[start // BLOCK : -(-stop // BLOCK)]
            assert all(written), "there is a slot for every token that is computed"
            require_idle(self.fake, array, written)
            for begin, end in _cut(start, stop):
                at = array.pointer + (table[begin // BLOCK] * BLOCK + begin % BLOCK) * TOKEN_BYTES
                kernel.write(at, values[begin * TOKEN_BYTES : end * TOKEN_BYTES])
        if start < stop:
            self.fake.launch(stream, kernel)
            self.seen["computed"] += 1
        return self.kv.fence(stream)

    def check(self, lease: Lease) -> None:
        """Launch a kernel that reads all that is confirmed and held."""
        stream, stop = self._random.choice(self.streams), lease.confirmed_tokens
        values, kernel, wanted = _bytes_of(kv_of(lease, stop)), self._kernel(), list[bytes]()
        lease.wait_on(stream)
        for group, array in self.arrays.items():
            table = lease.block_ids(group).tolist()
            for begin, end in _cut(0, stop):
                if slot := table[begin // BLOCK]:
                    length = (end - begin) * TOKEN_BYTES
                    kernel.read(array.pointer + slot * BLOCK * TOKEN_BYTES, num_bytes=length)
                    wanted.append(values[begin * TOKEN_BYTES : end * TOKEN_BYTES])
        if wanted:
            self._reads[stream].append((self.fake.launch(stream, kernel), wanted, repr(lease)))
        self.judge()

    def judge(self) -> None:
        """Look at what kernels have read so far."""
        for reads in self._reads.values():
            while reads and (found := reads[0][0].result()) is not None:
                _, wanted, whose = reads.popleft()
                self.seen["read"] += 1
                if found != wanted:
                    self.wrong.append(f"a kernel of {whose} has read wrong bytes")

    @property
    def unread(self) -> int:
        """Kernels that have not read yet."""
        return sum(map(len, self._reads.values()))

    def _kernel(self) -> Kernel:
        return Kernel(duration_us=self._random.choice((0, 0, 30, 100)))


def _bytes_of(values: NDArray[np.uint32]) -> bytes:
    return np.repeat(values, TOKEN_BYTES // 4).tobytes()


def _cut(start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of `[start, stop)` that lie in one block each."""
    ends = [*range(start - start % BLOCK + BLOCK, stop, BLOCK), stop]
    return [(begin, end) for begin, end in zip([start, *ends[:-1]], ends, strict=True) if begin < end]
