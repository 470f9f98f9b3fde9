"""A tiny random Llama with a tiny tokenizer, written as a GGUF file, and its forward pass as plain numpy.

The reference is written from the papers (RMSNorm, rotary embeddings in the rotate-half form, grouped queries, SwiGLU),
in float64, one token after another, without any cache: it shares nothing with the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 4, 2, 16, 96
HIDDEN = HEADS * HEAD_DIM
EPS, ROPE_BASE, CONTEXT = 1e-5, 10_000.0, 2048
CONTROL_TOKENS = ("<|end|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"))
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """The file, and the weights in it as a reader must see them: names as in the file, rows in the order of papers."""

    path: Path
    weights: dict[str, Array]


def vocabulary() -> list[str]:
    """Returns the token texts by id: control tokens, one letter per byte, merged tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for place, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + place)
    return [*CONTROL_TOKENS, *(letters[byte] for byte in range(256)), *("".join(merge) for merge in MERGES)]


def write_tiny_model(path: Path, *, seed: int = 0, padding: int = 0) -> TinyModel:
    """Writes the model to `path`; the embedding is quantised, so that dequantising is part of every test.

    `padding` is the number of rows beyond the vocabulary that embedding and head have.
    """
    random = np.random.default_rng(seed)
    drawn = {name: random.normal(size=shape) * scale for name, (shape, scale) in _shapes(padding).items()}
    drawn |= {name: 1 + 0.1 * value for name, value in drawn.items() if "norm" in name}
    weights = {name: value.astype(np.float32) for name, value in drawn.items()}
    quantised = quantize(weights["token_embd.weight"], GGMLQuantizationType.Q8_0)
    weights["token_embd.weight"] = dequantize(quantised, GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer)
    for name, value in weights.items():
        if name == "token_embd.weight":
            writer.add_tensor(name, quantised, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, _as_stored(name, value=value))
    _write(writer)
    return TinyModel(path=path, weights={name: value.astype(np.float64) for name, value in weights.items()})


def reference_logits(model: TinyModel, token_ids: list[int]) -> Array:
    """Returns the logits after each of `token_ids`, `[tokens, vocabulary]`."""
    weights = model.weights
    hidden = weights["token_embd.weight"][token_ids]
    for layer in range(LAYERS):
        hidden = hidden + _attention(weights, layer=layer, hidden=hidden)
        normed = _norm(hidden, weight=weights[f"blk.{layer}.ffn_norm.weight"])
        gate = normed @ weights[f"blk.{layer}.ffn_gate.weight"].T
        up = normed @ weights[f"blk.{layer}.ffn_up.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ weights[f"blk.{layer}.ffn_down.weight"].T
    logits: Array = _norm(hidden, weight=weights["output_norm.weight"]) @ weights["output.weight"].T
    return logits


def _attention(weights: dict[str, Array], *, layer: int, hidden: Array) -> Array:
    normed = _norm(hidden, weight=weights[f"blk.{layer}.attn_norm.weight"])
    tokens = len(hidden)
    query = _rotate((normed @ weights[f"blk.{layer}.attn_q.weight"].T).reshape(tokens, HEADS, HEAD_DIM))
    key = _rotate((normed @ weights[f"blk.{layer}.attn_k.weight"].T).reshape(tokens, KV_HEADS, HEAD_DIM))
    value = (normed @ weights[f"blk.{layer}.attn_v.weight"].T).reshape(tokens, KV_HEADS, HEAD_DIM)
    attended = np.zeros((tokens, HEADS, HEAD_DIM))
    for position in range(tokens):
        for head in range(HEADS):
            seen = key[: position + 1, head * KV_HEADS // HEADS]
            scores = seen @ query[position, head] / np.sqrt(HEAD_DIM)
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            attended[position, head] = shares @ value[: position + 1, head * KV_HEADS // HEADS]
    out: Array = attended.reshape(tokens, HIDDEN) @ weights[f"blk.{layer}.attn_output.weight"].T
    return out


def _norm(hidden: Array, *, weight: Array) -> Array:
    normed: Array = hidden / np.sqrt((hidden**2).mean(-1, keepdims=True) + EPS) * weight
    return normed


def _rotate(heads: Array) -> Array:
    half = HEAD_DIM // 2
    angles = np.arange(len(heads))[:, None] / ROPE_BASE ** (np.arange(half) / half)
    turn = np.exp(1j * angles)[:, None, :]
    turned = (heads[..., :half] + 1j * heads[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _shapes(padding: int) -> dict[str, tuple[tuple[int, ...], float]]:
    """Returns shape and scale of every tensor; scales keep activations near 1 and let attention matter."""
    vocab = len(vocabulary()) + padding
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "token_embd.weight": ((vocab, HIDDEN), 1.0),
        "output_norm.weight": ((HIDDEN,), 1.0),
        "output.weight": ((vocab, HIDDEN), 0.3),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": ((HIDDEN,), 1.0),
            f"blk.{layer}.attn_q.weight": ((HIDDEN, HIDDEN), 0.25),
            f"blk.{layer}.attn_k.weight": ((kv, HIDDEN), 0.25),
            f"blk.{layer}.attn_v.weight": ((kv, HIDDEN), 0.25),
            f"blk.{layer}.attn_output.weight": ((HIDDEN, HIDDEN), 0.25),
            f"blk.{layer}.ffn_norm.weight": ((HIDDEN,), 1.0),
            f"blk.{layer}.ffn_gate.weight": ((FFN, HIDDEN), 0.15),
            f"blk.{layer}.ffn_up.weight": ((FFN, HIDDEN), 0.15),
            f"blk.{layer}.ffn_down.weight": ((HIDDEN, FFN), 0.15),
        }
    return shapes


def _as_stored(name: str, *, value: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Returns query and key rows in the order llama.cpp's converter stores them, other tensors as they are."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(name.split(".")[-2], 0)
    if not heads:
        return value
    halves = value.reshape(heads, 2, HEAD_DIM // 2, HIDDEN)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


def _write_metadata(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (len(tokens) - len(CONTROL_TOKENS)))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
