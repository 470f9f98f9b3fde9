"""What runs of the machine draw: caches small enough that every request meets the others. Needs hypothesis."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from aiokv.core.store_policy import StoreSettings
from aiokv.model.plan import Outcome, StorePolicy
from aiokv.model.spec import CacheGeometry, ChunkedLocal, FullAttention, GroupSpec, RecurrentState, SlidingWindow
from aiokv.testing.driver import Setup
from aiokv.testing.streams import FORKS

__all__ = ["CHUNKS", "KINDS", "LONGEST_PROMPT", "OUTCOMES", "PICKS", "PROMPTS", "RARELY", "SELDOM", "STREAMS", "setups"]

LONGEST_PROMPT: Final = 60
STREAMS: Final = st.integers(0, len(FORKS) - 1)
PROMPTS: Final = st.integers(1, LONGEST_PROMPT) | st.sampled_from([33, 41, 49, 57])
PICKS: Final = st.integers(0, 7)
CHUNKS: Final = st.sampled_from([None, None, None, 1, 4, 8])
OUTCOMES: Final = st.sampled_from([Outcome.OK, Outcome.OK, Outcome.FAILED])
RARELY: Final = st.sampled_from(range(6)).map(lambda dice: dice == 4)
SELDOM: Final = st.sampled_from(range(3)).map(lambda dice: dice == 1)
KINDS: Final = ("full", "full", "window", "chunked", "recurrent")
"""Kinds of groups, by how often they are drawn."""


@st.composite
def setups(draw: st.DrawFn, *, kinds: tuple[str, ...] = KINDS) -> Setup:
    """One to three groups of these kinds over small pools, one to three ranks, any store policy."""
    count = draw(st.sampled_from([1, 1, 2, 3]))
    return Setup(
        geometry=CacheGeometry(
            groups=tuple(draw(_groups(f"g{i}", kinds=kinds)) for i in range(count)), hash_block_size=4
        ),
        gpu_blocks=draw(st.sampled_from([40, 30, 23, 16, 11, 7, 3])),
        cpu_blocks=draw(st.sampled_from([64, 64, 40, 20, 5, 0])),
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1])),
        slice_blocks=draw(st.sampled_from([1024, 1, 2, 3, 5])),
        stores=draw(_store_settings()),
        world_size=draw(st.sampled_from([2, 3, 1])),
        hint_quota=draw(st.sampled_from([1.0, 0.5, 0.2])),
    )


@st.composite
def _groups(draw: st.DrawFn, name: str, *, kinds: tuple[str, ...]) -> GroupSpec:
    block = draw(st.sampled_from([4, 4, 4, 8]))
    reach = draw(st.integers(1, 4 * block))
    lookahead = draw(RARELY)
    match draw(st.sampled_from(kinds)):
        case "full":
            return FullAttention(name, block_size=block, lookahead=lookahead)
        case "window":
            return SlidingWindow(name, block_size=block, window=reach, lookahead=lookahead)
        case "chunked":
            return ChunkedLocal(name, block_size=block, chunk=reach)
        case _:
            return RecurrentState(name, block_size=block)


@st.composite
def _store_settings(draw: st.DrawFn) -> StoreSettings:
    return StoreSettings(
        policy=draw(st.sampled_from(StorePolicy)),
        lazy_fraction=draw(st.sampled_from([0.1, 0.3, 1.0])),
        selective_count=draw(st.integers(1, 3)),
    )
