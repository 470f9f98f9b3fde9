"""A model file as the engine uses it: forward pass, tokenizer and chat template, checked to fit together."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from aiokv_engine.chat import ChatTemplate
from aiokv_engine.gguf import read_gguf
from aiokv_engine.llama import LlamaModel
from aiokv_engine.llama_gguf import load_llama
from aiokv_engine.tokenizer import GgufTokenizer

__all__ = ["LoadedModel", "load_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Everything one GGUF file gives. `name` is for people."""

    name: str
    llama: LlamaModel
    tokenizer: GgufTokenizer
    template: ChatTemplate


def load_model(path: Path, *, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Loads the GGUF file at `path` with matrices of `dtype`; raises `GgufError`. Takes seconds."""
    file = read_gguf(path)
    tokenizer = GgufTokenizer(file)
    template = ChatTemplate(file)
    llama = load_llama(file, dtype=dtype)
    if tokenizer.vocab_size > llama.config.vocab_size:
        sizes = f"{tokenizer.vocab_size} tokens, its embedding {llama.config.vocab_size}"
        raise file.error(f"its tokenizer has {sizes}")
    if tokenizer.vocab_size < llama.config.vocab_size:
        llama = _without_padding(llama, vocab_size=tokenizer.vocab_size)
    return LoadedModel(name=path.stem, llama=llama, tokenizer=tokenizer, template=template)


def _without_padding(llama: LlamaModel, *, vocab_size: int) -> LlamaModel:
    """Returns the model without what its embedding has beyond the vocabulary: no text stands for such tokens."""
    weights = replace(
        llama.weights,
        embedding=llama.weights.embedding[:vocab_size],
        head=llama.weights.head[:, :vocab_size].contiguous(),
    )
    return LlamaModel(replace(llama.config, vocab_size=vocab_size), weights=weights)
