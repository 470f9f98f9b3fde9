"""Questions about masks, against numpy's own answers."""

from __future__ import annotations

import numpy as np
import pytest

from aiokv.core.masks import count_leading, has_any, is_all
from aiokv.model.ids import BoolArray

WHOLE = np.array([True, True, False, True] * 600, np.bool_)
MASKS: list[BoolArray] = [
    np.zeros(0, np.bool_), np.ones(1, np.bool_), np.zeros(1, np.bool_), np.ones(8_192, np.bool_),
    np.zeros(8_192, np.bool_), WHOLE, WHOLE[::2], WHOLE[1::2], WHOLE[::-1], WHOLE[2:3], np.arange(70) < 69,
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=range(len(MASKS)))
def test_the_answers_are_those_of_numpy(mask: BoolArray) -> None:
    assert is_all(mask) == mask.all()
    assert has_any(mask) == mask.any()
    assert count_leading(mask) == len([*np.flatnonzero(np.logical_and.accumulate(mask))])
