"""The choices of a request, without HTTP: what its reader gets when it ends early."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from aiokv import Hit
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.sampling import Sampling
from aiokv_engine.scheduler import Engine
from aiokv_engine.server.choices import Choices, Generation
from aiokv_engine.server.errors import ApiError
from aiokv_engine.server.gate import Gate
from aiokv_engine.server.prompts import ChoicePlan
from aiokv_engine.serving import Sizes, open_serving
from tests.engine.cases import Gate as StepGate
from tests.serve.cases import PATIENCE

SIZES = Sizes(gpu_blocks=65, cpu_blocks=128)


def choices_of(loaded: LoadedModel, engine: Engine, *, hits: list[Hit]) -> Choices:
    """One choice of up to 100 tokens; `hits` grows with every one of them."""
    generation = Generation(
        request_id="one", stops=(), stop_ids=frozenset(), sampling=Sampling(), salt=None, on_token=hits.append
    )
    plans = [ChoicePlan(token_ids=[9] * 20, max_new_tokens=100)]
    return Choices(engine, tokenizer=loaded.tokenizer, plans=plans, generation=generation)


async def until_said(hits: list[Hit], *, tokens: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while len(hits) < tokens:  # noqa: ASYNC110  # looked at from outside
            await asyncio.sleep(0.005)


async def test_who_is_cut_off_gets_what_there_is_and_then_the_reason_again_and_again(
    tiny: LoadedModel, steps: StepGate
) -> None:
    hits: list[Hit] = []
    async with open_serving(tiny.llama, sizes=SIZES) as serving:
        choices = choices_of(tiny, serving.engine, hits=hits)
        steps.close_at(4)
        with choices.generating(Gate(max_queue=1).take_seats(1)):
            await until_said(hits, tokens=3)
            choices.cut_off()
            assert len(await choices.next_pieces()) == 3
            for _ in range(2):
                with pytest.raises(ApiError) as error:
                    await choices.next_pieces()
                assert error.value.code == "cut_off"
        steps.open()
        await serving.engine.wait_idle()
        assert serving.kv.audit().leases == ()


async def test_who_still_runs_when_the_engine_closes_is_cut_off(
    tiny: LoadedModel, steps: StepGate, caplog: pytest.LogCaptureFixture
) -> None:
    hits: list[Hit] = []
    with ExitStack() as generating:
        async with open_serving(tiny.llama, sizes=SIZES) as serving:
            choices = choices_of(tiny, serving.engine, hits=hits)
            steps.close_at(3)
            generating.enter_context(choices.generating(Gate(max_queue=1).take_seats(1)))
            await until_said(hits, tokens=2)
            asyncio.get_running_loop().call_soon(steps.open)
        assert len(await choices.next_pieces()) >= 2
        with pytest.raises(ApiError) as error:
            await choices.next_pieces()
    assert error.value.code == "cut_off"
    assert not caplog.records
