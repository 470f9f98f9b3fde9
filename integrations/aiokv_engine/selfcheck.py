"""Asks this CPU whether the engine's results repeat bit for bit, and compares results as strictly as the answer allows.

`llama` explains the rule. Matrix libraries do not promise it, so it is checked at start-up on the first layers of the
model that will run, whose matrices have the shapes that matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import torch
from torch import Tensor

from aiokv_engine.llama import CHUNK, LlamaModel
from aiokv_engine.paged_attention import DECODE_ROWS, DecodeRow, make_arenas

__all__ = ["POISON", "Comparison", "check_numerics"]

_LAYERS: Final = 4  # of the model: enough for every kind of matrix
_BLOCK_SIZE: Final = 16
_TAIL: Final = 5  # tokens of the prompt's last chunk
_TABLE: Final = (2 * CHUNK + _TAIL) // _BLOCK_SIZE + 1  # blocks of the prompt with one decoded token
POISON: Final = 1e4  # what unused memory holds: finite, and large enough to show
_TOLERANCE: Final = 1e-3  # absolute, on float32 logits


class Comparison(Enum):
    """How two results that should be the same are compared."""

    BITWISE = "bitwise"
    TOLERANCE = "tolerance"

    def are_equal(self, left: Tensor, right: Tensor) -> bool:
        """Says whether two tensors of logits are equal; different shapes never are."""
        if left.shape != right.shape:
            return False
        if self is Comparison.BITWISE:
            return torch.equal(left, right)
        return bool(((left - right).abs() <= _TOLERANCE).all())


@torch.inference_mode()
def check_numerics(model: LlamaModel) -> Comparison:
    """Returns `BITWISE` if warm results equal cold ones bit for bit on this CPU, else `TOLERANCE`. Takes under 2 s."""
    shallow = _first_layers(model)
    prompt = [(7 * index + 3) % model.config.vocab_size for index in range(2 * CHUNK + _TAIL)]
    cold = _Copy(arenas=_arenas(shallow), blocks=torch.arange(1, _TABLE + 1))
    warm = _Copy(arenas=_arenas(shallow), blocks=torch.arange(2 * _TABLE, _TABLE, -1))
    exact = _prefills_are_equal(shallow, prompt, cold=cold, warm=warm)
    exact = exact and _decodes_are_equal(shallow, position=len(prompt), cold=cold, warm=warm)
    return Comparison.BITWISE if exact else Comparison.TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One place the prompt is kept in: `blocks` is its block table in `arenas`."""

    arenas: list[Tensor]
    blocks: Tensor


def _prefills_are_equal(model: LlamaModel, prompt: Sequence[int], *, cold: _Copy, warm: _Copy) -> bool:
    """Computes the whole prompt, then its last chunk alone behind a copy of the blocks before it, placed otherwise."""
    for at in range(0, len(prompt), CHUNK):
        logits = model.prefill(prompt[at : at + CHUNK], start=at, blocks=cold.blocks, arenas=cold.arenas)
    hit = len(prompt) - _TAIL
    for source, target in zip(cold.arenas, warm.arenas, strict=True):
        target[:, warm.blocks[: hit // _BLOCK_SIZE]] = source[:, cold.blocks[: hit // _BLOCK_SIZE]]
    return torch.equal(logits, model.prefill(prompt[hit:], start=hit, blocks=warm.blocks, arenas=warm.arenas))


def _decodes_are_equal(model: LlamaModel, *, position: int, cold: _Copy, warm: _Copy) -> bool:
    """Computes the next token alone, then in the last row beside strangers."""
    alone = DecodeRow(token_id=1, position=position, blocks=cold.blocks)
    guest = DecodeRow(token_id=1, position=position, blocks=warm.blocks)
    strangers = [DecodeRow(token_id=2, position=place, blocks=torch.tensor([0])) for place in range(1, DECODE_ROWS)]
    crowd = model.decode([*strangers, guest], arenas=warm.arenas)
    return torch.equal(model.decode([alone], arenas=cold.arenas)[0], crowd[-1])


def _first_layers(model: LlamaModel) -> LlamaModel:
    layers = model.weights.layers[:_LAYERS]
    config = replace(model.config, num_layers=len(layers), max_positions=_TABLE * _BLOCK_SIZE)
    return LlamaModel(config, weights=replace(model.weights, layers=layers))


def _arenas(model: LlamaModel) -> list[Tensor]:
    config = model.config
    shape = (2 * _TABLE + 1, _BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return [arena.fill_(POISON) for arena in make_arenas(shape, layers=config.num_layers, dtype=model.dtype)]
