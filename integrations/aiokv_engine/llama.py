"""The forward pass of Llama models over KV blocks, on the CPU, in torch.

Two calls: `prefill` computes consecutive tokens of one sequence, `decode` one token each of up to eight. Whether a
result is the same bit for bit the second time depends on the shapes that reach the matrix kernels, so:
- a caller cuts prefill at absolute multiples of `CHUNK`, and starts at one of them: the same chunk then has the same
  shape whether what lies before it was computed just now or found in the cache;
- `decode` always computes `DECODE_ROWS` rows, so who else is running does not show in anyone's result.
That the kernels keep this promise is a property of the CPU and its libraries: `selfcheck` asks them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, silu

from aiokv.errors import ConfigError
from aiokv_engine.paged_attention import DECODE_ROWS, Attention, DecodeAttention, DecodeRow, PrefillAttention

__all__ = ["CHUNK", "ImpossibleShape", "LayerWeights", "LlamaConfig", "LlamaModel", "LlamaWeights"]

CHUNK: Final = 64


class ImpossibleShape(ConfigError):
    """No model can have this shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The shape of a Llama model. `max_positions` bounds prompt and answer together, in tokens."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope_base: float

    def __post_init__(self) -> None:
        sizes = (self.num_layers, self.hidden_size, self.num_heads, self.num_kv_heads, self.head_dim)
        if min(*sizes, self.ffn_size, self.vocab_size, self.max_positions) < 1:
            raise ImpossibleShape(f"every size of a model is at least 1: {self}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ImpossibleShape(f"the heads are a multiple of the KV heads, and their size is even: {self}")
        if not (self.norm_eps > 0 and self.rope_base > 0):
            raise ImpossibleShape(f"the norm's epsilon and the rotation's base are positive: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Matrices are `[in, out]` and contiguous: measured on CPUs with AVX-512, decoding eight rows in float32
    is twice as fast as with `[out, in]`. `qkv` joins queries, keys and values, `gate_up` joins gate and up.
    """

    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All weights. Norms are float32; `embedding` is `[vocab_size, hidden_size]`, `head` the other way round."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


@final
class LlamaModel:
    """A Llama model. It keeps nothing between calls but its weights: all state lies in the caller's arenas."""

    __slots__ = ("_cos", "_sin", "config", "dtype", "weights")

    def __init__(self, config: LlamaConfig, *, weights: LlamaWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self._cos, self._sin = _rotations(config)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], *, start: int, blocks: Tensor, arenas: Sequence[Tensor]) -> Tensor:
        """Writes the KV of `token_ids` at positions from `start` on; returns the last one's logits, `[vocab_size]`.

        `blocks` is the sequence's block table (int32 or int64) and covers all of them; the positions before `start`
        have been written. Logits are float32.
        """
        attention = PrefillAttention(arenas, start=start, tokens=len(token_ids), blocks=blocks)
        positions = torch.arange(start, start + len(token_ids))
        hidden = self._forward(torch.tensor(token_ids), positions=positions, attention=attention)
        return self._logits(hidden[-1:])[0]

    @torch.inference_mode()
    def decode(self, rows: Sequence[DecodeRow], *, arenas: Sequence[Tensor]) -> Tensor:
        """Writes the KV of one token of each of 1 to `DECODE_ROWS` sequences; returns logits `[rows, vocab_size]`."""
        padding = [0] * (DECODE_ROWS - len(rows))
        token_ids = torch.tensor([row.token_id for row in rows] + padding)
        positions = torch.tensor([row.position for row in rows] + padding)
        hidden = self._forward(token_ids, positions=positions, attention=DecodeAttention(arenas, rows=rows))
        return self._logits(hidden)[: len(rows)]

    def _forward(self, token_ids: Tensor, *, positions: Tensor, attention: Attention) -> Tensor:
        """Returns the last layer's hidden states, `[tokens, hidden_size]`."""
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden = embedding(token_ids, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            queries, keys, values = self._project(hidden, layer=layer)
            keys_values = torch.stack((_rotate(keys, cos=cos, sin=sin), values))
            attended = attention.attend(index, query=_rotate(queries, cos=cos, sin=sin), keys_values=keys_values)
            hidden = hidden + attended.flatten(1) @ layer.attention_out
            gate, up = (self._norm(hidden, layer.ffn_norm) @ layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + (silu(gate) * up) @ layer.down
        return hidden

    def _project(self, hidden: Tensor, *, layer: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries `[tokens, heads, head_dim]`, keys and values `[tokens, kv_heads, head_dim]`."""
        config = self.config
        joined = self._norm(hidden, layer.attention_norm) @ layer.qkv
        heads = joined.view(len(hidden), -1, config.head_dim)
        keys = heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
        return heads[:, : config.num_heads], keys, heads[:, config.num_heads + config.num_kv_heads :]

    def _logits(self, hidden: Tensor) -> Tensor:
        return (self._norm(hidden, self.weights.norm) @ self.weights.head).float()

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden.float(), (self.config.hidden_size,), weight, self.config.norm_eps).to(self.dtype)


def _rotations(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of rotary embeddings (arXiv 2104.09864), each `[max_positions, head_dim / 2]`."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * config.rope_base**-exponents
    return angles.cos().float(), angles.sin().float()


def _rotate(heads: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of `[tokens, heads, head_dim]`; the angles' are `[tokens, 1, ...]`."""
    left, right = heads.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(heads.dtype)
