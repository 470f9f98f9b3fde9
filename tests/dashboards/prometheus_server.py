"""A real Prometheus on a free port of this machine, and what a test asks it."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, final
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.dashboards.processes import started

__all__ = ["Prometheus", "Sample", "prometheus_scrapes", "require_prometheus"]

PATIENCE_S = 90.0
CONFIG = """
global:
  scrape_interval: 1s
  evaluation_interval: 1s
rule_files: {rules}
scrape_configs:
  - job_name: aiokv
    static_configs:
      - targets: {targets}
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One series of an answer, and its value now."""

    labels: dict[str, str]
    value: float


@final
class Prometheus:
    """Asks one server over HTTP."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, expr: str) -> list[Sample]:
        """The answer to an instant query; an expression that the server refuses fails the test."""
        found = self.get("/api/v1/query", query=expr)["result"]
        return [Sample(labels=one["metric"], value=float(one["value"][1])) for one in found]

    def refuses(self, expr: str) -> bool:
        """Whether a query is not PromQL at all."""
        try:
            self.ask(expr)
        except HTTPError as error:
            return error.code == HTTPStatus.BAD_REQUEST
        return False

    def rules(self) -> list[dict[str, Any]]:
        """Every loaded rule, with its health and its last error."""
        groups = self.get("/api/v1/rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def wait_until(self, expr: str, *, answers: int = 1) -> None:
        """Until `expr` has so many series."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self._answers_so_far(expr)) < answers:
            assert time.monotonic() < deadline, f"Prometheus has no answer to {expr}"
            time.sleep(0.2)

    def _answers_so_far(self, expr: str) -> list[Sample]:
        try:
            return self.ask(expr)
        except URLError:
            return []

    def get(self, path: str, **arguments: str) -> dict[str, Any]:
        """What the HTTP API answers, without its envelope."""
        with urlopen(f"{self.url}{path}?{urlencode(arguments)}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", answer
        data: dict[str, Any] = answer["data"]
        return data


def require_prometheus() -> str:
    """The path of the server's program; skips where there is none."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed (Debian: apt-get install prometheus)")
    return program


@contextmanager
def prometheus_scrapes(ports: list[int], *, rules: list[Path], folder: Path) -> Iterator[Prometheus]:
    """A server that scrapes these ports of this machine every second and evaluates `rules` as often."""
    program, port = require_prometheus(), _find_free_port()
    config = folder / "prometheus.yml"
    targets = [f"127.0.0.1:{target}" for target in ports]
    config.write_text(CONFIG.format(rules=json.dumps([str(rule) for rule in rules]), targets=json.dumps(targets)))
    command = [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with started(command) as process:
        yield Prometheus(port)
        process.terminate()


def _find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
