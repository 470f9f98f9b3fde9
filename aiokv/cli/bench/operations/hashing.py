"""HASH: all block hashes of a prompt."""

from __future__ import annotations

from typing import final

from aiokv.cli.bench.cases import BLOCK, Case
from aiokv.cli.bench.operations.prompts import Prompts
from aiokv.cli.bench.operations.timing import Times, now_ns
from aiokv.model.keys import BlockKeys

__all__ = ["Hashing"]


@final
class Hashing:
    """Timed: `BlockKeys.hash_more` of a new prompt, in one go. Its tokens have been taken into the keys before."""

    __slots__ = ("_case", "_keys", "_prompts")

    def __init__(self, case: Case) -> None:
        self._case = case
        self._prompts = Prompts()
        self._keys = BlockKeys((), hash_block_size=BLOCK)

    def prepare(self) -> None:
        """See `TimedOperation`."""
        tokens = self._prompts.tokens(self._prompts.new_number(), length=self._case.blocks * BLOCK)
        self._keys = BlockKeys(tokens, hash_block_size=BLOCK)

    def run(self) -> Times:
        """See `TimedOperation`."""
        keys = self._keys
        blocks = keys.num_blocks
        started = now_ns()
        keys.hash_more(blocks)
        return Times(counted={"hash": now_ns() - started})

    def restore(self) -> None:
        """See `TimedOperation`."""
        if self._keys.num_hashed != self._case.blocks:
            raise RuntimeError(f"{self._keys.num_hashed} of {self._case.blocks} blocks were hashed")
