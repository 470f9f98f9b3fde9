"""Loads a Llama model from a GGUF file: its shape from the metadata, its weights from the tensors.

A file that asks for anything the forward pass does not do (another architecture, scaled rotary embeddings, biases,
experts) is refused by name: it would run and answer nonsense.
"""

from typing import Final

import torch
from torch import Tensor

from aiokv_engine.gguf import GgufFile
from aiokv_engine.llama import ImpossibleShape, LayerWeights, LlamaConfig, LlamaModel, LlamaWeights

__all__ = ["load_llama"]

_MAX_POSITIONS: Final = 32_768  # bounds the table of rotations, whatever the file says
_LAYER_TENSORS: Final = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def load_llama(file: GgufFile, *, dtype: torch.dtype = torch.float32) -> LlamaModel:
    """Builds the model in `file` with matrices of `dtype`; raises `GgufError` if the file does not hold one."""
    config = _read_config(file)
    _check_tensors(file, config=config)
    shape = (config.vocab_size, config.hidden_size)
    embedding = _read(file, "token_embd", shape=shape).to(dtype)
    head = _read(file, "output", shape=shape).to(dtype) if "output.weight" in file.tensors else embedding
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(_read_layer(file, index, config=config, dtype=dtype) for index in range(config.num_layers)),
        norm=_read(file, "output_norm", shape=(config.hidden_size,)),
        head=head.T.contiguous(),
    )
    return LlamaModel(config, weights=weights)


def _read_config(file: GgufFile) -> LlamaConfig:
    architecture = file.require("general.architecture", str)
    if architecture != "llama":
        raise file.error(f"its architecture is {architecture!r}, only 'llama' is supported")
    scaling = file.get("llama.rope.scaling.type", default="none")
    if scaling != "none":
        raise file.error(f"its rotary embeddings are scaled ({scaling!r}), which is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.error("the tensor 'token_embd.weight' is missing")
    num_heads = file.require("llama.attention.head_count", int)
    hidden_size = file.require("llama.embedding_length", int)
    head_dim = file.get("llama.attention.key_length", default=hidden_size // max(1, num_heads))
    if file.get("llama.rope.dimension_count", default=head_dim) != head_dim:
        raise file.error("it rotates only a part of each head, which is not supported")
    try:
        return LlamaConfig(
            num_layers=file.require("llama.block_count", int),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=file.get("llama.attention.head_count_kv", default=num_heads),
            head_dim=head_dim,
            ffn_size=file.require("llama.feed_forward_length", int),
            vocab_size=embedding.shape[0],
            max_positions=min(file.require("llama.context_length", int), _MAX_POSITIONS),
            norm_eps=file.require("llama.attention.layer_norm_rms_epsilon", float),
            rope_base=file.get("llama.rope.freq_base", default=10_000.0),
        )
    except ImpossibleShape as error:
        raise file.error(str(error)) from error


def _check_tensors(file: GgufFile, *, config: LlamaConfig) -> None:
    """Refuses a file with tensors that the forward pass would not use, or with more layers than tensors."""
    if config.num_layers > len(file.tensors):
        raise file.error(f"it announces {config.num_layers} layers but has {len(file.tensors)} tensors")
    used = {"token_embd.weight", "output_norm.weight", "output.weight"}
    used |= {f"blk.{index}.{name}.weight" for index in range(config.num_layers) for name in _LAYER_TENSORS}
    unused = sorted(file.tensors.keys() - used)
    if unused:
        raise file.error(f"it has tensors that this engine does not use, {len(unused)} in all, such as {unused[0]!r}")


def _read_layer(file: GgufFile, index: int, *, config: LlamaConfig, dtype: torch.dtype) -> LayerWeights:
    hidden, ffn = config.hidden_size, config.ffn_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def read(name: str, *shape: int) -> Tensor:
        return _read(file, f"blk.{index}.{name}", shape=shape)

    query = _unpermute(read("attn_q", queries, hidden), heads=config.num_heads)
    key = _unpermute(read("attn_k", keys, hidden), heads=config.num_kv_heads)
    return LayerWeights(
        attention_norm=read("attn_norm", hidden),
        qkv=_join(query, key, read("attn_v", keys, hidden), dtype=dtype),
        attention_out=_join(read("attn_output", hidden, queries), dtype=dtype),
        ffn_norm=read("ffn_norm", hidden),
        gate_up=_join(read("ffn_gate", ffn, hidden), read("ffn_up", ffn, hidden), dtype=dtype),
        down=_join(read("ffn_down", hidden, ffn), dtype=dtype),
    )


def _join(*matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Joins `[out, in]` matrices along their outputs into one contiguous `[in, out]`."""
    return torch.cat(matrices).to(dtype).T.contiguous()


def _read(file: GgufFile, name: str, *, shape: tuple[int, ...]) -> Tensor:
    info = file.tensors.get(f"{name}.weight")
    if info is not None and info.shape != shape:
        raise file.error(f"the tensor '{name}.weight' has the shape {info.shape}, the metadata asks for {shape}")
    return torch.from_numpy(file.read_tensor(f"{name}.weight"))


def _unpermute(weight: Tensor, *, heads: int) -> Tensor:
    """Undoes the order of query and key rows in GGUF files of this architecture: there the pairs that rotate together
    are neighbours, here they lie half a head apart (llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute).
    """
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
