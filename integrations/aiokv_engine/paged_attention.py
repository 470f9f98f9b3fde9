"""Attention over KV blocks: one arena per layer, `[2, num_blocks, block_size, kv_heads, head_dim]`, keys before values.

A sequence's token at position p lies in block `blocks[p // block_size]`, row `p % block_size`. Both paths below write
the new keys and values first and then read the sequence's whole extent, so a result depends on the values and on the
shapes only, never on where the blocks lie. Each sequence is attended over its own exact extent: padding one would
change the order in which the kernel sums (a different result in the last bits).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, final

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["DECODE_ROWS", "Attention", "DecodeAttention", "DecodeRow", "PrefillAttention", "make_arenas"]

DECODE_ROWS: Final = 8


class Attention(Protocol):
    """One forward step's attention; writes the step's keys and values into the arenas."""

    def attend(self, layer: int, *, query: Tensor, keys_values: Tensor) -> Tensor:
        """Returns the attended values, `[tokens, heads, head_dim]`.

        `query` is `[tokens, heads, head_dim]`, `keys_values` is `[2, tokens, kv_heads, head_dim]`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """One sequence's next token: `blocks` is its block table, which covers `position`."""

    token_id: int
    position: int
    blocks: Tensor


def make_arenas(shape: tuple[int, int, int, int], *, layers: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns one zero-filled arena per layer; `shape` is (num_blocks, block_size, kv_heads, head_dim).

    Zero-filled, because a kernel may multiply a masked value by zero, and only a finite one comes out as zero.
    """
    return [torch.zeros((2, *shape), dtype=dtype) for _ in range(layers)]


@final
class PrefillAttention:
    """Consecutive tokens of one sequence, from position `start`: each reads itself and all before it."""

    __slots__ = ("_arenas", "_blocks", "_extent", "_mask", "_slots")

    def __init__(self, arenas: Sequence[Tensor], *, start: int, tokens: int, blocks: Tensor) -> None:
        block_size = arenas[0].shape[2]
        positions = torch.arange(start, start + tokens)
        self._arenas = arenas
        self._extent = start + tokens
        self._blocks = blocks[: -(-self._extent // block_size)]
        self._slots = _slots(positions, blocks=self._blocks, block_size=block_size)
        self._mask = torch.arange(self._extent)[None, :] <= positions[:, None]

    def attend(self, layer: int, *, query: Tensor, keys_values: Tensor) -> Tensor:
        """Attends as `Attention.attend` says."""
        arena = self._arenas[layer]
        _write(arena, slots=self._slots, keys_values=keys_values)
        keys, values = _read(arena, blocks=self._blocks, extent=self._extent)
        return _attend(query, keys=keys, values=values, mask=self._mask)


@final
class DecodeAttention:
    """One token each of up to `DECODE_ROWS` sequences; the rows past them are padding, which writes nothing."""

    __slots__ = ("_arenas", "_blocks", "_extents", "_slots")

    def __init__(self, arenas: Sequence[Tensor], *, rows: Sequence[DecodeRow]) -> None:
        block_size = arenas[0].shape[2]
        self._arenas = arenas
        self._extents = [row.position + 1 for row in rows]
        self._blocks = [row.blocks[: -(-(row.position + 1) // block_size)] for row in rows]
        places = [_slots(torch.tensor([row.position]), blocks=row.blocks, block_size=block_size) for row in rows]
        self._slots = torch.cat(places)

    def attend(self, layer: int, *, query: Tensor, keys_values: Tensor) -> Tensor:
        """Attends as `Attention.attend` says."""
        arena = self._arenas[layer]
        _write(arena, slots=self._slots, keys_values=keys_values[:, : len(self._extents)])
        attended = torch.zeros_like(query)
        for row, (blocks, extent) in enumerate(zip(self._blocks, self._extents, strict=True)):
            keys, values = _read(arena, blocks=blocks, extent=extent)
            attended[row] = _attend(query[row : row + 1], keys=keys, values=values, mask=None)[0]
        return attended


def _slots(positions: Tensor, *, blocks: Tensor, block_size: int) -> Tensor:
    """Returns where `positions` lie in an arena seen as one row of tokens, `[num_blocks * block_size]`."""
    return blocks[positions // block_size].long() * block_size + positions % block_size


def _write(arena: Tensor, *, slots: Tensor, keys_values: Tensor) -> None:
    arena.flatten(1, 2).index_copy_(1, slots, keys_values)


def _read(arena: Tensor, *, blocks: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """Returns the keys and the values of positions `[0, extent)`, each `[kv_heads, extent, head_dim]`."""
    gathered = arena.index_select(1, blocks).flatten(1, 2)[:, :extent].transpose(1, 2)
    return gathered[0], gathered[1]


def _attend(query: Tensor, *, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    attended = scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
