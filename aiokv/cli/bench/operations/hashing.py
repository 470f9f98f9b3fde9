"""HASH: all block hashes of a prompt."""

from __future__ import annotations

from itertools import chain
from typing import final

from aiokv.cli.bench.cases import BLOCK, Case
from aiokv.cli.bench.operations.prompts import Prompts
from aiokv.cli.bench.operations.timing import Prepared, Times, now_ns
from aiokv.model.keys import BlockKeys

__all__ = ["Hashing"]


@final
class Hashing:
    """Timed: `BlockKeys.hash_more` of new prompts, each in one go. Their tokens are in the keys before."""

    __slots__ = ("_case", "_prompts")

    def __init__(self, case: Case) -> None:
        self._case = case
        self._prompts = Prompts()

    def prepare(self) -> Prepared[list[BlockKeys]]:
        """See `TimedOperation`."""
        case = self._case
        return Prepared(
            lead_in=[self._new_keys(case.lead_in_blocks)],
            measured=[self._new_keys(case.blocks) for _ in range(case.requests)],
        )

    def run(self, batch: list[BlockKeys]) -> Times:
        """See `TimedOperation`."""
        started = now_ns()
        for keys in batch:
            keys.hash_more(keys.num_blocks)
        return Times(counted={"hash": now_ns() - started})

    def restore(self, prepared: Prepared[list[BlockKeys]]) -> None:
        """See `TimedOperation`."""
        for keys in chain(*prepared.batches):
            if keys.num_hashed != keys.num_blocks:
                raise RuntimeError(f"{keys.num_hashed} of {keys.num_blocks} blocks were hashed")

    def _new_keys(self, blocks: int) -> BlockKeys:
        tokens = self._prompts.tokens(self._prompts.new_number(), length=blocks * BLOCK)
        return BlockKeys(tokens, hash_block_size=BLOCK)
