"""guidellm, a load generator that nobody here wrote, against the server with the real model.

It wants an environment of its own (`pip install guidellm==0.8.1` beside the CPU build of torch): `GUIDELLM_PYTHON`
names its interpreter. Prompts share prefixes that the GPU pool cannot hold at once, so that some come back from the CPU
tier.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aiokv_engine.gguf import read_gguf
from aiokv_engine.tokenizer import GgufTokenizer
from tests.serve.test_process import serving

PYTHON = os.environ.get("GUIDELLM_PYTHON", "")
REQUESTS = 24
STREAMS = 3
DATA = {
    "kind": "synthetic_text",
    "prompt_tokens": 40,
    "output_tokens": 8,
    "prefix_buckets": [{"bucket_weight": 100, "prefix_count": 5, "prefix_tokens": 512}],
}
pytestmark = [
    pytest.mark.weights,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="GUIDELLM_PYTHON names no interpreter with guidellm"),
]


def test_guidellm_gets_every_answer_and_finds_prefixes_in_both_tiers(real_path: Path, tmp_path: Path) -> None:
    tokenizer = _write_tokenizer(real_path, directory=tmp_path / "tokenizer")
    with serving(real_path, tmp_path, "--gpu-blocks", "120", "--cpu-blocks", "1024") as server:
        report = _run(str(server.client.base_url).rstrip("/"), tokenizer=tokenizer, directory=tmp_path)
        metrics = server.client.get("/metrics").text
    found = report["benchmarks"][0]["metrics"]
    tokens = {source: _prompt_tokens(metrics, source=source) for source in ("gpu", "cpu", "compute")}
    first_token = found["time_to_first_token_ms"]["successful"]
    print(f"first token: mean {first_token['mean']:.0f} ms, median {first_token['median']:.0f} ms; {tokens}")
    assert found["request_totals"]["successful"] == REQUESTS
    assert found["request_totals"]["errored"] == 0
    assert tokens["gpu"] > 0
    assert tokens["cpu"] > 0
    assert f'aiokv_serve_requests_total{{outcome="ok"}} {REQUESTS}.0' in metrics


def _write_tokenizer(model: Path, *, directory: Path) -> Path:
    directory.mkdir()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (directory / "tokenizer.json").write_text(GgufTokenizer(read_gguf(model)).as_json())
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _run(url: str, *, tokenizer: Path, directory: Path) -> dict[str, Any]:
    options = {
        "--backend": f"kind=openai_http,target={url},model=served,request_format=/v1/completions",
        "--profile": f"kind=concurrent,streams={STREAMS}",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={tokenizer}",
        "--data": json.dumps(DATA),
        "--output": f"kind=json,path={directory / 'report.json'}",
    }
    command = [PYTHON, "-m", "guidellm", "run", "--disable-progress"]
    command += [word for option in options.items() for word in option]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=directory, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return report


def _prompt_tokens(metrics: str, *, source: str) -> int:
    match = re.search(rf'^aiokv_prompt_tokens_total{{phase="first",source="{source}"}} (\S+)$', metrics, re.MULTILINE)
    assert match
    return int(float(match[1]))
