"""schemathesis: what the OpenAPI document allows is answered, what it forbids is refused, all as the document says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis import Case
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import positive_data_acceptance

from aiokv_engine.model_file import LoadedModel
from tests.serve.cases import PATIENCE, running

EXAMPLES = 40
UNSAID: dict[int, list[str | None]] = {
    400: ["context_length_exceeded"],
    404: ["model_not_found", None],
}  # what a schema cannot say beforehand
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
OPERATIONS = [
    (POSITIVE, "POST", "/v1/completions"),
    (NEGATIVE, "POST", "/v1/completions"),
    (POSITIVE, "POST", "/v1/chat/completions"),
    (NEGATIVE, "POST", "/v1/chat/completions"),
    (POSITIVE, "GET", "/v1/models"),
    (POSITIVE, "GET", "/v1/models/{model}"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server in another thread, as schemathesis calls it synchronously."""

    url: str
    schema: BaseSchema


@pytest.fixture(scope="module")
def served(tiny: LoadedModel) -> Iterator[Served]:
    urls: list[str] = []
    has_begun, may_end = threading.Event(), threading.Event()

    async def main() -> None:
        async with running(tiny, gpu_blocks=9) as server:  # short answers
            urls.append(server.url)
            has_begun.set()
            await asyncio.to_thread(may_end.wait)
            await server.assert_all_given_back()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert has_begun.wait(PATIENCE)
        document = httpx.get(f"{urls[0]}/openapi.json").json()
        yield Served(url=urls[0], schema=schemathesis.openapi.from_dict(document))
    finally:
        may_end.set()
        thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "method", "path"), OPERATIONS, ids=str)
def test_every_answer_is_as_documented(served: Served, mode: GenerationMode, method: str, path: str) -> None:
    operation = served.schema[path][method]
    statuses: list[int] = []

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Case[Any]) -> None:
        assume(not _has_whole_floats(case.body))
        response = case.call(base_url=served.url, timeout=PATIENCE)
        statuses.append(response.status_code)
        case.validate_response(response, excluded_checks=[positive_data_acceptance])
        if mode is POSITIVE and response.status_code != 200:
            assert response.json()["error"]["code"] in UNSAID[response.status_code]

    call()
    assert (200 in statuses) == (mode is POSITIVE and "{" not in path)


def _has_whole_floats(value: object) -> bool:
    """JSON Schema takes 1.0 for an integer; the API, as OpenAI's, does not."""
    if isinstance(value, dict):
        return any(map(_has_whole_floats, value.values()))
    if isinstance(value, list):
        return any(map(_has_whole_floats, value))
    return isinstance(value, float) and value.is_integer()
