"""What is refused: in the one shape, with the parameter's name, without repeating what was sent, and for nothing."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from aiokv import UsageError
from aiokv_engine.model_file import LoadedModel
from aiokv_engine.server.body import MAX_BODY_BYTES
from tests.engine.cases import Gate
from tests.serve.cases import MODEL, Running, error_of, running

SECRET = "xyzzy-from-the-prompt"
_JSON = {"content-type": "application/json"}


async def post(server: Running, content: bytes, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
    response = await server.client.post(path, content=content, headers={"content-type": "application/json"})
    return response.status_code, error_of(response)


def body(**said: object) -> bytes:
    return json.dumps({"model": MODEL, "prompt": SECRET, **said}).encode()


INSIDE = ("input", "Value error", "validation", "dictionary", "instance", "is not valid", "constr")
"""Words of the library that checks."""
BAD_PARAMETERS: list[tuple[str, object]] = [
    ("temperature", 2.1),
    ("top_p", 0),
    ("top_p", 1.1),
    ("seed", 2**63),
    ("seed", 0.5),
    ("temperature", "0"),
    ("temperature", -1),
    ("n", 2),
    ("n", True),
    ("best_of", 2),
    ("echo", True),
    ("logprobs", 1),
    ("suffix", SECRET),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", "5"),
    ("max_tokens", True),
    ("max_tokens", 2**31),
    ("max_tokens", int("9" * 4300)),
    ("max_tokens", 1.5),
    ("stop", [""]),
    ("stop", ["a"] * 5),
    ("stop", "a" * 300),
    ("presence_penalty", 1),
    ("logit_bias", {"5": 1}),
    ("logit_bias", {SECRET: "a"}),
    ("metadata", {SECRET: 1}),
    ("stream_options", {SECRET: True}),
    ("stream", "yes"),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", ["a", 1]),
    ("prompt", [1, "a"]),
    ("prompt", [-1]),
    ("prompt", [True]),
    ("prompt", [10**9]),
    ("prompt", [2**70]),
    ("prompt", ["a"] * 129),
    ("prompt", {"text": "a"}),
    ("prompt", None),
    ("cache_salt", ""),
    ("never_heard_of", 1),
]
LENGTHS = ("max_tokens", "max_completion_tokens")
BAD_MESSAGES: list[tuple[object, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"content": SECRET}], "messages.0.role"),
    ([{"role": "tool", "content": SECRET}], "messages.0.role"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}], "messages.0"),
    ([{"role": "user", "content": SECRET, "tool_calls": [{}]}], "messages.0.tool_calls"),
    ([{"role": "user", "content": SECRET, "extra": 1}], "messages.0"),
]
MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"7",
    b'{"model":"tiny","prompt":"\xff\xfe"}',
    b'{"model":"tiny","prompt":"\\ud800"}',
    b'{"model":"tiny","prompt":"a","temperature":NaN}',
    b'{"model":"tiny","prompt":"a","temperature":Infinity}',
    b'{"model":"tiny","prompt":"a","temperature":1e999}',
    b'{"model":"tiny","prompt":"a","seed":' + b"9" * 50_000 + b"}",
    b'{"model":"tiny","prompt":' + b"[" * 100_000,
    b'{"model":"tiny","prompt":' + b"[" * 60 + b"1" + b"]" * 60 + b"}",
    b"[" * 500_000,
    b"{" + b",".join(b'"a%d":1' % key for key in range(50_000)) + b"}",
]


async def test_a_bad_parameter_is_named(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        before = server.serving.kv.snapshot()
        for param, value in BAD_PARAMETERS:
            status, error = await post(server, body(**{param: value}))
            assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), (param, value)
            assert SECRET not in error["message"]
            assert len(error["message"]) < 200
            assert not any(word in error["message"] for word in INSIDE), error["message"]
        assert server.serving.kv.snapshot() == before
        assert await server.metric("aiokv_serve_requests_total", outcome="invalid") == len(BAD_PARAMETERS)


async def test_the_first_token_id_beyond_the_vocabulary_is_refused_and_the_last_within_is_not(
    tiny: LoadedModel,
) -> None:
    size = tiny.tokenizer.vocab_size
    async with running(tiny) as server:
        assert (await server.complete([size - 1], max_tokens=1)).status_code == 200
        refused = await server.complete([5, size], max_tokens=1)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "prompt"


async def test_a_bad_message_is_named(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        for messages, place in BAD_MESSAGES:
            response = await server.chat(messages)
            error = error_of(response)
            assert (response.status_code, error["param"]) == (400, "messages"), messages
            assert error["message"].startswith(place)
            assert SECRET not in error["message"]


async def test_a_malformed_body_is_refused(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        for content in MALFORMED:
            for path in ("/v1/completions", "/v1/chat/completions"):
                status, error = await post(server, content, path)
                assert (status, error["type"]) == (400, "invalid_request_error"), content[:40]
                assert "Traceback" not in error["message"]
        assert (await server.complete("still there")).status_code == 200


async def test_a_body_that_is_not_json_by_its_header_is_refused(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            response = await server.client.post("/v1/completions", content=body(), headers={"content-type": kind})
            assert response.status_code == 415
            assert "Content-Type: application/json" in error_of(response)["message"]


async def test_a_body_over_the_limit_is_refused_by_its_announcement_and_by_its_bytes(tiny: LoadedModel) -> None:
    async def pieces() -> Any:  # noqa: ANN401  # an asynchronous generator of bytes
        for _ in range(MAX_BODY_BYTES // 65_536 + 2):
            yield b" " * 65_536

    headers = {"content-type": "application/json"}
    async with running(tiny) as server:
        announced = await server.client.post("/v1/completions", content=b" " * (MAX_BODY_BYTES + 1), headers=headers)
        chunked = await server.client.post("/v1/completions", content=pieces(), headers=headers)
        largest = await server.client.post("/v1/completions", content=b" " * MAX_BODY_BYTES, headers=headers)
        assert (await server.complete("still there")).status_code == 200
    assert (announced.status_code, chunked.status_code, largest.status_code) == (413, 413, 400)
    assert error_of(announced)["code"] == error_of(chunked)["code"] == "request_too_large"


async def test_every_other_model_does_not_exist(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        for name in ("gpt-4", "", "/etc/passwd", "../tiny", "tiny.gguf", "TINY"):
            response = await server.client.post("/v1/completions", json={"model": name, "prompt": "a"})
            error = error_of(response)
            assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert not name or name not in error["message"]
            looked_up = await server.client.get("/v1/models/" + name.replace("/", "%2F").replace(".", "%2E"))
            assert looked_up.status_code == 404
            error_of(looked_up)


async def test_paths_and_methods_that_do_not_exist_have_the_same_shape(tiny: LoadedModel) -> None:
    async with running(tiny) as server:
        missing = await server.client.post("/v1/embeddings", json={})
        slash = await server.client.post("/v1/completions/", json={})
        method = await server.client.get("/v1/completions")
        other = await server.client.delete("/v1/models")
    assert [response.status_code for response in (missing, slash, method, other)] == [404, 404, 405, 405]
    for response in (missing, slash, method, other):
        error_of(response)
    assert method.headers["allow"] == "POST"


async def test_a_prompt_that_can_never_fit_is_refused_at_once(tiny: LoadedModel) -> None:
    async with running(tiny, gpu_blocks=9) as server:
        limit = 8 * 16
        prompt = [5] * (limit - 10)
        fits = await server.complete(prompt, max_tokens=10)
        over = await server.complete(prompt, max_tokens=11)
        long = await server.complete("a" * 100_000, max_tokens=1)
        by_default = await server.complete(prompt)
        chat = await server.chat([{"role": "user", "content": "a" * 1000}])
        asked = [await server.chat([{"role": "user", "content": "a"}], **{key: limit}) for key in LENGTHS]
        await server.assert_all_given_back()
    assert fits.status_code == by_default.status_code == 200
    for response, param in ((over, "prompt"), (long, "prompt"), *((each, "messages") for each in (chat, *asked))):
        error = error_of(response)
        assert response.status_code == 400
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert str(limit) in error["message"]


async def test_a_full_queue_is_told_before_anything_is_tokenised(
    tiny: LoadedModel, steps: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One request holds the whole pool, another waits in a queue of one."""
    async with running(tiny, gpu_blocks=9, max_queue=1) as server:
        gate = server.server_app.service.gate
        steps.close()
        with server.background([5] * 100, max_tokens=20) as first:
            await server.until(lambda: gate.running == 1)
            with server.background([6] * 100, max_tokens=20) as second:
                await server.until(lambda: gate.queued == 1)
                assert await server.metric("aiokv_serve_queue_requests") == 1

                def tokenise(_: object, __: str) -> None:
                    raise AssertionError("a refused prompt was tokenised")

                with monkeypatch.context() as patch:
                    patch.setattr(type(tiny.tokenizer), "encode", tokenise)
                    refused = await server.complete("third")
                    malformed = await server.client.post("/v1/completions", content=b"{", headers=_JSON)
                steps.open()
                assert (await first).status_code == (await second).status_code == 200
        rejected = await server.metric("aiokv_serve_requests_total", outcome="rejected")
        await server.assert_all_given_back()
    assert refused.status_code == malformed.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert error_of(refused)["type"] == "rate_limit_error"
    assert rejected == 2


