"""What requests may say: OpenAI's completions and chat completions, as far as this server answers them.

Fields that it knows but cannot honour are there with the one value that asks for nothing: any other is refused by name,
as is every field that is not here. Nothing is coerced; a list stops at its first wrong element, so that refusing a long
one costs no more than reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from aiokv_engine.sampling import Sampling

__all__ = [
    "CHAT_TOKENS",
    "COMPLETION_TOKENS",
    "MAX_STOPS",
    "ChatMessage",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "StreamOptions",
    "UsageReport",
]

COMPLETION_TOKENS: Final = 16
"""Tokens of a completion that says no number; OpenAI's own default."""
CHAT_TOKENS: Final = 256
"""Tokens of a chat answer that says no number. OpenAI's is unbounded: here each token is reserved beforehand."""
MAX_STOPS: Final = 4
_LONGEST_STOP: Final = 256
_MAX_PROMPTS: Final = 128
_MAX_MESSAGES: Final = 1024
_LONGEST_NAME: Final = 256

TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
TokenArray: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text: TypeAlias = Annotated[str, Field(min_length=1)]
Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=_LONGEST_STOP)]
Name: TypeAlias = Annotated[str, Field(max_length=_LONGEST_NAME)]
Tokens: TypeAlias = Annotated[int, Field(ge=1, lt=2**31)]
Zero: TypeAlias = Annotated[float, Field(ge=0, le=0)]
One: TypeAlias = Annotated[int, Field(ge=1, le=1)]


class _Closed(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class UsageReport(Enum):
    """How often a stream tells the usage."""

    NEVER = "never"
    LAST = "last"
    """In a chunk of its own at the end."""
    ALWAYS = "always"
    """With every chunk as well, as far as it has come."""


class StreamOptions(_Closed):
    """How a stream is sent."""

    include_usage: bool | None = Field(default=None, description="Send the usage in a chunk of its own at the end.")
    continuous_usage_stats: bool | None = Field(default=None, description="Then send that so far with every chunk.")


class GenerationRequest(_Closed):
    """What both kinds of requests say."""

    model: Name | None = Field(default=None, description="The name of the served model, which is the default.")
    max_tokens: Tokens | None = Field(default=None, description="The longest answer, in tokens.")
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = Field(
        default=None, description="The answer ends before the first of these texts."
    )
    stream: bool | None = Field(default=None, description="Send the answer as server-sent events while it is computed.")
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(default=None, description="0, greedy, by default.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(default=None, description="Ignored by greedy answers.")
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = Field(
        default=None, description="The same seed draws the same answer from the same logits."
    )
    user: Name | None = Field(default=None, description="Ignored.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)] | None = Field(
        default=None, description="Blocks are shared between requests of the same salt only."
    )
    ignore_eos: bool | None = Field(default=None, description="Go on after the model's end of text; for benchmarks.")
    n: One | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = Field(default=None, description="Ignored.")
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(temperature=self.temperature or 0.0, top_p=self.top_p or 1.0, seed=self.seed)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def states_length(self) -> bool:
        """Whether the client asks for a number of tokens."""
        return self.max_tokens is not None

    @property
    def usage_report(self) -> UsageReport:
        """How often a stream tells the usage."""
        if not (self.stream_options and self.stream_options.include_usage):
            return UsageReport.NEVER
        return UsageReport.ALWAYS if self.stream_options.continuous_usage_stats else UsageReport.LAST


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: (
        Text
        | TokenArray
        | Annotated[list[Text], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenArray], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="A text, an array of token ids, or an array of either: then each is a choice of its own.")
    best_of: One | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: None = None

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """One prompt per choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        first = self.prompt[0]
        return [self.prompt] if isinstance(first, int) else self.prompt  # type: ignore[list-item,return-value]  # the first element tells which of the lists it is

    @property
    def answer_tokens(self) -> int:
        """The longest answer."""
        return self.max_tokens or COMPLETION_TOKENS


class TextPart(_Closed):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Closed):
    """One message. What OpenAI's clients write into an answer beside its text may come back if it is null."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]
    name: Name | None = Field(default=None, description="Ignored.")
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    @property
    def text(self) -> str:
        """The content, parts on lines of their own."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class TextFormat(_Closed):
    """Answers are plain text."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Tokens | None = Field(
        default=None, description="The longest answer, in tokens; goes before max_tokens."
    )
    logprobs: Literal[False] | None = None
    top_logprobs: None = None
    tools: None = None
    tool_choice: Literal["none"] | None = None
    response_format: TextFormat | None = None

    @property
    def states_length(self) -> bool:
        """Whether the client asks for a number of tokens."""
        return (self.max_completion_tokens or self.max_tokens) is not None

    @property
    def answer_tokens(self) -> int:
        """The longest answer."""
        return self.max_completion_tokens or self.max_tokens or CHAT_TOKENS
