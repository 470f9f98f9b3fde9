"""`aiokv serve` as a process, and clients whose prompts come back after the GPU tier has let go of them."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import typer

from aiokv_engine.server.command import register
from tests.dashboards.processes import first_line, started

__all__ = ["running_server"]

GPU_BLOCKS: Final = 49
"""Room for one of the prompts: by the time one comes back it is in the CPU tier only."""
PROMPTS: Final = tuple(f"{number} " * 240 for number in range(6))
TURNS: Final = tuple(prompt for number in range(6) for prompt in (PROMPTS[number], PROMPTS[number]))
"""Each twice: the second one finds the first on the GPU."""


@contextmanager
def running_server(model: Path) -> Iterator[int]:
    """Serve `model` to some clients; gives the port, and fails unless the server ended well when told to."""
    command = [sys.executable, "-m", "tests.dashboards.served", "serve", "--model", str(model), "--port", "0"]
    command += ["--gpu-blocks", str(GPU_BLOCKS), "--cpu-blocks", "512"]
    with started(command) as process:
        (api,) = re.findall(r"API (\S+/v1),", first_line(process))
        with _asking(api, model=model.stem):
            yield urlsplit(api).port or 0
        process.terminate()
    assert process.returncode == 0


@contextmanager
def _asking(api: str, *, model: str) -> Iterator[None]:
    """One client in a thread of its own, who asks all the while."""
    ended = threading.Event()

    def ask() -> None:
        for prompt in cycle(TURNS):
            if ended.wait(0.05):
                return
            body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4}).encode()
            with urlopen(Request(f"{api}/completions", body, {"Content-Type": "application/json"}), timeout=20) as got:
                got.read()

    client = threading.Thread(target=ask)
    client.start()
    try:
        yield
    finally:
        ended.set()
        client.join(30)


if __name__ == "__main__":
    app = typer.Typer()
    app.callback()(lambda: None)  # with one command only, Typer would not want its name
    register(app)
    app()
