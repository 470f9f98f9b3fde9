"""Choosing tokens: greedy by default, drawn by probability otherwise, and repeatable by seed."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aiokv import UsageError
from aiokv_engine.sampling import Sampling, make_chooser

LOGITS = torch.tensor([0.5, 3.0, 1.0, 3.0, -2.0])


def draws(sampling: Sampling, count: int) -> list[int]:
    choose = make_chooser(sampling)
    return [choose(LOGITS) for _ in range(count)]


def test_without_a_temperature_the_likeliest_is_chosen() -> None:
    assert draws(Sampling(top_p=0.1, seed=4), 5) == [1] * 5


def test_draws_follow_the_probabilities() -> None:
    count = 20_000
    found = Counter(draws(Sampling(temperature=1.0, seed=1), count))
    for token, chance in enumerate(LOGITS.softmax(dim=-1).tolist()):
        assert abs(found[token] / count - chance) < 0.02


def test_a_higher_temperature_spreads_and_a_tiny_one_is_greedy() -> None:
    assert len(set(draws(Sampling(temperature=2.0, seed=1), 500))) == 5
    assert set(draws(Sampling(temperature=5e-324, seed=1), 500)) == {1, 3}


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, {1}), (0.6, {1, 3}), (0.9, {1, 3, 2}), (1.0, {0, 1, 2, 3, 4})])
def test_only_the_likeliest_of_so_much_probability_are_drawn(top_p: float, kept: set[int]) -> None:
    assert set(draws(Sampling(temperature=1.0, top_p=top_p, seed=3), 2000)) == kept


def test_no_more_are_drawn_than_have_the_probability() -> None:
    choose = make_chooser(Sampling(temperature=1.0, top_p=0.5, seed=3))
    assert len({choose(torch.tensor([0.0, 0.0])) for _ in range(50)}) == 1


def test_a_seed_repeats_and_no_seed_does_not() -> None:
    first, again = (draws(Sampling(temperature=1.5, seed=-7), 50) for _ in range(2))
    assert first == again
    assert draws(Sampling(temperature=1.5, seed=8), 50) != first
    assert draws(Sampling(temperature=1.5), 50) != draws(Sampling(temperature=1.5), 50)


@given(
    temperature=st.floats(1e-6, 2),
    top_p=st.floats(0.01, 1),
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1),
)
def test_what_is_drawn_is_always_a_token(temperature: float, top_p: float, logits: list[float]) -> None:
    choose = make_chooser(Sampling(temperature=temperature, top_p=top_p, seed=0))
    assert 0 <= choose(torch.tensor(logits)) < len(logits)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_what_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        Sampling(**wrong)  # type: ignore[arg-type]  # only floats are in it
