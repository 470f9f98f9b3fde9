"""The tokenizer and chat template of a GGUF file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from aiokv.errors import UsageError
from aiokv_engine.chat import ChatTemplate
from aiokv_engine.gguf import GgufError, GgufFile, Value
from aiokv_engine.tokenizer import GgufTokenizer, StreamDecoder
from tests.engine.tiny_model import vocabulary


@pytest.fixture(scope="module")
def tokenizer(tiny_file: GgufFile) -> GgufTokenizer:
    return GgufTokenizer(tiny_file)


def test_merges_apply_within_words(tokenizer: GgufTokenizer) -> None:
    names = vocabulary()
    assert [names[token] for token in tokenizer.encode("the the")] == ["the", "Ġthe"]


def test_digits_are_split_before_merging(tokenizer: GgufTokenizer) -> None:
    names = vocabulary()
    assert [names[token] for token in tokenizer.encode("12")] == ["1", "2"]


def test_control_tokens_are_recognised_and_not_decoded(tokenizer: GgufTokenizer) -> None:
    token_ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert token_ids[0] == 1
    assert token_ids[-1] == 2
    assert tokenizer.decode(token_ids) == "a"
    assert tokenizer.stop_ids == {2}


@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(text: str, tokenizer: GgufTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=st.text())
def test_other_tools_count_tokens_as_the_model_does(text: str, tokenizer: GgufTokenizer) -> None:
    other = Tokenizer.from_str(tokenizer.as_json())
    assert other.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
    assert other.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(text=st.text(), cut=st.integers(0, 20))
def test_a_stream_never_takes_back_what_it_returned(text: str, cut: int, tokenizer: GgufTokenizer) -> None:
    token_ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    early = "".join(decoder.push(token) for token in token_ids[:cut])
    assert text.startswith(early)
    assert early + "".join(decoder.push(token) for token in token_ids[cut:]) + decoder.finish() == text


def test_a_stream_holds_back_an_unfinished_character(tokenizer: GgufTokenizer) -> None:
    first, *others = tokenizer.encode("é")
    decoder = StreamDecoder(tokenizer)
    assert decoder.push(first) == ""
    assert [decoder.push(other) for other in others] == ["é"]
    cut = StreamDecoder(tokenizer)
    assert (cut.push(first), cut.finish()) == ("", "\ufffd")


def test_a_token_outside_the_vocabulary_is_refused(tokenizer: GgufTokenizer) -> None:
    for token_id in (-1, tokenizer.vocab_size):
        with pytest.raises(UsageError, match="outside the vocabulary"):
            tokenizer.decode([token_id])


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("tokenizer.ggml.model", "llama", "family 'llama'"),
        ("tokenizer.ggml.pre", "exotic", "'exotic'"),
        ("tokenizer.ggml.tokens", ("a", "a"), "twice"),
        ("tokenizer.ggml.tokens", (), "empty"),
        ("tokenizer.ggml.tokens", ("a", "b"), "2 tokens but"),
        ("tokenizer.ggml.merges", ("t nothing",), "'t nothing'"),
        ("tokenizer.ggml.eos_token_id", 100_000, "eos token 100000"),
    ],
)
def test_a_foreign_tokenizer_is_refused(key: str, value: Value, problem: str, tiny_file: GgufFile) -> None:
    metadata = dict(tiny_file.metadata) | {key: value}
    if value in (("a", "a"), ()):
        del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(GgufError, match=problem):
        GgufTokenizer(GgufFile(tiny_file.path, metadata=metadata, tensors={}))


def test_a_conversation_is_rendered(tiny_file: GgufFile) -> None:
    messages = [{"role": "user", "content": "hi {{ 7 * 7 }}"}]
    assert ChatTemplate(tiny_file).render(messages) == "<|im_start|>user hi {{ 7 * 7 }}<|im_end|><|im_start|>assistant "


def test_a_file_without_a_template_says_so(tiny_file: GgufFile) -> None:
    metadata = dict(tiny_file.metadata)
    del metadata["tokenizer.chat_template"]
    with pytest.raises(GgufError, match=r"'tokenizer\.chat_template' is missing"):
        ChatTemplate(GgufFile(tiny_file.path, metadata=metadata, tensors={}))


@pytest.mark.parametrize("template", ["{% for %}", "{{ 'x' | nothing }}", "{{"])
def test_a_broken_template_is_refused_when_loaded(template: str, tiny_file: GgufFile) -> None:
    with pytest.raises(GgufError, match="chat template is broken"):
        _with_template(template, file=tiny_file)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system message') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused_when_rendered(template: str, tiny_file: GgufFile) -> None:
    with pytest.raises(UsageError, match="cannot render"):
        _with_template(template, file=tiny_file).render([{"role": "user", "content": "hi"}])


def _with_template(template: str, *, file: GgufFile) -> ChatTemplate:
    metadata = dict(file.metadata) | {"tokenizer.chat_template": template}
    return ChatTemplate(GgufFile(file.path, metadata=metadata, tensors={}))
