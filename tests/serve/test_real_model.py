"""The served language model: it answers in sentences, from every tier the same, and says where tokens came from."""

from __future__ import annotations

import signal
from pathlib import Path

import openai
import pytest

from aiokv_engine.demo_texts import STORY
from tests.serve.test_process import serving, told

pytestmark = [pytest.mark.weights, pytest.mark.timeout(240)]
QUESTION = "What is the capital of France?"


def test_it_answers_and_reuses_what_it_has_computed(real_path: Path, tmp_path: Path) -> None:
    """The GPU pool holds one long prompt: the second one sends the first to the CPU tier."""
    with serving(real_path, tmp_path, "--gpu-blocks", "48", "--cpu-blocks", "200") as server:
        with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", timeout=120) as client:
            short = client.chat.completions.create(
                model="served", messages=[{"role": "user", "content": QUESTION}], max_tokens=24
            )
            first = _ask(client, STORY[:2400])
            again = _ask(client, STORY[:2400])
            _ask(client, STORY[-2400:])
            back = _ask(client, STORY[:2400])
        server.signal(signal.SIGTERM)
        assert server.end() == (0, told(model=real_path.name))
    assert "Paris" in (short.choices[0].message.content or "")
    assert first[0] == again[0] == back[0]
    assert first[1:] == (0, 0)
    assert again[1] >= 256
    assert again[2] == 0
    assert back[2] > 0, "nothing came from the CPU tier"


def _ask(client: openai.OpenAI, text: str) -> tuple[str, int, int]:
    """The streamed answer, and how many tokens of its prompt came from the GPU and the CPU tier."""
    stream = client.completions.create(
        model="served", prompt=text, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    said = ""
    for chunk in stream:
        said += chunk.choices[0].text if chunk.choices else ""
        usage = chunk.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    extra = usage.prompt_tokens_details.model_extra or {}
    return said, extra["gpu_cached_tokens"], extra["cpu_cached_tokens"]
