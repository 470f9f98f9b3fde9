"""Conversations of several turns: each alone without reuse, and all at once over pools they share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from aiokv import Hit
from aiokv_engine.demo_report import Concurrent
from aiokv_engine.demo_texts import CONVERSATIONS, Conversation
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.scheduler import Engine, Request

__all__ = ["Talks", "Turn", "compare_talks"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One answered turn."""

    token_ids: tuple[int, ...]
    hit: Hit


@final
class Talks:
    """Holds the demo's conversations through one engine. `new_tokens` bounds each answer."""

    __slots__ = ("_engine", "_loaded", "_new_tokens")

    def __init__(self, engine: Engine, *, loaded: LoadedModel, new_tokens: int) -> None:
        self._engine = engine
        self._loaded = loaded
        self._new_tokens = new_tokens

    async def hold_alone(self, *, step: Callable[[str], None]) -> list[list[Turn]]:
        """Holds one conversation after the other; each request has a salt of its own, so nothing is reused."""
        talks = []
        for number, conversation in enumerate(CONVERSATIONS, start=1):
            step(f"conversation {number} of {len(CONVERSATIONS)} alone, without a cache")
            talks.append(await self._hold(conversation, name=f"alone {number}", salt_of=str))
        return talks

    async def hold_together(self) -> list[list[Turn]]:
        """Holds all conversations at once; each goes on as soon as it is answered."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._hold(conversation, name=f"together {number}", salt_of=_no_salt))
                for number, conversation in enumerate(CONVERSATIONS, start=1)
            ]
        return [task.result() for task in tasks]

    async def _hold(self, conversation: Conversation, *, name: str, salt_of: Callable[[str], str | None]) -> list[Turn]:
        """Says every turn and waits for its answer, which becomes part of the next prompt."""
        loaded = self._loaded
        messages: list[dict[str, str]] = []
        turns = []
        for number, said in enumerate(conversation.turns, start=1):
            messages.append({"role": "user", "content": said})
            request = Request(
                request_id=f"{name}, turn {number}",
                token_ids=loaded.tokenizer.encode(loaded.template.render(messages)),
                max_new_tokens=self._new_tokens,
                stop_ids=loaded.tokenizer.stop_ids,
                salt=salt_of(f"{name}, turn {number}"),
            )
            answer = await self._engine.generate(request)
            messages.append({"role": "assistant", "content": loaded.tokenizer.decode(answer.token_ids)})
            turns.append(Turn(token_ids=answer.token_ids, hit=answer.hit))
        return turns


def compare_talks(found: list[list[Turn]], *, expected: list[list[Turn]]) -> Concurrent:
    """Sums where the prompts' tokens came from, and compares every answer with the expected one."""
    hits = [turn.hit for turns in found for turn in turns]
    return Concurrent(
        requests=len(found),
        turns=max(len(turns) for turns in found),
        gpu_tokens=sum(hit.gpu_tokens for hit in hits),
        cpu_tokens=sum(hit.cpu_tokens for hit in hits),
        compute_tokens=sum(hit.compute_tokens for hit in hits),
        tokens_equal=_answers(found) == _answers(expected),
    )


def _answers(talks: list[list[Turn]]) -> list[list[tuple[int, ...]]]:
    return [[turn.token_ids for turn in turns] for turns in talks]


def _no_salt(_: str) -> None:
    return None
