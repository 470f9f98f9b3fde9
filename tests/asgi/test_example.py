"""The README's example of an async frontend runs as it stands: built at import, before there is an event loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "tests/asgi/example_app.py"
DRIVER = """
import asyncio, json
import httpx
from tests.asgi.example_app import app
from tests.asgi.support import served

async def main():
    async with served(app) as server, httpx.AsyncClient(base_url=server.origin) as client:
        prompt = list(range(100))
        hits = [
            (await client.post("/generate", params={"request_id": name}, json=prompt)).json() for name in ("a", "b")
        ]
        paths = ("/metrics", "/health", "/ready", "/live", "/kv/audit")
        statuses = {path: (await client.get(path)).status_code for path in paths}
        document = list((await client.get("/openapi.json")).json()["paths"])
        return {"hits": hits, "statuses": statuses, "document": document}

print(json.dumps(asyncio.run(main())))
"""


def run_example() -> Any:  # noqa: ANN401  # JSON
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, check=False, cwd=ROOT, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_example_serves_with_metrics_probes_and_live_page() -> None:
    found = run_example()
    assert found["hits"] == [{"gpu": 0, "cpu": 0, "computed": 100}, {"gpu": 96, "cpu": 0, "computed": 4}]
    assert found["statuses"] == {"/metrics": 200, "/health": 200, "/ready": 200, "/live": 200, "/kv/audit": 404}
    assert found["document"] == ["/generate"]


def test_the_routes_need_starlette_and_no_server() -> None:
    """Also no tensor library: a process that only watches must stay light."""
    names = ("starlette", "fastapi", "uvicorn", "httpx", "torch")
    driver = f"import sys, aiokv_asgi; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "['starlette']"


def test_the_example_is_short() -> None:
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 30
