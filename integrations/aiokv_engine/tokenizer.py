"""The tokenizer that a GGUF file carries: byte-level BPE in the GPT-2 family, and a decoder that is safe to stream.

Encoding is done by the `tokenizers` library. Decoding needs no library: every token stands for a fixed run of bytes,
so a text is the concatenation of them, and a stream only has to hold back the bytes of an unfinished character.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Final, final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from aiokv.errors import UsageError
from aiokv_engine.gguf import GgufFile

__all__ = ["GgufTokenizer", "StreamDecoder"]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # the values of `tokenizer.ggml.token_type` that matter here
_PRE_TOKENIZERS: Final = ("smollm", "gpt-2", "default")


@final
class GgufTokenizer:
    """Turns text into token ids and back. `stop_ids` end a generated text; `vocab_size` counts the ids."""

    __slots__ = ("_bytes", "_control", "_encoder", "_prefix", "stop_ids", "vocab_size")

    def __init__(self, file: GgufFile) -> None:
        """Builds the tokenizer of `file`; raises `GgufError` if the file has none or one of another family."""
        tokens, kinds = _read_vocabulary(file)
        self._encoder = _build_encoder(file, tokens=tokens, kinds=kinds)
        self._bytes = _token_bytes(tokens, kinds=kinds)
        self._control = frozenset(index for index, kind in enumerate(kinds) if kind == CONTROL)
        self._prefix = _begin_ids(file, size=len(tokens))
        self.stop_ids = _stop_ids(file, size=len(tokens))
        self.vocab_size = len(tokens)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`; the text of a control token becomes that token, as chat templates need."""
        return [*self._prefix, *self._encoder.encode(text, add_special_tokens=False).ids]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Returns the text of `token_ids` without control tokens; bytes that form no character become U+FFFD."""
        decoder = StreamDecoder(self)
        return "".join(decoder.push(token_id) for token_id in token_ids) + decoder.finish()

    def as_json(self) -> str:
        """Returns the content of a `tokenizer.json`, with which other tools count tokens as this model does."""
        copy = Tokenizer.from_str(self._encoder.to_str())
        copy.decoder = decoders.ByteLevel()
        return str(copy.to_str())

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes `token_id` stands for, none for a control token; raises `UsageError` on an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            raise UsageError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return b"" if token_id in self._control else self._bytes[token_id]


@final
class StreamDecoder:
    """Decodes one stream of tokens; what it has returned never changes when more tokens come."""

    __slots__ = ("_characters", "_tokenizer")

    def __init__(self, tokenizer: GgufTokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Returns the characters that `token_id` completes, possibly none."""
        return self._characters.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Ends the stream; returns U+FFFD if it ended within a character, else nothing."""
        return self._characters.decode(b"", final=True)


def _read_vocabulary(file: GgufFile) -> tuple[tuple[str, ...], list[int]]:
    """Returns the token texts and their kinds, both by id."""
    family = file.require("tokenizer.ggml.model", str)
    if family != "gpt2":
        raise file.error(f"its tokenizer is of the family {family!r}, only 'gpt2' (byte-level BPE) is supported")
    tokens = file.strings("tokenizer.ggml.tokens")
    kinds = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in file.metadata:
        kinds = file.integers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise file.error(f"it has {len(tokens)} tokens but {len(kinds)} token types")
    if not tokens or len(set(tokens)) != len(tokens):
        raise file.error("its vocabulary is empty or names a token twice")
    return tokens, kinds


def _build_encoder(file: GgufFile, *, tokens: tuple[str, ...], kinds: list[int]) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    encoder = Tokenizer(models.BPE(vocab=vocabulary, merges=_read_merges(file, vocabulary=vocabulary)))
    encoder.pre_tokenizer = _pre_tokenizer(file)
    added = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    encoder.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added if token])
    return encoder


def _read_merges(file: GgufFile, *, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the merges, most important first; each is checked, as the library reports a bad one as a bare failure."""
    merges = []
    for line in file.strings("tokenizer.ggml.merges"):
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise file.error(f"its tokenizer has a merge {line!r} of tokens that are not in the vocabulary")
        merges.append((left, right))
    return merges


def _pre_tokenizer(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    """Returns what splits a text before BPE; every family here splits words the GPT-2 way, smollm digits first."""
    name = file.get("tokenizer.ggml.pre", default="default")
    if name not in _PRE_TOKENIZERS:
        raise file.error(f"its tokenizer splits words in the way {name!r}, supported are {_PRE_TOKENIZERS}")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name != "smollm":
        return words
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])


def _token_bytes(tokens: Sequence[str], *, kinds: Sequence[int]) -> list[bytes]:
    """Returns the bytes of every token: a normal one is spelt in the byte alphabet, the others literally."""
    alphabet = _byte_alphabet()
    found = []
    for token, kind in zip(tokens, kinds, strict=True):
        spelt = kind == NORMAL and all(letter in alphabet for letter in token)
        found.append(bytes([alphabet[letter] for letter in token]) if spelt else token.encode())
    return found


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte behind each letter of GPT-2's byte-level alphabet (openai/gpt-2, encoder.py).

    Printable Latin-1 bytes stand for themselves, the other bytes for the letters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _begin_ids(file: GgufFile, *, size: int) -> tuple[int, ...]:
    if not file.get("tokenizer.ggml.add_bos_token", default=False):
        return ()
    return (_special_id(file, name="bos", size=size),)


def _stop_ids(file: GgufFile, *, size: int) -> frozenset[int]:
    names = [name for name in ("eos", "eot") if f"tokenizer.ggml.{name}_token_id" in file.metadata]
    return frozenset(_special_id(file, name=name, size=size) for name in names)


def _special_id(file: GgufFile, *, name: str, size: int) -> int:
    token_id = file.require(f"tokenizer.ggml.{name}_token_id", int)
    if not 0 <= token_id < size:
        raise file.error(f"its {name} token {token_id} is outside the vocabulary of {size}")
    return token_id
