"""The real language model: few tests, on what a random one cannot show."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from aiokv_engine.chat import ChatTemplate
from aiokv_engine.gguf import GgufFile
from aiokv_engine.llama import CHUNK, LlamaModel
from aiokv_engine.paged_attention import DecodeRow, make_arenas
from aiokv_engine.selfcheck import check_numerics
from aiokv_engine.tokenizer import GgufTokenizer

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]

BLOCKS, BLOCK_SIZE = 32, 16


def answer(model: LlamaModel, prompt: list[int], *, arenas: list[Tensor], blocks: Tensor, start: int) -> list[Tensor]:
    """Returns the logits of eight greedy tokens after `prompt`, whose first `start` tokens are in `arenas`."""
    for at in range(start, len(prompt), CHUNK):
        logits = model.prefill(prompt[at : at + CHUNK], start=at, blocks=blocks, arenas=arenas)
    found = [logits]
    for position in range(len(prompt), len(prompt) + 7):
        row = DecodeRow(token_id=int(found[-1].argmax()), position=position, blocks=blocks)
        found.append(model.decode([row], arenas=arenas)[0])
    return found


def test_it_answers_and_a_warm_answer_equals_the_cold_one(real_llama: LlamaModel, real_file: GgufFile) -> None:
    tokenizer = GgufTokenizer(real_file)
    question = {"role": "user", "content": "What is the capital of France? " * 9 + "Answer in one sentence."}
    prompt = tokenizer.encode(ChatTemplate(real_file).render([question]))
    shape = (BLOCKS, BLOCK_SIZE, real_llama.config.num_kv_heads, real_llama.config.head_dim)
    cold, warm = (make_arenas(shape, layers=real_llama.config.num_layers, dtype=real_llama.dtype) for _ in range(2))
    here, there = torch.arange(1, BLOCKS), torch.arange(BLOCKS - 1, 0, -1)
    hit = (len(prompt) - 1) // CHUNK * CHUNK
    assert hit == CHUNK
    cold_logits = answer(real_llama, prompt, arenas=cold, blocks=here, start=0)
    for source, target in zip(cold, warm, strict=True):
        target[:, there[: hit // BLOCK_SIZE]] = source[:, here[: hit // BLOCK_SIZE]]
    warm_logits = answer(real_llama, prompt, arenas=warm, blocks=there, start=hit)
    assert "Paris" in tokenizer.decode(int(logits.argmax()) for logits in cold_logits)
    comparison = check_numerics(real_llama)
    assert comparison.are_equal(torch.stack(cold_logits), torch.stack(warm_logits))


def test_its_tokenizer_gives_every_text_back(real_file: GgufFile) -> None:
    tokenizer = GgufTokenizer(real_file)
    text = "Héllo, 1234 tokens!\n\n\tИ 中文 🎉 it's <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|im_end|>", "")
