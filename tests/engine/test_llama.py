"""The Llama forward pass: right against plain numpy, and the same bit for bit wherever its blocks lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aiokv_engine.gguf import GgufError, GgufFile, Value
from aiokv_engine.llama import CHUNK, LlamaModel
from aiokv_engine.llama_gguf import load_llama
from aiokv_engine.paged_attention import DECODE_ROWS, DecodeRow, make_arenas
from aiokv_engine.selfcheck import Comparison, check_numerics
from tests.engine.tiny_model import TinyModel, reference_logits

BLOCK_SIZE = 16
BLOCKS = 64
PROMPT = [(11 * index * index + 5 * index) % 260 for index in range(3 * CHUNK + 9)]
NEXT = 77


def arenas_of(model: LlamaModel) -> list[Tensor]:
    config = model.config
    shape = (BLOCKS, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    return make_arenas(shape, layers=config.num_layers, dtype=model.dtype)


def prefill(model: LlamaModel, prompt: list[int], *, blocks: Tensor, arenas: list[Tensor], start: int = 0) -> Tensor:
    """Computes `prompt` from `start` on as the engine does; returns each chunk's logits, `[chunks, vocabulary]`."""
    cuts = range(start, len(prompt), CHUNK)
    return torch.stack([model.prefill(prompt[at : at + CHUNK], start=at, blocks=blocks, arenas=arenas) for at in cuts])


def scattered(seed: int) -> Tensor:
    """Returns a block table that leaves out the null block."""
    return torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(seed)) + 1


def test_logits_equal_the_reference(tiny: TinyModel, tiny_llama: LlamaModel) -> None:
    arenas, blocks = arenas_of(tiny_llama), scattered(1)
    reference = reference_logits(tiny, [*PROMPT, NEXT])
    ours = prefill(tiny_llama, PROMPT, blocks=blocks, arenas=arenas)
    ends = [min(at + CHUNK, len(PROMPT)) - 1 for at in range(0, len(PROMPT), CHUNK)]
    assert np.abs(ours.numpy() - reference[ends]).max() < 1e-3
    row = DecodeRow(token_id=NEXT, position=len(PROMPT), blocks=blocks)
    assert np.abs(tiny_llama.decode([row], arenas=arenas)[0].numpy() - reference[-1]).max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hit", [CHUNK, 2 * CHUNK, 3 * CHUNK])
