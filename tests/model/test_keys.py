"""Identity is canonical bytes (law 10), and does not depend on how a prefix was cut (invariant 8)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiokv.errors import ConfigError, UsageError
from aiokv.model.ids import DigestArray
from aiokv.model.keys import SEGMENT_BLOCKS, BlockKeys, MediaSpan
from aiokv.model.tokens import TokenIds

H = 4
IMAGE, SOUND = b"i" * 32, b"s" * 32
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def keys_of(
    token_ids: TokenIds,
    *,
    hash_block_size: int = H,
    salt: str | None = None,
    adapter: str | None = None,
    media: Iterable[MediaSpan] = (),
) -> BlockKeys:
    return BlockKeys(token_ids, hash_block_size=hash_block_size, salt=salt, adapter=adapter, media=media)


def all_digests(keys: BlockKeys) -> list[bytes]:
    return as_bytes(keys.digests(1, 0, keys.num_blocks))


def as_bytes(rows: DigestArray) -> list[bytes]:
    return [row.tobytes() for row in rows]


def expected_digests(tokens: Sequence[int], *, size: int = H, media: Sequence[MediaSpan] = ()) -> list[bytes]:
    """The canonical bytes of the module docstring, written down once more: one fresh hash per block."""
    parent = hashlib.sha256(b"aiokv/1/root\0" + struct.pack("<Q", size) + b"\0" + b"\0").digest()
    digests: list[bytes] = []
    segment = b""
    for block in range(len(tokens) // size):
        start = block * size
        spans = sorted((s.start, s.length, s.digest) for s in media if start <= s.start < start + size)
        if spans or block % SEGMENT_BLOCKS == 0:
            segment = b"aiokv/1/segment\0" + (digests[-1] if digests else parent) + struct.pack("<Q", len(spans))
            for first, length, digest in spans:
                segment += struct.pack("<Q", len(digest)) + digest + struct.pack("<QQ", first - start, length)
        segment += struct.pack(f"<{size}i", *tokens[start : start + size])
        digests.append(hashlib.sha256(segment).digest())
    return digests


spans = st.builds(MediaSpan, st.sampled_from([IMAGE, SOUND, b"x"]), st.integers(0, 60), st.integers(1, 40))
token_lists = st.lists(st.integers(INT32_MIN, INT32_MAX), max_size=80)


def test_known_answers() -> None:
    root = hashlib.sha256(b"aiokv/1/root\0" + b"\4" + bytes(7) + b"\1\2" + bytes(7) + b"ab" + b"\0").digest()
    keys = keys_of([1, 2, 3, 4, 5, 6, 7, -1], salt="ab")
    assert keys.identity == root
    header = b"aiokv/1/segment\0" + root + bytes(8)
    first, second = struct.pack("<4i", 1, 2, 3, 4), struct.pack("<4i", 5, 6, 7, -1)
    assert all_digests(keys) == [
        hashlib.sha256(header + first).digest(),
        hashlib.sha256(header + first + second).digest(),
    ]


PINNED = (
    "cd2b00dc8967239b3956d6537aca7d3660cd64b52a83a45ddf7112f257cba96f",
    "7b7b30babd5ede8e152a949bd078d15714e09b6bc98773885e5b3d9722d8ee95",
)


def test_digests_never_change_between_versions() -> None:
    keys = keys_of(range(8), salt="tenant-a", adapter="lora", media=[MediaSpan(IMAGE, 5, 2)])
    assert tuple(digest.hex() for digest in all_digests(keys)) == PINNED


@settings(max_examples=200)
@given(token_lists, st.lists(spans, max_size=4), st.sampled_from([1, 4, 7]))
def test_digests_are_the_hash_of_the_canonical_bytes(tokens: list[int], media: list[MediaSpan], size: int) -> None:
    unique = sorted(set(media), key=lambda s: (s.start, s.length, s.digest))
    expected = expected_digests(tokens, size=size, media=unique)
    assert all_digests(keys_of(tokens, hash_block_size=size, media=media)) == expected


def test_long_prompts_start_new_segments() -> None:
    tokens = list(range(2 * SEGMENT_BLOCKS * H + 3 * H))
    media = [MediaSpan(IMAGE, 5 * H + 1, 400 * H), MediaSpan(SOUND, SEGMENT_BLOCKS * H, 1)]
    assert all_digests(keys_of(tokens)) == expected_digests(tokens)
    assert all_digests(keys_of(tokens, media=media)) == expected_digests(tokens, media=media)


VARIANTS: dict[str, Callable[[], BlockKeys]] = {
    "plain": lambda: keys_of(range(16)),
    "first token": lambda: keys_of([7, *range(1, 16)]),
    "order": lambda: keys_of([1, 0, *range(2, 16)]),
    "hash block size": lambda: keys_of(range(16), hash_block_size=8),
    "empty salt": lambda: keys_of(range(16), salt=""),
    "salt": lambda: keys_of(range(16), salt="a"),
    "empty adapter": lambda: keys_of(range(16), adapter=""),
    "adapter": lambda: keys_of(range(16), adapter="a"),
    "salt and adapter": lambda: keys_of(range(16), salt="a", adapter="a"),
    "longer salt": lambda: keys_of(range(16), salt="ab", adapter="c"),
    "longer adapter": lambda: keys_of(range(16), salt="a", adapter="bc"),
    "surrogate": lambda: keys_of(range(16), salt="\ud800"),
    "media": lambda: keys_of(range(16), media=[MediaSpan(IMAGE, 1, 3)]),
    "media digest": lambda: keys_of(range(16), media=[MediaSpan(SOUND, 1, 3)]),
    "media start": lambda: keys_of(range(16), media=[MediaSpan(IMAGE, 2, 3)]),
    "media length": lambda: keys_of(range(16), media=[MediaSpan(IMAGE, 1, 2)]),
    "media across blocks": lambda: keys_of(range(16), media=[MediaSpan(IMAGE, 1, 8)]),
    "two media": lambda: keys_of(range(16), media=[MediaSpan(IMAGE, 1, 3), MediaSpan(SOUND, 1, 3)]),
    "media in the next block": lambda: keys_of(range(16), media=[MediaSpan(IMAGE, 5, 3)]),
    "media a block further": lambda: keys_of(range(16), media=[MediaSpan(IMAGE, 9, 3)]),
}


def test_every_field_changes_the_last_digest() -> None:
    last = {name: all_digests(make())[-1] for name, make in VARIANTS.items()}
    assert len(set(last.values())) == len(VARIANTS)


def test_media_change_nothing_before_the_block_they_start_in() -> None:
    plain = all_digests(keys_of(range(16)))
    media = all_digests(keys_of(range(16), media=[MediaSpan(IMAGE, 9, 2)]))
    assert media[:2] == plain[:2]
    assert not set(media[2:]) & set(plain[2:])


def test_the_order_in_which_media_are_given_does_not_matter() -> None:
    media = [MediaSpan(IMAGE, 4, 8), MediaSpan(SOUND, 0, 9), MediaSpan(IMAGE, 0, 9), MediaSpan(SOUND, 30, 2)]
    assert all_digests(keys_of(range(64), media=media)) == all_digests(keys_of(range(64), media=media[::-1]))


def test_tokens_cannot_imitate_a_media_header() -> None:
    span = MediaSpan(IMAGE, 4, 4)
    header = struct.pack("<Q", 1) + struct.pack("<Q", 32) + IMAGE + struct.pack("<QQ", 0, 4)
    imitation = list(struct.unpack(f"<{len(header) // 4}i", header))
    media = all_digests(keys_of([0] * 12, media=[span]))
    assert not set(media[1:]) & set(all_digests(keys_of([0] * 4 + imitation + [0] * 8)))


@settings(max_examples=150)
@given(token_lists, st.lists(spans, max_size=3), st.lists(st.integers(0, 5), max_size=30))
def test_hashing_in_slices_gives_equal_digests(tokens: list[int], media: list[MediaSpan], cuts: list[int]) -> None:
    keys, whole = keys_of(tokens, media=media), all_digests(keys_of(tokens, media=media))
    for limit in cuts:
        before = keys.num_hashed
        left = keys.hash_more(limit)
        assert keys.num_hashed == min(before + limit, keys.num_blocks)
        assert left == keys.num_blocks - keys.num_hashed
    assert all_digests(keys) == whole
    assert keys.hash_more(1) == 0


@settings(max_examples=150)
@given(token_lists, st.lists(spans, max_size=3), st.data())
def test_appending_in_any_split_gives_equal_keys(
    tokens: list[int], media: list[MediaSpan], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    keys = keys_of(tokens[: cuts[0] if cuts else 0], media=media)
    for start, stop in zip(cuts or [0], [*cuts[1:], len(tokens)], strict=True):
        keys.append(tokens[start:stop])
        keys.hash_more(data.draw(st.integers(0, 3)))
    assert keys.tokens(0, len(tokens)).tolist() == tokens
    assert all_digests(keys) == all_digests(keys_of(tokens, media=media))


@settings(max_examples=150)
@given(token_lists, st.lists(spans, max_size=2), st.data())
def test_truncated_keys_equal_keys_of_the_shorter_prompt(
    tokens: list[int], media: list[MediaSpan], data: st.DataObject
) -> None:
    keys = keys_of(tokens, media=media)
    keys.hash_more(data.draw(st.integers(0, 20)))
    kept = data.draw(st.integers(0, len(tokens)))
    if kept < len(tokens) and any(s.start < kept < s.stop for s in media):
        before = all_digests(keys)
        with pytest.raises(UsageError, match="media span"):
            keys.truncate(kept)
        assert (keys.num_tokens, all_digests(keys)) == (len(tokens), before)
        return
    keys.truncate(kept)
    assert keys.num_tokens == kept
    assert keys.num_hashed <= keys.num_blocks
    keys.append([5] * 30)
    left = [s for s in media if s.stop <= kept or kept == len(tokens)]
    assert all_digests(keys) == all_digests(keys_of(tokens[:kept] + [5] * 30, media=left))


def test_truncate_forgets_the_media_it_cuts_off() -> None:
    keys = keys_of(range(16), media=[MediaSpan(IMAGE, 1, 2), MediaSpan(SOUND, 9, 3)])
    keys.truncate(8)
    keys.append(range(8, 16))
    assert all_digests(keys) == all_digests(keys_of(range(16), media=[MediaSpan(IMAGE, 1, 2)]))


def test_truncate_in_the_middle_of_a_long_segment() -> None:
    tokens = list(range(3 * SEGMENT_BLOCKS * H))
    keys = keys_of(tokens)
    keys.hash_more(10**6)
    for kept in (700 * H + 1, 512 * H, 511 * H, 3 * H + 2, 1):
        keys.truncate(kept)
        keys.append(tokens[kept : kept + 5 * H])
        assert all_digests(keys) == expected_digests(tokens[: kept + 5 * H])


def test_copies_are_independent() -> None:
    keys = keys_of(range(40), media=[MediaSpan(IMAGE, 17, 2)])
    keys.hash_more(6)
    twin = keys.copy()
    assert (twin.num_tokens, twin.num_hashed, twin.identity) == (40, 6, keys.identity)
    keys.append([1, 2, 3, 4])
    twin.append([9, 9, 9, 9])
    assert keys.hash_more(99) == twin.hash_more(99) == 0
    media = [MediaSpan(IMAGE, 17, 2)]
    assert all_digests(keys) == all_digests(keys_of([*range(40), 1, 2, 3, 4], media=media))
    assert all_digests(twin) == all_digests(keys_of([*range(40), 9, 9, 9, 9], media=media))


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_blocks_of_several_hash_blocks_have_the_digest_of_their_last(step: int) -> None:
    keys = keys_of(range(23 * H))
    every = all_digests(keys_of(range(23 * H)))
    count = 23 // step
    assert as_bytes(keys.digests(step, 0, count)) == every[step - 1 : count * step : step]
    assert as_bytes(keys.digests(step, 1, 3)) == every[2 * step - 1 : 3 * step : step]
    assert keys.digests(step, 2, 2).shape == (0, 4)


def test_digests_are_contiguous_read_only_rows_and_hash_only_what_is_asked() -> None:
    keys = keys_of(range(100))
    rows = keys.digests(2, 1, 4)
    assert rows.shape == (3, 4)
    assert rows.dtype == np.uint64
    assert rows.flags.c_contiguous
    assert not rows.flags.writeable
    assert keys.num_hashed == 8
    assert not keys.tokens(0, 5).flags.writeable


def test_only_full_hash_blocks_have_digests() -> None:
    keys = keys_of(range(11))
    assert (keys.num_tokens, keys.num_blocks, keys.hash_block_size) == (11, 2, H)
    for step, start, stop in [(1, 0, 3), (2, 0, 2), (3, 0, 1), (1, -1, 1), (1, 2, 1), (0, 0, 0)]:
        with pytest.raises(UsageError):
            keys.digests(step, start, stop)
    with pytest.raises(UsageError):
        keys.hash_more(-1)
    assert keys.num_hashed == 0


@pytest.mark.parametrize("bounds", [(-1, 2), (2, 1), (0, 12)])
def test_tokens_outside_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        keys_of(range(11)).tokens(*bounds)


@pytest.mark.parametrize("count", [-1, 12, 1.0, True])
def test_truncate_keeps_between_no_and_all_tokens(count: object) -> None:
    with pytest.raises(UsageError):
        keys_of(range(11)).truncate(cast("int", count))


@pytest.mark.parametrize("size", [0, -4, 4.0, True, "4", 2**40])
def test_the_hash_block_size_is_a_sensible_integer(size: object) -> None:
    with pytest.raises(ConfigError):
        keys_of(range(8), hash_block_size=cast("int", size))


@pytest.mark.parametrize("value", [1, b"a", ["a"]])
def test_salt_and_adapter_are_text(value: object) -> None:
    with pytest.raises(UsageError, match="salt"):
        keys_of(range(8), salt=cast("str", value))
    with pytest.raises(UsageError, match="adapter"):
        keys_of(range(8), adapter=cast("str", value))


@pytest.mark.parametrize(
    ("digest", "start", "length"),
    [(b"", 0, 1), ("ab", 0, 1), (IMAGE, -1, 1), (IMAGE, 0, 0), (IMAGE, 0, -2), (IMAGE, 1.5, 1), (IMAGE, 0, True)],
)
def test_media_spans_are_validated(digest: object, start: object, length: object) -> None:
    with pytest.raises(UsageError):
        MediaSpan(cast("bytes", digest), cast("int", start), cast("int", length))


@pytest.mark.parametrize("wrong", [(IMAGE, 0, 4), {}, None])
def test_media_must_be_spans(wrong: object) -> None:
    with pytest.raises(UsageError, match="MediaSpan"):
        keys_of(range(8), media=cast("list[MediaSpan]", [wrong]))


def test_a_sibling_has_the_salt_adapter_and_media_of_its_twin_and_tokens_of_its_own() -> None:
    """Law 10: it hashes as if it had been made from the same fields."""
    media = [MediaSpan(IMAGE, 5, 3)]
    keys = keys_of(range(20), salt="s", adapter="a", media=media)
    before = all_digests(keys)
    assert all_digests(keys.sibling(range(30))) == all_digests(keys_of(range(30), salt="s", adapter="a", media=media))
    assert all_digests(keys.sibling(range(30), media=())) == all_digests(keys_of(range(30), salt="s", adapter="a"))
    assert keys.sibling([]).identity == keys.identity
    assert all_digests(keys) == before


@pytest.mark.parametrize("media", [5, None, ["image"]])
def test_media_that_are_none_are_refused(media: Any) -> None:  # noqa: ANN401  # anything
    with pytest.raises(UsageError, match="media must be MediaSpan values"):
        keys_of(range(20), media=media)
