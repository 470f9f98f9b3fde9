"""What is taken for token ids, and what is said about the rest."""

from __future__ import annotations

from array import array
from collections import deque
from typing import cast

import numpy as np
import pytest
import torch

from aiokv.errors import UsageError
from aiokv.model.keys import BlockKeys
from aiokv.model.tokens import TokenIds

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def keys_of(token_ids: TokenIds) -> BlockKeys:
    return BlockKeys(token_ids, hash_block_size=4)


def digest_bytes(keys: BlockKeys) -> bytes:
    return keys.digests(1, 0, keys.num_blocks).tobytes()


IDS = [3, 1, 4, 1, 5, 9, 2, 6]
SAME_TOKENS: dict[str, object] = {
    "list": IDS,
    "tuple": tuple(IDS),
    "deque of integers": deque(IDS),
    "array": array("i", IDS),
    "memoryview": memoryview(array("q", IDS)),
    "int64": np.array(IDS),
    "uint8": np.array(IDS, np.uint8),
    "big-endian": np.array(IDS, ">i4"),
    "strided": np.array([IDS, IDS], np.int32).T[:, 0],
    "objects": np.array(IDS, object),
    "tensor": torch.tensor(IDS),
    "numpy scalars": [np.int64(i) for i in IDS],
}


@pytest.mark.parametrize("kind", SAME_TOKENS)
def test_token_ids_are_taken_in_any_integer_form(kind: str) -> None:
    keys = keys_of(cast("TokenIds", SAME_TOKENS[kind]))
    assert keys.tokens(0, 8).tolist() == IDS
    assert digest_bytes(keys) == digest_bytes(keys_of(IDS))


def test_the_whole_int32_range_is_accepted_and_inputs_are_not_aliased() -> None:
    given = np.array([INT32_MIN, -1, 0, INT32_MAX], np.int32)
    keys = keys_of(given)
    given[:] = 7
    assert keys.tokens(0, 4).tolist() == [INT32_MIN, -1, 0, INT32_MAX]


@pytest.mark.parametrize("empty", [[], (), range(0), np.array([]), torch.tensor([])])
def test_no_tokens_are_fine(empty: TokenIds) -> None:
    keys = keys_of(empty)
    assert (keys.num_tokens, keys.num_blocks, keys.hash_more(5)) == (0, 0, 0)


WRONG_TOKENS: dict[str, tuple[object, str]] = {
    "float": ([1, 2.0, 3], r"token 1 is 2\.0"),
    "text inside": ([1, "2"], r"token 1 is '2'"),
    "nested": ([[1], [2]], r"token 0 is \[1\]"),
    "none": ([1, None], "token 1 is None"),
    "too large": ([1, 2, INT32_MAX + 1], f"token 2 is {INT32_MAX + 1}, out of int32"),
    "too small": ([INT32_MIN - 1], f"token 0 is {INT32_MIN - 1}, out of int32"),
    "huge": ([10**30], "token 0"),
    "range": (range(INT32_MAX, INT32_MAX + 2), f"token 1 is {INT32_MAX + 1}"),
    "str": ("123", "str"),
    "bytes": (b"123", "bytes"),
    "int": (5, "int"),
    "set": ({1, 2}, "set"),
    "generator": ((i for i in range(3)), "generator"),
    "float array": (np.array([1.0]), "float64"),
    "float tensor": (torch.tensor([1.0, 2.0]), "float32"),
    "bool array": (np.array([True]), "bool"),
    "matrix": (np.zeros((2, 2), np.int32), "one-dimensional"),
    "scalar": (np.int32(3), "one-dimensional"),
    "int64 array": (np.array([0, INT32_MIN - 1]), "token 1"),
    "uint64 array": (np.array([0, 2**63], np.uint64), f"token 1 is {2**63}"),
    "float objects": (np.array([1, 2.5], object), r"token 1 is 2\.5"),
    "device tensor": (torch.empty(3, dtype=torch.int64, device="meta"), "host memory"),
}


@pytest.mark.parametrize("kind", WRONG_TOKENS)
def test_what_are_no_int32_ids_is_refused_and_changes_nothing(kind: str) -> None:
    wrong, message = WRONG_TOKENS[kind]
    keys = keys_of(range(10))
    before = digest_bytes(keys)
    with pytest.raises(UsageError, match=message):
        keys.append(cast("TokenIds", wrong))
    assert (keys.num_tokens, digest_bytes(keys)) == (10, before)