def test_warm_equals_cold_bit_for_bit_wherever_blocks_lie(hit: int, dtype: torch.dtype, tiny_file: GgufFile) -> None:
    model = load_llama(tiny_file, dtype=dtype)
    if check_numerics(model) is Comparison.TOLERANCE:
        pytest.skip("this CPU does not repeat its results bit for bit")
    cold, warm = arenas_of(model), [arena.fill_(1e4) for arena in arenas_of(model)]
    here, there = scattered(2), scattered(3)
    cold_logits = prefill(model, PROMPT, blocks=here, arenas=cold)
    for source, target in zip(cold, warm, strict=True):
        target[:, there[: hit // BLOCK_SIZE]] = source[:, here[: hit // BLOCK_SIZE]]
    warm_logits = prefill(model, PROMPT, blocks=there, arenas=warm, start=hit)
    assert torch.equal(warm_logits[-1], cold_logits[-1])
    used = -(-len(PROMPT) // BLOCK_SIZE) - 1
    for source, target in zip(cold, warm, strict=True):
        assert torch.equal(source[:, here[:used]], target[:, there[:used]])


def test_any_wrong_block_changes_the_logits(tiny_llama: LlamaModel) -> None:
    arenas, blocks = arenas_of(tiny_llama), scattered(4)
    right = prefill(tiny_llama, PROMPT, blocks=blocks, arenas=arenas)[-1]
    for block in blocks[: len(PROMPT) // BLOCK_SIZE].tolist():
        for arena in arenas:
            kept = arena[:, block].clone()
            arena[:, block] = 0.25
            wrong = prefill(tiny_llama, PROMPT, blocks=blocks, arenas=arenas, start=3 * CHUNK)[-1]
            arena[:, block] = kept
            assert (wrong - right).abs().max() > 1e-2
            assert not Comparison.TOLERANCE.are_equal(wrong, right)


def test_a_decoded_row_does_not_depend_on_its_companions(tiny_llama: LlamaModel, comparison: Comparison) -> None:
    arenas, blocks = arenas_of(tiny_llama), scattered(5)
    prefill(tiny_llama, PROMPT, blocks=blocks, arenas=arenas)
    mine = DecodeRow(token_id=NEXT, position=len(PROMPT), blocks=blocks)
    alone = tiny_llama.decode([mine], arenas=arenas)[0]
    free = blocks[20:]
    others = [DecodeRow(token_id=place, position=place, blocks=free[place:]) for place in range(DECODE_ROWS - 1)]
    for place in range(DECODE_ROWS):
        crowd = tiny_llama.decode([*others[:place], mine, *others[place:]], arenas=arenas)
        assert comparison.are_equal(crowd[place], alone)


def test_only_the_named_slots_are_written(tiny_llama: LlamaModel) -> None:
    arenas, blocks = arenas_of(tiny_llama), scattered(6)
    prefill(tiny_llama, PROMPT, blocks=blocks, arenas=arenas)
    tiny_llama.decode([DecodeRow(token_id=NEXT, position=len(PROMPT), blocks=blocks)], arenas=arenas)
    used, rest = divmod(len(PROMPT) + 1, BLOCK_SIZE)
    for arena in arenas:
        assert not arena[:, blocks[used], rest:].any()
        assert not arena[:, blocks[used + 1 :]].any()
        assert not arena[:, 0].any()


def test_this_machine_or_the_fallback_is_reported(tiny_llama: LlamaModel) -> None:
    assert check_numerics(tiny_llama) in Comparison


def test_a_model_that_does_not_repeat_itself_falls_back_to_tolerance(
    tiny_llama: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = LlamaModel.decode
    steps = iter(range(10))

    def drifting(model: LlamaModel, rows: list[DecodeRow], *, arenas: list[Tensor]) -> Tensor:
        return exact(model, rows, arenas=arenas) + 1e-5 * next(steps)

    monkeypatch.setattr(LlamaModel, "decode", drifting)
    assert check_numerics(tiny_llama) is Comparison.TOLERANCE


def test_comparisons_differ_in_strictness() -> None:
    ones = torch.ones(2, 3)
    assert Comparison.BITWISE.are_equal(ones, ones.clone())
    assert not Comparison.BITWISE.are_equal(ones, ones + 1e-5)
    assert Comparison.TOLERANCE.are_equal(ones, ones + 1e-5)
    assert not Comparison.TOLERANCE.are_equal(ones, ones + 1e-2)
    assert not Comparison.TOLERANCE.are_equal(ones, ones * float("nan"))
    assert not Comparison.TOLERANCE.are_equal(ones, ones[:1])


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("general.architecture", "mamba", "'mamba'"),
        ("llama.rope.scaling.type", "yarn", "'yarn'"),
        ("llama.rope.dimension_count", 8, "a part of each head"),
        ("llama.block_count", 1, r"does not use, 9 in all, such as 'blk\.1"),
        ("llama.block_count", 3, r"'blk\.2\.attn_q\.weight' is missing"),
        ("llama.block_count", 2**32, "layers but has"),
        ("llama.attention.head_count_kv", 3, "multiple of the KV heads"),
        ("llama.attention.head_count_kv", 4, "the metadata asks for"),
        ("llama.feed_forward_length", 0, "at least 1"),
        ("llama.feed_forward_length", 97, "the metadata asks for"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "positive"),
    ],
)
def test_a_model_of_another_shape_is_refused(key: str, value: Value, problem: str, tiny_file: GgufFile) -> None:
    metadata = dict(tiny_file.metadata) | {key: value}
    with pytest.raises(GgufError, match=problem) as caught:
        load_llama(GgufFile(tiny_file.path, metadata=metadata, tensors=tiny_file.tensors))
    assert str(tiny_file.path) in str(caught.value)
