"""What a client is told of its request, word for word, and what it may leave out."""

from __future__ import annotations

from aiokv_engine.model_file import LoadedModel
from tests.serve.cases import MODEL, error_of, running

PLAIN_WORDS: list[tuple[dict[str, object], str]] = [
    ({"presence_penalty": 1}, "presence_penalty: is not supported"),
    ({"frequency_penalty": -0.5}, "frequency_penalty: is not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias: is not supported"),
    ({"store": True}, "store: is not supported"),
    ({"tools": [{}]}, "tools: is not supported"),
    ({"top_logprobs": 2}, "top_logprobs: is not supported"),
    ({"response_format": {"type": "json_object"}}, 'response_format: is not supported, but for {"type": "text"}'),
    ({"n": 2}, "n: only 1 is supported"),
    ({"temperature": 3}, "temperature: must be at most 2.0"),
    ({"temperature": "0"}, "temperature: must be a number"),
    ({"top_p": 0}, "top_p: must be greater than 0.0"),
    ({"max_tokens": 0}, "max_tokens: must be at least 1"),
    ({"max_tokens": 2**31}, f"max_tokens: must be less than {2**31}"),
    ({"max_tokens": 10**100}, "max_tokens: must be less than 2147483648"),
    ({"max_tokens": 1.5}, "max_tokens: must be a whole number"),
    ({"stream": "yes"}, "stream: must be true or false"),
    ({"stream_options": {"chunks": 1}}, "stream_options: has a field that is unknown or not supported"),
    ({"stream_options": 1}, "stream_options: must be an object"),
    ({"cache_salt": ""}, "cache_salt: must not be empty"),
    ({"user": "a" * 300}, "user: has at most 256 characters"),
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": ["a"] * 1025}, "messages.0: must be an object"),
    ({"messages": "hello"}, "messages: must be an array"),
    (
        {"messages": [{"role": "tool", "content": "a"}]},
        "messages.0.role: must be 'system', 'developer', 'user' or 'assistant'",
    ),
    (
        {"messages": [{"role": "user", "content": 1}]},
        'messages.0.content: must be a string or an array of parts {"type": "text", "text": string}',
    ),
]


async def test_faults_are_told_in_plain_words(tiny: LoadedModel) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
    async with running(tiny) as server:
        for said, message in PLAIN_WORDS:
            response = await server.client.post("/v1/chat/completions", json=chat | said)
            assert (response.status_code, error_of(response)["message"]) == (400, message)


async def test_without_a_model_the_one_there_is_answers(tiny: LoadedModel) -> None:
    messages = [{"role": "user", "content": "a"}]
    async with running(tiny) as server:
        for said in ({}, {"model": None}):
            text = await server.client.post("/v1/completions", json={"prompt": "a", **said})
            chat = await server.client.post("/v1/chat/completions", json={"messages": messages, **said})
            assert (text.status_code, chat.status_code) == (200, 200)
            assert text.json()["model"] == chat.json()["model"] == MODEL
