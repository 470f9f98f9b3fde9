"""`PinnedArena`: the memory of the CPU tier for a backend whose device copies to and from it by itself.

One exact mapping, touched near the GPU and registered with the driver in the background. Until that is settled no copy
may use it; afterwards it is pinned as a whole or not at all, and works either way.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

from aiokv.backends.arena import ByteRows
from aiokv.backends.base import Pinning
from aiokv.backends.chunks import MOST_BYTES, Chunks, cut_chunks
from aiokv.backends.mapping import Pages, address_of, map_bytes
from aiokv.backends.pinning import NOTHING_TO_PIN, PinThread, Registrar
from aiokv.errors import ConfigError

__all__ = ["PinnedArena"]


@final
class PinnedArena:
    """`blocks` slots of `block_bytes`. Pinning begins at once, in a thread; the constructor only maps.

    `node` is the NUMA node of the GPU, `None` if it is not known. Raises `ConfigError` where the memory is refused.
    """

    __slots__ = ("_thread", "chunks", "rows")

    def __init__(
        self,
        *,
        blocks: int,
        block_bytes: int,
        registrar: Registrar,
        node: int | None = None,
        pages: Pages = Pages.HUGE,
        most_chunk_bytes: int = MOST_BYTES,
        root: Path = Path("/"),
    ) -> None:
        if most_chunk_bytes < 1:
            raise ConfigError(f"a chunk must have at least one byte, not {most_chunk_bytes}")
        self.chunks: Chunks = cut_chunks(slots=blocks, slot_bytes=block_bytes, most_bytes=most_chunk_bytes)
        """Where a copy must be cut: none may straddle two chunks."""
        flat = map_bytes(self.chunks.num_bytes, pages=pages)
        self.rows: ByteRows = flat.reshape(blocks, block_bytes)
        """All slots, shape `[blocks, block_bytes]`. They stay valid for as long as somebody holds them."""
        step = self.chunks.slots_per_chunk * block_bytes
        cut = [flat[i * step : (i + 1) * step] for i in range(self.chunks.count)]
        self._thread = PinThread(cut, registrar=registrar, node=node, root=root) if cut else None

    @property
    def pinning(self) -> Pinning:
        """How it stands with the device, and how to wait for it or put it off."""
        return NOTHING_TO_PIN if self._thread is None else self._thread

    @property
    def address(self) -> int:
        """Of slot 0; the others follow without a gap."""
        return address_of(self.rows)

    @property
    def num_bytes(self) -> int:
        """Length of the mapping."""
        return self.rows.nbytes

    def close(self, *, deadline_s: float) -> bool:
        """Unregister everything, last chunk first; a registration in progress gets until the deadline. Idempotent.

        Only once no copy uses it: otherwise `leave`. False: the device has not let go of it, and it is kept mapped.
        """
        return self._thread is None or self._thread.close(deadline_s=deadline_s)

    def leave(self) -> None:
        """A stuck copy may still use it: nothing is unregistered nor unmapped for as long as the process lives."""
        if self._thread is not None:
            self._thread.leave()
