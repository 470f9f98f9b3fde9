"""From a checked request to the tokens of each choice's prompt, and whether they can ever be answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from aiokv import UsageError
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.errors import ApiError
from aiokv_engine.server.schema import ChatMessage, ChatRequest, CompletionRequest

__all__ = ["ChoicePlan", "Prompts"]

_DONE_ON_THE_LOOP: Final = 512  # characters and tokens in all; under 0.5 ms
_MESSAGE_SIZE: Final = 16  # characters that a template adds to a message, about
_LONGEST_REASON: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePlan:
    """What one choice is generated from. The answer has at most `max_new_tokens`."""

    token_ids: Sequence[int]
    max_new_tokens: int


@final
class Prompts:
    """Tokenises for one model; long prompts in a thread. `limit` bounds prompt and answer together, in tokens."""

    __slots__ = ("_loaded", "limit")

    def __init__(self, loaded: LoadedModel, *, limit: int) -> None:
        self._loaded = loaded
        self.limit = limit

    async def of_completion(self, request: CompletionRequest) -> list[ChoicePlan]:
        """Returns a plan per choice; raises `ApiError` if one cannot be answered."""
        size = sum(map(len, request.prompts))

        def make_plans() -> list[ChoicePlan]:
            arrays = [self._tokens(prompt) for prompt in request.prompts]
            return [self._plan(tokens, request=request, param="prompt") for tokens in arrays]

        return await _run(make_plans, size=size)

    async def of_chat(self, request: ChatRequest) -> list[ChoicePlan]:
        """Returns the plan of the one choice; raises `ApiError` if it cannot be answered."""
        texts = [(message, message.text) for message in request.messages]
        size = sum(len(text) + _MESSAGE_SIZE for _, text in texts)

        def make_plans() -> list[ChoicePlan]:
            tokens = self._loaded.tokenizer.encode(self._render(texts))
            return [self._plan(tokens, request=request, param="messages")]

        return await _run(make_plans, size=size)

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        tokenizer = self._loaded.tokenizer
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        if max(prompt) >= tokenizer.vocab_size:
            message = f"prompt: token ids are smaller than {tokenizer.vocab_size}"
            raise ApiError(message, param="prompt", code="invalid_parameter")
        return prompt

    def _render(self, texts: Sequence[tuple[ChatMessage, str]]) -> str:
        messages = [
            {"role": "system" if message.role == "developer" else message.role, "content": text}
            for message, text in texts
        ]
        try:
            return self._loaded.template.render(messages)
        except UsageError as error:
            raise ApiError(str(error)[:_LONGEST_REASON], param="messages", code="invalid_parameter") from None

    def _plan(self, tokens: list[int], *, request: CompletionRequest | ChatRequest, param: str) -> ChoicePlan:
        """Refuses what no empty pool could hold; a length that the client did not ask for gives way."""
        room = self.limit - len(tokens)
        wanted = request.answer_tokens if request.states_length else max(1, min(request.answer_tokens, room))
        if not tokens:
            raise ApiError(f"{param}: has no tokens", param=param, code="invalid_parameter")
        if wanted > room:
            raise ApiError.too_long(tokens=len(tokens) + wanted, limit=self.limit, param=param)
        return ChoicePlan(token_ids=tokens, max_new_tokens=wanted)


async def _run(make_plans: Callable[[], list[ChoicePlan]], *, size: int) -> list[ChoicePlan]:
    return make_plans() if size <= _DONE_ON_THE_LOOP else await asyncio.to_thread(make_plans)