async def test_more_prompts_than_the_queue_holds_are_a_bad_request(tiny: LoadedModel) -> None:
    async with running(tiny, max_queue=3) as server:
        allowed = await server.complete(["a"] * 3)
        refused = await server.complete(["a"] * 4)
    assert allowed.status_code == 200
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_the_engine_is_an_internal_error_without_details(
    tiny: LoadedModel, steps: Gate, caplog: pytest.LogCaptureFixture, *, stream: bool
) -> None:
    async with running(tiny) as server:
        steps.fault = RuntimeError(f"secret of /some/file: {SECRET}")
        response = await server.complete(SECRET, stream=stream)
        steps.fault = None
        failed = await server.metric("aiokv_serve_requests_total", outcome="failed")
        assert (await server.complete("still there")).status_code == 200
        await server.assert_all_given_back()
    assert failed == 1
    assert "internal error" in response.text
    assert SECRET not in response.text
    assert "file" not in response.text
    assert response.status_code == (200 if stream else 500)
    assert "DONE" not in response.text
    assert SECRET not in caplog.text
    assert [record.levelno for record in caplog.records if record.name != "asyncio"] == [logging.ERROR]


async def test_a_fault_before_the_engine_is_one_as_well(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object, text: str) -> list[int]:
        raise RuntimeError(text)

    async with running(tiny) as server:
        with monkeypatch.context() as patch:
            patch.setattr(type(tiny.tokenizer), "encode", fail)
            response = await server.complete(SECRET)
        assert (await server.complete("still there")).status_code == 200
        await server.assert_all_given_back()
    assert response.status_code == 500
    assert error_of(response)["message"] == "internal error"
    assert SECRET not in caplog.text
    assert "RuntimeError" in caplog.text


async def test_a_template_that_refuses_is_a_bad_request(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object, __: object) -> str:
        raise UsageError("roles must alternate")

    async with running(tiny) as server:
        monkeypatch.setattr(type(tiny.template), "render", refuse)
        response = await server.chat([{"role": "user", "content": "a"}])
    assert response.status_code == 400
    assert error_of(response)["message"] == "roles must alternate"
