"""The text of an answer: cut at stop strings wherever tokens are cut, never a broken character, nothing taken back."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.stop_text import AnswerText
from aiokv_engine.tokenizer import GgufTokenizer

LETTERS = st.sampled_from("abé日🙂")


def byte_tokens(tokenizer: GgufTokenizer, text: bytes) -> list[int]:
    """One token per byte: the tiny model has one for each."""
    by_bytes = {tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))}
    return [by_bytes[bytes([byte])] for byte in text]


def pieces_of(tokenizer: GgufTokenizer, tokens: list[int], *, stops: list[str]) -> tuple[list[str], bool]:
    text = AnswerText(tokenizer, stops=stops)
    pieces = [text.push(token) for token in tokens]
    return [*pieces, text.finish()], text.is_stopped


def cut(text: str, *, stops: list[str]) -> str:
    """Letter by letter: as soon as the text ends with stop strings, the longest of them goes."""
    for length in range(len(text) + 1):
        ends = [stop for stop in stops if text[:length].endswith(stop)]
        if ends:
            return text[: length - max(map(len, ends))]
    return text


@given(
    text=st.text(LETTERS, max_size=20),
    stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(1, 6), min_size=40, max_size=40),
)
def test_where_tokens_are_cut_does_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    tokenizer = _Pieces(text.encode(), cuts=cuts)
    answer = AnswerText(tokenizer, stops=stops)  # type: ignore[arg-type]  # it only asks for bytes
    said = "".join(answer.push(token) for token in range(len(tokenizer.pieces))) + answer.finish()
    assert said == cut(text, stops=stops)


class _Pieces:
    """A text in tokens of given lengths."""

    def __init__(self, text: bytes, *, cuts: list[int]) -> None:
        ends = list(accumulate(cuts))
        self.pieces = [text[start:end] for start, end in pairwise([0, *ends]) if start < len(text)]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


@given(text=st.text(LETTERS, max_size=30), stops=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4))
def test_the_text_ends_before_the_first_stop_string(tiny: LoadedModel, text: str, stops: list[str]) -> None:
    pieces, is_stopped = pieces_of(tiny.tokenizer, byte_tokens(tiny.tokenizer, text.encode()), stops=stops)
    assert "".join(pieces) == cut(text, stops=stops)
    assert is_stopped == any(stop in text for stop in stops)


@given(
    text=st.text(LETTERS, max_size=20),
    stop=st.text(LETTERS, min_size=2, max_size=4),
    rest=st.text(LETTERS, max_size=4),
)
def test_no_part_of_a_stop_string_is_said_before_it_is_complete(
    tiny: LoadedModel, text: str, stop: str, rest: str
) -> None:
    whole = text + stop + rest
    answer = AnswerText(tiny.tokenizer, stops=[stop])
    said = ""
    for token in byte_tokens(tiny.tokenizer, whole.encode()):
        said += answer.push(token)
        assert cut(whole, stops=[stop]).startswith(said)
    assert said == cut(whole, stops=[stop])


@given(text=st.text(LETTERS, max_size=20), lost=st.integers(0, 3))
def test_characters_are_whole_and_said_as_soon_as_they_are(tiny: LoadedModel, text: str, lost: int) -> None:
    encoded = text.encode()
    encoded = encoded[: len(encoded) - lost]
    answer = AnswerText(tiny.tokenizer, stops=[])
    said = ""
    for count, token in enumerate(byte_tokens(tiny.tokenizer, encoded), start=1):
        said += answer.push(token)
        assert said == encoded[:count].decode(errors="ignore")
    assert said + answer.finish() == encoded.decode(errors="replace")


def test_what_only_looked_like_a_stop_string_is_said_at_the_end(tiny: LoadedModel) -> None:
    pieces, is_stopped = pieces_of(tiny.tokenizer, byte_tokens(tiny.tokenizer, b"one en"), stops=["end", "eno"])
    assert "".join(pieces) == "one en"
    assert "".join(pieces[:-1]) == "one "
    assert not is_stopped


def test_nothing_follows_a_stop_string(tiny: LoadedModel) -> None:
    pieces, is_stopped = pieces_of(tiny.tokenizer, byte_tokens(tiny.tokenizer, b"a.b.c"), stops=["."])
    assert pieces == ["a", "", "", "", "", ""]
    assert is_stopped
