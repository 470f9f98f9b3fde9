"""What has not come since a moment is known not to have; what has is never overlooked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiokv.core.arrivals import Arrivals
from aiokv.core.epoch_index import EpochIndex
from aiokv.model.ids import DigestArray


def digests(first: int, stop: int) -> DigestArray:
    rng = np.random.default_rng(first)
    return rng.integers(1 << 63, size=(stop - first, 4), dtype=np.uint64)


@given(steps=st.lists(st.integers(0, 9) | st.none(), max_size=40))
def test_nothing_that_came_since_a_moment_is_overlooked(steps: list[int | None]) -> None:
    """Invariant 6. A number is a key that comes, None the end of a moment."""
    keys = digests(0, 10)
    arrivals = Arrivals(capacity=4)  # so few places that keys share them
    came: list[int] = []
    moments: list[tuple[int, int]] = []
    for step in steps:
        if step is None:
            moments.append((arrivals.begin_moment(), len(came)))
        else:
            arrivals.note(keys[step : step + 1])
            came.append(step)
    for moment, start in moments:
        assert arrivals.may_have_come(keys, since=moment)[came[start:]].all()


def test_most_of_what_has_not_come_is_known_not_to_have() -> None:
    arrivals = Arrivals(capacity=1 << 20)
    arrivals.note(digests(0, 5000))
    moment = arrivals.begin_moment()
    arrivals.note(digests(10_000, 11_000))
    assert arrivals.may_have_come(digests(10_000, 11_000), since=moment).all()
    assert arrivals.may_have_come(digests(0, 5000), since=moment).mean() < 0.05
    assert not arrivals.may_have_come(digests(0, 5000), since=arrivals.begin_moment()).any()


@pytest.mark.parametrize("capacity", [1, 2, 3, 1000])
def test_an_index_notes_what_is_inserted(capacity: int) -> None:
    index, keys = EpochIndex(capacity), digests(0, 1)
    moment = index.begin_moment()
    assert not index.may_have_come(keys, since=moment).any()
    index.insert(np.array([0]), keys, group=0)
    assert index.may_have_come(keys, since=moment).all()
    assert not index.may_have_come(keys, since=index.begin_moment()).any()
