"""An engine over a small runtime, as the engine's tests need it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import pytest
import torch
from torch import Tensor

from aiokv_engine.llama import LlamaModel
from aiokv_engine.paged_attention import DecodeRow
from aiokv_engine.scheduler import Answer
from aiokv_engine.serving import Serving, Sizes, open_serving

BLOCK_SIZE = 16
PATIENCE = 10  # seconds; only a test that fails waits that long


def serving(model: LlamaModel, *, gpu_blocks: int = 64, cpu_blocks: int = 128) -> AbstractAsyncContextManager[Serving]:
    """Opens a runtime and an engine over the host backend."""
    return open_serving(model, sizes=Sizes(gpu_blocks=gpu_blocks, cpu_blocks=cpu_blocks, block_size=BLOCK_SIZE))


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Returns `length` token ids of the tiny model."""
    drawn = torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in drawn]


def logits_of(answer: Answer) -> Tensor:
    """Returns the logits behind every token of the answer, `[tokens, vocabulary]`."""
    return torch.stack([token.logits for token in answer.tokens])


class Gate:
    """Stands before every forward step: notes the steps in `log` and holds them in the thread while closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.begun = threading.Semaphore(0)
        self.fault: Exception | None = None
        self._closes_at = 0
        self._open = threading.Event()
        self._open.set()
        prefill, decode = LlamaModel.prefill, LlamaModel.decode

        def gated_prefill(
            model: LlamaModel, token_ids: Sequence[int], *, start: int, blocks: Tensor, arenas: Sequence[Tensor]
        ) -> Tensor:
            self._pass(f"prefill {start}")
            return prefill(model, token_ids, start=start, blocks=blocks, arenas=arenas)

        def gated_decode(model: LlamaModel, rows: Sequence[DecodeRow], *, arenas: Sequence[Tensor]) -> Tensor:
            self._pass(f"decode {len(rows)}")
            return decode(model, rows, arenas=arenas)

        monkeypatch.setattr(LlamaModel, "prefill", gated_prefill)
        monkeypatch.setattr(LlamaModel, "decode", gated_decode)

    def close(self) -> None:
        """Holds the steps from now on."""
        self._open.clear()

    def close_at(self, step: int) -> None:
        """Lets so many steps begin, the first is 1, and holds the last of them."""
        self._closes_at = step

    def open(self) -> None:
        """Lets the steps pass."""
        self._closes_at = 0
        self._open.set()

    def _pass(self, step: str) -> None:
        self.log.append(step)
        if len(self.log) == self._closes_at:
            self._open.clear()
        self.begun.release()
        if not self._open.wait(PATIENCE):
            raise TimeoutError(step)
        if self.fault is not None:
            raise self.fault
